// attention and dropout_mask refuse every wrong argument with the right exception and text, check ranks first, and
// launch nothing.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "common/host/contents.h"
#include "tests/host/attention/attention_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

using Inputs = AttentionInputs;

struct Bend {
  const char* name;
  std::function<void(Inputs&)> apply;
  const char* text;  // a part of the message
};

class AttentionRefuses : public ::testing::Test {
 protected:
  template <class Exception>
  void expect(const std::vector<Bend>& bends, Device device = {}) {
    for (const Bend& bend : bends) {
      Inputs inputs(device);
      bend.apply(inputs);
      const std::string text = error_of<Exception>([&] { attention(inputs.args); });
      EXPECT_EQ(text.rfind("attention: ", 0), 0u) << bend.name << ": " << text;
      EXPECT_NE(text.find(bend.text), std::string::npos) << bend.name << ": " << text;
      EXPECT_TRUE(fake_state().launches.empty()) << bend.name;
    }
  }
  FakeBackends backends_;
};

TensorView array(DType type, std::initializer_list<std::int64_t> shape) {
  return TensorView(scratch_at(44 << 20), type, Device{}, shape);
}
TensorView ints(std::initializer_list<std::int64_t> shape) { return array(DType::kInt32, shape); }
TensorView floats(std::initializer_list<std::int64_t> shape) { return array(DType::kFloat32, shape); }

TEST_F(AttentionRefuses, Presence) {
  expect<ValueError>({
      {"q's offsets alone", [](Inputs& i) { i.args.cu_seqlens_q = ints({4}); },
       "attention: cu_seqlens_q and cu_seqlens_k must be given together, got cu_seqlens_q alone"},
      {"k's offsets alone", [](Inputs& i) { i.args.cu_seqlens_k = ints({4}); }, "got cu_seqlens_k alone"},
      {"max_seqlen_q", [](Inputs& i) { i.args.max_seqlen_q = 5; }, "max_seqlen_q must come with cu_seqlens_q"},
      {"max_seqlen_k", [](Inputs& i) { i.args.max_seqlen_k = 5; }, "max_seqlen_k must come with cu_seqlens_k"},
      {"no max_seqlen_q", [](Inputs& i) { i.pack(), i.args.max_seqlen_q = 0; },
       "max_seqlen_q must be 1 or more with cu_seqlens_q, got 0"},
      {"no max_seqlen_k", [](Inputs& i) { i.pack(), i.args.max_seqlen_k = -1; },
       "max_seqlen_k must be 1 or more with cu_seqlens_k, got -1"},
      {"dropout without a state", [](Inputs& i) { i.args.dropout_p = 0.5; },
       "rng_state (seed and offset) must come with dropout_p, got dropout_p 0.5 alone"},
      {"packed bias", [](Inputs& i) { i.pack(), i.args.bias = floats({1, 1, 300, 500}); },
       "bias has a row for each query of dense sequences and an entry for each key, and must not come with "
       "cu_seqlens_q; hide keys by entries of -inf"},
      {"bias and leftpad_k", [](Inputs& i) { i.args.bias = floats({1, 1, 300, 500}), i.args.leftpad_k = ints({3}); },
       "must not come with leftpad_k"},
      {"bias and pages", [](Inputs& i) { i.args.bias = floats({1, 1, 300, 500}), i.args.block_table = ints({3, 1}); },
       "must not come with keys on pages; hide keys by entries of -inf"},
      {"offsets of keys on pages",
       [](Inputs& i) {
         i.pack();
         i.args.block_table = ints({3, 1});
       },
       "cu_seqlens_k must not come with keys on pages, whose lengths seqused_k has"},
      {"lengths twice",
       [](Inputs& i) {
         i.args.kv_indptr = ints({4});
         i.args.kv_indices = ints({3});
         i.args.kv_last_page_len = ints({3});
         i.args.seqused_k = ints({3});
       },
       "seqused_k must not come with kv_last_page_len, which has the lengths too"},
  });
}

TEST_F(AttentionRefuses, Ranks) {
  expect<ValueError>({
      {"q", [](Inputs& i) { i.args.q.rank = 3; },
       "q must have 4 dimensions (batch, q_len, num_q_heads, head_dim), got 3: (3, 300, 8)"},
      {"k", [](Inputs& i) { i.args.k.rank = 3; }, "k must have 4 dimensions (batch, kv_len, num_kv_heads, head_dim)"},
      {"v", [](Inputs& i) { i.args.v.rank = 3; }, "v must have 4 dimensions (batch, kv_len, num_kv_heads, head_dim_v)"},
      {"packed q", [](Inputs& i) { i.pack(), i.args.q.rank = 4; },
       "q must have 3 dimensions (total_q, num_q_heads, head_dim), got 4"},
      {"packed k", [](Inputs& i) { i.pack(), i.args.k.rank = 2; }, "k must have 3 dimensions (total_k, num_kv_heads"},
      {"packed v", [](Inputs& i) { i.pack(), i.args.v.rank = 2; }, "v must have 3 dimensions (total_k, num_kv_heads"},
      {"offsets", [](Inputs& i) { i.pack(), i.args.cu_seqlens_k = ints({4, 1}); },
       "cu_seqlens_k must have 1 dimension (batch + 1), got 2: (4, 1)"},
      {"seqused_q", [](Inputs& i) { i.args.seqused_q = ints({3, 1}); }, "seqused_q must have 1 dimension (batch)"},
      {"seqused_k", [](Inputs& i) { i.args.seqused_k = ints({}); }, "seqused_k must have 1 dimension (batch)"},
      {"leftpad_k", [](Inputs& i) { i.args.leftpad_k = ints({}); }, "leftpad_k must have 1 dimension (batch)"},
      {"alibi", [](Inputs& i) { i.args.alibi_slopes = floats({}); },
       "alibi_slopes must have 1 dimensions (num_q_heads) or 2 (batch, num_q_heads), got 0"},
      {"sinks", [](Inputs& i) { i.args.sinks = floats({3, 8}); }, "sinks must have 1 dimension (num_q_heads)"},
      {"bias", [](Inputs& i) { i.args.bias = floats({300, 500}); },
       "bias must have 4 dimensions (batch or 1, num_q_heads or 1, q_len, kv_len), got 2: (300, 500)"},
      {"rng_state", [](Inputs& i) { i.args.rng_state = array(DType::kInt64, {}); },
       "rng_state must have 1 dimension (2), got 0"},
      {"out", [](Inputs& i) { i.args.out.rank = 3; },
       "out must have 4 dimensions (batch, q_len, num_q_heads, head_dim_v), got 3"},
      {"lse", [](Inputs& i) { i.args.lse = floats({8, 900}); },
       "lse must have 3 dimensions (batch, num_q_heads, q_len), got 2"},
      {"packed lse", [](Inputs& i) { i.pack(), i.args.lse = floats({3, 8, 300}); },
       "lse must have 2 dimensions (num_q_heads, total_q), got 3"},
      {"workspace", [](Inputs& i) { i.args.workspace = ints({1, 1}); }, "workspace must have 1 dimension (bytes)"},
      {"rank before shape", [](Inputs& i) { i.args.v.shape[1] = 5, i.args.out.rank = 5; },
       "out must have 4 dimensions"},
  });
}

TEST_F(AttentionRefuses, Shapes) {
  expect<ValueError>({
      {"head_dim of k", [](Inputs& i) { i.args.k.shape[3] = 64; },
       "k must have shape (batch, kv_len, num_kv_heads, head_dim) = (3, any, any, 128), got (3, 500, 2, 64)"},
      {"batch of k", [](Inputs& i) { i.args.k.shape[0] = 2; }, "k must have shape"},
      {"keys of v", [](Inputs& i) { i.args.v.shape[1] = 499; },
       "v must have shape (batch, kv_len, num_kv_heads, head_dim_v) = (3, 500, 2, any), got (3, 499, 2, 128)"},
      {"heads of v", [](Inputs& i) { i.args.v.shape[2] = 1; }, "v must have shape"},
      {"packed k", [](Inputs& i) { i.pack(), i.args.k.shape[2] = 64; },
       "k must have shape (total_k, num_kv_heads, head_dim) = (any, any, 128), got (1200, 2, 64)"},
      {"packed v", [](Inputs& i) { i.pack(), i.args.v.shape[0] = 1199; },
       "v must have shape (total_k, num_kv_heads, head_dim_v) = (1200, 2, any), got (1199, 2, 128)"},
      {"heads", [](Inputs& i) { i.args.k.shape[2] = i.args.v.shape[2] = 3; },
       "num_q_heads must be a multiple of num_kv_heads, got q (3, 300, 8, 128) and k (3, 500, 3, 128)"},
      {"no kv heads", [](Inputs& i) { i.args.k.shape[2] = i.args.v.shape[2] = 0; }, "multiple of num_kv_heads"},
      {"no offsets", [](Inputs& i) { i.pack(), i.args.cu_seqlens_q->shape[0] = 0; },
       "cu_seqlens_q must have shape (batch + 1,), got (0,)"},
      {"offsets", [](Inputs& i) { i.pack(), i.args.cu_seqlens_k->shape[0] = 3; },
       "cu_seqlens_k must have shape (batch + 1) = (4,), got (3,)"},
      {"seqused_q", [](Inputs& i) { i.args.seqused_q = ints({4}); },
       "seqused_q must have shape (batch) = (3,), got (4,)"},
      {"seqused_k", [](Inputs& i) { i.args.seqused_k = ints({4}); }, "seqused_k must have shape (batch) = (3,)"},
      {"leftpad_k", [](Inputs& i) { i.args.leftpad_k = ints({2}); }, "leftpad_k must have shape (batch) = (3,)"},
      {"alibi", [](Inputs& i) { i.args.alibi_slopes = floats({7}); },
       "alibi_slopes must have shape (num_q_heads) = (8,), got (7,)"},
      {"alibi of sequences", [](Inputs& i) { i.args.alibi_slopes = floats({2, 8}); },
       "alibi_slopes must have shape (batch, num_q_heads) = (3, 8), got (2, 8)"},
      {"sinks", [](Inputs& i) { i.args.sinks = floats({7}); }, "sinks must have shape (num_q_heads) = (8,), got (7,)"},
      {"bias", [](Inputs& i) { i.args.bias = floats({1, 2, 300, 500}); },
       "bias must have shape (batch or 1, num_q_heads or 1, q_len, kv_len) = (1, 8, 300, 500), got (1, 2, 300, 500)"},
      {"bias over all queries", [](Inputs& i) { i.args.bias = floats({3, 8, 1, 500}); }, "= (3, 8, 300, 500), got"},
      {"rng_state", [](Inputs& i) { i.args.rng_state = array(DType::kInt64, {1}); },
       "rng_state must have shape (2) = (2,), got (1,)"},
      {"out", [](Inputs& i) { i.args.out.shape[1] = 299; }, "out must have shape (batch, q_len, num_q_heads, "},
      {"head_dim of out", [](Inputs& i) { i.args.v.shape[3] = 64; },
       "out must have shape (batch, q_len, num_q_heads, head_dim_v of v) = (3, 300, 8, 64), got (3, 300, 8, 128)"},
      {"packed out", [](Inputs& i) { i.pack(), i.args.out.shape[0] = 500; },
       "out must have shape (total_q, num_q_heads, head_dim_v of v) = (600, 8, 128), got (500, 8, 128)"},
      {"lse", [](Inputs& i) { i.args.lse = floats({3, 300, 8}); },
       "lse must have shape (batch, num_q_heads, q_len) = (3, 8, 300), got (3, 300, 8)"},
      {"packed lse", [](Inputs& i) { i.pack(), i.args.lse = floats({600, 8}); },
       "lse must have shape (num_q_heads, total_q) = (8, 600), got (600, 8)"},
      {"negative", [](Inputs& i) { i.args.q.shape[1] = -1; }, "negative extent"},
      {"too many queries", [](Inputs& i) { i.args.q.shape[1] = i.args.out.shape[1] = (std::int64_t{1} << 30) + 1; },
       "q must have at most 2^30 tokens a sequence, got (3, 1073741825, 8, 128)"},
      {"too many keys", [](Inputs& i) { i.args.k.shape[1] = i.args.v.shape[1] = std::int64_t{1} << 31; },
       "k must have at most 2^30 tokens a sequence, got (3, 2147483648, 2, 128)"},
      {"too many sequences",
       [](Inputs& i) {
         for (TensorView* view : {&i.args.q, &i.args.k, &i.args.v, &i.args.out}) {
           view->shape[0] = std::int64_t{1} << 31;
         }
       },
       "q must have a batch and heads below 2^31, got (2147483648, 300, 8, 128)"},
  });
}

TEST_F(AttentionRefuses, Types) {
  expect<TypeError>({
      {"q", [](Inputs& i) { i.args.q.dtype = DType::kInt32; },
       "q must be float16, bfloat16, float32 or float8_e4m3fn, got int32"},
      {"k of q in fp8", [](Inputs& i) { i.args.q.dtype = DType::kFp8E4M3; }, "k must be float8_e4m3fn, got bfloat16"},
      {"k", [](Inputs& i) { i.args.k.dtype = DType::kFloat16; },
       "k must be bfloat16, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, int8 or uint8, got float16"},
      {"v", [](Inputs& i) { i.args.v.dtype = DType::kFloat32; },
       "v must be bfloat16, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, int8 or uint8, got float32"},
      {"k of another type than the one named", [](Inputs& i) { i.args.k_format = KvFormat::kFp16; },
       "k must be float16 for k_format=\"fp16\", got bfloat16"},
      {"another type beside q in fp8",
       [](Inputs& i) {
         i.args.q.dtype = DType::kFp8E4M3;
         i.args.v.dtype = DType::kFloat16;
         i.args.k.dtype = DType::kFp8E4M3;
         i.args.v_format = KvFormat::kFp16;
       },
       "v must be float8_e4m3fn, got float16"},
      {"fp32", [](Inputs& i) { i.args.k.dtype = DType::kFloat32, i.args.k_format = KvFormat::kFp32; },
       "k must be bfloat16, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, int8 or uint8, got float32"},
      {"out", [](Inputs& i) { i.args.out.dtype = DType::kFloat32; }, "out must be bfloat16, got float32"},
      {"offsets", [](Inputs& i) { i.pack(), i.args.cu_seqlens_q->dtype = DType::kInt64; },
       "cu_seqlens_q must be int32, got int64"},
      {"offsets of k", [](Inputs& i) { i.pack(), i.args.cu_seqlens_k->dtype = DType::kUInt32; },
       "cu_seqlens_k must be int32, got uint32"},
      {"seqused_q", [](Inputs& i) { i.args.seqused_q = floats({3}); }, "seqused_q must be int32, got float32"},
      {"seqused_k", [](Inputs& i) { i.args.seqused_k = floats({3}); }, "seqused_k must be int32, got float32"},
      {"leftpad_k", [](Inputs& i) { i.args.leftpad_k = floats({3}); }, "leftpad_k must be int32, got float32"},
      {"alibi", [](Inputs& i) { i.args.alibi_slopes = array(DType::kBFloat16, {8}); },
       "alibi_slopes must be float32, got bfloat16"},
      {"sinks", [](Inputs& i) { i.args.sinks = array(DType::kBFloat16, {8}); }, "sinks must be float32, got bfloat16"},
      {"bias", [](Inputs& i) { i.args.bias = array(DType::kFloat16, {1, 1, 300, 500}); },
       "bias must be float32 or bfloat16, got float16"},
      {"rng_state", [](Inputs& i) { i.args.rng_state = ints({2}); }, "rng_state must be int64, got int32"},
      {"lse", [](Inputs& i) { i.args.lse = array(DType::kBFloat16, {3, 8, 300}); },
       "lse must be float32, got bfloat16"},
      {"workspace", [](Inputs& i) { i.args.workspace = floats({64}); }, "workspace must be uint8, got float32"},
      {"dtype before device", [](Inputs& i) { i.args.out.dtype = DType::kUInt8, i.args.out.device = kGpu; },
       "out must be bfloat16, got uint8"},
  });
}

// A 16-bit type that is not q's has to be named.
TEST_F(AttentionRefuses, NoTypeThatIsNamed) {
  Inputs inputs(kGpu);
  inputs.args.k.dtype = DType::kFloat16;
  inputs.args.k_format = KvFormat::kFp16;
  EXPECT_NO_THROW(attention(inputs.args));
  EXPECT_EQ(fake_state().launches.size(), 1u);
}

TEST_F(AttentionRefuses, DevicesAndMemory) {
  expect<ValueError>({
      {"k", [](Inputs& i) { i.args.k.device = kGpu; }, "k must be on cpu as q is, got cuda:0"},
      {"rng_state", [](Inputs& i) { i.drop(0.5), i.args.rng_state->device = kGpu; },
       "rng_state must be on cpu as q is"},
      {"device before stride", [](Inputs& i) { i.args.out.device = kGpu, i.args.k.strides[3] = 2; },
       "out must be on cpu"},
      {"null", [](Inputs& i) { i.args.q.data = nullptr; }, "q must have data"},
      {"null keys", [](Inputs& i) { i.args.k.data = nullptr; }, "k must have data"},
      {"q's stride", [](Inputs& i) { i.args.q.strides[3] = 2; }, "q must have stride 1 along its last axis"},
      {"k's stride", [](Inputs& i) { i.args.k.strides[3] = 2; }, "k must have stride 1 along its last axis"},
      {"v's stride", [](Inputs& i) { i.args.v.strides[3] = 0; }, "v must have stride 1 along its last axis"},
      {"lengths", [](Inputs& i) { i.args.seqused_k = ints({3}), i.args.seqused_k->strides[0] = 0; },
       "seqused_k must be contiguous"},
      {"alibi", [](Inputs& i) { i.args.alibi_slopes = floats({3, 8}), i.args.alibi_slopes->strides[1] = 2; },
       "alibi_slopes must have stride 1 along its last axis"},
      {"sinks", [](Inputs& i) { i.args.sinks = floats({8}), i.args.sinks->strides[0] = 2; },
       "sinks must be contiguous"},
      {"read-only", [](Inputs& i) { i.args.out.read_only = true; }, "out is written and must not be read-only"},
      {"broadcast", [](Inputs& i) { i.args.out.strides[0] = 0; }, "out is written and must not be broadcast"},
      {"lse broadcast", [](Inputs& i) { i.args.lse = floats({3, 8, 300}), i.args.lse->strides[1] = 0; },
       "lse is written and must not be broadcast"},
      {"in place", [](Inputs& i) { i.args.out.data = i.args.q.data; }, "out must not share memory with q"},
  });
}

TEST_F(AttentionRefuses, Values) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect<ValueError>({
      {"scale", [=](Inputs& i) { i.args.softmax_scale = nan; }, "softmax_scale must be finite in fp32"},
      {"softcap", [](Inputs& i) { i.args.softcap = -1.0; }, "softcap must be 0 (off) or a positive number of fp32"},
      {"scale and softcap", [](Inputs& i) { i.args.softmax_scale = 1e10, i.args.softcap = 1e-30; },
       "softmax_scale / softcap must be finite in fp32 (at most 3.40282e+38), got 1e+10 / 1e-30"},
      {"window", [](Inputs& i) { i.args.window_right = -2; },
       "window must be two numbers from -1 (infinite) on, got (-1, -2)"},
      {"dropout of all", [](Inputs& i) { i.drop(1.0); }, "dropout_p must be at least 0 and below 1, got 1"},
      {"negative dropout", [](Inputs& i) { i.drop(-0.25); }, "dropout_p must be at least 0 and below 1, got -0.25"},
      {"dropout nan", [=](Inputs& i) { i.drop(nan); }, "dropout_p must be at least 0 and below 1, got nan"},
      {"num_splits", [](Inputs& i) { i.args.num_splits = -2; },
       "num_splits must be None (the invariant schedule), 0 (the heuristic) or a count, got -2"},
      {"many splits", [](Inputs& i) { i.args.num_splits = 129; },
       "num_splits must be None (the invariant schedule), 0 (the heuristic) or a count of at most 128, got 129"},
      {"workspace",
       [](Inputs& i) { i.args.workspace = TensorView(scratch_at(44 << 20), DType::kUInt8, Device{}, {255}); },
       "workspace must have at least 256 bytes, got 255"},
  });
}

TEST_F(AttentionRefuses, WhatNoKernelServes) {
  const auto fp32 = [](Inputs& i) {
    for (TensorView* view : {&i.args.q, &i.args.k, &i.args.v, &i.args.out}) view->dtype = DType::kFloat32;
  };
  const auto fp16 = [](Inputs& i) {
    for (TensorView* view : {&i.args.q, &i.args.k, &i.args.v, &i.args.out}) view->dtype = DType::kFloat16;
  };
  expect<NotSupportedError>({
      {"head_dim", [](Inputs& i) { i.set_head_dims(520, 128); },
       "attention: head_dim must be a multiple of 8 from 16 to 512, got 520"},
      {"small", [](Inputs& i) { i.set_head_dims(8, 128); }, "head_dim must be a multiple of 8 from 16 to 512, got 8"},
      {"step", [](Inputs& i) { i.set_head_dims(128, 20); },
       "head_dim_v must be a multiple of 8 from 16 to 512, got 20"},
  });
  expect<NotSupportedError>(
      {
          {"fp32", fp32, "attention: fakegpu has no attention kernel for float32; use float16 or bfloat16"},
          {"dims", [](Inputs& i) { i.set_head_dims(320, 256); },
           "fakegpu has no attention kernel for head_dim 320/256; its tiles are 256, 128, 64, 192/128"},
          {"any",
           [](Inputs& i) {
             i.set_head_dims(320, 256);
             i.args.softcap = 3;
           },
           "fakegpu has no attention kernel for head_dim 320/256 with softcap; its tiles are 256, 128"},
          {"a scale",
           [](Inputs& i) {
             i.set_head_dims(320, 256);
             i.args.softmax_scale = 0.0;
             i.drop(0.5);
             i.args.alibi_slopes = i.floats({8});
           },
           "with ALiBi, dropout and a scale that is not positive; its tiles are 256, 128"},
          {"no such form",
           [&](Inputs& i) {
             fp16(i);
             i.args.softcap = 3;
           },
           "fakegpu has no attention kernel with softcap"},
      },
      kGpu);
}

TEST_F(AttentionRefuses, ContentsInHostMemory) {
  const auto text = [](const std::function<void(Inputs&)>& bend) {
    Inputs inputs;
    bend(inputs);
    return error_of<ValueError>([&] { attention(inputs.args); });
  };
  const auto packed = [&](const std::function<void(Inputs&)>& bend) {
    return text([&](Inputs& i) {
      i.pack();
      bend(i);
    });
  };
  EXPECT_EQ(packed([](Inputs& i) { i.offsets_q[0] = 1; }), "attention: cu_seqlens_q must begin with 0, got 1");
  EXPECT_EQ(packed([](Inputs& i) { i.offsets_q[2] = 299; }),
            "attention: cu_seqlens_q must rise by 0 to max_seqlen_q = 300 a sequence, got -1 for sequence 1");
  EXPECT_EQ(packed([](Inputs& i) { i.offsets_k[1] = 501; }),
            "attention: cu_seqlens_k must rise by 0 to max_seqlen_k = 500 a sequence, got 501 for sequence 0");
  EXPECT_EQ(packed([](Inputs& i) { i.offsets_k = {0, 500, 1000, 1201}; }),
            "attention: cu_seqlens_k must end within the 1200 rows of k, got 1201");
  EXPECT_EQ(text([](Inputs& i) { i.used[1] = 301, i.args.seqused_q = i.ints(i.used); }),
            "attention: seqused_q[1] = 301 must lie in [0, 300] (the sequence's rows of q)");
  EXPECT_EQ(text([](Inputs& i) { i.used[1] = -1, i.args.seqused_k = i.ints(i.used); }),
            "attention: seqused_k[1] = -1 must lie in [0, 500] (the sequence's rows of k)");
  EXPECT_EQ(packed([](Inputs& i) { i.used[1] = 101, i.args.seqused_k = i.ints(i.used); }),
            "attention: seqused_k[1] = 101 must lie in [0, 100] (the sequence's rows of k)");
  EXPECT_EQ(text([](Inputs& i) { i.pads[0] = 501, i.args.leftpad_k = i.ints(i.pads); }),
            "attention: leftpad_k[0] = 501 must lie in [0, 500] (the sequence's keys in use)");
  EXPECT_EQ(text([](Inputs& i) {
              i.pads[2] = 1;
              i.args.leftpad_k = i.ints(i.pads);
              i.args.seqused_k = i.ints(i.used);
            }),
            "attention: leftpad_k[2] = 1 must lie in [0, 0] (the sequence's keys in use)");
  EXPECT_TRUE(fake_state().launches.empty());
  EXPECT_EQ(packed([](Inputs& i) {
              i.args.seqused_k = i.ints(i.used);
              i.args.leftpad_k = i.ints(i.pads);
            }),
            "");
  EXPECT_EQ(fake_state().launches.size(), 1u);
}

TEST_F(AttentionRefuses, ContentsOnGpusOnlyUnderTheSwitch) {
  Inputs inputs(kGpu);
  inputs.pack();
  inputs.offsets_q[3] = 1000;
  EXPECT_NO_THROW(attention(inputs.args));
  set_content_checks(true);
  EXPECT_EQ(error_of<ValueError>([&] { attention(inputs.args); }),
            "attention: cu_seqlens_q must rise by 0 to max_seqlen_q = 300 a sequence, got 690 for sequence 2");
  set_content_checks(false);
}

TEST_F(AttentionRefuses, NothingWhenThereIsNothingToDo) {
  const auto runs = [](const std::function<void(Inputs&)>& bend) {
    Inputs inputs;
    bend(inputs);
    EXPECT_EQ(attention_workspace_size(inputs.args), 0);
    return error_of<Error>([&] { attention(inputs.args); });
  };
  EXPECT_EQ(runs([](Inputs& i) { i.args.q.shape[1] = i.args.out.shape[1] = 0; }), "");
  EXPECT_EQ(runs([](Inputs& i) {
              for (TensorView* view : {&i.args.q, &i.args.k, &i.args.v, &i.args.out}) view->shape[0] = 0;
            }),
            "");
  EXPECT_EQ(runs([](Inputs& i) {
              for (TensorView* view : {&i.args.q, &i.args.k, &i.args.v, &i.args.out}) view->shape[2] = 0;
            }),
            "");
  EXPECT_EQ(runs([](Inputs& i) {
              i.pack();
              i.args.cu_seqlens_q->shape[0] = i.args.cu_seqlens_k->shape[0] = 1;
            }),
            "");
  EXPECT_EQ(runs([](Inputs& i) {
              i.pack();
              i.args.q.shape[0] = i.args.out.shape[0] = 0;
              i.args.max_seqlen_q = 0;
            }),
            "");
  EXPECT_TRUE(fake_state().launches.empty());
}

TEST_F(AttentionRefuses, WrongMasksOfDropout) {
  std::int64_t state[2] = {1, 2};
  DropoutMaskArgs good;
  good.mask = array(DType::kUInt8, {2, 3, 5, 7});
  good.rng_state = TensorView(state, DType::kInt64, Device{}, {2});
  good.dropout_p = 0.5;
  const auto text = [&](const std::function<void(DropoutMaskArgs&)>& bend) {
    DropoutMaskArgs args = good;
    bend(args);
    return error_of<Error>([&] { dropout_mask(args); });
  };
  EXPECT_EQ(text([](DropoutMaskArgs& a) { a.mask.rank = 3; }),
            "dropout_mask: mask must have 4 dimensions (batch, num_q_heads, q_len, kv_len), got 3: (2, 3, 5)");
  EXPECT_EQ(text([](DropoutMaskArgs& a) { a.rng_state.shape[0] = 3; }),
            "dropout_mask: rng_state must have shape (2) = (2,), got (3,)");
  EXPECT_EQ(text([](DropoutMaskArgs& a) { a.mask.dtype = DType::kBool; }),
            "dropout_mask: mask must be uint8, got bool");
  EXPECT_EQ(text([](DropoutMaskArgs& a) { a.rng_state.dtype = DType::kInt32; }),
            "dropout_mask: rng_state must be int64, got int32");
  EXPECT_EQ(text([](DropoutMaskArgs& a) { a.rng_state.device = kGpu; }),
            "dropout_mask: rng_state must be on cpu as mask is, got cuda:0");
  EXPECT_EQ(text([](DropoutMaskArgs& a) { a.dropout_p = 1.5; }),
            "dropout_mask: dropout_p must be at least 0 and below 1, got 1.5");
  EXPECT_EQ(text([](DropoutMaskArgs& a) { a.mask.shape[3] = (std::int64_t{1} << 30) + 1; }),
            "dropout_mask: mask must have a batch and heads below 2^31 and at most 2^30 tokens, got (2, 3, 5, "
            "1073741825)");
  EXPECT_TRUE(fake_state().launches.empty());
  EXPECT_EQ(text([](DropoutMaskArgs&) {}), "");
  EXPECT_EQ(fake_state().launches.size(), 1u);
}

}  // namespace
}  // namespace flashport::test
