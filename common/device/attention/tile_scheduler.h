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
  FLASHPORT_DEVICE WorkTile tile(int index) {
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

  // Tile number i of a head. With lengths of their own, sequences are looked through a wave at a time, from where the
  // tile before was found: a block asks for tiles in ascending order.
  FLASHPORT_DEVICE Position position(int i) {
    if (!has_own_lengths()) return {i % p_.batch, levels_ - 1 - i / p_.batch};
    if (i < wave_start_) find_level(i);
    while (true) {
      const int seq = wave_seq_ + block_.lane();
      const bool has = tiles_of(seq) > level_;
      int all = 0;
      const int before = block_.wave_exclusive_scan(has ? 1 : 0, all);
      if (i < wave_start_ + all) return {wave_seq_ + block_.wave_find(has && wave_start_ + before == i), level_};
      wave_start_ += all;
      wave_seq_ += kWaveSize;
      if (wave_seq_ >= p_.batch) {
        wave_seq_ = 0;
        --level_;
      }
    }
  }

  // The level that has tile number i, whose first sequences come next.
  FLASHPORT_DEVICE void find_level(int i) {
    int level = 0, above = levels_;  // tiles_from(level) > i >= tiles_from(above)
    while (above - level > 1) {
      const int middle = (level + above) / 2;
      (tiles_from(middle) > i ? level : above) = middle;
    }
    level_ = level;
    wave_seq_ = 0;
    wave_start_ = tiles_from(level + 1);
  }

  const AttentionParams& p_;
  const Block& block_;
  int levels_;  // tiles of the longest sequence that there may be
  int tiles_;   // of all sequences, for one head
  // Where position() goes on: the tiles of a level, from a sequence on; and the number of the first of these tiles.
  int level_ = 0, wave_seq_ = 0, wave_start_ = 0x7fffffff;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
