// The tile verbs of attention on WMMA: eight waves with 16 queries each; keys and values come to LDS for all of them.
// Several blocks share a work-group processor, so that one's softmax runs under another's products.
//
// Line n of a product's rows is the key or the column 8 (n / 8) + 4 (n % 2) + n / 2 % 4, so that the registers of a
// lane, rows 2 r + h, are those of LaneTiles. The right operand P^T has its keys in the order of the lanes, those of
// h = 0 first, and both halves of the wave have all of them: each half sends its own to the other.
#pragma once

#include "hip/arch/wmma.h"
#include "hip/attention/lane_tiles.h"

namespace flashport::FLASHPORT_TARGET::attention {

template <AttentionConfig kCfg>
class AttentionTiles : public LaneTiles<kCfg, Floats8> {
  using Base = LaneTiles<kCfg, Floats8>;
  using Base::half_;
  using Base::kColumnBlocks;
  using Base::kKeyBlocks;
  using Base::kKeyVectors;
  using Base::kMath;
  using Base::n_;
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kValueVectors = kCfg.tuning.keys / 8;
  static constexpr bool kKeepsQueries = kKeyVectors <= 16;  // in registers
  static_assert(groups_of(kCfg) == 1 && !KvCopies<kCfg>::kInFlight);

 public:
  using Base::kBlockRows;
  using Base::kKeys;
  using typename Base::Out;
  using typename Base::Scores;
  struct Operand {
    Words4 own[kKeyBlocks];
  };

  FLASHPORT_DEVICE AttentionTiles(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), block_(block), memory_(memory), copies_(p, block, memory) {}

  FLASHPORT_DEVICE void take(const WorkTile& work) {
    this->take_lane(work, block_.thread());  // what is derived from it is computed for each work tile
  }

  FLASHPORT_DEVICE void begin(const WorkTile& work) {
    const KeyTiles range = key_tiles<kKeys>(p_, work, kBlockRows);
    copies_.begin(work, range.begin, minimum(work.kv_len, range.end * kKeys));
    query_ = this->query(p_, work);
    if constexpr (kKeepsQueries) {
#pragma unroll
      for (int step = 0; step < kKeyVectors / 2; ++step) queries_[step] = load_query(step);
    }
    const int line = n_ / 8 * 8 + n_ % 2 * 4 + n_ / 2 % 4;
    keys_from_ = key_offset<kKeyVectors>(line, 0);
    values_from_ = value_offset<kValueVectors>(line, 0);
    sync_shared();
    copies_.start();
  }

  FLASHPORT_DEVICE static void take_turn() {
    sync_shared();
    __builtin_amdgcn_sched_barrier(0);
  }
  FLASHPORT_DEVICE void give_turn() {
    Base::template order_products<1, 2, 2, 2>();
    __builtin_amdgcn_sched_barrier(0);
    copies_.next();
  }

  // S^T = K Q^T
  template <class Masked>
  FLASHPORT_DEVICE void multiply_keys(Scores& scores, int, Masked) {
#pragma unroll
    for (Floats8& c : scores.c) c = zero_tile();
#pragma unroll
    for (int step = 0; step < kKeyVectors / 2; ++step) {
      const Words8 query = kKeepsQueries ? queries_[kKeepsQueries ? step : 0] : load_query(step);
#pragma unroll
      for (int block = 0; block < kKeyBlocks; ++block) {
        const Words8 keys = read_lines<kKeyVectors>(memory_.keys, keys_from_, step, block);
        scores.c[block] = wmma<kMath>(keys, query, scores.c[block]);
      }
    }
    keys_from_ ^= Memory::kKeyBytes;
  }
  // kLater 0: the first product of a work tile.
  template <int kLater>
  FLASHPORT_DEVICE void settle_keys(Scores&) {
    if constexpr (kLater == 0) copies_.next();
  }

  // O^T += V^T P^T
  template <class Masked>
  FLASHPORT_DEVICE void add_values(Out& out, const Operand& weights, int, Masked) {
#pragma unroll
    for (int step = 0; step < kKeyBlocks; ++step) {
      const Words8 operand = both_halves(weights.own[step]);
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block) {
        const Words8 values = read_lines<kValueVectors>(memory_.values, values_from_, step ^ block % 2, block);
        out.c[block] = wmma<kMath>(values, operand, out.c[block]);
      }
    }
    values_from_ ^= Memory::kValueBytes;
  }
  FLASHPORT_DEVICE static void settle_values(Out&) {}
  // The last values are in LDS after it.
  FLASHPORT_DEVICE static void release_queries() { sync_shared(); }

  FLASHPORT_DEVICE static Operand to_operand(const Scores& weights) {
    Operand operand;
#pragma unroll
    for (int i = 0; i < Scores::kCount; i += 2) {
      operand.own[i / 8][i % 8 / 2] = round_weights(weights.get(i), weights.get(i + 1));
    }
    return operand;
  }

 private:
  FLASHPORT_DEVICE Words8 load_query(int step) const {
    const int columns = p_.head_dim_qk - 16 * step;
    const Words4 low = load_words<4>(columns > 0 ? query_ + 32 * step : zero_row());
    const Words4 high = load_words<4>(columns > 8 ? query_ + 32 * step + 16 : zero_row());
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
  }
  // The left operand of 16 rows from row 16 `block` on, and k from 16 `step` on.
  template <int kVectors>
  FLASHPORT_DEVICE static Words8 read_lines(const unsigned char* tile, int first, int step, int block) {
    const int offset = pair_offset(first, step), row = block * kWaveRows * kVectors * kVectorBytes;
    const auto low = *reinterpret_cast<const Words4*>(tile + offset + row);
    const auto high = *reinterpret_cast<const Words4*>(tile + (offset ^ kVectorBytes) + row);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
  }
  FLASHPORT_DEVICE Words8 both_halves(Words4 own) const {
    Words8 both;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned other = other_half(own[i]);
      both[i] = half_ == 0 ? own[i] : other;
      both[4 + i] = half_ == 0 ? other : own[i];
    }
    return both;
  }
  // Weights are numbers: their rounding needs no guard for NaN.
  FLASHPORT_DEVICE static unsigned round_weights(float low, float high) {
    if constexpr (kMath == MathType::kBf16) return high_halves(round_to_bf16_bits(low), round_to_bf16_bits(high));
    return pack<kMath>(low, high);
  }

  const AttentionParams& p_;
  const Block& block_;
  Memory& memory_;
  KvCopies<kCfg> copies_;
  GlobalBytes query_;
  int keys_from_ = 0, values_from_ = 0;  // byte offset of what the lane reads first of the tile that is multiplied next
  Words8 queries_[kKeepsQueries ? kKeyVectors / 2 : 1];  // [16, D] as the right operand
};

}  // namespace flashport::FLASHPORT_TARGET::attention
