// The rows of K and V that a key tile has.
#pragma once

#include "common/device/attention/work.h"

namespace flashport::FLASHPORT_TARGET::attention {

struct KeyRows {
  const PagedCache& pages;
  const CacheParams& cache;
  const std::int32_t* table;  // of the sequence; null: a row follows `first` every token_stride
  const char* first;
  int seq, token, head;  // the first row's token of the sequence
  int count;             // that exist

  kv::TokenCoord coord(int key) const { return kv::token_coord(pages, table, seq, token + key, true); }
  const char* row(int key) const {
    if (table == nullptr) return first + key * cache.token_stride;
    return static_cast<const char*>(cache.data) + kv::row_offset(cache, coord(key), head);
  }
  // The element of the row's first factor.
  std::int64_t scale(const KeyScales& scales, int key) const { return kv::scale_element(scales, coord(key), head); }
};

FLASHPORT_DEVICE KeyRows key_rows(const AttentionParams& p, const CacheParams& cache, const WorkTile& work, int tile,
                                  int keys) {
  const int head = work.head / p.group_size;
  const std::int64_t token = work.k_begin + std::int64_t{tile} * keys;
  const std::int64_t at = work.seq * cache.page_stride + token * cache.token_stride + head * cache.head_stride;
  return {p.cache,
          cache,
          kv::page_list(p.cache, work.seq),
          static_cast<const char*>(cache.data) + at,
          work.seq,
          static_cast<int>(token),
          head,
          static_cast<int>(minimum(std::int64_t{keys}, work.kv_len - std::int64_t{tile} * keys))};
}

// The first byte of the queries of a work tile.
FLASHPORT_DEVICE const char* query_rows(const AttentionParams& p, const WorkTile& work, int bytes) {
  const std::int64_t at =
      work.seq * p.q.stride_seq + (work.q_begin + work.first_row) * p.q.stride_token + work.head * p.q.stride_head;
  return static_cast<const char*>(p.q.data) + at * bytes;
}

}  // namespace flashport::FLASHPORT_TARGET::attention
