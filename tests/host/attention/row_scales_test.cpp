// Scales beside the keys and values of attention: what reaches the kernels, what is refused, and what supports() says.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "common/host/attention/few_queries.h"
#include "common/host/attention/plan.h"
#include "common/host/attention/problem.h"
#include "tests/host/attention/attention_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

class RowScales : public ::testing::Test {
 protected:
  static void make_int8(AttentionArgs& a) { a.k.dtype = a.v.dtype = DType::kInt8; }
  TensorView halves(std::initializer_list<std::int64_t> shape) {
    return TensorView(scratch_at(44 << 20), DType::kFloat16, Device{}, shape);
  }
  FakeBackends backends_;
};

TEST_F(RowScales, OfDenseTensors) {
  AttentionInputs inputs;
  AttentionArgs& a = inputs.args;
  make_int8(a);
  a.k_scale = halves({3, 500, 2, 16});
  a.v_scale = inputs.floats({3, 2});
  const AttentionProblem problem = validate_attention(a);
  const AttentionParams& p = problem.params;
  EXPECT_TRUE(problem.scales_beside);
  EXPECT_EQ(p.k_scale.data, nullptr);
  EXPECT_EQ(p.k_row_scales.data, a.k_scale->data);
  EXPECT_EQ(p.k_row_scales.dtype, DType::kFloat16);
  EXPECT_EQ(p.k_row_scales.dims_per_scale, 8);
  EXPECT_EQ(p.k_row_scales.stride_page, 500 * 2 * 16);
  EXPECT_EQ(p.k_row_scales.stride_token, 2 * 16);
  EXPECT_EQ(p.k_row_scales.stride_head, 16);
  EXPECT_EQ(p.k_row_scales.stride_group, 1);
  EXPECT_EQ(p.v_row_scales.data, nullptr);
  EXPECT_EQ(p.v_scale.stride_seq, 2);
  EXPECT_EQ(p.v_scale.stride_head, 1);
}

TEST_F(RowScales, OfPackedTensors) {
  AttentionInputs inputs;
  AttentionArgs& a = inputs.args;
  inputs.pack();
  make_int8(a);
  a.k_scale = inputs.floats({1200, 2});
  a.v_scale = halves({1200, 2, 1});
  const AttentionParams p = validate_attention(a).params;
  EXPECT_EQ(p.k_row_scales.stride_page, 0);
  EXPECT_EQ(p.k_row_scales.stride_token, 2);
  EXPECT_EQ(p.k_row_scales.stride_head, 1);
  EXPECT_EQ(p.k_row_scales.dims_per_scale, 0);
  EXPECT_EQ(p.v_row_scales.stride_token, 2);
  EXPECT_EQ(p.v_row_scales.dims_per_scale, 0);
}

TEST_F(RowScales, OfPagesOfHeads) {
  AttentionInputs inputs;
  AttentionArgs& a = inputs.args;
  a.k = a.v = TensorView(scratch_at(16 << 20), DType::kInt8, Device{}, {64, 2, 16, 128});
  a.kv_layout = KvLayout::kHND;
  a.block_table = TensorView(scratch_at(44 << 20), DType::kInt32, Device{}, {3, 10});
  a.seqused_k = inputs.ints(inputs.used);
  a.k_scale = a.v_scale = inputs.floats({64, 2, 16});
  const AttentionParams p = validate_attention(a).params;
  EXPECT_EQ(p.k_row_scales.stride_page, 32);
  EXPECT_EQ(p.k_row_scales.stride_token, 1);
  EXPECT_EQ(p.k_row_scales.stride_head, 16);
}

// Two axes beside a pool are those of sequences where it has as many slots, else those of its rows.
TEST_F(RowScales, TwoAxesBesideAPool) {
  for (const std::int64_t slots : {3, 4}) {
    AttentionInputs inputs;
    AttentionArgs& a = inputs.args;
    a.k = a.v = TensorView(scratch_at(16 << 20), DType::kInt8, Device{}, {slots, 2, 128});
    a.token_table = TensorView(scratch_at(44 << 20), DType::kInt32, Device{}, {3, 4});
    a.seqused_k = inputs.ints(inputs.used);
    a.k_scale = inputs.floats({slots, 2});
    const AttentionParams p = validate_attention(a).params;
    EXPECT_EQ(p.k_row_scales.data != nullptr, slots == 4);
    EXPECT_EQ(p.k_scale.data != nullptr, slots == 3);
    a.k_scale = inputs.floats({slots, 2, 1});
    EXPECT_NE(validate_attention(a).params.k_row_scales.data, nullptr);
  }
}

TEST_F(RowScales, AreRefused) {
  const auto refused = [&](const std::function<void(AttentionInputs&)>& bend) {
    AttentionInputs inputs;
    make_int8(inputs.args);
    bend(inputs);
    return error_of<ValueError>([&] { (void)validate_attention(inputs.args); });
  };
  const std::string beside =
      "must have shape (1,), (num_kv_heads,) = (2,), that of v without its last axis, or that of v with a group of 8 "
      "values or a multiple of it in place of each value, got ";
  EXPECT_EQ(refused([](auto& i) { i.args.v_scale = i.floats({3, 500, 1}); }),
            "attention: v_scale " + beside + "(3, 500, 1) for v (3, 500, 2, 128)");
  EXPECT_EQ(refused([](auto& i) { i.args.v_scale = i.floats({3, 500, 2, 32}); }),
            "attention: v_scale " + beside + "(3, 500, 2, 32) for v (3, 500, 2, 128)");
  EXPECT_NE(
      refused([](auto& i) { i.args.k_scale = i.floats({4, 2}); }).find("(batch, num_kv_heads) = (3, 2), got (4, 2)"),
      std::string::npos);
  EXPECT_NE(refused([](auto& i) { i.args.q_scale = i.floats({3, 300, 8}); }).find("q_scale must have"),
            std::string::npos);
  AttentionInputs inputs;
  make_int8(inputs.args);
  inputs.args.k_scale = inputs.floats({3, 500, 2});
  inputs.args.k_scale->dtype = DType::kBFloat16;
  EXPECT_EQ(error_of<TypeError>([&] { (void)validate_attention(inputs.args); }),
            "attention: k_scale must be float32 or float16, got bfloat16");
}

TEST_F(RowScales, TargetsSayWhatTheyLack) {
  AttentionInputs inputs(kGpu);
  AttentionArgs& a = inputs.args;
  make_int8(a);
  a.k_scale = inputs.floats({3, 500, 2});
  const std::string lacks =
      "fakegpu has no attention kernel for keys and values of kv=int8 with scales of rows or groups of values";
  EXPECT_EQ(error_of<NotSupportedError>([&] { attention(a); }), "attention: " + lacks);
  EXPECT_TRUE(fake_state().launches.empty());
  AttentionQuery query{.target = "fakegpu", .k_format = KvFormat::kInt8, .v_format = KvFormat::kInt8};
  query.scales_beside = true;
  EXPECT_EQ(supports(query).reason, lacks);
  query = {.target = "fakegpu"};
  query.scales_beside = true;
  EXPECT_EQ(supports(query).reason,
            "fakegpu has no attention kernel for keys and values with scales of rows or groups of values");
}

// Few queries on a cache are flash_decode's, which has kernels for them.
TEST_F(RowScales, OfFewQueriesAreDecodes) {
  AttentionInputs inputs(kGpu);
  AttentionArgs& a = inputs.args;
  make_int8(a);
  for (TensorView* view : {&a.q, &a.out}) *view = TensorView(view->data, DType::kBFloat16, kGpu, {3, 1, 8, 128});
  a.seqused_k = inputs.ints(inputs.used);
  a.k_scale = inputs.floats({3, 500, 2});
  attention(a);
  ASSERT_EQ(fake_state().launches.size(), 1u);
  EXPECT_EQ(fake_state().launches[0].key, "decode/fp16/kv=any/hd128/r16/fakegpu");
  AttentionQuery query{.target = "fakegpu", .k_format = KvFormat::kInt8, .v_format = KvFormat::kInt8};
  query.seqused_k = query.scales_beside = true;
  query.q_len = 1;
  EXPECT_EQ(which_kernel(query), "decode/fp16/kv=any/hd128/r16/fakegpu");
  query.appends = true;
  EXPECT_EQ(
      supports(query).reason,
      "k_new does not come with scales of rows or groups of values, which append_kv writes; append the keys first");
  query.scales_beside = false;
  query.v_format = KvFormat::kInt4;
  EXPECT_EQ(supports(query).reason,
            "k_new does not come with int4, which append_kv writes with its scales; append the keys first");
  a.k_new = a.v_new = TensorView(scratch_at(36 << 20), DType::kBFloat16, kGpu, {3, 1, 2, 128});
  EXPECT_NE(error_of<NotSupportedError>([&] { attention(a); }).find("attention: k_new does not come with scales"),
            std::string::npos);
  EXPECT_EQ(fake_state().launches.size(), 1u);
}

}  // namespace
}  // namespace flashport::test
