// Whole decode kernels of sm90a, from the public call to the output, by their own text on a multiprocessor of the host
// (machine.h): against the oracle, within the tolerance of DESIGN's numerics. The kernel of bf16 is a control: what it
// shows wrong is wrong with the model.
#include <gtest/gtest.h>

#include <flashport/decode.h>

#include "tests/device/decode/lengths.h"
#include "tests/device/decode/model_tables.h"
#include "tests/device/machine/model_backend.h"
#include "tests/device/machine/model_main.h"
#include "tests/ops/decode/call.h"
#include "tests/reference/blocks.h"

namespace flashport_test {
namespace {

using flashport::machine::model;
using reference::Type;

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

}  // namespace
}  // namespace flashport_test

int main(int argc, char** argv) {
  flashport::machine::add_native_kernels(flashport::machine::model().kernels);
  flashport::machine::add_kernels_of_any_formats(flashport::machine::model().kernels);
  flashport::machine::add_kernels_of_segments(flashport::machine::model().kernels);
  return flashport_test::run_tests_on_model(&argc, argv);
}
