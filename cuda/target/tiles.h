// The tile verbs of decode on mma.sync targets, with the query rows as columns: S^T = K Q^T [keys, rows] and
// O^T = V^T P^T [DV, rows], because 8 columns are the smallest tile and few query rows are the common case.
//
// A block's waves form a grid: column waves split the keys of S^T and the DV rows of O^T, row waves the query rows.
// Per-row values (Rows) are replicated in the lanes that hold the row: slot 2 t + i of lane 4 g + c is row 8 t + 2 c +
// i of the wave's rows. P goes through shared memory as [keys, rows].
#pragma once

#include "common/device/mask.h"
#include "cuda/target/kv_operand.h"
#include "cuda/target/kv_pipeline.h"
#include "cuda/tuning/sm90a.h"

namespace flashport::FLASHPORT_TARGET {

constexpr int block_threads(const DecodeConfig& cfg) { return cfg.tuning.waves * kWaveSize; }

// Waves side by side over keys and DV. A wave takes 16 keys at least.
constexpr int column_waves(const DecodeConfig& cfg) {
  const int most = kLeafKeys / 16;
  return cfg.tuning.waves < most ? cfg.tuning.waves : most;
}
constexpr int wave_rows(const DecodeConfig& cfg) { return cfg.shape.rows / (cfg.tuning.waves / column_waves(cfg)); }

template <DecodeConfig kCfg>
struct DecodeShared {
  static constexpr int kQueryPitch = kCfg.shape.head_dim_qk + 8;
  static constexpr int kRowPitch = (kCfg.shape.rows / 8 | 1) * 8;
  LeafSlot<kCfg> leaves[kCfg.tuning.stages];
  union {
    ScanScratch<block_threads(kCfg)> scan;  // before the first query
    alignas(16) std::uint16_t query[kCfg.shape.rows][kQueryPitch];
  };
  alignas(16) std::uint16_t probabilities[kLeafKeys][kRowPitch];
  alignas(8) float row_max[column_waves(kCfg)][kCfg.shape.rows];
  alignas(8) float row_sum[column_waves(kCfg)][kCfg.shape.rows];
  LeafBarriers ready[kCfg.tuning.stages];
  unsigned arrive_flag;
  Segment first;  // of the block's range
};

template <DecodeConfig kCfg>
using KvPipeline = KvPipelineOf<kCfg, DecodeShared<kCfg>>;

template <DecodeConfig kCfg>
class DecodeTiles {
  static constexpr DecodeShape kShape = kCfg.shape;
  static constexpr MathType kMath = kShape.math;
  static constexpr bool kBytes = is_byte_format(kShape.kv);
  static constexpr int kColWaves = column_waves(kCfg);
  static constexpr int kWaveRows = wave_rows(kCfg);
  static constexpr int kRowTiles = kWaveRows / 8;               // of 8 query rows
  static constexpr int kKeyTiles = kLeafKeys / kColWaves / 16;  // of 16 keys
  static constexpr int kColTiles = kShape.head_dim_v / kColWaves / 16;
  static constexpr int kStepPairs = kShape.head_dim_qk / 32;  // of 2 x 16 dims
  static_assert(kWaveRows % 8 == 0 && kColTiles >= 1 && kShape.head_dim_v % (16 * kColWaves) == 0);

 public:
  static constexpr int kRows = kShape.rows;
  static constexpr int kRowSlots = 2 * kRowTiles;
  static constexpr int kColumns = kShape.head_dim_v;

  struct Rows {
    float v[kRowSlots];
    FLASHPORT_DEVICE float& operator[](int slot) { return v[slot]; }
    FLASHPORT_DEVICE float operator[](int slot) const { return v[slot]; }
  };
  struct Query {};  // in shared memory: registers are dearer than one ldmatrix for 32 dims of 8 rows
  // Register i of a C tile: key (or column) g + 8 (i / 2), row 2 c + i % 2.
  struct Scores {
    float c[kKeyTiles][kRowTiles][4];
  };
  struct Out {
    float c[kColTiles][kRowTiles][4];
  };
  struct Operand {};  // P is in shared memory

  FLASHPORT_DEVICE DecodeTiles(const DecodeParams& p, const Block& block, DecodeShared<kCfg>& shared)
      : block_(block),
        shared_(shared),
        live_rows_(minimum(kRows, p.group_size * p.max_q_len)),
        row_base_(block.wave() / kColWaves * kWaveRows),
        col_wave_(block.wave() % kColWaves),
        g_(block.lane() / 4),
        c_(block.lane() % 4) {}

  FLASHPORT_DEVICE static constexpr int row_slots() { return kRowSlots; }
  FLASHPORT_DEVICE int live_rows() const { return live_rows_; }
  FLASHPORT_DEVICE int row_of(int slot) const { return row_base_ + slot / 2 * 8 + 2 * c_ + slot % 2; }
  // Whether this lane is the one to write per-row values of a slot.
  FLASHPORT_DEVICE bool owns_row(int) const { return col_wave_ == 0 && g_ == 0; }

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

  FLASHPORT_DEVICE void fetch_query(Query&) const {}

  // S^T = K Q^T
  FLASHPORT_DEVICE Scores mma_abt(const Query&, const char* keys) const {
    // Two sums a tile, of even and odd steps: half the length of the chain of dependent products.
    Scores sums[2] = {};
#pragma unroll
    for (int pair = 0; pair < kStepPairs; ++pair) {
      unsigned b[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) query_operand(b[tile], tile, pair);
#pragma unroll
      for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned a[4];
          KeyOperand<kCfg>::load(a, keys, block_.lane(), (col_wave_ * kKeyTiles + key_tile) * 16, 2 * pair + half);
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            mma<kMath>(sums[half].c[key_tile][tile], a, b[tile][2 * half], b[tile][2 * half + 1]);
          }
        }
      }
    }
    for_each_register(sums[0].c, [&](float& x, int key_tile, int tile, int i) { x += sums[1].c[key_tile][tile][i]; });
    return sums[0];
  }

  // f(value, slot, key of the leaf)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
    for_each_register(scores.c, [&](float& x, int key_tile, int tile, int i) {
      f(x, 2 * tile + i % 2, (col_wave_ * kKeyTiles + key_tile) * 16 + g_ + i / 2 * 8);
    });
  }

  // Largest score of each row, over all waves that share it. Holds a barrier.
  FLASHPORT_DEVICE void row_max(const Scores& scores, Rows& m) const {
    reduce_rows(scores, m, shared_.row_max, [](float a, float b) { return maximum(a, b); });
    block_.sync();
    gather_rows(m, shared_.row_max, [](float a, float b) { return maximum(a, b); });
  }

  // Scores become the operand P^T, in the math type; l = row sums before rounding. Holds a barrier.
  FLASHPORT_DEVICE Operand to_operand(const Scores& scores, Rows& l) const {
    for_each_key_pair(scores, [&](int key, int tile, float even, float odd) {
      *reinterpret_cast<unsigned*>(&shared_.probabilities[key][row_base_ + 8 * tile + 2 * c_]) = pack<kMath>(even, odd);
    });
    reduce_rows(scores, l, shared_.row_sum, [](float a, float b) { return a + b; });
    block_.sync();
    gather_rows(l, shared_.row_sum, [](float a, float b) { return a + b; });
    return {};
  }

  // O^T = V^T P^T
  FLASHPORT_DEVICE void mma_ab(const Operand&, const char* values, Out& out) const {
    for_each_register(out.c, [](float& x, int, int, int) { x = 0.0f; });
    const int lane = block_.lane();
#pragma unroll
    for (int pair = 0; pair < kLeafKeys / 32; ++pair) {
      unsigned b[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        ldmatrix_x4_trans(b[tile], &shared_.probabilities[32 * pair + lane][row_base_ + 8 * tile]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int col_tile = 0; col_tile < kColTiles; ++col_tile) {
          unsigned a[4];
          ValueOperand<kCfg>::load(a, values, lane, 32 * pair + 16 * half, (col_wave_ * kColTiles + col_tile) * 16);
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            mma<kMath>(out.c[col_tile][tile], a, b[tile][2 * half], b[tile][2 * half + 1]);
          }
        }
      }
    }
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
    for_each_register(
        out.c, [&](const float& x, int col_tile, int tile, int i) { f(x, 2 * tile + i % 2, column(col_tile, i / 2)); });
  }

  // Live rows to memory: per-row values [live_rows], tile [live_rows, DV].
  FLASHPORT_DEVICE void store_rows(const Rows& rows, float* to) const {
    for (int slot = 0; slot < kRowSlots; ++slot) {
      if (owns_row(slot) && row_of(slot) < live_rows_) to[row_of(slot)] = rows[slot];
    }
  }
  FLASHPORT_DEVICE void store_tile(const Out& out, float* to) const {
    for_each_out(out, [&](float x, int slot, int col) {
      if (row_of(slot) < live_rows_) to[row_of(slot) * kColumns + col] = x;
    });
  }

 private:
  // f(register, tile of the first axis, row tile, i)
  template <class Tiles, class F>
  FLASHPORT_DEVICE static void for_each_register(Tiles& c, F&& f) {
    constexpr int kFirst = sizeof(c) / sizeof(c[0]);
#pragma unroll
    for (int first = 0; first < kFirst; ++first) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f(c[first][tile][i], first, tile, i);
      }
    }
  }

  // f(key, row tile, value of row 2 c, value of row 2 c + 1)
  template <class F>
  FLASHPORT_DEVICE void for_each_key_pair(const Scores& scores, F&& f) const {
#pragma unroll
    for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          f((col_wave_ * kKeyTiles + key_tile) * 16 + g_ + 8 * half, tile, scores.c[key_tile][tile][2 * half],
            scores.c[key_tile][tile][2 * half + 1]);
        }
      }
    }
  }

  // Joins the wave's scores of each row and leaves the result where the other waves will find it.
  template <class Exchange, class Join>
  FLASHPORT_DEVICE void reduce_rows(const Scores& scores, Rows& rows, Exchange& exchange, const Join& join) const {
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      float x = join(scores.c[0][slot / 2][slot % 2], scores.c[0][slot / 2][slot % 2 + 2]);
#pragma unroll
      for (int key_tile = 1; key_tile < kKeyTiles; ++key_tile) {
        x = join(x, join(scores.c[key_tile][slot / 2][slot % 2], scores.c[key_tile][slot / 2][slot % 2 + 2]));
      }
#pragma unroll
      for (int distance = 4; distance < kWaveSize; distance *= 2) x = join(x, __shfl_xor_sync(~0u, x, distance));
      rows[slot] = x;
    }
    if (g_ == 0) {
      for (int tile = 0; tile < kRowTiles; ++tile) {
        *reinterpret_cast<float2*>(&exchange[col_wave_][row_base_ + 8 * tile + 2 * c_]) =
            make_float2(rows[2 * tile], rows[2 * tile + 1]);
      }
    }
  }
  template <class Exchange, class Join>
  FLASHPORT_DEVICE void gather_rows(Rows& rows, const Exchange& exchange, const Join& join) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      float2 two = *reinterpret_cast<const float2*>(&exchange[0][row_base_ + 8 * tile + 2 * c_]);
#pragma unroll
      for (int wave = 1; wave < kColWaves; ++wave) {
        const float2 other = *reinterpret_cast<const float2*>(&exchange[wave][row_base_ + 8 * tile + 2 * c_]);
        two = make_float2(join(two.x, other.x), join(two.y, other.y));
      }
      rows[2 * tile] = two.x;
      rows[2 * tile + 1] = two.y;
    }
  }

  FLASHPORT_DEVICE int column(int col_tile, int half) const {
    return (col_wave_ * kColTiles + col_tile) * 16 + ValueOperand<kCfg>::column(g_, half);
  }

  // B operands of 8 query rows and the 32 dims of a pair of steps, in the order of the key operand.
  FLASHPORT_DEVICE void query_operand(unsigned (&b)[4], int tile, int pair) const {
    if constexpr (kBytes) {
      for (int half = 0; half < 2; ++half) {
        const uint2 two =
            *reinterpret_cast<const uint2*>(&shared_.query[row_base_ + 8 * tile + g_][32 * pair + 16 * half + 4 * c_]);
        b[2 * half] = two.x;
        b[2 * half + 1] = two.y;
      }
    } else {
      const int lane = block_.lane();
      ldmatrix_x4(b, &shared_.query[row_base_ + 8 * tile + lane % 8][32 * pair + lane / 8 * 8]);
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
  int live_rows_, row_base_, col_wave_, g_, c_;
};

}  // namespace flashport::FLASHPORT_TARGET
