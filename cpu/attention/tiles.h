// The tile verbs of attention on a CPU. Queries, scores and outputs of a work tile lie in the block's memory, so the
// types that the text hands about are empty. The verbs note what there is to do, and add_values() does it for one group
// of rows after the other, whose scores so stay in the first-level cache from Q K^T to P V. Where the text itself
// visits scores or weights, they are computed for all rows first.
//
// Products<kCfg>, of the header that the target names, packs a key tile once for all groups, and multiplies groups of
// kGroupRows rows. From a tile with masks a group takes only the keys that some of its rows see, in whole steps of
// kKeyStep. That changes no bits: what a row does not see has weight 0 either way.
#pragma once

#include "common/device/attention/scores.h"
#include "cpu/arch/lane_sums.h"
#include "cpu/kv/values.h"
#include FLASHPORT_ATTENTION_PRODUCTS_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

template <AttentionConfig kCfg>
class AttentionTiles {
  using Operands = Products<kCfg>;
  static constexpr int kGroupRows = Operands::kGroupRows;
  static constexpr int kStep = kVecWidth * 2;  // keys that the softmax takes at a time

 public:
  static constexpr ScoreForm kForm = kCfg.shape.form;
  static constexpr int kKeys = kCfg.tuning.keys, kBlockRows = kCfg.tuning.rows;
  static constexpr int kRowSlots = kBlockRows;
  static_assert(kBlockRows % kGroupRows == 0 && kBlockRows % kVecWidth == 0 && kKeys % Operands::kKeyStep == 0);
  static_assert(Operands::kKeyStep % kStep == 0);

  struct Memory {
    typename Operands::Memory operands;
    // Rows are one vector longer, lest they share few sets of a cache.
    alignas(64) float out[kBlockRows * (kCfg.shape.head_dim_v + kVecWidth)];
    alignas(64) float scores[kBlockRows * (kKeys + kVecWidth)];  // then the weights
  };
  struct Rows {
    alignas(64) float v[kBlockRows];
    float& operator[](int slot) { return v[slot]; }
    float operator[](int slot) const { return v[slot]; }
  };
  struct Out {};
  struct Scores {};
  struct Operand {};

  AttentionTiles(const AttentionParams& p, Memory& memory)
      : p_(p), memory_(memory), operands_(p, memory.operands), out_pitch_(Operands::padded(p.head_dim_v) + kVecWidth) {}

  int row_slots() const { return rows_; }
  int row_of(int slot) const { return work_.first_row + slot; }
  static constexpr int first_key() { return 0; }

  // Loads the queries and clears the sums of their outputs.
  void begin(const WorkTile& work) {
    work_ = work;
    rows_ = live_rows(work);
    operands_.load_queries(work, rows_);
    for (int i = 0; i < rows_ * out_pitch_; i += kVecWidth) store_vec(memory_.out + i, Vec{});
  }
  void release_queries() const {}
  // begin() clears the outputs, and store() reads none of a row that saw no key.
  void clear(Rows& m, Rows& l, Out&) const {
    for (int slot = 0; slot < kBlockRows; ++slot) {
      m[slot] = -kInfinity;
      l[slot] = 0.0f;
    }
  }

  void take_turn() const {}
  void give_turn() const {}

  // S = Q K^T, of tile number `tile`
  template <class Masked>
  void multiply_keys(Scores&, int tile, Masked masked) {
    next_tile_ = tile;
    next_masked_ = masked;
  }
  template <int kLater>
  void settle_keys(Scores&) {
    tile_ = next_tile_;
    for (int first = 0; first < kBlockRows; first += kGroupRows) {
      keys_of_[first / kGroupRows] = group_keys(first, next_masked_);
    }
    operands_.pack_keys(work_, tile_);
    done_ = Done::kNothing;
  }

  // f(score, slot, offset of its key in the tile)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores&, const F& f) const {
    multiply_groups();
    for (int slot = 0; slot < rows_; ++slot) {
      const KeySpan keys = keys_of(slot);
      for (int first = keys.low; first < keys.high; first += kStep) {
        float* x = score_row(slot) + first;
        for (int i = 0; i < kStep; ++i) {
          float value = x[i];  // a copy, so that f may be computed for a vector of them
          f(value, slot, first + i);
          x[i] = value;
        }
      }
    }
  }

  static constexpr int kDrawnTogether = 8;
  // f(weights that share random bits, slot, offset of the first)
  template <class F>
  FLASHPORT_DEVICE void for_each_drawn(Scores&, const F& f) const {
    static_assert(Operands::kKeyStep % 32 == 0);
    for (int slot = 0; slot < rows_; ++slot) {
      const KeySpan keys = keys_of(slot);
      for (int first = keys.low; first < keys.high; first += 32) {
        for (int offset = first; offset < first + 8; offset += 2) {
          float* x = score_row(slot) + offset;
          f([x](int i) -> float& { return x[i / 2 * 8 + i % 2]; }, slot, offset);
        }
      }
    }
  }

  // P = exp2(scale (S - m)) with m the new maxima, joined to the sums l. The outputs come to the new maxima too.
  template <class State>
  void exponentiate(Scores&, float scale, State& state, Rows&) {
    maxima_ = state.m.v;
    sums_ = state.l.v;
    scale_ = scale;
    if (drops<kForm>(p_)) {  // which visits the weights
      multiply_groups();
      for (int first = 0; first < rows_; first += kGroupRows) weigh_group(first);
      done_ = Done::kWeights;
    }
  }
  static Operand to_operand(const Scores&) { return {}; }
  void scale(Out&, const Rows&) const {}

  // O += P V, of tile number `tile`
  template <class Masked>
  void add_values(Out&, const Operand&, int tile, Masked) {
    operands_.pack_values(work_, tile);
    for (int first = 0; first < rows_; first += kGroupRows) {
      const KeySpan keys = keys_of(first);
      if (keys.low == keys.high) continue;
      if (done_ == Done::kNothing) multiply_group(first);
      if (done_ != Done::kWeights) weigh_group(first);
      if (drops<kForm>(p_)) round_group(first);
      operands_.add_values(out_row(first), out_pitch_, score_row(first), kScorePitch, group_rows(first), keys);
    }
  }
  void settle_values(Out&) const {}

  template <class State>
  void store(const AttentionParams& p, const WorkTile& work, State& state, float scale, Out&) const {
    const int bytes = p.out.dtype == DType::kFloat32 ? 4 : 2;
    for (int slot = 0; slot < live_rows(work); ++slot) {
      const int row = work.first_row + slot;
      const float factor = finish_row(p, work, row, state.m[slot] * scale, state.l[slot], true);
      const float* x = out_row(slot);
      if (is_partial(work)) {
        if (factor != 0.0f) store_partial(partial_output(p, work, row), x, factor, p.head_dim_v);
        continue;
      }
      const std::int64_t at = output_offset(p, work, row);
      char* to = static_cast<char*>(p.out.data) + at * bytes;
      for (int column = 0; column < p.head_dim_v; column += kVecWidth) {
        const Vec value = factor == 0.0f ? Vec{} : load_vec(x + column) * factor;
        if (p.out.stride_dim == 1) {
          kv::store_values(to + column * bytes, p.out.dtype, value, p.head_dim_v - column);
          continue;
        }
        for (int i = 0; i < minimum(kVecWidth, p.head_dim_v - column); ++i) {
          store_as(p.out.data, p.out.dtype, at + (column + i) * p.out.stride_dim, value[i]);
        }
      }
    }
  }

 private:
  static constexpr int kScorePitch = kKeys + kVecWidth;

  static void store_partial(float* to, const float* x, float factor, int columns) {
    for (int column = 0; column < columns; column += kVecWidth) {
      kv::store_values(reinterpret_cast<char*>(to + column), DType::kFloat32, load_vec(x + column) * factor,
                       columns - column);
    }
  }

  static int live_rows(const WorkTile& work) { return minimum(kBlockRows, work.q_len - work.first_row); }
  float* out_row(int slot) const { return memory_.out + slot * out_pitch_; }
  // Groups take turns in one place unless the scores of all are wanted.
  float* score_row(int slot) const {
    return memory_.scores + (done_ == Done::kNothing ? slot % kGroupRows : slot) * kScorePitch;
  }
  int group_rows(int first) const { return minimum(rows_ - first, kGroupRows); }

  // The keys of the tile, counted from its first, that the rows of the group from slot `first` on take.
  KeySpan group_keys(int first, bool masked) const {
    if (first >= rows_) return {0, 0};
    if (!masked) return {0, kKeys};
    const int first_key = tile_ * kKeys;
    const int low = visible_keys(p_, work_, row_of(first)).low - first_key;
    const int high = visible_keys(p_, work_, row_of(first + group_rows(first) - 1)).high - first_key;
    constexpr int kKeyStep = Operands::kKeyStep;
    const KeySpan keys = {maximum(low, 0) / kKeyStep * kKeyStep,
                          minimum((maximum(high, 0) + kKeyStep - 1) / kKeyStep * kKeyStep, kKeys)};
    return keys.low < keys.high ? keys : KeySpan{0, 0};
  }
  KeySpan keys_of(int slot) const { return keys_of_[slot / kGroupRows]; }

  void multiply_group(int first) const {
    operands_.multiply_keys(score_row(first), kScorePitch, first, group_rows(first), keys_of(first));
  }

  void multiply_groups() const {
    if (done_ != Done::kNothing) return;
    done_ = Done::kScores;
    for (int first = 0; first < rows_; first += kGroupRows) multiply_group(first);
  }

  // Scores to weights, kVecWidth rows at a time.
  void weigh_group(int group) const {
    constexpr auto max = [](Vec a, Vec b) { return larger(a, b); };
    constexpr auto add = [](Vec a, Vec b) { return a + b; };
    for (int first = group; first < minimum(group + kGroupRows, rows_); first += kVecWidth) {
      const int count = minimum(minimum(group + kGroupRows, rows_) - first, kVecWidth);
      Vec x[kVecWidth];
      for (int i = 0; i < count; ++i) x[i] = row_max(first + i);
      for (int i = count; i < kVecWidth; ++i) x[i] = broadcast(-kInfinity);
      const Vec before = load_vec(maxima_ + first);
      const Vec m = larger(before, fold_each(x, max));
      const Vec reference = m == -kInfinity ? Vec{} : m * scale_;
      const Vec factor = exp2_weight(before * scale_ - reference);  // from the rounded reference that the sums have
      for (int i = 0; i < count; ++i) x[i] = weigh_row(first + i, reference[i]);
      for (int i = count; i < kVecWidth; ++i) x[i] = Vec{};
      store_vec(maxima_ + first, m);
      store_vec(sums_ + first, fma_rn(load_vec(sums_ + first), factor, fold_each(x, add)));
      for (int i = 0; i < count; ++i) {
        if (factor[i] != 1.0f) scale_row(first + i, factor[i]);
      }
    }
  }
  void scale_row(int slot, float factor) const {
    float* x = out_row(slot);
    for (int column = 0; column < p_.head_dim_v; column += kVecWidth) {
      store_vec(x + column, load_vec(x + column) * factor);
    }
  }
  // Rounds the weights that dropout has visited.
  void round_group(int first) const {
    const KeySpan keys = keys_of(first);
    for (int slot = first; slot < first + group_rows(first); ++slot) {
      float* x = score_row(slot);
      for (int key = keys.low; key < keys.high; key += kStep) {
        Operands::store_weights(x, key, load_vec(x + key), load_vec(x + key + kVecWidth));
      }
    }
  }

  FLASHPORT_DEVICE Vec row_max(int slot) const {
    const KeySpan keys = keys_of(slot);
    const float* x = score_row(slot);
    Vec even = broadcast(-kInfinity), odd = even;
    for (int key = keys.low; key < keys.high; key += kStep) {
      even = larger(even, load_vec(x + key));
      odd = larger(odd, load_vec(x + key + kVecWidth));
    }
    return larger(even, odd);
  }
  // Puts a row's weights in the place of its scores, and returns their sums.
  FLASHPORT_DEVICE Vec weigh_row(int slot, float reference) const {
    const KeySpan keys = keys_of(slot);
    float* x = score_row(slot);
    const Vec factor = broadcast(scale_), shift = broadcast(-reference);
    const bool keeps_floats = drops<kForm>(p_);
    Vec even = {}, odd = {};
    for (int key = keys.low; key < keys.high; key += kStep) {
      const Vec a = exp2_weight(fma_rn(load_vec(x + key), factor, shift));
      const Vec b = exp2_weight(fma_rn(load_vec(x + key + kVecWidth), factor, shift));
      even += a;
      odd += b;
      if (keeps_floats) {
        store_vec(x + key, a);
        store_vec(x + key + kVecWidth, b);
      } else {
        Operands::store_weights(x, key, a, b);
      }
    }
    return even + odd;
  }

  const AttentionParams& p_;
  Memory& memory_;
  Operands operands_;
  const int out_pitch_;
  WorkTile work_ = {};
  int rows_ = 0;
  int tile_ = 0, next_tile_ = 0;
  bool next_masked_ = false;
  KeySpan keys_of_[kBlockRows / kGroupRows];  // of each group
  // What has been computed of tile number tile_ for all rows, and what exponentiate() was given.
  enum class Done { kNothing, kScores, kWeights };
  mutable Done done_ = Done::kNothing;
  float *maxima_ = nullptr, *sums_ = nullptr;
  float scale_ = 0.0f;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
