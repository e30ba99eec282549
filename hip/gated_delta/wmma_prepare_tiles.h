// The tile verbs of the gated delta rule's prepare kernel, on WMMA: four waves, each with 16 tokens' rows of both
// products of queries and keys. Operands are loaded straight from memory; P stays in registers.
#pragma once

#include "common/device/gated_delta/triangular.h"
#include "hip/gated_delta/wmma_chain_tiles.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

struct TriangleLanes {
  using Columns = float;
  static constexpr int kColumns = 1, kPitch = kChunkTokens + 4;

  FLASHPORT_DEVICE static float load(const float* from) { return *from; }
  FLASHPORT_DEVICE static void store(float* to, float x) { *to = x; }
  FLASHPORT_DEVICE static float multiply_add(float factor, float x, float sum) { return fma_rn(factor, x, sum); }
  FLASHPORT_DEVICE static float basis(int column) { return column == 0 ? 1.0f : 0.0f; }
};

template <GatedDeltaChunkConfig>
struct PrepareMemory {
  static constexpr int kPitch = TriangleLanes::kPitch;
  alignas(16) float a[kChunkTokens * kPitch], inverse[kChunkTokens * kPitch];

  FLASHPORT_DEVICE const float* inverse_at(int row, int column) const { return inverse + row * kPitch + column; }
};

template <GatedDeltaChunkConfig kCfg>
class PrepareTiles {
  static constexpr MathType kMath = kCfg.math;
  static constexpr int kTiles = kCfg.head_dim_k / 16;
  using Memory = PrepareMemory<kCfg>;

 public:
  struct Gram {
    Floats8 c[4];  // sub-blocks up to the diagonal's
  };

  FLASHPORT_DEVICE PrepareTiles(const GatedDeltaChunkParams& p, const Block& block, Memory& memory, int count)
      : p_(p),
        block_(block),
        memory_(memory),
        count_(count),
        row_sub_block_(block.wave()),
        n_(block.lane() % 16),
        half_(block.lane() / 16) {}

  FLASHPORT_DEVICE void begin_load(const StridedRows&, std::int64_t at_q, const StridedRows&, std::int64_t at_k) {
    at_queries_ = at_q;
    at_keys_ = at_k;
  }
  FLASHPORT_DEVICE void await_load() const {}

  // k k^T and q k^T; the rows' sums of squares are the diagonals of k k^T and of q q^T.
  FLASHPORT_DEVICE void multiply(Gram& keys, Gram& queries, float* key_squares, float* query_squares) const {
    Floats8 squares = zero_tile();
#pragma unroll
    for (int column = 0; column < 4; ++column) keys.c[column] = queries.c[column] = zero_tile();
#pragma unroll 1
    for (int tile = 0; tile < kTiles; ++tile) {
      const int line = 16 * row_sub_block_ + wmma_line_in_order(n_);
      const Words8 own_keys = load(p_.k, at_keys_, line, tile), own_queries = load(p_.q, at_queries_, line, tile);
      squares = wmma<kMath>(own_queries, load(p_.q, at_queries_, 16 * row_sub_block_ + n_, tile), squares);
#pragma unroll
      for (int column = 0; column < 4; ++column) {
        if (column > row_sub_block_) continue;
        const Words8 others = load(p_.k, at_keys_, 16 * column + n_, tile);
        keys.c[column] = wmma<kMath>(own_keys, others, keys.c[column]);
        queries.c[column] = wmma<kMath>(own_queries, others, queries.c[column]);
      }
    }
    store_diagonal(query_squares, squares);
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      if (column == row_sub_block_) store_diagonal(key_squares, keys.c[column]);
    }
  }
  FLASHPORT_DEVICE void scale(Gram& gram, const float* rows, const float* columns) const {
    const Floats8 row_factors = *reinterpret_cast<const Floats8*>(rows + first_row());
#pragma unroll
    for (int column = 0; column < 4; ++column) gram.c[column] *= row_factors * columns[16 * column + n_];
  }

  // f(row, column, token(row), token(column), k k^T, q k^T, a) gives an element of P and sets one of A, in the
  // sub-blocks up to the diagonal's.
  template <class Token, class F>
  FLASHPORT_DEVICE void fill_lower(const Gram& keys, const Gram& queries, const Token& token, const F& f) {
#pragma unroll
    for (int sub_block = 0; sub_block < 4; ++sub_block) {
      if (sub_block > row_sub_block_) continue;
      const int column = 16 * sub_block + n_;
      const auto column_token = token(column);
      float scores[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const int row = first_row() + r;
        float a;
        scores[r] = f(row, column, token(row), column_token, keys.c[sub_block][r], queries.c[sub_block][r], a);
        memory_.a[row * Memory::kPitch + column] = a;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) scores_[sub_block][i] = pack<kMath>(scores[2 * i], scores[2 * i + 1]);
    }
  }
  FLASHPORT_DEVICE void invert() const { invert_unit_lower<TriangleLanes>(block_, memory_.a, memory_.inverse); }

  // Stores the inverse and P in the workspace.
  FLASHPORT_DEVICE void store(const ChunkWorkspace& workspace, std::int64_t index) const {
    const std::int64_t matrix = index * kChunkTokens * kChunkTokens;
    auto* inverse = static_cast<std::uint16_t*>(workspace.inverses) + matrix;
    auto* scores = static_cast<std::uint16_t*>(workspace.scores) + matrix;
    store_inverse<kPrepareThreads>(memory_, inverse, block_.thread(), pack<kMath>);
#pragma unroll
    for (int sub_block = 0; sub_block < 4; ++sub_block) {
      if (sub_block > row_sub_block_) continue;
      std::uint16_t* to = scores + first_row() * kChunkTokens + 16 * sub_block + n_;
#pragma unroll
      for (int r = 0; r < 8; ++r)
        to[r * kChunkTokens] = static_cast<std::uint16_t>(scores_[sub_block][r / 2] >> r % 2 * 16);
    }
  }

 private:
  // A token's 16 keys of a tile.
  FLASHPORT_DEVICE Words8 load(const StridedRows& rows, std::int64_t at, int token, int tile) const {
    const int key = 16 * tile;
    const std::int64_t first = at + token * rows.stride_token + key;
    return join(load_eight(rows.data, first, token < count_ && key < p_.head_dim_k),
                load_eight(rows.data, first + 8, token < count_ && key + 8 < p_.head_dim_k));
  }
  FLASHPORT_DEVICE int first_row() const { return 16 * row_sub_block_ + 8 * half_; }
  FLASHPORT_DEVICE void store_diagonal(float* to, const Floats8& sub_block) const {
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      if (n_ == 8 * half_ + r) to[16 * row_sub_block_ + n_] = sub_block[r];
    }
  }

  const GatedDeltaChunkParams& p_;
  const Block& block_;
  Memory& memory_;
  int count_, row_sub_block_, n_, half_;
  std::int64_t at_queries_ = 0, at_keys_ = 0;
  Eight scores_[4];
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
