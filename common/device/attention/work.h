// A work tile: some queries of one sequence and head, the unit that a block computes; and the keys that it sees.
#pragma once

#include "common/device/attention/params.h"
#include "common/device/kv/paged_kv.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

// The rows of a sequence in the tensors: `count` rows from `begin` on.
struct Tokens {
  std::int64_t begin;
  int count;
};

FLASHPORT_DEVICE Tokens packed_tokens(const std::int32_t* cu_seqlens, std::int64_t total, int most, int seq) {
  const std::int64_t begin = minimum(maximum(std::int64_t{cu_seqlens[seq]}, std::int64_t{0}), total);
  const std::int64_t end = minimum(maximum(std::int64_t{cu_seqlens[seq + 1]}, begin), total);
  return {begin, static_cast<int>(minimum(end - begin, std::int64_t{most}))};
}

FLASHPORT_DEVICE Tokens query_tokens(const AttentionParams& p, int seq) {
  Tokens tokens = {0, p.q_len};
  if (p.cu_seqlens_q != nullptr) tokens = packed_tokens(p.cu_seqlens_q, p.total_q, p.q_len, seq);
  if (p.seqused_q != nullptr) tokens.count = maximum(minimum(p.seqused_q[seq], tokens.count), 0);
  return tokens;
}

FLASHPORT_DEVICE Tokens key_tokens(const AttentionParams& p, int seq) {
  Tokens tokens = {0, p.kv_len};
  if (p.cu_seqlens_k != nullptr) tokens = packed_tokens(p.cu_seqlens_k, p.total_k, p.kv_len, seq);
  tokens.count = minimum(tokens.count, kv::sequence_length(p.cache, seq));
  if (p.leftpad_k != nullptr) {
    const int pad = minimum(maximum(p.leftpad_k[seq], 0), tokens.count);
    tokens = {tokens.begin + pad, tokens.count - pad};
  }
  return tokens;
}

struct WorkTile {
  int seq, head;
  int first_row;  // query of the sequence
  int q_len, kv_len;
  std::int64_t q_begin, k_begin;  // the sequence's first query and key on the token axes
};

FLASHPORT_DEVICE float head_scale(const AttentionParams& p, const HeadScales& scales, const WorkTile& work) {
  if (scales.data == nullptr) return 1.0f;
  return scales.data[work.seq * scales.stride_seq + work.head / p.group_size * scales.stride_head];
}

// The keys [low, high) that a query sees by its position.
struct KeySpan {
  int low, high;
};
FLASHPORT_DEVICE KeySpan visible_keys(const AttentionParams& p, const WorkTile& work, int row) {
  const int position = row + work.kv_len - work.q_len;
  KeySpan span = {0, work.kv_len};
  if (p.window_left >= 0) span.low = maximum(position - p.window_left, 0);
  if (p.window_right >= 0) span.high = minimum(maximum(position + 1 + p.window_right, 0), work.kv_len);
  return span;
}

// The key tiles [begin, end) that some of a work tile's `rows` queries see, counted from key 0: so the sums of a query
// have one order, whatever work tile it is in. All queries see all keys of the tiles [plain_begin, plain_end).
struct KeyTiles {
  int begin, plain_begin, plain_end, end;
};
template <int kKeys>
FLASHPORT_DEVICE KeyTiles key_tiles(const AttentionParams& p, const WorkTile& work, int rows) {
  const KeySpan first = visible_keys(p, work, work.first_row);
  const KeySpan last = visible_keys(p, work, minimum(work.first_row + rows, work.q_len) - 1);
  KeyTiles tiles;
  tiles.begin = first.low / kKeys;
  tiles.end = last.high <= first.low ? tiles.begin : (last.high + kKeys - 1) / kKeys;
  tiles.plain_begin = minimum((last.low + kKeys - 1) / kKeys, tiles.end);
  tiles.plain_end = maximum(minimum(first.high, work.kv_len) / kKeys, tiles.plain_begin);
  tiles.plain_end = minimum(tiles.plain_end, tiles.end);
  return tiles;
}

}  // namespace flashport::FLASHPORT_TARGET::attention
