// The C interface of attention: which members of a struct reach a kernel, and which errors a caller gets.
#include <gtest/gtest.h>

#include <string>

#include <flashport/capi.h>

#include "common/device/attention/params.h"
#include "tests/host/attention/attention_inputs.h"
#include "tests/host/capi/to_c.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

struct CAttention : ::testing::Test {
  AttentionParams launched() { return fake_state().launches.at(0).as<AttentionParams>(); }
  FakeBackends backends_;
};

TEST_F(CAttention, TakesEveryMember) {
  AttentionInputs inputs;
  inputs.pack();
  inputs.drop(0.5);
  AttentionArgs& a = inputs.args;
  a.lse = TensorView(scratch_at(44 << 20), DType::kFloat32, Device{}, {8, 600});
  const fp_tensor q = to_c(a.q), k = to_c(a.k), v = to_c(a.v), out = to_c(a.out), lse = to_c(*a.lse),
                  offsets_q = to_c(*a.cu_seqlens_q), offsets_k = to_c(*a.cu_seqlens_k),
                  used = to_c(inputs.ints(inputs.used)), pads = to_c(inputs.ints(inputs.pads)),
                  slopes = to_c(inputs.floats({8})), state = to_c(*a.rng_state);
  fp_attention_args c;
  FP_INIT(&c);
  c.q = &q;
  c.k = &k;
  c.v = &v;
  EXPECT_EQ(refusal(fp_attention(&c, 0), fp_value_error), "attention: out must be given, got null");
  c.out = &out;
  c.cu_seqlens_q = &offsets_q;
  c.cu_seqlens_k = &offsets_k;
  EXPECT_EQ(refusal(fp_attention(&c, 0), fp_value_error),
            "attention: max_seqlen_q must be 1 or more with cu_seqlens_q, got 0");
  c.max_seqlen_q = 300;
  c.max_seqlen_k = 500;
  c.lse = &lse;
  c.seqused_q = c.seqused_k = &used;
  c.leftpad_k = &pads;
  c.alibi_slopes = c.sinks = &slopes;
  c.rng_state = &state;
  c.dropout_p = 0.5;
  c.has_softmax_scale = 1;
  c.softmax_scale = 3;
  c.softcap = 6;
  c.has_window = 1;
  c.window_left = 5;
  c.window_right = 6;
  c.has_num_splits = c.num_splits = 1;
  EXPECT_EQ(fp_attention(&c, 3), fp_ok) << fp_last_error();
  const AttentionParams p = launched();
  EXPECT_EQ(p.lse, lse.data);
  EXPECT_EQ(p.cu_seqlens_k, inputs.offsets_k.data());
  EXPECT_EQ(p.seqused_q, inputs.used.data());
  EXPECT_EQ(p.cache.seqlens.data, inputs.used.data());
  EXPECT_EQ(p.leftpad_k, inputs.pads.data());
  EXPECT_EQ(p.alibi_slopes, slopes.data);
  EXPECT_EQ(p.sinks, slopes.data);
  EXPECT_EQ(p.score_scale, 0.5f);
  EXPECT_EQ(p.window_left, 5);
  EXPECT_EQ(p.window_right, 6);
  EXPECT_EQ(p.dropout.drop_below, 128u);

  c.num_splits = 2;
  EXPECT_EQ(fp_attention(&c, 0), fp_ok) << fp_last_error();
  EXPECT_EQ(fake_state().launches.back().as<AttentionParams>().pieces.rule.count, 2);
  c.num_splits = 129;
  EXPECT_EQ(fp_attention(&c, 0), fp_value_error);
  c.has_num_splits = 0;
  std::int64_t bytes = 0;
  c.out = nullptr;
  EXPECT_EQ(fp_attention_workspace_size(&c, &bytes), fp_ok) << fp_last_error();
  EXPECT_EQ(bytes, 256);
  EXPECT_EQ(refusal(fp_attention_workspace_size(&c, nullptr), fp_value_error),
            "attention_workspace_size: bytes must not be null");
}

TEST_F(CAttention, DefaultsAreThoseOfCpp) {
  AttentionInputs inputs;
  const fp_tensor q = to_c(inputs.args.q), k = to_c(inputs.args.k), v = to_c(inputs.args.v),
                  out = to_c(inputs.args.out), bias = to_c(inputs.floats({1, 1, 300, 500}));
  fp_attention_args c;
  FP_INIT(&c);
  c.q = &q;
  c.k = &k;
  c.v = &v;
  c.out = &out;
  c.bias = &bias;
  EXPECT_EQ(fp_attention(&c, 0), fp_ok) << fp_last_error();
  EXPECT_EQ(launched().window_left, -1);
  EXPECT_EQ(launched().window_right, -1);
  EXPECT_EQ(launched().bias.data, bias.data);
  c.causal = 1;
  EXPECT_EQ(fp_attention(&c, 0), fp_ok) << fp_last_error();
  EXPECT_EQ(fake_state().launches.at(1).as<AttentionParams>().window_right, 0);
}

TEST_F(CAttention, MaskOfDropout) {
  std::int64_t numbers[2] = {1, 2};
  const fp_tensor mask = to_c(TensorView(scratch(), DType::kUInt8, Device{}, {2, 3, 5, 7}));
  const fp_tensor state = to_c(TensorView(numbers, DType::kInt64, Device{}, {2}));
  fp_dropout_mask_args c;
  FP_INIT(&c);
  c.mask = &mask;
  c.dropout_p = 0.25;
  EXPECT_EQ(refusal(fp_dropout_mask(&c, 0), fp_value_error), "dropout_mask: rng_state must be given, got null");
  c.rng_state = &state;
  EXPECT_EQ(fp_dropout_mask(&c, 0), fp_ok) << fp_last_error();
  EXPECT_EQ(fake_state().launches.at(0).as<DropoutMaskParams>().dropout.drop_below, 64u);
}

TEST_F(CAttention, Queries) {
  fp_query query;
  FP_INIT(&query);
  query.operation = fp_op_attention;
  query.target = "fakegpu";
  query.dtype = fp_bfloat16;
  query.head_dim_qk = query.head_dim_v = 64;
  query.causal = 1;
  char text[256];
  EXPECT_EQ(fp_supports(&query), fp_ok);
  EXPECT_EQ(fp_which_kernel(&query, text, sizeof(text)), fp_ok);
  EXPECT_STREQ(text, "attention/bf16/hd64/plain/fakegpu");
  query.bias = 1;
  EXPECT_EQ(fp_which_kernel(&query, text, sizeof(text)), fp_ok);
  EXPECT_STREQ(text, "attention/bf16/hd128/any/fakegpu");
  query.head_dim_v = 300;
  EXPECT_EQ(refusal(fp_supports(&query), fp_not_supported),
            "head_dim_v must be a multiple of 8 from 16 to 512, got 300");
  query.head_dim_v = 64;
  query.batch = 2;
  query.num_kv_heads = 2;
  query.group_size = 4;
  query.q_len = query.max_kv_len = 1000;
  EXPECT_EQ(fp_explain(&query, text, sizeof(text)), fp_ok) << fp_last_error();
  EXPECT_EQ(std::string(text).find("attention/bf16/hd128/any/fakegpu: 20 blocks of 384 threads and 98304 bytes of "
                                   "shared memory for 128 work tiles of 128 rows; "),
            0u)
      << text;
  query.group_size = 0;
  EXPECT_EQ(refusal(fp_explain(&query, text, sizeof(text)), fp_value_error),
            "explain: num_kv_heads and group_size must be 1 or more and below 2^31, got 2 and 0");
}

}  // namespace
}  // namespace flashport::test
