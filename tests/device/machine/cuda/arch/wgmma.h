// In place of CUDA's own, for the warps that bring operands: where they lie.
#pragma once

#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kPanelColumns = 64;
inline int swizzled_offset(int row, int vector) { return row * kPanelColumns + (vector ^ (row & 7)) * 8; }
inline void fence_async_proxy() {}

}  // namespace flashport::FLASHPORT_TARGET
