// Which kernel serves what a query asks, and the reasons where none does.
#include <gtest/gtest.h>

#include <flashport/backend.h>

#include "common/host/decode/kernel_choice.h"
#include "tests/host/decode/plan_fixture.h"

namespace flashport::test {
namespace {

// A choice that is remembered serves its own request and table alone.
TEST_F(PlanDecode, KernelsOfQueriesInTurn) {
  const DecodeQuery few{.target = "fakegpu"}, many{.target = "fakegpu", .group_size = 32}, cpu{.target = "cpu"};
  for (int turn = 0; turn < 2; ++turn) {
    EXPECT_EQ(which_kernel(few), "decode/bf16/kv=bf16/hd128/r16/fakegpu");
    EXPECT_EQ(which_kernel(cpu), "decode/fp32/kv=bf16/hd128/r16/fakecpu");
    EXPECT_EQ(which_kernel(many), "decode/bf16/kv=bf16/hd128/r64/fakegpu");
  }
}

TEST_F(PlanDecode, KernelsByQuery) {
  DecodeQuery query{.target = "fakegpu"};
  EXPECT_TRUE(supports(query).supported);
  EXPECT_EQ(which_kernel(query), "decode/bf16/kv=bf16/hd128/r16/fakegpu");
  query.target = "cuda";
  query.group_size = 32;
  EXPECT_EQ(which_kernel(query), "decode/bf16/kv=bf16/hd128/r64/fakegpu");
  query.group_size = 129;
  EXPECT_EQ(supports(query).reason, "1 to 128 query heads may share a kv head, got 129");
  query.group_size = 1;
  query.q_len = 17;
  EXPECT_EQ(supports(query).reason, "q_len must be 1 to 16, got 17");
  query.q_len = 1;
  query.q_dtype = DType::kFloat32;
  EXPECT_EQ(supports(query).reason, "fakegpu has no kernel for float32 q; use float16 or bfloat16");
  EXPECT_EQ(error_of<NotSupportedError>([&] { (void)which_kernel(query); }),
            "which_kernel: fakegpu has no kernel for float32 q; use float16 or bfloat16");
  query.target = "cpu";
  EXPECT_EQ(which_kernel(query), "decode/fp32/kv=fp32/hd128/r16/fakecpu");
  query.head_dim_qk = 256;
  EXPECT_EQ(supports(query).reason, "cpu has no kernel for head_dim 256/128 with kv=fp32; its tiles are 128");
  query = {.target = "fakegpu", .q_dtype = DType::kFloat16, .k_format = KvFormat::kFp32};
  EXPECT_EQ(supports(query).reason, "a cache of fp32 goes with q of the same type, got float16");
  query.k_format = query.v_format = KvFormat::kBf16;  // no kernel of bf16 takes other queries
  EXPECT_EQ(supports(query).reason.find("fakegpu has no kernel for kv=bf16; it has bf16"), 0u)
      << supports(query).reason;
  query = {.target = "gfx1"};
  EXPECT_NE(supports(query).reason.find("no target \"gfx1\""), std::string::npos);
}

// A pair of formats has kernels where the table has a row of it, and no others.
TEST_F(PlanDecode, KernelsOfPairsOfFormats) {
  DecodeQuery query{.target = "fakegpu", .k_format = KvFormat::kQ8_0, .v_format = KvFormat::kFp8E4M3};
  EXPECT_EQ(which_kernel(query), "decode/fp16/k=q8_0/v=fp8_e4m3/hd128/r16/fakegpu");
  std::swap(query.k_format, query.v_format);
  EXPECT_EQ(
      supports(query).reason,
      "fakegpu has no kernel for k=fp8_e4m3 with v=q8_0; it has bf16, fp8_e4m3, q8_0, k=q8_0 with v=fp8_e4m3, any");
  query = {.target = "fakegpu", .k_format = KvFormat::kQ8_0};
  EXPECT_EQ(supports(query).reason,
            "fakegpu has no kernel for k=q8_0 with v=bf16; it has bf16, fp8_e4m3, q8_0, k=q8_0 with v=fp8_e4m3, any");
  query.v_format = KvFormat::kFp8E4M3;
  query.head_dim_v = 160;
  EXPECT_EQ(supports(query).reason,
            "fakegpu has no kernel for head_dim 128/160 with k=q8_0 with v=fp8_e4m3; its tiles are 128");
  query.head_dim_qk = 80;
  EXPECT_EQ(supports(query).reason, "q8_0 needs a head_dim that is a multiple of 32, got 80");

  DecodeInputs inputs(kGpu);
  inputs.args.k_cache = TensorView(scratch(), DType::kUInt8, kGpu, {64, 16, 2, 128 / 32 * 34});
  inputs.args.v_cache = TensorView(scratch(), DType::kFp8E4M3, kGpu, {64, 16, 2, 128});
  inputs.args.k_format = KvFormat::kQ8_0;
  const DecodePlan p = plan(inputs.args);
  EXPECT_STREQ(p.kernel->key, "decode/fp16/k=q8_0/v=fp8_e4m3/hd128/r16/fakegpu");
  EXPECT_EQ(p.params.cache.k.row_bytes, 136);
  EXPECT_EQ(p.params.cache.v.row_bytes, 128);
  EXPECT_EQ(p.params.k_format, KvFormat::kQ8_0);
  EXPECT_EQ(p.params.v_format, KvFormat::kFp8E4M3);
}

// Kernels of blocks serve pairs without one of their own.
TEST(ChooseDecodeKernel, BlocksOfTheFormatsOfTheCall) {
  const auto entry = [](const char* key, KvFormat k, KvFormat v, int rows) {
    return KernelEntry{.key = key,
                       .tag = KernelTag::kDecode,
                       .threads = 128,
                       .shape = {.decode = {{128, 128, rows, MathType::kFp16, k, v}, {}}}};
  };
  const KernelEntry kernels[] = {entry("any", KvFormat::kAny, KvFormat::kAny, 8),
                                 entry("blocks", KvFormat::kBlocks, KvFormat::kBlocks, 8),
                                 entry("16 bits and blocks", KvFormat::kBf16, KvFormat::kBlocks, 8),
                                 entry("blocks and 16 bits", KvFormat::kBlocks, KvFormat::kBf16, 8),
                                 entry("groups", KvFormat::kInt8, KvFormat::kInt8, 8),
                                 entry("bytes", KvFormat::kBytes, KvFormat::kBytes, 8),
                                 entry("fp8", KvFormat::kFp8E4M3, KvFormat::kFp8E4M3, 8),
                                 entry("pair of 8", KvFormat::kQ8_0, KvFormat::kQ4_0, 8)};
  const auto key = [&](KvFormat k, KvFormat v, int group, bool scales = false, Factors factors = Factors::kNone,
                       int dim = 128) {
    const KernelRequest request{DType::kBFloat16, k, v, dim, dim, group, 1, 0, scales, factors};
    const KernelEntry* kernel = choose_decode_kernel(kernels, "fakegpu", request, nullptr);
    return std::string(kernel == nullptr ? "" : kernel->key);
  };
  EXPECT_EQ(key(KvFormat::kQ8_0, KvFormat::kQ4_0, 4), "pair of 8");
  EXPECT_EQ(key(KvFormat::kQ8_0, KvFormat::kQ4_0, 17), "pair of 8");
  EXPECT_EQ(key(KvFormat::kQ4_0, KvFormat::kQ8_0, 8), "blocks");
  EXPECT_EQ(key(KvFormat::kIq4Nl, KvFormat::kQ4_0, 16), "blocks");
  EXPECT_EQ(key(KvFormat::kIq4Nl, KvFormat::kIq4Nl, 40), "blocks");
  EXPECT_EQ(key(KvFormat::kQ8_0, KvFormat::kQ4_1, 4), "blocks");
  EXPECT_EQ(key(KvFormat::kQ5_0, KvFormat::kQ5_1, 16), "blocks");
  EXPECT_EQ(key(KvFormat::kBf16, KvFormat::kQ8_0, 4), "16 bits and blocks");
  EXPECT_EQ(key(KvFormat::kQ5_1, KvFormat::kBf16, 16), "blocks and 16 bits");
  EXPECT_EQ(key(KvFormat::kBf16, KvFormat::kQ8_0, 4, true), "");  // its math would have to be bf16
  EXPECT_EQ(key(KvFormat::kBf16, KvFormat::kFp8E4M3, 4), "");
  EXPECT_EQ(key(KvFormat::kQ8_0, KvFormat::kFp8E4M3, 4), "any");
  EXPECT_EQ(key(KvFormat::kQ5_0, KvFormat::kFp8E4M3, 4), "any");
  EXPECT_EQ(key(KvFormat::kQ8_0, KvFormat::kQ4_0, 4, true), "any");
  EXPECT_EQ(key(KvFormat::kInt8, KvFormat::kInt8, 4), "bytes");
  EXPECT_EQ(key(KvFormat::kInt8, KvFormat::kInt8, 4, false, Factors::kNone, 96), "bytes");
  EXPECT_EQ(key(KvFormat::kFp8E5M2, KvFormat::kFp8E4M3Fnuz, 4), "bytes");
  EXPECT_EQ(key(KvFormat::kFp8E4M3, KvFormat::kFp8E4M3, 4), "fp8");
  EXPECT_EQ(key(KvFormat::kFp8E4M3, KvFormat::kFp8E4M3, 4, true, Factors::kOfRows), "bytes");
  EXPECT_EQ(key(KvFormat::kInt8, KvFormat::kInt4, 4), "any");
  EXPECT_EQ(key(KvFormat::kInt8, KvFormat::kInt8, 4, true), "any");
  EXPECT_EQ(key(KvFormat::kInt8, KvFormat::kInt8, 4, true, Factors::kOfGroups), "groups");
  EXPECT_EQ(key(KvFormat::kInt8, KvFormat::kInt8, 4, true, Factors::kOfGroups, 96), "any");
  EXPECT_EQ(key(KvFormat::kInt8, KvFormat::kFp8E4M3, 4, true, Factors::kOfGroups), "any");
  EXPECT_EQ(key(KvFormat::kInt8, KvFormat::kFp8E4M3, 4, true, Factors::kOfRows), "bytes");
  EXPECT_EQ(key(KvFormat::kQ8_0, KvFormat::kInt8, 4, true, Factors::kOfRows), "any");
}

// What the other operations of this header are asked, and what they answer.
TEST_F(PlanDecode, OtherOperationsByQuery) {
  EXPECT_EQ(which_kernel(DecodeStage2Query{.target = "fakegpu"}), "decode_stage2/fakegpu");
  EXPECT_EQ(supports(DecodeStage2Query{.out_dtype = DType::kInt32}).reason,
            "Out must be float16, bfloat16 or float32, got int32");
  EXPECT_EQ(which_kernel(MergeQuery{.target = "fakegpu", .dtype = DType::kFloat32, .head_dim = 3}),
            "merge_states/fakegpu");
  EXPECT_EQ(supports(MergeQuery{.dtype = DType::kFp8E4M3}).reason,
            "o must be float16, bfloat16 or float32, got float8_e4m3fn");
  EXPECT_EQ(supports(MergeQuery{.head_dim = 0}).reason, "head_dim must be 1 or more and below 2^31, got 0");
  EXPECT_EQ(which_kernel(AppendQuery{}), "append_kv/fakecpu");
  AppendQuery append{.target = "fakegpu", .dtype = DType::kFloat32, .k_format = KvFormat::kQ8_0};
  EXPECT_EQ(which_kernel(append), "append_kv/fakegpu");
  append.v_format = KvFormat::kQ8_0;
  EXPECT_EQ(which_kernel(append), "append_kv/fakegpu");
  append.k_format = KvFormat::kQ5_1;
  EXPECT_EQ(which_kernel(append), "append_any/fakegpu");
  append.head_dim_v = 80;
  EXPECT_EQ(supports(append).reason, "q8_0 needs a head_dim_v that is a multiple of 32, got 80");
  append.target = "gfx1";
  append.head_dim_v = 64;
  EXPECT_NE(supports(append).reason.find("no target \"gfx1\""), std::string::npos);
  EXPECT_EQ(error_of<NotSupportedError>([&] { (void)which_kernel(append); }),
            "which_kernel: " + supports(append).reason);
  EXPECT_EQ(supports(AppendQuery{.dtype = DType::kInt32}).reason, "k must be float16, bfloat16 or float32, got int32");
  EXPECT_EQ(which_kernel(QuantizeQuery{}), "quantize_kv/fakecpu");
  EXPECT_EQ(which_kernel(QuantizeQuery{.target = "fakegpu", .format = KvFormat::kIq4Nl, .dequantize = true}),
            "dequantize_kv/fakegpu");
  EXPECT_EQ(supports(QuantizeQuery{.dtype = DType::kInt32}).reason,
            "x must be float16, bfloat16 or float32, got int32");
  EXPECT_EQ(supports(QuantizeQuery{.dtype = DType::kUInt8, .dequantize = true}).reason,
            "out must be float16, bfloat16 or float32, got uint8");
  EXPECT_EQ(supports(QuantizeQuery{.format = KvFormat::kFp16}).reason,
            "format must be one of fp8_e4m3, fp8_e4m3fnuz, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, fp8_e5m2, int8, int4, "
            "got fp16; for an element type's own format convert the array");
  EXPECT_EQ(supports(QuantizeQuery{.head_dim = 0}).reason, "head_dim must be 1 or more and below 2^31, got 0");
  EXPECT_EQ(supports(QuantizeQuery{.format = KvFormat::kQ4_0, .head_dim = 80}).reason,
            "q4_0 needs a head_dim that is a multiple of 32, got 80");
  EXPECT_NE(supports(QuantizeQuery{.target = "gfx1"}).reason.find("no target \"gfx1\""), std::string::npos);
}

}  // namespace
}  // namespace flashport::test
