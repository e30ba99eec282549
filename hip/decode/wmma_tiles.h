// The tile verbs of decode on WMMA targets.
//
// Tiles are kept transposed: S^T = K Q^T, O^T = V^T P^T, so that a lane holds one query row of each 16 x 16 tile: lane
// 16 h + n has row n, positions 8 h .. 8 h + 7 (key_at) of S, columns (2 r + h) kLaneCols + j of tile j of O. A row
// then needs one exchange between the halves. Waves form a grid (WaveShare): column waves split the 64 keys of S and
// the DV columns of O; row waves take rows / 16 / kRowWaves row tiles each. A slot is a row tile. Q^T and P^T come as
// operands from shared memory, where column waves put P together, each with its own reference (softmax_reference.h), so
// that a leaf has one barrier.
#pragma once

#include <type_traits>

#include "common/device/decode/combine.h"
#include "common/device/decode/mask.h"
#include "hip/decode/query.h"
#include "hip/decode/softmax_reference.h"
#include "hip/decode/wmma_kv.h"
#include "hip/decode/wmma_segments.h"

namespace flashport::FLASHPORT_TARGET::decode {

constexpr int block_threads(const DecodeConfig& cfg) { return cfg.tuning.waves * kWaveSize; }

template <DecodeConfig kCfg>
struct DecodeShared {
  // A row's pitch of 16 bytes more than a power of two spreads 16 rows over all banks.
  alignas(16) std::uint16_t query[kCfg.shape.rows][kCfg.shape.head_dim_qk + 8];
  // What column waves tell each other, of this leaf and the one before.
  struct Exchange {
    alignas(16) std::uint16_t probabilities[kCfg.shape.rows][kLeafKeys + 8];
    float reference[WaveShare<kCfg>::kColWaves][kCfg.shape.rows];
    float sum[WaveShare<kCfg>::kColWaves][kCfg.shape.rows];
  };
  Exchange exchange[2];
  struct Nothing {};
  [[no_unique_address]] std::conditional_t<reads_segments(kCfg.shape), WideTile<kCfg>, Nothing> rows;
  unsigned arrive_flag;
  PartialList partials[1];
};

template <DecodeConfig kCfg>
using KvPipeline = std::conditional_t<reads_segments(kCfg.shape), SegmentPipeline<kCfg>, WmmaPipeline<kCfg>>;

template <DecodeConfig kCfg>
class DecodeTiles {
  static constexpr DecodeShape kShape = kCfg.shape;
  static constexpr MathType kMath = kShape.math;
  using Share = WaveShare<kCfg>;
  using Pipeline = KvPipeline<kCfg>;
  static constexpr int kKeyTiles = Share::kKeyTiles;
  static constexpr int kColTiles = Share::kGroups * Share::kLaneCols;

 public:
  static constexpr int kRows = kShape.rows;
  static constexpr int kRowSlots = Share::kRowTiles;
  static constexpr int kColumns = kShape.head_dim_v;
  static constexpr int kTurnLeaves = 1;
  // The block publishes a state as one slice.
  static constexpr int kSliceColumns = kColumns;
  // More registers than these would spill.
  static constexpr int kStateRegisters = 8 * kColTiles * kRowSlots;
  static constexpr bool kFits = kColumns == 128 && !(kRowSlots > 1 && Pipeline::Key::kScales > 0);
  static constexpr int kKeptStates = kStateRegisters <= 16 ? 2 : kFits ? 1 : 0;

  struct Rows {
    float v[kRowSlots];
    FLASHPORT_DEVICE float& operator[](int slot) { return v[slot]; }
    FLASHPORT_DEVICE float operator[](int slot) const { return v[slot]; }
  };
  struct Query {};    // Q is in shared memory
  struct Operand {};  // and so is P
  struct Scores {
    Floats8 c[kKeyTiles][kRowSlots];
  };
  struct Out {
    Floats8 c[kColTiles][kRowSlots];
    Out() = default;
    FLASHPORT_DEVICE Out(const Out& other) { *this = other; }
    // Copied by tiles: a copy of a whole state would carry its padding along, in scratch memory.
    FLASHPORT_DEVICE Out& operator=(const Out& other) {
#pragma unroll
      for (int tile = 0; tile < kColTiles; ++tile) {
#pragma unroll
        for (int slot = 0; slot < kRowSlots; ++slot) c[tile][slot] = other.c[tile][slot];
      }
      return *this;
    }
  };

  FLASHPORT_DEVICE DecodeTiles(const DecodeParams& p, const Block& block, DecodeShared<kCfg>& shared)
      : block_(block), shared_(shared), live_rows_(minimum(kRows, p.group_size * p.max_q_len)) {}

  FLASHPORT_DEVICE static constexpr int row_slots() { return kRowSlots; }
  FLASHPORT_DEVICE int live_rows() const { return recompute_scalar(live_rows_); }
  FLASHPORT_DEVICE int row_of(int slot) const { return recompute((row_wave() * kRowSlots + slot) * 16 + n()); }
  // Whether this lane is the one to write per-row values of a slot.
  FLASHPORT_DEVICE bool owns_row(int) const { return col_wave() == 0 && half() == 0; }
  FLASHPORT_DEVICE static constexpr int slice() { return 0; }
  FLASHPORT_DEVICE const Block& slice_threads() const { return block_; }
  FLASHPORT_DEVICE int slice_rows() const { return live_rows(); }
  FLASHPORT_DEVICE static constexpr int first_row() { return 0; }
  FLASHPORT_DEVICE static constexpr int first_column() { return 0; }

  // Brings the tile's query rows to shared memory as the math type; padding rows and dims are zero. Ends with a
  // barrier.
  FLASHPORT_DEVICE void stage_query(const DecodeParams& p, const Segment& s) const {
    constexpr int kChunks = kShape.head_dim_qk / 8;
    for (int i = block_.thread(); i < kRows * kChunks; i += block_threads(kCfg)) {
      const int row = i / kChunks;
      const int dim = i % kChunks * 8;
      *reinterpret_cast<Words4*>(&shared_.query[row][dim]) =
          load_query<kCfg>(p, s, live_rows_, row, dim, [](float x, float y) { return pack<kMath>(x, y); });
    }
    sync_shared();
  }
  FLASHPORT_DEVICE void fetch_query(Query&) const {}

  // S^T = K Q^T
  FLASHPORT_DEVICE Scores mma_abt(const Query&, Pipeline& keys) const {
    Scores scores;
#pragma unroll
    for (auto& tile : scores.c) {
#pragma unroll
      for (Floats8& c : tile) c = zero_tile();
    }
#pragma unroll
    for (int unit = 0; unit < Pipeline::kKeyUnits; ++unit) {
#pragma unroll
      for (int step = 0; step < Pipeline::Key::kDims / 16; ++step) {
        Words8 query[kRowSlots];
#pragma unroll
        for (int slot = 0; slot < kRowSlots; ++slot) {
          query[slot] = load_operand(&shared_.query[row_of(slot)][unit * Pipeline::Key::kDims + step * 16]);
        }
#pragma unroll
        for (int tile = 0; tile < kKeyTiles; ++tile) {
          const Words8 key = keys.key(unit, tile).operand(step);
#pragma unroll
          for (int slot = 0; slot < kRowSlots; ++slot) {
            scores.c[tile][slot] = wmma<kMath>(key, query[slot], scores.c[tile][slot]);
          }
        }
      }
#pragma unroll
      for (auto& tile : scores.c) {
#pragma unroll
        for (Floats8& c : tile) keep_order(c);
      }
      if (unit + Pipeline::kKeyDepth < Pipeline::kKeyUnits) keys.load_key(unit + Pipeline::kKeyDepth);
    }
    return scores;
  }

  // f(value, slot, key of the leaf)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const int first_key = key_at(first_position(tile));
#pragma unroll
      for (int slot = 0; slot < kRowSlots; ++slot) {
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          float x = scores.c[tile][slot][r];
          f(x, slot, first_key + key_at(r));
          scores.c[tile][slot][r] = x;
        }
      }
    }
  }

  // P = exp2(S - r) in the math type, and its sums before rounding, to shared memory. A row's reference r is the larger
  // of the state's m and the largest score among the keys of this wave.
  template <class State>
  FLASHPORT_DEVICE Operand exponentiate(const State& state, const Scores& scores) {
    buffer_ ^= 1;
    auto& to = shared_.exchange[buffer_];
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      float most = -kInfinity;
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
        for (int r = 0; r < 8; ++r) most = maximum(most, scores.c[tile][slot][r]);
      }
      const float m = maximum(state.m[slot], maximum(most, other_half(most)));
      const float reference = finite(m);
      const int row = row_of(slot);
      float sum = 0.0f;
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
        const Floats8& x = scores.c[tile][slot];
        Words4 packed;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float first = exp2_approx(x[2 * i] - reference);
          const float second = exp2_approx(x[2 * i + 1] - reference);
          sum += first + second;
          packed[i] = pack<kMath>(first, second);
        }
        *reinterpret_cast<Words4*>(&to.probabilities[row][first_position(tile)]) = packed;
      }
      sum += other_half(sum);
      if (half() == 0) {
        to.reference[col_wave()][row] = m;
        to.sum[col_wave()][row] = sum;
      }
    }
    return {};
  }

  // (m, l, O^T) joined with V^T P^T. Holds a barrier.
  template <class State>
  FLASHPORT_DEVICE void accumulate(State& state, const Operand&, Pipeline& values) const {
    if constexpr (!reads_segments(kShape)) sync_shared();  // else the values have come with a barrier
    const auto& from = shared_.exchange[buffer_];
    const unsigned swap = half() == 0 ? 0u : 0x04040404u;
    const unsigned shift = kv::element_shift<kShape.v_format>(n() * Share::kLaneCols);
    int exponent[kRowSlots];
#pragma unroll
    for (int step = 0; step < kLeafKeys / 16; ++step) {
      if (step % kKeyTiles == 0) {
        const int wave = step / kKeyTiles;
        Rows to;
#pragma unroll
        for (int slot = 0; slot < kRowSlots; ++slot) {
          const ReferenceMove move(state.m[slot], from.reference[wave][row_of(slot)]);
          to[slot] = move.to;
          exponent[slot] = move.exponent;
        }
        move_references<DecodeTiles>(state, to);
#pragma unroll
        for (int slot = 0; slot < kRowSlots; ++slot) {
          state.l[slot] += from.sum[wave][row_of(slot)] * power_of_two(-exponent[slot]);
        }
      }
      Words8 probabilities[kRowSlots];
#pragma unroll
      for (int slot = 0; slot < kRowSlots; ++slot) {
        const ProbabilityScale<kMath> scale(exponent[slot]);
        const Words8 words = load_operand(&from.probabilities[row_of(slot)][16 * step]);
#pragma unroll
        for (int i = 0; i < 8; ++i) probabilities[slot][i] = scale(words[i]);
      }
#pragma unroll
      for (int group = 0; group < Share::kGroups; ++group) {
        const int unit = step * Share::kGroups + group;
        const auto& own = values.value(unit);
        typename Pipeline::Value::Both both;
#pragma unroll
        for (int j = 0; j < Share::kLaneCols; ++j) {
          if (j % Pipeline::Value::kWordCols == 0) both = own.exchange(j / Pipeline::Value::kWordCols, shift, swap);
          const Words8 value = own.operand(both, swap, j);
#pragma unroll
          for (int slot = 0; slot < kRowSlots; ++slot) {
            Floats8& c = state.o.c[group * Share::kLaneCols + j][slot];
            c = wmma<kMath>(value, probabilities[slot], c);
            keep_order(c);
          }
        }
        if (unit + Pipeline::kValueDepth < Pipeline::kValueUnits) values.load_value(unit + Pipeline::kValueDepth);
      }
    }
  }

  FLASHPORT_DEVICE void clear(Out& out) const {
#pragma unroll
    for (auto& tile : out.c) {
#pragma unroll
      for (Floats8& c : tile) c = zero_tile();
    }
  }
  FLASHPORT_DEVICE static void scale(Out& out, int slot, float factor) {
#pragma unroll
    for (auto& tile : out.c) tile[slot] *= factor;
  }

  // f(to, from, slot)
  template <class F>
  FLASHPORT_DEVICE void for_each_pair(Out& to, const Out& from, F&& f) const {
#pragma unroll
    for (int tile = 0; tile < kColTiles; ++tile) {
#pragma unroll
      for (int slot = 0; slot < kRowSlots; ++slot) {
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          float x = to.c[tile][slot][r];
          f(x, from.c[tile][slot][r], slot);
          to.c[tile][slot][r] = x;
        }
      }
    }
  }

  // f(value, slot, column). A loop over the registers of a tile, which move up by one each time: written out, what a
  // caller does to one value would fill the instruction cache.
  template <class F>
  FLASHPORT_DEVICE void for_each_out(const Out& out, F&& f) const {
    Out rest = out;
    int first = lane_column();
#pragma unroll 1
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int tile = 0; tile < kColTiles; ++tile) {
#pragma unroll
        for (int slot = 0; slot < kRowSlots; ++slot) {
          Floats8& c = rest.c[tile][slot];
          f(c[0], slot, first + tile / Share::kLaneCols * 16 * Share::kLaneCols + tile % Share::kLaneCols);
          c = __builtin_shufflevector(c, c, 1, 2, 3, 4, 5, 6, 7, 0);
        }
      }
      first += wmma_row(1, 0) * Share::kLaneCols;
    }
  }

  // Live rows to memory: per-row values [live_rows], tile [live_rows, DV].
  FLASHPORT_DEVICE void store_rows(const Rows& m, const Rows& l, float* to) const {
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      if (owns_row(slot) && row_of(slot) < live_rows())
        to[2 * row_of(slot)] = m[slot], to[2 * row_of(slot) + 1] = l[slot];
    }
  }
  FLASHPORT_DEVICE void store_tile(const Out& out, float* to) const {
    for_each_two([&](int slot, int col, int tile, int r) {
      if (row_of(slot) < live_rows()) {
        *reinterpret_cast<float2*>(to + row_of(slot) * kShape.head_dim_v + col) =
            make_float2(out.c[tile][slot][r], out.c[tile + 1][slot][r]);
      }
    });
  }

 private:
  FLASHPORT_DEVICE int half() const { return static_cast<int>(static_cast<unsigned>(block_.thread()) / 16 % 2); }
  FLASHPORT_DEVICE int n() const { return static_cast<int>(static_cast<unsigned>(block_.thread()) % 16); }
  FLASHPORT_DEVICE int row_wave() const { return recompute_scalar(block_.wave()) / Share::kColWaves; }
  FLASHPORT_DEVICE int col_wave() const { return recompute_scalar(block_.wave()) % Share::kColWaves; }
  // The lane's first position in a tile of S; register r is r positions on.
  FLASHPORT_DEVICE int first_position(int tile) const { return (col_wave() * kKeyTiles + tile) * 16 + 8 * half(); }

  // Column of register 0 of tile 0.
  FLASHPORT_DEVICE int lane_column() const { return recompute(col_wave() * Share::kCols + half() * Share::kLaneCols); }

  // f(slot, column, tile, register): registers of tile and tile + 1 hold this column and the next.
  template <class F>
  FLASHPORT_DEVICE void for_each_two(F&& f) const {
    const int first = lane_column();
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
#pragma unroll
      for (int tile = 0; tile < kColTiles; tile += 2) {
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          const int row = tile / Share::kLaneCols * 16 + wmma_row(r, 0);
          f(slot, first + row * Share::kLaneCols + tile % Share::kLaneCols, tile, r);
        }
      }
    }
  }

  FLASHPORT_DEVICE static Words8 load_operand(const std::uint16_t* from) {
    const Words4 low = *reinterpret_cast<const Words4*>(from);
    const Words4 high = *reinterpret_cast<const Words4*>(from + 8);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
  }

  const Block& block_;
  DecodeShared<kCfg>& shared_;
  int live_rows_;
  int buffer_ = 0;  // of what column waves tell each other
};

}  // namespace flashport::FLASHPORT_TARGET::decode
