// In place of CUDA's own. The first word of a tensor map is the address of its BoxedTensor (tensor_map.cpp). Bytes of a
// box, also those outside of the tensor, land at some time before the phase of the barrier that expects them ends.
#pragma once

#include "cuda/arch/mma.h"
#include "cuda/runtime/tensor_map.h"

namespace flashport::FLASHPORT_TARGET {

inline void mbarrier_expect(std::uint64_t* barrier, int bytes) {
  machine::expect_bytes(barrier, bytes);
  machine::arrive(barrier);
}
inline void prefetch_map(const void*) {}
inline void fence_barrier_init() {}

inline void copy_box(void* to, const void* map, int x, int y, int z, int w, std::uint64_t* barrier) {
  const auto& tensor =
      *reinterpret_cast<const cuda_runtime::BoxedTensor*>(static_cast<const TensorMap*>(map)->words[0]);
  const bool of_bytes = tensor.box_bytes != 0;
  const unsigned address = shared_address(to);
  if (address % 128 != 0 || (of_bytes && x % 16 != 0)) machine::fail("a box that is not aligned");
  const int size = of_bytes ? 1 : 2, row_bytes = of_bytes ? tensor.box_bytes : 128;
  const auto read = [=, &tensor](char* bytes) {
    for (int row = 0; row < tensor.box_rows; ++row) {
      for (int column = 0; column < row_bytes / size; ++column) {
        const std::int64_t at[] = {x + column, y + row, z, w};
        bool inside = true;
        for (int axis = 0; axis < 4; ++axis) inside = inside && at[axis] >= 0 && at[axis] < tensor.extents[axis];
        // An axis of one element has any stride.
        const std::int64_t offset =
            inside ? at[0] * size + at[1] * tensor.strides[0] + at[2] * tensor.strides[1] + at[3] * tensor.strides[2]
                   : 0;
        // The 128-byte swizzle exchanges vectors of 16 bytes by three bits of their address.
        unsigned place = static_cast<unsigned>(row * row_bytes + column * size);
        if (!of_bytes) place = ((address + place) ^ (address + place) / 128 % 8 * 16) - address;
        for (int byte = 0; byte < size; ++byte) {
          bytes[place + byte] = inside ? static_cast<const char*>(tensor.data)[offset + byte] : 0;
        }
      }
    }
  };
  machine::bring_box(machine::shared_pointer(address, tensor.box_rows * row_bytes), tensor.box_rows * row_bytes, read,
                     barrier);
}

}  // namespace flashport::FLASHPORT_TARGET
