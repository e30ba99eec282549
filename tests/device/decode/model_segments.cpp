#include "tests/device/decode/model_kernels.h"
#include "tests/device/decode/model_tables.h"

namespace flashport::machine {

void add_kernels_of_segments(std::vector<KernelEntry>& table) {
  table.push_back(segments_kernel<KvFormat::kQ8_0, 128, false>("decode_segments/fp16/kv=q8_0/hd128/r8/sm90a"));
  table.push_back(segments_kernel<KvFormat::kQ8_0, 128, true>("decode_segments/fp16/kv=q8_0/hd128/r8/large/sm90a"));
  table.push_back(segments_kernel<KvFormat::kQ4_0, 128, false>("decode_segments/fp16/kv=q4_0/hd128/r8/sm90a"));
  table.push_back(segments_kernel<KvFormat::kQ4_0, 128, true>("decode_segments/fp16/kv=q4_0/hd128/r8/large/sm90a"));
  table.push_back(
      combine_kernel<SegmentsDecodeParams>("decode_segments_combine/sm90a", KernelTag::kDecodeSegmentsCombine));
}

}  // namespace flashport::machine
