// The tile verbs of attention on WMMA: eight waves with 16 queries each; keys and values come to LDS for all of them.
// Several blocks share a work-group processor, so that one's softmax runs under another's products.
//
// Line n of a left operand is the key or the column wmma_line_in_fours(n), so that the registers of a lane, rows
// 2 r + h, are those of LaneTiles. The right operand P^T has its keys in the order of the lanes, those of
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
  static constexpr int kSteps = kKeyVectors / 2;
  static constexpr bool kSharesQueries = attention_shares_queries(kCfg.shape);
  static constexpr int kStages = kCfg.tuning.stages;
  static_assert(groups_of(kCfg) == 1 && !Copies<kCfg>::kInFlight);

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
    if constexpr (Memory::kInTurn) sync_shared();  // the values of the work tile before were where keys come to
    copies_.begin(work, range.begin, minimum(work.kv_len, range.end * kKeys));
    load_queries(work);
    const int line = wmma_line_in_fours(n_);
    keys_from_ = key_offset<kKeyVectors, Memory::kKeyPlaces>(line, 0);
    values_from_ = value_offset<kValueVectors>(this->slice_ * Base::kColumns + line, 0);
    sync_shared();
    copies_.start();
  }

  FLASHPORT_DEVICE void take_turn() {
    sync_shared();
    if constexpr (kStages == 1) refill();
    __builtin_amdgcn_sched_barrier(0);
  }
  FLASHPORT_DEVICE void give_turn() {
    __builtin_amdgcn_sched_barrier(0);
    if constexpr (kStages > 1) copies_.next();
  }

  // S^T = K Q^T
  template <class Masked>
  FLASHPORT_DEVICE void multiply_keys(Scores& scores, int, Masked) {
    const auto read = [&](int i) FLASHPORT_INLINE {
      return read_lines<kKeyVectors>(memory_.keys, keys_from_, i / kKeyBlocks, i % kKeyBlocks);
    };
    Words8 shared_query = read_query(0);
    multiply<kSteps * kKeyBlocks>(read, [&](int i, const Words8& keys) FLASHPORT_INLINE {
      const int step = i / kKeyBlocks;
      Floats8& c = scores.c[i % kKeyBlocks];
      c = wmma<kMath>(keys, kSharesQueries ? shared_query : queries_[kSharesQueries ? 0 : step],
                      step == 0 ? Floats8{} : c);
      if (i % kKeyBlocks == kKeyBlocks - 1 && step + 1 < kSteps) shared_query = read_query(step + 1);
      keep_order(c);
    });
    keys_from_ ^= Memory::kNextKeys;
  }
  // kLater 0: the first product of a work tile.
  template <int kLater>
  FLASHPORT_DEVICE void settle_keys(Scores&) {
    if constexpr (kLater == 0 && kStages > 1) copies_.next();
  }

  // O^T += V^T P^T
  template <class Masked>
  FLASHPORT_DEVICE void add_values(Out& out, const Operand& weights, int, Masked) {
    constexpr int kProducts = kKeyBlocks * kColumnBlocks;
    const auto read = [&](int i) FLASHPORT_INLINE {
      const int step = i / kColumnBlocks, block = i % kColumnBlocks;
      return read_lines<kValueVectors>(memory_.values, values_from_, step ^ block % 2, block);
    };
    if constexpr (Memory::kInTurn) {
      sync_shared();
      copies_.next_values();
      sync_shared();
    }
    Words8 operand;
    multiply<kProducts>(read, [&](int i, const Words8& values) FLASHPORT_INLINE {
      if (i % kColumnBlocks == 0) operand = both_halves(weights.own[i / kColumnBlocks]);
      Floats8& c = out.c[i % kColumnBlocks];
      c = wmma<kMath>(values, operand, c);
      keep_order(c);
    });
    values_from_ ^= Memory::kNextValues;
  }
  FLASHPORT_DEVICE static void settle_values(Out&) {}
  // The last values are in LDS after it, or in registers.
  FLASHPORT_DEVICE void release_queries() {
    sync_shared();
    if constexpr (kStages == 1) refill();
  }

  FLASHPORT_DEVICE static Operand to_operand(const Scores& weights) {
    Operand operand;
#pragma unroll
    for (int i = 0; i < Scores::kCount; i += 2) {
      operand.own[i / 8][i % 8 / 2] = round_weights(weights.get(i), weights.get(i + 1));
    }
    return operand;
  }

 private:
  // With one stage, nothing multiplies while copies arrive. Where keys and values have one place, the keys of step i
  // come before their product, and values of step i - 1 after it.
  FLASHPORT_DEVICE void refill() {
    if constexpr (Memory::kInTurn) {
      copies_.next_keys();
    } else {
      copies_.next();
    }
    sync_shared();
  }

  // f(i, read(i)) for kProducts products in a row: reads from LDS go a few products ahead, and no further.
  template <int kProducts, class Read, class F>
  FLASHPORT_DEVICE static void multiply(const Read& read, const F& f) {
    constexpr int kAhead = 2;
    Words8 operands[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) operands[i] = read(i);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const Words8 operand = operands[i % kAhead];
      if (i + kAhead < kProducts) operands[i % kAhead] = read(i + kAhead);
      f(i, operand);
    }
  }

  // As the right operand [D, 16]. A wave brings its queries to LDS for itself, and needs no barrier: waves with the
  // same queries write the same.
  FLASHPORT_DEVICE void load_queries(const WorkTile& work) {
    Base::with_query_type(p_, [&](auto constant) FLASHPORT_INLINE {
      constexpr DType kType = constant;
      constexpr int kBytes = kType == DType::kFp8E4M3 ? 1 : 2;
      if constexpr (kSharesQueries) {
        const int first = this->row_ - n_;
        unsigned char* to = own_queries();
#pragma unroll 4
        for (int i = block_.lane(); i < kWaveRows * kKeyVectors; i += kWaveSize) {
          const int row = i / kKeyVectors, vector = i % kKeyVectors;
          const GlobalBytes query = Base::query(p_, work, first + row, kBytes);
          *reinterpret_cast<Words4*>(to + key_offset<kKeyVectors, Memory::kKeyPlaces>(row, vector)) =
              Base::template load_query<kType>(p_, query, vector);
        }
      } else {
        const GlobalBytes query = Base::query(p_, work, this->row_, kBytes);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const Words4 low = Base::template load_query<kType>(p_, query, 2 * step);
          const Words4 high = Base::template load_query<kType>(p_, query, 2 * step + 1);
          queries_[step] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
        }
      }
    });
  }
  FLASHPORT_DEVICE unsigned char* own_queries() const {
    const int row = block_.wave() / Base::kSlices * kWaveRows;
    return memory_.queries.x + row * kKeyVectors * kVectorBytes;
  }
  FLASHPORT_DEVICE Words8 read_query(int step) const {
    if constexpr (kSharesQueries)
      return read_lines<kKeyVectors>(own_queries(), key_offset<kKeyVectors, Memory::kKeyPlaces>(n_, 0), step, 0);
    return {};
  }
  // The left operand of 16 rows from row 16 `block` on, and k from 16 `step` on.
  template <int kVectors>
  FLASHPORT_DEVICE static Words8 read_lines(const unsigned char* tile, int first, int step, int block) {
    const int row = block * kWaveRows * kVectors * kVectorBytes;
    const auto low = *reinterpret_cast<const Words4*>(tile + pair_offset(first, step) + row);
    const auto high = *reinterpret_cast<const Words4*>(tile + pair_offset(first ^ kVectorBytes, step) + row);
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
  Copies<kCfg> copies_;
  int keys_from_ = 0, values_from_ = 0;  // byte offset of what the lane reads first of the tile that is multiplied next
  Words8 queries_[kSharesQueries ? 1 : kSteps];
};

}  // namespace flashport::FLASHPORT_TARGET::attention
