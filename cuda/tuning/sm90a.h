// Schedules of the decode kernels on Hopper (H100, H200), one row a class of shapes: shared memory is 227 KB and the
// register file 64 K a multiprocessor; about 40 KB of copies in flight hide the latency of device memory. Rows marked
// with times were chosen among the variants named there, H200, 64 x 8k unless stated (docs/tuning.md).
#pragma once

#include "common/device/config.h"

namespace flashport::sm90a {

constexpr DecodeTuning decode_tuning(const DecodeShape& shape) {
  const int leaf_bytes = 64 * (kv_row_bytes(shape.kv, shape.head_dim_qk) + kv_row_bytes(shape.kv, shape.head_dim_v));
  if (leaf_bytes > 96 * 1024) return {8, 1, 1};  // a second leaf would not fit
  if (shape.rows == 64) return {shape.head_dim_v >= 256 ? 16 : 8, 2, 1};
  if (shape.head_dim_v >= 256) return {shape.rows == 8 ? 4 : 8, 2, 1};  // 32 x 4k: {8,2,1} 55 us, {4,2,1} 60
  if (shape.kv == KvFormat::kFp8E4M3 || shape.kv == KvFormat::kQ8_0)
    return {4, 3, 3};                             // fp8: {4,3,3} 352 us, {4,4,3} 394
  if (shape.head_dim_qk <= 64) return {4, 4, 3};  // 16 x 4k: {4,4,3} 59 us, {4,3,4} 67
  return {4, shape.rows == 8 ? 3 : 2, 2};         // {4,3,2} 525 us, {4,2,3} 525; 1 x 128k 144, 148
}

}  // namespace flashport::sm90a
