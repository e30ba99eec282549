// One element of a tensor whose type is known at run time.
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

}  // namespace flashport::FLASHPORT_TARGET
