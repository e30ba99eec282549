// The operations other than flash_decode: stage 1, stage 2, append_kv, merges.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include <flashport/backend.h>

#include "common/device/merge/params.h"
#include "tests/host/decode/decode_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

struct Operations : ::testing::Test {
  FakeBackends backends_;
};
using Stage1 = Operations;
using Stage2 = Operations;
using AppendKv = Operations;
using MergeStates = Operations;
using Backends = Operations;

TensorView floats(std::int64_t at, std::initializer_list<std::int64_t> shape, Device device = {}) {
  return TensorView(scratch_at(at), DType::kFloat32, device, shape);
}

struct Stage1Inputs {
  std::int32_t table[2 * 300] = {};
  std::int32_t rows[2] = {1, 0};
  std::int64_t lengths[2] = {300, 0};
  DecodeStage1Args args;

  explicit Stage1Inputs(Device device = {}) {
    args.q = TensorView(scratch_at(0), DType::kBFloat16, device, {2, 8, 128});
    args.k = TensorView(scratch_at(16 << 20), DType::kBFloat16, device, {400, 2, 128});
    args.v = TensorView(scratch_at(32 << 20), DType::kBFloat16, device, {400, 2, 128});
    args.req_to_tokens = TensorView(table, DType::kInt32, device, {2, 300});
    args.b_req_idx = TensorView(rows, DType::kInt32, device, {2});
    args.b_seqlen = TensorView(lengths, DType::kInt64, device, {2});
    args.max_len_in_batch = 300;
    args.mid_out = TensorView(scratch_at(1 << 18), DType::kFloat32, device, {2, 8, 4, 128});
    args.mid_out_logsumexp = TensorView(scratch_at(1 << 19), DType::kFloat32, device, {2, 8, 4});
    args.block_seq = 128;
  }
};

TEST_F(Stage1, RunsAChunkPerBlock) {
  Stage1Inputs inputs(kGpu);
  flash_decode_stage1(inputs.args);
  ASSERT_EQ(fake_state().launches.size(), 1u);
  const Launch& launch = fake_state().launches[0];
  EXPECT_EQ(launch.key, "decode/bf16/kv=bf16/hd128/r16/fakegpu");
  EXPECT_EQ(launch.grid, 2 * 2 * 3);
  const auto p = launch.as<DecodeParams>();
  EXPECT_EQ(p.num_chunks, 3);
  EXPECT_EQ(p.chunk_keys, 128);
  EXPECT_EQ(p.write_empty_chunks, 0);
  EXPECT_EQ(p.out.data, inputs.args.mid_out.data);
  EXPECT_EQ(p.out.stride_seq, 8 * 4 * 128);
  EXPECT_EQ(p.out.stride_head, 4 * 128);
  EXPECT_EQ(p.out_stride_chunk, 128);
  EXPECT_EQ(p.lse_stride_chunk, 1);
  EXPECT_EQ(p.cache.max_len, 300);
  EXPECT_EQ(p.cache.table_row.data, inputs.rows);
  EXPECT_EQ(p.window_left, -1);
}

TEST_F(Stage1, ChecksLengthsAndRowsOfACallWithoutKeys) {
  const auto text = [](auto bend) {
    Stage1Inputs inputs;
    inputs.args.max_len_in_batch = 0;
    inputs.lengths[0] = 0;
    bend(inputs);
    return error_of<ValueError>([&] { flash_decode_stage1(inputs.args); });
  };
  EXPECT_EQ(text([](Stage1Inputs&) {}), "");
  EXPECT_EQ(
      text([](Stage1Inputs& i) { i.lengths[1] = 1; }),
      "flash_decode_stage1: B_Seqlen[1] = 1 must lie in [0, 0] (what max_len_in_batch and Req_to_tokens can hold)");
  EXPECT_EQ(text([](Stage1Inputs& i) { i.rows[1] = 2; }),
            "flash_decode_stage1: B_req_idx[1] = 2 must lie in [0, 1] (the rows of Req_to_tokens)");
  EXPECT_EQ(text([](Stage1Inputs& i) { i.args.block_seq = 1; }), "");
  EXPECT_EQ(text([](Stage1Inputs& i) { i.args.mid_out.shape[2] = i.args.mid_out_logsumexp.shape[2] = 0; }), "");
  EXPECT_TRUE(fake_state().launches.empty());
}

TEST_F(Stage1, Refuses) {
  const auto text = [](auto bend) {
    Stage1Inputs inputs;
    bend(inputs);
    return error_of<ValueError>([&] { flash_decode_stage1(inputs.args); });
  };
  EXPECT_EQ(
      text([](Stage1Inputs& i) { i.args.mid_out.rank = 5; })
          .rfind("flash_decode_stage1: mid_out must have 4 dimensions (batch, num_q_heads, blocks, head_dim), got 5: ",
                 0),
      0u);
  EXPECT_EQ(text([](Stage1Inputs& i) { i.args.block_seq = 64; }),
            "flash_decode_stage1: mid_out must have at least ceil(max_len_in_batch / block_seq) = 5 blocks for "
            "max_len_in_batch 300 and block_seq 64, got 4: (2, 8, 4, 128)");
  EXPECT_EQ(text([](Stage1Inputs& i) { i.args.block_seq = 0; }),
            "flash_decode_stage1: block_seq must be 1 or more, got 0");
  EXPECT_EQ(
      text([](Stage1Inputs& i) { i.args.softmax_scale = std::numeric_limits<double>::infinity(); }),
      "flash_decode_stage1: sm_scale must be finite in fp32, times log2(e) (at most 2.3e+38 in magnitude), got inf");
  EXPECT_EQ(
      text([](Stage1Inputs& i) { i.lengths[0] = 301; }),
      "flash_decode_stage1: B_Seqlen[0] = 301 must lie in [0, 300] (what max_len_in_batch and Req_to_tokens can hold)");
  EXPECT_EQ(text([](Stage1Inputs& i) { i.rows[1] = 2; }),
            "flash_decode_stage1: B_req_idx[1] = 2 must lie in [0, 1] (the rows of Req_to_tokens)");
  EXPECT_EQ(text([](Stage1Inputs& i) { i.args.mid_out.read_only = true; }),
            "flash_decode_stage1: mid_out is written and must not be read-only; pass a copy");
  EXPECT_TRUE(fake_state().launches.empty());
}

struct Stage2Inputs {
  std::int32_t lengths[2] = {512, 0};
  DecodeStage2Args args;

  explicit Stage2Inputs(Device device = {}) {
    args.mid_out = floats(0, {2, 8, 4, 80}, device);
    args.mid_out_logexpsum = floats(1 << 17, {2, 8, 4}, device);
    args.b_seqlen = TensorView(lengths, DType::kInt32, device, {2});
    args.out = TensorView(scratch_at(1 << 18), DType::kFloat16, device, {2, 8, 80});
    args.block_seq = 128;
  }
};

TEST_F(Stage2, RunsARowPerBlockWithTheRealStrides) {
  Stage2Inputs inputs(kGpu);
  inputs.args.mid_out.strides[3] = 3;  // the inner stride is not assumed
  flash_decode_stage2(inputs.args, 9);
  ASSERT_EQ(fake_state().launches.size(), 1u);
  EXPECT_EQ(fake_state().launches[0].grid, 2 * 8);
  EXPECT_EQ(fake_state().launches[0].stream, 9u);
  const auto p = fake_state().launches[0].as<Stage2Params>();
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.tokens, 1);
  EXPECT_EQ(p.head_dim, 80);
  EXPECT_EQ(p.max_chunks, 4);
  EXPECT_EQ(p.chunk_keys, 128);
  EXPECT_EQ(p.mid_stride_chunk, 80);
  EXPECT_EQ(p.mid.stride_dim, 3);
  EXPECT_EQ(p.out.stride_head, 80);
  EXPECT_EQ(p.lse.data, nullptr);
}

TEST_F(Stage2, Refuses) {
  const auto text = [](auto bend) {
    Stage2Inputs inputs;
    bend(inputs);
    return error_of<ValueError>([&] { flash_decode_stage2(inputs.args); });
  };
  EXPECT_EQ(text([](Stage2Inputs& i) { i.args.mid_out = floats(0, {2, 3, 4, 5, 6}); }),
            "flash_decode_stage2: mid_out must have 4 dimensions (batch, num_q_heads, blocks, head_dim), got 5: "
            "(2, 3, 4, 5, 6)");
  EXPECT_EQ(
      text([](Stage2Inputs& i) { i.args.mid_out_logexpsum.rank = 4; })
          .rfind("flash_decode_stage2: mid_out_logexpsum must have 3 dimensions (batch, num_q_heads, blocks), got 4: ",
                 0),
      0u);
  EXPECT_EQ(text([](Stage2Inputs& i) {
              i.args.out.rank = 4;
            }).rfind("flash_decode_stage2: Out must have 3 dimensions (batch, num_q_heads, head_dim), got 4: ", 0),
            0u);
  EXPECT_EQ(text([](Stage2Inputs& i) { i.lengths[0] = 513; }),
            "flash_decode_stage2: B_Seqlen[0] = 513 must lie in [0, 512] (blocks * block_seq)");
  EXPECT_EQ(text([](Stage2Inputs& i) { i.args.out.read_only = true; }),
            "flash_decode_stage2: Out is written and must not be read-only; pass a copy");
}

TEST_F(AppendKv, FillsBothSides) {
  AppendKvArgs a;
  std::int64_t positions[3] = {-1, 1023, 0};
  a.k = TensorView(scratch_at(0), DType::kFloat16, Device{}, {3, 2, 64});
  a.v = TensorView(scratch_at(4096), DType::kFloat16, Device{}, {3, 2, 32});
  a.k_cache = TensorView(scratch_at(16 << 20), DType::kUInt8, Device{}, {64, 2, 16, 68});
  a.v_cache = TensorView(scratch_at(32 << 20), DType::kUInt8, Device{}, {64, 2, 16, 34});
  a.k_format = a.v_format = KvFormat::kQ8_0;
  a.positions = TensorView(positions, DType::kInt64, Device{}, {3});
  a.kv_layout = KvLayout::kHND;
  append_kv(a);
  ASSERT_EQ(fake_state().launches.size(), 1u);
  EXPECT_EQ(fake_state().launches[0].grid, 3 * 2 * 2);  // one thread a block, two units of 32 a row
  const auto p = fake_state().launches[0].as<AppendParams>();
  EXPECT_EQ(p.num_slots, 1024);
  EXPECT_EQ(p.page_size, 16);
  EXPECT_EQ(p.k.format, KvFormat::kQ8_0);
  EXPECT_EQ(p.v.unit_bytes, 34);
  EXPECT_EQ(p.k.cache.token_stride, 68);
  EXPECT_EQ(p.v.cache.head_stride, 16 * 34);
  positions[0] = 1024;
  EXPECT_NE(error_of<ValueError>([&] { append_kv(a); }).find("positions[0] = 1024 must lie in [-1, 1023]"),
            std::string::npos);
  positions[0] = 0;
  float scale = 0.0f;
  a.v_scale = TensorView(&scale, DType::kFloat32, Device{}, {1});
  EXPECT_EQ(error_of<ValueError>([&] { append_kv(a); }),
            "append_kv: v_scale[0] = 0 must be finite and not 0; pass None for a scale of 1");
  a.v_scale.reset();
  a.v_cache.read_only = true;
  EXPECT_NE(error_of<ValueError>([&] { append_kv(a); }).find("v_cache is written"), std::string::npos);
  a.v_cache.read_only = false;
  a.v.dtype = DType::kBFloat16;
  EXPECT_EQ(error_of<TypeError>([&] { append_kv(a); }), "append_kv: v must be float16, got bfloat16");
}

TEST_F(AppendKv, TakesScalesBesideACache) {
  AppendKvArgs a;
  std::int64_t positions[3] = {-1, 1023, 0};
  a.k = TensorView(scratch_at(0), DType::kFloat16, Device{}, {3, 2, 64});
  a.v = TensorView(scratch_at(4096), DType::kFloat16, Device{}, {3, 2, 32});
  a.k_cache = TensorView(scratch_at(16 << 20), DType::kInt8, Device{}, {64, 2, 16, 32});
  a.v_cache = TensorView(scratch_at(32 << 20), DType::kInt8, Device{}, {64, 2, 16, 32});
  a.k_format = KvFormat::kInt4;
  a.positions = TensorView(positions, DType::kInt64, Device{}, {3});
  a.kv_layout = KvLayout::kHND;
  const std::string beside =
      "that of k_cache without its last axis, or that of k_cache with a group of 8 values or a multiple of it in place "
      "of each value";
  EXPECT_EQ(error_of<ValueError>([&] { append_kv(a); }), "append_kv: k_scale must be given for int4, and have shape " +
                                                             beside + ", got none; the scales are written there");
  a.k_scale = TensorView(scratch_at(40 << 20), DType::kFloat16, Device{}, {64, 2, 16, 8});
  a.v_scale = TensorView(scratch_at(44 << 20), DType::kFloat32, Device{}, {64, 2, 16});
  append_kv(a);
  const auto& launch = fake_state().launches.back();
  EXPECT_EQ(launch.key, "append_any/fakecpu");
  const auto p = launch.as<AppendParams>();
  EXPECT_EQ(p.k.unit_bytes, 16);
  EXPECT_EQ(p.k.scale, nullptr);
  EXPECT_EQ(p.k.row_scales.dtype, DType::kFloat16);
  EXPECT_EQ(p.k.row_scales.dims_per_scale, 8);
  EXPECT_EQ(p.k.row_scales.stride_page, 2 * 16 * 8);
  EXPECT_EQ(p.k.row_scales.stride_head, 16 * 8);
  EXPECT_EQ(p.k.row_scales.stride_token, 8);
  EXPECT_EQ(p.k.row_scales.stride_group, 1);
  EXPECT_EQ(p.v.format, KvFormat::kInt8);
  EXPECT_EQ(p.v.row_scales.dims_per_scale, 0);
  EXPECT_EQ(p.v.row_scales.stride_token, 1);
  a.k_scale = TensorView(scratch_at(40 << 20), DType::kFloat16, Device{}, {64, 2, 16, 16});
  EXPECT_EQ(error_of<ValueError>([&] { append_kv(a); }),
            "append_kv: k_scale must have shape (1,), (num_kv_heads,) = (2,), " + beside +
                ", got (64, 2, 16, 16) for k_cache (64, 2, 16, 32)");
  a.k_scale = TensorView(scratch_at(40 << 20), DType::kFloat16, Device{}, {64, 2, 16, 8});
  a.k_scale->read_only = true;
  EXPECT_NE(error_of<ValueError>([&] { append_kv(a); }).find("k_scale is written and must not be read-only"),
            std::string::npos);
  a.k_scale->read_only = false;
  a.k_format = KvFormat::kFp16;
  a.k_cache = TensorView(scratch_at(16 << 20), DType::kFloat16, Device{}, {64, 2, 16, 64});
  EXPECT_EQ(error_of<ValueError>([&] { append_kv(a); }),
            "append_kv: k_scale must have shape (1,) or (num_kv_heads,) = (2,) for fp16, got (64, 2, 16, 8); rows of "
            "fp8, int8 and int4 alone have scales of their own");
  float one = 1.0f;
  a.k_scale = TensorView(&one, DType::kFloat16, Device{}, {1});
  EXPECT_EQ(error_of<TypeError>([&] { append_kv(a); }), "append_kv: k_scale must be float32, got float16");
}

TEST_F(AppendKv, TakesFormatsByName) {
  AppendKvArgs a;
  std::int64_t positions[3] = {-1, 1023, 0};
  a.k = TensorView(scratch_at(0), DType::kFloat16, Device{}, {3, 2, 64});
  a.v = TensorView(scratch_at(4096), DType::kFloat16, Device{}, {3, 2, 32});
  a.k_cache = TensorView(scratch_at(16 << 20), DType::kUInt8, Device{}, {64, 16, 2, 68});
  a.v_cache = TensorView(scratch_at(32 << 20), DType::kUInt8, Device{}, {64, 16, 2, 34});
  a.positions = TensorView(positions, DType::kInt64, Device{}, {3});
  EXPECT_EQ(error_of<ValueError>([&] { append_kv(a); }),
            "append_kv: k_format must say what k_cache of uint8 stores, got none; pass k_format=\"q8_0\", \"q4_0\", "
            "\"q4_1\", \"q5_0\", \"q5_1\" or \"iq4_nl\"");
  a.k_format = KvFormat::kQ8_0;
  EXPECT_EQ(error_of<ValueError>([&] { append_kv(a); }),
            "append_kv: v_format must say what v_cache of uint8 stores, got none; pass v_format=\"q8_0\", \"q4_0\", "
            "\"q4_1\", \"q5_0\", \"q5_1\" or \"iq4_nl\"");
  a.v_format = KvFormat::kBf16;
  EXPECT_EQ(
      error_of<TypeError>([&] { append_kv(a); }),
      "append_kv: v_cache must be bfloat16 for v_format=\"bf16\", got uint8; pass the format that it has, or none "
      "for its element type's own");
  a.v_format.reset();
  a.v_cache = TensorView(scratch_at(32 << 20), DType::kBFloat16, Device{}, {64, 16, 2, 32});
  EXPECT_TRUE(fake_state().launches.empty());
  append_kv(a);
  const auto mixed = fake_state().launches.back().as<AppendParams>();
  EXPECT_EQ(mixed.k.format, KvFormat::kQ8_0);
  EXPECT_EQ(mixed.v.format, KvFormat::kBf16);
  EXPECT_EQ(mixed.v.unit_bytes, 64);
  a.k_cache = TensorView(scratch_at(16 << 20), DType::kUInt8, Device{}, {64, 16, 2, 2 * 18});
  a.k_format = KvFormat::kQ4_0;
  append_kv(a);
  EXPECT_EQ(fake_state().launches.back().as<AppendParams>().k.unit_bytes, 18);
}

using QuantizeKv = Operations;

TEST_F(QuantizeKv, CollapsesAxesThatBothTensorsWalkAlike) {
  QuantizeKvArgs a;
  a.x = TensorView(scratch_at(0), DType::kBFloat16, Device{}, {2, 3, 5, 7, 64});
  a.out = TensorView(scratch_at(1 << 20), DType::kUInt8, Device{}, {2, 3, 5, 7, 2 * 24});
  a.format = KvFormat::kQ5_1;
  quantize_kv(a);
  auto p = fake_state().launches.back().as<QuantizeParams>();
  EXPECT_EQ(p.rows, 210);
  EXPECT_EQ(p.heads, 210);
  EXPECT_EQ(p.head_dim, 64);
  EXPECT_EQ(p.scales.data, nullptr);
  EXPECT_EQ(p.unit_bytes, 24);
  EXPECT_EQ(p.values.stride_head, 64);
  EXPECT_EQ(p.stored.stride_head, 48);
  std::swap(a.x.strides[0], a.x.strides[4]);  // as a transposed view lies: rows of x are no longer dense
  a.x.strides[0] = 0;                         // broadcast
  a.x.strides[4] = 1;
  quantize_kv(a);
  p = fake_state().launches.back().as<QuantizeParams>();
  EXPECT_EQ(p.heads, 105);
  EXPECT_EQ(p.tokens, 2);
  EXPECT_EQ(p.values.stride_token, 0);
  DequantizeKvArgs back;
  back.x = a.out;
  back.out = TensorView(scratch_at(0), DType::kFloat32, Device{}, {2, 3, 5, 7, 64});
  back.format = KvFormat::kQ5_1;
  dequantize_kv(back);
  EXPECT_EQ(fake_state().launches.back().key, "dequantize_kv/fakecpu");
  EXPECT_EQ(fake_state().launches.back().as<QuantizeParams>().values.dtype, DType::kFloat32);
}

TEST_F(QuantizeKv, SaysWhatIsWrong) {
  QuantizeKvArgs a;
  const auto refused = [&](const auto& change) {
    QuantizeKvArgs changed = a;
    change(changed);
    std::string text;
    try {
      quantize_kv(changed);
    } catch (const std::exception& error) {
      text = error.what();
    }
    return text;
  };
  a.x = TensorView(scratch_at(0), DType::kFloat32, Device{}, {3, 64});
  a.out = TensorView(scratch_at(1 << 20), DType::kUInt8, Device{}, {3, 36});
  a.format = KvFormat::kQ4_0;
  EXPECT_EQ(refused([](auto&) {}), "");
  EXPECT_EQ(refused([](auto& c) { c.x.rank = 0; }),
            "quantize_kv: x must have 1 to 8 dimensions (..., head_dim), got 0: ()");
  EXPECT_EQ(refused([](auto& c) { c.format = KvFormat::kBf16; }),
            "quantize_kv: format must be one of fp8_e4m3, fp8_e4m3fnuz, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, "
            "fp8_e5m2, int8, int4, got bf16; for an element type's own format convert the array");
  float scales[3 * 9] = {};
  EXPECT_EQ(refused([&](auto& c) { c.scale = TensorView(scales, DType::kFloat32, Device{}, {3}); }),
            "quantize_kv: scale must be None for q4_0, whose blocks hold theirs");
  const auto as_int4 = [&](std::initializer_list<std::int64_t> shape) {
    return refused([&](auto& c) {
      c.format = KvFormat::kInt4;
      c.out = TensorView(scratch_at(1 << 20), DType::kInt8, Device{}, {3, 32});
      if (shape.size() > 0) c.scale = TensorView(scales, DType::kFloat16, Device{}, shape);
    });
  };
  EXPECT_EQ(as_int4({3, 8}), "");
  EXPECT_EQ(as_int4({3}), "");
  const std::string wanted =
      "quantize_kv: scale must be given for int4 and have the shape (3, 64) of the numbers without its last axis, or "
      "with a group of 8 values or a multiple of it in place of each value, got ";
  EXPECT_EQ(as_int4({}), wanted + "none");
  EXPECT_EQ(as_int4({3, 16}), wanted + "(3, 16)");
  EXPECT_EQ(as_int4({2}), wanted + "(2,)");
  EXPECT_EQ(refused([](auto& c) { c.x.shape[1] = 48; }),
            "quantize_kv: q4_0 needs a head_dim that is a multiple of 32, got 48");
  EXPECT_EQ(refused([](auto& c) { c.out.shape[1] = 68; }),
            "quantize_kv: out must have shape (3, 36) as x has (3, 64), got (3, 68)");
  EXPECT_EQ(refused([](auto& c) { c.out.dtype = DType::kInt8; }), "quantize_kv: out must be uint8, got int8");
  EXPECT_EQ(refused([](auto& c) { c.out.strides[0] = 37; }),
            "quantize_kv: out must have its data and all rows at even addresses, got strides (37, 1) of 1-byte "
            "elements");
  DequantizeKvArgs b{a.out, a.x, KvFormat::kQ4_1, {}};
  EXPECT_EQ(error_of<ValueError>([&] { dequantize_kv(b); }),
            "dequantize_kv: x must have rows of whole blocks, 20 bytes each in q4_1, got (3, 36)");
}

TEST_F(MergeStates, CollapsesAxesThatAllTensorsWalkAlike) {
  MergeStatesArgs a;
  a.o = floats(0, {5, 3, 4, 2, 16});
  a.lse = floats(1 << 17, {5, 3, 4, 2});
  a.out = floats(1 << 18, {3, 4, 2, 16});
  a.out_lse = floats(1 << 19, {3, 4, 2});
  a.lse_base_2 = true;
  merge_states(a);
  auto p = fake_state().launches.at(0).as<MergeStatesParams>();
  EXPECT_EQ(p.states, 5);
  EXPECT_EQ(p.rows, 24);
  EXPECT_EQ(p.inner_rows, 24);
  EXPECT_EQ(p.o_stride_inner[0], 16);
  EXPECT_EQ(p.o_stride_state, 24 * 16);
  EXPECT_EQ(p.lse_stride_inner[0], 1);
  EXPECT_EQ(p.lse_base_2, 1);
  a.lse.strides[1] = 100;  // rows of lse lie apart
  merge_states(a);
  p = fake_state().launches.at(1).as<MergeStatesParams>();
  EXPECT_EQ(p.rows, 24);
  EXPECT_EQ(p.inner_rows, 8);
  EXPECT_EQ(p.lse_stride_outer[0], 100);
  EXPECT_EQ(p.o_stride_outer[0], 8 * 16);
  a.out_lse.strides[1] = 50;
  a.out_lse.strides[0] = 1000;
  EXPECT_NE(error_of<ValueError>([&] { merge_states(a); }).find("collapse to two"), std::string::npos);
}

TEST_F(MergeStates, TwoTensors) {
  MergeStateArgs a;
  a.o_a = floats(0, {7, 16});
  a.o_b = floats(1 << 16, {7, 16});
  a.lse_a = floats(1 << 17, {7});
  a.lse_b = floats((1 << 17) + 4096, {7});
  a.out = floats(1 << 18, {7, 16});
  a.out_lse = floats(1 << 19, {7});
  merge_state(a);
  const auto p = fake_state().launches.at(0).as<MergeStatesParams>();
  EXPECT_EQ(p.two_tensors, 1);
  EXPECT_EQ(p.states, 2);
  EXPECT_EQ(p.o[1], a.o_b.data);
  EXPECT_EQ(p.lse[1], a.lse_b.data);
  EXPECT_EQ(p.o_stride_inner[1], 16);
  a.lse_b.shape[0] = 6;
  EXPECT_EQ(error_of<ValueError>([&] { merge_state(a); }),
            "merge_state: lse_b must have shape (7,) as o_a has (7, 16), got (6,)");
  a.lse_b.rank = 2;
  EXPECT_NE(error_of<ValueError>([&] { merge_state(a); }).find("lse_b must have 1 dimension (...)"), std::string::npos);
}

TEST_F(Backends, SaysWhatIsThereAndWhyNot) {
  const std::vector<BackendStatus> all = backends();
  ASSERT_EQ(all.size(), 3u);
  EXPECT_TRUE(all[0].available);
  EXPECT_EQ(all[1].name, "cuda");
  EXPECT_EQ(all[1].devices.at(0).target, "fakegpu");
  EXPECT_FALSE(all[2].available);
  EXPECT_NE(all[2].detail.find("none of its targets serves Old Card"), std::string::npos);
  EXPECT_EQ(kernel_keys("fakegpu").size(), 50u);
  EXPECT_THROW((void)kernel_keys("none"), NotSupportedError);
}

}  // namespace
}  // namespace flashport::test
