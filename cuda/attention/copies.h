// What a producer warp of attention needs to know of copies: which there are for a work tile, and how one is made of
// boxes.
#pragma once

#include "cuda/attention/memory.h"

namespace flashport::FLASHPORT_TARGET::attention {

// What there is to copy for a work tile. Copies are numbered: the first keys, whose stage is free sooner than that of
// the queries; the queries; then the keys of each tile before the values of the tile before it.
struct Copies {
  KeyTiles range;
  int tiles;
  bool last_by_rows;  // the last values, where all others come by boxes
};
template <AttentionConfig kCfg>
FLASHPORT_DEVICE Copies copies_of(const AttentionParams& p, const WorkTile& work) {
  constexpr int kKeys = kCfg.tuning.keys;
  Copies copies;
  copies.range = key_tiles<kKeys>(p, work, kCfg.tuning.rows);
  copies.tiles = maximum(copies.range.end - copies.range.begin, 0);
  const std::int64_t extent = p.cu_seqlens_k != nullptr ? p.total_k : p.kv_len;
  const bool others_follow = p.cache.table != nullptr || work.k_begin + work.kv_len < extent;
  copies.last_by_rows = copies.range.end * kKeys > work.kv_len && others_follow;
  return copies;
}

template <int kCount>
FLASHPORT_DEVICE void await_empty(Barriers (&barriers)[kCount], int copy) {
  mbarrier_wait(&barriers[copy % kCount].empty, static_cast<unsigned>(copy / kCount) & 1 ^ 1);
}

// Brings a tile as one box for each panel, as copy number `copy` of its kind.
template <int kPanels, int kTileRows, int kCount>
FLASHPORT_DEVICE void bring_box(RowPanels<kPanels, kTileRows> (&stages)[kCount], Barriers (&barriers)[kCount], int copy,
                                const TensorMap& map, int first, int head, int seq) {
  const int stage = copy % kCount;
  await_empty(barriers, copy);
  mbarrier_expect(&barriers[stage].full, RowPanels<kPanels, kTileRows>::kBytes);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    copy_box(stages[stage].x[panel], &map, panel * kPanelColumns, first, head, seq, &barriers[stage].full);
  }
}
template <AttentionConfig kCfg>
FLASHPORT_DEVICE void bring_query_box(const AttentionParams& p, AttentionMemory<kCfg>& memory, const WorkTile& work,
                                      int copy) {
  bring_box(memory.queries, memory.query_barriers, copy, p.q_map, work.q_begin + work.first_row, work.head,
            p.cu_seqlens_q == nullptr ? work.seq : 0);
}
// Values number `copy` come by rows, into a stage that is empty.
template <AttentionConfig kCfg>
FLASHPORT_DEVICE void hand_over_values(AttentionMemory<kCfg>& memory, int copy, unsigned& phase) {
  await_empty(memory.value_barriers, copy);
  mbarrier_wait(&memory.row_barriers.empty, phase ^ 1);
  phase ^= 1;
  mbarrier_arrive(&memory.row_barriers.full);
}

}  // namespace flashport::FLASHPORT_TARGET::attention
