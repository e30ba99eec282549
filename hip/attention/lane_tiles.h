// The tile verbs of attention that work on a lane's registers, the same for MFMA and WMMA: softmax, rounding, output. A
// matrix product has a query in each column, S^T = K Q^T and O^T = V^T P^T, so that a lane has one query.
//
// A column of S^T [keys, queries] or O^T [DV, queries] is in two lanes, h = 0 and 1. Element i of lane h is the key or
// column 8 (i / 4) + 4 h + i % 4 (column_row). m is the same in both lanes, l each lane's own until store().
#pragma once

#include "common/device/attention/kernel.h"
#include "hip/attention/paged_copies.h"

namespace flashport::FLASHPORT_TARGET::attention {

// A column's elements in a lane, in the registers of kTiles products.
template <class Vector, int kTiles>
struct LaneColumn {
  static constexpr int kOfTile = sizeof(Vector) / sizeof(float), kCount = kTiles * kOfTile;
  Vector c[kTiles];

  FLASHPORT_DEVICE float get(int i) const { return c[i / kOfTile][i % kOfTile]; }
  FLASHPORT_DEVICE void set(int i, float x) { c[i / kOfTile][i % kOfTile] = x; }
};

// Vector: the registers of a product. kWaveRows queries, and as many rows of S^T or O^T, are a product's. A wave has a
// slice of V's columns.
template <AttentionConfig kCfg, class Vector>
class LaneTiles {
 protected:
  static constexpr AttentionShape kShape = kCfg.shape;
  static constexpr MathType kMath = kShape.math;
  static constexpr int kSlices = kCfg.tuning.slices, kColumns = kShape.head_dim_v / kSlices;
  static constexpr int kKeyVectors = kShape.head_dim_qk / 8;
  static constexpr int kKeyBlocks = kCfg.tuning.keys / kWaveRows,
                       kColumnBlocks = kShape.head_dim_v / kWaveRows / kSlices;

 public:
  static constexpr ScoreForm kForm = kShape.form;
  static constexpr int kKeys = kCfg.tuning.keys;
  static constexpr int kBlockRows = kCfg.tuning.rows;
  static constexpr int kRowSlots = 1;
  static constexpr bool kMasksFirst = true;
  static constexpr bool kMasksAll = kForm == ScoreForm::kAny && has(kShape.sources, KeySources::kBytes);

  struct Rows {
    float v;
    FLASHPORT_DEVICE float& operator[](int) { return v; }
    FLASHPORT_DEVICE float operator[](int) const { return v; }
  };
  using Scores = LaneColumn<Vector, kKeyBlocks>;
  using Out = LaneColumn<Vector, kColumnBlocks>;

  FLASHPORT_DEVICE static constexpr int row_slots() { return kRowSlots; }
  // The query of the sequence.
  FLASHPORT_DEVICE int row_of(int) const { return row_; }
  // The key of a tile that is the lane's first.
  FLASHPORT_DEVICE int first_key() const { return 4 * half_; }

  FLASHPORT_DEVICE static void clear(Rows& m, Rows& l, Out& out) {
    m.v = -kInfinity;
    l.v = 0.0f;
#pragma unroll
    for (Vector& c : out.c) c = Vector{};
  }

  // f(value, slot, offset of the key from first_key())
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
#pragma unroll
    for (int i = 0; i < Scores::kCount; ++i) {
      float x = scores.get(i);
      f(x, 0, column_row(i, 0));
      scores.set(i, x);
    }
  }
  static constexpr int kDrawnTogether = kKeys % 64 == 0 ? 16 : 8;
  // f(weights that share random bits, slot, offset of the first)
  template <class F>
  FLASHPORT_DEVICE void for_each_drawn(Scores& scores, F&& f) const {
#pragma unroll
    for (int first = 0; first < Scores::kCount; first += first % 4 == 0 ? 2 : 2 * kDrawnTogether - 2) {
      float drawn[kDrawnTogether];
#pragma unroll
      for (int i = 0; i < kDrawnTogether; ++i) drawn[i] = scores.get(first + i / 2 * 4 + i % 2);
      f([&](int i) FLASHPORT_INLINE -> float& { return drawn[i]; }, 0, column_row(first, 0));
#pragma unroll
      for (int i = 0; i < kDrawnTogether; ++i) scores.set(first + i / 2 * 4 + i % 2, drawn[i]);
    }
  }

  // P = exp2((S - m) scale), where m is the largest score of a query so far; `factors` bring O to that m.
  template <class State>
  FLASHPORT_DEVICE static void exponentiate(Scores& scores, float scale, State& state, Rows& factors) {
    float most = scores.get(0);
#pragma unroll
    for (int i = 1; i < Scores::kCount; ++i) most = maximum(most, scores.get(i));
    most = maximum(state.m.v, join_halves(most, [](float x, float y) { return maximum(x, y); }));
    const float reference = most == -kInfinity ? 0.0f : most * scale;
    factors.v = exp2_approx(state.m.v * scale - reference);  // 1 where m stays, so that hidden tiles change no bit
    state.m.v = most;
    Floats2 sum = {};
#pragma unroll
    for (int i = 0; i < Scores::kCount; i += 2) {
      const Floats2 two = {scores.get(i), scores.get(i + 1)};
      const Floats2 exponents = __builtin_elementwise_fma(two, Floats2(scale), Floats2(-reference));
      const Floats2 weights = {exp2_approx(exponents[0]), exp2_approx(exponents[1])};
      sum += weights;
      scores.set(i, weights[0]);
      scores.set(i + 1, weights[1]);
    }
    state.l.v = fma_rn(state.l.v, factors.v, sum[0] + sum[1]);
  }
  FLASHPORT_DEVICE static void scale(Out& out, const Rows& factors) {
#pragma unroll
    for (Vector& c : out.c) c *= factors.v;
  }

  // out = O / l and lse.
  template <class State>
  FLASHPORT_DEVICE void store(const AttentionParams& params, const WorkTile& work, const State& state, float scale,
                              const Out& out) const {
    const AttentionParams& p = reread(params);
    const float l = join_halves(state.l.v, [](float x, float y) { return x + y; });
    const float m = state.m.v == -kInfinity ? -kInfinity : state.m.v * scale;
    const float factor = finish_row(p, work, row_, m, l, half_ == 0 && slice_ == 0);
    if (row_ >= work.q_len) return;
    const int first = slice_ * kColumns + 4 * half_, columns = p.head_dim_v - first;
    if (is_partial(work)) {
      if (factor != 0.0f) store_floats(out, factor, partial_output(p, work, row_) + first);
      return;
    }
    auto* to = static_cast<std::uint16_t*>(p.out.data) + output_offset(p, work, row_) + first * p.out.stride_dim;
    if (p.out.stride_dim == 1) {
      store_fours(p, out, factor, columns, [&](int column, unsigned low, unsigned high) FLASHPORT_INLINE {
        reinterpret_cast<UnalignedWords<2>*>(to + column)->words = Words2{low, high};
      });
    } else {
      store_fours(p, out, factor, columns, [&](int column, unsigned low, unsigned high) FLASHPORT_INLINE {
        std::uint16_t* four = to + column * p.out.stride_dim;
        four[0] = static_cast<std::uint16_t>(low);
        four[p.out.stride_dim] = static_cast<std::uint16_t>(low >> 16);
        four[2 * p.out.stride_dim] = static_cast<std::uint16_t>(high);
        four[3 * p.out.stride_dim] = static_cast<std::uint16_t>(high >> 16);
      });
    }
  }

 protected:
  // Lane n + h kWaveRows of a wave has query n. kSlices neighbouring waves have the same queries.
  FLASHPORT_DEVICE void take_lane(const WorkTile& work, int thread) {
    n_ = thread % kWaveRows;
    half_ = thread / kWaveRows % 2;
    slice_ = thread / kWaveSize % kSlices;
    row_ = work.first_row + thread / kWaveSize / kSlices * kWaveRows + n_;
  }
  // The address of a query of the sequence, whose elements have `bytes`, or that of zeros.
  FLASHPORT_DEVICE static GlobalBytes query(const AttentionParams& p, const WorkTile& work, int row, int bytes = 2) {
    const std::int64_t at =
        work.seq * p.q.stride_seq + (work.q_begin + row) * p.q.stride_token + work.head * p.q.stride_head;
    return row < work.q_len ? (GlobalBytes)p.q.data + bytes * at : zero_row();
  }
  // f(Constant of what queries are stored as). kFloat16 stands for the math type.
  template <class F>
  FLASHPORT_DEVICE static void with_query_type(const AttentionParams& p, const F& f) {
    if constexpr (has(kShape.sources, KeySources::kFp8)) {
      if (p.q.dtype == DType::kFp8E4M3) return f(Constant<DType::kFp8E4M3>());
    }
    if constexpr (has(kShape.sources, KeySources::kBytes)) {
      if (p.q.dtype == DType::kBFloat16) return f(Constant<DType::kBFloat16>());
    }
    f(Constant<DType::kFloat16>());
  }
  // Eight values of the query at `query` in the math type: zeros after the head's dims.
  template <DType kType>
  FLASHPORT_DEVICE static Words4 load_query(const AttentionParams& p, GlobalBytes query, int vector) {
    const bool is_live = vector * 8 < p.head_dim_qk;
    if constexpr (kType == DType::kFp8E4M3) {
      const auto x = load_words<2>(is_live ? query + vector * 8 : zero_row());
      const Words2 low = widen_e4m3<kMath>(x[0]), high = widen_e4m3<kMath>(x[1]);
      return {low[0], low[1], high[0], high[1]};
    } else {
      Words4 x = load_words<4>(is_live ? query + vector * kVectorBytes : zero_row());
      if constexpr (kType == DType::kBFloat16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = bf16_to_halves(x[i]);
      }
      return x;
    }
  }

  int n_ = 0, half_ = 0;
  int slice_ = 0;  // of V's columns
  int row_ = 0;    // of the sequence

 private:
  FLASHPORT_DEVICE static void store_floats(const Out& out, float factor, float* to) {
#pragma unroll
    for (int i = 0; i < Out::kCount; i += 4) {
      const Floats4 four = {out.get(i) * factor, out.get(i + 1) * factor, out.get(i + 2) * factor,
                            out.get(i + 3) * factor};
      *reinterpret_cast<Floats4*>(to + column_row(i, 0)) = four;
    }
  }
  // f(column from the lane's first, four of them rounded). A row that sees no key is 0 even if its sums are NaN.
  template <class F>
  FLASHPORT_DEVICE static void store_fours(const AttentionParams& p, const Out& out, float factor, int columns,
                                           const F& f) {
    const auto rounded = [&](int i) FLASHPORT_INLINE {
      const float low = out.get(i) * factor, high = out.get(i + 1) * factor;
      if (factor == 0.0f) return 0u;
      if constexpr (has(kShape.sources, KeySources::kBytes)) {
        if (p.out.dtype == DType::kBFloat16) return pack<MathType::kBf16>(low, high);
      }
      return pack<kMath>(low, high);
    };
#pragma unroll
    for (int i = 0; i < Out::kCount; i += 4) {
      if (column_row(i, 0) < columns) f(column_row(i, 0), rounded(i), rounded(i + 2));
    }
  }
};

}  // namespace flashport::FLASHPORT_TARGET::attention
