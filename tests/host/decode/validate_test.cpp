// flash_decode refuses every wrong argument with the right exception and text, checks ranks first, and launches
// nothing.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "common/host/contents.h"
#include "tests/host/decode/decode_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

struct Bend {
  const char* name;
  std::function<void(DecodeArgs&)> apply;
  const char* text;  // a part of the message
};

class DecodeRefuses : public ::testing::Test {
 protected:
  template <class Exception>
  void expect(const std::vector<Bend>& bends) {
    for (const Bend& bend : bends) {
      DecodeInputs inputs;
      bend.apply(inputs.args);
      const std::string text = error_of<Exception>([&] { flash_decode(inputs.args); });
      EXPECT_EQ(text.rfind("flash_decode: ", 0), 0u) << bend.name << ": " << text;
      EXPECT_NE(text.find(bend.text), std::string::npos) << bend.name << ": " << text;
      EXPECT_TRUE(fake_state().launches.empty()) << bend.name;
    }
  }
  FakeBackends backends_;
};

TensorView ints(std::initializer_list<std::int64_t> shape) {
  return TensorView(scratch(), DType::kInt32, Device{}, shape);
}
TensorView floats(std::initializer_list<std::int64_t> shape) {
  return TensorView(scratch(), DType::kFloat32, Device{}, shape);
}

void carry_q8_0(DecodeArgs& a) {
  a.k_cache.dtype = a.v_cache.dtype = DType::kUInt8;
  a.k_format = a.v_format = KvFormat::kQ8_0;
}

TEST_F(DecodeRefuses, Ranks) {
  expect<ValueError>({
      {"q", [](DecodeArgs& a) { a.q.rank = 2; },
       "q must have 3 dimensions (batch, num_q_heads, head_dim) or 4 (batch, q_len, num_q_heads, head_dim), got 2: (3, "
       "8)"},
      {"k_cache", [](DecodeArgs& a) { a.k_cache.rank = 2; }, "k_cache must have 4 dimensions"},
      {"v_cache", [](DecodeArgs& a) { a.v_cache.rank = 3; }, "v_cache must have 4 dimensions"},
      {"seqlens", [](DecodeArgs& a) { a.seqlens = ints({3, 1}); },
       "seqlens must have 1 dimension (batch), got 2: (3, 1)"},
      {"block_table", [](DecodeArgs& a) { a.block_table = ints({3}); },
       "block_table must have 2 dimensions (batch, max_pages), got 1: (3,)"},
      {"out", [](DecodeArgs& a) { a.out.rank = 2; },
       "out must have 3 dimensions (batch, num_q_heads, head_dim_v), got 2"},
      {"lse", [](DecodeArgs& a) { a.lse = floats({3, 8, 1}); },
       "lse must have 2 dimensions (batch, num_q_heads), got 3"},
      {"sinks", [](DecodeArgs& a) { a.sinks = floats({3, 8}); }, "sinks must have 1 dimension"},
      {"alibi", [](DecodeArgs& a) { a.alibi_slopes = floats({}); }, "alibi_slopes must have 1 dimensions"},
      {"tree_mask", [](DecodeArgs& a) { a.tree_mask = ints({3}); }, "tree_mask must have 2 dimensions (batch, q_len)"},
      {"workspace", [](DecodeArgs& a) { a.workspace = ints({1, 1}); }, "workspace must have 1 dimension"},
      {"rank before shape", [](DecodeArgs& a) { a.v_cache.shape[1] = 5, a.out.rank = 5; },
       "out must have 3 dimensions"},
  });
}

TEST_F(DecodeRefuses, Shapes) {
  expect<ValueError>({
      {"k head_dim", [](DecodeArgs& a) { a.k_cache.shape[3] = 64; }, "k_cache must have shape"},
      {"v pages", [](DecodeArgs& a) { a.v_cache.shape[0] = 63; }, "= (64, 16, 2, 128), got (63, 16, 2, 128)"},
      {"v heads", [](DecodeArgs& a) { a.v_cache.shape[2] = 1; }, "v_cache must have shape"},
      {"heads", [](DecodeArgs& a) { a.k_cache.shape[2] = a.v_cache.shape[2] = 3; }, "multiple of num_kv_heads"},
      {"seqlens", [](DecodeArgs& a) { a.seqlens.shape[0] = 2; }, "seqlens must have shape (batch) = (3,), got (2,)"},
      {"table", [](DecodeArgs& a) { a.block_table->shape[0] = 4; }, "block_table must have shape (batch, max_pages)"},
      {"page size", [](DecodeArgs& a) { a.k_cache.shape[1] = a.v_cache.shape[1] = 0; }, "page_size of 1 or more"},
      {"out", [](DecodeArgs& a) { a.out.shape[1] = 4; }, "out must have shape"},
      {"lse", [](DecodeArgs& a) { a.lse = floats({3, 7}); },
       "lse must have shape (batch, num_q_heads) = (3, 8), got (3, 7)"},
      {"sinks", [](DecodeArgs& a) { a.sinks = floats({7}); }, "sinks must have shape"},
      {"k_scale", [](DecodeArgs& a) { a.k_scale = floats({3}); },
       "flash_decode: k_scale must have shape (1,), (num_kv_heads,) = (2,), that of k_cache without its last axis, or "
       "that of k_cache with a group of 8 values or a multiple of it in place of each value, got (3,) for k_cache (64, "
       "16, 2, 128)"},
      {"scales of rows", [](DecodeArgs& a) { a.v_scale = floats({64, 2, 16}); },
       "got (64, 2, 16) for v_cache (64, 16, 2, 128)"},
      {"scales of groups", [](DecodeArgs& a) { a.v_scale = floats({64, 16, 2, 32}); },
       "got (64, 16, 2, 32) for v_cache (64, 16, 2, 128)"},
      {"pages without a table", [](DecodeArgs& a) { a.block_table.reset(); },
       "k_cache must have a row for each request: batch is 3, got (64, 16, 2, 128); a cache in pages needs "
       "block_table, "
       "or kv_indptr and kv_indices"},
      {"out head_dim", [](DecodeArgs& a) { a.out.shape[2] = 64; },
       "out must have shape (batch, num_q_heads, head_dim_v of v_cache) = (3, 8, 128), got (3, 8, 64)"},
      {"out head_dim of q8_0",
       [](DecodeArgs& a) {
         carry_q8_0(a);
         a.k_cache.shape[3] = 4 * 34;
         a.v_cache.shape[3] = 2 * 34;
       },
       "head_dim_v of v_cache) = (3, 8, 64), got (3, 8, 128)"},
      {"v rows of q8_0",
       [](DecodeArgs& a) {
         carry_q8_0(a);
         a.k_cache.shape[3] = 4 * 34;
         a.v_cache.shape[3] = 100;
       },
       "v_cache must have shape (pages or batch, page_size or length, num_kv_heads, head_dim_v) = (64, 16, 2, 68), got "
       "(64, 16, 2, 100)"},
      {"negative", [](DecodeArgs& a) { a.q.shape[1] = -8; }, "negative extent"},
      {"shape before dtype", [](DecodeArgs& a) { a.q.dtype = DType::kInt32, a.seqlens.shape[0] = 2; }, "seqlens"},
  });
}

TEST_F(DecodeRefuses, Types) {
  expect<TypeError>({
      {"q", [](DecodeArgs& a) { a.q.dtype = DType::kInt32; }, "q must be float16, bfloat16 or float32, got int32"},
      {"foreign q", [](DecodeArgs& a) { a.q.dtype = DType::kFloat64; },
       "q must be float16, bfloat16 or float32, got float64"},
      {"foreign lengths", [](DecodeArgs& a) { a.seqlens.dtype = DType::kInt16; },
       "seqlens must be int32 or int64, got int16"},
      {"foreign mask", [](DecodeArgs& a) { a.tree_mask = TensorView(scratch_at(0), DType::kBool, {}, {3, 1}); },
       "tree_mask must be uint32, got bool"},
      {"k", [](DecodeArgs& a) { a.k_cache.dtype = DType::kFloat16; }, "k_cache must be bfloat16, "},
      {"v", [](DecodeArgs& a) { a.v_cache.dtype = DType::kFloat16; },
       "v_cache must be bfloat16, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, int8 or uint8, got float16"},
      {"format of k", [](DecodeArgs& a) { a.k_format = KvFormat::kQ8_0; },
       "flash_decode: k_cache must be uint8 for k_format=\"q8_0\", got bfloat16; pass the format that it has, or none "
       "for "
       "its element type's own"},
      {"format of v", [](DecodeArgs& a) { a.v_format = KvFormat::kFp8E4M3; },
       "flash_decode: v_cache must be float8_e4m3fn for v_format=\"fp8_e4m3\", got bfloat16"},
      {"seqlens", [](DecodeArgs& a) { a.seqlens.dtype = DType::kFloat32; }, "seqlens must be int32 or int64"},
      {"table", [](DecodeArgs& a) { a.block_table->dtype = DType::kInt64; }, "block_table must be int32, got int64"},
      {"out", [](DecodeArgs& a) { a.out.dtype = DType::kUInt8; }, "out must be"},
      {"lse", [](DecodeArgs& a) { a.lse = ints({3, 8}); }, "lse must be float32, got int32"},
      {"dtype before device", [](DecodeArgs& a) { a.out.dtype = DType::kUInt8, a.out.device = kGpu; },
       "out must be float"},
  });
}

TEST_F(DecodeRefuses, DevicesAndMemory) {
  expect<ValueError>({
      {"k", [](DecodeArgs& a) { a.k_cache.device = kGpu; }, "k_cache must be on cpu as q is, got cuda:0"},
      {"table", [](DecodeArgs& a) { a.block_table->device = kGpu; }, "block_table must be on cpu"},
      {"device before stride", [](DecodeArgs& a) { a.out.device = kGpu, a.k_cache.strides[3] = 2; },
       "out must be on cpu"},
      {"null", [](DecodeArgs& a) { a.q.data = nullptr; }, "q must have data"},
      {"null cache", [](DecodeArgs& a) { a.k_cache.data = nullptr; }, "k_cache must have data"},
      {"cache stride", [](DecodeArgs& a) { a.k_cache.strides[3] = 2; },
       "k_cache must have stride 1 along its last axis"},
      {"lengths stride", [](DecodeArgs& a) { a.seqlens.strides[0] = 0; }, "seqlens must be contiguous"},
      {"table stride", [](DecodeArgs& a) { a.block_table->strides[1] = 2; }, "block_table must have stride 1"},
      {"read-only", [](DecodeArgs& a) { a.out.read_only = true; }, "out is written and must not be read-only"},
      {"broadcast", [](DecodeArgs& a) { a.out.strides[0] = 0; }, "out is written and must not be broadcast"},
      {"in place", [](DecodeArgs& a) { a.out.data = a.q.data; }, "out must not share memory with q"},
  });
}

TEST_F(DecodeRefuses, Values) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect<ValueError>({
      {"scale", [=](DecodeArgs& a) { a.softmax_scale = nan; }, "softmax_scale must be finite"},
      {"softcap", [](DecodeArgs& a) { a.softcap = -1.0; }, "softcap must be 0 (off) or a positive number"},
      {"softcap nan", [=](DecodeArgs& a) { a.softcap = nan; }, "softcap must be"},
      {"window", [](DecodeArgs& a) { a.window_left = -2; }, "window must be"},
      {"num_splits", [](DecodeArgs& a) { a.num_splits = -2; }, "num_splits must be"},
      {"no format of k", [](DecodeArgs& a) { a.k_cache.dtype = DType::kUInt8; },
       "flash_decode: k_format must say what k_cache of uint8 stores, got none; pass k_format=\"q8_0\", \"q4_0\", "
       "\"q4_1\", \"q5_0\", \"q5_1\" or \"iq4_nl\""},
      {"no format of v", [](DecodeArgs& a) { a.v_cache.dtype = DType::kUInt8; },
       "flash_decode: v_format must say what v_cache of uint8 stores, got none; pass v_format=\"q8_0\", \"q4_0\", "
       "\"q4_1\", \"q5_0\", \"q5_1\" or \"iq4_nl\""},
      {"layouts", [](DecodeArgs& a) { a.token_table = ints({3, 4}); }, "give at most one of"},
      {"request_index", [](DecodeArgs& a) { a.request_index = ints({3}); }, "request_index must come with token_table"},
      {"csr", [](DecodeArgs& a) { a.block_table.reset(), a.kv_indptr = ints({4}); }, "must be given together"},
      {"no lengths", [](DecodeArgs& a) { a.seqlens = {}; }, "seqlens must be given"},
      {"max_q_len", [](DecodeArgs& a) { a.max_q_len = 2; }, "max_q_len must come with cu_seqlens_q"},
      {"ragged", [](DecodeArgs& a) { a.cu_seqlens_q = ints({4}); }, "max_q_len must be 1 or more"},
      {"workspace", [](DecodeArgs& a) { a.workspace = TensorView(scratch_at(1 << 20), DType::kUInt8, Device{}, {16}); },
       "workspace must have at least"},
      {"scale of fp32", [](DecodeArgs& a) { a.softmax_scale = 1e39; },
       "softmax_scale must be finite in fp32, times log2(e) (at most 2.3e+38 in magnitude), got 1e+39"},
      {"scale in base 2", [](DecodeArgs& a) { a.softmax_scale = -3e38; },
       "softmax_scale must be finite in fp32, times log2(e) (at most 2.3e+38 in magnitude), got -3e+38"},
      {"softcap of fp32", [](DecodeArgs& a) { a.softcap = 1e300; },
       "softcap must be 0 (off) or a positive number of fp32 (1.17549e-38 to 2.3e+38), got 1e+300"},
      {"softcap that is 0 in fp32", [](DecodeArgs& a) { a.softcap = 1e-50; },
       "softcap must be 0 (off) or a positive number of fp32 (1.17549e-38 to 2.3e+38), got 1e-50"},
      {"scale and softcap", [](DecodeArgs& a) { a.softmax_scale = 1e10, a.softcap = 1e-30; },
       "softmax_scale / softcap must be finite in fp32 (at most 3.40282e+38), got 1e+10 / 1e-30"},
  });
}

TEST_F(DecodeRefuses, WhatNoKernelServes) {
  expect<NotSupportedError>({
      {"head_dim", [](DecodeArgs& a) { a = DecodeInputs({}, 520).args; }, "head_dim 520 > 512"},
      {"step", [](DecodeArgs& a) { a = DecodeInputs({}, 20).args; }, "multiple of 8, got 20"},
      {"q8_0",
       [](DecodeArgs& a) {
         a = DecodeInputs({}, 80).args;
         carry_q8_0(a);
       },
       "q8_0 needs a head_dim that is a multiple of 32, got 80"},
      {"format", [](DecodeArgs& a) { a.k_cache.dtype = a.v_cache.dtype = DType::kFp8E4M3Fnuz; },
       "has no kernel for kv=fp8_e4m3fnuz; it has fp32, bf16, q8_0"},
      {"pair", [](DecodeArgs& a) { a.v_cache.dtype = DType::kFp8E4M3; },
       "flash_decode: cpu has no kernel for k=bf16 with v=fp8_e4m3; it has fp32, bf16, q8_0"},
      {"pair of blocks",
       [](DecodeArgs& a) {
         a.k_cache.dtype = DType::kUInt8;
         a.k_format = KvFormat::kQ8_0;
         a.k_cache.shape[3] = 4 * 34;
       },
       "flash_decode: cpu has no kernel for k=q8_0 with v=bf16; it has fp32, bf16, q8_0"},
  });
}

TEST_F(DecodeRefuses, ContentsInHostMemory) {
  const auto text = [](const std::function<void(DecodeInputs&)>& bend) {
    DecodeInputs inputs;
    bend(inputs);
    return error_of<ValueError>([&] { flash_decode(inputs.args); });
  };
  EXPECT_EQ(text([](DecodeInputs& i) { i.lengths[2] = 161; }),
            "flash_decode: seqlens[2] = 161 must lie in [0, 160] (what block_table can hold)");
  EXPECT_EQ(text([](DecodeInputs& i) { i.lengths[1] = -1; }),
            "flash_decode: seqlens[1] = -1 must lie in [0, 160] (what block_table can hold)");
  EXPECT_EQ(text([](DecodeInputs& i) { i.pages[23] = 64; }),
            "flash_decode: block_table entry 3 of request 2 must lie in [0, 63] (the pages of the cache), got 64");
  EXPECT_EQ(text([](DecodeInputs& i) { i.pages[1] = i.pages[12] = -1; }), "");  // past the lengths
  float scales[2] = {0.5f, 0.0f};
  const auto give = [&](std::optional<TensorView>& to) { to = TensorView(scales, DType::kFloat32, Device{}, {2}); };
  EXPECT_EQ(text([&](DecodeInputs& i) { give(i.args.k_scale); }),
            "flash_decode: k_scale[1] = 0 must be finite and not 0; pass None for a scale of 1");
  scales[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(text([&](DecodeInputs& i) { give(i.args.v_scale); }),
            "flash_decode: v_scale[1] = nan must be finite and not 0; pass None for a scale of 1");
  EXPECT_EQ(fake_state().launches.size(), 1u);
}

TEST_F(DecodeRefuses, ContentsOnGpusOnlyUnderTheSwitch) {
  DecodeInputs inputs(kGpu);
  inputs.lengths[2] = 1000;
  EXPECT_NO_THROW(flash_decode(inputs.args));
  set_content_checks(true);
  EXPECT_NE(error_of<ValueError>([&] { flash_decode(inputs.args); }).find("seqlens[2] = 1000"), std::string::npos);
  fake_state().capture = 5;
  EXPECT_NE(error_of<ValueError>([&] { flash_decode(inputs.args); }).find("FLASHPORT_CHECK=1"), std::string::npos);
  set_content_checks(false);
}

TEST_F(DecodeRefuses, DevicesThatNothingServes) {
  DecodeInputs inputs(kUnserved);
  EXPECT_EQ(error_of<NotSupportedError>([&] { flash_decode(inputs.args); }),
            "flash_decode: q is on hip:0 (Old Card, gfx900), which none of the compiled targets (fakehip) serves");
  DecodeInputs absent(Device{DeviceKind::kCuda, 3});
  EXPECT_NE(error_of<BackendError>([&] { flash_decode(absent.args); }).find("there are 1 devices"), std::string::npos);
}

TEST_F(DecodeRefuses, NothingWhenThereIsNothingToDo) {
  DecodeInputs inputs;
  for (TensorView* view : {&inputs.args.q, &inputs.args.seqlens, &*inputs.args.block_table, &inputs.args.out}) {
    view->shape[0] = 0;
    view->data = nullptr;
  }
  EXPECT_NO_THROW(flash_decode(inputs.args));
  EXPECT_TRUE(fake_state().launches.empty());
}

// As of flash_decode, under LightLLM's names.
TEST_F(DecodeRefuses, FormatsOfStage1) {
  DecodeStage1Args a;
  std::int32_t lengths[2] = {100, 30}, rows[2] = {0, 1};
  a.q = TensorView(scratch_at(0), DType::kBFloat16, Device{}, {2, 8, 128});
  a.k = TensorView(scratch_at(16 << 20), DType::kUInt8, Device{}, {256, 2, 136});
  a.v = TensorView(scratch_at(32 << 20), DType::kUInt8, Device{}, {256, 2, 136});
  a.req_to_tokens = TensorView(scratch_at(2 << 20), DType::kInt32, Device{}, {2, 128});
  a.b_req_idx = TensorView(rows, DType::kInt32, Device{}, {2});
  a.b_seqlen = TensorView(lengths, DType::kInt32, Device{}, {2});
  a.mid_out = TensorView(scratch_at(4 << 20), DType::kFloat32, Device{}, {2, 8, 2, 128});
  a.mid_out_logsumexp = TensorView(scratch_at(8 << 20), DType::kFloat32, Device{}, {2, 8, 2});
  a.max_len_in_batch = 100;
  a.block_seq = 64;
  EXPECT_EQ(error_of<ValueError>([&] { flash_decode_stage1(a); }),
            "flash_decode_stage1: k_format must say what k of uint8 stores, got none; pass k_format=\"q8_0\", "
            "\"q4_0\", \"q4_1\", \"q5_0\", \"q5_1\" or \"iq4_nl\"");
  a.k_format = KvFormat::kQ8_0;
  EXPECT_EQ(error_of<ValueError>([&] { flash_decode_stage1(a); }),
            "flash_decode_stage1: v_format must say what v of uint8 stores, got none; pass v_format=\"q8_0\", "
            "\"q4_0\", \"q4_1\", \"q5_0\", \"q5_1\" or \"iq4_nl\"");
  a.v = TensorView(scratch_at(32 << 20), DType::kBFloat16, Device{}, {256, 2, 128});
  EXPECT_EQ(error_of<NotSupportedError>([&] { flash_decode_stage1(a); }),
            "flash_decode_stage1: cpu has no kernel for k=q8_0 with v=bf16; it has fp32, bf16, q8_0");
  a.v_format = KvFormat::kQ8_0;
  EXPECT_EQ(error_of<TypeError>([&] {
              flash_decode_stage1(a);
            }).find("flash_decode_stage1: v must be uint8 for v_format=\"q8_0\", got bfloat16"),
            0u);
  EXPECT_TRUE(fake_state().launches.empty());
  a.v = TensorView(scratch_at(32 << 20), DType::kUInt8, Device{}, {256, 2, 136});
  flash_decode_stage1(a);
  EXPECT_EQ(fake_state().launches.back().key, "decode/fp32/kv=q8_0/hd128/r16/fakecpu");
}

}  // namespace
}  // namespace flashport::test
