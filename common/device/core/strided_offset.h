// Where a row of a strided tensor begins.
#pragma once

#include "common/device/core/types.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

FLASHPORT_DEVICE std::int64_t strided_offset(const StridedRows& rows, std::int64_t seq, std::int64_t token,
                                             std::int64_t head) {
  return seq * rows.stride_seq + token * rows.stride_token + head * rows.stride_head;
}

}  // namespace flashport::FLASHPORT_TARGET
