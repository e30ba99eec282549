// Tensor maps: what TMA must know of a tensor, written into a launch's params by the host.
#pragma once

#include "common/device/attention/params.h"

namespace flashport::cuda_runtime {

// Encodes the maps of q, k and v, in boxes of 64 columns and so many rows. Tensors that TMA cannot read leave
// has_maps 0. Returns null, or an error text.
const char* encode_maps(AttentionParams& params, int rows, int keys);

template <int kRows, int kKeys>
const char* encode_attention_maps(void* params) {
  return encode_maps(*static_cast<AttentionParams*>(params), kRows, kKeys);
}

}  // namespace flashport::cuda_runtime
