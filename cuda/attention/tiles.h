// The tile verbs of attention on wgmma, for a warpgroup that has 64 queries of the block's work tile: S = Q K^T and
// O += P V, keys and values where the producer has left them. P stays in registers: what the scores are summed in is
// what the second product reads.
//
// Registers of a sum [64, N], lane 4 g + c of warp w: register i of tile j is row 16 w + g + 8 (i / 2), column
// 8 j + 2 c + i % 2. Per-row values (Rows) have a slot for each of the two rows, and are the same in the four lanes
// that have them, but for the sums of weights, which are each lane's own until store().
#pragma once

#include "common/device/attention/kernel.h"
#include "cuda/attention/bias_reader.h"
#include "cuda/attention/memory.h"

namespace flashport::FLASHPORT_TARGET::attention {

inline constexpr int kTurnBarrier = 1;  // of the first warpgroup; those of the others follow

template <AttentionConfig kCfg>
class AttentionTiles {
  static constexpr AttentionShape kShape = kCfg.shape;
  static constexpr MathType kMath = kShape.math;
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kGroups = consumer_groups(kCfg.tuning), kRowGroups = kCfg.tuning.rows / 64;
  static constexpr int kColumns = kShape.head_dim_v / kCfg.tuning.slices;  // that a warpgroup has
  // Whether O += P V is waited for after the exponentials, and not where the compiler puts that (docs/tuning.md).
  static constexpr bool kWaitsLate = kShape.form != ScoreForm::kDropout && kShape.form != ScoreForm::kBias;
  static constexpr bool kUnshifted = has_unshifted_weights(kShape);
  static constexpr bool kInCluster = may_share_tiles(kCfg);
  static_assert(kCfg.tuning.slices == 1 || kColumns % kPanelColumns == 0);

 public:
  static constexpr ScoreForm kForm = kShape.form;
  static constexpr int kKeys = kCfg.tuning.keys;
  static constexpr int kBlockRows = kCfg.tuning.rows;
  static constexpr int kRowSlots = 2;
  // Kernels of all options, or of any bias, have long steps: they have the text of one twice, not five times.
  static constexpr bool kMasksFirst = has(kForm, ScoreForm::kBias), kMasksInOneLoop = kMasksFirst;

  struct Rows {
    float v[kRowSlots];
    FLASHPORT_DEVICE float& operator[](int slot) { return v[slot]; }
    FLASHPORT_DEVICE float operator[](int slot) const { return v[slot]; }
  };
  struct Scores {
    float c[kKeys / 8][4];
  };
  // The largest weight of a row is 1 where scores are shifted, and rounding leaves it alone. Unshifted it is any
  // number, so O is divided by the sum of the rounded weights, which V was multiplied by. lse follows from the exact
  // ones.
  struct RoundedSums {
    float l[1][4];  // of the two rows, in all columns alike
  };
  struct NoSums {};
  struct Out : std::conditional_t<kUnshifted, RoundedSums, NoSums> {
    float c[kColumns / 8][4];
  };
  struct Operand {
    unsigned a[kKeys / 16][4];
  };

  FLASHPORT_DEVICE AttentionTiles(int group, Memory& memory)
      : memory_(memory), group_(group), lane_(static_cast<int>(threadIdx.x) % kWaveSize), bias_(group) {
    row_ = group % kRowGroups * 64 + static_cast<int>(threadIdx.x) % kWarpgroup / kWaveSize * 16 + lane_ / 4;
    if (kGroups > 1 && group == kGroups - 1) give_turn();  // the first warpgroup's is the first turn
  }

  FLASHPORT_DEVICE static constexpr int row_slots() { return kRowSlots; }
  // The query of the sequence.
  FLASHPORT_DEVICE int row_of(int slot) const { return first_row_ + row_ + 8 * slot; }
  FLASHPORT_DEVICE int first_key() const { return 2 * (lane_ % 4); }

  FLASHPORT_DEVICE void set_rows(const WorkTile& work) { first_row_ = work.first_row; }
  FLASHPORT_DEVICE void begin(const WorkTile&) {
    mbarrier_wait(&memory_.query_barriers[0].full, query_phase_);
    query_phase_ ^= 1;
  }
  FLASHPORT_DEVICE static void clear(Rows& m, Rows& l, Out& out) {
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      m[slot] = -kInfinity;
      l[slot] = 0.0f;
    }
    for_each_register(out.c, [](float& x, int, int) { x = 0.0f; });
    if constexpr (kUnshifted) for_each_register(out.l, [](float& x, int, int) { x = 0.0f; });
  }

  // Warpgroups take turns to begin products, so that one's softmax runs under the others' products.
  FLASHPORT_DEVICE void take_turn() const {
    if constexpr (kGroups > 1) barrier_await(kTurnBarrier + group_, 2 * kWarpgroup);
  }
  FLASHPORT_DEVICE void give_turn() const {
    if constexpr (kGroups > 1) {
      barrier_signal(kTurnBarrier + (group_ == kGroups - 1 ? 0 : group_ + 1), 2 * kWarpgroup);
    }
  }

  // S = Q K^T, in flight until settle_keys().
  template <class Masked>
  FLASHPORT_DEVICE void multiply_keys(Scores& scores, int, Masked) {
    mbarrier_wait(&memory_.key_barriers[key_.stage].full, key_.phase);
    const auto& keys = memory_.keys[key_.stage];
    const unsigned char* rows = memory_.queries[0].x[0] + group_ % kRowGroups * 64 * 128;
    wgmma_begin();
    wgmma<kMath, false, false>(scores.c, panel_descriptor<kInCluster>(rows, 0),
                               panel_descriptor<kInCluster>(keys.x[0], 0));
#pragma unroll
    for (int step = 1; step < kShape.head_dim_qk / 16; ++step) {
      const int byte = step % 4 * 32, panel = step / 4;
      wgmma<kMath, true, false>(scores.c,
                                panel_descriptor<kInCluster>(rows, panel * Memory::Queries::kPanelSize + byte),
                                panel_descriptor<kInCluster>(keys.x[0], panel * Memory::Keys::kPanelSize + byte));
    }
    wgmma_commit();
  }
  // kLater products were begun after it.
  template <int kLater>
  FLASHPORT_DEVICE void settle_keys(Scores& scores) {
    wgmma_wait<kLater>();
    pin(scores.c);
    mbarrier_arrive_wave(&memory_.key_barriers[key_.stage].empty);
    key_.next();
  }

  // O += P V, in flight until settle_values().
  template <class Masked>
  FLASHPORT_DEVICE void add_values(Out& out, const Operand& weights, int, Masked) {
    mbarrier_wait(&memory_.value_barriers[value_.stage].full, value_.phase);
    const auto& values = memory_.values[value_.stage];
    pin_all(out);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      if constexpr (kUnshifted) {
        wgmma<kMath, true, false>(out.l, weights.a[step], panel_descriptor<kInCluster>(memory_.ones.two, 0));
      }
      wgmma<kMath, true, true>(out.c, weights.a[step],
                               panels_descriptor<kInCluster>(values.x[slice() * (kColumns / kPanelColumns)],
                                                             step * 16 * 128, Memory::Values::kPanelSize));
    }
    wgmma_commit();
  }
  FLASHPORT_DEVICE void settle_values(Out& out) {
    wgmma_wait<0>();
    pin_all(out);
    mbarrier_arrive_wave(&memory_.value_barriers[value_.stage].empty);
    value_.next();
  }

  // The queries are read no more.
  FLASHPORT_DEVICE void release_queries() const { mbarrier_arrive_wave(&memory_.query_barriers[0].empty); }

  // f(value, slot, offset of the key from first_key())
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
    for_each_register(scores.c, [&](float& x, int tile, int i) { f(x, i / 2, 8 * tile + i % 2); });
  }
  static constexpr int kDrawnTogether = kKeys % 64 == 0 ? 16 : 8;
  // f(weights that share random bits, slot, offset of the first)
  template <class F>
  FLASHPORT_DEVICE void for_each_drawn(Scores& scores, F&& f) const {
#pragma unroll
    for (int first = 0; first < kKeys / 8; first += kDrawnTogether / 2) {
#pragma unroll
      for (int slot = 0; slot < kRowSlots; ++slot) {
        f([&](int i) -> float& { return scores.c[first + i / 2][2 * slot + i % 2]; }, slot, 8 * first);
      }
    }
  }

  // x = 1 / (1 + 2^(-factor x)), with a reciprocal for each four of a row: the unit of special functions bounds a loop
  // with softcap. 2^-30 is as good as 0, and four such denominators have a product.
  FLASHPORT_DEVICE static void take_sigmoids(Scores& scores, float factor) {
#pragma unroll
    for (int tile = 0; tile < kKeys / 8; tile += 2) {
#pragma unroll
      for (int first = 0; first < 4; first += 2) {
        float* two = &scores.c[tile][first];
        float* next = &scores.c[tile + 1][first];
        const float a = sigmoid_denominator(two[0], factor), b = sigmoid_denominator(two[1], factor);
        const float c = sigmoid_denominator(next[0], factor), d = sigmoid_denominator(next[1], factor);
        const float ab = a * b, cd = c * d;
        const float of_all = reciprocal_approx(ab * cd);
        const float of_ab = of_all * cd, of_cd = of_all * ab;
        two[0] = of_ab * b, two[1] = of_ab * a;
        next[0] = of_cd * d, next[1] = of_cd * c;
      }
    }
  }

  // Adds the biases of a key tile, which producers have brought. NaN that a mask hides is hidden with its score.
  FLASHPORT_DEVICE void add_bias(const AttentionParams& p, const Modifiers& modifiers, Scores& scores) {
    const std::int64_t row_at = modifiers.bias_at + row_of(0) * p.bias.stride_row;
    bias_.for_each(memory_.bias, p.bias, row_at, [&](int tile, int i, float x) {
      scores.c[tile][i] = fma_rn(modifiers.log2e, x, scores.c[tile][i]);
    });
  }

  // Which weights dropout keeps: bit 7 of each byte, those of the lane's keys of a row in their order.
  struct Kept {
    unsigned four[kRowSlots][kKeys / 16];
  };
  // Draws for key tile number `tile`.
  FLASHPORT_DEVICE void draw(Kept& kept, const DropLimit& limit, const Modifiers& modifiers, int tile) const {
    static_assert(kKeys % kPhiloxKeys == 0);
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
#pragma unroll
      for (int call = 0; call < kKeys / kPhiloxKeys; ++call) {
        const Philox random = dropout_bits(modifiers.dropout, modifiers.head, row_of(slot),
                                           tile * kKeys + call * kPhiloxKeys + first_key());
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          kept.four[slot][call * 4 + word] = kept_weights(random.words[word], limit);
        }
      }
    }
  }
  FLASHPORT_DEVICE static void drop(const Kept& kept, Operand& weights) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned four = kept.four[i % 2][step];
        weights.a[step][i] &= i / 2 == 0 ? signs_of_bytes<0x9988>(four) : signs_of_bytes<0xbbaa>(four);
      }
    }
  }

  // P = exp2((S - m) scale), where m is the largest score of a row so far; `factors` bring O to that m. Unshifted, m is
  // the sigmoid of a logit of 0.
  FLASHPORT_DEVICE void exponentiate(Scores& scores, float scale, RowState<AttentionTiles>& state,
                                     Rows& factors) const {
    Rows reference, sum;
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      sum[slot] = 0.0f;
      if constexpr (kUnshifted) {
        reference[slot] = 0.5f * scale;
        factors[slot] = 1.0f;
        continue;
      }
      float most = maximum(scores.c[0][2 * slot], scores.c[0][2 * slot + 1]);
#pragma unroll
      for (int tile = 1; tile < kKeys / 8; ++tile) {
        most = maximum(most, maximum(scores.c[tile][2 * slot], scores.c[tile][2 * slot + 1]));
      }
      most = maximum(most, __shfl_xor_sync(~0u, most, 1));
      most = maximum(most, __shfl_xor_sync(~0u, most, 2));
      most = maximum(most, state.m[slot]);
      const float finite = most == -kInfinity ? 0.0f : most;
      reference[slot] = finite * scale;
      factors[slot] = exp2_approx((state.m[slot] - finite) * scale);  // exactly 1 where m stays as it is
      state.m[slot] = most;
    }
    for_each_register(scores.c, [&](float& x, int, int i) {
      x = exp2_approx(fma_rn(x, scale, -reference[i / 2]));
      sum[i / 2] += x;
    });
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) state.l[slot] = fma_rn(state.l[slot], factors[slot], sum[slot]);
    if constexpr (kWaitsLate) wgmma_wait_after(__float_as_uint(sum[0]) ^ __float_as_uint(sum[1]), &memory_.unread);
  }
  FLASHPORT_DEVICE static Operand to_operand(const Scores& weights) {
    Operand operand;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = &weights.c[2 * step + i / 2][i % 2 * 2];
        operand.a[step][i] = pack<kMath>(two[0], two[1]);
      }
    }
    return operand;
  }
  FLASHPORT_DEVICE static void scale(Out& out, const Rows& factors) {
    if constexpr (kUnshifted) return;
    for_each_register(out.c, [&](float& x, int, int i) { x *= factors[i / 2]; });
  }

  // out = O / l and lse.
  FLASHPORT_DEVICE void store(const AttentionParams& p, const WorkTile& work, RowState<AttentionTiles>& state,
                              float scale, Out& out) const {
    const int columns = p.head_dim_v - slice() * kColumns;
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      float l = state.l[slot];
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      const int row = row_of(slot);
      // Unshifted, the power of two in l is m, which a sink may be far from; O has it as well.
      const int exponent = kUnshifted && l > 0.0f ? exponent_of(l) : 0;
      float m = l == 0.0f ? -kInfinity : static_cast<float>(exponent);
      if constexpr (!kUnshifted) m = largest_logit<kForm>(p, state.m[slot], scale);
      const float unit = power_of_two(-exponent);
      float factor = unit * finish_row(p, work, row, m, l * unit, lane_ % 4 == 0 && slice() == 0);
      if constexpr (kUnshifted) {
        if (out.l[0][2 * slot] > 0.0f) factor *= l / out.l[0][2 * slot];
      }
      if (is_partial(work)) {
        float* partial = partial_output(p, work, row) + slice() * kColumns + first_key();
        if (row < work.q_len && factor != 0.0f) store_floats(out, slot, factor, partial);
        continue;
      }
      auto* to =
          static_cast<std::uint16_t*>(p.out.data) + output_offset(p, work, row) + slice() * kColumns * p.out.stride_dim;
      const bool live = row < work.q_len;
      if (p.out.stride_dim == 1 && __all_sync(~0u, reinterpret_cast<std::uintptr_t>(to) % 16 == 0)) {
        store_eights(p, out, slot, factor, to, live, columns);
      } else if (live) {
        store_elements(p, out, slot, factor, to, columns);
      }
    }
  }

 private:
  FLASHPORT_DEVICE static void pin_all(Out& out) {
    pin(out.c);
    if constexpr (kUnshifted) pin(out.l);
  }
  // The sign bits of the bytes that kSelector names, each eight times.
  template <unsigned kSelector>
  FLASHPORT_DEVICE static unsigned signs_of_bytes(unsigned bytes) {
    unsigned signs;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(signs) : "r"(bytes), "n"(kSelector));
    return signs;
  }
  // The power of two in a positive normal number.
  FLASHPORT_DEVICE static int exponent_of(float x) { return static_cast<int>(__float_as_uint(x) >> 23) - 127; }
  FLASHPORT_DEVICE static float power_of_two(int exponent) {
    return __uint_as_float(static_cast<unsigned>(127 + exponent) << 23);
  }
  FLASHPORT_DEVICE static float sigmoid_denominator(float x, float factor) {
    return 1.0f + exp2_approx(minimum_or_nan(-factor * x, 30.0f));
  }
  FLASHPORT_DEVICE int slice() const { return kCfg.tuning.slices == 1 ? 0 : group_ / kRowGroups; }

  // A row that sees no key is 0 even if its sums are NaN.
  FLASHPORT_DEVICE static unsigned rounded(const AttentionParams& p, const Out& out, int tile, int slot, float factor) {
    const float* x = &out.c[tile][2 * slot];
    if (factor == 0.0f) return 0;
    if constexpr (has(kShape.sources, KeySources::kBytes)) {
      if (p.out.dtype == DType::kBFloat16) return pack<MathType::kBf16>(x[0] * factor, x[1] * factor);
    }
    return pack<kMath>(x[0] * factor, x[1] * factor);
  }
  // The four lanes of a row exchange columns, so that each stores 16 bytes at a time.
  FLASHPORT_DEVICE void store_eights(const AttentionParams& p, const Out& out, int slot, float factor,
                                     std::uint16_t* row, bool live, int columns) const {
    const int c = lane_ % 4;
#pragma unroll
    for (int first = 0; first < kColumns / 8; first += 4) {
      unsigned two[4];
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) two[tile] = rounded(p, out, first + tile, slot, factor);
      transpose_quad(two, c);
      const int column = (first + c) * 8;
      if (live && column < columns) {
        *reinterpret_cast<uint4*>(row + column) = make_uint4(two[0], two[1], two[2], two[3]);
      }
    }
  }
  FLASHPORT_DEVICE static void store_floats(const Out& out, int slot, float factor, float* to) {
#pragma unroll
    for (int tile = 0; tile < kColumns / 8; ++tile) {
      const float* x = &out.c[tile][2 * slot];
      *reinterpret_cast<float2*>(to + 8 * tile) = make_float2(x[0] * factor, x[1] * factor);
    }
  }
  FLASHPORT_DEVICE void store_elements(const AttentionParams& p, const Out& out, int slot, float factor,
                                       std::uint16_t* row, int columns) const {
    const std::int64_t stride = p.out.stride_dim;
#pragma unroll
    for (int tile = 0; tile < kColumns / 8; ++tile) {
      if (8 * tile >= columns) break;
      const unsigned two = rounded(p, out, tile, slot, factor);
      std::uint16_t* to = row + (8 * tile + first_key()) * stride;
      to[0] = static_cast<std::uint16_t>(two);
      to[stride] = static_cast<std::uint16_t>(two >> 16);
    }
  }

  // x[i] of lane c and x[c] of lane i change places, among the four lanes of a quad.
  FLASHPORT_DEVICE static void transpose_quad(unsigned (&x)[4], int c) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      const bool high = (c & distance) != 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((i & distance) != 0) continue;
        const unsigned received = __shfl_xor_sync(~0u, high ? x[i] : x[i | distance], distance);
        (high ? x[i] : x[i | distance]) = received;
      }
    }
  }

  // f(register, tile, i)
  template <int kTiles, class F>
  FLASHPORT_DEVICE static void for_each_register(float (&c)[kTiles][4], F&& f) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(c[tile][i], tile, i);
    }
  }

  Memory& memory_;
  const int group_, lane_;
  int row_;            // of the work tile, the lane's first
  int first_row_ = 0;  // of the work tile
  PipelineState<kCfg.tuning.stages> key_;
  PipelineState<value_stages(kCfg.tuning)> value_;
  unsigned query_phase_ = 0;
  struct NoReader {
    FLASHPORT_DEVICE explicit NoReader(int) {}
  };
  std::conditional_t<brings_bias(kCfg), BiasReader<kCfg>, NoReader> bias_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
