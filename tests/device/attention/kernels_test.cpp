// Whole attention kernels of sm90a, from the public call to the output, by their own text on a multiprocessor of the
// host (machine.h): against the oracle, within the tolerance of DESIGN's numerics.
#include <gtest/gtest.h>

#include <flashport/backend.h>

#include <algorithm>
#include <sstream>

#include "tests/device/attention/model_tables.h"
#include "tests/device/machine/model_backend.h"
#include "tests/device/machine/model_main.h"
#include "tests/ops/attention/call.h"

namespace flashport_test {
namespace {

using flashport::machine::model;
using reference::Type;
using Lengths = std::vector<std::int64_t>;

void set_blocks(int blocks) { flashport::set_multiprocessor_limit(blocks); }

// A kernel, and the options of calls that are its own.
struct Kernel {
  std::string key;
  Type type;
  std::int64_t dim;
  AttentionCase options = {};
  [[nodiscard]] bool has_bias() const { return options.bias != Bias::kNone; }
};
void PrintTo(const Kernel& kernel, std::ostream* out) { *out << kernel.key; }

// Blocks compute by two warpgroups, or by three (bf16/hd64/plain); at head_dim 512 each has its columns of V.
const Kernel kKernels[] = {
    {"bf16/hd64/plain", Type::kBF16, 64},
    {"bf16/hd128/plain", Type::kBF16, 128},
    {"bf16/hd256/plain", Type::kBF16, 256},
    {"bf16/hd64/softcap", Type::kBF16, 64, {.name = "", .softcap = 5}},
    {"bf16/hd256/softcap", Type::kBF16, 256, {.name = "", .softcap = 5}},
    {"fp16/hd128/bias", Type::kF16, 128, {.name = "", .bias = Bias::kOwnType}},
    {"bf16/hd128/any", Type::kBF16, 128, {.name = "", .softcap = 5, .slopes = Slopes::kOfHeads, .dropout = 0.3}},
    {"bf16/hd512/any", Type::kBF16, 512, {.name = "", .softcap = 5}},
    {"fp16/hd128/plain/scaled", Type::kF16, 128, {.name = "", .kv_type = Type::kQ8_0}},
};

class AttentionKernels : public testing::TestWithParam<Kernel> {
 protected:
  static std::string key() { return "attention/" + GetParam().key + "/sm90a"; }
  // The queries of a work tile, and the keys of a key tile.
  static const flashport::AttentionTuning& tuning() {
    const auto is_it = [](const flashport::KernelEntry& kernel) { return kernel.key == key(); };
    return std::ranges::find_if(model().kernels, is_it)->shape.attention.tuning;
  }
  static std::int64_t rows() { return tuning().rows; }
  static std::int64_t keys() { return tuning().keys; }
  static AttentionCase make(const Lengths& q_lens, const Lengths& kv_lens) {
    const Kernel& kernel = GetParam();
    AttentionCase c = kernel.options;
    c.name = "kernels";
    c.type = kernel.type;
    c.dim_qk = c.dim_v = kernel.dim;
    c.q_heads = c.kv_heads = 1;
    c.q_lens = q_lens;
    c.kv_lens = kv_lens;
    if (kernel.has_bias()) {  // whose rows are aligned
      for (std::int64_t& count : c.kv_lens) count = (count + 7) / 8 * 8;
    }
    return c;
  }
  // Holds the case against the oracle on so many blocks.
  static void expect_right(const AttentionCase& c, const std::vector<int>& blocks = {3}) {
    AttentionCall call(c);
    for (const int count : blocks) {
      set_blocks(count);
      std::ostringstream text;
      text << c << ", " << count << " blocks, seed " << model().seed;
      SCOPED_TRACE(text.str());
      model().launched.clear();
      ASSERT_NO_THROW(call.run());
      EXPECT_EQ(call.check(), "");
      ASSERT_FALSE(model().launched.empty());
      EXPECT_EQ(model().launched.front(), key());
    }
  }
};

// Lengths around those of tiles.
TEST_P(AttentionKernels, TileEdges) {
  const struct {
    std::int64_t q_len, kv_len;
  } kLengths[] = {{1, 1},
                  {1, keys() + 1},
                  {63, keys() - 1},
                  {64, keys()},
                  {65, keys() + 1},
                  {rows() - 1, 2 * keys()},
                  {rows(), 2 * keys() + 1},
                  {rows() + 1, 2 * keys() - 1},
                  {rows() + 1, keys()},
                  {rows() + 2, 5},
                  {7, 0}};
  for (const bool causal : {false, true}) {
    for (const auto& [q_len, kv_len] : kLengths) {
      if (GetParam().has_bias() && kv_len == 0) continue;
      AttentionCase c = make({q_len}, {kv_len});
      c.causal = causal;
      expect_right(c);
    }
  }
}

// Rows that see one key have its value, whatever its weight is.
TEST_P(AttentionKernels, OneKey) {
  for (const std::int64_t kv_heads : {1, 2}) {
    AttentionCase c = make({rows() + 70}, {1});
    c.q_heads = 4;
    c.kv_heads = kv_heads;
    expect_right(c);
  }
}

// Loops with masks at both ends, more tiles than stages, and several work tiles of a block.
TEST_P(AttentionKernels, SeveralTiles) {
  for (const int window : {-1, 0, 1}) {
    AttentionCase c = make({rows() + 30}, {4 * keys() + 9});
    c.q_heads = 2;
    if (window >= 0) c.window_left = keys() + 70;
    if (window == 1) c.window_right = keys() - 1;
    c.causal = window == 0;
    expect_right(c, {1, 3});
  }
}

TEST_P(AttentionKernels, HeadsAndPackedSequences) {
  for (const std::int64_t kv_heads : {1, 3}) {
    AttentionCase c = make({70, 70}, {150, 150});
    c.q_heads = 3;
    c.kv_heads = kv_heads;
    c.causal = true;
    c.sinks = true;
    expect_right(c);
  }
  if (GetParam().has_bias()) return;
  for (const bool used : {false, true}) {
    AttentionCase c = make({5, 0, rows() + 2, 1}, {70, 3, 2 * keys() + 1, 0});
    c.packed = c.causal = true;
    c.used_q = c.used_k = c.leftpad = used;
    expect_right(c, {1, 3});
  }
}

// Boxes of pages and rows of smaller ones, with a left pad.
TEST_P(AttentionKernels, PagesOfKeys) {
  if (GetParam().has_bias()) return;
  for (const auto& [pages, size] : {std::pair<Pages, int>{Pages::kBlockTable, 1},
                                    {Pages::kBlockTable, 16},
                                    {Pages::kBlockTable, 5},
                                    {Pages::kBlockTableHnd, 300},
                                    {Pages::kTokenTable, 1},
                                    {Pages::kCsr, 16}}) {
    AttentionCase c = make({70, 70, 70}, {keys() + 75, 0, keys() + 3});
    c.pages = pages;
    c.page_size = size;
    c.kv_heads = c.q_heads = 2;
    c.causal = true;
    expect_right(c);
    if (size != 16) continue;
    c.packed = c.leftpad = true;
    c.q_lens = {5, 130, 0};
    expect_right(c);
  }
}

// Rows that TMA does not read, in part or at all.
TEST_P(AttentionKernels, Layouts) {
  for (const Layout layout :
       {Layout::kProjection, Layout::kHeadsFirst, Layout::kGaps, Layout::kOdd, Layout::kOddQueries}) {
    const std::int64_t q_len = rows() + 3, kv_len = keys() + 75;
    AttentionCase c = make({q_len, q_len}, {kv_len, kv_len});
    if (layout == Layout::kOdd && c.kv_type) continue;  // rows of bytes begin at even addresses
    c.layout = layout;
    c.causal = true;
    if (layout == Layout::kOdd) c.dim_v = c.dim_qk - 8;
    expect_right(c);
  }
}

// Formats that a kernel widens, with factors beside their rows, too; by boxes, and on small pages by rows; for queries
// of either type of 16 bits.
TEST_P(AttentionKernels, FormatsOfKeys) {
  if (!GetParam().options.kv_type) return;
  for (const auto& [k_type, v_type] :
       {std::pair{Type::kE4M3, Type::kQ4_0}, {Type::kF16, Type::kQ8_0}, {Type::kQ5_1, Type::kF16}}) {
    for (const std::int64_t page_size : {16, 3}) {
      AttentionCase c = make({70, 70, 70}, {keys() + 75, 0, keys() + 3});
      c.kv_type = k_type;
      c.v_type = v_type;
      c.pages = Pages::kBlockTable;
      c.page_size = page_size;
      c.causal = true;
      if (k_type == Type::kE4M3) c.k_beside = Beside::kRow;
      expect_right(c);
      if (k_type == Type::kF16 || v_type == Type::kF16) continue;  // caches of queries' own other type
      c.type = Type::kBF16;
      expect_right(c);
    }
  }
}

// Two heads of a kv head share the tiles of narrow keys: several work tiles of one pair of blocks or two, of tensors
// and of pages, with factors beside rows and without. On pages of three tokens rows come without TMA, and are not
// shared.
TEST_P(AttentionKernels, HeadsThatShareTiles) {
  if (!GetParam().options.kv_type) return;
  for (const auto& [k_type, v_type] :
       {std::pair{Type::kQ8_0, Type::kQ8_0}, {Type::kE4M3, Type::kQ4_0}, {Type::kQ5_1, Type::kE4M3Fnuz}}) {
    for (const std::int64_t page_size : {0, 16, 3}) {
      for (const int group : {2, 4}) {
        AttentionCase c = make({70, 70, 70}, {2 * keys() + 75, 0, keys() + 3});
        c.q_heads = 4;
        c.kv_heads = 4 / group;
        c.kv_type = k_type;
        c.v_type = v_type;
        c.causal = group == 4;
        if (group == 2) c.window_left = keys() + 9;
        if (page_size == 0) {
          c.packed = true;
          c.q_lens = {5, rows() + 2, 0};
        } else {
          c.pages = Pages::kBlockTable;
          c.page_size = page_size;
        }
        if (k_type == Type::kE4M3) c.k_beside = Beside::kRow;
        if (k_type != Type::kQ8_0) c.type = Type::kBF16;
        model().resident = 4;
        expect_right(c, {2, 2, 3, 5});
      }
    }
  }
}

// Logits as far from 0 as caps let them be, of rows with one key and with none, too.
TEST_P(AttentionKernels, LogitsAtTheirCap) {
  if (GetParam().options.softcap == 0) return;
  for (const int splits : {flashport::kInvariantSplits, 2}) {
    AttentionCase c = make({70, 5, 3}, {2 * keys() + 9, 1, 0});
    c.packed = true;
    c.softcap = 50;
    c.scale = 8;
    c.splits = splits;
    c.sinks = splits == 2;
    expect_right(c);
  }
}

TEST_P(AttentionKernels, KeysCutIntoPieces) {
  AttentionCase c = make({70, 1}, {3 * keys() + 7, 2 * keys()});
  c.packed = !GetParam().has_bias();
  if (!c.packed) c.q_lens[1] = c.q_lens[0], c.kv_lens[1] = c.kv_lens[0];
  c.splits = 2;
  c.causal = true;
  expect_right(c);
}

TEST_P(AttentionKernels, BitsDoNotDependOnTheBlocksNorOnTheirOrder) {
  const std::int64_t q_len = rows() + 72, kv_len = 2 * keys() + 44;
  AttentionCase c = make({q_len, q_len}, {kv_len, kv_len});
  c.causal = true;
  AttentionCall call(c);
  set_blocks(1);
  call.run();
  const auto bits = call.bits();
  for (const int blocks : {1, 2, 3}) {
    set_blocks(blocks);
    call.run();
    EXPECT_TRUE(call.bits() == bits) << blocks << " blocks, seed " << model().seed - 1;
  }
}

INSTANTIATE_TEST_SUITE_P(Model, AttentionKernels, testing::ValuesIn(kKernels), [](const auto& info) {
  std::string name = info.param.key;
  std::ranges::replace(name, '/', '_');
  return name;
});

// Around the ends of key tiles, of their parts and of rows; each count of keys is a stride of rows. In the kernel of
// all options lanes read their biases. In those of a bias alone rows come to shared memory, by one warp where TMA does
// not read keys and values, and else by two; a warpgroup has one stage or several.
TEST(AttentionKernelsBias, InRowsAtAnyAddress) {
  const struct {
    const char* kernel;
    Type type;
    std::int64_t dim_qk, dim_v;
    double softcap;
    Layout layout;
  } calls[] = {{"bf16/hd128/any", Type::kBF16, 128, 128, 5, Layout::kDense},
               {"fp16/hd128/bias", Type::kF16, 128, 128, 0, Layout::kDense},
               {"fp16/hd128/bias", Type::kF16, 128, 128, 0, Layout::kOdd},
               {"bf16/hd64/bias", Type::kBF16, 64, 64, 0, Layout::kDense},
               {"bf16/hd192x128/bias", Type::kBF16, 192, 128, 0, Layout::kDense},
               {"bf16/hd256/bias", Type::kBF16, 256, 256, 0, Layout::kDense}};
  for (const auto& [kernel, type, dim_qk, dim_v, softcap, layout] : calls) {
    for (const Bias bias : {Bias::kOwnType, Bias::kOwnTypeOfAll, Bias::kFloat, Bias::kOfKeys}) {
      for (const std::int64_t keys : {1, 2, 3, 7, 31, 33, 63, 66, 127, 128, 129, 130, 255, 256, 259}) {
        AttentionCase c = {
            .name = "any_bias", .type = type, .dim_qk = dim_qk, .dim_v = dim_v, .q_heads = 2, .kv_heads = 1};
        c.q_lens = {150};
        c.kv_lens = {keys};
        c.softcap = softcap;
        c.bias = bias;
        c.layout = layout;
        AttentionCall call(c);
        set_blocks(3);
        model().launched.clear();
        ASSERT_NO_THROW(call.run()) << c;
        EXPECT_EQ(call.check(), "") << c;
        ASSERT_FALSE(model().launched.empty());
        EXPECT_EQ(model().launched.front(), std::string("attention/") + kernel + "/sm90a");
      }
    }
  }
  set_blocks(0);
}

}  // namespace
}  // namespace flashport_test

int main(int argc, char** argv) {
  flashport::machine::add_plain_kernels(flashport::machine::model().kernels);
  flashport::machine::add_kernels_with_options(flashport::machine::model().kernels);
  flashport::machine::add_kernels_that_widen(flashport::machine::model().kernels);
  return flashport_test::run_tests_on_model(&argc, argv);
}
