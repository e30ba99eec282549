// The tile verbs of attention on a CPU. Queries, scores and outputs of a work tile lie in the block's memory, so the
// types that the text hands about are empty. multiply_keys() notes a product and settle_keys() computes it: so the
// scores may take the place of the weights before them.
//
// Products<kCfg>, of the header that the target names, packs a key tile once for all rows and multiplies groups of
// kGroupRows rows. Of a tile with masks a group takes only the keys that some of its rows see, in whole steps of
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
    tile_ = tile;
    masked_ = masked;
  }
  template <int kLater>
  void settle_keys(Scores&) {
    for (int first = 0; first < kBlockRows; first += kGroupRows) keys_of_[first / kGroupRows] = group_keys(first);
    operands_.pack_keys(work_, tile_);
    operands_.multiply_keys(memory_.scores, kScorePitch, rows_, keys_of_);
  }

  // f(score, slot, offset of its key in the tile)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores&, const F& f) const {
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

  // f(eight weights, slot, offset of the first), the weights that one call of philox.h serves
  template <class F>
  FLASHPORT_DEVICE void for_each_eight(Scores&, const F& f) const {
    static_assert(kStep == kPhiloxKeys);
    for (int slot = 0; slot < rows_; ++slot) {
      const KeySpan keys = keys_of(slot);
      for (int first = keys.low; first < keys.high; first += kPhiloxKeys) {
        for (int offset = first; offset < first + 8; offset += 2) {
          float* x = score_row(slot) + offset;
          f([x](int i) -> float& { return x[i / 2 * 8 + i % 2]; }, slot, offset);
        }
      }
    }
  }

  // P = exp2(scale (S - m)) with m the new maxima, joined to the sums l; factors = exp2(scale (m before - m))
  template <class State>
  void exponentiate(Scores&, float scale, State& state, Rows& factors) const {
    constexpr auto max = [](Vec a, Vec b) { return larger(a, b); };
    constexpr auto add = [](Vec a, Vec b) { return a + b; };
    for (int first = 0; first < rows_; first += kVecWidth) {
      const int count = minimum(rows_ - first, kVecWidth);
      Vec x[kVecWidth];
      for (int i = 0; i < count; ++i) x[i] = row_max(first + i);
      for (int i = count; i < kVecWidth; ++i) x[i] = broadcast(-kInfinity);
      const Vec before = load_vec(state.m.v + first);
      const Vec m = larger(before, fold_each(x, max));
      const Vec reference = m == -kInfinity ? Vec{} : m * scale;
      const Vec factor = exp2_weight(before * scale - reference);  // from the rounded reference that l has
      for (int i = 0; i < count; ++i) x[i] = weigh_row(first + i, scale, reference[i]);
      for (int i = count; i < kVecWidth; ++i) x[i] = Vec{};
      store_vec(state.m.v + first, m);
      store_vec(factors.v + first, factor);
      store_vec(state.l.v + first, fma_rn(load_vec(state.l.v + first), factor, fold_each(x, add)));
    }
  }
  Operand to_operand(const Scores&) const {
    if constexpr (kForm == ScoreForm::kAny) {  // exponentiate() left the weights in fp32
      for (int slot = 0; slot < rows_; ++slot) {
        const KeySpan keys = keys_of(slot);
        float* x = score_row(slot);
        for (int key = keys.low; key < keys.high; key += kStep) {
          Operands::store_weights(x, key, load_vec(x + key), load_vec(x + key + kVecWidth));
        }
      }
    }
    return {};
  }

  // O += P V, of tile number `tile`
  template <class Masked>
  void add_values(Out&, const Operand&, int tile, Masked) {
    operands_.pack_values(work_, tile);
    operands_.add_values(memory_.out, out_pitch_, memory_.scores, kScorePitch, rows_, keys_of_);
  }
  void settle_values(Out&) const {}

  void scale(Out&, const Rows& factors) const {
    for (int slot = 0; slot < rows_; ++slot) {
      const float factor = factors[slot];
      if (factor == 1.0f) continue;
      float* x = out_row(slot);
      for (int column = 0; column < p_.head_dim_v; column += kVecWidth) {
        store_vec(x + column, load_vec(x + column) * factor);
      }
    }
  }

  template <class State>
  void store(const AttentionParams& p, const WorkTile& work, State& state, float scale, Out&) const {
    const int bytes = p.out.dtype == DType::kFloat32 ? 4 : 2;
    for (int slot = 0; slot < live_rows(work); ++slot) {
      const int row = work.first_row + slot;
      const float factor = finish_row(p, work, row, state.m[slot] * scale, state.l[slot], true);
      char* to = static_cast<char*>(p.out.data) + output_offset(p, work, row) * bytes;
      const float* x = out_row(slot);
      for (int column = 0; column < p.head_dim_v; column += kVecWidth) {
        const Vec value = factor == 0.0f ? Vec{} : load_vec(x + column) * factor;
        kv::store_values(to + column * bytes, p.out.dtype, value, p.head_dim_v - column);
      }
    }
  }

 private:
  static constexpr int kScorePitch = kKeys + kVecWidth;

  static int live_rows(const WorkTile& work) { return minimum(kBlockRows, work.q_len - work.first_row); }
  float* out_row(int slot) const { return memory_.out + slot * out_pitch_; }
  float* score_row(int slot) const { return memory_.scores + slot * kScorePitch; }

  // The keys of the tile, counted from its first, that the rows of the group from slot `first` on take.
  KeySpan group_keys(int first) const {
    if (first >= rows_) return {0, 0};
    if (!masked_) return {0, kKeys};
    const int first_key = tile_ * kKeys;
    const int low = visible_keys(p_, work_, row_of(first)).low - first_key;
    const int high = visible_keys(p_, work_, row_of(minimum(first + kGroupRows, rows_) - 1)).high - first_key;
    constexpr int kKeyStep = Operands::kKeyStep;
    const KeySpan keys = {maximum(low, 0) / kKeyStep * kKeyStep,
                          minimum((maximum(high, 0) + kKeyStep - 1) / kKeyStep * kKeyStep, kKeys)};
    return keys.low < keys.high ? keys : KeySpan{0, 0};
  }
  KeySpan keys_of(int slot) const { return keys_of_[slot / kGroupRows]; }

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
  FLASHPORT_DEVICE Vec weigh_row(int slot, float scale, float reference) const {
    const KeySpan keys = keys_of(slot);
    float* x = score_row(slot);
    const Vec factor = broadcast(scale), shift = broadcast(-reference);
    Vec even = {}, odd = {};
    for (int key = keys.low; key < keys.high; key += kStep) {
      const Vec a = exp2_weight(fma_rn(load_vec(x + key), factor, shift));
      const Vec b = exp2_weight(fma_rn(load_vec(x + key + kVecWidth), factor, shift));
      even += a;
      odd += b;
      if constexpr (kForm == ScoreForm::kPlain) {
        Operands::store_weights(x, key, a, b);
      } else {
        store_vec(x + key, a);
        store_vec(x + key + kVecWidth, b);
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
  int tile_ = 0;
  bool masked_ = false;
  KeySpan keys_of_[kBlockRows / kGroupRows];  // of each group
};

}  // namespace flashport::FLASHPORT_TARGET::attention
