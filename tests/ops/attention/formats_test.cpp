// attention on keys and values of every format, each pair of them: against the oracle, and number by number for the
// formats that other tests of attention do not have.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

#include "tests/ops/attention/combinations.h"
#include "tests/reference/blocks.h"
#include "tests/reference/scaled_rows.h"
#include "tests/support/expected_support.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

using reference::Type;

struct Format {
  const char* name;
  std::optional<Type> type;  // none: that of the queries
};

constexpr std::array<Format, 5> kBelowAByte = {{{"q4_0", Type::kQ4_0},
                                                {"q4_1", Type::kQ4_1},
                                                {"q5_0", Type::kQ5_0},
                                                {"q5_1", Type::kQ5_1},
                                                {"iq4", Type::kIq4Nl}}};

constexpr std::array<Format, 3> kNumbers = {{{"e5m2", Type::kE5M2}, {"i8", Type::kI8}, {"i4", Type::kI4}}};

// The formats beside queries of a type; "half" is the other type of 16 bits, and fp32 has none.
std::vector<Format> formats_beside(Type type) {
  std::vector<Format> all = {
      {"own", std::nullopt}, {"e4m3", Type::kE4M3}, {"fnuz", Type::kE4M3Fnuz}, {"q8", Type::kQ8_0}};
  for (const Format& blocks : kBelowAByte) all.push_back(blocks);
  for (const Format& numbers : kNumbers) all.push_back(numbers);
  if (type != Type::kF32) all.push_back({"half", type == Type::kBF16 ? Type::kF16 : Type::kBF16});
  return all;
}

// Names say what a target has to read: what kernels of e4m3 read is "fp8".
void set_formats(AttentionCase& c, const Format& k, const Format& v) {
  c.kv_type = k.type.value_or(c.type);
  c.v_type = v.type.value_or(c.type);
  const auto is_simple = [&](Type type) { return type == c.type || type == Type::kE4M3; };
  const bool simple = is_simple(*c.kv_type) && is_simple(*c.v_type);
  const auto is_short = [](Type type) { return reference::is_blocks(type) && type != Type::kQ8_0; };
  const auto is_number = [](Type type) { return type == Type::kE5M2 || type == Type::kI8 || type == Type::kI4; };
  const auto has = [&](const auto& is) { return is(*c.kv_type) || is(*c.v_type); };
  const char* needs = simple ? "_fp8_" : has(is_short) ? "_blocks_" : has(is_number) ? "_numbers_" : "_formats_";
  c.name += std::string(needs) + k.name + "_" + v.name;
}

std::vector<AttentionCase> pair_cases() {
  constexpr std::array<std::int64_t, 4> kDims = {64, 128, 96, 256};
  constexpr std::array<std::pair<Pages, std::int64_t>, 6> kPages = {{{Pages::kNone, 16},
                                                                     {Pages::kBlockTable, 5},
                                                                     {Pages::kBlockTableHnd, 16},
                                                                     {Pages::kTokenTable, 1},
                                                                     {Pages::kNone, 16},
                                                                     {Pages::kCsr, 300}}};
  std::vector<AttentionCase> cases;
  std::size_t number = 0;
  for (const Type type : {Type::kBF16, Type::kF16}) {
    for (const Format& k : formats_beside(type)) {
      for (const Format& v : formats_beside(type)) {
        if (!k.type && !v.type) continue;
        AttentionCase c = {.name = "pair", .type = type, .q_heads = 2, .kv_heads = 1, .causal = true};
        c.dim_qk = c.dim_v = kDims[number % kDims.size()];
        std::tie(c.pages, c.page_size) = kPages[number % kPages.size()];
        c.packed = number % 2 == 0;
        c.q_lens = c.packed ? std::vector<std::int64_t>{70, 33, 1} : std::vector<std::int64_t>{70, 70};
        c.kv_lens = c.packed ? std::vector<std::int64_t>{203, 40, 131} : std::vector<std::int64_t>{203, 203};
        c.leftpad = number % 3 == 0;
        c.scales = number % 5 < 2;
        if (number % 4 == 1) c.window_left = 50;
        if (number % 7 == 2) c.softcap = 5;
        set_formats(c, k, v);
        c.name += std::string("_") + type_name(type);
        cases.push_back(c);
        ++number;
      }
    }
  }
  return cases;
}

// Rows of blocks are aligned to 2 bytes (an odd count of blocks), 4, 8 or 16.
std::vector<AttentionCase> row_cases() {
  std::vector<AttentionCase> cases;
  for (const std::int64_t dim : {32, 64, 96, 128, 192, 256, 320, 512}) {
    for (const Pages pages : {Pages::kNone, Pages::kBlockTable}) {
      AttentionCase c = {.name = pages == Pages::kNone ? "rows" : "paged_rows",
                         .type = dim % 128 == 0 ? Type::kBF16 : Type::kF16,
                         .dim_qk = dim,
                         .dim_v = dim,
                         .q_heads = 2,
                         .kv_heads = 2,
                         .q_lens = {33, 70},
                         .kv_lens = {203, 67},
                         .packed = true,
                         .pages = pages,
                         .page_size = 5,
                         .causal = true};
      set_formats(c, {"q8", Type::kQ8_0}, {"q8", Type::kQ8_0});
      c.name += "_d" + std::to_string(dim);
      cases.push_back(c);
    }
  }
  for (const Format& format : kBelowAByte) {
    for (const std::int64_t dim : {32, 96, 320}) {
      AttentionCase c = {.name = "rows_d" + std::to_string(dim),
                         .type = Type::kF32,
                         .dim_qk = dim,
                         .dim_v = dim,
                         .q_heads = 2,
                         .kv_heads = 2,
                         .q_lens = {33, 70},
                         .kv_lens = {203, 67},
                         .packed = true,
                         .pages = dim == 96 ? Pages::kNone : Pages::kBlockTable,
                         .page_size = 5,
                         .causal = true};
      set_formats(c, format, format);
      cases.push_back(c);
    }
  }
  for (const Format& format : kNumbers) {
    for (const std::int64_t dim : {32, 96, 512}) {
      AttentionCase c = {.name = "numbers_d" + std::to_string(dim),
                         .type = Type::kF32,
                         .dim_qk = dim,
                         .dim_v = dim,
                         .q_heads = 2,
                         .kv_heads = 1,
                         .q_lens = {33, 70},
                         .kv_lens = {67, 203},
                         .packed = true,
                         .pages = dim == 96 ? Pages::kBlockTableHnd : Pages::kNone,
                         .page_size = 7,
                         .scales = dim == 32};
      set_formats(c, format, format);
      cases.push_back(c);
    }
  }
  for (const Layout layout : {Layout::kProjection, Layout::kHeadsFirst, Layout::kGaps, Layout::kOddQueries}) {
    AttentionCase c = {.name = "layout", .dim_qk = 128, .dim_v = 128, .kv_lens = {113, 113}, .layout = layout};
    set_formats(c, {"q8", Type::kQ8_0}, {"half", Type::kF16});
    c.name += "_" + std::to_string(static_cast<int>(layout));
    cases.push_back(c);
  }
  // Head dims that differ, and keys that are cut into pieces.
  AttentionCase c = {.name = "dims", .dim_qk = 192, .dim_v = 128, .causal = true, .splits = 3};
  set_formats(c, {"q8", Type::kQ8_0}, {"fnuz", Type::kE4M3Fnuz});
  cases.push_back(c);
  return cases;
}

// Rows of 128 values, which targets may bring as boxes of bytes: whole tiles or pages; heads, and tokens, that lie at
// multiples of 16 bytes or at odd ones of 8; sequences that end anywhere in a tile, in the middle of a page, or are
// empty; and keys before a window.
std::vector<AttentionCase> box_cases() {
  struct Place {
    Pages pages;
    std::int64_t page_size, kv_heads;
    bool packed;
  };
  constexpr std::array<Place, 9> kPlaces = {{{Pages::kNone, 16, 2, false},
                                             {Pages::kNone, 16, 3, true},
                                             {Pages::kNone, 16, 1, false},
                                             {Pages::kBlockTable, 8, 2, true},
                                             {Pages::kBlockTable, 16, 1, false},
                                             {Pages::kBlockTable, 48, 3, true},
                                             {Pages::kBlockTableHnd, 16, 2, true},
                                             {Pages::kBlockTableHnd, 64, 2, false},
                                             {Pages::kCsr, 256, 4, true}}};
  std::vector<Format> formats = {{"e4m3", Type::kE4M3}, {"fnuz", Type::kE4M3Fnuz}, {"q8", Type::kQ8_0}};
  for (const Format& blocks : kBelowAByte) formats.push_back(blocks);
  std::vector<AttentionCase> cases;
  for (std::size_t format = 0; format < formats.size(); ++format) {
    for (std::size_t place = 0; place < kPlaces.size(); ++place) {
      const std::size_t number = format * kPlaces.size() + place;
      AttentionCase c = {.name = "boxes" + std::to_string(place),
                         .type = (format + place) % 2 == 0 ? Type::kBF16 : Type::kF16,
                         .dim_qk = 128,
                         .dim_v = 128,
                         .q_heads = static_cast<std::int64_t>(1 + number % 4) * kPlaces[place].kv_heads,
                         .kv_heads = kPlaces[place].kv_heads,
                         .q_lens = {150, 150},
                         .kv_lens = {386, 386},
                         .packed = kPlaces[place].packed,
                         .pages = kPlaces[place].pages,
                         .page_size = kPlaces[place].page_size,
                         .causal = number % 3 != 0};
      if (c.packed) {
        c.q_lens = {129, 1, 70, 0, 200};
        c.kv_lens = {300, 128, 0, 33, 641};
      }
      if (number % 4 == 1) c.window_left = 100;
      // Every other place has another format for its values.
      set_formats(c, formats[format], formats[place % 2 == 0 ? format : (format + place) % formats.size()]);
      cases.push_back(c);
    }
  }
  return cases;
}

class AttentionFormats : public testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionFormats, MatchTheOracle) {
  FLASHPORT_REQUIRE_SUPPORT(GetParam().support_name(), flashport::supports(GetParam().query()));
  AttentionCall call(GetParam());
  call.run();
  EXPECT_EQ(call.check(), "") << "kernel " << flashport::which_kernel(GetParam().query());
}

const auto name_of = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Pairs, AttentionFormats, testing::ValuesIn(pair_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Boxes, AttentionFormats, testing::ValuesIn(box_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Rows, AttentionFormats, testing::ValuesIn(row_cases()), name_of);

// The combinations of options that have fp8, with a pair of formats in its place.
std::vector<AttentionCase> combinations() {
  std::vector<AttentionCase> cases;
  Random random(53);
  for (AttentionCase c : attention_combinations(3, 1, 54)) {
    if (!c.kv_type) continue;
    const auto blocks = [](std::int64_t dim) { return std::max<std::int64_t>(dim / 32 * 32, 32); };
    c.name = "combination";
    c.q_fp8 = false;
    c.dim_qk = blocks(c.dim_qk);
    c.dim_v = blocks(c.dim_v);
    const std::vector<Format> formats = formats_beside(c.type);
    const auto one = [&] { return formats[static_cast<std::size_t>(random.below(std::ssize(formats)))]; };
    const Format k = one(), v = one();
    if (!k.type && !v.type) continue;
    set_formats(c, k, v);
    cases.push_back(c);
  }
  return cases;
}

TEST(AttentionFormatCombinations, MatchTheOracle) {
  const std::vector<AttentionCase> all = combinations();
  EXPECT_GT(all.size(), 150u);
  for (std::size_t i = 0; i < all.size(); i += options().emulator ? 8 : 1) {
    const AttentionCase& c = all[i];
    const flashport::Support support = flashport::supports(c.query());
    const std::string said = verdict(c.support_name(), support.supported, support.reason);
    if (said.starts_with("skip")) continue;
    EXPECT_EQ(said, "") << c;
    if (!support.supported) continue;
    AttentionCall call(c);
    call.run();
    EXPECT_EQ(call.check(), "") << c;
  }
}

// With one key, every query's output is its value.
constexpr std::int64_t kDim = 256;
class OneValue {
 public:
  explicit OneValue(Type v_type)
      : q_(Type::kF16, {1, 5, 1, kDim}),
        k_(Type::kF16, {1, 1, 1, kDim}),
        v_(v_type, {1, 1, 1, reference::stored_extent(v_type, kDim)}),
        out_(Type::kF16, {1, 5, 1, kDim}) {
    for (Tensor* tensor : {&q_, &k_}) tensor->for_each([&](const Shape& at) { tensor->set(at, 0); });
  }
  unsigned char* value() { return v_.address({0, 0, 0, 0}); }
  void run() {
    for (Tensor* tensor : {&q_, &k_, &v_}) tensor->upload();
    flashport::AttentionArgs args;
    args.q = q_.view();
    args.k = k_.view();
    args.v = v_.view();
    args.v_format = format_of(v_.type());
    args.out = out_.view();
    flashport::attention(args);
    out_.download();
  }
  double out(std::int64_t dim) { return out_.get({0, 3, 0, dim}); }

  [[nodiscard]] flashport::Support support() const {
    return flashport::supports(flashport::AttentionQuery{.target = query_target(),
                                                         .dtype = flashport::DType::kFloat16,
                                                         .head_dim_qk = kDim,
                                                         .head_dim_v = kDim,
                                                         .v_format = format_of(v_.type())});
  }

 private:
  Tensor q_, k_, v_, out_;
};

void expect_half(double got, double wanted, const std::string& what) {
  if (std::isnan(wanted)) {
    EXPECT_TRUE(std::isnan(got)) << what << " gave " << got;
  } else {
    EXPECT_EQ(got, reference::round_to(wanted, Type::kF16)) << what;
  }
}

// Rows of one value an element, or of two a byte: each byte that there is, in every place that takes it.
class AttentionCodes : public testing::TestWithParam<Format> {};

TEST_P(AttentionCodes, AreWidened) {
  const Type type = *GetParam().type;
  OneValue call(type);
  const std::string needs = type == Type::kE4M3Fnuz ? "formats_" : "numbers_";
  FLASHPORT_REQUIRE_SUPPORT("attention_fp16_d256_" + needs + GetParam().name + "_codes", call.support());
  const std::int64_t bytes = reference::stored_extent(type, kDim);
  for (std::int64_t first = 0; first < 256; first += bytes) {
    for (std::int64_t i = 0; i < bytes; ++i) call.value()[i] = static_cast<unsigned char>(first + i);
    call.run();
    for (std::int64_t d = 0; d < kDim; ++d) {
      expect_half(call.out(d), reference::read_scaled_value(type, call.value(), d),
                  "value " + std::to_string(d) + " from code " + std::to_string(first));
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Values, AttentionCodes,
                         testing::Values(Format{"fnuz", Type::kE4M3Fnuz}, kNumbers[0], kNumbers[1], kNumbers[2]),
                         [](const auto& info) { return info.param.name; });

// Every int8 under scales that make its product a normal number, a subnormal one, one that has to be rounded, infinity;
// a block whose scale is NaN is NaN, and its neighbours are not.
TEST(AttentionFormatValues, WidenEveryInt8UnderItsScale) {
  OneValue call(Type::kQ8_0);
  FLASHPORT_REQUIRE_SUPPORT("attention_fp16_d256_formats_q8_bytes", call.support());
  constexpr std::array<double, 8> kScales = {1, 0.3, -0.0117, 0x1p-14, 0x1p-24, 400, 600, 0};
  for (std::size_t round = 0; round < kScales.size(); ++round) {
    for (std::size_t block = 0; block < kScales.size(); ++block) {
      unsigned char* at = call.value() + block * reference::kQ8Bytes;
      reference::write_number(at, Type::kF16, kScales[(block + round) % kScales.size()]);
      for (int i = 0; i < reference::kQ8Values; ++i) {
        at[2 + i] = static_cast<unsigned char>(static_cast<int>(block) * reference::kQ8Values + i);
      }
    }
    const std::size_t bad = (round + 3) % kScales.size();
    reference::store_as(call.value() + bad * reference::kQ8Bytes, static_cast<std::uint16_t>(reference::kHalf.nan));
    call.run();
    for (std::int64_t d = 0; d < kDim; ++d) {
      expect_half(call.out(d), reference::read_q8_0(call.value(), d),
                  "round " + std::to_string(round) + " value " + std::to_string(d));
    }
  }
}

}  // namespace
}  // namespace flashport_test
