// Which calls are plain, and so get a kernel that has no code for options.
#include <functional>
#include <string>
#include <vector>

#include "tests/host/decode/plan_fixture.h"

namespace flashport::test {
namespace {

const char* const kPlainKey = "decode_plain/bf16/kv=bf16/hd64/r16/fakegpu";
const char* const kLargeKey = "decode_plain/bf16/kv=bf16/hd64/r16/large/fakegpu";
const char* const kKey = "decode/bf16/kv=bf16/hd64/r16/fakegpu";

class PlainCalls : public PlanDecode {
 protected:
  std::string kernel_of(const DecodeArgs& args) { return plan(args).kernel->key; }
  // Pages of 16 keys that a request has room for, in a table that is not looked at.
  void make_room(DecodeInputs& inputs, std::int64_t pages) {
    inputs.args.block_table = ints(inputs.pages.data(), {3, pages});
    inputs.args.block_table->strides[0] = 10;
  }
  DecodeInputs inputs_{kGpu, 64};
  DecodeArgs& a_ = inputs_.args;
};

TEST_F(PlainCalls, AskForNothing) {
  EXPECT_EQ(kernel_of(a_), kPlainKey);
  a_.kv_layout = KvLayout::kHND;
  a_.k_cache = a_.v_cache = TensorView(scratch_at(16 << 20), DType::kBFloat16, kGpu, {64, 2, 16, 64});
  EXPECT_EQ(kernel_of(a_), kPlainKey);
  float scale = 1.0f;
  a_.k_scale = a_.v_scale = TensorView(&scale, DType::kFloat32, kGpu, {1});
  EXPECT_EQ(kernel_of(a_), kPlainKey);
}

TEST_F(PlainCalls, TablesOfTokensAndContiguousKeys) {
  std::int64_t rows[3] = {2, 0, 1};
  a_.block_table.reset();
  a_.k_cache = a_.v_cache = TensorView(scratch_at(16 << 20), DType::kBFloat16, kGpu, {1000, 2, 64});
  a_.token_table = ints(inputs_.pages.data(), {3, 10});
  a_.request_index = TensorView(rows, DType::kInt64, kGpu, {3});
  EXPECT_EQ(kernel_of(a_), kPlainKey);
  a_.token_table.reset();
  a_.request_index.reset();
  a_.k_cache = a_.v_cache = TensorView(scratch_at(16 << 20), DType::kBFloat16, kGpu, {3, 200, 2, 64});
  EXPECT_EQ(kernel_of(a_), kPlainKey);
}

TEST_F(PlainCalls, OfOtherFormats) {
  DecodeInputs inputs(kGpu, 128);
  DecodeArgs& a = inputs.args;
  a.k_cache = a.v_cache = TensorView(scratch_at(16 << 20), DType::kUInt8, kGpu, {64, 16, 2, 136});
  a.k_format = a.v_format = KvFormat::kQ8_0;
  EXPECT_EQ(kernel_of(a), "decode_plain/fp16/kv=q8_0/hd128/r16/fakegpu");  // queries are converted
  a.q.dtype = DType::kFloat16;
  EXPECT_EQ(kernel_of(a), "decode_plain/fp16/kv=q8_0/hd128/r16/fakegpu");
  a.out.dtype = DType::kFloat32;
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=q8_0/hd128/r16/fakegpu");
}

TEST_F(PlainCalls, HaveACombineOfTheirOwn) {
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  a.q = a.out = TensorView(scratch(), DType::kBFloat16, kGpu, {3, 64, 128});
  a.out.data = scratch_at(1 << 19);
  EXPECT_STREQ(plan(a).combine_kernel->key, "decode_plain_combine/fakegpu");
  a.softcap = 30.0;
  EXPECT_STREQ(plan(a).combine_kernel->key, "decode_combine/fakegpu");
}

// 3 x 260'417 keys of 2 x 256 bytes.
constexpr std::int64_t kLargePages = 16'277;

class PlansOfLargeCaches : public PlainCalls, public testing::WithParamInterface<int> {};

TEST_F(PlainCalls, OnLargeCaches) {
  make_room(inputs_, kLargePages - 1);
  EXPECT_EQ(kernel_of(a_), kPlainKey);
  make_room(inputs_, kLargePages);
  EXPECT_EQ(kernel_of(a_), kLargeKey);
  a_.softcap = 30.0;
  EXPECT_EQ(kernel_of(a_), kKey);
  DecodeInputs inputs(kGpu);
  inputs.args.q = inputs.args.out = TensorView(scratch(), DType::kBFloat16, kGpu, {3, 64, 128});
  inputs.args.out.data = scratch_at(1 << 19);
  make_room(inputs, kLargePages);  // of a shape that has one kernel for all caches
  EXPECT_EQ(kernel_of(inputs.args), "decode_plain/bf16/kv=bf16/hd128/r64/fakegpu");
}

// The kernel of large caches cuts them alike, so that bits are the same; its teams are its own.
TEST_P(PlansOfLargeCaches, AreThoseOfOtherKernels) {
  fake_state().multiprocessors = GetParam();
  make_room(inputs_, kLargePages);
  const DecodePlan large = plan(a_);
  a_.lse = TensorView(scratch_at(1 << 18), DType::kFloat32, kGpu, {3, 8});
  const DecodePlan other = plan(a_);
  EXPECT_STREQ(large.kernel->key, kLargeKey);
  EXPECT_STREQ(other.kernel->key, kKey);
  EXPECT_EQ(large.grid, other.grid);
  EXPECT_EQ(large.workspace_bytes, other.workspace_bytes);
  const DecodeParams &p = large.params, &q = other.params;
  EXPECT_EQ(p.chunk_rule.target_shift, q.chunk_rule.target_shift);
  EXPECT_EQ(p.chunk_rule.least_shift, q.chunk_rule.least_shift);
  EXPECT_EQ(p.chunk_rule.finer, q.chunk_rule.finer);
  EXPECT_EQ(p.side_partials, q.side_partials);
  for (int cut = 0; cut < 2; ++cut) {
    EXPECT_EQ(p.cuts[cut].concurrent.value, q.cuts[cut].concurrent.value);
    EXPECT_EQ(p.cuts[cut].ranges.value, q.cuts[cut].ranges.value);
  }
  EXPECT_FALSE(p.teams_help);
  EXPECT_FALSE(q.teams_help);
}
INSTANTIATE_TEST_SUITE_P(Decode, PlansOfLargeCaches, testing::Values(10, 132, 4000));

// Caches of blocks are large from 400,000 keys on, and have such a kernel for calls with options, too.
TEST_F(PlainCalls, OnLargeCachesOfBlocks) {
  DecodeInputs inputs(kGpu, 128);
  DecodeArgs& a = inputs.args;
  const auto have_heads = [&](std::int64_t heads) {
    a.q = a.out = TensorView(scratch(), DType::kBFloat16, kGpu, {3, 2 * heads, 128});
    a.out.data = scratch_at(1 << 19);
    a.k_cache = a.v_cache = TensorView(scratch_at(16 << 20), DType::kUInt8, kGpu, {64, 16, heads, 136});
  };
  a.k_format = a.v_format = KvFormat::kQ8_0;
  have_heads(4);
  constexpr std::int64_t kPages = 2084;  // 3 x 33'344 keys of four heads
  make_room(inputs, kPages - 1);
  EXPECT_EQ(kernel_of(a), "decode_plain/fp16/kv=q8_0/hd128/r16/fakegpu");
  make_room(inputs, kPages);
  const DecodePlan large = plan(a);
  EXPECT_STREQ(large.kernel->key, "decode_plain/fp16/kv=q8_0/hd128/r16/large/fakegpu");
  EXPECT_EQ(large.params.slices, 2);
  a.softcap = 30.0;
  const DecodePlan other = plan(a);
  EXPECT_STREQ(other.kernel->key, "decode/fp16/kv=q8_0/hd128/r16/large/fakegpu");
  EXPECT_EQ(other.grid, large.grid);
  EXPECT_EQ(other.workspace_bytes, large.workspace_bytes);
  make_room(inputs, kPages - 1);
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=q8_0/hd128/r16/fakegpu");
  make_room(inputs, 2 * kPages);
  have_heads(6);  // which four teams do not share
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=q8_0/hd128/r16/fakegpu");
  have_heads(4);
  a.k_cache.data = scratch_at((16 << 20) + 8);  // copies of 16 bytes need more
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=q8_0/hd128/r16/fakegpu");
  have_heads(4);
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=q8_0/hd128/r16/large/fakegpu");
  static std::int32_t starts[4] = {0, 1, 2, 3};
  a.block_table.reset();
  a.kv_indptr = ints(starts, {4});
  a.kv_indices = ints(inputs.pages.data(), {3 * kPages - 10});  // of all requests together
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=q8_0/hd128/r16/fakegpu");
  a.kv_indices = ints(inputs.pages.data(), {3 * kPages + 10});
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=q8_0/hd128/r16/large/fakegpu");
}

// Where there is no kernel for plain calls, they take the one for all calls.
TEST_F(PlainCalls, OnLargeCachesOfAPairWithoutAKernelOfTheirOwn) {
  DecodeInputs inputs(kGpu, 128);
  DecodeArgs& a = inputs.args;
  a.q = a.out = TensorView(scratch(), DType::kBFloat16, kGpu, {3, 8, 128});
  a.out.data = scratch_at(1 << 19);
  a.k_cache = TensorView(scratch_at(16 << 20), DType::kUInt8, kGpu, {64, 16, 4, 136});
  a.v_cache = TensorView(scratch_at(16 << 20), DType::kFp8E4M3, kGpu, {64, 16, 4, 128});
  a.k_format = KvFormat::kQ8_0;
  a.v_format = KvFormat::kFp8E4M3;
  constexpr std::int64_t kPages = 2084;  // 3 x 33'344 keys of four heads
  make_room(inputs, kPages - 1);
  EXPECT_EQ(kernel_of(a), "decode/fp16/k=q8_0/v=fp8_e4m3/hd128/r16/fakegpu");
  make_room(inputs, kPages);
  EXPECT_EQ(kernel_of(a), "decode/fp16/k=q8_0/v=fp8_e4m3/hd128/r16/large/fakegpu");
}

// Blocks with minima or fifth bits: from 250,000 keys on, where there are 32 heads of all sequences.
TEST_F(PlainCalls, OnLargeCachesOfLongBlocks) {
  DecodeInputs inputs(kGpu, 128);
  DecodeArgs& a = inputs.args;
  const auto have_heads = [&](std::int64_t heads) {
    a.q = a.out = TensorView(scratch(), DType::kBFloat16, kGpu, {3, 2 * heads, 128});
    a.out.data = scratch_at(1 << 19);
    a.k_cache = TensorView(scratch_at(16 << 20), DType::kUInt8, kGpu, {64, 16, heads, 96});
    a.v_cache = TensorView(scratch_at(16 << 20), DType::kUInt8, kGpu, {64, 16, heads, 136});
  };
  a.k_format = KvFormat::kQ5_1;
  a.v_format = KvFormat::kQ8_0;
  have_heads(16);
  constexpr std::int64_t kPages = 326;  // 3 x 5'216 keys of 16 heads
  make_room(inputs, kPages - 1);
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=blocks/hd128/r16/fakegpu");
  make_room(inputs, kPages);
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=blocks/hd128/r16/large/fakegpu");
  have_heads(8);
  make_room(inputs, 2 * kPages);
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=blocks/hd128/r16/fakegpu");
  make_room(inputs, 1042);  // 3 x 16'672 keys of eight heads
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=blocks/hd128/r16/large/fakegpu");
  have_heads(16);
  make_room(inputs, kPages);
  std::swap(a.k_format, a.v_format);
  std::swap(a.k_cache, a.v_cache);
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=blocks/hd128/r16/large/fakegpu");
  a.v_format = KvFormat::kIq4Nl;
  a.v_cache = TensorView(scratch_at(16 << 20), DType::kUInt8, kGpu, {64, 16, 16, 72});
  EXPECT_EQ(kernel_of(a), "decode/fp16/kv=blocks/hd128/r16/fakegpu");
}

// Others have no rows to bring in pairs.
TEST_F(PlainCalls, OnLargeCachesOfHeadsInPairs) {
  const auto cache = [](std::initializer_list<std::int64_t> shape) {
    return TensorView(scratch_at(16 << 20), DType::kBFloat16, kGpu, shape);
  };
  make_room(inputs_, 2 * kLargePages);
  EXPECT_EQ(kernel_of(a_), kLargeKey);
  a_.k_cache = a_.v_cache = cache({64, 16, 1, 64});
  EXPECT_EQ(kernel_of(a_), kPlainKey);
  a_.k_cache = cache({64, 16, 2, 64});
  a_.v_cache = cache({64, 16, 2, 64});
  a_.v_cache.strides[2] = 128;
  a_.v_cache.strides[1] = 256;
  a_.v_cache.strides[0] = 16 * 256;
  EXPECT_EQ(kernel_of(a_), kPlainKey);
  std::swap(a_.k_cache, a_.v_cache);
  EXPECT_EQ(kernel_of(a_), kPlainKey);
  a_.kv_layout = KvLayout::kHND;
  a_.k_cache = a_.v_cache = cache({64, 2, 16, 64});
  EXPECT_EQ(kernel_of(a_), kPlainKey);
  // Blocks walk through five of ten heads at a time.
  a_.kv_layout = KvLayout::kNHD;
  for (const auto& [heads, key] : {std::pair{8, kLargeKey}, {10, kPlainKey}, {12, kLargeKey}}) {
    a_.k_cache = a_.v_cache = cache({64, 16, heads, 64});
    a_.q = a_.out = TensorView(scratch(), DType::kBFloat16, kGpu, {3, heads, 64});
    a_.out.data = scratch_at(1 << 19);
    EXPECT_EQ(kernel_of(a_), key) << heads;
  }
}

struct Wish {
  const char* name;
  std::function<void(DecodeInputs&)> make;
};
std::ostream& operator<<(std::ostream& out, const Wish& wish) { return out << wish.name; }

class Wishes : public PlainCalls, public testing::WithParamInterface<Wish> {};

TEST_P(Wishes, TakeTheKernelForAllCalls) {
  GetParam().make(inputs_);
  EXPECT_EQ(kernel_of(a_), kKey);
}

std::int64_t wide_lengths[3] = {5, 0, 160};
std::int32_t starts[4] = {0, 1, 2, 3};
std::uint32_t tree[3] = {1, 1, 1};
float eight[8] = {};
TensorView floats(std::initializer_list<std::int64_t> shape) {
  return TensorView(scratch_at(1 << 20), DType::kFloat32, kGpu, shape);
}

const Wish kWishes[] = {
    {"lse", [](DecodeInputs& x) { x.args.lse = floats({3, 8}); }},
    {"window", [](DecodeInputs& x) { x.args.window_left = 17; }},
    {"softcap", [](DecodeInputs& x) { x.args.softcap = 30.0; }},
    {"alibi", [](DecodeInputs& x) { x.args.alibi_slopes = TensorView(eight, DType::kFloat32, kGpu, {8}); }},
    {"sinks", [](DecodeInputs& x) { x.args.sinks = TensorView(eight, DType::kFloat32, kGpu, {8}); }},
    {"ragged",
     [](DecodeInputs& x) {
       x.args.cu_seqlens_q = ints(starts, {4});
       x.args.max_q_len = 1;
     }},
    {"lengths_of_64_bits",
     [](DecodeInputs& x) { x.args.seqlens = TensorView(wide_lengths, DType::kInt64, kGpu, {3}); }},
    {"pages_of_24",
     [](DecodeInputs& x) {
       x.args.k_cache = x.args.v_cache = TensorView(scratch_at(16 << 20), DType::kBFloat16, kGpu, {64, 24, 2, 64});
     }},
    {"out_in_fp32", [](DecodeInputs& x) { x.args.out.dtype = DType::kFloat32; }},
    {"splits", [](DecodeInputs& x) { x.args.num_splits = 3; }},
    {"head_dim_56",
     [](DecodeInputs& x) {
       for (TensorView* view : {&x.args.q, &x.args.k_cache, &x.args.v_cache, &x.args.out})
         view->shape[view->rank - 1] = 56;
     }},
    {"keys_that_are_not_aligned",
     [](DecodeInputs& x) { x.args.k_cache.data = static_cast<char*>(x.args.k_cache.data) + 8; }},
    {"queries_that_are_not_aligned", [](DecodeInputs& x) { x.args.q.data = static_cast<char*>(x.args.q.data) + 8; }},
    {"an_output_that_is_not_aligned",
     [](DecodeInputs& x) { x.args.out.data = static_cast<char*>(x.args.out.data) + 8; }},
    {"tree", [](DecodeInputs& x) { x.args.tree_mask = TensorView(tree, DType::kUInt32, kGpu, {3, 1}); }},
    {"not_causal", [](DecodeInputs& x) { x.args.causal = false; }},
    {"window_to_the_right",
     [](DecodeInputs& x) {
       x.args.causal = false;
       x.args.window_right = 3;
     }},
    {"csr",
     [](DecodeInputs& x) {
       x.args.block_table.reset();
       x.args.kv_indptr = ints(starts, {4});
       x.args.kv_indices = ints(x.pages.data(), {3});
     }},
    {"values_that_are_not_aligned",
     [](DecodeInputs& x) { x.args.v_cache.data = static_cast<char*>(x.args.v_cache.data) + 8; }},
    {"an_output_in_steps",
     [](DecodeInputs& x) {
       x.args.out.strides[2] = 2;
       x.args.out.strides[1] = 128;
       x.args.out.strides[0] = 8 * 128;
     }},
    {"output_rows_that_are_not_aligned",
     [](DecodeInputs& x) {
       x.args.out.strides[1] = 68;
       x.args.out.strides[0] = 8 * 68;
     }},
    {"queries_in_steps",
     [](DecodeInputs& x) {
       x.args.q.strides[2] = 2;
       x.args.q.strides[1] = 128;
       x.args.q.strides[0] = 8 * 128;
     }},
};

INSTANTIATE_TEST_SUITE_P(Decode, Wishes, testing::ValuesIn(kWishes),
                         [](const auto& info) { return std::string(info.param.name); });

// What a call asks for changes neither the grid nor the workspace.
TEST_P(Wishes, HaveTheWorkspaceOfPlainCalls) {
  const DecodePlan before = plan(a_);
  GetParam().make(inputs_);
  if (a_.num_splits > 0 || a_.kv_indptr || a_.k_cache.shape[1] != 16) return;  // which ask for another plan
  const DecodePlan after = plan(a_);
  EXPECT_EQ(after.workspace_bytes, before.workspace_bytes);
  EXPECT_EQ(after.grid, before.grid);
}

// explain() speaks of plain calls.
TEST_F(PlainCalls, AreWhatExplainSpeaksOf) {
  DecodeScheduleQuery query{.call = {.target = "fakegpu", .head_dim_qk = 64, .head_dim_v = 64, .group_size = 4}};
  query.num_kv_heads = 2;
  query.max_kv_len = 160;
  EXPECT_EQ(explain(query).kernel, kPlainKey);
  query.batch = 3;
  query.max_kv_len = 260'416;
  const DecodeSchedule below = explain(query);
  EXPECT_EQ(below.kernel, kPlainKey);
  EXPECT_EQ(below.teams, 1);
  query.max_kv_len = 260'417;
  const DecodeSchedule large = explain(query);
  EXPECT_EQ(large.kernel, kLargeKey);
  EXPECT_EQ(large.teams, 2);
  EXPECT_EQ(large.blocks, below.blocks);
  EXPECT_EQ(large.most_chunks, below.most_chunks);
  EXPECT_EQ(large.workspace_bytes, below.workspace_bytes);
}

}  // namespace
}  // namespace flashport::test
