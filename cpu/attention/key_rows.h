// The rows of K and V that a key tile has.
#pragma once

#include "common/device/attention/work.h"

namespace flashport::FLASHPORT_TARGET::attention {

struct KeyRows {
  const char* first;
  std::int64_t pitch;  // in bytes
  int count;           // that exist

  const char* row(int key) const { return first + key * pitch; }
};

FLASHPORT_DEVICE KeyRows key_rows(const AttentionParams& p, const StridedRows& rows, const WorkTile& work, int tile,
                                  int keys) {
  const int bytes = rows.dtype == DType::kFloat32 ? 4 : 2;
  const std::int64_t first_key = std::int64_t{tile} * keys;
  const std::int64_t at = work.seq * rows.stride_seq + (work.k_begin + first_key) * rows.stride_token +
                          work.head / p.group_size * rows.stride_head;
  return {static_cast<const char*>(rows.data) + at * bytes, rows.stride_token * bytes,
          static_cast<int>(minimum(std::int64_t{keys}, work.kv_len - first_key))};
}

// The first byte of the queries of a work tile.
FLASHPORT_DEVICE const char* query_rows(const AttentionParams& p, const WorkTile& work, int bytes) {
  const std::int64_t at =
      work.seq * p.q.stride_seq + (work.q_begin + work.first_row) * p.q.stride_token + work.head * p.q.stride_head;
  return static_cast<const char*>(p.q.data) + at * bytes;
}

}  // namespace flashport::FLASHPORT_TARGET::attention
