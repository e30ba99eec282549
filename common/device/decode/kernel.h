// Flash decoding, the whole algorithm.
//
// For a query tile Q [rows, D] of one kv head (rows pack query token and head of the group) and its keys K [n, D] and
// values V [n, DV]:   o = softmax(logits(Q K^T)) V   [rows, DV],   lse = log sum exp   [rows].
// The main loop takes the keys of one leaf or two a turn (n = 64 or 128), and carries a running state (m, l, o):
//   S = Q K^T [rows, n];  P = exp2(S - rowmax S) [rows, n];  (m, l, o) combined with (rowmax S, rowsum P, P V)
// A chunk of leaves ends the state, and the states of chunks meet in the fixed order of chunks.h (chunk_tree.h).
//
// Stages of the loop: the copies of later leaves are in flight while a leaf is worked on; keys() and values() wait for
// the oldest. Where waves share P or the values, there is one barrier a turn between exponentiate() and accumulate():
// before it all waves have read the keys of this turn and the values of the one before, after it P and the values of
// all waves are there.
#pragma once

#include "common/device/decode/chunk_tree.h"
#include "common/device/decode/config.h"
#include "common/device/decode/mask.h"
#include "common/device/decode/output.h"
#include "common/device/decode/schedule.h"
#include FLASHPORT_DECODE_TILES_HEADER
#include FLASHPORT_DECODE_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::decode {

// The kernel of a row of cmake/decode_instances.txt, on the schedule that the target has for its shape.
constexpr DecodeConfig decode_config(MathType math, KvFormat k_format, KvFormat v_format, int head_dim_qk,
                                     int head_dim_v, int rows, bool appends = false, bool plain = false,
                                     bool large_cache = false, bool has_wide_segments = false) {
  DecodeShape shape{head_dim_qk, head_dim_v, rows, math, k_format, v_format, appends};
  shape.large_cache = large_cache;
  shape.has_wide_segments = has_wide_segments;
  const DecodeTuning tuning = decode_tuning(shape);  // also of the kernel for plain calls, which has the same bits
  shape.plain = plain;
  return {shape, tuning};
}

// What scores are to be multiplied by, beside their scale.
template <class Tiles>
constexpr float score_unit() {
  if constexpr (requires { Tiles::kScoreUnit; }) {
    return Tiles::kScoreUnit;
  } else {
    return 1.0f;
  }
}

template <class Shared>
FLASHPORT_DEVICE auto leaf_cursor(const Range& range, const Block& block, Shared& shared) {
  if constexpr (requires { shared.segments; }) {
    return LeafCursorAt<Segment&>(range, shared.segments[block.wave()]);
  } else {
    return LeafCursor(range);
  }
}

template <DecodeConfig kCfg>
FLASHPORT_DEVICE void decode(const DecodeParamsOf<kCfg>& p, const Range& range, const Block& block,
                             DecodeShared<kCfg>& shared) {
  using Tiles = DecodeTiles<kCfg>;
  auto now = leaf_cursor(range, block, shared);
  if (now.done()) return;
  LeafCursor ahead(range);
  Tiles tiles(p, block, shared);
  KvPipeline<kCfg> pipeline(p, block, shared, ahead);
  KeptState<Tiles, kOfGroup> group;
  KeptState<Tiles, kOfTile> tile;
  ChunkTree<Tiles, DecodeParamsOf<kCfg>> tree(p, block, shared.partials[tiles.slice()], group, tile);
  merge::SoftmaxState<Tiles> state;
  merge::clear(tiles, state);
  typename Tiles::Query query{};
  float scale = 0.0f;
  [[maybe_unused]] int first_new = 0;  // the position of the sequence's first new key

  for (; !now.done(); now.next(reread(p), Tiles::kTurnLeaves)) {
    const Segment& s = now.segment;
    if (now.at_segment_start()) {
      tiles.stage_query(reread(p), s);
      scale = score_scale(reread(p), s) * score_unit<Tiles>();
      tree.begin_segment(tiles, s, now.line);
    }
    auto&& keys = pipeline.keys();
    if constexpr (kCfg.shape.has_wide_segments) tiles.begin_turn(reread(p), s, pipeline.turn());
    if constexpr (kCfg.shape.appends) {
      if (now.at_segment_start()) first_new = new_keys(reread(p), s.seq).before;
      tiles.append_keys(reread(p), now, first_new, keys);
    }
    if (now.at_segment_start()) tiles.fetch_query(query);
    pipeline.refill_behind_keys(p, ahead);

    auto scores = tiles.mma_abt(query, keys);
    to_logits(tiles, p, s, now.key(), scale, scores);
    pipeline.refill_behind_scores(p, ahead);
    const auto probabilities = tiles.exponentiate(state, scores);
    pipeline.await_values(p, ahead);
    if constexpr (kCfg.shape.appends) tiles.append_values(reread(p), now, first_new, pipeline.values());
    tiles.accumulate(state, probabilities, pipeline.values());
    pipeline.refill_behind_values(p, ahead);

    tree.end_turn(tiles, now, state);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
