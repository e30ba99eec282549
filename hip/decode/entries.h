// The table entries of HIP decode kernels.
#pragma once

#include "hip/runtime/kernel_entry.h"
#include FLASHPORT_DECODE_TUNING_HEADER

namespace flashport::hip_runtime {

constexpr KernelEntry decode_entry(const char* key, const KernelSymbol* symbol, MathType math, KvFormat k_format,
                                   KvFormat v_format, int head_dim_qk, int head_dim_v, int rows) {
  using namespace FLASHPORT_TARGET;
  const DecodeShape shape{head_dim_qk, head_dim_v, rows, math, k_format, v_format};
  const DecodeTuning tuning = decode_tuning(shape);
  return {.key = key,
          .tag = KernelTag::kDecode,
          .threads = tuning.waves * kWaveSize,
          .handle = symbol,
          .shape = {.decode = {shape, tuning}}};
}

}  // namespace flashport::hip_runtime
