// The tile verbs of attention on a CPU: fp32 throughout, whatever type the tensors have. Queries, scores and outputs of
// a work tile lie in the block's memory, and the types that the text moves about are handles to them. multiply_keys()
// notes a product and settle_keys() computes it, so that the scores may take the place of the weights before them.
//
// A product packs its key tile, which then serves all rows. Of a tile with masks only the rows that see some of its
// keys are computed, each as it would be alone.
#pragma once

#include "common/device/attention/scores.h"
#include "cpu/arch/lane_sums.h"
#include "cpu/attention/products.h"
#include "cpu/kv/values.h"

namespace flashport::FLASHPORT_TARGET::attention {

template <AttentionConfig kCfg>
struct AttentionMemory {
  static constexpr int kRows = kCfg.tuning.rows, kKeys = kCfg.tuning.keys;
  // Dims are padded to whole vectors, and rows are one vector longer, lest they share few sets of a cache.
  alignas(64) float q[kRows * (kCfg.shape.head_dim_qk + kVecWidth)];
  alignas(64) float out[kRows * (kCfg.shape.head_dim_v + kVecWidth)];
  alignas(64) float scores[kRows * kKeys];  // weights after the softmax
  alignas(64) float packed[kKeys * (kCfg.shape.head_dim_qk > kCfg.shape.head_dim_v ? kCfg.shape.head_dim_qk
                                                                                   : kCfg.shape.head_dim_v)];
};

template <AttentionConfig kCfg>
class AttentionTiles {
 public:
  static constexpr ScoreForm kForm = kCfg.shape.form;
  static constexpr int kKeys = kCfg.tuning.keys, kBlockRows = kCfg.tuning.rows;
  static constexpr int kRowSlots = kBlockRows;
  static_assert(kKeys == kPanel);

  struct Rows {
    float v[kBlockRows];
    float& operator[](int slot) { return v[slot]; }
    float operator[](int slot) const { return v[slot]; }
  };
  struct Out {};
  // The slots [first, last), which see some keys of the tile.
  struct Scores {
    int first, last;
  };
  using Operand = Scores;

  AttentionTiles(const AttentionParams& p, AttentionMemory<kCfg>& memory)
      : p_(p),
        memory_(memory),
        q_pitch_(padded(p.head_dim_qk) + kVecWidth),
        out_pitch_(padded(p.head_dim_v) + kVecWidth) {}

  int row_slots() const { return rows_; }
  int row_of(int slot) const { return work_.first_row + slot; }
  static constexpr int first_key() { return 0; }

  // Loads the queries and clears the sums of their outputs.
  void begin(const WorkTile& work) {
    work_ = work;
    rows_ = live_rows(work);
    for (int slot = 0; slot < rows_; ++slot) {
      for (int column = 0; column < p_.head_dim_v; column += kVecWidth) store_vec(out_row(slot) + column, Vec{});
    }
    kv::with_loader(p_.q.dtype, [&](auto row, int bytes) {
      const char* from = static_cast<const char*>(p_.q.data) +
                         (work.seq * p_.q.stride_seq + (work.q_begin + work.first_row) * p_.q.stride_token +
                          work.head * p_.q.stride_head) *
                             bytes;
      for (int slot = 0; slot < rows_; ++slot) {
        for (int dim = 0; dim < p_.head_dim_qk; dim += kVecWidth) {
          store_vec(memory_.q + slot * q_pitch_ + dim,
                    kv::load_values(row, from + slot * p_.q.stride_token * bytes, bytes, dim, p_.head_dim_qk - dim));
        }
      }
    });
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
  void multiply_keys(Scores& scores, int tile, Masked masked) {
    scores = {0, rows_};
    tile_ = tile;
    if constexpr (masked) {
      while (scores.first < rows_ && !sees(scores.first, tile)) ++scores.first;
      while (scores.last > scores.first && !sees(scores.last - 1, tile)) --scores.last;
    }
  }
  template <int kLater>
  void settle_keys(Scores& scores) const {
    pack_keys(tile_);
    multiply<false>(memory_.scores + scores.first * kKeys, kKeys, memory_.q + scores.first * q_pitch_, q_pitch_,
                    scores.last - scores.first, memory_.packed, kKeys / kVecWidth, p_.head_dim_qk);
  }

  // f(score, slot, offset of its key in the tile)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, const F& f) const {
    for (int slot = scores.first; slot < scores.last; ++slot) {
      float* x = memory_.scores + slot * kKeys;
      for (int offset = 0; offset < kKeys; ++offset) f(x[offset], slot, offset);
    }
  }

  // f(eight weights, slot, offset of the first), the weights that one call of philox.h serves
  template <class F>
  FLASHPORT_DEVICE void for_each_eight(Scores& weights, const F& f) const {
    for (int slot = weights.first; slot < weights.last; ++slot) {
      for (int group = 0; group < kKeys / 8; ++group) {
        const int offset = group / 4 * kPhiloxKeys + group % 4 * 2;
        float* x = memory_.scores + slot * kKeys + offset;
        f([x](int i) -> float& { return x[i / 2 * 8 + i % 2]; }, slot, offset);
      }
    }
  }

  // P = exp2(scale (S - m)) with the new maxima m, which are added up; factors = exp2(scale (old m - m))
  template <class State>
  void exponentiate(Scores& scores, float scale, State& state, Rows& factors) const {
    for (int slot = scores.first; slot < scores.last; ++slot) {
      float* x = memory_.scores + slot * kKeys;
      Vec most = load_vec(x);
      for (int key = kVecWidth; key < kKeys; key += kVecWidth) most = larger(most, load_vec(x + key));
      const float m = maximum(state.m[slot], fold_vec(most, [](Vec a, Vec b) { return larger(a, b); }));
      const float reference = m == -kInfinity ? 0.0f : m * scale;
      factors[slot] = exp2_approx(state.m[slot] * scale - reference);
      Vec sum = {};
      for (int key = 0; key < kKeys; key += kVecWidth) {
        const Vec weight = exp2_approx(fma_rn(load_vec(x + key), broadcast(scale), broadcast(-reference)));
        store_vec(x + key, weight);
        sum += weight;
      }
      state.m[slot] = m;
      state.l[slot] = fma_rn(state.l[slot], factors[slot], fold_vec(sum, [](Vec a, Vec b) { return a + b; }));
    }
    scaled_ = scores;
  }
  static Operand to_operand(const Scores& weights) { return weights; }

  // O += P V, of tile number `tile`
  template <class Masked>
  void add_values(Out&, const Operand& weights, int tile, Masked) const {
    pack_values(tile);
    multiply<true>(out_row(weights.first), out_pitch_, memory_.scores + weights.first * kKeys, kKeys,
                   weights.last - weights.first, memory_.packed, padded(p_.head_dim_v) / kVecWidth, kKeys);
  }
  void settle_values(Out&) const {}

  // The rows of the last exponentiate() have factors. One of 1 changes nothing.
  void scale(Out&, const Rows& factors) const {
    for (int slot = scaled_.first; slot < scaled_.last; ++slot) {
      if (factors[slot] == 1.0f) continue;
      float* x = out_row(slot);
      for (int column = 0; column < p_.head_dim_v; column += kVecWidth) {
        store_vec(x + column, load_vec(x + column) * factors[slot]);
      }
    }
  }

  template <class State>
  void store(const AttentionParams& p, const WorkTile& work, State& state, float scale, Out&) const {
    const int bytes = p.out.dtype == DType::kFloat32 ? 4 : 2;
    for (int slot = 0; slot < live_rows(work); ++slot) {
      const float factor = finish_row(p, work, work.first_row + slot, state.m[slot] * scale, state.l[slot], true);
      const std::int64_t at = output_offset(p, work, work.first_row + slot);
      char* to = static_cast<char*>(p.out.data) + at * bytes;
      const float* x = out_row(slot);
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
  static int padded(int dims) { return (dims + kVecWidth - 1) / kVecWidth * kVecWidth; }
  static int live_rows(const WorkTile& work) { return minimum(kBlockRows, work.q_len - work.first_row); }
  float* out_row(int slot) const { return memory_.out + slot * out_pitch_; }

  bool sees(int slot, int tile) const {
    const KeySpan span = visible_keys(p_, work_, row_of(slot));
    return span.low < (tile + 1) * kKeys && span.high > tile * kKeys && span.low < span.high;
  }

  // f(KvRow of the element type, its bytes, key of the tile, the key's row)
  template <class F>
  FLASHPORT_DEVICE void visit_keys(const StridedRows& rows, int tile, const F& f) const {
    kv::with_loader(rows.dtype, [&](auto row, int bytes) {
      const char* from =
          static_cast<const char*>(rows.data) +
          (work_.seq * rows.stride_seq + (work_.k_begin + std::int64_t{tile} * kKeys) * rows.stride_token +
           work_.head / p_.group_size * rows.stride_head) *
              bytes;
      const int keys = minimum(kKeys, work_.kv_len - tile * kKeys);
      for (int key = 0; key < keys; ++key) f(row, bytes, key, from + key * rows.stride_token * bytes);
    });
  }

  // K^T. What lies at keys that there are not is hidden.
  void pack_keys(int tile) const {
    visit_keys(p_.k, tile, [&](auto row, int bytes, int key, const char* from) {
      for (int dim = 0; dim < p_.head_dim_qk; dim += kVecWidth) {
        const Vec x = kv::load_values(row, from, bytes, dim, p_.head_dim_qk - dim);
        for (int i = 0; i < kVecWidth && dim + i < p_.head_dim_qk; ++i) memory_.packed[(dim + i) * kPanel + key] = x[i];
      }
    });
  }
  // V, with zeros at keys that there are not: their weights are 0, and no number times 0 is anything else.
  void pack_values(int tile) const {
    const int columns = padded(p_.head_dim_v);
    for (int key = minimum(kKeys, work_.kv_len - tile * kKeys); key < kKeys; ++key) {
      for (int column = 0; column < columns; column += kVecWidth) store_vec(value_at(key, column), Vec{});
    }
    visit_keys(p_.v, tile, [&](auto row, int bytes, int key, const char* from) {
      for (int column = 0; column < columns; column += kVecWidth) {
        store_vec(value_at(key, column), kv::load_values(row, from, bytes, column, p_.head_dim_v - column));
      }
    });
  }
  float* value_at(int key, int column) const {
    return memory_.packed + column / kPanel * kPanel * kKeys + key * kPanel + column % kPanel;
  }

  const AttentionParams& p_;
  AttentionMemory<kCfg>& memory_;
  int q_pitch_, out_pitch_;
  WorkTile work_ = {};
  int rows_ = 0;
  int tile_ = 0;
  mutable Scores scaled_ = {};
};

}  // namespace flashport::FLASHPORT_TARGET::attention
