// Which calls are plain, and so get a kernel that has no code for options.
#include <functional>
#include <string>
#include <vector>

#include "tests/host/decode/plan_fixture.h"

namespace flashport::test {
namespace {

const char* const kPlainKey = "decode_plain/bf16/kv=bf16/hd64/r16/fakegpu";
const char* const kKey = "decode/bf16/kv=bf16/hd64/r16/fakegpu";

class PlainCalls : public PlanDecode {
 protected:
  std::string kernel_of(const DecodeArgs& args) { return plan(args).kernel->key; }
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
    {"window_to_the_right", [](DecodeInputs& x) { x.args.window_right = 3; }},
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
}

}  // namespace
}  // namespace flashport::test
