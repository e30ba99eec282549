// The order of work tiles, and where each lies. Blocks take tiles in this order, one after the other.
//
// Heads are cut into sections, whose keys and values the last cache level may hold together. In a section the last
// tiles of the longest sequences come first, which under a causal mask see the most keys, and the tiles that all
// sequences have come last: so blocks end together. The heads of a kv head are neighbours. Where keys are cut, all
// query tiles of a piece come before those of the piece before it, as if a sequence had as many more queries.
#pragma once

#include "common/device/attention/work.h"

namespace flashport::FLASHPORT_TARGET::attention {

template <int kRows, int kKeys>
class TileScheduler {
 public:
  // All lanes of a wave construct it and call its functions together.
  FLASHPORT_DEVICE TileScheduler(const AttentionParams& p, const Block& block)
      : p_(p), block_(block), levels_((p.q_len + kRows - 1) / kRows) {
    if (has_own_lengths()) {
      if (p.pieces.most > 1) levels_ = p.pieces.rule.count > 0 ? levels_ * p.pieces.most : most_levels_by_lengths();
      tiles_ = tiles_from(0);
    } else {
      levels_ *= maximum(p.pieces.most, 1);  // of all sequences alike
      tiles_ = levels_ * p.batch;
    }
  }

  // Work tiles of all heads.
  FLASHPORT_DEVICE int count() const { return tiles_ * p_.num_q_heads; }

  // Work tile number `index` below count(). `work` may be in memory: what is known of it is written at once, because
  // waves that schedule may have few registers.
  FLASHPORT_DEVICE void tile(int index, WorkTile& work) {
    const int section_heads = p_.section_heads * p_.group_size;
    const int section = index / (tiles_ * section_heads);
    const int first_head = section * section_heads;
    const int heads = minimum(section_heads, p_.num_q_heads - first_head);
    const int in_section = index - first_head * tiles_;
    const Position at = position(in_section / heads);
    const Tokens queries = query_tokens(p_, at.seq), keys = key_tokens(p_, at.seq);
    const int query_tiles = (queries.count + kRows - 1) / kRows, piece = at.level / query_tiles;
    work.seq = at.seq;
    work.head = first_head + in_section % heads;
    work.first_row = (at.level - piece * query_tiles) * kRows;
    work.q_len = queries.count;
    work.kv_len = keys.count;
    work.q_begin = queries.begin;
    work.k_begin = keys.begin;
    work.first_tile = 0;
    work.end_tile = 0x7fffffff;
    work.out_begin = queries.begin;
    if (p_.pieces.most > 1) take_piece(at.seq, piece, work);
  }

 private:
  struct Position {
    int seq, level;  // tile number `level` of the sequence
  };

  FLASHPORT_DEVICE bool has_own_lengths() const {
    const bool of_keys = p_.cache.seqlens.data != nullptr || p_.cache.kv_indptr != nullptr || p_.leftpad_k != nullptr;
    return p_.cu_seqlens_q != nullptr || p_.seqused_q != nullptr || (p_.pieces.most > 1 && of_keys);
  }
  FLASHPORT_DEVICE int tiles_of(int seq) const {
    if (seq >= p_.batch) return 0;
    const int query_tiles = (query_tokens(p_, seq).count + kRows - 1) / kRows;
    return p_.pieces.most <= 1 ? query_tiles : query_tiles * pieces_of(seq).cut.count;
  }
  // By rows and keys that the compiler knows.
  FLASHPORT_DEVICE SequencePieces pieces_of(int seq) const {
    const PieceRule rule = {p_.pieces.rule.count, p_.pieces.rule.work_tiles, kRows, kKeys};
    return sequence_pieces(p_, rule, query_tokens(p_, seq).count, key_tokens(p_, seq).count);
  }
  // A sequence that is cut by its lengths has no more tiles than the rule wants.
  FLASHPORT_DEVICE int most_levels_by_lengths() const { return maximum(levels_, p_.pieces.rule.work_tiles); }

  FLASHPORT_DEVICE void take_piece(int seq, int piece, WorkTile& work) const {
    const SequencePieces pieces = pieces_of(seq);
    if (pieces.cut.count == 1) return;
    const int first_tile = pieces.first_tile + piece * pieces.cut.tiles;
    work.first_tile = first_tile;
    work.end_tile = first_tile + pieces.cut.tiles;
    const Tokens queries = query_tokens(p_, seq);
    work.out_begin = -1 - static_cast<int>(partial_row(p_, seq, queries, key_tokens(p_, seq))) - piece * queries.count;
  }

  // Tiles of all sequences from `level` on.
  FLASHPORT_DEVICE int tiles_from(int level) const {
    int sum = 0, all = 0;
    FLASHPORT_UNROLL(1)
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
    int above = levels_;
    level_ = wave_seq_ = wave_start_ = 0;  // tiles_from(level_) > i >= tiles_from(above), which is wave_start_
    while (above - level_ > 1) {
      const int middle = (level_ + above) / 2, tiles = tiles_from(middle);
      if (tiles > i) {
        level_ = middle;
      } else {
        above = middle;
        wave_start_ = tiles;
      }
    }
  }

  const AttentionParams& p_;
  const Block& block_;
  int levels_;  // tiles of the longest sequence that there may be
  int tiles_;   // of all sequences, for one head
  // Where position() goes on: the tiles of a level, from a sequence on; and the number of the first of these tiles.
  int level_ = 0, wave_seq_ = 0, wave_start_ = 0x7fffffff;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
