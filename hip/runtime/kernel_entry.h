// The host's side of HIP kernels: their table entries. Compiled once per target by the host compiler, which must agree
// with the device's on block sizes; so those come from the target's tuning headers, which are plain C++. Each operation
// that has a table of instances has its entries in hip/<operation>/entries.h.
#pragma once

#include "common/host/kernel_entry.h"
#include "hip/runtime/code_object.h"
#include FLASHPORT_TUNING_HEADER

namespace flashport::hip_runtime {

// Whether it is one of the kernels of hip/kv/kernels.h.
constexpr bool writes_caches(KernelTag tag) {
  return tag == KernelTag::kAppendKv || tag == KernelTag::kAppendAny || tag == KernelTag::kAppendRotary ||
         tag == KernelTag::kQuantizeKv || tag == KernelTag::kDequantizeKv;
}

// The entry of a kernel without a template shape.
constexpr KernelEntry plain_entry(const char* key, KernelTag tag, const KernelSymbol* symbol) {
  using namespace FLASHPORT_TARGET;
  return {.key = key, .tag = tag, .threads = writes_caches(tag) ? kAppendThreads : kMergeThreads, .handle = symbol};
}
constexpr KernelEntry decode_stage2_entry(const char* key, const KernelSymbol* symbol) {
  return plain_entry(key, KernelTag::kDecodeStage2, symbol);
}
constexpr KernelEntry merge_states_entry(const char* key, const KernelSymbol* symbol) {
  return plain_entry(key, KernelTag::kMergeStates, symbol);
}
constexpr KernelEntry append_kv_entry(const char* key, const KernelSymbol* symbol) {
  return plain_entry(key, KernelTag::kAppendKv, symbol);
}
constexpr KernelEntry append_any_entry(const char* key, const KernelSymbol* symbol) {
  return plain_entry(key, KernelTag::kAppendAny, symbol);
}
constexpr KernelEntry append_rotary_entry(const char* key, const KernelSymbol* symbol) {
  return plain_entry(key, KernelTag::kAppendRotary, symbol);
}
constexpr KernelEntry quantize_kv_entry(const char* key, const KernelSymbol* symbol) {
  return plain_entry(key, KernelTag::kQuantizeKv, symbol);
}
constexpr KernelEntry dequantize_kv_entry(const char* key, const KernelSymbol* symbol) {
  return plain_entry(key, KernelTag::kDequantizeKv, symbol);
}
constexpr KernelEntry read_bandwidth_entry(const char* key, const KernelSymbol* symbol) {
  return plain_entry(key, KernelTag::kReadBandwidth, symbol);
}

}  // namespace flashport::hip_runtime
