// Schedules of the kernels of the gated delta rule on Hopper (H100, H200).
#pragma once

#include "common/device/gated_delta/config.h"

namespace flashport::sm90a {

// States that an update fetches while the kernel before it ends: 8 x 4 KB a multiprocessor. 64 sequences 66.2 us
// for 67.0; twice as many are no faster.
inline constexpr int kPrefetchedBytes = 132 * 8 * 4096;

// States [V, K]: a warp a block, with 8 loads of 16 bytes a lane. States [K, V]: a line of V, and 32 keys a warp. Gates
// of keys, and long keys, take registers of their own. One token of 256 sequences, 32 heads of [128, 128], in us; a
// copy in place takes 260 (fp32) and 131 (bf16):
//   [V, K] fp32 265, 16 columns 272, 4 columns 318; bf16 145, 8 columns 163. With gates of keys 270 and 194
//   [K, V] fp32 270, 32 columns 291; bf16 162, 32 columns 174. With gates of keys 292 and 163, of 12 warps 188
constexpr GatedDeltaTuning gated_delta_tuning(const GatedDeltaShape& shape) {
  const bool fp32 = !is_packed(shape);
  const bool gates = shape.gate != GateForm::kHead;
  const bool long_keys = shape.head_dim_k > 128;
  if (shape.key_major != 0) {
    const bool narrow = fp32 && (gates || long_keys);
    const int warps = narrow ? (long_keys ? 16 : 24) : (gates && long_keys ? 12 : 16);  // of a multiprocessor
    return {narrow ? 32 : 64, shape.head_dim_k / 32, warps * 32 / shape.head_dim_k};
  }
  if (shape.gate == GateForm::kAny) return {1024 / shape.head_dim_k, 1, long_keys ? 16 : 20};  // more would spill
  if (fp32) return {1024 / shape.head_dim_k, 1, gates ? (long_keys ? 16 : 24) : (long_keys ? 28 : 32)};
  return {2048 / shape.head_dim_k, 1, gates && shape.head_dim_k > 64 ? 12 : 16};
}

}  // namespace flashport::sm90a
