// The tile verbs of the chunked gated delta rule on a CPU: fp32 throughout, queries and keys widened once a chunk,
// tiles with exactly the rows that exist. A product is computed in register tiles, rows x vectors of accumulators, each
// over the whole depth in index order; the size of the register tiles changes no bits.
#pragma once

#include "common/device/core/scalar_access.h"
#include "common/device/gated_delta/sequence.h"
#include "common/device/gated_delta/triangular.h"
#include "cpu/gated_delta/state_tile.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

// The columns of a row that a thread takes at a time in triangular.h: one vector.
struct TriangleLanes {
  using Columns = Vec;
  static constexpr int kColumns = kVecWidth;
  static constexpr int kPitch = kChunkTokens;

  static Vec load(const float* from) { return load_vec(from); }
  static void store(float* to, const Vec& x) { store_vec(to, x); }
  static Vec multiply_add(float factor, const Vec& x, const Vec& sum) { return fma_rn(broadcast(factor), x, sum); }
  // 1 in column `column`, else 0.
  static Vec basis(int column) {
    Vec x = {};
    if (column >= 0 && column < kColumns) x[column] = 1.0f;
    return x;
  }
};

// The left side of a product: element (r, k) lies at x[r * row + k * step].
struct FloatTile {
  const float* x;
  int row, step;
};

// sum[kRows, kVecs * kVecWidth] += left [kRows, depth] right [depth, kVecs * kVecWidth]
template <int kRows, int kVecs>
FLASHPORT_DEVICE void multiply_block(float* sum, int sum_pitch, FloatTile left, int depth, const float* right,
                                     int right_pitch) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) acc[r][c] = load_vec(sum + r * sum_pitch + c * kVecWidth);
  }
  for (int k = 0; k < depth; ++k) {
    Vec x[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) x[c] = load_vec(right + k * right_pitch + c * kVecWidth);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = broadcast(left.x[r * left.row + k * left.step]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) acc[r][c] = fma_rn(factor, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) store_vec(sum + r * sum_pitch + c * kVecWidth, acc[r][c]);
  }
}

// sum [rows, vecs * kVecWidth] += left [rows, depth] right [depth, vecs * kVecWidth]; with kLower only the columns of
// `left` up to the end of the diagonal's sub-block count. Not inlined: five products of a kernel share it.
template <bool kLower>
[[gnu::noinline]] inline void multiply_tiles(float* sum, int sum_pitch, int rows, int vecs, FloatTile left, int depth,
                                             const float* right, int right_pitch) {
  const auto strip = [&]<int kRows, int kVecs>(int row, int vec) {
    const int most = kLower ? minimum(depth, (row / 16 + 1) * 16) : depth;
    multiply_block<kRows, kVecs>(sum + row * sum_pitch + vec * kVecWidth, sum_pitch,
                                 {left.x + row * left.row, left.row, left.step}, most, right + vec * kVecWidth,
                                 right_pitch);
  };
  int row = 0;
  for (; row + kDeltaRows <= rows; row += kDeltaRows) {
    int vec = 0;
    for (; vec + kDeltaVecs <= vecs; vec += kDeltaVecs) strip.template operator()<kDeltaRows, kDeltaVecs>(row, vec);
    for (; vec < vecs; ++vec) strip.template operator()<kDeltaRows, 1>(row, vec);
  }
  for (; row < rows; ++row) {
    int vec = 0;
    for (; vec + kDeltaVecs <= vecs; vec += kDeltaVecs) strip.template operator()<1, kDeltaVecs>(row, vec);
    for (; vec < vecs; ++vec) strip.template operator()<1, 1>(row, vec);
  }
}

// Rows of q or k, one vector longer than necessary: rows that are a power of two apart would share few sets of a cache.
template <GatedDeltaChunkConfig kCfg>
struct KeyRows {
  static constexpr int kPitch = kCfg.head_dim_k + kVecWidth;
  alignas(64) float x[kChunkTokens * kPitch];

  void load(const StridedRows& rows, std::int64_t at, int count, int keys) {
    kv::with_loader(rows.dtype, [&](auto row, int bytes) {
      for (int r = 0; r < count; ++r) {
        const char* from = static_cast<const char*>(rows.data) + (at + r * rows.stride_token) * bytes;
        for (int key = 0; key < keys; key += kVecWidth) {
          store_vec(x + r * kPitch + key, kv::load_values(row, from, bytes, key, keys - key));
        }
      }
    });
  }
  FloatTile tile() const { return {x, kPitch, 1}; }
  FloatTile transposed() const { return {x, 1, kPitch}; }
};

// --- Verbs of the prepare kernel ---

template <GatedDeltaChunkConfig kCfg>
struct PrepareMemory {
  KeyRows<kCfg> q, k;
  alignas(64) float k_columns[kCfg.head_dim_k * kChunkTokens];  // k^T
  alignas(64) float a[kChunkTokens * kChunkTokens], inverse[kChunkTokens * kChunkTokens];
  alignas(64) float scores[kChunkTokens * kChunkTokens];
};

template <GatedDeltaChunkConfig kCfg>
class PrepareTiles {
 public:
  struct Gram {
    alignas(64) float x[kChunkTokens * kChunkTokens];
  };

  PrepareTiles(const GatedDeltaChunkParams& p, const Block& block, PrepareMemory<kCfg>& memory, int count)
      : block_(block), memory_(memory), keys_(p.head_dim_k), count_(count) {}

  void begin_load(const StridedRows& q, std::int64_t at_q, const StridedRows& k, std::int64_t at_k) const {
    memory_.q.load(q, at_q, count_, keys_);
    memory_.k.load(k, at_k, count_, keys_);
    for (int key = 0; key < keys_; ++key) {
      for (int row = 0; row < kChunkTokens; ++row) {
        memory_.k_columns[key * kChunkTokens + row] = row < count_ ? memory_.k.x[row * KeyRows<kCfg>::kPitch + key] : 0;
      }
    }
  }
  void await_load() const {}

  // k k^T, q k^T, and the rows' sums of squares
  void multiply(Gram& keys, Gram& queries, float* key_squares, float* query_squares) const {
    const int vecs = (count_ + kVecWidth - 1) / kVecWidth;
    for (Gram* gram : {&keys, &queries}) {
      for (int i = 0; i < count_ * kChunkTokens; i += kVecWidth) store_vec(gram->x + i, Vec{});
      const FloatTile left = gram == &keys ? memory_.k.tile() : memory_.q.tile();
      multiply_tiles<false>(gram->x, kChunkTokens, count_, vecs, left, keys_, memory_.k_columns, kChunkTokens);
    }
    for (int row = 0; row < kChunkTokens; ++row) {
      key_squares[row] = row < count_ ? square_sum(memory_.k, row) : 0.0f;
      query_squares[row] = row < count_ ? square_sum(memory_.q, row) : 0.0f;
    }
  }
  void scale(Gram& gram, const float* rows, const float* columns) const {
    for (int row = 0; row < count_; ++row) {
      for (int column = 0; column < kChunkTokens; column += kVecWidth) {
        float* at = gram.x + row * kChunkTokens + column;
        store_vec(at, load_vec(at) * (rows[row] * load_vec(columns + column)));
      }
    }
  }

  // f(row, column, token(row), token(column), k k^T, q k^T, a) gives an element of P and sets one of A, in the
  // sub-blocks up to the diagonal's.
  template <class Token, class F>
  void fill_lower(const Gram& keys, const Gram& queries, const Token& token, const F& f) const {
    for (int row = 0; row < kChunkTokens; ++row) {
      const auto to = token(row);
      for (int column = 0; column < (row / 16 + 1) * 16; ++column) {
        const int at = row * kChunkTokens + column;
        memory_.scores[at] = f(row, column, to, token(column), keys.x[at], queries.x[at], memory_.a[at]);
      }
    }
  }
  void invert() const { invert_unit_lower<TriangleLanes>(block_, memory_.a, memory_.inverse); }
  // Stores the inverse and P in the workspace.
  void store(const ChunkWorkspace& workspace, std::int64_t index) const {
    float* inverse = static_cast<float*>(workspace.inverses) + index * kChunkTokens * kChunkTokens;
    float* scores = static_cast<float*>(workspace.scores) + index * kChunkTokens * kChunkTokens;
    for (int row = 0; row < kChunkTokens; ++row) {
      for (int column = 0; column < (row / 16 + 1) * 16; column += kVecWidth) {
        const int at = row * kChunkTokens + column;
        store_vec(inverse + at, load_vec(memory_.inverse + at));
        store_vec(scores + at, load_vec(memory_.scores + at));
      }
    }
  }

 private:
  float square_sum(const KeyRows<kCfg>& rows, int row) const {
    Vec sum = {};
    for (int key = 0; key < keys_; key += kVecWidth) {
      const Vec x = load_vec(rows.x + row * KeyRows<kCfg>::kPitch + key);
      sum = fma_rn(x, x, sum);
    }
    return fold_vec(sum, [](Vec x, Vec y) { return x + y; });
  }

  const Block& block_;
  PrepareMemory<kCfg>& memory_;
  int keys_, count_;
};

// --- Verbs of the chain ---

template <GatedDeltaChunkConfig kCfg>
struct ChainMemory {
  KeyRows<kCfg> q, k;
};

template <GatedDeltaChunkConfig kCfg>
class DeltaTiles {
  static constexpr int kPitch = kCfg.columns;

 public:
  struct State {
    alignas(64) float x[kCfg.head_dim_k * kPitch];
  };
  struct Rows {
    alignas(64) float x[kChunkTokens * kPitch];
  };
  using Out = Rows;

  DeltaTiles(const GatedDeltaChunkParams& p, const Block&, ChainMemory<kCfg>& memory) : p_(p), memory_(memory) {}

  void begin(const Chain& chain) {
    column_ = chain.column;
    live_ = minimum(kCfg.columns, p_.head_dim_v - chain.column);
    vecs_ = (live_ + kVecWidth - 1) / kVecWidth;
  }

  // Loads a chunk's tiles in place of the tiles of the chunk before; finish() says that none is read any more.
  void fetch(const ChunkCoord& coord) {
    count_ = coord.tokens.count;
    memory_.q.load(p_.q, coord.q, count_, p_.head_dim_k);
    memory_.k.load(p_.k, coord.k, count_, p_.head_dim_k);
    index_ = coord.index;
  }
  void finish() const {}

  FloatTile queries() const { return memory_.q.tile(); }
  FloatTile keys() const { return memory_.k.tile(); }
  FloatTile inverse() const { return triangle(p_.workspace.inverses); }
  FloatTile scores() const { return triangle(p_.workspace.scores); }
  const ChunkFactors& factors() const { return p_.workspace.factors[index_]; }

  void zero(State& state) const { clear(state.x, p_.head_dim_k); }
  static const State& to_operand(const State& state) { return state; }
  static const Rows& to_operand(const Rows& rows) { return rows; }
  static Vec multiply_add(float factor, const Vec& x, const Vec& sum) { return fma_rn(broadcast(factor), x, sum); }

  // product [c, V] = left [c, K] S [K, V]
  void multiply(Rows& product, FloatTile left, const State& state) const {
    clear(product.x, count_);
    multiply_tiles<false>(product.x, kPitch, count_, vecs_, left, p_.head_dim_k, state.x, kPitch);
  }
  // product [c, V] = left [c, c] right [c, V], left lower triangular; or is added to sum
  void multiply_lower(Rows& product, FloatTile left, const Rows& right) const {
    clear(product.x, count_);
    add_product_lower(product, left, right);
  }
  void add_product_lower(Rows& sum, FloatTile left, const Rows& right) const {
    multiply_tiles<true>(sum.x, kPitch, count_, vecs_, left, count_, right.x, kPitch);
  }
  // S [K, V] += left^T [K, c] right [c, V]
  void add_product_transposed(State& state, FloatTile left, const Rows& right) const {
    const FloatTile transposed{left.x, left.step, left.row};
    multiply_tiles<false>(state.x, kPitch, p_.head_dim_k, vecs_, transposed, count_, right.x, kPitch);
  }
  template <int kLater, class Sums>
  void settle(Sums&) const {}
  void scale(State& state, float factor) const {
    visit(p_.head_dim_k, [&](int key, int first) {
      float* at = state.x + key * kPitch + first;
      store_vec(at, load_vec(at) * factor);
    });
  }

  // f(row, x) and f(row, x, y) for all elements, some of a row at a time
  template <class F>
  void for_each(Rows& rows, const F& f) const {
    visit(count_, [&](int row, int first) {
      float* at = rows.x + row * kPitch + first;
      Vec x = load_vec(at);
      f(row, x);
      store_vec(at, x);
    });
  }
  template <class F>
  void for_each(Rows& rows, Rows& others, const F& f) const {
    visit(count_, [&](int row, int first) {
      const int at = row * kPitch + first;
      Vec x = load_vec(rows.x + at), y = load_vec(others.x + at);
      f(row, x, y);
      store_vec(rows.x + at, x);
      store_vec(others.x + at, y);
    });
  }

  // Values. `at`: the element that the head's first row begins with. Columns that there are not are zeros.
  void load_rows(Rows& rows, std::int64_t at) const {
    kv::with_loader(p_.v.dtype, [&](auto row, int bytes) {
      visit(count_, [&](int r, int first) {
        const char* source = static_cast<const char*>(p_.v.data) + (at + r * p_.v.stride_token + column_) * bytes;
        store_vec(rows.x + r * kPitch + first, kv::load_values(row, source, bytes, first, live_ - first));
      });
    });
  }
  void store_rows(const Rows& rows, const StridedRows& to, std::int64_t at) const {
    const int bytes = to.dtype == DType::kFloat32 ? 4 : 2;
    visit(count_, [&](int r, int first) {
      char* target = static_cast<char*>(to.data) + (at + r * to.stride_token + column_ + first) * bytes;
      kv::store_values(target, to.dtype, load_vec(rows.x + r * kPitch + first), live_ - first);
    });
  }

  // `at`: the offset of the head's state, in elements.
  void load_state(State& state, const void* data, DType dtype, std::int64_t at) const {
    zero(state);
    kv::with_loader(dtype, [&](auto row, int bytes) {
      const char* from = static_cast<const char*>(data) + at * bytes;
      if (p_.key_major) {
        visit(p_.head_dim_k, [&](int key, int first) {
          const char* source = from + (std::int64_t{key} * p_.head_dim_v + column_) * bytes;
          store_vec(state.x + key * kPitch + first, kv::load_values(row, source, bytes, first, live_ - first));
        });
        return;
      }
      for (int column = 0; column < live_; ++column) {
        const char* source = from + std::int64_t{column_ + column} * p_.head_dim_k * bytes;
        for (int key = 0; key < p_.head_dim_k; key += kVecWidth) {
          const Vec x = kv::load_values(row, source, bytes, key, p_.head_dim_k - key);
          for (int i = 0; i < kVecWidth && key + i < p_.head_dim_k; ++i) state.x[(key + i) * kPitch + column] = x[i];
        }
      }
    });
  }
  void store_state(const State& state, void* data, DType dtype, std::int64_t at) const {
    const int bytes = dtype == DType::kFloat32 ? 4 : 2;
    char* to = static_cast<char*>(data) + at * bytes;
    if (p_.key_major) {
      visit(p_.head_dim_k, [&](int key, int first) {
        char* target = to + (std::int64_t{key} * p_.head_dim_v + column_ + first) * bytes;
        kv::store_values(target, dtype, load_vec(state.x + key * kPitch + first), live_ - first);
      });
      return;
    }
    for (int column = 0; column < live_; ++column) {
      for (int key = 0; key < p_.head_dim_k; key += kVecWidth) {
        Vec x = {};
        for (int i = 0; i < kVecWidth && key + i < p_.head_dim_k; ++i) x[i] = state.x[(key + i) * kPitch + column];
        char* target = to + (std::int64_t{column_ + column} * p_.head_dim_k + key) * bytes;
        kv::store_values(target, dtype, x, p_.head_dim_k - key);
      }
    }
  }

 private:
  FloatTile triangle(const void* matrices) const {
    return {static_cast<const float*>(matrices) + index_ * kChunkTokens * kChunkTokens, kChunkTokens, 1};
  }
  // f(row, first column) for each vector of a matrix of so many rows
  template <class F>
  FLASHPORT_DEVICE void visit(int rows, const F& f) const {
    for (int row = 0; row < rows; ++row) {
      for (int vec = 0; vec < vecs_; ++vec) f(row, vec * kVecWidth);
    }
  }
  void clear(float* x, int rows) const {
    visit(rows, [&](int row, int first) { store_vec(x + row * kPitch + first, Vec{}); });
  }

  const GatedDeltaChunkParams& p_;
  ChainMemory<kCfg>& memory_;
  int column_ = 0, live_ = 0, vecs_ = 0;
  int count_ = 0;
  std::int64_t index_ = 0;
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
