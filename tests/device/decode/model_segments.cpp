#include "tests/device/decode/model_kernels.h"
#include "tests/device/decode/model_tables.h"

namespace flashport::machine {

void add_kernels_of_segments(std::vector<KernelEntry>& table) {
  namespace decode = sm90a::decode;
  table.push_back(segments_kernel<MathType::kBf16, KvFormat::kBf16, KvFormat::kQ8_0, 128, 8, false>(
      "decode_segments/bf16/kv=q8_0/hd128/r8/sm90a"));
  table.push_back(segments_kernel<MathType::kBf16, KvFormat::kBf16, KvFormat::kQ8_0, 128, 8, true>(
      "decode_segments/bf16/kv=q8_0/hd128/r8/large/sm90a"));
  table.push_back(segments_kernel<MathType::kBf16, KvFormat::kBf16, KvFormat::kQ4_0, 128, 8, false>(
      "decode_segments/bf16/kv=q4_0/hd128/r8/sm90a"));
  table.push_back(segments_kernel<MathType::kBf16, KvFormat::kBf16, KvFormat::kQ4_0, 128, 8, true>(
      "decode_segments/bf16/kv=q4_0/hd128/r8/large/sm90a"));
  table.push_back(combine_kernel<SegmentsDecodeParams, decode::CombineSegmentsShared>(
      "decode_segments_combine/sm90a", KernelTag::kDecodeSegmentsCombine,
      [](const SegmentsDecodeParams& p, decode::CombineSegmentsShared& shared) {
        decode::combine_segments(p, sm90a::Block(nullptr), shared, [] {});
      }));
}

}  // namespace flashport::machine
