// Tensor maps: what TMA must know of a tensor. The host writes them into a launch's params.
#pragma once

#include <cstdint>

#include "common/device/core/tensor_map.h"

namespace flashport::cuda_runtime {

// A tensor of 16-bit elements with four axes, the fastest first, which has stride 1; and the rows (of the second axis)
// of a box. A box has 64 columns. Strides count bytes; that of an axis with one element does not matter.
struct BoxedTensor {
  void* data;
  std::int64_t extents[4];
  std::int64_t strides[3];
  int box_rows;
};

// Encodes the map, or sets `readable` to false where TMA cannot read the tensor: it wants addresses and strides that 16
// divides. Returns null, or an error text.
const char* encode_map(const BoxedTensor& tensor, TensorMap& map, bool& readable);

}  // namespace flashport::cuda_runtime
