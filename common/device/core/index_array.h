// One element of an array of integers whose width is known at run time.
#pragma once

#include "common/device/core/types.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

FLASHPORT_DEVICE std::int64_t index_at(const IndexArray& array, std::int64_t i) {
  return array.is_int64 ? static_cast<const std::int64_t*>(array.data)[i]
                        : static_cast<const std::int32_t*>(array.data)[i];
}

}  // namespace flashport::FLASHPORT_TARGET
