// The tile verbs of decode on mma.sync targets, with the query rows as columns: S^T = K Q^T [keys, rows] and
// O^T = V^T P^T [DV, rows], because 8 columns are the smallest tile and few query rows are the common case.
//
// A block's waves form a grid: column waves split the keys of S^T and the DV rows of O^T, row waves the query rows.
// Per-row values (Rows) are replicated in the lanes that hold the row: slot 2 t + i of lane 4 g + c is row 8 t + 2 c +
// i of the wave's rows. P goes through shared memory as [keys, rows].
#pragma once

#include <utility>

#include "common/device/decode/chunk_tree.h"
#include "common/device/decode/mask.h"
#include "cuda/decode/accumulators.h"
#include "cuda/decode/factor_operand.h"
#include "cuda/decode/long_header_operand.h"
#include "cuda/decode/shared.h"
#include "cuda/decode/side_format.h"
#include FLASHPORT_DECODE_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
class MmaTiles {
 protected:
  static constexpr DecodeShape kShape = kCfg.shape;
  static constexpr MathType kKeyMath = side_math(kShape, kShape.k_format);
  static constexpr MathType kValueMath = side_math(kShape, kShape.v_format);
  static constexpr bool kScalesKeys = is_block_cache(kShape.k_format);
  static constexpr bool kScalesValues = is_block_cache(kShape.v_format);
  static_assert(kShape.k_format == kShape.v_format || has_blocks(kShape),
                "these tiles read K and V of one format, or one of them in blocks");
  static constexpr int kColWaves = column_waves(kCfg);
  static constexpr int kRowWaves = kCfg.tuning.waves / kColWaves;
  static constexpr int kWaveRows = wave_rows(kCfg);
  static constexpr int kRowTiles = kWaveRows / 8;                     // of 8 query rows
  static constexpr int kKeyTiles = turn_keys(kCfg) / kColWaves / 16;  // of 16 keys
  // The keys of a turn are parts, and waves take one after the other, each part against the largest score of its own.
  // Parts are alike in kernels of other numbers of waves, which so have the same bits.
  static constexpr int kParts = turn_parts(kCfg), kWaveParts = kParts / kColWaves, kPartTiles = kKeyTiles / kWaveParts;
  static_assert(kParts % kColWaves == 0 && (turn_tiles(kCfg) == 1 || tile_keys(kCfg) == 16 * kPartTiles * kColWaves),
                "the parts that waves are at together are those of one tile");
  static constexpr int kColTiles = kShape.head_dim_v / kColWaves / 16;
  static constexpr int kStepPairs = kShape.head_dim_qk / 32;  // of 2 x 16 dims
  static constexpr int kTilesAtOnce = value_tiles(kShape.v_format);
  static constexpr int kColGroups = kColTiles / kTilesAtOnce;
  static_assert(kWaveRows % 8 == 0 && kColGroups >= 1 && kShape.head_dim_v % (16 * kTilesAtOnce * kColWaves) == 0);
  static_assert(!kScalesValues || 8 % kColGroups == 0, "eight blocks begin and end with a unit");
  // The operands stay from turn to turn. Where the call chooses the formats they are kept as those of one format, as
  // operands of all have the same words (as_operand()).
  static constexpr bool kChooses = chooses_formats(kShape);
  // Kernels with code for many formats have one code for the parts of keys, and one for half of the values, so that
  // more of it stays in the instruction caches: where each half is a tile. nvcc 13.0 computed wrong addresses where
  // rows of one tile followed from the number of the half.
  static constexpr bool kRolls = (kChooses || reads_factors(kShape)) && kPartTiles == 2 && tile_keys(kCfg) == 64;
  template <KvFormat kFormat>
  using Keys = KeyOperand<kCfg, kFormat>;
  template <KvFormat kFormat>
  using Values = ValueOperand<kCfg, kFormat, kColGroups>;
  static constexpr KvFormat format_kept(KvFormat side) {
    return side == KvFormat::kBlocks ? KvFormat::kQ8_0 : side == KvFormat::kBytes ? KvFormat::kInt8 : side;
  }
  using KeptKeys = Keys<format_kept(kShape.k_format)>;
  using KeptValues = Values<format_kept(kShape.v_format)>;
  static constexpr bool kScalesRows = factors_of(kShape) == Factors::kOfRows;

 public:
  static constexpr int kRows = kShape.rows;
  static constexpr int kRowSlots = 2 * kRowTiles;
  static constexpr int kColumns = kShape.head_dim_v;
  static constexpr int kSliceColumns = kColumns / kColWaves;
  static constexpr int kTurnLeaves = kCfg.tuning.leaves;
  // States beside the one in work that a lane has registers for: more would spill.
  static constexpr int kKeptStates = [] {
    if (kScalesKeys && kCfg.tuning.teams == 1 && kTurnLeaves == 1) return 0;
    if (kCfg.tuning.teams == 4) return kRowTiles == 1 ? 2 : 1;
    return kColTiles * kRowTiles <= 2 ? 2 : kColTiles * kRowTiles <= 4 ? 1 : 0;
  }();
  static constexpr float kScoreUnit = kScalesKeys ? block_widening(kShape.k_format).key_unit : 1.0f;
  static constexpr bool kClearsGroup = kKeptStates == 1;
  struct Rows {
    float v[kRowSlots];
    FLASHPORT_DEVICE float& operator[](int slot) { return v[slot]; }
    FLASHPORT_DEVICE float operator[](int slot) const { return v[slot]; }
  };
  struct Query {};  // in shared memory: registers are dearer than one ldmatrix for 32 dims of 8 rows
  // Register i of a C tile: key (or column) g + 8 (i / 2), row 2 c + i % 2.
  struct Scores {
    float c[kKeyTiles][kRowTiles][4];
    // The factors of values g and g + 8, where rows have some.
    [[no_unique_address]] std::conditional_t<kScalesRows, float[kKeyTiles][2], NothingTooMuch> value_factors;
  };
  struct Out {
    float c[kColTiles][kRowTiles][4];
  };
  struct Operand {};  // P^T: in shared memory

  FLASHPORT_DEVICE MmaTiles(const DecodeParams& p, const Block& block, DecodeShared<kCfg>& shared)
      : block_(block),
        shared_(shared),
        row_base_(kRowWaves == 1 ? 0 : block.wave() / kColWaves * kWaveRows),
        col_wave_(kRowWaves == 1 ? block.wave() : block.wave() % kColWaves),
        g_(block.lane() / 4),
        c_(block.lane() % 4),
        k_format_(p.k_format),
        v_format_(p.v_format),
        keys_(block.lane(), col_wave_ * kPartTiles * 16, {}),
        values_(block.lane(), col_wave_ * kColGroups, {}) {
    if constexpr (has_blocks(kShape)) {  // each wave writes what it reads, all the same
      shared.too_much.set(block.lane(), block_widening(k_format_.value()), block_widening(v_format_.value()));
      __syncwarp();
    }
  }

  FLASHPORT_DEVICE static constexpr int row_slots() { return kRowSlots; }
  FLASHPORT_DEVICE int live_rows() const { return recompute(live_rows_); }
  FLASHPORT_DEVICE int row_of(int slot) const { return recompute(row_base_ + 2 * c_) + slot / 2 * 8 + slot % 2; }
  // Whether this lane is the one to write per-row values of a slot.
  FLASHPORT_DEVICE bool owns_row(int) const { return col_wave_ == 0 && g_ == 0; }
  FLASHPORT_DEVICE int slice() const { return block_.wave(); }
  FLASHPORT_DEVICE static Wave slice_threads() { return {}; }
  FLASHPORT_DEVICE int slice_rows() const {
    return kRowWaves == 1 ? live_rows() : maximum(minimum(live_rows() - row_base_, kWaveRows), 0);
  }
  FLASHPORT_DEVICE int first_row() const { return recompute(row_base_); }
  FLASHPORT_DEVICE int first_column() const { return recompute(col_wave_) * kSliceColumns; }

  // The query comes with the tile's first keys; the one before is given back.
  FLASHPORT_DEVICE void stage_query(const DecodeParamsOf<kCfg>& p, const Segment& s) {
    live_rows_ = maximum(minimum(kRows, p.group_size * s.q_len - s.row_tile * kRows), 0);
    using Tile = KvTiles<kCfg>;
    if constexpr (kCfg.tuning.teams > 1 || Tile::Keys::kCountsBlocksOn || Tile::Values::kCountsBlocksOn) {
      // From here on, or what all heads have in common stays in registers for the next one.
      const bool together = kCfg.tuning.teams > 1 && shared_.heads_together;
      const int lane = recompute(block_.lane());
      const int col_wave = recompute(col_wave_);
      const int team = recompute(block_.team());
      keys_ = k_format_.with([&](auto format) {
        const auto place = head_place<typename Tile::template KeysOf<format()>>(team, s.kv_head, together);
        return as_operand<KeptKeys>(Keys<format()>(lane, col_wave * kPartTiles * 16, place));
      });
      values_ = v_format_.with([&](auto format) {
        const auto place = head_place<typename Tile::template ValuesOf<format()>>(team, s.kv_head, together);
        return as_operand<KeptValues>(Values<format()>(lane, col_wave * kColGroups, place));
      });
    }
    if constexpr (kScalesRows) {
      row_factors_ = RowFactors<kCfg>(p, s.kv_head, block_.team(), col_wave_ * kPartTiles * 16 + g_);
    }
    if (has_query_) {
      mbarrier_arrive_wave(&shared_.ring.query_free[query_.stage]);
      query_.next();
    }
    has_query_ = true;
  }
  FLASHPORT_DEVICE void fetch_query(Query&) const {}

  // What a kernel that appends does with the tiles of a turn before they are used (new_keys.h).
  FLASHPORT_DEVICE void append_keys(const DecodeParamsOf<kCfg>& p, const LeafCursor& now, int first_new,
                                    const char* keys) {
    const NewKeyTurns<kCfg> turns(p, block_, now.segment, shared_.new_keys[query_.stage], first_new, now.key());
    const bool turns_query = now.at_segment_start() && p.append.rotary.cos != nullptr;
    if (!turns_query && !turns.has_new_keys()) return;
    if (turns_query) turns.turn_query(shared_.ring.queries[query_.stage], live_rows_);
    if (turns.has_new_keys()) turns.append_keys(const_cast<char*>(keys));
    block_.sync();
  }
  FLASHPORT_DEVICE void append_values(const DecodeParamsOf<kCfg>& p, const LeafCursor& now, int first_new,
                                      const char* values) const {
    const NewKeyTurns<kCfg> turns(p, block_, now.segment, shared_.new_keys[query_.stage], first_new, now.key());
    if (turns.has_new_keys()) turns.append_values(values);
  }

  // S^T = K Q^T, in units of kScoreUnit
  template <class KeyTiles>
  FLASHPORT_DEVICE Scores mma_abt(const Query&, const KeyTiles& keys) const {
    return k_format_.with([&](auto format) { return scores_of<format()>(keys); });
  }
  template <KvFormat kFormat, class KeyTiles>
  FLASHPORT_DEVICE Scores scores_of(const KeyTiles& keys) const {
    const auto operand = as_operand<Keys<kFormat>>(keys_);
    // Two sums a tile, of even and odd steps: half the length of the chain of dependent products. Scaled, a block's
    // products are a short chain of their own, and there is one sum.
    Scores sums[2] = {};
    unsigned kept[kPartTiles][kept_words(kFormat)];
    [[maybe_unused]] const TooMuch<kFormat> too_much(shared_.too_much, false);
#pragma unroll(kRolls ? 1 : kWaveParts)
    for (int part = 0; part < kWaveParts; ++part) {
      const int first_key = 16 * kPartTiles * kColWaves * part;  // of the first wave's
      if (part > 0 && first_key % tile_keys(kCfg) == 0) go_to_next_tile(keys);
      const char* tile_of_keys = current_tile(keys);
      // Each part sums into the last tiles. The swap moves the sums of the parts before to the front, so that the
      // rolled loop has constant registers.
      constexpr int kFirst = kKeyTiles - kPartTiles;
      for (Scores& sum : sums) {
#pragma unroll
        for (int i = 0; i < kFirst; ++i) {
          std::swap(sum.c[i], sum.c[i + kPartTiles]);
          if constexpr (kScalesRows) std::swap(sum.value_factors[i], sum.value_factors[i + kPartTiles]);
        }
      }
#pragma unroll
      for (int pair = 0; pair < kStepPairs; ++pair) {
        unsigned b[kRowTiles][4];
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) query_operand(b[tile], tile, pair);
        [[maybe_unused]] float bias[kRowTiles][4] = {};
        if constexpr (kScalesKeys) {
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            too_much.template mma<kKeyMath>(0, bias[tile], b[tile][0], b[tile][1]);
            too_much.template mma<kKeyMath>(1, bias[tile], b[tile][2], b[tile][3]);
          }
        }
#pragma unroll
        for (int of_part = 0; of_part < kPartTiles; ++of_part) {
          const int key_tile = kFirst + of_part, key = first_key % tile_keys(kCfg) + 16 * of_part;
          unsigned a[2][4];
          KeyFactors factors;
          operand.load(a, factors, kept[of_part], tile_of_keys, key, pair);
          if constexpr (kScalesKeys) {
            // A pair is a block: its products are summed before they are scaled, in fp32.
#pragma unroll
            for (int tile = 0; tile < kRowTiles; ++tile) {
              float c[4] = {bias[tile][0], bias[tile][1], bias[tile][2], bias[tile][3]};
              for (int half = 0; half < 2; ++half) mma<kKeyMath>(c, a[half], b[tile][2 * half], b[tile][2 * half + 1]);
              for (int i = 0; i < 4; ++i) {
                float& sum = sums[0].c[key_tile][tile][i];
                sum = fma_rn(factors.scale[i / 2], c[i], sum);
                if constexpr (has_minimum(kFormat)) sum = fma_rn(factors.minimum[i / 2], bias[tile][i], sum);
              }
            }
          } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int tile = 0; tile < kRowTiles; ++tile) {
                mma<kKeyMath>(sums[half].c[key_tile][tile], a[half], b[tile][2 * half], b[tile][2 * half + 1]);
              }
            }
          }
        }
      }
      if constexpr (kScalesRows) {
#pragma unroll
        for (int of_part = 0; of_part < kPartTiles; ++of_part) {
          const int key_tile = kFirst + of_part;
          float of_keys[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = first_key % tile_keys(kCfg) + 16 * of_part + 8 * half;
            of_keys[half] = row_factors_.of_key(tile_of_keys, key) * operand_unit(kFormat);
            sums[0].value_factors[key_tile][half] = row_factors_.of_value(tile_of_keys, key);
          }
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float& sum = sums[0].c[key_tile][tile][i];
              sum = (sum + sums[1].c[key_tile][tile][i]) * of_keys[i / 2];
            }
          }
        }
      }
    }
    if constexpr (!kScalesKeys && !kScalesRows) {
      for_each_register(sums[0].c, [&](float& x, int key_tile, int tile, int i) {
        x = (x + sums[1].c[key_tile][tile][i]) * operand_unit(kFormat);
      });
    }
    return sums[0];
  }

  // A condition that the code of each score tests (mask.h).
  FLASHPORT_DEVICE static bool at_use(bool x) { return kChooses ? at_each_use(x) : x; }

  // f(value, slot, key of the leaf)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
    for_each_register(scores.c, [&](float& x, int key_tile, int tile, int i) {
      f(x, 2 * tile + i % 2, first_key_of(key_tile) + g_ + i / 2 * 8);
    });
  }

  // P = exp2(S - m), where m is the largest score of a row among the keys of one part alone: so it goes to shared
  // memory with no barrier before it. With scales it is 1 / probability_unit times as large.
  template <class State>
  FLASHPORT_DEVICE Operand exponentiate(const State&, Scores& scores) {
    buffer_ ^= 1;
    [[maybe_unused]] const BlockWidening of_values = block_widening(v_format_.value());
    Rows m[kWaveParts], l[kWaveParts], reference[kWaveParts];
    reduce_rows(scores, m, [](float a, float b) { return maximum(a, b); });
    for (int part = 0; part < kWaveParts; ++part) {
      for (int slot = 0; slot < kRowSlots; ++slot) {
        const float largest = finite(m[part][slot]);
        reference[part][slot] = kScalesValues ? largest - of_values.probability_exponent : largest;
      }
    }
    for_each_register(scores.c, [&](float& x, int key_tile, int tile, int i) {
      x = exp2_approx(x - reference[key_tile / kPartTiles][2 * tile + i % 2]);
    });
    if constexpr (kScalesRows) {
      reduce_rows(scores, l, [](float a, float b) { return a + b; });
      multiply_by_factors(scores);
    }
    for_each_key_pair(scores, [&](int key_tile, int tile, int half, float even, float odd) {
      const int key = first_key_of(key_tile) + g_ + 8 * half;
      *reinterpret_cast<unsigned*>(shared_.probabilities_of(buffer_, key, row_base_ + 8 * tile + 2 * c_)) =
          pack<kValueMath>(even, odd);
    });
    if constexpr (!kScalesRows) reduce_rows(scores, l, [](float a, float b) { return a + b; });
    if constexpr (kScalesValues) {
      for (Rows& sums : l) {
        for (int slot = 0; slot < kRowSlots; ++slot) sums[slot] *= of_values.probability_unit;
      }
    }
    if (g_ == 0) {
      const int wave = recompute(col_wave_);
#pragma unroll
      for (int part = 0; part < kWaveParts; ++part) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          const int slot = 2 * tile;
          row_stats(part * kColWaves + wave, tile) = {m[part][slot], m[part][slot + 1], l[part][slot],
                                                      l[part][slot + 1]};
        }
      }
    }
    return {};
  }

  // Takes the maxima and sums of the turn's first parts in, and scales the state to the new maximum. `weights`: those
  // of the products with the values of each part.
  template <class State, int kCount>
  FLASHPORT_DEVICE void weigh_parts(State& state, Rows (&weights)[kCount]) const {
    float4 stats[kCount][kRowTiles];
    Rows m = state.m;
#pragma unroll
    for (int part = 0; part < kCount; ++part) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const float4 x = stats[part][tile] = row_stats(part, tile);
        m[2 * tile] = maximum(m[2 * tile], x.x);
        m[2 * tile + 1] = maximum(m[2 * tile + 1], x.y);
      }
    }
    Rows before;
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      const float reference = finite(m[slot]);
      before[slot] = exp2_approx(state.m[slot] - reference);
      state.m[slot] = m[slot];
      state.l[slot] = mul_rn(state.l[slot], before[slot]);
#pragma unroll
      for (int part = 0; part < kCount; ++part) {
        const float4& x = stats[part][slot / 2];
        weights[part][slot] = exp2_approx((slot % 2 == 0 ? x.x : x.y) - reference);
        state.l[slot] = fma_rn(slot % 2 == 0 ? x.z : x.w, weights[part][slot], state.l[slot]);
      }
    }
    for_each_register(state.o.c, [&](float& x, int, int tile, int i) { x = mul_rn(x, before[2 * tile + i % 2]); });
    if constexpr (kScalesRows) {
#pragma unroll
      for (int part = 0; part < kCount; ++part) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          const float2 unit = shared_.units.of[buffer_][part][(row_base_ + 8 * tile) / 2 + c_];
          weights[part][2 * tile] *= unit.x;
          weights[part][2 * tile + 1] *= unit.y;
        }
      }
    }
  }
  // (m, l, O^T) combined with V^T P^T: of the keys of one part after the other, each with its own m.
  template <class State, class ValueTiles>
  FLASHPORT_DEVICE void accumulate(State& state, const Operand&, const ValueTiles& values) const {
    Rows weights[kParts];
    weigh_parts(state, weights);
    v_format_.with([&](auto format) { add_values<format()>(state.o, weights, values); });
  }
  // O^T += V^T P^T, each part's by its weights, which are used up.
  template <KvFormat kFormat, class ValueTiles>
  FLASHPORT_DEVICE void add_values(Out& out, Rows (&weights)[kParts], const ValueTiles& values) const {
    // The first tile of a group of values has products with whole bytes.
    [[maybe_unused]] constexpr bool kHalves = has_plain_nibbles(kFormat);
    constexpr int kUnitRows = has_fifth_bits(kFormat) ? 2 : 1;  // of the operand, with units of their own
    constexpr BlockWidening kWidening = block_widening(kFormat);
    const auto operand = as_operand<Values<kFormat>>(values_);
    [[maybe_unused]] const TooMuch<kFormat> too_much(shared_.too_much, true);
    const int lane = block_.lane();
    Out sum;
#pragma unroll(kRolls ? 2 : turn_keys(kCfg) / 32)
    for (int pair = 0; pair < turn_keys(kCfg) / 32; ++pair) {
      if (pair > 0 && 32 * pair % tile_keys(kCfg) == 0) go_to_next_tile(values);
      unsigned b[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        ldmatrix_x4_trans(b[tile], shared_.probabilities_of(buffer_, 32 * pair + lane, row_base_ + 8 * tile));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = 2 * pair + half;  // of 16 keys
        if (step % kPartTiles == 0) {
          for_each_register(sum.c, [](float& x, int, int, int) { x = 0.0f; });
        }
        unsigned kept[kept_words(kFormat)];
#pragma unroll
        for (int group = 0; group < kColGroups; ++group) {
          unsigned a[kTilesAtOnce][4];
          ValueFactors factors;
          operand.load(a, factors, kept, current_tile(values), 16 * step % tile_keys(kCfg), group);
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            unsigned p[2] = {b[tile][2 * half], b[tile][2 * half + 1]};
            if constexpr (kScalesValues) {
              if constexpr (has_minimum(kFormat)) {
                unsigned of_minima[2];
                for (int i = 0; i < 2; ++i) of_minima[i] = multiply_halves(p[i], factors.minimum[i]);
                for (int i = 0; i < 2; ++i) {
                  too_much.template mma<kValueMath>(i, sum.c[group * kTilesAtOnce + i][tile], of_minima[0],
                                                    of_minima[1]);
                }
              }
              for (int i = 0; i < 2; ++i) p[i] = multiply_halves(p[i], factors.scale[i]);
              for (int i = 0; i < 2; ++i)
                too_much.template mma<kValueMath>(i, sum.c[group * kTilesAtOnce + i][tile], p[0], p[1]);
            }
#pragma unroll
            for (int i = 0; i < kTilesAtOnce; ++i) {
              mma<kValueMath>(sum.c[group * kTilesAtOnce + i][tile], a[i], p[0], p[1]);
            }
          }
        }
        if (step % kPartTiles < kPartTiles - 1) continue;
        const Rows weight = weights[0];  // those of the next part follow
        for (int part = 1; part < kParts; ++part) weights[part - 1] = weights[part];
        Rows of_tile[kTilesAtOnce][kUnitRows];
        for (int i = 0; i < kTilesAtOnce; ++i) {
          for (int rows = 0; rows < kUnitRows; ++rows) {
            const float unit =
                kScalesValues ? value_unit(kWidening, i, rows) * kWidening.probability_unit : operand_unit(kFormat);
            for (int slot = 0; slot < kRowSlots; ++slot) of_tile[i][rows][slot] = weight[slot] * unit;
          }
        }
        for_each_register(out.c, [&](float& x, int col_tile, int tile, int i) {
          float product = sum.c[col_tile][tile][i];
          if constexpr (kHalves) product -= col_tile % 2 == 0 ? sum.c[col_tile + 1][tile][i] : 0.0f;
          x = fma_rn(product, of_tile[col_tile % kTilesAtOnce][i / 2 % kUnitRows][2 * tile + i % 2], x);
        });
      }
    }
  }

  FLASHPORT_DEVICE void clear(Out& out) const {
    for_each_register(out.c, [](float& x, int, int, int) { x = 0.0f; });
  }

  // f(to, from, slot)
  template <class F>
  FLASHPORT_DEVICE void for_each_pair(Out& to, const Out& from, F&& f) const {
    for_each_register(
        to.c, [&](float& x, int col_tile, int tile, int i) { f(x, from.c[col_tile][tile][i], 2 * tile + i % 2); });
  }

  // f(value, slot, column)
  template <class F>
  FLASHPORT_DEVICE void for_each_out(const Out& out, F&& f) const {
    // Where a lane's columns are follows from these two anew, for each state that is stored: few are.
    const int first_tile = recompute(col_wave_ * kColTiles);
    const int g = recompute(g_);
    const int first = v_format_.with([&](auto format) {
      return as_operand<Values<format()>>(values_).first_block(recompute(col_wave_ * kColGroups));
    });
    const DimOrder order = dim_order(v_format_.value());
    for_each_register(out.c, [&](const float& x, int col_tile, int tile, int i) {
      const int column = kShape.v_format == KvFormat::kInt4
                             ? int4_value_column(first_tile + col_tile, g, i / 2)
                             : value_column(order, first, first_tile + col_tile, g, i / 2);
      f(x, 2 * tile + i % 2, column);
    });
  }

  // Live rows of the slice to memory: (m, l) [slice rows], tile [slice rows, slice columns].
  FLASHPORT_DEVICE void store_rows(const Rows& m, const Rows& l, float* to) const {
    const int first = 2 * recompute(c_);  // of the slice
    if (g_ != 0) return;
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      const int row = first + slot / 2 * 8 + slot % 2;
      if (row < slice_rows()) *reinterpret_cast<float2*>(to + 2 * row) = {m[slot], l[slot]};
    }
  }
  FLASHPORT_DEVICE void store_tile(const Out& out, float* to) const {
    const int first = 2 * recompute(c_);
    const int first_column = -kSliceColumns * recompute(col_wave_);
    for_each_out(out, [&](float x, int slot, int col) {
      const int row = first + slot / 2 * 8 + slot % 2;
      if (row < slice_rows()) to[row * kSliceColumns + (col + first_column)] = x;
    });
  }

 protected:
  // f(key tile, row tile, half, value of row 2 c, value of row 2 c + 1), both of key g + 8 half
  template <class F>
  FLASHPORT_DEVICE void for_each_key_pair(const Scores& scores, F&& f) const {
#pragma unroll
    for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          f(key_tile, tile, half, scores.c[key_tile][tile][2 * half], scores.c[key_tile][tile][2 * half + 1]);
        }
      }
    }
  }

  // Joins what the wave holds of each row, in each part.
  template <class Join>
  FLASHPORT_DEVICE void reduce_rows(const Scores& scores, Rows (&rows)[kWaveParts], const Join& join) const {
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
#pragma unroll
      for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
        const auto& c = scores.c[key_tile][slot / 2];
        const float x = join(c[slot % 2], c[slot % 2 + 2]);
        float& all = rows[key_tile / kPartTiles][slot];
        all = key_tile % kPartTiles == 0 ? x : join(all, x);
      }
    }
#pragma unroll
    for (int distance = 4; distance < kWaveSize; distance *= 2) {
#pragma unroll
      for (int at = 0; at < kWaveParts * kRowSlots; ++at) {
        float& x = rows[at / kRowSlots][at % kRowSlots];
        x = join(x, __shfl_xor_sync(~0u, x, distance));
      }
    }
  }
  // Probabilities times the factors of values, for each row in a unit near the largest among the keys of a part, which
  // accumulate() multiplies the sums by.
  FLASHPORT_DEVICE void multiply_by_factors(Scores& scores) const {
    for_each_register(scores.c,
                      [&](float& x, int key_tile, int, int i) { x *= scores.value_factors[key_tile][i / 2]; });
    Rows units[kWaveParts];
    reduce_rows(scores, units, [](float a, float b) { return maximum(fabsf(a), fabsf(b)); });
    for (Rows& of_part : units) {
      for (int slot = 0; slot < kRowSlots; ++slot) of_part[slot] = unit_of(of_part[slot]);
    }
    for_each_register(scores.c, [&](float& x, int key_tile, int tile, int i) {
      x *= inverse_of_unit(units[key_tile / kPartTiles][2 * tile + i % 2]);
    });
    if (g_ != 0) return;
#pragma unroll
    for (int part = 0; part < kWaveParts; ++part) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        shared_.units.of[buffer_][part * kColWaves + col_wave_][(row_base_ + 8 * tile) / 2 + c_] = {
            units[part][2 * tile], units[part][2 * tile + 1]};
      }
    }
  }

  // Where the wave's keys of a tile of 16 begin.
  FLASHPORT_DEVICE int first_key_of(int key_tile) const {
    return (key_tile / kPartTiles * kColWaves * kPartTiles + key_tile % kPartTiles + col_wave_ * kPartTiles) * 16;
  }
  // Maxima and sums of the rows 2 c and 2 c + 1 of a tile, among the keys of a part of this turn.
  FLASHPORT_DEVICE float4& row_stats(int part, int tile) const {
    return shared_.row_stats[buffer_][part][(row_base_ + 8 * tile) / 2 + c_];
  }
  FLASHPORT_DEVICE static float finite(float m) { return m == -kInfinity ? 0.0f : m; }

  // B operands of 8 query rows and the 32 dims of a pair of steps, in the order of the key operand.
  FLASHPORT_DEVICE void query_operand(unsigned (&b)[4], int tile, int pair) const {
    const int lane = block_.lane();
    ldmatrix_x4(b, &shared_.ring.queries[query_.stage].rows[row_base_ + 8 * tile + lane % 8][32 * pair + lane / 8 * 8]);
  }

  // The operand of another format with the same words.
  template <class To, class From>
  FLASHPORT_DEVICE static To as_operand(const From& from) {
    return __builtin_bit_cast(To, from);
  }

  const Block& block_;
  DecodeShared<kCfg>& shared_;
  int live_rows_ = 0, row_base_, col_wave_, g_, c_;
  [[no_unique_address]] SideFormat<kShape.k_format> k_format_;
  [[no_unique_address]] SideFormat<kShape.v_format> v_format_;
  KeptKeys keys_;
  KeptValues values_;
  [[no_unique_address]] std::conditional_t<kScalesRows, RowFactors<kCfg>, NothingTooMuch> row_factors_;
  PipelineState<KvRing<kCfg>::kQueries> query_;
  int buffer_ = 0;  // of what the waves tell each other
  bool has_query_ = false;
};

template <DecodeConfig kCfg>
class DecodeTiles : public MmaTiles<kCfg> {
 public:
  using MmaTiles<kCfg>::MmaTiles;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
