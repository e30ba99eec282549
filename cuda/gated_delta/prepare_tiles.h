// The tile verbs of the gated delta rule's prepare kernel, on mma.sync: four warps, each with 16 tokens' rows of both
// products of queries and keys.
#pragma once

#include "cuda/gated_delta/panels.h"
#include "cuda/gated_delta/triangle_inverse.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

inline constexpr int kPrepareThreads = 128;  // threads of a team
inline constexpr int kFirstTeamBarrier = 2;  // each team of a block has a barrier, from this number on
inline constexpr int kMaxPrepareTeams = 4;

template <GatedDeltaChunkConfig kCfg>
struct PrepareMemory {
  static constexpr int kScoresPitch = kChunkTokens + 8;  // rows begin in other banks
  union {                                                // q and k are not read any more when A is written
    struct {
      Panels<kCfg.head_dim_k / kPanelColumns> q, k;
    } rows;
    struct {
      alignas(16) float a[kChunkTokens * kTrianglePitch], inverse[kChunkTokens * kTrianglePitch];
      alignas(16) std::uint16_t scores[kChunkTokens * kScoresPitch];
    } lower;
  };
  unsigned flag;
};

template <GatedDeltaChunkConfig kCfg>
class PrepareTiles {
  static constexpr MathType kMath = kCfg.math;
  static constexpr int kSteps = kCfg.head_dim_k / 16;
  using Memory = PrepareMemory<kCfg>;

 public:
  struct Gram {
    float c[8][4];  // tiles of 8 columns up to the diagonal's sub-block
  };

  FLASHPORT_DEVICE PrepareTiles(const GatedDeltaChunkParams& p, const Block& block, Memory& memory, int count)
      : p_(p), block_(block), memory_(memory), count_(count), first_row_(block.wave() * 16) {}

  FLASHPORT_DEVICE void begin_load(const StridedRows& q, std::int64_t at_q, const StridedRows& k,
                                   std::int64_t at_k) const {
    auto& to = memory_.rows;
    copy_rows<kPrepareThreads>(to.q, q, at_q, count_, p_.head_dim_k, has_wide_rows(q), block_.thread());
    copy_rows<kPrepareThreads>(to.k, k, at_k, count_, p_.head_dim_k, has_wide_rows(k), block_.thread());
  }
  FLASHPORT_DEVICE void await_load() const {
    await_copies();
    block_.sync();
  }

  // k k^T and q k^T; the rows' sums of squares are the diagonals of k k^T and of q q^T.
  FLASHPORT_DEVICE void multiply(Gram& keys, Gram& queries, float* key_squares, float* query_squares) const {
    keys = {}, queries = {};
    float squares[2][4] = {};
    const int lane = block_.lane();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto at = [&](int row, int vector) { return swizzled_offset(row, (2 * step + vector) % 8); };
      const std::uint16_t* k = memory_.rows.k.x[step / 4];
      const std::uint16_t* q = memory_.rows.q.x[step / 4];
      unsigned own_keys[4], own_queries[4];
      ldmatrix_x4(own_keys, k + at(first_row_ + lane % 16, lane / 16));
      ldmatrix_x4(own_queries, q + at(first_row_ + lane % 16, lane / 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) mma<kMath>(squares[i], own_queries, own_queries[i], own_queries[2 + i]);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        if (16 * pair > first_row_) break;
        unsigned b[4];
        ldmatrix_x4(b, k + at(16 * pair + lane / 16 * 8 + lane % 8, lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma<kMath>(keys.c[2 * pair + i], own_keys, b[2 * i], b[2 * i + 1]);
          mma<kMath>(queries.c[2 * pair + i], own_queries, b[2 * i], b[2 * i + 1]);
        }
      }
    }
    // The diagonal's element of row g is in the lane whose two columns include it.
    const int g = lane / 4;
    const auto store_diagonal = [&](float* to, const float (&low)[4], const float (&high)[4]) {
      if (lane % 4 != g / 2) return;
      to[first_row_ + g] = g % 2 == 0 ? low[0] : low[1];
      to[first_row_ + g + 8] = g % 2 == 0 ? high[2] : high[3];
    };
    store_diagonal(query_squares, squares[0], squares[1]);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (16 * pair == first_row_) store_diagonal(key_squares, keys.c[2 * pair], keys.c[2 * pair + 1]);
    }
  }
  FLASHPORT_DEVICE void scale(Gram& gram, const float* rows, const float* columns) const {
    const int row = first_row_ + block_.lane() / 4;
    const float row_factors[2] = {rows[row], rows[row + 8]};
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      if (tile / 2 * 16 > first_row_) break;
      const float2 pair = *reinterpret_cast<const float2*>(columns + 8 * tile + block_.lane() % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) gram.c[tile][i] *= row_factors[i / 2] * (i % 2 == 0 ? pair.x : pair.y);
    }
  }

  // f(row, column, token(row), token(column), k k^T, q k^T, a) gives an element of P and sets one of A, in the
  // sub-blocks up to the diagonal's.
  template <class Token, class F>
  FLASHPORT_DEVICE void fill_lower(const Gram& keys, const Gram& queries, const Token& token, const F& f) const {
    auto& to = memory_.lower;
    const int row = first_row_ + block_.lane() / 4;
    const decltype(token(0)) row_tokens[2] = {token(row), token(row + 8)};
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      if (tile / 2 * 16 > first_row_) break;
      const int column = 8 * tile + block_.lane() % 4 * 2;
      const decltype(token(0)) column_tokens[2] = {token(column), token(column + 1)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float a[2], scores[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scores[i] = f(row + 8 * half, column + i, row_tokens[half], column_tokens[i], keys.c[tile][2 * half + i],
                        queries.c[tile][2 * half + i], a[i]);
        }
        *reinterpret_cast<float2*>(to.a + (row + 8 * half) * kTrianglePitch + column) = make_float2(a[0], a[1]);
        *reinterpret_cast<unsigned*>(to.scores + (row + 8 * half) * Memory::kScoresPitch + column) =
            pack<kMath>(scores[0], scores[1]);
      }
    }
  }
  FLASHPORT_DEVICE void invert() const { invert_unit_lower(block_, memory_.lower.a, memory_.lower.inverse); }

  // Stores the inverse and P in the workspace and signals the chunk; its factors have been stored before.
  FLASHPORT_DEVICE void store(const ChunkWorkspace& workspace, std::int64_t index) const {
    const auto& from = memory_.lower;
    auto* inverse = static_cast<std::uint16_t*>(workspace.inverses) + index * kChunkTokens * kChunkTokens;
    auto* scores = static_cast<std::uint16_t*>(workspace.scores) + index * kChunkTokens * kChunkTokens;
#pragma unroll
    for (int i = 0; i < kChunkTokens * 8 / kPrepareThreads; ++i) {
      const int row = i * (kPrepareThreads / 8) + block_.thread() / 8, vector = block_.thread() % 8;
      if (vector / 2 > row / 16) continue;
      const auto* eight = reinterpret_cast<const float4*>(from.inverse + row * kTrianglePitch + vector * 8);
      const float4 low = eight[0], high = eight[1];
      *reinterpret_cast<uint4*>(inverse + row * kChunkTokens + vector * 8) =
          make_uint4(pack<kMath>(low.x, low.y), pack<kMath>(low.z, low.w), pack<kMath>(high.x, high.y),
                     pack<kMath>(high.z, high.w));
      *reinterpret_cast<uint4*>(scores + row * kChunkTokens + vector * 8) =
          *reinterpret_cast<const uint4*>(from.scores + row * Memory::kScoresPitch + vector * 8);
    }
    if (workspace.signals == nullptr) return;
    block_.sync();
    if (block_.thread() == 0) send_signal(workspace.signals + index);
  }

 private:
  const GatedDeltaChunkParams& p_;
  const Block& block_;
  Memory& memory_;
  int count_, first_row_;
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
