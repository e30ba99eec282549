// One element of a tensor whose type is known at run time. An Element is what load_element has read: several of them
// are on their way together before the first is needed as a number.
#pragma once

#include "common/device/params.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

FLASHPORT_DEVICE float load_as_float(const void* data, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::kFloat16: return to_float(static_cast<const Half*>(data)[at]);
    case DType::kBFloat16: return to_float(static_cast<const BFloat16*>(data)[at]);
    default: return static_cast<const float*>(data)[at];
  }
}

// The bits of one, in the low half where it has 16.
struct Element {
  std::uint32_t bits;
};

FLASHPORT_DEVICE Element load_element(const void* data, DType dtype, std::int64_t at) {
  if (dtype == DType::kFloat32) return {static_cast<const std::uint32_t*>(data)[at]};
  return {static_cast<const std::uint16_t*>(data)[at]};
}

FLASHPORT_DEVICE float to_float(Element x, DType dtype) {
  const auto low = static_cast<std::uint16_t>(x.bits);
  switch (dtype) {
    case DType::kFloat16: return to_float(__builtin_bit_cast(Half, low));
    case DType::kBFloat16: return to_float(__builtin_bit_cast(BFloat16, low));
    default: return __builtin_bit_cast(float, x.bits);
  }
}

}  // namespace flashport::FLASHPORT_TARGET
