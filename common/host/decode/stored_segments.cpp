#include "common/host/decode/stored_segments.h"

#include <algorithm>
#include <span>

#include "common/device/decode/chunks.h"
#include "common/host/kv/cache_layout.h"

namespace flashport {
namespace {

constexpr int kUnit = 16;

std::span<const CacheSegment> segments_of(const MixedProblem& mixed) {
  return {mixed.segments, static_cast<std::size_t>(mixed.segment_count)};
}

bool is_wide(const CacheSegment& s) { return kv_format_trait(s.k_format).block_values == 1; }

// Also a stride that only a batch of more sequences would use counts, so that each of them alone is read as in a batch.
bool has_rows_as_stored(const CacheParams& cache, KvFormat format, int dim) {
  const int bytes = kv_row_bytes(format, dim), unit = widest_unit(bytes);
  return cache.row_bytes == bytes && cache.copy_unit >= unit && cache.page_stride % unit == 0;
}

}  // namespace

bool may_be_read_as_stored(const DecodeProblem& problem) {
  const DecodeParams& p = problem.params;
  if (problem.mixed == nullptr || p.max_q_len != 1 || p.cu_seqlens_q != nullptr) return false;
  if (p.window_left >= 0 || p.alibi_slopes != nullptr || p.tree_mask != nullptr) return false;
  if (room_in_leaves(*problem.mixed, p.cache.max_len) > kMaxSequence) return false;
  return std::ranges::all_of(segments_of(*problem.mixed), [](const CacheSegment& s) {
    return s.k_format == s.v_format && s.k_scale.data == nullptr && s.v_scale.data == nullptr;
  });
}

bool lies_as_stored_segments(const DecodeProblem& problem) {
  const DecodeParams& p = problem.params;
  // Words of two values of a query are loaded.
  constexpr std::uint64_t kWord = 4, kValueBytes = 2;
  const auto steps = static_cast<std::uint64_t>(p.q.stride_seq | p.q.stride_token | p.q.stride_head) * kValueBytes;
  if (p.q.stride_dim != 1 || (reinterpret_cast<std::uintptr_t>(p.q.data) | steps) % kWord != 0) return false;
  return std::ranges::all_of(segments_of(*problem.mixed), [&](const CacheSegment& s) {
    const PagedCache& c = s.cache;
    return c.kv_indptr == nullptr && (c.table == nullptr || c.page_shift >= 0) &&
           has_rows_as_stored(c.k, s.k_format, p.head_dim_qk) && has_rows_as_stored(c.v, s.v_format, p.head_dim_v);
  });
}

bool has_heads_side_by_side(const MixedProblem& mixed, int num_kv_heads, int count) {
  const auto has = [](const CacheParams& cache) {
    return has_heads_side_by_side(cache, reinterpret_cast<std::uintptr_t>(cache.data), cache.row_bytes, kUnit);
  };
  return num_kv_heads % count == 0 && std::ranges::all_of(segments_of(mixed), [&](const CacheSegment& s) {
           return has(s.cache.k) && has(s.cache.v);
         });
}

void place_segments(MixedProblem& mixed, std::uintptr_t address) {
  for (std::int32_t i = 0; i < mixed.segment_count; ++i) {
    PagedCache& cache = mixed.segments[i].cache;
    cache.k.data = cache.v.data = reinterpret_cast<void*>(address);
  }
}

std::int64_t room_in_leaves(const MixedProblem& mixed, std::int64_t max_len) {
  std::int64_t leaves = 0;
  for (const CacheSegment& s : segments_of(mixed)) {
    leaves += segment_leaves(std::min<std::int64_t>(s.cache.max_len, max_len), is_wide(s));
  }
  return leaves * kLeafKeys;
}

}  // namespace flashport
