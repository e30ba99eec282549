// The tile verbs of attention on MFMA. A wave has 32 queries, one a column: S^T = K Q^T and O^T = V^T P^T, so that the
// registers of S^T, rounded, are the operand P^T, and a lane has one query. Queries stay in registers; keys and values
// come to LDS for all waves of the block.
//
// Registers of S^T [keys, 32] and O^T [DV, 32], lane 32 h + n: register i of block b is query n, and key or column
// 32 b + 8 (i / 4) + 4 h + i % 4. Lanes n and 32 + n have a query between them: m is the same in both, l each lane's
// own until store().
//
// A block has a group of waves, or two that take turns, so that each SIMD has a wave of both. A turn is between two
// barriers of the block, and the second group's steps are one barrier later. With the barriers of a work tile numbered
// from its begin() on, which has barrier 0, step i (1, 2, ...) of group g multiplies between barriers 2 i - 1 + g and
// 2 i + g:
//
//   barrier      0          1          2          3          4          5
//   group 0      | K0       | K1 V0    | copies   | K2 V1    | copies   |
//   group 1      | K0 copies| copies   | K1 V0    | copies   | K2 V1    |
//
// In the interval after its products a group computes its softmax, and copies to LDS what both groups multiply next:
// group 0 its part of K(i + 1) and V(i), group 1, whose interval is one earlier, of K(i + 2) and V(i + 1). Both fall
// between barriers 2 i - 1 and 2 i + 1, where nothing reads the other of the two buffers. begin() brings K(0); K(1) and
// V(0) come in the first interval.
#pragma once

#include "common/device/attention/kernel.h"
#include FLASHPORT_ATTENTION_COPIES_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

template <AttentionConfig kCfg>
class AttentionTiles {
  static constexpr AttentionShape kShape = kCfg.shape;
  static constexpr MathType kMath = kShape.math;
  static constexpr int kGroups = groups_of(kCfg);
  static constexpr int kKeyVectors = kShape.head_dim_qk / 8;
  static constexpr int kKeyBlocks = kCfg.tuning.keys / 32, kColumnBlocks = kShape.head_dim_v / 32;
  using Memory = AttentionMemory<kCfg>;
  using Copies = KvCopies<kCfg>;
  using Values = ValueReads<kCfg>;

 public:
  static constexpr ScoreForm kForm = kShape.form;
  static constexpr int kKeys = kCfg.tuning.keys;
  static constexpr int kBlockRows = kCfg.tuning.rows;
  static constexpr int kRowSlots = 1;
  static constexpr bool kMasksFirst = true;

  struct Rows {
    float v;
    FLASHPORT_DEVICE float& operator[](int) { return v; }
    FLASHPORT_DEVICE float operator[](int) const { return v; }
  };
  struct Scores {
    Floats16 c[kKeyBlocks];
  };
  struct Out {
    Floats16 c[kColumnBlocks];
  };
  struct Operand {
    Words4 b[kKeys / 16];
  };

  FLASHPORT_DEVICE AttentionTiles(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), block_(block), memory_(memory), copies_(p, block, memory) {}

  FLASHPORT_DEVICE static constexpr int row_slots() { return kRowSlots; }
  // The query of the sequence.
  FLASHPORT_DEVICE int row_of(int) const { return row_; }
  // The key of a tile that is the lane's first.
  FLASHPORT_DEVICE int first_key() const { return 4 * half_; }

  FLASHPORT_DEVICE void take(const WorkTile& work) {
    const int thread = block_.thread();  // what is derived from it is computed for each work tile
    n_ = thread % 32;
    half_ = thread / 32 % 2;
    row_ = work.first_row + thread / kWaveSize * kWaveRows + n_;
  }

  FLASHPORT_DEVICE void begin(const WorkTile& work) {
    const KeyTiles range = key_tiles<kKeys>(p_, work, kBlockRows);
    copies_.begin(work, range.begin, minimum(work.kv_len, range.end * kKeys));
    load_queries(work);
    keys_from_ = key_offset<kKeyVectors>(n_, half_);
    values_from_ = Values::first(32 * half_ + n_);
    sync_shared();
    copies_.start();
  }
  FLASHPORT_DEVICE static void clear(Rows& m, Rows& l, Out& out) {
    m.v = -kInfinity;
    l.v = 0.0f;
#pragma unroll
    for (Floats16& c : out.c) c = Floats16{};
  }

  FLASHPORT_DEVICE void take_turn() {
    if constexpr (kGroups == 1) copies_.await();
    sync_shared();
    if constexpr (kGroups == 1 && Copies::kInFlight) copies_.next();
    __builtin_amdgcn_sched_barrier(0);
    __builtin_amdgcn_s_setprio(1);
  }
  FLASHPORT_DEVICE void give_turn() {
    order_products();
    __builtin_amdgcn_s_setprio(0);
    __builtin_amdgcn_sched_barrier(0);
    if constexpr (kGroups > 1) {
      copies_.await();
      sync_shared();
    }
    if constexpr (kGroups > 1 || !Copies::kInFlight) copies_.next();
  }

  // S^T = K Q^T
  template <class Masked>
  FLASHPORT_DEVICE void multiply_keys(Scores& scores, int, Masked) {
#pragma unroll
    for (Floats16& c : scores.c) c = Floats16{};
#pragma unroll
    for (int pair = 0; pair < kKeyVectors / 2; ++pair) {
      const unsigned char* from = memory_.keys + pair_offset(keys_from_, pair);
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block) {
        const auto keys = *reinterpret_cast<const Words4*>(from + block * 32 * kKeyVectors * kVectorBytes);
        mfma<kMath>(scores.c[block], keys, queries_[pair]);
      }
    }
    keys_from_ ^= Memory::kKeyBytes;
  }
  // kLater 0: the first product of a work tile.
  template <int kLater>
  FLASHPORT_DEVICE void settle_keys(Scores&) {
    if constexpr (kLater == 0) {
      if constexpr (!Copies::kInFlight) copies_.next();
      if (group() == 1) {
        copies_.await();
        sync_shared();
        copies_.next();
      }
    }
  }

  // O^T += V^T P^T
  template <class Masked>
  FLASHPORT_DEVICE void add_values(Out& out, const Operand& weights, int, Masked) {
#pragma unroll
    for (int pair = 0; pair < kKeys / 16; ++pair) {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block) {
        mfma<kMath>(out.c[block], Values::read(memory_.values, values_from_, pair, block), weights.b[pair]);
      }
    }
    values_from_ ^= Memory::kValueBytes;
  }
  FLASHPORT_DEVICE static void settle_values(Out&) {}

  // The last values are in LDS after it, and the groups have passed as many barriers.
  FLASHPORT_DEVICE void release_queries() const {
    if (kGroups > 1 && group() == 1) return;
    copies_.await();
    sync_shared();
  }

  // f(value, slot, offset of the key from first_key())
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float x = scores.c[block][i];
        f(x, 0, 32 * block + i / 4 * 8 + i % 4);
        scores.c[block][i] = x;
      }
    }
  }
  // f(eight weights that share random bits, slot, offset of the first)
  template <class F>
  FLASHPORT_DEVICE void for_each_eight(Scores& scores, F&& f) const {
#pragma unroll
    for (Floats16& c : scores.c) {
      const int block = static_cast<int>(&c - scores.c);
#pragma unroll
      for (int first = 0; first < 4; first += 2) {
        float eight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) eight[i] = c[i / 2 * 4 + first + i % 2];
        f([&](int i) FLASHPORT_INLINE -> float& { return eight[i]; }, 0, 32 * block + first);
#pragma unroll
        for (int i = 0; i < 8; ++i) c[i / 2 * 4 + first + i % 2] = eight[i];
      }
    }
  }

  // P = exp2((S - m) scale), where m is the largest score of a query so far; `factors` bring O to that m.
  FLASHPORT_DEVICE void exponentiate(Scores& scores, float scale, RowState<AttentionTiles>& state,
                                     Rows& factors) const {
    float most = scores.c[0][0];
#pragma unroll
    for (const Floats16& c : scores.c) {
#pragma unroll
      for (int i = 0; i < 16; ++i) most = maximum(most, c[i]);
    }
    most = maximum(state.m.v, join_halves(most, [](float x, float y) { return maximum(x, y); }));
    const float reference = most == -kInfinity ? 0.0f : most * scale;
    factors.v = exp2_approx(fma_rn(state.m.v, scale, -reference));
    state.m.v = most;
    Floats2 sum = {};
#pragma unroll
    for (Floats16& c : scores.c) {
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        const Floats2 two = __builtin_elementwise_fma(Floats2{c[i], c[i + 1]}, Floats2(scale), Floats2(-reference));
        const Floats2 weights = {exp2_approx(two[0]), exp2_approx(two[1])};
        sum += weights;
        c[i] = weights[0];
        c[i + 1] = weights[1];
      }
    }
    state.l.v = fma_rn(state.l.v, factors.v, sum[0] + sum[1]);
  }
  FLASHPORT_DEVICE static Operand to_operand(const Scores& weights) {
    Operand operand;
#pragma unroll
    for (int pair = 0; pair < kKeys / 16; ++pair) {
      const Floats16& c = weights.c[pair / 2];
      const int first = pair % 2 * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) operand.b[pair][i] = pack<kMath>(c[first + 2 * i], c[first + 2 * i + 1]);
    }
    return operand;
  }
  FLASHPORT_DEVICE static void scale(Out& out, const Rows& factors) {
#pragma unroll
    for (Floats16& c : out.c) c *= factors.v;
  }

  // out = O / l and lse.
  FLASHPORT_DEVICE void store(const AttentionParams& params, const WorkTile& work, RowState<AttentionTiles>& state,
                              float scale, const Out& out) const {
    const AttentionParams& p = reread(params);
    const float l = join_halves(state.l.v, [](float x, float y) { return x + y; });
    const int row = row_of(0);
    const float m = state.m.v == -kInfinity ? -kInfinity : state.m.v * scale;
    const float factor = finish_row(p, work, row, m, l, half_ == 0);
    auto* to = static_cast<std::uint16_t*>(p.out.data) + output_offset(p, work, row);
    if (row >= work.q_len) return;
#pragma unroll
    for (int block = 0; block < kColumnBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 16; i += 4) {
        const int column = 32 * block + 2 * i + first_key();
        if (column >= p.head_dim_v) return;
        store_four(to + column * p.out.stride_dim, p.out.stride_dim, rounded(out.c[block], i, factor),
                   rounded(out.c[block], i + 2, factor));
      }
    }
  }

 private:
  FLASHPORT_DEVICE int group() const { return kGroups == 1 ? 0 : block_.wave() / kGroupWaves; }

  FLASHPORT_DEVICE void load_queries(const WorkTile& work) {
    const int row = row_of(0);
    const GlobalBytes from =
        (GlobalBytes)p_.q.data + 2 * (work.seq * p_.q.stride_seq + (work.q_begin + row) * p_.q.stride_token +
                                      work.head * p_.q.stride_head + 8 * half_);
#pragma unroll
    for (int pair = 0; pair < kKeyVectors / 2; ++pair) {
      const bool live = row < work.q_len && 16 * pair + 8 * half_ < p_.head_dim_qk;
      queries_[pair] = load_words<4>(live ? from + 32 * pair : zero_row());
    }
  }

  // The order of a turn's instructions: reads from LDS go a few products ahead.
  FLASHPORT_DEVICE static void order_products() {
    constexpr int kMfma = 0x8, kRead = 0x100, kProducts = kHasWideMfma ? 1 : 2, kAhead = 6;
    constexpr int kKeyProducts = kKeyBlocks * kKeyVectors / 2, kAll = kKeyProducts + kColumnBlocks * kKeys / 16;
    constexpr auto kReadsBefore = [](int product) {
      const int of_keys = product < kKeyProducts ? product : kKeyProducts;
      return product >= kAll ? kKeyProducts + (kAll - kKeyProducts) * Values::kReads
                             : of_keys + (product - of_keys) * Values::kReads;
    };
    [&]<int... kProduct>(std::integer_sequence<int, kProduct...>) {
      __builtin_amdgcn_sched_group_barrier(kRead, kReadsBefore(kAhead), 0);
      ((__builtin_amdgcn_sched_group_barrier(kMfma, kProducts, 0),
        __builtin_amdgcn_sched_group_barrier(kRead,
                                             kReadsBefore(kProduct + kAhead + 1) - kReadsBefore(kProduct + kAhead), 0)),
       ...);
    }(std::make_integer_sequence<int, kAll>());
  }

  // f of the lane's value and of the other half's, in the one order or the other.
  template <class T, class F>
  FLASHPORT_DEVICE static float join_halves(T x, F&& f) {
    if constexpr (kHasPermlaneSwap) {
      const auto bits = __builtin_bit_cast(unsigned, x);
      const auto both = __builtin_amdgcn_permlane32_swap(bits, bits, false, false);
      return f(__builtin_bit_cast(float, both[0]), __builtin_bit_cast(float, both[1]));
    } else {
      return f(x, swap_32(x));
    }
  }

  // A row that sees no key is 0 even if its sums are NaN.
  FLASHPORT_DEVICE static unsigned rounded(const Floats16& c, int i, float factor) {
    return factor == 0.0f ? 0u : pack<kMath>(c[i] * factor, c[i + 1] * factor);
  }
  FLASHPORT_DEVICE static void store_four(std::uint16_t* to, std::int64_t stride, unsigned low, unsigned high) {
    if (stride == 1) {
      reinterpret_cast<UnalignedWords<2>*>(to)->words = Words2{low, high};
      return;
    }
    to[0] = static_cast<std::uint16_t>(low);
    to[stride] = static_cast<std::uint16_t>(low >> 16);
    to[2 * stride] = static_cast<std::uint16_t>(high);
    to[3 * stride] = static_cast<std::uint16_t>(high >> 16);
  }

  const AttentionParams& p_;
  const Block& block_;
  Memory& memory_;
  Copies copies_;
  int n_ = 0, half_ = 0;             // of the wave's lanes
  int row_ = 0;                      // the lane's query of the sequence
  int keys_from_, values_from_;      // the lane's offset in the tile that is multiplied next
  Words4 queries_[kKeyVectors / 2];  // [32, D] as the right operand
};

}  // namespace flashport::FLASHPORT_TARGET::attention
