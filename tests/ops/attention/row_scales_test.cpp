// attention on keys and values with scales beside them, of rows or of groups of 8 values, against the oracle. Scales of
// rows that no sequence has are NaN.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "tests/ops/attention/call.h"
#include "tests/ops/decode/call.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

using reference::Type;

AttentionCase scaled_case(const std::string& name, Type kv_type, Beside k, Beside v) {
  AttentionCase c = {.name = "scaled_" + name, .type = Type::kF16, .kv_type = kv_type};
  c.k_beside = k;
  c.v_beside = v;
  return c;
}

// Each format under each pair of kinds, in a layout that goes round.
std::vector<AttentionCase> scaled_cases() {
  constexpr std::array kTypes = {std::pair(Type::kI8, "i8"), std::pair(Type::kI4, "i4"), std::pair(Type::kE4M3, "e4m3"),
                                 std::pair(Type::kE4M3Fnuz, "fnuz"), std::pair(Type::kE5M2, "e5m2")};
  constexpr std::array kKinds = {std::pair(Beside::kRow, Beside::kRow), std::pair(Beside::kGroup, Beside::kGroup),
                                 std::pair(Beside::kRow, Beside::kGroup), std::pair(Beside::kGroup, Beside::kNone),
                                 std::pair(Beside::kNone, Beside::kRow)};
  constexpr std::array<std::pair<Pages, std::int64_t>, 5> kPages = {{{Pages::kNone, 16},
                                                                     {Pages::kBlockTable, 5},
                                                                     {Pages::kBlockTableHnd, 16},
                                                                     {Pages::kTokenTable, 1},
                                                                     {Pages::kCsr, 30}}};
  constexpr std::array<std::int64_t, 4> kDims = {64, 128, 96, 32};
  std::vector<AttentionCase> cases;
  for (const auto& [type, type_text] : kTypes) {
    for (const auto& [k, v] : kKinds) {
      const auto number = cases.size();
      AttentionCase c = scaled_case(std::string(type_text) + "_" + std::to_string(number), type, k, v);
      c.type = std::array{Type::kF16, Type::kBF16, Type::kF32}[number % 3];
      c.dim_qk = kDims[number % 4];
      c.dim_v = kDims[number / 4 % 4];
      std::tie(c.pages, c.page_size) = kPages[number % 5];
      c.packed = number % 2 == 0;
      c.q_lens = c.packed ? std::vector<std::int64_t>{70, 33, 1} : std::vector<std::int64_t>{70, 70};
      c.kv_lens = c.packed ? std::vector<std::int64_t>{203, 40, 131} : std::vector<std::int64_t>{203, 203};
      c.scales = true;  // of the side whose scale does not lie beside it
      c.causal = number % 3 != 0;
      c.leftpad = number % 4 == 1;
      c.used_k = number % 4 == 2;
      if (number % 5 == 3) c.window_left = 50;
      if (number % 7 == 2) c.softcap = 5;
      cases.push_back(c);
    }
  }
  {
    AttentionCase c = scaled_case("pieces", Type::kI8, Beside::kGroup, Beside::kGroup);
    c.q_lens = {9, 9};
    c.splits = 3;
    cases.push_back(c);
  }
  {  // one row of a group of 8 query heads, and a last vector of 8 values
    AttentionCase c = scaled_case("d40", Type::kI8, Beside::kGroup, Beside::kGroup);
    c.dim_qk = c.dim_v = 40;
    c.q_heads = 8;
    c.kv_heads = 1;
    cases.push_back(c);
  }
  // Whole heads of 128, which TMA brings with their scales on sm90a, over several key tiles of tensors and of pages.
  constexpr std::array kWholeKinds = {std::pair(Beside::kRow, Beside::kRow), std::pair(Beside::kGroup, Beside::kGroup),
                                      std::pair(Beside::kGroup, Beside::kRow),
                                      std::pair(Beside::kNone, Beside::kGroup)};
  constexpr std::array<std::pair<Pages, std::int64_t>, 4> kWholePages = {
      {{Pages::kNone, 16}, {Pages::kBlockTable, 16}, {Pages::kBlockTableHnd, 32}, {Pages::kCsr, 8}}};
  for (std::size_t number = 0; number < 3 * kWholeKinds.size(); ++number) {
    const auto& [type, type_text] = kTypes[number % 3];  // int8, int4, e4m3
    const auto& [k, v] = kWholeKinds[number % kWholeKinds.size()];
    AttentionCase c = scaled_case(std::string("whole_") + type_text + "_" + std::to_string(number), type, k, v);
    c.type = number % 2 == 0 ? Type::kF16 : Type::kBF16;
    c.dim_qk = c.dim_v = 128;
    std::tie(c.pages, c.page_size) = kWholePages[(number + number / 4) % kWholePages.size()];
    c.packed = number % 4 == 0;
    c.q_lens = c.packed ? std::vector<std::int64_t>{70, 133, 1} : std::vector<std::int64_t>{140, 140};
    c.kv_lens = c.packed ? std::vector<std::int64_t>{203, 740, 131} : std::vector<std::int64_t>{501, 501};
    c.causal = number % 3 != 1;
    c.used_k = !c.packed;
    cases.push_back(c);
  }
  // Kernels of all options.
  for (const std::int64_t dim : {64, 128, 256, 512}) {
    AttentionCase c = scaled_case("options_d" + std::to_string(dim), Type::kI8, Beside::kGroup, Beside::kRow);
    c.dim_qk = c.dim_v = dim;
    c.softcap = 5;
    c.slopes = Slopes::kOfHeads;
    c.causal = true;
    cases.push_back(c);
  }
  {  // any format may have them
    AttentionCase c = scaled_case("fp16", Type::kF16, Beside::kRow, Beside::kRow);
    cases.push_back(c);
  }
  return cases;
}

class AttentionRowScales : public testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionRowScales, MatchTheOracle) {
  FLASHPORT_REQUIRE_SUPPORT(GetParam().support_name(), flashport::supports(GetParam().query()));
  AttentionCall call(GetParam());
  call.run();
  EXPECT_EQ(call.check(), "") << "kernel " << flashport::which_kernel(GetParam().query());
}

INSTANTIATE_TEST_SUITE_P(Ops, AttentionRowScales, testing::ValuesIn(scaled_cases()),
                         [](const auto& info) { return info.param.name; });

// The bits of a prompt are those of its chunks, and those of a sequence alone.
TEST(AttentionRowScaleBits, FollowFromTheSequence) {
  AttentionCase c = scaled_case("bits", Type::kI8, Beside::kGroup, Beside::kRow);
  c.packed = true;
  c.q_lens = {70, 33, 1};
  c.kv_lens = {203, 40, 131};
  c.causal = true;
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(c.query()));
  AttentionCall together(c);
  together.run();
  for (std::int64_t b = 0; b < 3; ++b) {
    AttentionCase one = c;
    const auto at = static_cast<std::size_t>(b);
    one.q_lens = {c.q_lens[at]};
    one.kv_lens = {c.kv_lens[at]};
    one.ids = {b};
    AttentionCall alone(one);
    alone.run();
    EXPECT_TRUE(alone.bits(0) == together.bits(b)) << b;
  }
}

// Few queries on a cache have the kernels of flash_decode on every target.
TEST(AttentionRowScaleKernels, OfFewQueriesAreReadByDecode) {
  for (const Pages pages : {Pages::kNone, Pages::kTokenTable}) {
    AttentionCase c = scaled_case("few", Type::kI8, Beside::kGroup, Beside::kRow);
    c.pages = pages;
    c.q_lens = {3, 3};
    c.causal = true;
    c.used_k = true;
    flashport::AttentionQuery query = c.query();
    query.seqused_k = true;
    query.q_len = 3;
    query.group_size = 2;
    const flashport::Support support = flashport::supports(query);
    ASSERT_TRUE(support.supported) << support.reason;
    EXPECT_NE(flashport::which_kernel(query).find("/kv=any/"), std::string::npos);
    AttentionCall call(c);
    call.run();
    EXPECT_EQ(call.check(math_of_key(flashport::which_kernel(query))), "");
  }
}

}  // namespace
}  // namespace flashport_test
