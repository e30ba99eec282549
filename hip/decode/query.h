// Query values on the way to shared memory.
#pragma once

#include "common/device/decode/query.h"
#include "hip/arch/words.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Eight values of row `row` of the query tile from `dim` on, as the math type; 0 where there is no such row or dim.
// pack(x, y): a word of two.
template <DecodeConfig kCfg, class Pack>
FLASHPORT_DEVICE Words4 load_query(const DecodeParams& p, const Segment& s, int live_rows, int row, int dim,
                                   const Pack& pack) {
  constexpr MathType kMath = kCfg.shape.math;
  const QueryRow at = query_row(p, s, kCfg.shape.rows, row);
  if (row >= live_rows || at.token >= s.q_len || dim >= p.head_dim_qk) return Words4{};
  const std::int64_t offset = query_offset(p, s, p.q, at) + dim * p.q.stride_dim;
  const bool same = p.q.dtype == (kMath == MathType::kBf16 ? DType::kBFloat16 : DType::kFloat16);
  if (same && p.q.stride_dim == 1) return load_words<4>((GlobalBytes)(p.q.data) + offset * 2);
  unsigned words[4];
  convert_query(words, p, offset, pack);
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace flashport::FLASHPORT_TARGET::decode
