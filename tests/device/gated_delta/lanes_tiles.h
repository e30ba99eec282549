// The verbs of the chunked gated delta rule as a GPU has them, on the threads of lanes_target.h: tiles in shared memory
// in two stages, accumulators spread over the threads, operands rounded to bf16 where the math type says so. Each verb
// waits for what other threads have to write before it reads, and no verb for more.
#pragma once

#include <vector>

#include "common/device/gated_delta/sequence.h"
#include "common/device/gated_delta/triangular.h"
#include "tests/device/gated_delta/lanes_target.h"

namespace flashport::lanes::gated_delta {

template <GatedDeltaChunkConfig kCfg>
float operand(float x) {
  return kCfg.math == MathType::kBf16 ? to_float(to_bfloat16(x)) : x;
}

template <GatedDeltaChunkConfig kCfg>
struct KeyTile {
  float x[kChunkTokens][kCfg.head_dim_k];

  // Rows and keys that do not exist are zeros.
  void load(const Block& block, const StridedRows& rows, std::int64_t at, int count, int keys) {
    for (int i = block.thread(); i < kChunkTokens * kCfg.head_dim_k; i += block.threads()) {
      const int row = i / kCfg.head_dim_k, key = i % kCfg.head_dim_k;
      const bool live = row < count && key < keys;
      x[row][key] = live ? static_cast<const float*>(rows.data)[at + row * rows.stride_token + key] : 0.0f;
    }
  }
};

template <GatedDeltaChunkConfig kCfg>
struct PrepareMemory {
  union {  // q and k are not read any more when A is written
    struct {
      KeyTile<kCfg> q, k;
    } rows;
    struct {
      float a[kChunkTokens * TriangleLanes::kPitch], inverse[kChunkTokens * TriangleLanes::kPitch];
      float scores[kChunkTokens][kChunkTokens];
    } lower;
  };
};

template <GatedDeltaChunkConfig kCfg>
class PrepareTiles {
  static constexpr int kPitch = TriangleLanes::kPitch;

 public:
  struct Gram {
    std::vector<float> x;  // this thread's elements, in the order of for_each
  };

  PrepareTiles(const GatedDeltaChunkParams& p, const Block& block, PrepareMemory<kCfg>& memory, int count)
      : block_(block), memory_(memory), keys_(p.head_dim_k), count_(count) {}

  void begin_load(const StridedRows& q, std::int64_t at_q, const StridedRows& k, std::int64_t at_k) {
    memory_.rows.q.load(block_, q, at_q, count_, keys_);
    memory_.rows.k.load(block_, k, at_k, count_, keys_);
  }
  void await_load() const { block_.sync(); }
  void multiply(Gram& keys, Gram& queries, float* key_squares, float* query_squares) const {
    const auto &q = memory_.rows.q, &k = memory_.rows.k;
    for_each([&](int row, int column) {
      keys.x.push_back(dot(k.x[row], k.x[column]));
      queries.x.push_back(dot(q.x[row], k.x[column]));
    });
    for (int row = block_.thread(); row < kChunkTokens; row += block_.threads()) {
      key_squares[row] = dot(k.x[row], k.x[row]);
      query_squares[row] = dot(q.x[row], q.x[row]);
    }
  }
  void scale(Gram& gram, const float* rows, const float* columns) const {
    std::size_t i = 0;
    for_each([&](int row, int column) { gram.x[i++] *= rows[row] * columns[column]; });
  }
  template <class Token, class F>
  void fill_lower(const Gram& keys, const Gram& queries, const Token& token, const F& f) const {
    auto& to = memory_.lower;
    std::size_t i = 0;
    for_each([&](int row, int column) {
      float& a = to.a[row * kPitch + column];
      to.scores[row][column] = f(row, column, token(row), token(column), keys.x[i], queries.x[i], a);
      ++i;
    });
  }
  void invert() const { invert_unit_lower<TriangleLanes>(block_, memory_.lower.a, memory_.lower.inverse); }
  void store(const ChunkWorkspace& workspace, std::int64_t index) const {
    float* inverse = static_cast<float*>(workspace.inverses) + index * kChunkTokens * kChunkTokens;
    float* scores = static_cast<float*>(workspace.scores) + index * kChunkTokens * kChunkTokens;
    for_each([&](int row, int column) {
      inverse[row * kChunkTokens + column] = operand<kCfg>(memory_.lower.inverse[row * kPitch + column]);
      scores[row * kChunkTokens + column] = operand<kCfg>(memory_.lower.scores[row][column]);
    });
  }

 private:
  // The elements of the sub-blocks up to the diagonal's, distributed over the threads.
  template <class F>
  void for_each(const F& f) const {
    for (int i = block_.thread(); i < kChunkTokens * kChunkTokens; i += block_.threads()) {
      const int row = i / kChunkTokens, column = i % kChunkTokens;
      if (column < (row / 16 + 1) * 16) f(row, column);
    }
  }
  static float dot(const float* x, const float* y) {
    float sum = 0;
    for (int key = 0; key < kCfg.head_dim_k; ++key) sum = std::fma(x[key], y[key], sum);
    return sum;
  }

  const Block& block_;
  PrepareMemory<kCfg>& memory_;
  int keys_, count_;
};

template <GatedDeltaChunkConfig kCfg>
struct ChainMemory {
  struct Stage {
    KeyTile<kCfg> q, k;
    float inverse[kChunkTokens][kChunkTokens], scores[kChunkTokens][kChunkTokens];
    ChunkFactors factors;
  } stages[2];
};

// A thread has the columns of V whose number it is, modulo the threads.
template <GatedDeltaChunkConfig kCfg>
class DeltaTiles {
  using Stage = typename ChainMemory<kCfg>::Stage;
  using Triangle = float (&)[kChunkTokens][kChunkTokens];

 public:
  struct State {
    float x[kCfg.head_dim_k][kCfg.columns];
  };
  struct Rows {
    float x[kChunkTokens][kCfg.columns];
  };
  using Out = Rows;

  DeltaTiles(const GatedDeltaChunkParams& p, const Block& block, ChainMemory<kCfg>& memory)
      : p_(p), block_(block), memory_(memory) {}

  void begin(const Chain& chain) { column_ = chain.column; }

  // Threads that still read the tiles of the chunk before use the other stage.
  void fetch(const ChunkCoord& coord) {
    ++chunk_;
    count_ = coord.tokens.count;
    Stage& to = stage();
    to.q.load(block_, p_.q, coord.q, count_, p_.head_dim_k);
    to.k.load(block_, p_.k, coord.k, count_, p_.head_dim_k);
    const std::int64_t at = coord.index * kChunkTokens * kChunkTokens;
    for (int i = block_.thread(); i < kChunkTokens * kChunkTokens; i += block_.threads()) {
      (&to.inverse[0][0])[i] = static_cast<const float*>(p_.workspace.inverses)[at + i];
      (&to.scores[0][0])[i] = static_cast<const float*>(p_.workspace.scores)[at + i];
    }
    if (block_.thread() == 0) to.factors = p_.workspace.factors[coord.index];
    block_.sync();
  }
  void finish() const { block_.sync(); }

  KeyTile<kCfg>& queries() const { return stage().q; }
  KeyTile<kCfg>& keys() const { return stage().k; }
  Triangle inverse() const { return stage().inverse; }
  Triangle scores() const { return stage().scores; }
  const ChunkFactors& factors() const { return stage().factors; }

  template <class Tile>
  void zero(Tile& tile) const {
    each_column([&](int c) {
      for (auto& row : tile.x) row[c] = 0;
    });
  }
  template <class Tile>
  Tile to_operand(const Tile& tile) const {
    Tile rounded;
    each_column([&](int c) {
      for (std::size_t row = 0; row < std::size(tile.x); ++row) rounded.x[row][c] = operand<kCfg>(tile.x[row][c]);
    });
    return rounded;
  }
  static float multiply_add(float factor, float x, float sum) { return std::fma(factor, x, sum); }

  void multiply(Rows& acc, const KeyTile<kCfg>& left, const State& state) const {
    each_column([&](int c) {
      for (int row = 0; row < kChunkTokens; ++row) {
        acc.x[row][c] = 0;
        for (int key = 0; key < kCfg.head_dim_k; ++key) acc.x[row][c] += left.x[row][key] * state.x[key][c];
      }
    });
  }
  void multiply_lower(Rows& product, Triangle left, const Rows& right) const {
    zero(product);
    add_product_lower(product, left, right);
  }
  void add_product_lower(Rows& acc, Triangle left, const Rows& right) const {
    each_column([&](int c) {
      for (int row = 0; row < kChunkTokens; ++row) {
        for (int i = 0; i < (row / 16 + 1) * 16; ++i) acc.x[row][c] += left[row][i] * right.x[i][c];
      }
    });
  }
  template <int kLater, class Tile>
  void settle(Tile&) const {}
  void add_product_transposed(State& state, const KeyTile<kCfg>& left, const Rows& right) const {
    each_column([&](int c) {
      for (int key = 0; key < kCfg.head_dim_k; ++key) {
        for (int row = 0; row < kChunkTokens; ++row) state.x[key][c] += left.x[row][key] * right.x[row][c];
      }
    });
  }
  void scale(State& state, float factor) const {
    each_column([&](int c) {
      for (auto& row : state.x) row[c] *= factor;
    });
  }
  template <class F>
  void for_each(Rows& rows, const F& f) const {
    each_column([&](int c) {
      for (int row = 0; row < kChunkTokens; ++row) f(row, rows.x[row][c]);
    });
  }
  template <class F>
  void for_each(Rows& rows, Rows& others, const F& f) const {
    each_column([&](int c) {
      for (int row = 0; row < kChunkTokens; ++row) f(row, rows.x[row][c], others.x[row][c]);
    });
  }

  void load_rows(Rows& rows, std::int64_t at) const {
    each_column([&](int c) {
      for (int row = 0; row < kChunkTokens; ++row) {
        const bool live = row < count_ && column_ + c < p_.head_dim_v;
        const std::int64_t offset = at + row * p_.v.stride_token + column_ + c;
        rows.x[row][c] = live ? static_cast<const float*>(p_.v.data)[offset] : 0.0f;
      }
    });
  }
  void store_rows(const Rows& rows, const StridedRows& to, std::int64_t at) const {
    each_column([&](int c) {
      for (int row = 0; row < count_ && column_ + c < p_.head_dim_v; ++row) {
        static_cast<float*>(to.data)[at + row * to.stride_token + column_ + c] = operand<kCfg>(rows.x[row][c]);
      }
    });
  }
  void load_state(State& state, const void* data, DType, std::int64_t at) const {
    each_element(state, [&](float& x, std::int64_t offset) { x = static_cast<const float*>(data)[at + offset]; });
  }
  void store_state(State& state, void* data, DType, std::int64_t at) const {
    each_element(state, [&](float& x, std::int64_t offset) { static_cast<float*>(data)[at + offset] = x; });
  }

 private:
  Stage& stage() const { return memory_.stages[chunk_ % 2]; }
  template <class F>
  void each_column(const F& f) const {
    for (int c = block_.thread(); c < kCfg.columns; c += block_.threads()) f(c);
  }
  // f(element, its offset in the head's state) for the elements that exist; the others are zeros.
  template <class F>
  void each_element(State& state, const F& f) const {
    each_column([&](int c) {
      for (int key = 0; key < kCfg.head_dim_k; ++key) {
        const int column = column_ + c;
        const std::int64_t offset =
            p_.key_major ? std::int64_t{key} * p_.head_dim_v + column : std::int64_t{column} * p_.head_dim_k + key;
        if (key < p_.head_dim_k && column < p_.head_dim_v) {
          f(state.x[key][c], offset);
        } else {
          state.x[key][c] = 0;
        }
      }
    });
  }

  const GatedDeltaChunkParams& p_;
  const Block& block_;
  ChainMemory<kCfg>& memory_;
  int column_ = 0, chunk_ = 0, count_ = 0;
};

}  // namespace flashport::lanes::gated_delta
