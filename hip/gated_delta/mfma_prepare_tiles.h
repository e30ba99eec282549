// The tile verbs of the gated delta rule's prepare kernel, on MFMA: four waves, each with 16 tokens' rows of both
// products of queries and keys. Operands are loaded straight from memory; P stays in registers.
#pragma once

#include "hip/gated_delta/chunk_memory.h"
#include "hip/gated_delta/mfma_triangle_inverse.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

template <GatedDeltaChunkConfig>
struct PrepareMemory {
  TriangleSubBlocks triangle;  // A, then the inverse

  FLASHPORT_DEVICE const float* inverse_at(int row, int column) const {
    return triangle.at(row / 16, column / 16) + row % 16 * TriangleSubBlocks::kPitch + column % 16;
  }
};

template <GatedDeltaChunkConfig kCfg>
class PrepareTiles {
  static constexpr MathType kMath = kCfg.math;
  static constexpr int kPairs = kCfg.head_dim_k / 32;
  using Memory = PrepareMemory<kCfg>;

 public:
  struct Gram {
    Floats4 c[4];  // sub-blocks up to the diagonal's
  };

  FLASHPORT_DEVICE PrepareTiles(const GatedDeltaChunkParams& p, const Block& block, Memory& memory, int count)
      : p_(p),
        block_(block),
        memory_(memory),
        count_(count),
        row_sub_block_(block.wave()),
        n_(block.lane() % 16),
        g_(block.lane() / 16) {}

  FLASHPORT_DEVICE void begin_load(const StridedRows& q, std::int64_t at_q, const StridedRows& k, std::int64_t at_k) {
    at_keys_ = at_k;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      own_queries_[pair] = load(q, at_q, row_sub_block_, pair);
      own_keys_[pair] = load(k, at_k, row_sub_block_, pair);
    }
  }
  FLASHPORT_DEVICE void await_load() const {}

  // k k^T and q k^T; the rows' sums of squares are the diagonals of k k^T and of q q^T.
  FLASHPORT_DEVICE void multiply(Gram& keys, Gram& queries, float* key_squares, float* query_squares) const {
    Floats4 squares = {};
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) add_product(squares, own_queries_[pair], own_queries_[pair]);
    store_diagonal(query_squares, squares);
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      keys.c[column] = Floats4{};
      queries.c[column] = Floats4{};
      if (column > row_sub_block_) continue;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const Eight others = load(p_.k, at_keys_, column, pair);
        add_product(keys.c[column], own_keys_[pair], others);
        add_product(queries.c[column], own_queries_[pair], others);
      }
      if (column == row_sub_block_) store_diagonal(key_squares, keys.c[column]);
    }
  }
  FLASHPORT_DEVICE void scale(Gram& gram, const float* rows, const float* columns) const {
    const Floats4 row_factors = *reinterpret_cast<const Floats4*>(rows + first_row());
#pragma unroll
    for (int column = 0; column < 4; ++column) gram.c[column] *= row_factors * columns[16 * column + n_];
  }

  // f(row, column, token(row), token(column), k k^T, q k^T, a) gives an element of P and sets one of A, in the
  // sub-blocks up to the diagonal's.
  template <class Token, class F>
  FLASHPORT_DEVICE void fill_lower(const Gram& keys, const Gram& queries, const Token& token, const F& f) {
    const int row = first_row();
    const decltype(token(0)) row_tokens[4] = {token(row), token(row + 1), token(row + 2), token(row + 3)};
#pragma unroll
    for (int sub_block = 0; sub_block < 4; ++sub_block) {
      if (sub_block > row_sub_block_) continue;
      const int column = 16 * sub_block + n_;
      const auto column_token = token(column);
      float* to = memory_.triangle.at(row_sub_block_, sub_block) + 4 * g_ * TriangleSubBlocks::kPitch + n_;
      float scores[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float a;
        scores[i] = f(row + i, column, row_tokens[i], column_token, keys.c[sub_block][i], queries.c[sub_block][i], a);
        to[i * TriangleSubBlocks::kPitch] = a;
      }
      scores_[sub_block] = {pack<kMath>(scores[0], scores[1]), pack<kMath>(scores[2], scores[3])};
    }
  }
  FLASHPORT_DEVICE void invert() const { invert_unit_lower(block_, memory_.triangle); }

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
      for (int i = 0; i < 4; ++i) {
        to[i * kChunkTokens] = static_cast<std::uint16_t>(scores_[sub_block][i / 2] >> i % 2 * 16);
      }
    }
  }

 private:
  // The lane's eight keys of its row of 16 tokens.
  FLASHPORT_DEVICE Eight load(const StridedRows& rows, std::int64_t at, int sub_block, int pair) const {
    const int row = 16 * sub_block + n_, key = 32 * pair + 8 * g_;
    return load_eight(rows.data, at + row * rows.stride_token + key, row < count_ && key < p_.head_dim_k);
  }
  FLASHPORT_DEVICE static void add_product(Floats4& sum, const Eight& left, const Eight& right) {
    mfma<kMath>(sum, Words2{left[0], left[1]}, Words2{right[0], right[1]});
    mfma<kMath>(sum, Words2{left[2], left[3]}, Words2{right[2], right[3]});
  }
  FLASHPORT_DEVICE int first_row() const { return 16 * row_sub_block_ + 4 * g_; }
  FLASHPORT_DEVICE void store_diagonal(float* to, const Floats4& sub_block) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (n_ == 4 * g_ + i) to[16 * row_sub_block_ + n_] = sub_block[i];
    }
  }

  const GatedDeltaChunkParams& p_;
  const Block& block_;
  Memory& memory_;
  int count_, row_sub_block_, n_, g_;
  std::int64_t at_keys_ = 0;
  Eight own_queries_[kPairs], own_keys_[kPairs];
  Words2 scores_[4];
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
