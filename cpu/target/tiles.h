// The tile verbs of decode on a CPU. Tiles are plain arrays with exactly the rows there are; K and V are read where
// they lie, through one pointer a key. Products are blocks of 16 accumulators: rows x keys for Q K^T (summed across
// lanes in one transposing tree), rows x columns for P V.
#pragma once

#include <type_traits>
#include <utility>

#include "common/device/mask.h"
#include "common/device/schedule.h"
#include "cpu/target/kv_operand.h"
#include "cpu/target/lane_sums.h"
#include "cpu/tuning/cpu.h"

namespace flashport::FLASHPORT_TARGET {

constexpr int block_threads(const DecodeConfig&) { return 1; }

// The rows of one leaf: keys [low, high) of its 64 exist.
struct Leaf {
  const char* keys[kLeafKeys];
  const char* values[kLeafKeys];
  int low, high;
  const Leaf* next;  // what is asked for while this leaf is worked on; null: nothing
};

// Into the level of the cache that holds a leaf beside the one in use: 3 is the first, 2 the second.
template <int kLocality>
FLASHPORT_DEVICE void prefetch_row(const char* row, int bytes) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(row + line, 0, kLocality);
}

template <DecodeConfig kCfg>
struct DecodeShared {
  alignas(64) float query[kCfg.shape.rows][kCfg.shape.head_dim_qk];
  Leaf leaves[kCfg.tuning.stages];
  RangeEnds ends;
};

// Leaves on their way: addresses are looked up one leaf ahead. Its lines are asked for in between the products of the
// leaf before, not in one burst: a burst fills the core's queue of misses and stalls it, with memory idle afterwards.
template <DecodeConfig kCfg>
class KvPipeline {
  static constexpr int kStages = kCfg.tuning.stages;

 public:
  KvPipeline(const DecodeParams& p, const Block&, DecodeShared<kCfg>& shared, LeafCursor& ahead)
      : leaves_(shared.leaves) {
    for (int i = 0; i < kStages - 1; ++i) refill_behind_keys(p, ahead);
  }

  const Leaf& keys() const { return leaves_[oldest_]; }

  void refill_behind_keys(const DecodeParams& p, LeafCursor& ahead) {
    leaves_[oldest_].next = nullptr;
    if (ahead.done()) return;
    const Segment& s = ahead.segment;
    Leaf& leaf = leaves_[newest_];
    leaves_[oldest_].next = &leaf;
    leaf.low = maximum(s.key_low - ahead.key(), 0);
    leaf.high = minimum(s.key_high - ahead.key(), kLeafKeys);
    for (int i = leaf.low; i < leaf.high; ++i) {
      const TokenPlace place = place_of(p, s.pages, s.seq, ahead.key() + i, true);
      leaf.keys[i] = static_cast<const char*>(p.k.data) + row_offset(p.k, place, s.kv_head);
      leaf.values[i] = static_cast<const char*>(p.v.data) + row_offset(p.v, place, s.kv_head);
    }
    newest_ = newest_ + 1 == kStages ? 0 : newest_ + 1;
    ahead.next(p);
  }
  void refill_behind_scores(const DecodeParams&, const LeafCursor&) {}
  void refill_behind_values(const DecodeParams&, const LeafCursor&) {}
  void await_values() const {}

  const Leaf& values() {
    const Leaf& leaf = leaves_[oldest_];
    oldest_ = oldest_ + 1 == kStages ? 0 : oldest_ + 1;
    return leaf;
  }

 private:
  Leaf* leaves_;
  int oldest_ = 0, newest_ = 0;
};

template <DecodeConfig kCfg>
class DecodeTiles {
  static constexpr DecodeShape kShape = kCfg.shape;
  using Row = KvRow<kShape.kv>;
  static constexpr int kLeafBytes =
      kLeafKeys * (kv_row_bytes(kShape.kv, kShape.head_dim_qk) + kv_row_bytes(kShape.kv, kShape.head_dim_v));
  static constexpr int kLocality = kLeafBytes <= 32768 ? 3 : 2;

 public:
  static constexpr int kRows = kShape.rows;
  static constexpr int kRowSlots = kRows;
  static constexpr int kColumns = kShape.head_dim_v;
  static constexpr bool kKeepsParent = false;

  struct Rows {
    float v[kRows];
    float& operator[](int slot) { return v[slot]; }
    float operator[](int slot) const { return v[slot]; }
  };
  struct Query {
    const float (*rows)[kShape.head_dim_qk];
  };
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
  using Operand = const Scores&;

  DecodeTiles(const DecodeParams& p, const Block&, DecodeShared<kCfg>& shared)
      : shared_(shared),
        live_rows_(minimum(kRows, p.group_size * p.max_q_len)),
        dims_(p.head_dim_qk),
        columns_(p.head_dim_v),
        key_bytes_(p.k.row_bytes) {}

  int row_slots() const { return live_rows_; }
  int live_rows() const { return live_rows_; }
  static int row_of(int slot) { return slot; }
  static bool owns_row(int) { return true; }

  // The query rows as floats; padding rows and dims are zero.
  void stage_query(const DecodeParams& p, const Segment& s) const {
    for (int row = 0; row < live_rows_; ++row) {
      const QueryRow at = query_row(p, s, kRows, row);
      float* to = shared_.query[row];
      std::memset(to, 0, sizeof shared_.query[row]);
      if (at.token >= s.q_len) continue;
      const std::int64_t seq = p.cu_seqlens_q == nullptr ? s.seq : 0;
      const std::int64_t from =
          seq * p.q_stride_seq + (s.q_begin + at.token) * p.q_stride_token + at.head * p.q_stride_head;
      for (int dim = 0; dim < p.head_dim_qk; ++dim) {
        const std::int64_t element = from + dim * p.q_stride_dim;
        switch (p.q_dtype) {
          case DType::kFloat16: to[dim] = to_float(static_cast<const Half*>(p.q)[element]); break;
          case DType::kBFloat16: to[dim] = to_float(static_cast<const BFloat16*>(p.q)[element]); break;
          default: to[dim] = static_cast<const float*>(p.q)[element]; break;
        }
      }
    }
  }
  void fetch_query(Query& query) const { query.rows = shared_.query; }

  // S = Q K^T; keys that do not exist give 0.
  Scores mma_abt(const Query& query, const Leaf& leaf) const {
    Scores scores;
    for (int row = 0; row < live_rows_ && leaf.high - leaf.low < kLeafKeys; ++row) {
      for (int key = 0; key < leaf.low; ++key) scores.x[row][key] = 0.0f;
      for (int key = maximum(leaf.high, 0); key < kLeafKeys; ++key) scores.x[row][key] = 0.0f;
    }
    int row = 0;
    for (; row + 4 <= live_rows_; row += 4) dot_rows<4>(query, leaf, row, scores);
    if (row + 2 <= live_rows_) dot_rows<2>(query, leaf, row, scores), row += 2;
    if (row < live_rows_) dot_rows<1>(query, leaf, row, scores);
    return scores;
  }

  // f(value, slot, key of the leaf)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
    for (int row = 0; row < live_rows_; ++row) {
      if constexpr (std::is_invocable_v<F&, Vec&, int, int>) {
        for (int key = 0; key < kLeafKeys; key += kLanes) {
          Vec x = load_vec(scores.x[row] + key);
          f(x, row, key);
          store_vec(scores.x[row] + key, x);
        }
      } else {
        for (int key = 0; key < kLeafKeys; ++key) f(scores.x[row][key], row, key);
      }
    }
  }

  void row_max(const Scores& scores, Rows& m) const {
    for (int row = 0; row < live_rows_; ++row) {
      Vec most = load_vec(scores.x[row]);
      for (int key = kLanes; key < kLeafKeys; key += kLanes) most = larger(most, load_vec(scores.x[row] + key));
      m[row] = fold_vec(most, [](Vec a, Vec b) { return larger(a, b); });
    }
  }

  // l = row sums of P
  Operand to_operand(const Scores& scores, Rows& l) const {
    for (int row = 0; row < live_rows_; ++row) {
      Vec sum = load_vec(scores.x[row]);
      for (int key = kLanes; key < kLeafKeys; key += kLanes) sum += load_vec(scores.x[row] + key);
      l[row] = fold_vec(sum, [](Vec a, Vec b) { return a + b; });
    }
    return scores;
  }

  // O = P V over the keys that exist
  void mma_ab(Operand scores, const Leaf& leaf, Out& out) const {
    out.rows = live_rows_;
    int row = 0;
    for (; row + 4 <= live_rows_; row += 4) weigh_rows<4>(scores, leaf, row, out);
    if (row + 2 <= live_rows_) weigh_rows<2>(scores, leaf, row, out), row += 2;
    if (row < live_rows_) weigh_rows<1>(scores, leaf, row, out);
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

  void store_rows(const Rows& rows, float* to) const { std::memcpy(to, rows.v, sizeof(float) * live_rows_); }
  void store_tile(const Out& out, float* to) const {
    std::memcpy(to, out.x, sizeof out.x[0] * static_cast<std::size_t>(live_rows_));
  }

 private:
  // Scores of kCount rows from `row` on with all keys, 16 / kCount keys at a time.
  template <int kCount>
  void dot_rows(const Query& query, const Leaf& leaf, int row, Scores& scores) const {
    constexpr int kKeys = kLanes / kCount;
    for (int key = leaf.low; key < leaf.high; key += kKeys) {
      const char* keys[kKeys];
      for (int k = 0; k < kKeys; ++k) keys[k] = leaf.keys[minimum(key + k, leaf.high - 1)];
      if (row == 0 && leaf.next != nullptr) {
        const int until = minimum(key + kKeys, leaf.next->high);
        for (int k = maximum(key, leaf.next->low); k < until; ++k) {
          prefetch_row<kLocality>(leaf.next->keys[k], key_bytes_);
        }
      }
      Vec acc[kLanes] = {};
      int dim = 0;
      for (; dim + kLanes <= dims_; dim += kLanes) {
        Vec q[kCount];
#pragma GCC unroll 16
        for (int r = 0; r < kCount; ++r) q[r] = load_vec(query.rows[row + r] + dim);
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; ++k) {
          const Vec x = Row::load(keys[k], dim);
#pragma GCC unroll 16
          for (int r = 0; r < kCount; ++r) acc[r * kKeys + k] = fma_rn(q[r], x, acc[r * kKeys + k]);
        }
      }
      if (dim < dims_) {  // the last 8 dims of a row: nothing behind it may be read
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; ++k) {
          const Vec x = load_tail(keys[k], dim);
#pragma GCC unroll 16
          for (int r = 0; r < kCount; ++r) {
            acc[r * kKeys + k] = fma_rn(load_vec(query.rows[row + r] + dim), x, acc[r * kKeys + k]);
          }
        }
      }
      const Vec sums = sum_each(acc);
      if (key + kKeys <= leaf.high) {
#pragma GCC unroll 16
        for (int r = 0; r < kCount; ++r) {
          std::memcpy(scores.x[row + r] + key, reinterpret_cast<const float*>(&sums) + r * kKeys,
                      sizeof(float) * kKeys);
        }
        continue;
      }
      for (int r = 0; r < kCount; ++r) {
        for (int k = 0; k < leaf.high - key; ++k) scores.x[row + r][key + k] = sums[r * kKeys + k];
      }
    }
  }

  // Output rows from `row` on, kColumns vectors of columns at a time.
  template <int kCount>
  void weigh_rows(const Scores& scores, const Leaf& leaf, int row, Out& out) const {
    constexpr int kVectors = 4;
    const int next_low = leaf.next == nullptr ? kLeafKeys : leaf.next->low;
    const int next_high = leaf.next == nullptr ? 0 : leaf.next->high;
    for (int col = 0; col < kShape.head_dim_v; col += kVectors * kLanes) {
      Vec acc[kCount][kVectors] = {};
      if (col + kVectors * kLanes <= columns_) {
        for (int key = leaf.low; key < leaf.high; ++key) {
          const char* values = leaf.values[key];
          if (row == 0 && key >= next_low && key < next_high) {
            prefetch_row<kLocality>(leaf.next->values[key] + kv_row_bytes(kShape.kv, col),
                                    kv_row_bytes(kShape.kv, kVectors * kLanes));
          }
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) {
            const Vec x = Row::load(values, col + v * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < kCount; ++r) {
              acc[r][v] = fma_rn(broadcast(scores.x[row + r][key]), x, acc[r][v]);
            }
          }
        }
      } else {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          if (col + v * kLanes >= columns_) continue;
          for (int key = leaf.low; key < leaf.high; ++key) {
            const Vec x = load_tail(leaf.values[key], col + v * kLanes, columns_);
#pragma GCC unroll 16
            for (int r = 0; r < kCount; ++r) {
              acc[r][v] = fma_rn(broadcast(scores.x[row + r][key]), x, acc[r][v]);
            }
          }
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) store_vec(out.x[row + r] + col + v * kLanes, acc[r][v]);
      }
    }
  }

  // Like Row::load where fewer than 16 values of the row may be left.
  FLASHPORT_DEVICE Vec load_tail(const char* row, int dim, int dims) const {
    if (dim + kLanes <= dims) return Row::load(row, dim);
    alignas(64) char copy[kv_row_bytes(kShape.kv, 32)] = {};
    const int first = kShape.kv == KvFormat::kQ8_0 ? dim / 32 * 32 : dim;
    const int bytes = kv_row_bytes(kShape.kv, dims) - kv_row_bytes(kShape.kv, first);
    __builtin_memcpy(copy, row + kv_row_bytes(kShape.kv, first), static_cast<std::size_t>(bytes));
    return Row::load(copy, dim - first);
  }
  FLASHPORT_DEVICE Vec load_tail(const char* row, int dim) const { return load_tail(row, dim, dims_); }

  DecodeShared<kCfg>& shared_;
  int live_rows_, dims_, columns_, key_bytes_;
};

}  // namespace flashport::FLASHPORT_TARGET
