// The tile verbs of decode on MFMA: S^T = K Q^T and O^T = V^T P^T, so that a lane holds query row n = lane % 16 of a
// tile of 16 throughout, and P goes from accumulator to operand in place.
//
// A row slot is a tile of 16 query rows; a wave has all of them, so that K and V are read once. The waves of a block
// split the keys of the scores and the columns of the output, and exchange P through shared memory, each with its own
// reference (softmax_reference.h), so that a leaf has one barrier. Where one wave has all columns, nothing is exchanged
// and no leaf has a barrier. Output tile t of a wave's kLaneCols holds columns kLaneCols * i + t (i 0..15): the columns
// that a lane has loaded side by side, it also holds side by side.
#pragma once

#include <type_traits>

#include "common/device/decode/combine.h"
#include "common/device/decode/mask.h"
#include "hip/decode/mfma_pipeline.h"
#include "hip/decode/mfma_segments.h"
#include "hip/decode/query.h"
#include "hip/decode/softmax_reference.h"

namespace flashport::FLASHPORT_TARGET::decode {

constexpr int block_threads(const DecodeConfig& cfg) { return cfg.tuning.waves * kWaveSize; }

template <DecodeConfig kCfg>
struct DecodeSharedData {
  using Split = WaveSplit<kCfg>;
  std::conditional_t<reads_segments(kCfg.shape), WideTile<kCfg>, LeafRowsOf<kCfg>[kCfg.tuning.waves]> rows;
  using Query = std::uint16_t[kCfg.shape.rows][kCfg.shape.head_dim_qk + 8];
  // What waves tell each other, of this leaf and the one before.
  struct Exchange {
    Words2 probabilities[Split::kRowTiles][Split::kSteps][kWaveSize];
    float reference[kCfg.tuning.waves][Split::kRowTiles][16];
    float sum[kCfg.tuning.waves][Split::kRowTiles][16];
  };
  struct Nothing {};
  using Exchanges = std::conditional_t<(Split::kColWaves > 1), Exchange, Nothing>[2];
  struct Beside {
    alignas(16) Query query;
    Exchanges exchange;
  };
  union Overlaid {
    alignas(16) Query query;
    Exchanges exchange;
  };
  std::conditional_t<Split::kKeepsQuery, Overlaid, Beside> memory;
  unsigned arrive_flag;
  PartialList partials[1];
};

// As large as lets a CU hold the blocks that the tuning asks for and no more: others would add partial results, and
// workspace for them, but no bytes in flight that are missing.
template <DecodeConfig kCfg>
struct DecodeShared : DecodeSharedData<kCfg> {
  static constexpr int kLeast = kSharedBytes / (kCfg.tuning.blocks_per_multiprocessor + 1) + 1;
  static constexpr int kData = static_cast<int>(sizeof(DecodeSharedData<kCfg>));
  alignas(16) unsigned char limit[kData < kLeast ? (kLeast - kData + 15) / 16 * 16 : 16];
};

template <DecodeConfig kCfg>
using KvPipeline = std::conditional_t<reads_segments(kCfg.shape), SegmentPipeline<kCfg, DecodeShared<kCfg>>,
                                      MfmaPipeline<kCfg, DecodeShared<kCfg>>>;

template <DecodeConfig kCfg>
class DecodeTiles {
  using Split = WaveSplit<kCfg>;
  static constexpr DecodeShape kShape = kCfg.shape;
  static constexpr MathType kMath = kShape.math;
  static constexpr KvFormat kKeyFormat = Split::kKeyFormat, kValueFormat = Split::kValueFormat;
  static constexpr int kRowTiles = Split::kRowTiles;
  static constexpr int kKeyTiles = Split::kKeyTiles;
  static constexpr int kLaneCols = Split::kLaneCols;
  static constexpr int kUnitSteps = Split::kUnitDims / 4;  // matrix instructions that a unit of keys feeds
  static constexpr bool kKeepsQuery = Split::kKeepsQuery;
  static constexpr bool kOverlays = kKeepsQuery && Split::kColWaves > 1;  // what waves exchange, by the query

  // So many that nothing spills: the registers that the main loop holds, and those of states, are no more than clang
  // was seen to place in 512. One where two waves share a SIMD, because of combine_partials(), and with 64 rows, where
  // the output of a tile from registers is much code.
  static constexpr int kept_states() {
    constexpr int kMost = 368;
    constexpr int kState = 4 * kRowTiles * kLaneCols;
    constexpr int kScores = 4 * kRowTiles * kKeyTiles;
    constexpr int kExchanged = Split::kColWaves > 1 ? 16 * kRowTiles : 0;
    constexpr int kWords = sizeof(KeyFragments<kCfg>::words) + sizeof(ValueFragments<kCfg>::words);
    constexpr int kKeyScales = Split::kScalesKeys ? sizeof(KeyFragments<kCfg>::scales) : 0;
    constexpr int kValueScales = Split::kScalesValues ? sizeof(ValueFragments<kCfg>::scales) : 0;
    constexpr int kFragments = (kWords + kKeyScales + kValueScales) / 4;
    constexpr int kLoop = kState + kScores + kExchanged + kFragments + (kKeepsQuery ? Split::kQueryRegisters : 0);
    constexpr int kWaves = kCfg.tuning.waves * kCfg.tuning.blocks_per_multiprocessor;
    constexpr int kFit = (kMost - kLoop) / kState;
    constexpr int kWanted = kWaves > 4 || kShape.rows == 64 ? 1 : 2;
    return kFit < kWanted ? kFit : kWanted;
  }

 public:
  static constexpr int kRows = kShape.rows;
  static constexpr int kRowSlots = kRowTiles;
  static constexpr int kColumns = kShape.head_dim_v;
  static constexpr int kTurnLeaves = 1;
  // The block publishes a state as one slice.
  static constexpr int kSliceColumns = kColumns;
  static constexpr int kKeptStates = kept_states();

  struct Rows {
    float v[kRowSlots];
    FLASHPORT_DEVICE float& operator[](int slot) { return v[slot]; }
    FLASHPORT_DEVICE float operator[](int slot) const { return v[slot]; }
  };
  struct Query {
    Words2 b[kKeepsQuery ? kRowTiles : 1][Split::kUnits][kUnitSteps];
  };
  struct Scores {
    Floats4 c[kRowTiles][kKeyTiles];
  };
  struct Out {
    Floats4 c[kRowTiles][kLaneCols];
  };
  // P of this wave's keys, with the reference and the sum of each row.
  struct Operand {
    Words2 b[kRowTiles][kKeyTiles];
    Rows m, l;
  };

  FLASHPORT_DEVICE DecodeTiles(const DecodeParams& p, const Block& block, DecodeShared<kCfg>& shared)
      : block_(block),
        shared_(shared),
        live_rows_(minimum(kRows, p.group_size * p.max_q_len)),
        col_wave_(block.wave()),
        n_(block.lane() % 16),
        g_(block.lane() / 16),
        value_shift_(kv::element_shift<kValueFormat>(n_ * kLaneCols)) {}

  FLASHPORT_DEVICE static constexpr int row_slots() { return kRowSlots; }
  FLASHPORT_DEVICE int live_rows() const { return recompute_scalar(live_rows_); }
  FLASHPORT_DEVICE int row_of(int slot) const { return recompute(slot * 16 + n_); }
  // Whether this lane is the one to write per-row values of a slot.
  FLASHPORT_DEVICE bool owns_row(int) const { return col_wave_ == 0 && recompute(g_) == 0; }
  FLASHPORT_DEVICE static constexpr int slice() { return 0; }
  FLASHPORT_DEVICE const Block& slice_threads() const { return block_; }
  FLASHPORT_DEVICE int slice_rows() const { return live_rows(); }
  FLASHPORT_DEVICE static constexpr int first_row() { return 0; }
  FLASHPORT_DEVICE static constexpr int first_column() { return 0; }

  // Brings the tile's query rows to shared memory as the math type; padding rows and dims are zero. Ends in a barrier.
  FLASHPORT_DEVICE void stage_query(const DecodeParams& p, const Segment& s) const {
    constexpr int kChunks = kShape.head_dim_qk / 8;
    if constexpr (kOverlays) block_.sync();
    for (int i = block_.thread(); i < kRows * kChunks; i += block_threads(kCfg)) {
      const int row = i / kChunks;
      const int dim = i % kChunks * 8;
      *reinterpret_cast<Words4*>(&shared_.memory.query[row][dim]) =
          load_query<kCfg>(p, s, live_rows_, row, dim, [](float x, float y) { return pack<kMath>(x, y); });
    }
    block_.sync();
  }

  FLASHPORT_DEVICE void fetch_query(Query& query) const {
    if constexpr (kKeepsQuery) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int c = 0; c < Split::kUnits; ++c) query_operands(query.b[tile][c], tile, c);
      }
    }
    if constexpr (kOverlays) block_.sync();
  }

  // S = Q K^T
  FLASHPORT_DEVICE Scores mma_abt(const Query& query, const KeyFragments<kCfg>& keys) const {
    Scores scores;
    for_each_fragment(scores.c, [](Floats4& c, int) { c = 0.0f; });
#pragma unroll
    for (int c = 0; c < Split::kUnits; ++c) {
      Words2 read[kRowTiles][kUnitSteps];
      if constexpr (!kKeepsQuery) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) query_operands(read[tile], tile, c);
      }
#pragma unroll
      for (int i = 0; i < kUnitSteps; ++i) {
#pragma unroll
        for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
          const Words2 a = key_operand(keys, key_tile, c, i);
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            if constexpr (kKeepsQuery) {
              mfma<kMath>(scores.c[tile][key_tile], a, query.b[tile][c][i]);
            } else {
              mfma<kMath>(scores.c[tile][key_tile], a, read[tile][i]);
            }
          }
        }
      }
    }
    return scores;
  }

  // f(value, slot, key of the leaf)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float x = scores.c[tile][key_tile][i];
          f(x, tile, (col_wave_ * kKeyTiles + key_tile) * 16 + 4 * g_ + i);
          scores.c[tile][key_tile][i] = x;
        }
      }
    }
  }

  // P = exp2(S - r) of this wave's keys in the math type, and its sums before rounding.
  template <class State>
  FLASHPORT_DEVICE Operand exponentiate(const State& state, Scores& scores) {
    buffer_ ^= 1;
    Operand p;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      float most = -kInfinity;
      for_each_score(scores, tile, [&](float& x) { most = maximum(most, x); });
      most = maximum(most, swap_16(most));
      p.m[tile] = maximum(state.m[tile], maximum(most, swap_32(most)));
      const float reference = finite(p.m[tile]);
      for_each_score(scores, tile, [&](float& x) { x = exp2_approx(x - reference); });
      float sum = 0.0f;
#pragma unroll
      for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
        const Floats4 x = scores.c[tile][key_tile];
        sum += (x[0] + x[1]) + (x[2] + x[3]);
        p.b[tile][key_tile] = {pack<kMath>(x[0], x[1]), pack<kMath>(x[2], x[3])};
      }
      sum += swap_16(sum);
      p.l[tile] = sum + swap_32(sum);
    }
    if constexpr (Split::kColWaves > 1) publish(p);
    return p;
  }

  // (m, l, O) joined with P V. Holds a barrier where P is exchanged.
  template <class State>
  FLASHPORT_DEVICE void accumulate(State& state, const Operand& p, const ValueFragments<kCfg>& values) const {
    if constexpr (Split::kColWaves == 1) {
      move_references<DecodeTiles>(state, p.m);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) state.l[tile] += p.l[tile];
      multiply(state.o, p.b, values, 0);
    } else {
      if constexpr (!reads_segments(kShape)) block_.sync();  // else the values have come with a barrier
#pragma unroll
      for (int wave = 0; wave < Split::kColWaves; ++wave) {
        Words2 all[kRowTiles][kKeyTiles];
        take_over(state, wave, all);
        multiply(state.o, all, values, wave * kKeyTiles);
      }
    }
  }

  FLASHPORT_DEVICE void clear(Out& out) const {
    for_each_fragment(out.c, [](Floats4& c, int) { c = 0.0f; });
  }
  FLASHPORT_DEVICE static void scale(Out& out, int slot, float factor) {
#pragma unroll
    for (Floats4& c : out.c[slot]) c *= factor;
  }

  // f(to, from, slot)
  template <class F>
  FLASHPORT_DEVICE void for_each_pair(Out& to, const Out& from, F&& f) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int col = 0; col < kLaneCols; ++col) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float x = to.c[tile][col][i];
          f(x, from.c[tile][col][i], tile);
          to.c[tile][col][i] = x;
        }
      }
    }
  }

  // f(value, slot, column)
  template <class F>
  FLASHPORT_DEVICE void for_each_out(const Out& out, F&& f) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const int first = recompute(column(0));  // or what is asked of each column would be kept from tile to tile
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int col = 0; col < kLaneCols; ++col) f(out.c[tile][col][i], tile, first + i * kLaneCols + col);
      }
    }
  }

  // Live rows to memory: per-row values [live_rows], tile [live_rows, DV].
  FLASHPORT_DEVICE void store_rows(const Rows& m, const Rows& l, float* to) const {
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      const int row = row_of(slot);
      if (owns_row(slot) && row < live_rows_) to[2 * row] = m[slot], to[2 * row + 1] = l[slot];
    }
  }
  FLASHPORT_DEVICE void store_tile(const Out& out, float* to) const {
    using Vector = float __attribute__((ext_vector_type(4)));
    const int first = recompute(row_of(0) * kShape.head_dim_v + column(0));
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      if (row_of(tile) >= live_rows_) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* at = to + first + tile * 16 * kShape.head_dim_v + i * kLaneCols;
#pragma unroll
        for (int col = 0; col < kLaneCols; col += 4) {
          *reinterpret_cast<Vector*>(at + col) =
              Floats4{out.c[tile][col][i], out.c[tile][col + 1][i], out.c[tile][col + 2][i], out.c[tile][col + 3][i]};
        }
      }
    }
  }

 private:
  // First of the columns that register i of the output tiles holds.
  FLASHPORT_DEVICE int column(int i) const { return col_wave_ * Split::kWaveCols + (4 * g_ + i) * kLaneCols; }

  template <int kFirst, int kSecond, class F>
  FLASHPORT_DEVICE static void for_each_fragment(Floats4 (&fragments)[kFirst][kSecond], F&& f) {
#pragma unroll
    for (int a = 0; a < kFirst; ++a) {
#pragma unroll
      for (int b = 0; b < kSecond; ++b) f(fragments[a][b], a);
    }
  }

  // f(score), those of a row tile
  template <class F>
  FLASHPORT_DEVICE static void for_each_score(Scores& scores, int tile, F&& f) {
#pragma unroll
    for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = scores.c[tile][key_tile][i];
        f(x);
        scores.c[tile][key_tile][i] = x;
      }
    }
  }

  // O += P V of kKeyTiles steps
  FLASHPORT_DEVICE void multiply(Out& out, const Words2 (&p)[kRowTiles][kKeyTiles], const ValueFragments<kCfg>& values,
                                 int first_step) const {
#pragma unroll
    for (int step = 0; step < kKeyTiles; ++step) {
#pragma unroll
      for (int group = 0; group < kLaneCols / 4; ++group) {
        Words2 a[4];
        value_operands(a, values, first_step + step, group);
#pragma unroll
        for (int col = 0; col < 4; ++col) {
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) mfma<kMath>(out.c[tile][4 * group + col], a[col], p[tile][step]);
        }
      }
    }
  }

  // Tells the other waves.
  FLASHPORT_DEVICE void publish(const Operand& p) const {
    auto& to = shared_.memory.exchange[buffer_];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
        to.probabilities[tile][col_wave_ * kKeyTiles + key_tile][block_.lane()] = p.b[tile][key_tile];
      }
      if (g_ == 0) {
        to.reference[col_wave_][tile][n_] = p.m[tile];
        to.sum[col_wave_][tile][n_] = p.l[tile];
      }
    }
  }

  // P of a wave's keys at the state's reference, which moves for it, and its sums, which join the state's.
  template <class State>
  FLASHPORT_DEVICE void take_over(State& state, int wave, Words2 (&p)[kRowTiles][kKeyTiles]) const {
    const auto& from = shared_.memory.exchange[buffer_];
    Rows to;
    int exponent[kRowTiles];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const ReferenceMove move(state.m[tile], from.reference[wave][tile][n_]);
      to[tile] = move.to;
      exponent[tile] = move.exponent;
    }
    move_references<DecodeTiles>(state, to);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      state.l[tile] += from.sum[wave][tile][n_] * power_of_two(-exponent[tile]);
      const ProbabilityScale<kMath> scale(exponent[tile]);
#pragma unroll
      for (int step = 0; step < kKeyTiles; ++step) {
        const Words2 words = from.probabilities[tile][wave * kKeyTiles + step][block_.lane()];
        p[tile][step] = {scale(words[0]), scale(words[1])};
      }
    }
  }

  // The staged query as B operands, its dims in the order of the keys' units.
  FLASHPORT_DEVICE void query_operands(Words2 (&b)[kUnitSteps], int tile, int c) const {
    const auto* unit =
        reinterpret_cast<const Words4*>(&shared_.memory.query[row_of(tile)][(4 * c + g_) * Split::kUnitDims]);
#pragma unroll
    for (int i = 0; i < kUnitSteps; i += 2) {
      const Words4 four = unit[i / 2];
      b[i] = {four[0], four[1]};
      b[i + 1] = {four[2], four[3]};
    }
  }

  // Four dims of unit c of the lane's key, for matrix instruction i of the unit.
  FLASHPORT_DEVICE static Words2 key_operand(const KeyFragments<kCfg>& keys, int tile, int c, int i) {
    const auto& words = keys.words[tile][c];
    if constexpr (!kv::is_widened(kKeyFormat)) {
      return {words[2 * i], words[2 * i + 1]};
    } else {
      const unsigned four = kv::code_bytes<kKeyFormat>(words[i % 4], kv::element_shift<kKeyFormat>(4 * i));
      const Words2 wide = kv::widen<kKeyFormat>(four);
      if constexpr (!Split::kScalesKeys) return wide;
      const unsigned two = keys.scales[tile][c];
      const bool is_second = Split::kFactored && 4 * i >= kFactoredValues;
      const unsigned scale = is_second ? high_halves(two, two) : low_halves(two, two);
      return kv::scale_halves(wide, scale, scale);
    }
  }

  // The lane's keys of `step` and four neighbouring columns, transposed: a[col] is one column of four keys.
  FLASHPORT_DEVICE void value_operands(Words2 (&a)[4], const ValueFragments<kCfg>& values, int step, int group) const {
    const auto& keys = values.words[step];
    if constexpr (!kv::is_widened(kValueFormat)) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int word = 2 * group + pair;
        a[2 * pair] = {low_halves(keys[0][word], keys[1][word]), low_halves(keys[2][word], keys[3][word])};
        a[2 * pair + 1] = {high_halves(keys[0][word], keys[1][word]), high_halves(keys[2][word], keys[3][word])};
      }
    } else {
      constexpr unsigned kLowBytes = 0x05010400;  // bytes 0 and 1 of both, in pairs
      constexpr unsigned kHighBytes = 0x07030602;
      unsigned codes[4];
#pragma unroll
      for (int key = 0; key < 4; ++key) codes[key] = kv::code_bytes<kValueFormat>(keys[key][group], value_shift_);
      const unsigned low01 = pick_bytes<kLowBytes>(codes[1], codes[0]);
      const unsigned low23 = pick_bytes<kLowBytes>(codes[3], codes[2]);
      const unsigned high01 = pick_bytes<kHighBytes>(codes[1], codes[0]);
      const unsigned high23 = pick_bytes<kHighBytes>(codes[3], codes[2]);
      a[0] = kv::widen<kValueFormat>(low_halves(low01, low23));
      a[1] = kv::widen<kValueFormat>(high_halves(low01, low23));
      a[2] = kv::widen<kValueFormat>(low_halves(high01, high23));
      a[3] = kv::widen<kValueFormat>(high_halves(high01, high23));
      if constexpr (Split::kScalesValues) {
        const auto& scales = values.scales[step];
        const unsigned low = low_halves(scales[0], scales[1]);
        const unsigned high = low_halves(scales[2], scales[3]);
#pragma unroll
        for (Words2& column : a) column = kv::scale_halves(column, low, high);
      }
    }
  }

  const Block& block_;
  DecodeShared<kCfg>& shared_;
  int live_rows_, col_wave_, n_, g_;
  unsigned value_shift_;  // of the lane's columns in their bytes
  int buffer_ = 0;        // of what column waves tell each other
};

}  // namespace flashport::FLASHPORT_TARGET::decode
