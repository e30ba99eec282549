// What the host makes of an attention call: params, kernel, grid and workspace, and what supports(), which_kernel() and
// explain() say of it.
#include <gtest/gtest.h>

#include <cmath>

#include <flashport/backend.h>
#include <flashport/decode.h>

#include "common/host/attention/plan.h"
#include "common/host/attention/problem.h"
#include "tests/host/attention/attention_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

class PlanAttention : public ::testing::Test {
 protected:
  void TearDown() override { set_multiprocessor_limit(0); }

  AttentionPlan plan(const AttentionArgs& args) {
    const AttentionProblem problem = validate_attention(args);
    return plan_attention(problem, device_context(Check("attention"), problem.q, "q"));
  }
  AttentionParams params(const AttentionArgs& args) { return plan(args).params; }
  std::string kernel(const AttentionArgs& args) { return plan(args).kernel->key; }

  FakeBackends backends_;
};

TEST_F(PlanAttention, DenseTensors) {
  AttentionInputs inputs(kGpu);
  AttentionArgs& a = inputs.args;
  a.lse = inputs.floats({3, 8, 300});
  attention(a, 7);
  ASSERT_EQ(fake_state().launches.size(), 1u);
  const Launch& launch = fake_state().launches[0];
  EXPECT_EQ(launch.key, "attention/bf16/hd128/plain/fakegpu");
  EXPECT_EQ(launch.stream, 7u);
  const auto p = launch.as<AttentionParams>();
  EXPECT_EQ(p.has_q_map, 0);
  EXPECT_EQ(p.has_kv_maps, 0);
  EXPECT_EQ(p.batch, 3);
  EXPECT_EQ(p.q_len, 300);
  EXPECT_EQ(p.kv_len, 500);
  EXPECT_EQ(p.num_q_heads, 8);
  EXPECT_EQ(p.num_kv_heads, 2);
  EXPECT_EQ(p.group_size, 4);
  EXPECT_EQ(p.head_dim_qk, 128);
  EXPECT_EQ(p.head_dim_v, 128);
  EXPECT_EQ(p.q.data, a.q.data);
  EXPECT_EQ(p.q.dtype, DType::kBFloat16);
  EXPECT_EQ(p.q.stride_seq, 300 * 8 * 128);
  EXPECT_EQ(p.q.stride_token, 8 * 128);
  EXPECT_EQ(p.q.stride_head, 128);
  EXPECT_EQ(p.q.stride_dim, 1);
  EXPECT_EQ(p.cache.k.data, a.k.data);
  EXPECT_EQ(p.cache.k.page_stride, 500 * 2 * 128 * 2);
  EXPECT_EQ(p.cache.v.data, a.v.data);
  EXPECT_EQ(p.cache.v.token_stride, 2 * 128 * 2);
  EXPECT_EQ(p.cache.v.head_stride, 128 * 2);
  EXPECT_EQ(p.cache.table, nullptr);
  EXPECT_EQ(p.k_format, KvFormat::kBf16);
  EXPECT_EQ(p.k_scale.data, nullptr);
  EXPECT_EQ(p.out.data, a.out.data);
  EXPECT_EQ(p.total_q, 900);
  EXPECT_EQ(p.total_k, 1500);
  EXPECT_EQ(p.cu_seqlens_q, nullptr);
  EXPECT_EQ(p.cache.seqlens.data, nullptr);
  EXPECT_EQ(p.lse, a.lse->data);
  EXPECT_EQ(p.lse_stride_seq, 8 * 300);
  EXPECT_EQ(p.lse_stride_head, 300);
  EXPECT_EQ(p.lse_stride_token, 1);
  EXPECT_FLOAT_EQ(p.score_scale, static_cast<float>(1 / std::sqrt(128.0) * 1.4426950408889634));
  EXPECT_EQ(p.cap_scale, 0.0f);
  EXPECT_EQ(p.window_left, -1);
  EXPECT_EQ(p.window_right, -1);
  EXPECT_EQ(p.bias.data, nullptr);
  EXPECT_EQ(p.dropout.rng_state, nullptr);
  ASSERT_NE(p.counter, nullptr);
  EXPECT_EQ(*p.counter, 0u);
}

TEST_F(PlanAttention, PackedTensors) {
  AttentionInputs inputs(kGpu);
  inputs.pack();
  AttentionArgs& a = inputs.args;
  a.lse = inputs.floats({8, 600});
  a.seqused_q = a.seqused_k = inputs.ints(inputs.used);
  a.leftpad_k = inputs.ints(inputs.pads);
  const AttentionParams p = params(a);
  EXPECT_EQ(p.batch, 3);
  EXPECT_EQ(p.q_len, 300);
  EXPECT_EQ(p.kv_len, 500);
  EXPECT_EQ(p.q.stride_seq, 0);
  EXPECT_EQ(p.q.stride_token, 8 * 128);
  EXPECT_EQ(p.q.stride_head, 128);
  EXPECT_EQ(p.out.stride_seq, 0);
  EXPECT_EQ(p.total_q, 600);
  EXPECT_EQ(p.total_k, 1200);
  EXPECT_EQ(p.cu_seqlens_q, inputs.offsets_q.data());
  EXPECT_EQ(p.cu_seqlens_k, inputs.offsets_k.data());
  EXPECT_EQ(p.seqused_q, inputs.used.data());
  EXPECT_EQ(p.cache.seqlens.data, inputs.used.data());
  EXPECT_EQ(p.cache.k.page_stride, 0);
  EXPECT_EQ(p.cache.k.token_stride, 2 * 128 * 2);
  EXPECT_EQ(p.leftpad_k, inputs.pads.data());
  EXPECT_EQ(p.lse_stride_seq, 0);
  EXPECT_EQ(p.lse_stride_head, 600);
  EXPECT_EQ(p.lse_stride_token, 1);

  // No sequence is longer than all of them.
  a.max_seqlen_q = a.max_seqlen_k = 100000;
  EXPECT_EQ(params(a).q_len, 600);
  EXPECT_EQ(params(a).kv_len, 1200);
}

// q, k and v as views of one projection, and an output whose rows lie apart.
TEST_F(PlanAttention, Strides) {
  AttentionInputs inputs(kGpu);
  AttentionArgs& a = inputs.args;
  TensorView* const parts[] = {&a.q, &a.k, &a.v};
  for (int i = 0; i < 3; ++i) {
    *parts[i] = TensorView(scratch_at(i * 2 * 128 * 2), DType::kBFloat16, kGpu, {3, 300, 2, 128});
    parts[i]->strides[1] = 3 * 2 * 128;
    parts[i]->strides[0] = 300 * parts[i]->strides[1];
  }
  a.out = TensorView(scratch_at(16 << 20), DType::kBFloat16, kGpu, {3, 300, 2, 128});
  for (int axis = 0; axis < 3; ++axis) a.out.strides[axis] *= 2;
  const AttentionParams p = params(a);
  EXPECT_EQ(p.cache.k.token_stride, 768 * 2);
  EXPECT_EQ(p.cache.k.page_stride, 300 * 768 * 2);
  EXPECT_EQ(p.cache.k.head_stride, 128 * 2);
  EXPECT_EQ(p.out.stride_dim, 1);
  EXPECT_EQ(p.out.stride_token, 512);
}

TEST_F(PlanAttention, Options) {
  AttentionInputs inputs(kGpu);
  AttentionArgs& a = inputs.args;
  a.softmax_scale = 0.5;
  a.softcap = 20;
  a.alibi_slopes = inputs.floats({3, 8});
  a.alibi_slopes->strides[0] = 100;
  a.sinks = inputs.floats({8});
  a.bias = inputs.floats({3, 1, 300, 500});
  inputs.drop(0.25);
  const AttentionParams p = params(a);
  EXPECT_FLOAT_EQ(p.score_scale, 0.025f);
  EXPECT_FLOAT_EQ(p.cap_scale, static_cast<float>(20 * 1.4426950408889634));
  EXPECT_EQ(p.alibi_slopes, a.alibi_slopes->data);
  EXPECT_EQ(p.alibi_stride_seq, 100);
  EXPECT_EQ(p.sinks, a.sinks->data);
  EXPECT_EQ(p.bias.data, a.bias->data);
  EXPECT_EQ(p.bias.dtype, DType::kFloat32);
  EXPECT_EQ(p.bias.stride_seq, 300 * 500);
  EXPECT_EQ(p.bias.stride_head, 0);
  EXPECT_EQ(p.bias.stride_row, 500);
  EXPECT_EQ(p.bias.stride_key, 1);
  EXPECT_EQ(p.dropout.rng_state, inputs.state.data());
  EXPECT_EQ(p.dropout.drop_below, 64u);
  EXPECT_FLOAT_EQ(p.dropout.keep_scale, 4.0f / 3);

  a.alibi_slopes = inputs.floats({8});
  a.bias->shape[0] = 1;
  EXPECT_EQ(params(a).alibi_stride_seq, 0);
  EXPECT_EQ(params(a).bias.stride_seq, 0);
  a.dropout_p = 0.1;
  EXPECT_EQ(params(a).dropout.drop_below, 26u);
  EXPECT_FLOAT_EQ(params(a).dropout.keep_scale, 1 / 0.9f);
  a.dropout_p = 1 - 1e-9;  // a weight in 256 is kept
  EXPECT_EQ(params(a).dropout.drop_below, 255u);
  a.dropout_p = 0;
  EXPECT_EQ(params(a).dropout.rng_state, nullptr);
}

TEST_F(PlanAttention, Windows) {
  AttentionInputs inputs(kGpu);
  AttentionArgs& a = inputs.args;
  struct Row {
    bool causal;
    std::int64_t left, right;
    int planned_left, planned_right;
  };
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  for (const Row& row : {Row{true, -1, -1, -1, 0}, Row{true, 7, 5, 7, 0}, Row{true, -1, 0, -1, 0},
                         Row{false, 0, 0, 0, 0}, Row{false, 498, 298, 498, 298}, Row{false, 499, 299, -1, -1},
                         Row{false, kHuge, kHuge, -1, -1}, Row{true, kHuge, kHuge, -1, 0}}) {
    a.causal = row.causal;
    a.window_left = row.left;
    a.window_right = row.right;
    EXPECT_EQ(params(a).window_left, row.planned_left) << row.left;
    EXPECT_EQ(params(a).window_right, row.planned_right) << row.right;
  }
  // The one query of a sequence sees all keys.
  a.causal = true;
  a.q.shape[1] = a.out.shape[1] = 1;
  EXPECT_EQ(params(a).window_right, -1);
}

TEST_F(PlanAttention, GridsOfPersistentBlocks) {
  AttentionInputs inputs(kGpu);
  AttentionArgs& a = inputs.args;
  AttentionPlan p = plan(a);
  EXPECT_EQ(p.work_tiles, 3 * 3 * 8);
  EXPECT_EQ(p.grid, 10 * 2);
  fake_state().multiprocessors = 1000;
  set_multiprocessor_limit(7);
  EXPECT_EQ(plan(a).grid, 14);
  set_multiprocessor_limit(400);
  EXPECT_EQ(plan(a).grid, 72);
  // Packed: no more tiles than the tokens fill, and a rest of each sequence.
  inputs.pack();
  EXPECT_EQ(plan(a).work_tiles, (600 / 128 + 3) * 8);
  a.max_seqlen_q = 100;
  EXPECT_EQ(plan(a).work_tiles, 3 * 8);
}

TEST_F(PlanAttention, GridsOfABlockATile) {
  AttentionInputs inputs;
  const AttentionPlan p = plan(inputs.args);
  EXPECT_EQ(p.work_tiles, 3 * 10 * 8);
  EXPECT_EQ(p.grid, p.work_tiles);
  set_multiprocessor_limit(7);
  EXPECT_EQ(plan(inputs.args).grid, 7);
}

TEST_F(PlanAttention, MoreTilesThanOneCallTakes) {
  AttentionArgs a;
  a.q = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {1 << 29, 1, 8, 16});
  a.out = TensorView(reinterpret_cast<void*>(std::uintptr_t{1} << 40), DType::kBFloat16, kGpu, {1 << 29, 1, 8, 16});
  a.k = a.v = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {1 << 29, 1, 2, 16});
  EXPECT_EQ(error_of<NotSupportedError>([&] { attention(a); }),
            "attention: batch 536870912 with 1 queries and 8 heads each is more than one call takes; cut the batch");
}

// Keys and values of a section: 32 MB.
TEST_F(PlanAttention, Sections) {
  AttentionInputs inputs(kGpu);
  EXPECT_EQ(params(inputs.args).section_heads, 2);  // 0.8 MB a head
  AttentionArgs& a = inputs.args;
  const auto heads_of = [&](std::int64_t keys, std::int64_t heads) {
    a.q = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {1, 1, heads, 128});
    a.out = TensorView(reinterpret_cast<void*>(std::uintptr_t{1} << 40), DType::kBFloat16, kGpu, {1, 1, heads, 128});
    a.k = a.v = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {1, keys, heads, 128});
    return params(a).section_heads;
  };
  EXPECT_EQ(heads_of(16384, 32), 4);  // 8 MB a head
  EXPECT_EQ(heads_of(16385, 32), 3);
  EXPECT_EQ(heads_of(1 << 20, 32), 1);
  EXPECT_EQ(heads_of(1, 5), 5);
  EXPECT_EQ(heads_of(0, 5), 5);
}

TEST_F(PlanAttention, WorkspaceOfTheCaller) {
  AttentionInputs inputs(kGpu);
  AttentionArgs& a = inputs.args;
  const std::int64_t bytes = attention_workspace_size(a);
  EXPECT_EQ(bytes, 256);
  alignas(16) unsigned char memory[256] = {};
  a.workspace = TensorView(memory, DType::kUInt8, kGpu, {bytes});
  attention(a);
  EXPECT_EQ(fake_state().launches.at(0).as<AttentionParams>().counter, static_cast<void*>(memory));
  EXPECT_EQ(fake_state().allocations, 0);
  a.out = {};
  EXPECT_EQ(attention_workspace_size(a), 256);
}

TEST_F(PlanAttention, ChoosesTheSmallestTileAndThePlainForm) {
  AttentionInputs inputs(kGpu);
  AttentionArgs& a = inputs.args;
  EXPECT_EQ(kernel(a), "attention/bf16/hd128/plain/fakegpu");
  inputs.set_head_dims(40, 64);
  EXPECT_EQ(kernel(a), "attention/bf16/hd64/plain/fakegpu");
  inputs.set_head_dims(64, 72);
  EXPECT_EQ(kernel(a), "attention/bf16/hd128/plain/fakegpu");
  inputs.set_head_dims(136, 128);
  EXPECT_EQ(kernel(a), "attention/bf16/hd192x128/plain/fakegpu");
  inputs.set_head_dims(136, 136);  // a kernel of any form serves plain scores too
  EXPECT_EQ(kernel(a), "attention/bf16/hd256/any/fakegpu");
  inputs.set_head_dims(40, 40);
  a.causal = true;
  a.sinks = inputs.floats({8});
  EXPECT_EQ(kernel(a), "attention/bf16/hd64/plain/fakegpu");
  a.softcap = 2;  // a kernel of this option alone
  EXPECT_EQ(kernel(a), "attention/bf16/hd128/softcap/fakegpu");
  a.softcap = 50;
  EXPECT_EQ(kernel(a), "attention/bf16/hd128/softcap/fakegpu");
  a.softcap = 51;  // beyond kMostUnshiftedScore
  EXPECT_EQ(kernel(a), "attention/bf16/hd128/any/fakegpu");
  a.sinks.reset();
  a.alibi_slopes = inputs.floats({8});
  EXPECT_EQ(kernel(a), "attention/bf16/hd128/any/fakegpu");
  a.alibi_slopes.reset();
  a.softcap = 0;
  a.softmax_scale = -1.0;  // which kernels of all options take
  EXPECT_EQ(kernel(a), "attention/bf16/hd128/any/fakegpu");
  a.softmax_scale = 0.0;
  EXPECT_EQ(kernel(a), "attention/bf16/hd128/any/fakegpu");
  a.softmax_scale = 1.0;
  EXPECT_EQ(kernel(a), "attention/bf16/hd64/plain/fakegpu");
  a.alibi_slopes = inputs.floats({8});
  EXPECT_EQ(kernel(a), "attention/bf16/hd128/any/fakegpu");
  a.alibi_slopes.reset();
  a.bias = inputs.floats({1, 1, 300, 500});
  EXPECT_EQ(kernel(a), "attention/bf16/hd128/any/fakegpu");
  a.bias.reset();
  inputs.drop(0.1);
  EXPECT_EQ(kernel(a), "attention/bf16/hd128/any/fakegpu");
}

// A kernel of biases alone serves those whose keys are neighbours, in rows at any address.
TEST_F(PlanAttention, ChoosesByTheBias) {
  AttentionInputs inputs(kGpu);
  AttentionArgs& a = inputs.args;
  inputs.set_head_dims(192, 192);
  const std::string alone = "attention/bf16/hd256/bias/fakegpu", any = "attention/bf16/hd256/any/fakegpu";
  const TensorView given(scratch_at(40 << 20), DType::kBFloat16, inputs.device, {3, 8, 300, 504});
  const auto kernel_of = [&](const auto& change) {
    a.bias = given;
    a.bias->shape[3] = 500;
    change(*a.bias);
    return kernel(a);
  };
  EXPECT_EQ(kernel_of([](TensorView&) {}), alone);
  EXPECT_EQ(kernel_of([](TensorView& bias) { bias.shape[0] = bias.shape[1] = 1; }), alone);
  EXPECT_EQ(kernel_of([](TensorView& bias) { bias.strides[0] = bias.strides[1] = 0; }), alone);
  EXPECT_EQ(kernel_of([](TensorView& bias) { bias.strides[2] = 508; }), alone);
  EXPECT_EQ(kernel_of([](TensorView& bias) { bias.strides[2] = 0; }), alone);
  EXPECT_EQ(kernel_of([](TensorView& bias) { bias.strides[1] += 4; }), alone);
  EXPECT_EQ(kernel_of([](TensorView& bias) { bias.strides[0] = -8; }), alone);
  EXPECT_EQ(kernel_of([](TensorView& bias) { bias.strides[3] = 2; }), any);
  EXPECT_EQ(kernel_of([](TensorView& bias) { bias.strides[3] = 0; }), any);
  EXPECT_EQ(kernel_of([](TensorView& bias) { bias.data = static_cast<char*>(bias.data) + 2; }), alone);
  EXPECT_EQ(kernel_of([&](TensorView&) { a.softcap = 2; }), any);
  a.softcap = 0;
  EXPECT_EQ(kernel_of([&](TensorView&) { a.softmax_scale = -1.0; }), any);
  a.softmax_scale.reset();
  a.bias = inputs.floats({3, 8, 300, 504});
  a.bias->shape[3] = 500;
  EXPECT_EQ(kernel(a), alone);
}

// A CPU computes every type in fp32, and a type that it has kernels of in that one.
TEST_F(PlanAttention, ChoosesTheMathOfACpu) {
  AttentionQuery query{.target = "fakecpu"};
  EXPECT_EQ(which_kernel(query), "attention/bf16/hd256/any/fakecpu");
  query.head_dim_v = 264;
  EXPECT_EQ(which_kernel(query), "attention/fp32/hd512/any/fakecpu");
  query.head_dim_v = 128;
  query.dtype = DType::kFloat16;
  EXPECT_EQ(which_kernel(query), "attention/fp32/hd512/any/fakecpu");
  query.dtype = DType::kFloat32;
  EXPECT_EQ(which_kernel(query), "attention/fp32/hd512/any/fakecpu");
  query.dtype = DType::kInt32;
  EXPECT_EQ(supports(query).reason, "q must be float16, bfloat16, float32 or float8_e4m3fn, got int32");
}

TEST_F(PlanAttention, Queries) {
  AttentionQuery query{.target = "fakegpu", .head_dim_qk = 192};
  EXPECT_TRUE(supports(query).supported);
  EXPECT_EQ(which_kernel(query), "attention/bf16/hd192x128/plain/fakegpu");
  query.softcap = query.dropout = true;
  EXPECT_EQ(which_kernel(query), "attention/bf16/hd256/any/fakegpu");
  query.dtype = DType::kFloat16;
  EXPECT_FALSE(supports(query).supported);
  EXPECT_EQ(error_of<NotSupportedError>([&] { (void)which_kernel(query); }),
            "which_kernel: fakegpu has no attention kernel with softcap and dropout");
  query.target = "nothing";
  EXPECT_EQ(supports(query).reason.find("no target \"nothing\" is compiled into this installation"), 0u);
}

// Formats that are widened, in any pair, need a kernel that reads all of them.
TEST_F(PlanAttention, Formats) {
  AttentionQuery query{.target = "fakegpu"};
  const auto reason = [&](std::optional<KvFormat> k, std::optional<KvFormat> v) {
    query.k_format = k;
    query.v_format = v;
    return supports(query).reason;
  };
  constexpr KvFormat kFormats[] = {KvFormat::kFp16, KvFormat::kBf16, KvFormat::kFp8E4M3, KvFormat::kFp8E4M3Fnuz,
                                   KvFormat::kQ8_0};
  for (const KvFormat k : kFormats) {
    for (const KvFormat v : kFormats) {
      EXPECT_EQ(reason(k, v), "") << kv_format_name(k) << " " << kv_format_name(v);
      EXPECT_EQ(which_kernel(query), "attention/bf16/hd128/plain/fakegpu");
    }
  }
  // Other formats need one that reads those.
  for (const KvFormat other : {KvFormat::kInt8, KvFormat::kFp8E5M2, KvFormat::kInt4}) {
    EXPECT_NE(reason(other, {}), "") << kv_format_name(other);
    EXPECT_NE(reason({}, other), "") << kv_format_name(other);
  }
  EXPECT_EQ(reason(KvFormat::kQ4_0, KvFormat::kQ4_0), "fakegpu has no attention kernel for keys and values of kv=q4_0");
  EXPECT_EQ(reason({}, KvFormat::kIq4Nl),
            "fakegpu has no attention kernel for keys and values of k=bf16 with v=iq4_nl");
  EXPECT_EQ(reason(KvFormat::kFp32, {}), "k of fp32 goes with q of the same type, got bfloat16");
  query.dtype = DType::kFp8E4M3;
  EXPECT_EQ(reason({}, KvFormat::kQ8_0), "v of q8_0 goes with q of the same type, got float8_e4m3fn");
  EXPECT_EQ(reason(KvFormat::kBf16, {}), "k of bf16 goes with q of the same type, got float8_e4m3fn");
  query.dtype = DType::kFloat16;
  EXPECT_EQ(reason(KvFormat::kQ8_0, {}), "fakegpu has no attention kernel for keys and values of k=q8_0 with v=fp16");
  query.paged = true;
  EXPECT_EQ(reason(KvFormat::kBf16, KvFormat::kBf16),
            "fakegpu has no attention kernel for keys and values on pages of kv=bf16");
  query.head_dim_v = 80;
  EXPECT_EQ(reason({}, KvFormat::kQ8_0), "q8_0 needs a head_dim_v that is a multiple of 32, got 80");
}

TEST_F(PlanAttention, Explained) {
  AttentionScheduleQuery query{.call = {.target = "fakegpu", .head_dim_qk = 64, .head_dim_v = 64, .causal = true}};
  query.batch = 2;
  query.num_q_heads = 8;
  query.num_kv_heads = 2;
  query.q_len = query.kv_len = 1000;
  AttentionSchedule s = explain(query);
  EXPECT_EQ(s.kernel, which_kernel(query.call));
  EXPECT_EQ(s.rows, 192);
  EXPECT_EQ(s.keys, 128);
  EXPECT_EQ(s.stages, 3);
  EXPECT_EQ(s.threads, 384);
  EXPECT_EQ(s.blocks, 20);
  EXPECT_EQ(s.work_tiles, 2 * 6 * 8);
  EXPECT_EQ(s.shared_bytes, 98304);
  EXPECT_EQ(s.pieces, 1);
  EXPECT_EQ(s.workspace_bytes, 256);
  EXPECT_EQ(s.text,
            "attention/bf16/hd64/plain/fakegpu: 20 blocks of 384 threads and 98304 bytes of shared memory for 96 work "
            "tiles of 192 rows; key tiles of 128 keys, 3 stages, keys in 1 piece; 256 bytes of workspace");
  query.call.dropout = true;
  EXPECT_EQ(explain(query).kernel, "attention/bf16/hd128/any/fakegpu");
  query.batch = query.num_q_heads = query.num_kv_heads = query.q_len = 1;
  query.kv_len = 0;
  EXPECT_EQ(explain(query).blocks, 1);
  EXPECT_TRUE(fake_state().launches.empty());
  EXPECT_EQ(fake_state().allocations, 0);
}

TEST_F(PlanAttention, ExplainedOnlyWhereItRuns) {
  const auto refusal = [](const std::function<void(AttentionScheduleQuery&)>& bend) {
    AttentionScheduleQuery query{.call = {.target = "fakegpu"}};
    query.num_q_heads = 4;
    bend(query);
    return error_of<Error>([&] { (void)explain(query); });
  };
  EXPECT_EQ(refusal([](auto&) {}), "");
  EXPECT_EQ(refusal([](auto& q) { q.batch = 0; }), "explain: batch must be from 1 to 16777216, got 0");
  EXPECT_EQ(refusal([](auto& q) { q.num_q_heads = 0; }), "explain: num_q_heads must be from 1 to 16777216, got 0");
  EXPECT_EQ(refusal([](auto& q) { q.num_kv_heads = 5; }), "explain: num_kv_heads must be from 1 to 4, got 5");
  EXPECT_EQ(refusal([](auto& q) { q.num_kv_heads = 3; }),
            "explain: num_q_heads must be a multiple of num_kv_heads, got 4 and 3");
  EXPECT_EQ(refusal([](auto& q) { q.q_len = 0; }), "explain: q_len must be from 1 to 1073741824, got 0");
  EXPECT_EQ(refusal([](auto& q) { q.kv_len = -1; }), "explain: kv_len must be from 0 to 1073741824, got -1");
  EXPECT_EQ(refusal([](auto& q) { q.call.head_dim_qk = 17; }),
            "explain: head_dim must be a multiple of 8 from 16 to 512, got 17");
  EXPECT_EQ(refusal([](auto& q) { q.call.target = "fakecpu"; }), "explain: no device of target fakecpu is here");
  EXPECT_EQ(refusal([](auto& q) { q.call.target = "cpu"; }), "");
  EXPECT_EQ(refusal([](auto& q) { q.num_splits = 129; }), "explain: num_splits must be from -1 to 128, got 129");
}

TEST_F(PlanAttention, MaskOfDropout) {
  std::int64_t state[2] = {1, 2};
  DropoutMaskArgs args;
  args.mask = TensorView(scratch(), DType::kUInt8, kGpu, {2, 3, 5, 7});
  args.mask.strides[3] = 2;
  for (int axis = 0; axis < 3; ++axis) args.mask.strides[axis] *= 2;
  args.rng_state = TensorView(state, DType::kInt64, kGpu, {2});
  args.dropout_p = 0.5;
  dropout_mask(args, 9);
  ASSERT_EQ(fake_state().launches.size(), 1u);
  const Launch& launch = fake_state().launches[0];
  EXPECT_EQ(launch.key, "dropout_mask/fakegpu");
  EXPECT_EQ(launch.stream, 9u);
  EXPECT_EQ(launch.grid, 30);
  const auto p = launch.as<DropoutMaskParams>();
  EXPECT_EQ(p.mask, scratch());
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.num_heads, 3);
  EXPECT_EQ(p.q_len, 5);
  EXPECT_EQ(p.kv_len, 7);
  EXPECT_EQ(p.strides[0], 210);
  EXPECT_EQ(p.strides[3], 2);
  EXPECT_EQ(p.dropout.rng_state, state);
  EXPECT_EQ(p.dropout.drop_below, 128u);
  set_multiprocessor_limit(4);
  dropout_mask(args);
  EXPECT_EQ(fake_state().launches[1].grid, 4);
  args.mask.shape[2] = 0;
  dropout_mask(args);
  EXPECT_EQ(fake_state().launches.size(), 2u);
}

}  // namespace
}  // namespace flashport::test
