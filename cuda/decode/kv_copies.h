// The ring of a block without producers: each wave copies its own share of the rows of K and V. The keys that it copies
// are those whose scores it computes, so it waits for them alone; values are everybody's, and the one barrier of a turn
// stands after each wave has waited for those that it copied. A turn's stage of keys is free again when its wave has
// computed the scores, a stage of values when all waves have come to the next barrier.
//
// In flight or in use are the keys of n = kStages turns and the values of n - 1, each a group of cp.async. They are
// committed as K0 V0 K1 V1 ... K(n - 1), and in turn t as K(t + n) V(t + n - 1). Page numbers are loaded a turn before
// their rows are copied.
//
// Rows lie in a stage as row_layout.h says. Those outside the sequence and dims beyond the stored ones are zero.
#pragma once

#include "cuda/decode/kv_pipeline.h"
#include "cuda/decode/row_copies.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
struct KvStages {
  static constexpr int kStages = kCfg.tuning.stages;
  static constexpr int kTurnKeys = kCfg.tuning.leaves * kLeafKeys;
  static constexpr int kQueries = kStages + 2;  // those of segments that a wave has looked up, and of the one in use
  using Keys = TileRows<kCfg, kCfg.shape.head_dim_qk>;
  using Values = TileRows<kCfg, kCfg.shape.head_dim_v>;
  alignas(128) char keys[kStages][kTurnKeys * Keys::kPitch];
  char values[kStages][kTurnKeys * Values::kPitch];
  QueryTile<kCfg> queries[kQueries];
  // Where the rows lie that are copied next; null for rows that are not there. Values are copied a turn later.
  const char* key_rows[kTurnKeys];
  const char* value_rows[2][kTurnKeys];
};

template <DecodeConfig kCfg>
class KvCopies {
  using Ring = KvStages<kCfg>;
  static constexpr int kStages = Ring::kStages;
  static constexpr int kRows = Ring::kTurnKeys / kCfg.tuning.waves;  // of a wave
  static_assert(kStages >= 2 && (kRows == 16 || kRows == 32));
  static constexpr int kTurnLeaves = kCfg.tuning.leaves;

 public:
  template <class Shared>
  FLASHPORT_DEVICE KvCopies(const DecodeParams& p, const Block& block, Shared& shared, LeafCursor& ahead)
      : block_(block),
        ring_(shared.ring),
        as_stored_(is_as_stored<typename Ring::Keys>(p.cache.k) && is_as_stored<typename Ring::Values>(p.cache.v)) {
    Rows first[kStages];
#pragma unroll
    for (Rows& rows : first) rows = look_up(p, ahead);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      next_ = first[i];
      copy_keys(p, i);
      if (i < kStages - 1) copy_values(p, i);
    }
    next_ = look_up(p, ahead);
  }

  // Waits for this wave's keys of the turn.
  FLASHPORT_DEVICE const char* keys() {
    await_copy_groups<2 * kStages - 2>();
    if (is_first_) {  // all waves have brought the query together; later ones have landed before the barrier before
      block_.sync();
      is_first_ = false;
    } else {
      __syncwarp();
    }
    return ring_.keys[stage_];
  }
  FLASHPORT_DEVICE void refill_behind_keys(const DecodeParams&, LeafCursor&) const {}
  FLASHPORT_DEVICE void refill_behind_scores(const DecodeParams& p, LeafCursor& ahead) {
    copy_keys(p, stage_);
    next_ = look_up(p, ahead);
  }
  // The barrier of the turn. After it the stage of the values of the turn before is free.
  FLASHPORT_DEVICE void await_values(const DecodeParams& p, LeafCursor&) {
    await_copy_groups<2 * kStages - 3>();
    block_.sync();
    copy_values(p, stage_ == 0 ? kStages - 1 : stage_ - 1);
  }
  FLASHPORT_DEVICE const char* values() const { return ring_.values[stage_]; }
  FLASHPORT_DEVICE void refill_behind_values(const DecodeParams&, LeafCursor&) {
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

 private:
  enum Form { kNone, kPart, kWhole };
  // What a lane knows of its row of a turn; kv_head is -1 after the last turn. The page number is still on its way.
  struct Rows {
    kv::TokenCoord coord;
    int kv_head;
  };

  FLASHPORT_DEVICE int first_row() const { return block_.wave() * kRows; }

  FLASHPORT_DEVICE Rows look_up(const DecodeParams& p, LeafCursor& ahead) {
    if (ahead.done()) return {{0, -1}, -1};
    const Segment& s = ahead.segment;
    if (ahead.at_segment_start()) {
      copy_query<kCfg>(p, s, block_, ring_.queries[query_]);
      query_ = query_ + 1 == Ring::kQueries ? 0 : query_ + 1;
    }
    const int token = ahead.key() + first_row() + block_.lane() % kRows;
    const bool valid = token >= s.key_low && token < s.key_high;
    const Rows rows{kv::token_coord(p.cache, s.pages, s.seq, token, valid), s.kv_head};
    ahead.next(p, kTurnLeaves);
    return rows;
  }

  // The keys of what was looked up last. Leaves behind where its values are.
  FLASHPORT_DEVICE void copy_keys(const DecodeParams& p, int stage) {
    __syncwarp();  // all lanes have read the keys that were in this stage, and where those before were
    const int parity = keys_copied_++ % 2;
    if (next_.kv_head >= 0) {
      const int row = first_row() + block_.lane() % kRows;
      ring_.key_rows[row] = row_address(p.cache.k, next_);
      ring_.value_rows[parity][row] = row_address(p.cache.v, next_);
      const bool whole = as_stored_ && __all_sync(~0u, next_.coord.offset >= 0);  // a barrier of the wave, too
      set_form(parity, whole ? kWhole : kPart);
      copy<typename Ring::Keys>(p.cache.k, ring_.keys[stage], ring_.key_rows, whole ? kWhole : kPart);
    } else {
      set_form(parity, kNone);
    }
    commit_copies();
  }
  FLASHPORT_DEVICE void copy_values(const DecodeParams& p, int stage) {
    const int parity = values_copied_++ % 2;
    copy<typename Ring::Values>(p.cache.v, ring_.values[stage], ring_.value_rows[parity], form(parity));
    commit_copies();
  }

  FLASHPORT_DEVICE void set_form(int parity, Form form) {
    forms_ = (forms_ & ~(0xfu << 4 * parity)) | static_cast<unsigned>(form) << 4 * parity;
  }
  FLASHPORT_DEVICE Form form(int parity) const { return static_cast<Form>(forms_ >> 4 * parity & 0xfu); }

  template <class Layout>
  FLASHPORT_DEVICE void copy(const CacheParams& cache, char* tile, const char* const* rows, Form form) const {
    using Copies = RowCopies<Layout, kRows>;
    if (form == kWhole) {
      Copies::copy_whole(block_.lane(), tile, first_row(), 0, rows);
    } else if (form == kPart) {
      Copies::copy_part(block_.lane(), tile, first_row(), 0, cache, rows);
    }
  }

  FLASHPORT_DEVICE static const char* row_address(const CacheParams& cache, const Rows& rows) {
    const std::int64_t offset = kv::row_offset(cache, rows.coord, rows.kv_head);
    return offset < 0 ? nullptr : static_cast<const char*>(cache.data) + offset;
  }

  const Block& block_;
  Ring& ring_;
  const bool as_stored_;
  Rows next_;
  unsigned forms_ = 0;  // of the rows whose values are copied next, four bits a parity
  unsigned keys_copied_ = 0, values_copied_ = 0;
  int stage_ = 0;
  int query_ = 0;
  bool is_first_ = true;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
