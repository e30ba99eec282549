#include <cstdlib>

#include "tests/device/decode/model_kernels.h"
#include "tests/device/decode/model_tables.h"

namespace flashport::machine {
namespace {

// Plans ask for it. Calls here append as they decode, and merge nothing.
KernelEntry unused_kernel(const char* key, KernelTag tag) {
  static const ModelKernel kRun = [](const void*, void*) { std::abort(); };
  return {.key = key, .tag = tag, .threads = 128, .handle = &kRun};
}

}  // namespace

void add_native_kernels(std::vector<KernelEntry>& table) {
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kBf16, 128, 8>("decode/bf16/kv=bf16/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kBf16, 64, 8>("decode/bf16/kv=bf16/hd64/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kBf16, 64, 64>("decode/bf16/kv=bf16/hd64/r64/sm90a"));
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kBf16, 64, 128>("decode/bf16/kv=bf16/hd64/r128/sm90a"));
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kBf16, 128, 64>("decode/bf16/kv=bf16/hd128/r64/sm90a"));
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kBf16, 128, 128>("decode/bf16/kv=bf16/hd128/r128/sm90a"));
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kBf16, 256, 8>("decode/bf16/kv=bf16/hd256/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kBf16, 256, 16>("decode/bf16/kv=bf16/hd256/r16/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kQ8_0, 128, 8>("decode/fp16/kv=q8_0/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kQ8_0, 128, 16>("decode/fp16/kv=q8_0/hd128/r16/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kQ4_0, 128, 8>("decode/fp16/kv=q4_0/hd128/r8/sm90a"));
  table.push_back(
      decode_kernel<MathType::kBf16, KvFormat::kBf16, 64, 8, true>("decode_plain/bf16/kv=bf16/hd64/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kBf16, 64, 8, true, true>(
      "decode_plain/bf16/kv=bf16/hd64/r8/large/sm90a"));
  table.push_back(
      decode_kernel<MathType::kBf16, KvFormat::kBf16, 128, 8, true>("decode_plain/bf16/kv=bf16/hd128/r8/sm90a"));
  table.push_back(
      decode_kernel<MathType::kBf16, KvFormat::kBf16, 128, 128, true>("decode_plain/bf16/kv=bf16/hd128/r128/sm90a"));
  table.push_back(
      decode_kernel<MathType::kFp16, KvFormat::kQ8_0, 128, 8, true>("decode_plain/fp16/kv=q8_0/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kIq4Nl, 128, 8>("decode/fp16/kv=iq4_nl/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kQ8_0, 128, 8, true, true>(
      "decode_plain/fp16/kv=q8_0/hd128/r8/large/sm90a"));
  table.push_back(
      decode_kernel<MathType::kFp16, KvFormat::kQ8_0, 128, 8, false, true>("decode/fp16/kv=q8_0/hd128/r8/large/sm90a"));
  table.push_back(
      decode_kernel<MathType::kFp16, KvFormat::kQ4_0, 128, 8, true>("decode_plain/fp16/kv=q4_0/hd128/r8/sm90a"));
  table.push_back(
      decode_kernel<MathType::kFp16, KvFormat::kQ4_0, 128, 8, false, true>("decode/fp16/kv=q4_0/hd128/r8/large/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kQ4_0, 128, 8, true, true>(
      "decode_plain/fp16/kv=q4_0/hd128/r8/large/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kQ8_0, 128, 16, false, true>(
      "decode/fp16/kv=q8_0/hd128/r16/large/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kQ4_0, 128, 16, false, true>(
      "decode/fp16/kv=q4_0/hd128/r16/large/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kQ8_0, 128, 8, false, false, KvFormat::kQ4_0>(
      "decode/fp16/k=q8_0/v=q4_0/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kQ8_0, 128, 8, true, false, KvFormat::kQ4_0>(
      "decode_plain/fp16/k=q8_0/v=q4_0/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kQ8_0, 128, 8, true, true, KvFormat::kQ4_0>(
      "decode_plain/fp16/k=q8_0/v=q4_0/hd128/r8/large/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kBlocks, 128, 8>("decode/fp16/kv=blocks/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kBlocks, 128, 8, false, true>(
      "decode/fp16/kv=blocks/hd128/r8/large/sm90a"));
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kBf16, 128, 8, false, false, KvFormat::kBlocks>(
      "decode/bf16/k=bf16/v=blocks/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kBlocks, 128, 8, false, false, KvFormat::kBf16>(
      "decode/bf16/k=blocks/v=bf16/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kFp16, 128, 8, false, false, KvFormat::kBlocks>(
      "decode/fp16/k=fp16/v=blocks/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kInt8, 128, 8>("decode/fp16/kv=int8/hd128/r8/sm90a"));
  table.push_back(
      decode_kernel<MathType::kFp16, KvFormat::kInt8, 128, 8, false, true>("decode/fp16/kv=int8/hd128/r8/large/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kBytes, 128, 8>("decode/fp16/kv=bytes/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kBytes, 128, 8, false, true>(
      "decode/fp16/kv=bytes/hd128/r8/large/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kInt4, 128, 8>("decode/fp16/kv=int4/hd128/r8/sm90a"));
  table.push_back(
      decode_kernel<MathType::kFp16, KvFormat::kInt4, 128, 8, false, true>("decode/fp16/kv=int4/hd128/r8/large/sm90a"));
  table.push_back(
      append_kernel<MathType::kBf16, KvFormat::kBf16, 128, 8, false>("decode_append/bf16/kv=bf16/hd128/r8/sm90a"));
  table.push_back(
      append_kernel<MathType::kBf16, KvFormat::kBf16, 128, 8, true>("decode_append/bf16/kv=bf16/hd128/r8/plain/sm90a"));
  table.push_back(unused_kernel("append_rotary/sm90a", KernelTag::kAppendRotary));
  table.push_back(unused_kernel("decode_stage2/sm90a", KernelTag::kDecodeStage2));
  table.push_back(combine_kernel<AppendDecodeParams>("decode_append_combine/sm90a", KernelTag::kDecodeAppendCombine));
  table.push_back(combine_kernel<DecodeParams>("decode_combine/sm90a", KernelTag::kDecodeCombine));
  table.push_back(combine_kernel<PlainDecodeParams>("decode_plain_combine/sm90a", KernelTag::kDecodePlainCombine));
}

}  // namespace flashport::machine
