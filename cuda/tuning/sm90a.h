// Schedules of the decode kernels on Hopper (H100, H200), one row a class of shapes: shared memory is 227 KB and the
// register file 64 K a multiprocessor; about 40 KB of copies in flight hide the latency of device memory.
#pragma once

#include "common/device/config.h"

namespace flashport::sm90a {

constexpr DecodeTuning decode_tuning(const DecodeShape& shape) {
  const int leaf_bytes = 64 * (kv_row_bytes(shape.kv, shape.head_dim_qk) + kv_row_bytes(shape.kv, shape.head_dim_v));
  if (leaf_bytes > 96 * 1024) return {8, 1, 1};  // a second leaf would not fit
  if (shape.rows == 64) return {shape.head_dim_v >= 256 ? 16 : 8, 2, 1};
  if (shape.head_dim_v >= 256) return {8, 2, 1};
  if (leaf_bytes > 40 * 1024) return {4, 2, 2};
  return {4, leaf_bytes > 20 * 1024 ? 2 : 3, 3};
}

}  // namespace flashport::sm90a
