// Whole decode kernels of sm90a, from the public call to the output, by their own text on a multiprocessor of the host
// (machine.h): against the oracle, within the tolerance of DESIGN's numerics. The kernel of bf16 is a control: what it
// shows wrong is wrong with the model.
#include <gtest/gtest.h>

#include <flashport/backend.h>
#include <flashport/decode.h>

#include "tests/device/decode/model_tables.h"
#include "tests/device/machine/model_backend.h"
#include "tests/device/machine/model_main.h"
#include "tests/ops/decode/call.h"
#include "tests/ops/decode/mixed_call.h"
#include "tests/reference/blocks.h"

namespace flashport_test {
namespace {

using flashport::machine::model;
using reference::Type;

using Lengths = std::vector<std::int64_t>;
const std::vector<Lengths> kShort = {{0}, {1}, {63}, {64}, {65}, {127}, {128}, {129}, {0, 1, 63}, {64, 65, 127}};
const std::vector<Lengths> kLong = {{1500}, {700, 0, 1100}};

// Blocks of a kernel that takes a multiprocessor for itself.
void set_blocks(int blocks) { flashport::set_multiprocessor_limit(blocks); }
const std::string& launched_kernel() {
  static const std::string none;
  return model().launched.empty() ? none : model().launched.back();
}

DecodeCase case_of(const std::string& name, Type q, Type cache, const Lengths& lens, std::int64_t kv_heads) {
  DecodeCase c{};
  c.name = name;
  c.q = q;
  c.k_format = c.v_format = cache;
  c.dk = c.dv = 128;
  c.hq = 4 * kv_heads;
  c.hkv = kv_heads;
  c.q_len = 1;
  c.q_form = "token";
  c.layout = "block_nhd";
  c.page = 16;
  c.lens = lens;
  c.window_left = c.window_right = -1;
  c.alibi = c.scales = "none";
  c.lse = true;
  c.strides = "dense";
  c.splits = flashport::kInvariantSplits;
  return c;
}

// Runs the case and holds it against the oracle; the first kernel that it launched, before one that combines.
std::string expect_right(const DecodeCase& c, Type math) {
  DecodeCall call(c);
  call.upload();
  model().launched.clear();
  EXPECT_NO_THROW(call.run()) << "seed " << model().seed - 1;
  EXPECT_EQ(call.check(math), "") << "seed " << model().seed - 1;
  return model().launched.empty() ? "" : model().launched.front();
}

struct Native {
  Type q, cache;
  Type math;
  int rows;
  bool plain = false;
  int dim = 128;
  bool large = false;  // calls that have the kernel for large caches
  Type values = cache;
  // As the kernel's key has them.
  [[nodiscard]] std::string formats() const {
    const auto has_pairs = [](Type type) { return type == Type::kQ8_0 || type == Type::kQ4_0; };
    const bool is_own = cache == values && type_name(cache)[0] != 'q';
    if (is_own || (cache == values && has_pairs(cache))) return "/kv=" + std::string(type_name(cache));
    if (!reference::is_blocks(cache)) return "/k=" + std::string(type_name(cache)) + "/v=blocks";
    if (!reference::is_blocks(values)) return "/k=blocks/v=" + std::string(type_name(values));
    if (cache != Type::kQ8_0 || values != Type::kQ4_0) return "/kv=blocks";
    return "/k=" + std::string(type_name(cache)) + "/v=" + type_name(values);
  }
  // Whether large caches have a kernel of the very formats, for all calls or for plain ones, and not of blocks.
  [[nodiscard]] bool has_large_kernel(bool plain_call) const {
    if (cache != values) return cache == Type::kQ8_0 && values == Type::kQ4_0 && plain_call;
    return cache == Type::kBF16 || cache == Type::kQ8_0 || cache == Type::kQ4_0;
  }
  // Whether calls of up to 16 rows have two tiles of eight where the kernel for large caches does not serve them.
  [[nodiscard]] bool has_two_tiles() const { return rows == 16 && cache == Type::kQ4_0; }
  // The data follow from it: those of all kernels of a shape are the same, as their bits are.
  [[nodiscard]] std::string shape() const {
    return type_name(cache) + (values == cache ? "" : "_" + std::string(type_name(values))) + "_d" +
           std::to_string(dim) + "_r" + std::to_string(rows);
  }
  [[nodiscard]] std::string name() const { return shape() + (plain ? "_plain" : "") + (large ? "_large" : ""); }
  // Heads that blocks of such a kernel copy side by side.
  [[nodiscard]] int teams() const { return cache == Type::kBF16 ? 2 : 4; }
};

class NativeKernels : public testing::TestWithParam<Native> {
 protected:
  static DecodeCase make(const Lengths& lens, std::int64_t kv_heads) {
    const Native& kernel = GetParam();
    DecodeCase c = case_of(kernel.shape(), kernel.q, kernel.cache, lens, kv_heads);
    c.v_format = kernel.values;
    c.lse = !kernel.plain;
    c.dk = c.dv = kernel.dim;
    if (kernel.large) c.room = 800'000;
    if (kernel.rows == 16) {
      c.q_len = kernel.large ? 3 : 7;  // up to 16 rows over few keys are two tiles of eight
      c.q_form = "uniform";
    } else if (kernel.rows > 16) {  // some of them padding; a head of so many takes long
      c.hkv = kv_heads > 2 ? 1 : kv_heads;
      c.hq = (kernel.rows / 2 + 7) * c.hkv;
    }
    return c;
  }
  static void expect_right(const DecodeCase& c) {
    std::string lens;
    for (const std::int64_t length : c.lens) lens += " " + std::to_string(length);
    SCOPED_TRACE(c.layout + ", " + c.strides + ", " + std::to_string(c.hkv) + " kv heads, lengths" + lens);
    const std::string kernel = flashport_test::expect_right(c, GetParam().math);
    const bool is_large = kernel.find("/large/") != std::string::npos;
    const bool may_be_two_tiles = !is_large && GetParam().large && GetParam().rows == 16;
    const int rows = may_be_two_tiles && kernel.find("/r8/") != std::string::npos ? 8 : GetParam().rows;
    const bool plain_call = GetParam().plain && (c.strides == "dense" || c.strides == "kv_sliced");
    const std::string formats =
        is_large && !GetParam().has_large_kernel(plain_call) ? "/kv=blocks" : GetParam().formats();
    EXPECT_NE(kernel.find(formats + "/hd" + std::to_string(c.dk) + "/r" + std::to_string(rows) + "/"),
              std::string::npos)
        << kernel;
    if (GetParam().plain && c.strides == "dense") {
      EXPECT_TRUE(kernel.starts_with("decode_plain/")) << kernel;
    }
    if (GetParam().large) {
      const bool side_by_side =
          (c.layout == "block_nhd" || c.layout == "token") && c.hkv % GetParam().teams() == 0 && c.strides != "kv_odd";
      const bool is_served = GetParam().cache != Type::kBF16 || plain_call;
      EXPECT_EQ(is_large, side_by_side && is_served) << kernel;
    }
  }
};

TEST_P(NativeKernels, ShortSequences) {
  for (const Lengths& lens : kShort) {
    for (const int blocks : {1, 3}) {
      set_blocks(blocks);
      expect_right(make(lens, blocks == 1 ? 1 : 2));
    }
  }
}

// Chunks are published and combined. Teams have heads that lie side by side, and copy them together, but where blocks
// are many.
TEST_P(NativeKernels, LongSequences) {
  for (const int blocks : {1, 2, 5}) {
    set_blocks(blocks);
    expect_right(make(kLong[blocks % 2], 4));
  }
  set_blocks(1);
  expect_right(make({64, 300}, 8));
  expect_right(make({64, 300}, 3));
  set_blocks(5);
  expect_right(make(kLong[0], 1));
}

// Where multiprocessors are more than chunks, the teams of a block help the first one to copy: heads that lie side by
// side in whole units, others not, and the last rows of a sequence in part.
TEST_P(NativeKernels, MoreBlocksThanChunks) {
  set_blocks(80);
  expect_right(make({300, 65}, 3));
  for (const char* layout : {"block_nhd", "block_hnd"}) {
    DecodeCase c = make({300, 65}, 4);
    c.layout = layout;
    expect_right(c);
  }
  const Type cache = GetParam().cache;
  const bool in_blocks = cache != Type::kBF16 || GetParam().values != cache;
  if (in_blocks) expect_right(make({2100}, 8));  // two turns a chunk
}

// Rows in other places, some of them at addresses that only copies of two bytes reach.
TEST_P(NativeKernels, Layouts) {
  set_blocks(2);
  for (const char* layout : {"nhd", "hnd", "block_hnd", "token"}) {
    DecodeCase c = make({65, 200}, 4);
    c.layout = layout;
    if (c.layout != "block_hnd") c.page = 0;
    expect_right(c);
  }
  for (const char* strides : {"kv_odd", "kv_sliced", "q_inner"}) {
    DecodeCase c = make({65, 200}, 4);
    c.strides = strides;
    expect_right(c);
  }
}

TEST_P(NativeKernels, BitsDoNotDependOnTheBlocksNorOnTheirOrder) {
  DecodeCall call(make({300, 1, 700}, 4));
  call.upload();
  set_blocks(1);
  call.run();
  const auto bits = call.bits();
  for (const int blocks : {1, 3, 6}) {
    set_blocks(blocks);
    call.run();
    EXPECT_TRUE(call.bits() == bits) << blocks << " blocks, seed " << model().seed - 1;
  }
}

// Ranges are found while the kernel before runs, which may write the lengths.
TEST_P(NativeKernels, LengthsThatTheKernelBeforeWrites) {
  const Lengths lens = {300, 1, 700};
  for (const Lengths& before :
       {Lengths{300, 1, 700}, Lengths{0, 0, 0}, Lengths{700, 700, 699}, Lengths{-7, 1 << 30, 1}}) {
    for (const int blocks : {1, 6}) {
      set_blocks(blocks);
      const DecodeCase c = make(lens, 4);
      SCOPED_TRACE(std::to_string(before[0]) + ", " + std::to_string(blocks) + " blocks");
      DecodeCall call(c);
      call.upload();
      Tensor& seqlens = *call.seqlens();
      const auto write = [&](const Lengths& values) {
        for (std::size_t i = 0; i < values.size(); ++i) seqlens.set({static_cast<std::int64_t>(i)}, values[i]);
        seqlens.upload();
      };
      write(before);
      model().kernel_before = [&] { write(lens); };
      EXPECT_NO_THROW(call.run());
      model().kernel_before = nullptr;
      EXPECT_EQ(call.check(GetParam().math), "") << "seed " << model().seed - 1;
    }
  }
}

class NativeKernelsOfLargeCaches : public NativeKernels {};

// A request has the same bits whether its cache is large or not.
TEST_P(NativeKernelsOfLargeCaches, HaveTheBitsOfOthers) {
  for (const Lengths& lens : {Lengths{300, 1, 700}, Lengths{0, 63, 128}, Lengths{2500, 129}}) {
    DecodeCase c = make(lens, GetParam().teams());
    DecodeCall large(c);
    c.room = 15'000;  // of four heads and two or three sequences: neither few keys nor many
    DecodeCall other(c);
    c.room = 0;
    DecodeCall small(c);
    for (const int blocks : {1, 3}) {
      set_blocks(blocks);
      for (DecodeCall* call : {&large, &other, &small}) {
        call->upload();
        call->run();
        const std::string kernel = launched_kernel();
        EXPECT_EQ(kernel.find("/large/") != std::string::npos, call == &large) << kernel;
        const bool is_short = call == &small || (call == &other && GetParam().has_two_tiles());
        EXPECT_NE(kernel.find(GetParam().rows == 16 && !is_short ? "/r16/" : "/r8/"), std::string::npos) << kernel;
      }
      EXPECT_TRUE(large.bits() == small.bits()) << blocks << " blocks, seed " << model().seed - 1;
      EXPECT_TRUE(other.bits() == small.bits()) << blocks << " blocks, seed " << model().seed - 1;
    }
  }
}

const Native kLargeCaches[] = {{Type::kBF16, Type::kBF16, Type::kBF16, 8, true, 64, true},
                               {Type::kF16, Type::kQ8_0, Type::kF16, 8, true, 128, true},
                               {Type::kF16, Type::kQ8_0, Type::kF16, 8, false, 128, true},
                               {Type::kF16, Type::kQ4_0, Type::kF16, 8, true, 128, true},
                               {Type::kF16, Type::kQ4_0, Type::kF16, 8, false, 128, true},
                               {Type::kBF16, Type::kQ8_0, Type::kF16, 16, false, 128, true},
                               {Type::kF16, Type::kQ4_0, Type::kF16, 16, false, 128, true},
                               {Type::kF16, Type::kQ8_0, Type::kF16, 8, true, 128, true, Type::kQ4_0},
                               {Type::kF16, Type::kQ8_0, Type::kF16, 8, false, 128, true, Type::kIq4Nl},
                               {Type::kF16, Type::kQ4_0, Type::kF16, 8, false, 128, true, Type::kQ8_0},
                               {Type::kF16, Type::kIq4Nl, Type::kF16, 8, false, 128, true},
                               {Type::kF16, Type::kQ4_1, Type::kF16, 8, false, 128, true},
                               {Type::kF16, Type::kQ5_0, Type::kF16, 8, false, 128, true},
                               {Type::kF16, Type::kQ5_1, Type::kF16, 8, false, 128, true, Type::kQ4_1}};
INSTANTIATE_TEST_SUITE_P(
    Model, NativeKernels,
    testing::Values(Native{Type::kBF16, Type::kBF16, Type::kBF16, 8}, Native{Type::kBF16, Type::kBF16, Type::kBF16, 64},
                    Native{Type::kBF16, Type::kBF16, Type::kBF16, 128}, Native{Type::kF16, Type::kQ8_0, Type::kF16, 8},
                    Native{Type::kF16, Type::kQ8_0, Type::kF16, 16}, Native{Type::kF16, Type::kQ4_0, Type::kF16, 8},
                    Native{Type::kBF16, Type::kBF16, Type::kBF16, 8, true},
                    Native{Type::kBF16, Type::kBF16, Type::kBF16, 128, true},
                    Native{Type::kF16, Type::kQ8_0, Type::kF16, 8, true},
                    Native{Type::kF16, Type::kQ8_0, Type::kF16, 8, false, 128, false, Type::kQ4_0},
                    Native{Type::kF16, Type::kQ8_0, Type::kF16, 8, true, 128, false, Type::kQ4_0},
                    Native{Type::kF16, Type::kIq4Nl, Type::kF16, 8, false, 128, false, Type::kQ8_0},
                    Native{Type::kF16, Type::kQ4_0, Type::kF16, 8, false, 128, false, Type::kQ8_0},
                    Native{Type::kF16, Type::kIq4Nl, Type::kF16, 8},
                    Native{Type::kF16, Type::kQ4_1, Type::kF16, 8, false, 128, false, Type::kQ5_1},
                    Native{Type::kBF16, Type::kBF16, Type::kBF16, 8, false, 128, false, Type::kQ8_0},
                    Native{Type::kBF16, Type::kQ5_1, Type::kBF16, 8, false, 128, false, Type::kBF16},
                    Native{Type::kF16, Type::kF16, Type::kF16, 8, false, 128, false, Type::kIq4Nl},
                    Native{Type::kF16, Type::kQ5_0, Type::kF16, 8}, Native{Type::kF16, Type::kQ5_1, Type::kF16, 8},
                    Native{Type::kBF16, Type::kBF16, Type::kBF16, 8, true, 64}),
    [](const auto& info) { return info.param.name(); });
INSTANTIATE_TEST_SUITE_P(Large, NativeKernels, testing::ValuesIn(kLargeCaches),
                         [](const auto& info) { return info.param.name(); });
INSTANTIATE_TEST_SUITE_P(Model, NativeKernelsOfLargeCaches, testing::ValuesIn(kLargeCaches),
                         [](const auto& info) { return info.param.name(); });

// Two tiles of rows in kernels with teams, which bring the keys of each tile by themselves, by both schedules.
TEST(NativeKernelsOfPairs, TwoTilesOfRows) {
  for (const Type keys : {Type::kQ4_0, Type::kIq4Nl}) {
    for (const int splits : {flashport::kInvariantSplits, 1}) {
      for (const int blocks : {1, 3}) {
        set_blocks(blocks);
        DecodeCase c = case_of("pair", Type::kF16, keys, {65, 1, 300}, 2);
        c.v_format = Type::kQ8_0;
        c.q_len = 3;
        c.q_form = "uniform";
        c.splits = splits;
        EXPECT_NE(expect_right(c, Type::kF16).find("/r8/"), std::string::npos);
      }
    }
  }
}

// Some rows and keys of the last tile are padding, and so is a whole warpgroup of a second tile of 128 rows. The query
// is wide or has many rows: the lanes of a producer share the search for them.
TEST(NativeKernelsOfLargeQueries, TilesThatBlocksCut) {
  const struct {
    std::int64_t dim, heads;
    const char *q_form, *kernel;
  } kTiles[] = {{256, 2, "uniform", "hd256/r8"},  {256, 5, "ragged", "hd256/r16"},  {64, 20, "uniform", "hd64/r64"},
                {64, 45, "uniform", "hd64/r128"}, {80, 45, "ragged", "hd128/r128"}, {128, 45, "uniform", "hd128/r128"}};
  for (const auto& tile : kTiles) {
    SCOPED_TRACE(tile.kernel);
    for (const int blocks : {1, 2, 5}) {
      set_blocks(blocks);
      DecodeCase c = case_of("large_query", Type::kBF16, Type::kBF16, {65, 1, 300}, 1);
      c.dk = c.dv = tile.dim;
      c.hq = tile.heads;
      c.q_len = 3;
      c.q_form = tile.q_form;
      EXPECT_EQ(expect_right(c, Type::kBF16), std::string("decode/bf16/kv=bf16/") + tile.kernel + "/sm90a");
    }
  }
}

void expect_right(const MixedSpec& spec, const std::string& kernel) {
  MixedCall call(spec);
  model().launched.clear();
  ASSERT_NO_THROW(call.run()) << "seed " << model().seed - 1;
  ASSERT_FALSE(model().launched.empty());
  EXPECT_EQ(model().launched.front(), "decode/" + kernel + "/sm90a");  // before one that combines
  EXPECT_EQ(call.check(), "") << "seed " << model().seed - 1;
}

constexpr Type kFormats[] = {Type::kF16,  Type::kE4M3, Type::kE4M3Fnuz, Type::kQ8_0, Type::kQ4_0,
                             Type::kQ4_1, Type::kQ5_0, Type::kQ5_1,     Type::kIq4Nl};

MixedSpec spec_of(std::int64_t dim, std::int64_t kv_heads) {
  MixedSpec spec;
  spec.dk = spec.dv = dim;
  spec.hq = 4 * kv_heads;
  spec.hkv = kv_heads;
  return spec;
}

TEST(KernelsOfAnyFormats, OneSegmentOfEachFormat) {
  for (const Type format : kFormats) {
    SCOPED_TRACE(type_name(format));
    for (const int blocks : {1, 2}) {
      set_blocks(blocks);
      MixedSpec spec = spec_of(128, 2);
      spec.segments = {{format, format, {65, 0, 300}, Pages::kBlocks}};
      // Else a kernel of the very format, of blocks or of bytes reads it.
      spec.segments[0].scales = reference::is_of_bytes(format) ? Scales::kGroup : Scales::kRow;
      expect_right(spec, "fp16/kv=any/hd128/r8");
    }
  }
}

TEST(KernelsOfAnyFormats, FactorsOfRowsAndGroups) {
  set_blocks(2);
  for (const Type format : {Type::kI8, Type::kI4, Type::kE4M3, Type::kE5M2}) {
    SCOPED_TRACE(type_name(format));
    for (const Scales scales : {Scales::kRow, Scales::kGroup}) {
      MixedSpec spec = spec_of(128, 2);
      spec.segments = {{format, format, {65, 1, 300}, Pages::kBlocks, 16, scales}};
      const bool has_own = scales == Scales::kRow && format != Type::kI4;
      expect_right(spec, has_own ? "fp16/kv=bytes/hd128/r8" : "fp16/kv=any/hd128/r8");
    }
  }
}

// Kernels of int8 and int4 with factors of eight values, and of bytes with a factor of each row or without, on small
// and on large caches: heads that are copied together and others, chunks, and more blocks than chunks.
struct Factored {
  Type k, v;
  Scales scales;
  const char* formats;
};
class KernelsOfFactors : public testing::TestWithParam<Factored> {};

TEST_P(KernelsOfFactors, LengthsHeadsAndBlocks) {
  const auto& [k, v, scales, formats] = GetParam();
  const std::string kernel = "fp16/kv=" + std::string(formats) + "/hd128/r8";
  for (const std::int64_t room : {0, 110'000}) {
    for (const Lengths& lens : {Lengths{0, 1, 63}, Lengths{64, 65, 127}, Lengths{129, 1, 1000}, Lengths{2100}}) {
      for (const int blocks : {1, 3, 40}) {
        set_blocks(blocks);
        MixedSpec spec = spec_of(128, blocks == 3 ? 8 : 4);
        spec.segments = {{k, v, lens, Pages::kBlocks, 16, scales, room}};
        expect_right(spec, kernel + (room > 0 ? "/large" : ""));
      }
    }
  }
  set_blocks(2);
  for (const Pages pages : {Pages::kRows, Pages::kHeadsFirst, Pages::kTokens}) {
    MixedSpec spec = spec_of(128, pages == Pages::kRows ? 3 : 2);
    spec.segments = {{k, v, {65, 200}, pages, 16, scales}};
    expect_right(spec, kernel);
  }
  // Factors of fp16 of one token and an odd number of heads begin within a word.
  for (const std::int64_t heads : {2, 3}) {
    for (const std::int64_t page_size : {1, 2, 7, 16}) {
      MixedSpec spec = spec_of(128, heads);
      spec.segments = {{k, v, {65, 200}, Pages::kBlocks, page_size, scales}};
      const bool is_odd = has_half_rows(scales) && heads * page_size % 2 != 0;
      expect_right(spec, is_odd ? "fp16/kv=any/hd128/r8" : kernel);
    }
  }
  MixedSpec spec = spec_of(128, 2);
  spec.q_len = 3;
  spec.ragged = true;
  spec.segments = {{k, v, {65, 1, 300}, Pages::kBlocks, 16, scales}};
  expect_right(spec, kernel);
  for (const std::int64_t dim : {64, 96, 120}) {
    if (are_of_groups(scales)) continue;
    MixedSpec narrow = spec_of(dim, 2);
    narrow.segments = {{k, v, {65, 200}, Pages::kBlocks, 16, scales}};
    expect_right(narrow, kernel);
  }
}

INSTANTIATE_TEST_SUITE_P(Model, KernelsOfFactors,
                         testing::Values(Factored{Type::kI8, Type::kI8, Scales::kHalfGroup, "int8"},
                                         Factored{Type::kI4, Type::kI4, Scales::kHalfGroup, "int4"},
                                         Factored{Type::kI8, Type::kI8, Scales::kRow, "bytes"},
                                         Factored{Type::kE4M3, Type::kI8, Scales::kRow, "bytes"},
                                         Factored{Type::kE4M3, Type::kE4M3, Scales::kTurnedRow, "bytes"},
                                         Factored{Type::kE5M2, Type::kE4M3Fnuz, Scales::kTurnedRow, "bytes"},
                                         Factored{Type::kI8, Type::kI8, Scales::kHead, "bytes"},
                                         Factored{Type::kE4M3Fnuz, Type::kE5M2, Scales::kOne, "bytes"},
                                         Factored{Type::kE5M2, Type::kE5M2, Scales::kNone, "bytes"}),
                         [](const auto& info) {
                           return std::string(info.param.formats) + "_" + type_name(info.param.k) + "_" +
                                  type_name(info.param.v) + "_" + scales_name(info.param.scales);
                         });

TEST(KernelsOfAnyFormats, LengthsOfOneSegment) {
  for (const Lengths& lens : kShort) {
    for (const int blocks : {1, 3}) {
      set_blocks(blocks);
      MixedSpec spec = spec_of(128, blocks == 1 ? 1 : 2);
      spec.segments = {{Type::kQ5_1, Type::kE4M3Fnuz, lens, Pages::kBlocks}};
      expect_right(spec, "fp16/kv=any/hd128/r8");
    }
  }
  for (const Lengths& lens : kLong) {
    for (const int blocks : {1, 2, 5}) {
      set_blocks(blocks);
      MixedSpec spec = spec_of(128, 2);
      spec.segments = {{Type::kE4M3, Type::kQ5_0, lens, Pages::kBlocks}};
      expect_right(spec, "fp16/kv=any/hd128/r8");
    }
  }
}

// Borders between segments inside a turn and inside the 32 rows of a wave, in layouts of their own, some with factors.
std::vector<SegmentSpec> some_segments(const Lengths& lens, Type wide, Scales scales) {
  Lengths second, third;
  for (const std::int64_t length : lens) {
    second.push_back(length * 7 % 131);
    third.push_back(length % 3 == 0 ? 65 : length % 5);
  }
  return {{Type::kQ4_1, Type::kE4M3, lens, Pages::kBlocks, 16},
          {Type::kE4M3, Type::kE4M3, second, Pages::kTokens, 16, scales},
          {Type::kQ8_0, Type::kQ5_0, third, Pages::kHeadsFirst},
          {wide, wide, second, Pages::kBlocks, 7}};
}

TEST(KernelsOfAnyFormats, SeveralSegments) {
  for (const Scales scales : {Scales::kHead, Scales::kRow, Scales::kGroup}) {
    for (const Lengths& lens : {Lengths{0, 1, 63}, Lengths{64, 65, 127}, Lengths{128, 129, 1000}}) {
      for (const int blocks : {1, 3}) {
        set_blocks(blocks);
        MixedSpec spec = spec_of(128, 2);
        spec.segments = some_segments(lens, Type::kF16, scales);
        expect_right(spec, "fp16/kv=any/hd128/r8");
      }
    }
  }
}

TEST(KernelsOfAnyFormats, ManyShortTilesOfABlock) {
  set_blocks(1);
  MixedSpec spec = spec_of(128, 8);
  spec.segments = {{Type::kQ4_0, Type::kQ4_0, {1, 64, 3}, Pages::kBlocks}, {Type::kF16, Type::kF16, {5, 1, 0}}};
  expect_right(spec, "fp16/kv=any/hd128/r8");
}

TEST(KernelsOfAnyFormats, OfBf16) {
  for (const Lengths& lens : {Lengths{0, 1, 63}, Lengths{64, 65, 127}, Lengths{128, 129, 1000}}) {
    for (const int blocks : {1, 3}) {
      set_blocks(blocks);
      MixedSpec spec = spec_of(128, 2);
      spec.q = Type::kBF16;
      spec.segments = some_segments(lens, Type::kBF16, Scales::kRow);
      expect_right(spec, "bf16/kv=any/hd128/r8");
    }
  }
}

TEST(KernelsOfAnyFormats, SixteenRowsAndWiderHeads) {
  for (const std::int64_t dim : {128, 256, 512}) {
    for (const Lengths& lens : {Lengths{0, 1, 63}, Lengths{128, 129, 600}}) {
      for (const int blocks : {1, 3}) {
        set_blocks(blocks);
        MixedSpec spec = spec_of(dim, 2);
        spec.q_len = 3;
        spec.ragged = true;
        spec.segments = some_segments(lens, Type::kF16, Scales::kRow);
        expect_right(spec, "fp16/kv=any/hd" + std::to_string(dim) + "/r16");
      }
    }
  }
}

TEST(KernelsOfAnyFormats, Options) {
  set_blocks(2);
  MixedSpec spec = spec_of(96, 2);
  spec.q_len = 2;
  spec.segments = some_segments({128, 129, 300}, Type::kF16, Scales::kRow);
  {
    MixedSpec its = spec;
    its.window_left = 70;
    its.sinks = its.alibi = true;
    its.softcap = 5;
    expect_right(its, "fp16/kv=any/hd128/r8");
  }
  spec.mask = Type::kF16;
  expect_right(spec, "fp16/kv=any/hd128/r8");
}

TEST(KernelsOfAnyFormats, BitsDoNotDependOnTheBlocksNorOnTheirOrder) {
  MixedSpec spec = spec_of(128, 2);
  spec.segments = some_segments({300, 1, 700}, Type::kF16, Scales::kRow);
  MixedCall call(spec);
  set_blocks(1);
  call.run();
  std::vector<std::vector<unsigned char>> bits;
  for (int b = 0; b < 3; ++b) bits.push_back(call.bits(b));
  for (const int blocks : {1, 2, 3, 6}) {
    set_blocks(blocks);
    call.run();
    for (int b = 0; b < 3; ++b) {
      EXPECT_TRUE(call.bits(b) == bits[b])
          << "sequence " << b << ", " << blocks << " blocks, seed " << model().seed - 1;
    }
  }
}

}  // namespace
}  // namespace flashport_test

int main(int argc, char** argv) {
  flashport::machine::add_native_kernels(flashport::machine::model().kernels);
  flashport::machine::add_kernels_of_any_formats(flashport::machine::model().kernels);
  flashport::machine::add_kernels_of_segments(flashport::machine::model().kernels);
  return flashport_test::run_tests_on_model(&argc, argv);
}
