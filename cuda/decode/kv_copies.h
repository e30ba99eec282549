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
#include FLASHPORT_DECODE_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::decode {

// A row of K and V; kv_head is -1 after the last turn.
struct LookedUpRow {
  kv::TokenCoord coord;
  int kv_head;
};

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
  // Of the rows of each stage: what was looked up before the first turn, and where they lie (null: no such row).
  LookedUpRow looked_up[kStages][kTurnKeys];
  const char* key_rows[kStages][kTurnKeys];
  const char* value_rows[kStages][kTurnKeys];
};

template <DecodeConfig kCfg>
class KvCopies {
  using Ring = KvStages<kCfg>;
  static constexpr int kStages = Ring::kStages;
  static constexpr int kRows = Ring::kTurnKeys / kCfg.tuning.waves;  // of a wave
  static_assert(kStages >= 2 && kStages <= 8 && (kRows == 16 || kRows == 32));
  static constexpr int kTurnLeaves = kCfg.tuning.leaves;

 public:
  template <class Shared>
  FLASHPORT_DEVICE KvCopies(const DecodeParams& p, const Block& block, Shared& shared, LeafCursor& ahead)
      : block_(block),
        ring_(shared.ring),
        policy_(fits_cache(p, ahead.line) ? kNormalPolicy : kReadOncePolicy),
        as_stored_(is_as_stored<typename Ring::Keys>(p.cache.k) && is_as_stored<typename Ring::Values>(p.cache.v)) {
    // Rolled loops: code that runs once is slow for being fetched.
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      LookedUpRow& row = ring_.looked_up[stage][own_row()];
      look_up(p, ahead, [&](LookedUpRow found, const std::int32_t* page) {
        row.kv_head = found.kv_head;
        row.coord.offset = found.coord.offset;
        if (page != nullptr) {
          copy_async<4>(&row.coord.page, page, true);
        } else {
          row.coord.page = found.coord.page;
        }
      });
    }
    await_copies();
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      next_ = ring_.looked_up[stage][own_row()];
      copy_keys(p, stage);
      if (stage < kStages - 1) copy_values(p, stage);
    }
    look_up_next(p, ahead);
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
    look_up_next(p, ahead);
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

  // Whether all keys and values may stay in L2 from one launch to the next.
  FLASHPORT_DEVICE static bool fits_cache(const DecodeParams& p, const Line& line) {
    const std::int64_t leaf_bytes = std::int64_t{p.num_kv_heads} * kLeafKeys * (p.cache.k.row_bytes + p.cache.v.row_bytes);
    return line.leaves * leaf_bytes <= kCachedBytes;
  }

  FLASHPORT_DEVICE int first_row() const { return block_.wave() * kRows; }
  FLASHPORT_DEVICE int own_row() const { return first_row() + block_.lane() % kRows; }

  // found(row, where its page number is, or null) of the turn that `ahead` stands at, which moves on. Brings the query
  // of a tile that begins there.
  template <class Found>
  FLASHPORT_DEVICE void look_up(const DecodeParams& p, LeafCursor& ahead, const Found& found) {
    if (ahead.done()) return found({{0, -1}, -1}, nullptr);
    const Segment& s = ahead.segment;
    const int token = ahead.key() + own_row();
    if (token >= s.key_low && token < s.key_high) {
      const kv::PageCoord at = kv::page_coord(p.cache, s.pages, token);
      found({{s.seq, at.offset}, s.kv_head}, s.pages == nullptr ? nullptr : s.pages + at.page);
    } else {
      found({{0, -1}, s.kv_head}, nullptr);
    }
    if (ahead.at_segment_start()) {
      copy_query<kCfg>(p, s, block_, ring_.queries[query_]);
      query_ = query_ + 1 == Ring::kQueries ? 0 : query_ + 1;
    }
    ahead.next(p, kTurnLeaves);
  }
  // The page number is on its way while a turn passes.
  FLASHPORT_DEVICE void look_up_next(const DecodeParams& p, LeafCursor& ahead) {
    look_up(p, ahead, [&](LookedUpRow found, const std::int32_t* page) {
      next_ = found;
      if (page != nullptr) next_.coord.page = load_global(page);
    });
  }

  // The keys of what was looked up last. Leaves behind where its values are.
  FLASHPORT_DEVICE void copy_keys(const DecodeParams& p, int stage) {
    __syncwarp();  // all lanes have read the keys that were in this stage, and where those lay
    Form form = kNone;
    if (next_.kv_head >= 0) {
      ring_.key_rows[stage][own_row()] = row_address(p.cache.k);
      ring_.value_rows[stage][own_row()] = row_address(p.cache.v);
      form = as_stored_ && __all_sync(~0u, next_.coord.offset >= 0) ? kWhole : kPart;
      __syncwarp();
    }
    forms_ = (forms_ & ~(0xfu << 4 * stage)) | static_cast<unsigned>(form) << 4 * stage;
    copy<typename Ring::Keys>(p.cache.k, ring_.keys[stage], ring_.key_rows[stage], form);
  }
  FLASHPORT_DEVICE void copy_values(const DecodeParams& p, int stage) {
    const auto form = static_cast<Form>(forms_ >> 4 * stage & 0xfu);
    copy<typename Ring::Values>(p.cache.v, ring_.values[stage], ring_.value_rows[stage], form);
  }

  template <class Layout>
  FLASHPORT_DEVICE void copy(const CacheParams& cache, char* tile, const char* const* rows, Form form) const {
    using Copies = RowCopies<Layout, kRows>;
    if (form == kWhole) {
      Copies::copy_whole(block_.lane(), tile, first_row(), 0, rows, policy_);
    } else if (form == kPart) {
      Copies::copy_part(block_.lane(), tile, first_row(), 0, cache, rows);
    }
    commit_copies();
  }

  FLASHPORT_DEVICE const char* row_address(const CacheParams& cache) const {
    const std::int64_t offset = kv::row_offset(cache, next_.coord, next_.kv_head);
    return offset < 0 ? nullptr : static_cast<const char*>(cache.data) + offset;
  }

  const Block& block_;
  Ring& ring_;
  const std::uint64_t policy_;
  const bool as_stored_;
  LookedUpRow next_;
  unsigned forms_ = 0;  // how the rows of each stage are copied, four bits each
  int stage_ = 0;
  int query_ = 0;
  bool is_first_ = true;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
