// What the files of AttentionCall share.
#pragma once

#include "tests/ops/attention/call.h"

namespace flashport_test {

inline std::uint64_t seed_of(const AttentionCase& c) {
  return c.seed * 1000003 + static_cast<std::uint64_t>(c.dim_qk * 1000 + c.dim_v + c.q_heads);
}

inline Tensor int_tensor(const std::vector<std::int64_t>& values, reference::Type type = reference::Type::kI32) {
  Tensor tensor(type, {static_cast<std::int64_t>(values.size())});
  for (std::size_t i = 0; i < values.size(); ++i) {
    tensor.set({static_cast<std::int64_t>(i)}, static_cast<double>(values[i]));
  }
  return tensor;
}

// Scales beside rows of `dim` values on these axes.
inline Tensor scale_beside(Shape axes, Beside beside, std::int64_t dim) {
  constexpr std::int64_t kGroup = 8;
  axes.pop_back();
  if (beside == Beside::kGroup) axes.push_back(dim / kGroup);
  return {beside == Beside::kGroup ? reference::Type::kF16 : reference::Type::kF32, axes};
}

}  // namespace flashport_test
