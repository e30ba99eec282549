// The tile verbs of decode on mma.sync targets.
//
// A block's waves form a grid: row waves take 16 query rows each; column waves split the 64 keys of the score tile and
// the DV columns of the output tile. Per-row values (Rows) live replicated in the lanes that hold the row: slot 0 is row
// g, slot 1 row g + 8 of the wave's 16 (lane = 4 g + c). The operand P is exchanged through shared memory.
#pragma once

#include "cuda/target/kv_operand.h"
#include "cuda/target/kv_pipeline.h"
#include "cuda/tuning/sm90a.h"
#include "common/device/mask.h"

namespace flashport::FLASHPORT_TARGET {

constexpr int block_threads(const DecodeConfig& cfg) { return cfg.tuning.waves * kWaveSize; }

// The query is kept in registers where they suffice; else it is read again for each leaf, free of bank conflicts.
constexpr bool query_in_registers(const DecodeShape& shape) { return shape.head_dim_qk <= 128; }
constexpr int query_pitch(const DecodeShape& shape) {
  return shape.head_dim_qk + (query_in_registers(shape) ? 0 : 8);
}

template <DecodeConfig kCfg>
struct DecodeShared {
  LeafSlot<kCfg> leaves[kCfg.tuning.stages];
  union {
    ScanScratch<block_threads(kCfg)> scan;  // before the first query
    alignas(16) std::uint16_t query[kCfg.shape.rows][query_pitch(kCfg.shape)];
  };
  alignas(16) std::uint16_t probabilities[kCfg.shape.rows][kLeafKeys + 8];
  float row_max[kCfg.tuning.waves][16];
  float row_sum[kCfg.tuning.waves][16];
  LeafBarriers ready[kCfg.tuning.stages];
  unsigned arrive_flag;
};

template <DecodeConfig kCfg>
using KvPipeline = KvPipelineOf<kCfg, DecodeShared<kCfg>>;

template <DecodeConfig kCfg>
class DecodeTiles {
  static constexpr DecodeShape kShape = kCfg.shape;
  static constexpr MathType kMath = kShape.math;
  static constexpr bool kBytes = is_byte_format(kShape.kv);
  static constexpr int kRowWaves = kShape.rows / 16;
  static constexpr int kColWaves = kCfg.tuning.waves / kRowWaves;
  static constexpr int kWaveKeys = kLeafKeys / kColWaves;
  static constexpr int kWaveCols = kShape.head_dim_v / kColWaves;
  static constexpr int kSteps = kShape.head_dim_qk / 16;
  static constexpr bool kQueryInRegisters = query_in_registers(kShape);
  static_assert(kWaveKeys >= 8 && kWaveCols % 16 == 0);

 public:
  static constexpr int kRows = kShape.rows;
  static constexpr int kRowSlots = 2;

  struct Rows {
    float v[kRowSlots];
    FLASHPORT_DEVICE float& operator[](int slot) { return v[slot]; }
    FLASHPORT_DEVICE float operator[](int slot) const { return v[slot]; }
  };
  struct Query {
    unsigned a[kQueryInRegisters ? kSteps : 1][4];
  };
  struct Scores {
    float c[kWaveKeys / 8][4];
  };
  struct Out {
    float c[kWaveCols / 8][4];
  };
  struct Operand {};  // P is in shared memory

  FLASHPORT_DEVICE DecodeTiles(const DecodeParams& p, const Block& block, DecodeShared<kCfg>& shared)
      : block_(block),
        shared_(shared),
        live_rows_(minimum(kRows, p.group_size * p.max_q_len)),
        row_wave_(block.wave() / kColWaves),
        col_wave_(block.wave() % kColWaves),
        g_(block.lane() / 4),
        c_(block.lane() % 4) {}

  FLASHPORT_DEVICE static constexpr int row_slots() { return kRowSlots; }
  FLASHPORT_DEVICE int live_rows() const { return live_rows_; }
  FLASHPORT_DEVICE int row_of(int slot) const { return row_wave_ * 16 + g_ + 8 * slot; }
  // Whether this lane is the one to write per-row values of a slot.
  FLASHPORT_DEVICE bool owns_row(int) const { return col_wave_ == 0 && c_ == 0; }

  // Brings the tile's query rows to shared memory as the math type; padding rows and dims are zero.
  FLASHPORT_DEVICE void stage_query(const DecodeParams& p, const Segment& s) const {
    block_.sync();  // no wave reads the query of the segment before
    constexpr int kChunks = kShape.head_dim_qk / 8;
    for (int i = block_.thread(); i < kRows * kChunks; i += block_threads(kCfg)) {
      const int row = i / kChunks;
      const int dim = i % kChunks * 8;
      uint4 chunk = make_uint4(0, 0, 0, 0);
      const QueryRow at = query_row(p, s, kRows, row);
      if (row < live_rows_ && at.token < s.q_len && dim < p.head_dim_qk) {
        const std::int64_t seq = p.cu_seqlens_q == nullptr ? s.seq : 0;
        const std::int64_t offset = seq * p.q_stride_seq + (s.q_begin + at.token) * p.q_stride_token +
                                    at.head * p.q_stride_head + dim * p.q_stride_dim;
        chunk = load_query(p, offset);
      }
      *reinterpret_cast<uint4*>(&shared_.query[row][dim]) = chunk;
    }
    block_.sync();
  }

  // The staged query as A fragments, where they are kept in registers.
  FLASHPORT_DEVICE void fetch_query(Query& query) const {
    if constexpr (kQueryInRegisters) {
      for (int step = 0; step < kSteps; ++step) query_fragment(query.a[step], step);
    }
  }

  // S = Q K^T
  FLASHPORT_DEVICE Scores mma_abt(const Query& query, const char* keys) const {
    Scores scores;
    for (auto& tile : scores.c) {
      for (float& x : tile) x = 0.0f;
    }
    const char* wave_keys = keys + col_wave_ * kWaveKeys * LeafSlot<kCfg>::kKeyPitch;
    constexpr int kPairs = kWaveKeys >= 16 ? kWaveKeys / 16 : 1;
    constexpr int kStepsAtOnce = kWaveKeys >= 16 ? 1 : 2;
#pragma unroll
    for (int step = 0; step < kSteps; step += kBytes ? 1 : kStepsAtOnce) {
      unsigned a[kStepsAtOnce][4];
#pragma unroll
      for (int k = 0; k < (kBytes ? 1 : kStepsAtOnce); ++k) {
        if constexpr (kQueryInRegisters) {
          for (int i = 0; i < 4; ++i) a[k][i] = query.a[step + k][i];
        } else {
          query_fragment(a[k], step + k);
        }
      }
      if constexpr (kBytes) {
#pragma unroll
        for (int tile = 0; tile < kWaveKeys / 8; ++tile) {
          unsigned b0, b1;
          ByteOperand<kShape.kv>::key(b0, b1, wave_keys + (8 * tile + g_) * LeafSlot<kCfg>::kKeyPitch,
                                      16 * step + 4 * c_);
          mma<kMath>(scores.c[tile], a[0], b0, b1);
        }
      } else if constexpr (kWaveKeys >= 16) {
        const int lane = block_.lane();
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          unsigned b[4];
          ldmatrix_x4(b, wave_keys + (16 * pair + lane / 16 * 8 + lane % 8) * LeafSlot<kCfg>::kKeyPitch +
                             (16 * step + lane / 8 % 2 * 8) * 2);
          mma<kMath>(scores.c[2 * pair], a[0], b[0], b[1]);
          mma<kMath>(scores.c[2 * pair + 1], a[0], b[2], b[3]);
        }
      } else {
        const int lane = block_.lane();
        unsigned b[4];
        ldmatrix_x4(b, wave_keys + lane % 8 * LeafSlot<kCfg>::kKeyPitch + (16 * step + lane / 8 * 8) * 2);
        mma<kMath>(scores.c[0], a[0], b[0], b[1]);
        mma<kMath>(scores.c[0], a[1], b[2], b[3]);
      }
    }
    return scores;
  }

  // f(value, slot, key of the leaf)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
#pragma unroll
    for (int tile = 0; tile < kWaveKeys / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(scores.c[tile][i], i / 2, col_wave_ * kWaveKeys + 8 * tile + 2 * c_ + i % 2);
    }
  }

  // Largest score of each row, over all waves that share it.
  FLASHPORT_DEVICE void row_max(const Scores& scores, Rows& m) const {
    for (int slot = 0; slot < kRowSlots; ++slot) {
      float most = -kInfinity;
#pragma unroll
      for (int tile = 0; tile < kWaveKeys / 8; ++tile) {
        most = maximum(most, maximum(scores.c[tile][2 * slot], scores.c[tile][2 * slot + 1]));
      }
      most = maximum(most, __shfl_xor_sync(~0u, most, 1));
      m[slot] = maximum(most, __shfl_xor_sync(~0u, most, 2));
    }
    if constexpr (kColWaves > 1) {
      if (c_ == 0) {
        for (int slot = 0; slot < kRowSlots; ++slot) shared_.row_max[block_.wave()][g_ + 8 * slot] = m[slot];
      }
      block_.sync();
      for (int slot = 0; slot < kRowSlots; ++slot) {
        for (int wave = 0; wave < kColWaves; ++wave) {
          m[slot] = maximum(m[slot], shared_.row_max[row_wave_ * kColWaves + wave][g_ + 8 * slot]);
        }
      }
    }
  }

  // Scores become the A operand of P V, in the math type; l = row sums before rounding. Holds a barrier.
  FLASHPORT_DEVICE Operand to_operand(const Scores& scores, Rows& l) const {
    for (int slot = 0; slot < kRowSlots; ++slot) {
      float sum = 0.0f;
#pragma unroll
      for (int tile = 0; tile < kWaveKeys / 8; ++tile) {
        const float low = scores.c[tile][2 * slot];
        const float high = scores.c[tile][2 * slot + 1];
        sum += low + high;
        *reinterpret_cast<unsigned*>(
            &shared_.probabilities[row_of(slot)][col_wave_ * kWaveKeys + 8 * tile + 2 * c_]) = pack<kMath>(low, high);
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (c_ == 0) shared_.row_sum[block_.wave()][g_ + 8 * slot] = sum;
    }
    block_.sync();
    for (int slot = 0; slot < kRowSlots; ++slot) {
      l[slot] = 0.0f;
      for (int wave = 0; wave < kColWaves; ++wave) {
        l[slot] += shared_.row_sum[row_wave_ * kColWaves + wave][g_ + 8 * slot];
      }
    }
    return {};
  }

  // O = P V
  FLASHPORT_DEVICE void mma_ab(const Operand&, const char* values, Out& out) const {
    for (auto& tile : out.c) {
      for (float& x : tile) x = 0.0f;
    }
    const int lane = block_.lane();
#pragma unroll
    for (int step = 0; step < kLeafKeys / 16; ++step) {
      unsigned a[4];
      ldmatrix_x4(a, &shared_.probabilities[row_wave_ * 16 + lane % 16][16 * step + lane / 16 * 8]);
#pragma unroll
      for (int pair = 0; pair < kWaveCols / 16; ++pair) {
        unsigned b[4];
        ValueOperand<kCfg>::load(b, values, lane, 16 * step, col_wave_ * kWaveCols + 16 * pair);
        mma<kMath>(out.c[2 * pair], a, b[0], b[1]);
        mma<kMath>(out.c[2 * pair + 1], a, b[2], b[3]);
      }
    }
  }

  // f(to, from, slot)
  template <class F>
  FLASHPORT_DEVICE void for_each_pair(Out& to, const Out& from, F&& f) const {
#pragma unroll
    for (int tile = 0; tile < kWaveCols / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(to.c[tile][i], from.c[tile][i], i / 2);
    }
  }

  // f(value, slot, column)
  template <class F>
  FLASHPORT_DEVICE void for_each_out(const Out& out, F&& f) const {
#pragma unroll
    for (int tile = 0; tile < kWaveCols / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(out.c[tile][i], i / 2, column(tile, i % 2));
    }
  }

  // Live rows to and from a partial state in global memory: per-row values [live_rows], tile [live_rows, DV].
  FLASHPORT_DEVICE void store_rows(const Rows& rows, float* to) const {
    for (int slot = 0; slot < kRowSlots; ++slot) {
      if (owns_row(slot) && row_of(slot) < live_rows_) to[row_of(slot)] = rows[slot];
    }
  }
  FLASHPORT_DEVICE void load_rows(Rows& rows, const float* from) const {
    for (int slot = 0; slot < kRowSlots; ++slot) {
      rows[slot] = row_of(slot) < live_rows_ ? load_published(from + row_of(slot)) : 0.0f;
    }
  }
  FLASHPORT_DEVICE void store_tile(const Out& out, float* to) const {
    for_each_float2([&](int slot, int col, int t0, int i0, int t1, int i1) {
      if (row_of(slot) < live_rows_) {
        *reinterpret_cast<float2*>(to + row_of(slot) * kShape.head_dim_v + col) =
            make_float2(out.c[t0][i0], out.c[t1][i1]);
      }
    });
  }
  // f(value, stored value, slot)
  template <class F>
  FLASHPORT_DEVICE void for_each_stored(Out& out, const float* from, F&& f) const {
    for_each_float2([&](int slot, int col, int t0, int i0, int t1, int i1) {
      float2 two = make_float2(0.0f, 0.0f);
      if (row_of(slot) < live_rows_) {
        two = load_published(reinterpret_cast<const float2*>(from + row_of(slot) * kShape.head_dim_v + col));
      }
      f(out.c[t0][i0], two.x, slot);
      f(out.c[t1][i1], two.y, slot);
    });
  }

 private:
  // Output column of column n = 2 c + odd of tile `tile`: natural, or even and odd columns in pairs of tiles.
  FLASHPORT_DEVICE int column(int tile, int odd) const {
    const int wave_col = col_wave_ * kWaveCols;
    if constexpr (kBytes) return wave_col + tile / 2 * 16 + 2 * (2 * c_ + odd) + tile % 2;
    return wave_col + 8 * tile + 2 * c_ + odd;
  }

  // f(slot, column, tile, i, tile', i') for each pair of registers that hold adjacent columns of one row.
  template <class F>
  FLASHPORT_DEVICE void for_each_float2(F&& f) const {
#pragma unroll
    for (int tile = 0; tile < kWaveCols / 8; tile += kBytes ? 2 : 1) {
#pragma unroll
      for (int slot = 0; slot < kRowSlots; ++slot) {
        if constexpr (kBytes) {
          f(slot, column(tile, 0), tile, 2 * slot, tile + 1, 2 * slot);
          f(slot, column(tile, 1), tile, 2 * slot + 1, tile + 1, 2 * slot + 1);
        } else {
          f(slot, column(tile, 0), tile, 2 * slot, tile, 2 * slot + 1);
        }
      }
    }
  }

  // A fragment of 16 query rows and the 16 dims of `step`, in the order of the key operand.
  FLASHPORT_DEVICE void query_fragment(unsigned (&a)[4], int step) const {
    if constexpr (kBytes) {
      for (int half = 0; half < 2; ++half) {
        const uint2 two =
            *reinterpret_cast<const uint2*>(&shared_.query[row_wave_ * 16 + g_ + 8 * half][16 * step + 4 * c_]);
        a[half] = two.x;
        a[2 + half] = two.y;
      }
    } else {
      const int lane = block_.lane();
      ldmatrix_x4(a, &shared_.query[row_wave_ * 16 + lane % 16][16 * step + lane / 16 * 8]);
    }
  }

  // Eight query values as the math type.
  FLASHPORT_DEVICE static uint4 load_query(const DecodeParams& p, std::int64_t offset) {
    const bool same = p.q_dtype == (kMath == MathType::kBf16 ? DType::kBFloat16 : DType::kFloat16);
    const char* at = static_cast<const char*>(p.q) + offset * 2;
    if (same && p.q_stride_dim == 1 && reinterpret_cast<std::uintptr_t>(at) % 16 == 0) {
      return __ldg(reinterpret_cast<const uint4*>(at));
    }
    float x[8];
    for (int i = 0; i < 8; ++i) {
      const std::int64_t element = offset + i * p.q_stride_dim;
      x[i] = p.q_dtype == DType::kBFloat16 ? to_float(static_cast<const BFloat16*>(p.q)[element])
                                           : to_float(static_cast<const Half*>(p.q)[element]);
    }
    return make_uint4(pack<kMath>(x[0], x[1]), pack<kMath>(x[2], x[3]), pack<kMath>(x[4], x[5]),
                      pack<kMath>(x[6], x[7]));
  }

  const Block& block_;
  DecodeShared<kCfg>& shared_;
  int live_rows_, row_wave_, col_wave_, g_, c_;
};

}  // namespace flashport::FLASHPORT_TARGET
