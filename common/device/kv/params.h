// The layout of keys and values in memory, and the argument of append_kv. Strides of a cache count bytes.
#pragma once

#include "common/device/core/types.h"
#include "common/device/kv/format.h"

namespace flashport {

struct CacheParams {
  void* data;
  std::int64_t page_stride;   // bytes from page to page (from sequence to sequence when contiguous)
  std::int64_t token_stride;  // bytes from token to token inside a page
  std::int64_t head_stride;   // bytes from head to head
  std::int32_t row_bytes;     // bytes of one token's row of one head
  std::int32_t copy_unit;     // 16, 8, 4 or 2: the widest copy that base, strides and row_bytes allow
};

// The keys and values of every sequence: how many there are, and on which pages (paged_kv.h).
struct PagedCache {
  IndexArray seqlens;             // null data: lengths come from kv_indptr and kv_last_page_len
  std::int32_t max_len;           // lengths are clamped to [0, max_len]
  const std::int32_t* table;      // page (or slot) numbers; null: page = sequence
  std::int64_t table_stride;      // row stride of `table`
  IndexArray table_row;           // row of a request; null data: row = sequence
  const std::int32_t* kv_indptr;  // CSR: row b of `table` starts at kv_indptr[b]
  const std::int32_t* kv_last_page_len;
  std::int64_t page_size;
  std::int32_t page_shift;  // log2 of page_size, or -1
  CacheParams k, v;
};

// The new keys, or the new values, and their cache.
struct AppendSide {
  StridedRows rows;  // tokens of all sequences on one axis
  CacheParams cache;
  const float* scale;  // null: 1
  std::int32_t scale_stride;
  std::int32_t head_dim;
};

struct AppendParams {
  std::int64_t tokens;
  std::int32_t num_kv_heads;
  KvFormat kv;
  IndexArray slots;
  std::int64_t num_slots;  // a slot outside [0, num_slots) is skipped
  std::int64_t page_size;
  AppendSide k, v;
};

}  // namespace flashport
