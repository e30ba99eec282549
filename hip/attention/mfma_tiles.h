// The tile verbs of attention on MFMA: a wave has 32 queries, which stay in registers; keys and values come to LDS for
// all waves of the block. The registers of S^T, rounded, are the right operand P^T. Waves that have slices of V's
// columns compute the same scores.
//
// A block has a group of waves, or two that take turns, so that each SIMD has a wave of both. A turn is between two
// barriers of the block, and the second group's steps are one barrier later. With the barriers of a work tile numbered
// from its begin() on, which has barrier 0, step i (1, 2, ...) of group g multiplies between barriers 2 i - 1 + g and
// 2 i + g:
//
//   barrier      0          1          2          3          4          5
//   group 0      | K0       | K1 V0    | softmax  | K2 V1    | softmax  |
//   group 1      | K0       | softmax  | K1 V0    | softmax  | K2 V1    |
//
// What both groups multiply in step i + 1, K(i + 1) and V(i), comes to LDS between barriers 2 i - 1 and 2 i + 1, where
// nothing reads the other of the two buffers: each group copies its part under its softmax, or the second group all in
// two intervals, from its softmax on. begin() brings K(0); K(1) and V(0) come in the first interval.
#pragma once

#include "hip/arch/mfma.h"
#include "hip/attention/lane_tiles.h"

namespace flashport::FLASHPORT_TARGET::attention {

template <AttentionConfig kCfg>
class AttentionTiles : public LaneTiles<kCfg, Floats16> {
  using Base = LaneTiles<kCfg, Floats16>;
  using Base::half_;
  using Base::kColumnBlocks;
  using Base::kKeyBlocks;
  using Base::kKeyVectors;
  using Base::kMath;
  using Base::n_;
  static constexpr int kGroups = groups_of(kCfg);
  using Memory = AttentionMemory<kCfg>;
  using Copies = attention::Copies<kCfg>;
  using Values = ValueReads<kCfg>;
  static constexpr int kStages = kCfg.tuning.stages;
  static_assert(kStages == 2 || (kGroups == 1 && !Copies::kInFlight));
  static_assert(!attention_shares_queries(kCfg.shape) && !Memory::kInTurn);

 public:
  using Base::kBlockRows;
  using Base::kKeys;
  using typename Base::Out;
  using typename Base::Scores;
  struct Operand {
    Words4 b[kKeys / 16];
  };

  FLASHPORT_DEVICE AttentionTiles(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), block_(block), memory_(memory), copies_(p, block, memory) {}

  FLASHPORT_DEVICE void take(const WorkTile& work) {
    this->take_lane(work, block_.thread());  // what is derived from it is computed for each work tile
  }

  FLASHPORT_DEVICE void begin(const WorkTile& work) {
    const KeyTiles range = key_tiles<kKeys>(p_, work, kBlockRows);
    copies_.begin(work, range.begin, minimum(work.kv_len, range.end * kKeys));
    load_queries(work);
    keys_from_ = key_offset<kKeyVectors, Memory::kKeyPlaces>(n_, half_);
    values_from_ = Values::first(kWaveRows * half_ + n_, this->slice_ * kColumnBlocks);
    sync_shared();
    copies_.start();
  }

  FLASHPORT_DEVICE void take_turn() {
    if constexpr (kGroups == 1) copies_.await();
    sync_shared();
    if constexpr (kStages == 1) refill();
    if constexpr (kGroups == 1 && Copies::kInFlight) copies_.next();
    __builtin_amdgcn_sched_barrier(0);
    __builtin_amdgcn_s_setprio(1);
  }
  FLASHPORT_DEVICE void give_turn() {
    __builtin_amdgcn_s_setprio(0);
    __builtin_amdgcn_sched_barrier(0);
    if constexpr (kGroups > 1) {
      copies_.await();
      sync_shared();
    }
    if constexpr (kStages > 1 && (kGroups > 1 || !Copies::kInFlight)) copies_.next();
  }

  // S^T = K Q^T
  template <class Masked>
  FLASHPORT_DEVICE void multiply_keys(Scores& scores, int, Masked) {
    begin_scores(scores);
    multiply<0, kKeyProducts>([&](int i, Words4 keys) FLASHPORT_INLINE { multiply_keys_once(scores, i, keys); });
    keys_from_ ^= Memory::kNextKeys;
  }
  // kLater 0: the first product of a work tile.
  template <int kLater>
  FLASHPORT_DEVICE void settle_keys(Scores&) {
    if constexpr (kLater == 0) {
      if constexpr (kStages > 1 && !Copies::kInFlight) copies_.next();
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
    multiply<kKeyProducts, kProducts>([&](int i, Words4 values)
                                          FLASHPORT_INLINE { add_values_once(out, weights, i, values); });
    values_from_ ^= Memory::kNextValues;
  }
  // Both of a step: the first values come under the last keys' products.
  FLASHPORT_DEVICE void multiply_both(Scores& scores, Out& out, const Operand& weights) {
    begin_scores(scores);
    multiply<0, kProducts>([&](int i, Words4 left) FLASHPORT_INLINE {
      if (i < kKeyProducts) {
        multiply_keys_once(scores, i, left);
      } else {
        add_values_once(out, weights, i, left);
      }
    });
    keys_from_ ^= Memory::kNextKeys;
    values_from_ ^= Memory::kNextValues;
  }
  FLASHPORT_DEVICE static void settle_values(Out&) {}

  // The last values are in LDS after it, and the groups have passed as many barriers.
  FLASHPORT_DEVICE void release_queries() {
    if (group() == 1) return;
    copies_.await();
    sync_shared();
    if constexpr (kStages == 1) refill();
  }

  FLASHPORT_DEVICE static Operand to_operand(const Scores& weights) {
    Operand operand;
#pragma unroll
    for (int i = 0; i < Scores::kCount; i += 2) {
      operand.b[i / 8][i % 8 / 2] = pack<kMath>(weights.get(i), weights.get(i + 1));
    }
    return operand;
  }

 private:
  FLASHPORT_DEVICE void load_queries(const WorkTile& work) {
    if constexpr (has(Base::kShape.sources, KeySources::kFp8)) {
      if (p_.q.dtype == DType::kFp8E4M3) return load_fp8_queries(work);
    }
    const GlobalBytes query = Base::query(p_, work, this->row_) + 16 * half_;
#pragma unroll
    for (int pair = 0; pair < kKeyVectors / 2; ++pair) {
      queries_[pair] = load_words<4>(16 * pair + 8 * half_ < p_.head_dim_qk ? query + 32 * pair : zero_row());
    }
    if constexpr (has(Base::kShape.sources, KeySources::kBytes)) {
      if (p_.q.dtype != DType::kBFloat16) return;
#pragma unroll
      for (Words4& eight : queries_) {
#pragma unroll
        for (int i = 0; i < 4; ++i) eight[i] = bf16_to_halves(eight[i]);
      }
    }
  }
  FLASHPORT_DEVICE void load_fp8_queries(const WorkTile& work) {
    const GlobalBytes query = Base::query(p_, work, this->row_, 1) + 8 * half_;
#pragma unroll
    for (int pair = 0; pair < kKeyVectors / 2; ++pair) {
      const auto x = load_words<2>(16 * pair + 8 * half_ < p_.head_dim_qk ? query + 16 * pair : zero_row());
      const Words2 low = widen_e4m3<kMath>(x[0]), high = widen_e4m3<kMath>(x[1]);
      queries_[pair] = Words4{low[0], low[1], high[0], high[1]};
    }
  }
  // With one stage, nothing multiplies while copies arrive.
  FLASHPORT_DEVICE void refill() {
    copies_.next();
    sync_shared();
  }
  FLASHPORT_DEVICE int group() const { return kGroups == 1 ? 0 : block_.wave() / kGroupWaves; }

  // The products of a step, by number: those of keys, then those of values.
  static constexpr int kKeyProducts = kKeyBlocks * kKeyVectors / 2;
  static constexpr int kProducts = kKeyProducts + kColumnBlocks * kKeys / 16;
  static constexpr int kAhead = Base::kForm == ScoreForm::kPlain ? 6 : 3;  // options take the registers of three

  // Those from kBegin on, their left operands read from LDS kAhead products earlier. That order is written here, and
  // the compiler may not change it: where registers are short it would else read each operand just before its product,
  // which then waits for all of LDS's latency.
  template <int kBegin, int kEnd, class F>
  FLASHPORT_DEVICE void multiply(F&& multiply_once) const {
    static_assert(kEnd - kBegin >= kAhead);
    Words4 ahead[kAhead];
#pragma unroll
    for (int i = kBegin; i < kBegin + kAhead; ++i) ahead[i % kAhead] = read_left(i);
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      multiply_once(i, ahead[i % kAhead]);
      if (i + kAhead < kEnd) ahead[i % kAhead] = read_left(i + kAhead);
      __builtin_amdgcn_sched_barrier(0);
    }
  }
  FLASHPORT_DEVICE Words4 read_left(int i) const {
    if (i >= kKeyProducts) {
      const int j = i - kKeyProducts;
      return Values::read(memory_.values, values_from_, j / kColumnBlocks, j % kColumnBlocks);
    }
    const int offset = key_pair_offset<kKeyVectors, Memory::kKeyPlaces>(keys_from_, i / kKeyBlocks);
    const unsigned char* block = memory_.keys + i % kKeyBlocks * kWaveRows * kKeyVectors * kVectorBytes;
    return *reinterpret_cast<const Words4*>(block + offset);
  }
  FLASHPORT_DEVICE static void begin_scores(Scores& scores) {
#pragma unroll
    for (Floats16& c : scores.c) c = Floats16{};
  }
  FLASHPORT_DEVICE void multiply_keys_once(Scores& scores, int i, Words4 keys) const {
    mfma<kMath>(scores.c[i % kKeyBlocks], keys, queries_[i / kKeyBlocks]);
  }
  FLASHPORT_DEVICE static void add_values_once(Out& out, const Operand& weights, int i, Words4 values) {
    const int j = i - kKeyProducts;
    mfma<kMath>(out.c[j % kColumnBlocks], values, weights.b[j / kColumnBlocks]);
  }

  const AttentionParams& p_;
  const Block& block_;
  Memory& memory_;
  Copies copies_;
  int keys_from_ = 0, values_from_ = 0;  // byte offset of what the lane reads first of the tile that is multiplied next
  Words4 queries_[kKeyVectors / 2];      // [32, D] as the right operand
};

}  // namespace flashport::FLASHPORT_TARGET::attention
