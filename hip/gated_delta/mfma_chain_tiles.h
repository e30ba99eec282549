// The tile verbs of the chain over the chunks of the gated delta rule, on MFMA: four waves, each with 16 columns of V,
// all of K and all tokens of a chunk. The sums of one product are, rounded, the right operand of the next in the same
// registers.
//
// A pair of tiles of the state has its 32 keys in such an order that a lane's four keys of one tile and its four of the
// other are neighbours in a row of keys or queries (mfma_pair_key): in tile 2 T + s, register i of lane 16 g + n holds
// key 32 T + 8 g + 4 s + i.
#pragma once

#include "common/device/core/scalar_access.h"
#include "hip/arch/mfma.h"
#include "hip/gated_delta/chunk_memory.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

template <GatedDeltaChunkConfig kCfg>
using ChainMemory = ChunkMemory<kCfg>;

template <GatedDeltaChunkConfig kCfg>
class DeltaTiles {
  static constexpr MathType kMath = kCfg.math;
  static constexpr int kPairs = kCfg.head_dim_k / 32;
  static constexpr int kPitch = ChainMemory<kCfg>::kPitch;
  static constexpr int kThreads = chain_threads(kCfg.head_dim_k);
  static_assert(kCfg.columns == 16 * kThreads / kWaveSize);

  struct Keys {};  // in LDS
  struct Queries {
    Eight rows[4][kPairs];
  };
  enum Lower { kInverse, kScores };

 public:
  struct State {
    Floats4 c[2 * kPairs];
  };
  struct Rows {
    Floats4 c[4];
  };
  using Out = Rows;
  template <int kSteps>
  struct Operand {
    Words2 b[kSteps];
  };

  FLASHPORT_DEVICE DeltaTiles(const GatedDeltaChunkParams& p, const Block& block, ChainMemory<kCfg>& memory)
      : p_(p), block_(block), memory_(memory), n_(block.lane() % 16), g_(block.lane() / 16) {}

  FLASHPORT_DEVICE void begin(const Chain& chain) {
    chain_ = &chain;
    column_ = chain.column + 16 * block_.wave() + n_;
    chunk_ = 0;
    if (chain.chunks > 0) begin_copies();
  }
  // Afterwards the chunk's queries are in flight, and everything else of the next chunk.
  FLASHPORT_DEVICE void fetch(const ChunkCoord& coord) {
    count_ = coord.tokens.count;
    const int n = recompute(n_), g = recompute(g_);  // else derived offsets would be kept from chunk to chunk
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      const int row = 16 * tile + n;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int key = 32 * pair + 8 * g;
        const std::int64_t at = coord.q + row * p_.q.stride_token + key;
        queries_.rows[tile][pair] = load_eight(p_.q.data, at, row < count_ && key < p_.head_dim_k);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) values_[i] = next_values_[i];
    block_.sync();
    keys_.store_shared(memory_.keys, block_.thread());
    workspace_copies_.store_shared(memory_, block_.thread());
    block_.sync();
    begin_copies();
  }
  FLASHPORT_DEVICE static void finish() {}  // fetch() begins with a barrier

  FLASHPORT_DEVICE const Queries& queries() const { return queries_; }
  FLASHPORT_DEVICE Keys keys() const { return {}; }
  FLASHPORT_DEVICE Lower inverse() const { return kInverse; }
  FLASHPORT_DEVICE Lower scores() const { return kScores; }
  FLASHPORT_DEVICE const ChunkFactors& factors() const { return memory_.factors; }

  template <class Tiles>
  FLASHPORT_DEVICE static void zero(Tiles& tiles) {
#pragma unroll
    for (Floats4& c : tiles.c) c = Floats4{};
  }
  template <class Tiles>
  FLASHPORT_DEVICE static auto to_operand(const Tiles& tiles) {
    constexpr int kSteps = sizeof(tiles.c) / sizeof(Floats4);
    Operand<kSteps> operand;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      operand.b[i] = {pack<kMath>(tiles.c[i][0], tiles.c[i][1]), pack<kMath>(tiles.c[i][2], tiles.c[i][3])};
    }
    return operand;
  }
  FLASHPORT_DEVICE static float multiply_add(float factor, float x, float sum) { return fma_rn(factor, x, sum); }

  // product [c, V] = left [c, K] S [K, V]
  FLASHPORT_DEVICE void multiply(Rows& product, Keys, const Operand<2 * kPairs>& state) const {
    const std::uint16_t* keys = memory_.keys + n_ * kPitch + 8 * g_;
    multiply(product, state, [&](int tile, int pair) FLASHPORT_INLINE {
      return *reinterpret_cast<const Eight*>(keys + 16 * tile * kPitch + 32 * pair);
    });
  }
  FLASHPORT_DEVICE void multiply(Rows& product, const Queries& queries, const Operand<2 * kPairs>& state) const {
    multiply(product, state, [&](int tile, int pair) FLASHPORT_INLINE { return queries.rows[tile][pair]; });
  }
  // product [c, V] = left [c, c] right [c, V], left lower triangular; or is added to sum
  FLASHPORT_DEVICE void multiply_lower(Rows& product, Lower left, const Operand<4>& right) const {
    zero(product);
    add_product_lower(product, left, right);
  }
  FLASHPORT_DEVICE void add_product_lower(Rows& sum, Lower left, const Operand<4>& right) const {
    const std::uint16_t* rows = memory_.lower[left] + n_ * 16 + 4 * g_;
#pragma unroll
    for (int column = 0; column < 4; ++column) {
#pragma unroll
      for (int row = column; row < 4; ++row) {
        const auto* four = reinterpret_cast<const Words2*>(rows + lower_sub_block(row, column) * kSubBlockValues);
        mfma<kMath>(sum.c[row], *four, right.b[column]);
      }
    }
  }
  // S [K, V] += k^T [K, c] right [c, V]
  FLASHPORT_DEVICE void add_product_transposed(State& state, Keys, const Operand<4>& right) const {
    using FourBits = std::uint16_t __attribute__((ext_vector_type(4)));
    const std::uint16_t* keys = memory_.keys + 4 * g_ * kPitch + mfma_pair_key(0, n_);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int tile = 0; tile < 2 * kPairs; ++tile) {
        const std::uint16_t* from = keys + 16 * step * kPitch + tile / 2 * 32 + tile % 2 * 4;
        const FourBits four = {from[0], from[kPitch], from[2 * kPitch], from[3 * kPitch]};
        mfma<kMath>(state.c[tile], __builtin_bit_cast(Words2, four), right.b[step]);
      }
    }
  }
  template <int kLater, class Tiles>
  FLASHPORT_DEVICE static void settle(Tiles&) {}
  FLASHPORT_DEVICE static void scale(State& state, float factor) {
#pragma unroll
    for (Floats4& c : state.c) c *= factor;
  }

  // f(row, x) and f(row, x, y) for all elements
  template <class F>
  FLASHPORT_DEVICE void for_each(Rows& rows, const F& f) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float x = rows.c[i / 4][i % 4];
      f(row_of(i), x);
      rows.c[i / 4][i % 4] = x;
    }
  }
  template <class F>
  FLASHPORT_DEVICE void for_each(Rows& rows, Rows& others, const F& f) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float x = rows.c[i / 4][i % 4], y = others.c[i / 4][i % 4];
      f(row_of(i), x, y);
      rows.c[i / 4][i % 4] = x;
      others.c[i / 4][i % 4] = y;
    }
  }

  FLASHPORT_DEVICE void load_rows(Rows& rows, std::int64_t) const {
    __builtin_amdgcn_sched_barrier(0);  // else the wait for the values would lie amid the products before this
#pragma unroll
    for (int i = 0; i < 16; ++i) rows.c[i / 4][i % 4] = widen_one<kMath>(values_[i]);
  }
  FLASHPORT_DEVICE void store_rows(const Rows& rows, const StridedRows& to, std::int64_t at) const {
    auto* out = static_cast<std::uint16_t*>(to.data) + at + column_;
    if (column_ >= p_.head_dim_v) return;
    const int first = recompute(4 * g_);
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const unsigned two = pack<kMath>(rows.c[i / 4][i % 4], rows.c[i / 4][i % 4 + 1]);
#pragma unroll
      for (int j = i; j < i + 2; ++j) {
        const int row = first + j / 4 * 16 + j % 4;
        if (row < count_) out[row * to.stride_token] = static_cast<std::uint16_t>(two >> j % 2 * 16);
      }
    }
  }

  // `at`: the offset of the head's state, in elements.
  FLASHPORT_DEVICE void load_state(State& state, const void* data, DType dtype, std::int64_t at) const {
    Element elements[4];
    for_each_state_element([&](int tile, int i, bool live, int offset) FLASHPORT_INLINE {
      elements[i] = load_state_element(data, dtype, at + offset, live);
      if (i < 3) return;
#pragma unroll
      for (int j = 0; j < 4; ++j) state.c[tile][j] = widen_state_element(elements[j], dtype);
    });
  }
  FLASHPORT_DEVICE void store_state(const State& state, void* data, DType dtype, std::int64_t at) const {
    with_type(data, dtype, [&](auto* to) FLASHPORT_INLINE {
      for_each_state_element([&](int tile, int i, bool live, int offset) FLASHPORT_INLINE {
        if (live) store_as(to + at + offset, state.c[tile][i]);
      });
    });
  }

 private:
  // Loads the next chunk into registers. After the last chunk it loads the last one again: the loads in flight must not
  // depend on a branch, or the code after the branch would wait for all of them.
  FLASHPORT_DEVICE void begin_copies() {
    const ChunkCoord coord = chunk_coord(p_, *chain_, minimum(chunk_++, chain_->chunks - 1));
    keys_.begin(p_.k, coord.k, coord.tokens.count, p_.head_dim_k, block_.thread());
    workspace_copies_.begin(p_.workspace, coord.index, block_.thread());
    const int first = recompute(4 * g_);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = first + i / 4 * 16 + i % 4;
      const std::int64_t at = coord.v + row * p_.v.stride_token + column_;
      next_values_[i] = load_one(p_.v.data, at, row < coord.tokens.count && column_ < p_.head_dim_v);
    }
  }
  template <class F>
  FLASHPORT_DEVICE static void multiply(Rows& product, const Operand<2 * kPairs>& state, const F& left) {
    zero(product);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        const Eight keys = left(tile, pair);
        mfma<kMath>(product.c[tile], Words2{keys[0], keys[1]}, state.b[2 * pair]);
        mfma<kMath>(product.c[tile], Words2{keys[2], keys[3]}, state.b[2 * pair + 1]);
      }
    }
  }
  FLASHPORT_DEVICE int row_of(int i) const { return i / 4 * 16 + 4 * g_ + i % 4; }
  // f(tile, register, whether the head has this element, its offset in the head's state). Offsets and masks are
  // computed here and not once for the loop over the chunks, where they would take registers.
  template <class F>
  FLASHPORT_DEVICE void for_each_state_element(const F& f) const {
    const int key_stride = recompute_scalar(p_.key_major ? p_.head_dim_v : 1);
    const int offset = recompute(8 * g_ * key_stride + column_ * (p_.key_major ? 1 : p_.head_dim_k));
    const int keys = recompute(column_ < p_.head_dim_v ? p_.head_dim_k - 8 * g_ : 0);
#pragma unroll
    for (int tile = 0; tile < 2 * kPairs; ++tile) {
      const int key = tile / 2 * 32 + tile % 2 * 4;  // relative to the lane's first key
#pragma unroll
      for (int i = 0; i < 4; ++i) f(tile, i, key < keys, offset + (key + i) * key_stride);
    }
  }

  const GatedDeltaChunkParams& p_;
  const Block& block_;
  ChainMemory<kCfg>& memory_;
  const Chain* chain_ = nullptr;
  int n_, g_;
  int column_ = 0, chunk_ = 0, count_ = 0;
  RowCopies<kCfg, kThreads> keys_;
  WorkspaceCopies<kThreads> workspace_copies_;
  Queries queries_;
  std::uint16_t values_[16], next_values_[16];
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
