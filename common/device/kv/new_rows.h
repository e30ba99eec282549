// How many new keys and values a sequence has in a call that appends them, and how many its part of the cache can hold.
#pragma once

#include "common/device/kv/paged_kv.h"

namespace flashport::FLASHPORT_TARGET::kv {

// Keys that there is room for. kPlain: there is no CSR. load(p): what p points to.
template <bool kPlain = false, class Load = PlainLoad>
FLASHPORT_DEVICE int sequence_room(const PagedCache& p, int seq, const Load& load = {}) {
  if (kPlain || p.kv_indptr == nullptr) return p.max_len;
  const std::int64_t pages = load(p.kv_indptr + seq + 1) - load(p.kv_indptr + seq);
  return static_cast<int>(maximum(minimum(pages * p.page_size, std::int64_t{p.max_len}), std::int64_t{0}));
}

FLASHPORT_DEVICE int sequence_new_rows(const AppendRotaryParams& p, int seq) {
  if (p.cu_seqlens_k_new == nullptr) return p.new_len;
  const std::int64_t begin = p.cu_seqlens_k_new[seq], end = p.cu_seqlens_k_new[seq + 1];
  return static_cast<int>(maximum(minimum(end - begin, p.total_new), std::int64_t{0}));
}

}  // namespace flashport::FLASHPORT_TARGET::kv
