// Where the keys and values of a sequence live. Every layout (contiguous, block table, token table, CSR; NHD or HND)
// is a list of pages and three byte strides, so the address of a token is
//   cache + page(token) * page_stride + (token % page_size) * token_stride + head * head_stride.
#pragma once

#include "common/device/core/index_array.h"
#include "common/device/kv/params.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::kv {

struct PlainLoad {
  template <class T>
  FLASHPORT_DEVICE T operator()(const T* at) const {
    return *at;
  }
};

// kPlain, here and below: lengths have 32 bits, pages hold a power of two of tokens, and there is no CSR.
//
// Keys of sequence `seq`, never outside [0, max_len] nor past the pages that CSR gives it. load(p): what p points to.
template <bool kPlain = false, bool kMayBeCsr = true, class Load = PlainLoad>
FLASHPORT_DEVICE int sequence_length(const PagedCache& p, int seq, const Load& load = {}) {
  const auto stored = [&] { return maximum(load(static_cast<const std::int32_t*>(p.seqlens.data) + seq), 0); };
  if constexpr (kPlain) return minimum(stored(), p.max_len);
  const auto within = [](std::int64_t length, int most) {
    return length < most ? static_cast<int>(maximum(length, std::int64_t{0})) : most;
  };
  int most = p.max_len;
  if (kMayBeCsr && p.kv_indptr != nullptr) {
    const std::int64_t pages = load(p.kv_indptr + seq + 1) - load(p.kv_indptr + seq);
    if (p.seqlens.data == nullptr) return within((pages - 1) * p.page_size + load(p.kv_last_page_len + seq), most);
    most = within(pages * p.page_size, most);
  }
  if (p.seqlens.data == nullptr) return most;
  if (p.seqlens.is_int64) return within(load(static_cast<const std::int64_t*>(p.seqlens.data) + seq), most);
  return minimum(stored(), most);
}

// The row of the page table that belongs to `seq`; null when pages are the sequences themselves.
template <bool kPlain = false>
FLASHPORT_DEVICE const std::int32_t* page_list(const PagedCache& p, int seq) {
  if (p.table == nullptr) return nullptr;
  if (!kPlain && p.kv_indptr != nullptr) return p.table + p.kv_indptr[seq];
  const std::int64_t row = p.table_row.data != nullptr ? index_at(p.table_row, seq) : seq;
  return p.table + row * p.table_stride;
}

// A token's page and its offset in that page. The load of the page number is slow, so pipelines look it up early and
// compute the address late.
struct TokenCoord {
  int page;
  int offset;  // token % page_size; -1: no such token
};

struct PageCoord {
  unsigned page;  // index in the sequence's list of pages
  int offset;
};
template <bool kPlain = false>
FLASHPORT_DEVICE PageCoord page_coord(const PagedCache& p, const std::int32_t* pages, int token) {
  if (pages == nullptr) return {0, token};
  const unsigned page_size = static_cast<unsigned>(p.page_size);
  const unsigned page = kPlain || p.page_shift >= 0 ? static_cast<unsigned>(token) >> p.page_shift
                                                    : static_cast<unsigned>(token) / page_size;
  return {page, static_cast<int>(static_cast<unsigned>(token) - page * page_size)};
}

FLASHPORT_DEVICE TokenCoord token_coord(const PagedCache& p, const std::int32_t* pages, int seq, int token,
                                        bool valid) {
  if (!valid) return {0, -1};
  const PageCoord at = page_coord(p, pages, token);
  return {pages == nullptr ? seq : load_global(pages + at.page), at.offset};
}

FLASHPORT_DEVICE float head_scale(const float* scales, int stride, int kv_head) {
  return scales == nullptr ? 1.0f : scales[kv_head * stride];
}

// Byte offset of a token's row of one head; -1 for no token.
FLASHPORT_DEVICE std::int64_t row_offset(const CacheParams& cache, TokenCoord token, int head) {
  if (token.offset < 0) return -1;
  return token.page * cache.page_stride + token.offset * cache.token_stride + head * cache.head_stride;
}

// The element of a row's factor, or of the factor of its first group.
FLASHPORT_DEVICE std::int64_t scale_element(const KeyScales& scales, TokenCoord at, int head) {
  return at.page * scales.stride_page + at.offset * scales.stride_token + head * scales.stride_head;
}

}  // namespace flashport::FLASHPORT_TARGET::kv
