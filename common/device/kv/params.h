// The layout of keys and values in memory, and the arguments of the kernels that append to it. Strides of a cache count
// bytes.
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

// Whether the rows of a token's heads, of `head_bytes` each, follow each other and begin at addresses that `unit`
// divides. `address`: of `cache.data`.
[[nodiscard]] constexpr bool has_heads_side_by_side(const CacheParams& cache, std::uintptr_t address, int head_bytes,
                                                    int unit) {
  const std::uint64_t bits = address | static_cast<std::uint64_t>(cache.page_stride | cache.token_stride);
  return bits % static_cast<unsigned>(unit) == 0 && cache.row_bytes == head_bytes && cache.head_stride == head_bytes;
}

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

// Factors of the rows of a cache, on the axes of its rows: stored * factor is the value. Axes that share a factor have
// stride 0; strides count elements.
struct KeyScales {
  void* data;   // null: 1
  DType dtype;  // fp32 or fp16
  std::int64_t stride_page, stride_token, stride_head, stride_group;
  std::int32_t dims_per_scale;  // 0: a row has one factor; else every so many of its values, a group, have one
};

// Keys and values that follow each other in every sequence, in one format and layout.
struct CacheSegment {
  PagedCache cache;  // seqlens: keys of the segment in each sequence
  KvFormat k_format, v_format;
  KeyScales k_scale, v_scale;
};

// The new keys, or the new values, and their cache.
struct AppendSide {
  StridedRows rows;  // tokens of all sequences on one axis
  CacheParams cache;
  const float* scale;  // null: 1
  std::int32_t scale_stride;
  std::int32_t head_dim;
  KvFormat format;
  std::int32_t unit_bytes;  // of 32 values as stored
  KeyScales row_scales;     // null data: none; else written, and stored = value / what is written
};

// Factors of stored queries, keys or values, one for each sequence and kv head. Broadcast axes have stride 0.
struct HeadScales {
  const float* data;  // null: 1
  std::int64_t stride_seq, stride_head;
};

struct AppendParams {
  std::int64_t tokens;
  std::int32_t num_kv_heads;
  IndexArray slots;
  std::int64_t num_slots;  // a slot outside [0, num_slots) is skipped
  std::int64_t page_size;
  AppendSide k, v;
};

// Rows of numbers and the same rows as stored: one of the two is read, the other written, and so are scales that lie
// beside what is stored. Rows lie on up to three axes.
struct QuantizeParams {
  StridedRows values, stored;  // strides of `stored` count bytes
  KeyScales scales;   // stride_page, stride_token, stride_head: of the three axes; null data: formats of blocks
  std::int64_t rows;  // of all axes
  std::int64_t tokens, heads;  // extents of the inner two
  std::int32_t head_dim;
  KvFormat format;
  std::int32_t unit_bytes;  // of 32 values as stored
};

// Rotary position embedding: the angle of pair i of a row at position t has the cosine cos[t][i] and the sine
// sin[t][i].
struct RotaryParams {
  const void *cos, *sin;  // [positions][half]; null: nothing is turned
  DType dtype;
  std::int64_t cos_stride, sin_stride;  // from position to position
  std::int32_t positions;               // rows at later ones are not turned
  std::int32_t half;                    // pairs of a row, a multiple of 8; dims from 2 * half on are not turned
  std::int32_t is_interleaved;          // 1: pair i is dims 2i and 2i + 1; 0: i and i + half
  std::int32_t queries_advance;         // 1: query i is i after the sequence's first new key; 0: all are beside it
};

// The queries, the new keys or the new values: where their rows come from and go to.
struct AppendRotarySide {
  StridedRows rows;   // where they are packed, stride_seq is 0
  CacheParams cache;  // the queries go to pages of one row
  KvFormat format;
  std::int32_t unit_bytes;  // of 32 values as stored
  HeadScales scale;         // stored = value / scale
  std::int32_t heads, head_dim;
  std::int32_t is_turned;  // 1: by rotary position embedding
};

// The argument of append_rotary: new keys and values of sequences, and the queries that come with them.
struct AppendRotaryParams {
  std::int32_t batch;
  std::int32_t q_len, new_len;           // rows that every sequence has, where they are not packed
  std::int64_t total_q, total_new;       // rows of all sequences
  const std::int32_t* cu_seqlens_q;      // null: not packed
  const std::int32_t* cu_seqlens_k_new;  // null: not packed
  const std::int32_t* seqused_q;         // null: all
  PagedCache cache;                      // seqlens: keys that were there before
  std::int64_t pages;                    // that the cache has
  RotaryParams rotary;
  AppendRotarySide sides[3];  // queries, which are moved where they are turned; new keys; new values
  std::int32_t* seqlens_out;  // [batch], keys that are there afterwards
};

}  // namespace flashport
