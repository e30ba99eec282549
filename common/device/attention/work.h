// A work tile: some queries of one sequence and head, and a piece of its keys, the unit that a block computes; and the
// keys that it sees.
#pragma once

#include "common/device/attention/pieces.h"
#include "common/device/kv/paged_kv.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

// The rows of a sequence in the tensors: `count` rows from `begin` on.
struct Tokens {
  int begin;
  int count;
};

FLASHPORT_DEVICE Tokens packed_tokens(const std::int32_t* cu_seqlens, std::int64_t total, int most, int seq) {
  const int last = static_cast<int>(minimum(total, std::int64_t{0x7fffffff}));  // offsets have 32 bits
  const int begin = minimum(maximum(cu_seqlens[seq], 0), last);
  const int end = minimum(maximum(cu_seqlens[seq + 1], begin), last);
  return {begin, minimum(end - begin, most)};
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
  int q_begin, k_begin;      // the sequence's first query and key on the token axes
  int first_tile, end_tile;  // the piece's key tiles
  // The sequence's first row of the output. For a piece, one of several: -1 - its first row of the partial results.
  int out_begin;
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

// How the keys of a sequence are cut, and the first key tile of the first piece.
struct SequencePieces {
  Pieces cut;
  int first_tile;
};
FLASHPORT_DEVICE SequencePieces sequence_pieces(const AttentionParams& p, const PieceRule& rule, int q_len,
                                                int kv_len) {
  if (p.pieces.most <= 1 || q_len == 0) return {{1, 0x7fffffff}, 0};
  WorkTile work = {};
  work.q_len = q_len;
  work.kv_len = kv_len;
  const int first_key = visible_keys(p, work, 0).low;
  return {cut_keys(rule, q_len, first_key, kv_len), first_key / rule.keys};
}

// The first row of a sequence's partial results, which lie piece by piece.
FLASHPORT_DEVICE std::int64_t partial_row(const AttentionParams& p, int seq, const Tokens& queries,
                                          const Tokens& keys) {
  return seq * p.pieces.rows_of_sequence + std::int64_t{queries.begin} * p.pieces.rows_of_query +
         keys.begin / 4 * p.pieces.rows_of_four_keys;
}

// The key tiles [begin, end) of its piece that some of a work tile's `rows` queries see, counted from key 0: so the
// sums of a query have one order, whatever work tile it is in. All queries see all keys of the tiles [plain_begin,
// plain_end).
struct KeyTiles {
  int begin, plain_begin, plain_end, end;
};
template <int kKeys>
FLASHPORT_DEVICE KeyTiles key_tiles(const AttentionParams& p, const WorkTile& work, int rows) {
  const KeySpan first = visible_keys(p, work, work.first_row);
  const KeySpan last = visible_keys(p, work, minimum(work.first_row + rows, work.q_len) - 1);
  KeyTiles tiles;
  tiles.begin = maximum(first.low / kKeys, work.first_tile);
  tiles.end = last.high <= first.low ? tiles.begin : minimum((last.high + kKeys - 1) / kKeys, work.end_tile);
  tiles.end = maximum(tiles.end, tiles.begin);
  tiles.plain_begin = minimum(maximum((last.low + kKeys - 1) / kKeys, tiles.begin), tiles.end);
  tiles.plain_end = maximum(minimum(first.high, work.kv_len) / kKeys, tiles.plain_begin);
  tiles.plain_end = minimum(tiles.plain_end, tiles.end);
  return tiles;
}

}  // namespace flashport::FLASHPORT_TARGET::attention
