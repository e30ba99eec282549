// The order of work tiles, and where each lies. Blocks take tiles in this order, one after the other.
//
// Heads are cut into sections, whose keys and values the last cache level may hold together. In a section the last
// tiles of the longest sequences come first, which under a causal mask see the most keys, and the tiles that all
// sequences have come last: so blocks end together. The heads of a kv head are neighbours.
#pragma once

#include "common/device/attention/work.h"

namespace flashport::FLASHPORT_TARGET::attention {

template <int kRows>
class TileScheduler {
 public:
  // All lanes of a wave construct it and call its functions together.
  FLASHPORT_DEVICE TileScheduler(const AttentionParams& p, const Block& block)
      : p_(p), block_(block), levels_((p.q_len + kRows - 1) / kRows) {
    tiles_ = has_own_lengths() ? tiles_from(0) : levels_ * p.batch;
  }

  // Work tiles of all heads.
  FLASHPORT_DEVICE int count() const { return tiles_ * p_.num_q_heads; }

  // Work tile number `index` below count().
  FLASHPORT_DEVICE WorkTile tile(int index) const {
    const int section_heads = p_.section_heads * p_.group_size;
    const int section = index / (tiles_ * section_heads);
    const int first_head = section * section_heads;
    const int heads = minimum(section_heads, p_.num_q_heads - first_head);
    const int in_section = index - first_head * tiles_;
    const Position at = position(in_section / heads);
    const Tokens queries = query_tokens(p_, at.seq), keys = key_tokens(p_, at.seq);
    WorkTile work;
    work.seq = at.seq;
    work.head = first_head + in_section % heads;
    work.first_row = at.level * kRows;
    work.q_len = queries.count;
    work.kv_len = keys.count;
    work.q_begin = queries.begin;
    work.k_begin = keys.begin;
    return work;
  }

 private:
  struct Position {
    int seq, level;  // tile number `level` of the sequence
  };

  FLASHPORT_DEVICE bool has_own_lengths() const { return p_.cu_seqlens_q != nullptr || p_.seqused_q != nullptr; }
  FLASHPORT_DEVICE int tiles_of(int seq) const {
    return seq < p_.batch ? (query_tokens(p_, seq).count + kRows - 1) / kRows : 0;
  }

  // Tiles of all sequences from `level` on.
  FLASHPORT_DEVICE int tiles_from(int level) const {
    int sum = 0, all = 0;
    for (int seq = block_.lane(); seq < p_.batch; seq += kWaveSize) sum += maximum(tiles_of(seq) - level, 0);
    block_.wave_exclusive_scan(sum, all);
    return all;
  }

  FLASHPORT_DEVICE Position position(int i) const {
    if (!has_own_lengths()) return {i % p_.batch, levels_ - 1 - i / p_.batch};
    int level = 0, above = levels_;  // tiles_from(level) > i >= tiles_from(above)
    while (above - level > 1) {
      const int middle = (level + above) / 2;
      (tiles_from(middle) > i ? level : above) = middle;
    }
    int rank = i - tiles_from(level + 1);  // among the sequences that have a tile of this level
    for (int first = 0; first < p_.batch; first += kWaveSize) {
      const int seq = first + block_.lane();
      const bool has = tiles_of(seq) > level;
      int all = 0;
      const int before = block_.wave_exclusive_scan(has ? 1 : 0, all);
      if (rank < all) return {first + block_.wave_find(has && before == rank), level};
      rank -= all;
    }
    return {0, level};  // not reached
  }

  const AttentionParams& p_;
  const Block& block_;
  int levels_;  // tiles of the longest sequence that there may be
  int tiles_;   // of all sequences, for one head
};

}  // namespace flashport::FLASHPORT_TARGET::attention
