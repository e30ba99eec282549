#include "tests/device/decode/model_kernels.h"
#include "tests/device/decode/model_tables.h"

namespace flashport::machine {

void add_kernels_of_any_formats(std::vector<KernelEntry>& table) {
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kAny, 128, 8>("decode/fp16/kv=any/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kAny, 128, 16>("decode/fp16/kv=any/hd128/r16/sm90a"));
  table.push_back(decode_kernel<MathType::kBf16, KvFormat::kAny, 128, 8>("decode/bf16/kv=any/hd128/r8/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kAny, 256, 16>("decode/fp16/kv=any/hd256/r16/sm90a"));
  table.push_back(decode_kernel<MathType::kFp16, KvFormat::kAny, 512, 16>("decode/fp16/kv=any/hd512/r16/sm90a"));
}

}  // namespace flashport::machine
