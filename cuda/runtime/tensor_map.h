// Tensor maps: what TMA must know of a tensor. The host writes them into a launch's params.
#pragma once

#include <cstdint>

#include "common/device/core/tensor_map.h"

namespace flashport::cuda_runtime {

// A tensor with four axes, the fastest first, which has stride 1; and the rows (of the second axis) of a box. Elements
// have 16 bits, and a box has 64 columns of them, whose vectors are swizzled. With `box_bytes` elements are bytes, and
// a box has as many columns as they lie in memory, a multiple of 16. Strides count bytes; that of an axis with one
// element does not matter.
struct BoxedTensor {
  void* data;
  std::int64_t extents[4];
  std::int64_t strides[3];
  int box_rows;
  int box_bytes = 0;
};

// Encodes the map, or sets `readable` to false where TMA cannot read the tensor: it wants addresses and strides that 16
// divides. Returns null, or an error text.
const char* encode_map(const BoxedTensor& tensor, TensorMap& map, bool& readable);

}  // namespace flashport::cuda_runtime
