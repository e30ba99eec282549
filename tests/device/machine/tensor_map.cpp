// The tensor maps of copy_box() in cuda/arch/tma.h of this folder: which tensors TMA can read is as in
// cuda/runtime/tensor_map.cpp.
#include "cuda/runtime/tensor_map.h"

#include <deque>

namespace flashport::cuda_runtime {

const char* encode_map(const BoxedTensor& tensor, TensorMap& map, bool& readable) {
  static std::deque<BoxedTensor> kept;  // maps point to them
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  readable = reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0;
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t bytes = tensor.strides[axis];
    readable = readable && (tensor.extents[axis + 1] == 1 || (bytes > 0 && bytes % 16 == 0 && bytes < kMost));
  }
  if (!readable) return nullptr;
  map.words[0] = reinterpret_cast<std::uint64_t>(&kept.emplace_back(tensor));
  return nullptr;
}

}  // namespace flashport::cuda_runtime
