// In place of CUDA's own: boxes land at once. The first word of a tensor map is the address of its BoxedTensor.
#pragma once

#include <map>

#include "cuda/arch/mma.h"
#include "cuda/runtime/tensor_map.h"

namespace flashport::FLASHPORT_TARGET {

inline std::map<std::uint64_t*, int>& expected_bytes() {
  static std::map<std::uint64_t*, int> bytes;
  return bytes;
}
// The arrival counts when all bytes have landed.
inline void land_bytes(std::uint64_t* barrier, int bytes) {
  int& missing = expected_bytes()[barrier];
  missing -= bytes;
  if (missing < 0) machine::fail("more bytes than a barrier expects");
  if (missing == 0) machine::arrive(barrier);
}
inline void mbarrier_expect(std::uint64_t* barrier, int bytes) {
  int& missing = expected_bytes()[barrier];
  if (missing != 0) machine::fail("a barrier expects bytes twice");
  missing = bytes;
  if (bytes == 0) machine::arrive(barrier);
}
inline void copy_box(void* to, const void* map, int x, int y, int z, int w, std::uint64_t* barrier) {
  const auto& tensor =
      *reinterpret_cast<const cuda_runtime::BoxedTensor*>(static_cast<const TensorMap*>(map)->words[0]);
  if (shared_address(to) % 128 != 0 || x % 16 != 0) machine::fail("a box that is not aligned");
  char* byte = machine::shared_pointer(shared_address(to), tensor.box_rows * tensor.box_bytes);
  for (int row = 0; row < tensor.box_rows; ++row) {
    for (int column = 0; column < tensor.box_bytes; ++column) {
      const std::int64_t at[] = {x + column, y + row, z, w};
      bool inside = true;
      for (int axis = 0; axis < 4; ++axis) inside = inside && at[axis] >= 0 && at[axis] < tensor.extents[axis];
      const std::int64_t offset =
          at[0] + at[1] * tensor.strides[0] + at[2] * tensor.strides[1] + at[3] * tensor.strides[2];
      *byte++ = inside ? static_cast<const char*>(tensor.data)[offset] : 0;
    }
  }
  land_bytes(barrier, tensor.box_rows * tensor.box_bytes);
}
inline void fence_barrier_init() {}

}  // namespace flashport::FLASHPORT_TARGET
