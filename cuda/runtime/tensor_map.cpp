#include "cuda/runtime/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "common/host/backend_support.h"

namespace flashport::cuda_runtime {
namespace {

// The driver's function, which the runtime finds: nothing links the driver.
using Encode = decltype(&cuTensorMapEncodeTiled);
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t code =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return code == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

// False where TMA cannot read the tensor.
bool strides_of(const BoxedTensor& tensor, cuuint64_t (&strides)[3]) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t bytes = tensor.strides[axis];
    const bool is_single = tensor.extents[axis + 1] == 1;
    if (!is_single && (bytes <= 0 || bytes % 16 != 0 || bytes >= kMost)) return false;
    strides[axis] = static_cast<cuuint64_t>(is_single ? 16 : bytes);
  }
  return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0;
}

}  // namespace

const char* encode_map(const BoxedTensor& tensor, TensorMap& map, bool& readable) {
  static const Encode function = find_encode();
  cuuint64_t strides[3], extents[4];
  readable = function != nullptr && strides_of(tensor, strides);
  if (!readable) return nullptr;
  std::copy_n(tensor.extents, 4, extents);
  const bool of_bytes = tensor.box_bytes != 0;
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(of_bytes ? tensor.box_bytes : 64),
                             static_cast<cuuint32_t>(tensor.box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  static_assert(sizeof(CUtensorMap) == sizeof(TensorMap));
  const CUresult result = function(reinterpret_cast<CUtensorMap*>(&map),
                                   of_bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                                   tensor.data, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   of_bytes ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return nullptr;
  return keep_error("cuTensorMapEncodeTiled: code " + std::to_string(static_cast<int>(result)));
}

}  // namespace flashport::cuda_runtime
