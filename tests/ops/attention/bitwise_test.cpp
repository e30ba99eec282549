// The bits of a row follow from its own query and visible keys alone: equal alone, in any batch, on any number of
// multiprocessors, for a prompt cut into chunks, and on repeat.
#include <gtest/gtest.h>

#include <flashport/backend.h>

#include <algorithm>
#include <array>

#include "tests/ops/attention/call.h"
#include "tests/support/expected_support.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

using reference::Type;
using Lengths = std::vector<std::int64_t>;
using Bits = std::vector<unsigned char>;

// Sequences of (queries, keys) that are known by their number.
struct Sequences {
  Lengths q_lens, kv_lens;
};
Sequences sequences() {
  if (options().emulator) return {{65, 1, 0, 33, 70}, {130, 70, 5, 20, 0}};
  return {{257, 1, 64, 700, 0, 200, 193, 130, 17}, {500, 300, 64, 700, 50, 0, 1500, 129, 16}};
}

std::array<int, 3> limits() { return options().emulator ? std::array{1, 2, 3} : std::array{1, 7, 0}; }

// The case with these sequences as its batch.
AttentionCase with(AttentionCase c, const Lengths& ids) {
  const Sequences all = sequences();
  c.ids = ids;
  c.q_lens.clear();
  c.kv_lens.clear();
  for (const std::int64_t id : ids) {
    c.q_lens.push_back(all.q_lens[static_cast<std::size_t>(id)]);
    c.kv_lens.push_back(all.kv_lens[static_cast<std::size_t>(id)]);
  }
  return c;
}

// With each sequence once, packed where that can be.
AttentionCase with_all(const AttentionCase& shape) {
  Lengths ids(sequences().q_lens.size());
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  AttentionCase c = with(shape, ids);
  c.packed = c.bias == Bias::kNone;
  c.used_q = c.used_k = !c.packed;
  return c;
}

class AttentionBitwise : public testing::TestWithParam<AttentionCase> {
 protected:
  void TearDown() override { flashport::set_multiprocessor_limit(options().emulator ? 3 : 0); }
};

std::vector<AttentionCase> shapes() {
  return {
      {.name = "bitwise_bf16_d128_causal", .dim_qk = 128, .dim_v = 128, .causal = true},
      {.name = "bitwise_fp16_d64", .type = Type::kF16},
      {.name = "bitwise_bf16_d64_window", .causal = true, .window_left = 90},
      {.name = "bitwise_bf16_d192x128_g6", .dim_qk = 192, .dim_v = 128, .q_heads = 6, .kv_heads = 1, .causal = true},
      {.name = "bitwise_bf16_d256_causal", .dim_qk = 256, .dim_v = 256, .q_heads = 2, .kv_heads = 1, .causal = true},
      {.name = "bitwise_fp16_d96_any",
       .type = Type::kF16,
       .dim_qk = 96,
       .dim_v = 96,
       .causal = true,
       .softcap = 10,
       .slopes = Slopes::kOfHeads,
       .sinks = true},
      {.name = "bitwise_bf16_d64_softcap", .causal = true, .softcap = 30},
      {.name = "bitwise_bf16_d128_softcap", .dim_qk = 128, .dim_v = 128, .causal = true, .softcap = 50},
      {.name = "bitwise_blocks_q8_q4_d128_causal",
       .dim_qk = 128,
       .dim_v = 128,
       .kv_heads = 1,
       .kv_type = Type::kQ8_0,
       .v_type = Type::kQ4_0,
       .causal = true},
      {.name = "bitwise_formats_e4m3_q8_d128_window",
       .type = Type::kF16,
       .dim_qk = 128,
       .dim_v = 128,
       .kv_type = Type::kE4M3,
       .v_type = Type::kQ8_0,
       .causal = true,
       .window_left = 90},
      {.name = "bitwise_fp32_d40", .type = Type::kF32, .dim_qk = 40, .dim_v = 40, .causal = true},
  };
}

// Of a bias, which pages do not have.
std::vector<AttentionCase> bias_shapes() {
  return {
      {.name = "bitwise_bf16_d128_bias", .dim_qk = 128, .dim_v = 128, .causal = true, .bias = Bias::kOwnType},
      {.name = "bitwise_fp16_d64_bias_of_all", .type = Type::kF16, .bias = Bias::kOwnTypeOfAll},
      {.name = "bitwise_bf16_d64_bias_fp32", .causal = true, .bias = Bias::kOfAllHeads},
      {.name = "bitwise_bf16_d192x128_bias", .dim_qk = 192, .dim_v = 128, .causal = true, .bias = Bias::kOwnType},
  };
}

std::vector<AttentionCase> dropout_shapes() {
  return {
      {.name = "bitwise_bf16_d64_dropout", .causal = true, .dropout = 0.3},
      {.name = "bitwise_bf16_d128_dropout", .dim_qk = 128, .dim_v = 128, .causal = true, .dropout = 0.3},
      {.name = "bitwise_bf16_d192x128_dropout", .dim_qk = 192, .dim_v = 128, .causal = true, .dropout = 0.3},
  };
}

TEST_P(AttentionBitwise, AloneInBatchesAndOnAnyNumberOfMultiprocessors) {
  const AttentionCase& shape = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(shape.support_name(), flashport::supports(shape.query()));
  const auto count = static_cast<std::int64_t>(sequences().q_lens.size());
  std::vector<Bits> alone;
  for (std::int64_t id = 0; id < count; ++id) {
    AttentionCall call(with(shape, {id}));
    call.run();
    alone.push_back(call.bits(0));
  }
  Random random(12);
  for (int round = 0; round < 4; ++round) {
    Lengths ids = random.permutation(count);
    for (std::int64_t& id : ids) id = round < 2 ? id : random.below(count);
    AttentionCase c = with(shape, ids);
    c.packed = round % 2 == 0 && c.bias == Bias::kNone;
    c.used_q = c.used_k = round > 0 || !c.packed;
    AttentionCall call(c);
    for (const int limit : limits()) {
      flashport::set_multiprocessor_limit(limit);
      call.run();
      for (std::size_t b = 0; b < ids.size(); ++b) {
        EXPECT_TRUE(call.bits(static_cast<std::int64_t>(b)) == alone[static_cast<std::size_t>(ids[b])])
            << "round " << round << ", " << limit << " multiprocessors, index " << b << " of " << c;
      }
    }
  }
}

// Tokens [first, first + count) of the axis.
flashport::TensorView part(flashport::TensorView view, int axis, std::int64_t first, std::int64_t count) {
  view.data = static_cast<char*>(view.data) + first * view.strides[axis] * flashport::element_size(view.dtype);
  view.shape[axis] = count;
  return view;
}

// The prompt's tokens [first, first + count), which see all keys before them.
flashport::AttentionArgs chunk(flashport::AttentionArgs a, std::int64_t first, std::int64_t count) {
  a.q = part(a.q, 1, first, count);
  a.out = part(a.out, 1, first, count);
  a.lse = part(*a.lse, 2, first, count);
  a.k = part(a.k, 1, 0, first + count);
  a.v = part(a.v, 1, 0, first + count);
  if (a.bias) a.bias = part(part(*a.bias, 2, first, count), 3, 0, first + count);
  return a;
}

TEST_P(AttentionBitwise, OfAPromptInChunks) {
  AttentionCase c = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(c.query()));
  const bool few = options().emulator;
  const std::int64_t tokens = few ? 150 : 4500;
  c.causal = true;
  c.splits = 1;  // chunks of few queries are cut otherwise
  c.q_heads = 2;
  c.kv_heads = 1;
  c.q_lens = c.kv_lens = {tokens};
  AttentionCall call(c);
  call.run();
  const Bits whole = call.bits();
  for (const std::int64_t size : few ? std::array<std::int64_t, 2>{40, 100} : std::array<std::int64_t, 2>{100, 4096}) {
    call.poison_outputs();
    for (std::int64_t first = 0; first < tokens; first += size) {
      flashport::attention(chunk(call.args(), first, std::min(size, tokens - first)));
    }
    call.fetch();
    EXPECT_TRUE(call.bits() == whole) << "chunks of " << size;
  }
  // Single tokens, as decoding would have them.
  Random random(3);
  Lengths rows = {0, 1, 63, 64, 65, tokens - 1};
  for (int i = 0; i < 10; ++i) rows.push_back(random.below(tokens));
  for (const std::int64_t row : rows) flashport::attention(chunk(call.args(), row, 1));
  call.fetch();
  EXPECT_TRUE(call.bits() == whole) << "single tokens";
}

TEST_P(AttentionBitwise, OnRepeat) {
  const AttentionCase& shape = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(shape.support_name(), flashport::supports(shape.query()));
  AttentionCall call(with_all(shape));
  call.run();
  const Bits first = call.bits();
  for (int repeat = 0; repeat < (options().emulator ? 2 : 10); ++repeat) {
    call.run();
    EXPECT_TRUE(call.bits() == first) << repeat;
  }
}

class AttentionBitwiseOnPages : public AttentionBitwise {};

// By whichever copies keys come; where one kernel reads pages and tensors, the same as from tensors.
TEST_P(AttentionBitwiseOnPages, OfAnySize) {
  AttentionCase c = with(GetParam(), {0, 1, 2, 3, 4});
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(c.query()));
  c.packed = true;
  AttentionCase first = c;
  first.pages = Pages::kBlockTable;
  if (flashport::which_kernel(first.query()) == flashport::which_kernel(c.query())) first.pages = Pages::kNone;
  AttentionCall call(first);
  call.run();
  const std::array<std::int64_t, 12> sizes = {1, 2, 4, 7, 8, 16, 24, 48, 64, 100, 256, 384};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (options().emulator && i % 4 != 0) continue;
    for (const Layout layout : {Layout::kDense, Layout::kOddQueries}) {
      c.pages = i % 3 == 0 ? Pages::kCsr : i % 3 == 1 ? Pages::kBlockTable : Pages::kBlockTableHnd;
      c.page_size = sizes[i];
      c.layout = layout;
      AttentionCall paged(c);
      paged.run();
      EXPECT_TRUE(paged.bits() == call.bits()) << "pages of " << sizes[i] << ", " << c;
    }
  }
}

class AttentionBitwiseDropout : public AttentionBitwise {};

// Which weights are dropped follows from a sequence's place in its batch, so the batch stays as it is.
TEST_P(AttentionBitwiseDropout, OnAnyNumberOfMultiprocessors) {
  FLASHPORT_REQUIRE_SUPPORT(GetParam().support_name(), flashport::supports(GetParam().query()));
  const AttentionCase c = with_all(GetParam());
  AttentionCall call(c);
  call.run();
  const Bits first = call.bits();
  for (const int limit : limits()) {
    flashport::set_multiprocessor_limit(limit);
    call.run();
    EXPECT_TRUE(call.bits() == first) << limit << " multiprocessors, " << c;
  }
}

std::string name_of(const testing::TestParamInfo<AttentionCase>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionBitwise, testing::ValuesIn(shapes()), name_of);
INSTANTIATE_TEST_SUITE_P(Bias, AttentionBitwise, testing::ValuesIn(bias_shapes()), name_of);
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionBitwiseDropout, testing::ValuesIn(dropout_shapes()), name_of);
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionBitwiseOnPages, testing::ValuesIn(shapes()), name_of);

}  // namespace
}  // namespace flashport_test
