// The tile verbs of decode on a CPU. Tiles are plain arrays with exactly the rows there are; K and V are read where
// they lie, through one pointer a key (leaf.h), or widened a leaf at a time (segment_rows.h).
#pragma once

#include <type_traits>
#include <utility>

#include "common/device/core/scalar_access.h"
#include "common/device/decode/combine.h"
#include "common/device/decode/mask.h"
#include "common/device/decode/schedule.h"
#include "common/device/merge/online_softmax.h"
#include "cpu/decode/leaf.h"
#include "cpu/decode/segment_rows.h"
#include FLASHPORT_DECODE_PRODUCTS_HEADER
#include FLASHPORT_DECODE_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::decode {

constexpr int block_threads(const DecodeConfig&) { return 1; }

// Looks up the rows of leaves in one cache.
class CacheRows {
 public:
  explicit CacheRows(const DecodeParams& p) : p_(p) {}

  void look_up(Leaf& leaf, const Segment& s, int key) const {
    leaf.low = maximum(s.key_low - key, 0);
    leaf.high = minimum(s.key_high - key, kLeafKeys);
    for (int i = leaf.low; i < leaf.high;) {  // a page at a time
      const kv::TokenCoord place = kv::token_coord(p_.cache, s.pages, s.seq, key + i, true);
      const char* key_row = cache_row(p_.cache.k, place, s.kv_head);
      const char* value_row = cache_row(p_.cache.v, place, s.kv_head);
      const std::int64_t end = s.pages == nullptr ? leaf.high : i + p_.cache.page_size - place.offset;
      for (; i < leaf.high && i < end; ++i, key_row += p_.cache.k.token_stride, value_row += p_.cache.v.token_stride) {
        leaf.keys[i] = key_row;
        leaf.values[i] = value_row;
      }
    }
    if (leaf.high - leaf.low == kLeafKeys || leaf.low >= leaf.high) return;
    for (int i = 0; i < kLeafKeys; ++i) {
      const int there = minimum(maximum(i, leaf.low), leaf.high - 1);
      leaf.keys[i] = leaf.keys[there];
      leaf.values[i] = leaf.values[there];
    }
  }

 private:
  const DecodeParams& p_;
};

template <DecodeConfig kCfg>
using LeafOf = std::conditional_t<reads_segments(kCfg.shape), SegmentLeaf, Leaf>;
template <DecodeConfig kCfg>
using RowsOf = std::conditional_t<reads_segments(kCfg.shape), SegmentRows, CacheRows>;

struct NoWideLeaf {};
template <DecodeConfig kCfg>
using WideLeafOf =
    std::conditional_t<reads_segments(kCfg.shape), WideLeaf<kCfg.shape.head_dim_qk, kCfg.shape.head_dim_v>, NoWideLeaf>;

template <DecodeConfig kCfg>
using TileProducts = ProductsOf<reads_segments(kCfg.shape) ? KvFormat::kFp32 : kCfg.shape.k_format>;
template <DecodeConfig kCfg>
using QueryOf = typename TileProducts<kCfg>::template Query<kCfg.shape.rows, kCfg.shape.head_dim_qk>;

template <DecodeConfig kCfg>
struct DecodeShared {
  QueryOf<kCfg> query;
  LeafOf<kCfg> leaves[kCfg.tuning.stages];
  WideLeafOf<kCfg> wide;
  PartialList partials[1];
};

// Leaves on their way: addresses are looked up one leaf ahead. Its lines are asked for in between the products of the
// leaf before, not in one burst: a burst fills the core's queue of misses and stalls it, with memory idle afterwards.
template <DecodeConfig kCfg>
class KvPipeline {
  static constexpr int kStages = kCfg.tuning.stages;

 public:
  using Params = DecodeParamsOf<kCfg>;
  using Leaf = LeafOf<kCfg>;

  KvPipeline(const Params& p, const Block&, DecodeShared<kCfg>& shared, LeafCursor& ahead)
      : leaves_(shared.leaves), rows_(p) {
    for (int i = 0; i < kStages - 1; ++i) refill_behind_keys(p, ahead);
  }

  const Leaf& keys() const { return leaves_[oldest_]; }

  void refill_behind_keys(const Params& p, LeafCursor& ahead) {
    leaves_[oldest_].next = nullptr;
    if (ahead.done()) return;
    Leaf& leaf = leaves_[newest_];
    leaves_[oldest_].next = &leaf;
    rows_.look_up(leaf, ahead.segment, ahead.key());
    newest_ = newest_ + 1 == kStages ? 0 : newest_ + 1;
    ahead.next(p);
  }
  void refill_behind_scores(const DecodeParams&, const LeafCursor&) {}
  void refill_behind_values(const DecodeParams&, const LeafCursor&) {}
  void await_values(const DecodeParams&, const LeafCursor&) const {}

  const Leaf& values() {
    const Leaf& leaf = leaves_[oldest_];
    oldest_ = oldest_ + 1 == kStages ? 0 : oldest_ + 1;
    return leaf;
  }

 private:
  Leaf* leaves_;
  RowsOf<kCfg> rows_;
  int oldest_ = 0, newest_ = 0;
};

template <DecodeConfig kCfg>
class DecodeTiles {
  static constexpr DecodeShape kShape = kCfg.shape;
  static constexpr bool kWidens = reads_segments(kShape);
  using Params = DecodeParamsOf<kCfg>;
  using Leaf = LeafOf<kCfg>;

 public:
  static_assert(kShape.k_format == kShape.v_format, "these tiles read K and V of one format");
  static constexpr int kRows = kShape.rows;
  static constexpr int kRowSlots = kRows;
  static constexpr int kColumns = kShape.head_dim_v;
  static constexpr int kTurnLeaves = 1;
  // The block publishes a state as one slice.
  static constexpr int kSliceColumns = kColumns;
  static constexpr int kKeptStates = 2;

  struct Rows {
    float v[kRows];
    float& operator[](int slot) { return v[slot]; }
    float operator[](int slot) const { return v[slot]; }
  };
  using Query = const QueryOf<kCfg>*;
  struct Scores {
    alignas(64) float x[kRows][kLeafKeys];
  };
  struct Out {
    int rows = 0;  // in use; only these are copied
    alignas(64) float x[kRows][kShape.head_dim_v];
    Out() {}
    Out& operator=(const Out& other) {
      rows = other.rows;
      std::memcpy(x, other.x, sizeof x[0] * static_cast<std::size_t>(rows));
      return *this;
    }
  };
  // P, with the largest score and the sum of each row.
  struct Operand {
    const Scores& scores;
    Rows m, l;
  };

  DecodeTiles(const Params& p, const Block& block, DecodeShared<kCfg>& shared)
      : params_(p),
        block_(block),
        shared_(shared),
        live_rows_(minimum(kRows, p.group_size * p.max_q_len)),
        products_(p.head_dim_qk, p.head_dim_v) {}

  int row_slots() const { return live_rows_; }
  int live_rows() const { return live_rows_; }
  static int row_of(int slot) { return slot; }
  static bool owns_row(int) { return true; }
  static constexpr int slice() { return 0; }
  const Block& slice_threads() const { return block_; }
  int slice_rows() const { return live_rows(); }
  static constexpr int first_row() { return 0; }
  static constexpr int first_column() { return 0; }

  // The query rows as floats; padding rows and dims are zero.
  void stage_query(const DecodeParams& p, const Segment& s) const {
    for (int row = 0; row < live_rows_; ++row) {
      const QueryRow at = query_row(p, s, kRows, row);
      float* to = shared_.query.rows[row];
      std::memset(to, 0, sizeof shared_.query.rows[row]);
      if (at.token >= s.q_len) continue;
      const std::int64_t from = query_offset(p, s, p.q, at);
      for (int dim = 0; dim < p.head_dim_qk; ++dim) {
        to[dim] = load_as_float(p.q.data, p.q.dtype, from + dim * p.q.stride_dim);
      }
    }
    products_.prepare(shared_.query, live_rows_);
  }
  void fetch_query(Query& query) const { query = &shared_.query; }

  // S = Q K^T; keys that do not exist give 0.
  Scores mma_abt(Query query, const Leaf& leaf) const {
    Scores scores;
    for (int row = 0; row < live_rows_ && leaf.high - leaf.low < kLeafKeys; ++row) {
      for (int key = 0; key < leaf.low; ++key) scores.x[row][key] = 0.0f;
      for (int key = maximum(leaf.high, 0); key < kLeafKeys; ++key) scores.x[row][key] = 0.0f;
    }
    if constexpr (kWidens) {
      products_.multiply_keys(*query, shared_.wide.keys(leaf, params_), live_rows_, scores.x);
      if (leaf.keys.has_factors) multiply_factors(scores.x, scores.x, leaf, leaf.keys);
    } else {
      products_.multiply_keys(*query, leaf, live_rows_, scores.x);
    }
    return scores;
  }

  // f(value, slot, key of the leaf)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
    for (int row = 0; row < live_rows_; ++row) {
      if constexpr (std::is_invocable_v<F&, Vec&, int, int>) {
        for (int key = 0; key < kLeafKeys; key += kVecWidth) {
          Vec x = load_vec(scores.x[row] + key);
          f(x, row, key);
          store_vec(scores.x[row] + key, x);
        }
      } else {
        for (int key = 0; key < kLeafKeys; ++key) f(scores.x[row][key], row, key);
      }
    }
  }

  // P = exp2(S - m)
  template <class State>
  Operand exponentiate(const State&, Scores& scores) const {
    Operand p{scores, {}, {}};
    for (int row = 0; row < live_rows_; ++row) {
      float* x = scores.x[row];
      Vec most = load_vec(x);
      for (int key = kVecWidth; key < kLeafKeys; key += kVecWidth) most = larger(most, load_vec(x + key));
      p.m[row] = fold_vec(most, [](Vec a, Vec b) { return larger(a, b); });
      const float reference = p.m[row] == -kInfinity ? 0.0f : p.m[row];
      Vec sum{};
      for (int key = 0; key < kLeafKeys; key += kVecWidth) {
        const Vec e = exp2_approx(load_vec(x + key) - reference);
        store_vec(x + key, e);
        sum += e;
      }
      p.l[row] = fold_vec(sum, [](Vec a, Vec b) { return a + b; });
    }
    return p;
  }

  // (m, l, O) joined with P V over the keys that exist
  template <class State>
  void accumulate(State& state, const Operand& p, const Leaf& leaf) const {
    State other;
    other.m = p.m;
    other.l = p.l;
    other.o.rows = live_rows_;
    const FloatRows<float> out{other.o.x[0], kShape.head_dim_v};
    if constexpr (kWidens) {
      const auto& wide = shared_.wide.values(leaf, params_);
      if (leaf.values.has_factors) {
        Scores weights;
        multiply_factors(weights.x, p.scores.x, leaf, leaf.values);
        products_.multiply_values(weights.x, wide, live_rows_, out);
      } else {
        products_.multiply_values(p.scores.x, wide, live_rows_, out);
      }
    } else {
      products_.multiply_values(p.scores.x, leaf, live_rows_, out);
    }
    merge::merge(*this, state, other);
  }

  void clear(Out& out) const {
    out.rows = live_rows_;
    std::memset(out.x, 0, sizeof out.x[0] * static_cast<std::size_t>(live_rows_));
  }

  // f(to, from, slot)
  template <class F>
  FLASHPORT_DEVICE void for_each_pair(Out& to, const Out& from, F&& f) const {
    for (int row = 0; row < live_rows_; ++row) {
      for (int col = 0; col < kShape.head_dim_v; ++col) f(to.x[row][col], from.x[row][col], row);
    }
  }
  // f(value, slot, column)
  template <class F>
  FLASHPORT_DEVICE void for_each_out(const Out& out, F&& f) const {
    for (int row = 0; row < live_rows_; ++row) {
      for (int col = 0; col < kShape.head_dim_v; ++col) f(out.x[row][col], row, col);
    }
  }

  void store_rows(const Rows& m, const Rows& l, float* to) const {
    for (int row = 0; row < live_rows_; ++row) to[2 * row] = m[row], to[2 * row + 1] = l[row];
  }
  void store_tile(const Out& out, float* to) const {
    std::memcpy(to, out.x, sizeof out.x[0] * static_cast<std::size_t>(live_rows_));
  }

 private:
  // Each key's column by its factor.
  void multiply_factors(float (*to)[kLeafKeys], const float (*from)[kLeafKeys], const SegmentLeaf& leaf,
                        const SegmentLeaf::Rows& rows) const {
    for (int row = 0; row < live_rows_; ++row) {
      for (int key = leaf.low; key < leaf.high; ++key) to[row][key] = from[row][key] * rows.factors[key];
    }
  }

  const Params& params_;
  const Block& block_;
  DecodeShared<kCfg>& shared_;
  int live_rows_;
  TileProducts<kCfg> products_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
