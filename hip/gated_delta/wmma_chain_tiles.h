// The tile verbs of the chain over the chunks of the gated delta rule, on WMMA: four waves, each with 16 columns of V,
// all tokens of a chunk and all of K up to 128.
//
// Rows of a left operand are taken in such an order (lane_maps.h) that register r of half h of the wave holds row
// 8 h + r of a tile of accumulators: the rows of both halves, one after the other, are the right operand of the next
// product, in the order of memory. The state is rounded tile by tile where it is multiplied: registers have no room for
// both the state and its operand.
//
// Where K is 256, two waves share their columns. Each has half of the keys, and they exchange their sums of a product
// with the state through LDS.
#pragma once

#include "common/device/core/scalar_access.h"
#include "hip/arch/wmma.h"
#include "hip/gated_delta/chunk_memory.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

FLASHPORT_DEVICE Words8 join(const Eight& low, const Eight& high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}

template <GatedDeltaChunkConfig kCfg>
struct ChainMemory : ChunkMemory<kCfg> {
  static constexpr int kKeyWaves = kCfg.head_dim_k > 128 ? 2 : 1;  // waves that share columns
  static constexpr bool kHasQueries = kKeyWaves == 1;              // whether LDS has room for queries
  alignas(16) std::uint16_t queries[kHasQueries ? kChunkTokens * ChunkMemory<kCfg>::kPitch : 1];
  alignas(32) float sums[kKeyWaves == 1 ? 1 : chain_threads(kCfg.head_dim_k)][2][8];  // half a product's
};

template <GatedDeltaChunkConfig kCfg>
class DeltaTiles {
  using Memory = ChainMemory<kCfg>;
  static constexpr MathType kMath = kCfg.math;
  static constexpr int kKeyWaves = Memory::kKeyWaves;
  static constexpr int kTiles = kCfg.head_dim_k / kKeyWaves / 16;
  static constexpr int kPitch = Memory::kPitch;
  static constexpr int kThreads = chain_threads(kCfg.head_dim_k);
  static_assert(kCfg.columns * kKeyWaves == 16 * kThreads / kWaveSize);

  struct Keys {};  // in LDS
  struct Queries {
    std::int64_t at;  // the offset in memory, where LDS has no room for them
  };
  enum Lower { kInverse, kScores };

 public:
  struct State {
    Floats8 c[kTiles];
  };
  struct Rows {
    Floats8 c[4];
  };
  using Out = Rows;
  struct StateOperand {
    const State& state;
  };
  struct Operand {
    Eight own[4];  // the rows of the lane's half of the wave
  };

  FLASHPORT_DEVICE DeltaTiles(const GatedDeltaChunkParams& p, const Block& block, Memory& memory)
      : p_(p), block_(block), memory_(memory) {}

  FLASHPORT_DEVICE void begin(const Chain& chain) { first_column_ = chain.column + 16 * (block_.wave() / kKeyWaves); }
  FLASHPORT_DEVICE void fetch(const ChunkCoord& coord) {
    count_ = coord.tokens.count;
    at_queries_ = coord.q;
    RowCopies<kCfg, kThreads> keys, queries;
    WorkspaceCopies<kThreads> workspace_copies;
    const int thread = block_.thread();
    keys.begin(p_.k, coord.k, count_, p_.head_dim_k, thread);
    if constexpr (Memory::kHasQueries) queries.begin(p_.q, coord.q, count_, p_.head_dim_k, thread);
    workspace_copies.begin(p_.workspace, coord.index, thread);
    sync_shared();
    keys.store_shared(memory_.keys, thread);
    if constexpr (Memory::kHasQueries) queries.store_shared(memory_.queries, thread);
    workspace_copies.store_shared(memory_, thread);
    sync_shared();
  }
  FLASHPORT_DEVICE static void finish() {}  // fetch() begins with a barrier

  FLASHPORT_DEVICE Queries queries() const { return {at_queries_}; }
  FLASHPORT_DEVICE Keys keys() const { return {}; }
  FLASHPORT_DEVICE Lower inverse() const { return kInverse; }
  FLASHPORT_DEVICE Lower scores() const { return kScores; }
  FLASHPORT_DEVICE const ChunkFactors& factors() const { return memory_.factors; }

  template <class Tiles>
  FLASHPORT_DEVICE static void zero(Tiles& tiles) {
#pragma unroll
    for (Floats8& c : tiles.c) c = zero_tile();
  }
  FLASHPORT_DEVICE static StateOperand to_operand(const State& state) { return {state}; }
  FLASHPORT_DEVICE static Operand to_operand(const Rows& rows) {
    Operand operand;
#pragma unroll
    for (int i = 0; i < 4; ++i) operand.own[i] = round_tile(rows.c[i]);
    return operand;
  }
  FLASHPORT_DEVICE static float multiply_add(float factor, float x, float sum) { return fma_rn(factor, x, sum); }

  // product [c, V] = left [c, K] S [K, V]
  FLASHPORT_DEVICE void multiply(Rows& product, Keys, const StateOperand& state) const {
    multiply(product, memory_.keys, state);
  }
  FLASHPORT_DEVICE void multiply(Rows& product, Queries queries, const StateOperand& state) const {
    if constexpr (Memory::kHasQueries) {
      multiply(product, memory_.queries, state);
    } else {
      const int line = wmma_line_in_order(n());
      multiply<true>(product, state, [&](int row, int tile) FLASHPORT_INLINE {
        const int token = 16 * row + line, key = first_key() + 16 * tile;
        const std::int64_t at = queries.at + token * p_.q.stride_token + key;
        return join(load_eight(p_.q.data, at, token < count_ && key < p_.head_dim_k),
                    load_eight(p_.q.data, at + 8, token < count_ && key + 8 < p_.head_dim_k));
      });
    }
  }
  // product [c, V] = left [c, c] right [c, V], left lower triangular; or is added to sum
  FLASHPORT_DEVICE void multiply_lower(Rows& product, Lower left, const Operand& right) const {
    zero(product);
    add_product_lower(product, left, right);
  }
  FLASHPORT_DEVICE void add_product_lower(Rows& sum, Lower left, const Operand& right) const {
    const std::uint16_t* rows = memory_.lower[left] + wmma_line_in_order(n()) * 16;
#pragma unroll
    for (int column = 0; column < 4; ++column) {
      const Words8 b = both_halves(right.own[column]);
#pragma unroll
      for (int row = column; row < 4; ++row) {
        const auto* line = reinterpret_cast<const Eight*>(rows + lower_sub_block(row, column) * kSubBlockValues);
        sum.c[row] = wmma<kMath>(join(line[0], line[1]), b, sum.c[row]);
        keep_order(sum.c[row]);
      }
    }
  }
  // S [K, V] += k^T [K, c] right [c, V]
  FLASHPORT_DEVICE void add_product_transposed(State& state, Keys, const Operand& right) const {
    using Column = std::uint16_t __attribute__((ext_vector_type(16)));
    const std::uint16_t* keys = memory_.keys + first_key() + wmma_line_in_order(n());
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const Words8 b = both_halves(right.own[step]);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        Column column;
#pragma unroll
        for (int i = 0; i < 16; ++i) column[i] = keys[(16 * step + i) * kPitch + 16 * tile];
        state.c[tile] = wmma<kMath>(__builtin_bit_cast(Words8, column), b, state.c[tile]);
        keep_order(state.c[tile]);
      }
    }
  }
  template <int kLater, class Tiles>
  FLASHPORT_DEVICE static void settle(Tiles&) {}
  FLASHPORT_DEVICE static void scale(State& state, float factor) {
#pragma unroll
    for (Floats8& c : state.c) c *= factor;
  }

  // f(row, x) and f(row, x, y) for all elements
  template <class F>
  FLASHPORT_DEVICE void for_each(Rows& rows, const F& f) const {
    const int first = 8 * half();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float x = rows.c[i / 8][i % 8];
      f(first + i / 8 * 16 + i % 8, x);
      rows.c[i / 8][i % 8] = x;
    }
  }
  template <class F>
  FLASHPORT_DEVICE void for_each(Rows& rows, Rows& others, const F& f) const {
    const int first = 8 * half();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float x = rows.c[i / 8][i % 8], y = others.c[i / 8][i % 8];
      f(first + i / 8 * 16 + i % 8, x, y);
      rows.c[i / 8][i % 8] = x;
      others.c[i / 8][i % 8] = y;
    }
  }

  FLASHPORT_DEVICE void load_rows(Rows& rows, std::int64_t at) const {
    const int first = 8 * half(), own = column();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = first + i / 8 * 16 + i % 8;
      const bool live = row < count_ && own < p_.head_dim_v;
      rows.c[i / 8][i % 8] = widen_one<kMath>(load_one(p_.v.data, at + row * p_.v.stride_token + own, live));
    }
  }
  FLASHPORT_DEVICE void store_rows(const Rows& rows, const StridedRows& to, std::int64_t at) const {
    const int own = column();
    if (block_.wave() % kKeyWaves != 0) return;
    auto* out = static_cast<std::uint16_t*>(to.data) + at + own;
    if (own >= p_.head_dim_v) return;
    const int first = 8 * half();
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const unsigned two = pack<kMath>(rows.c[i / 8][i % 8], rows.c[i / 8][i % 8 + 1]);
#pragma unroll
      for (int j = i; j < i + 2; ++j) {
        const int row = first + j / 8 * 16 + j % 8;
        if (row < count_) out[row * to.stride_token] = static_cast<std::uint16_t>(two >> j % 2 * 16);
      }
    }
  }

  // `at`: the offset of the head's state, in elements.
  FLASHPORT_DEVICE void load_state(State& state, const void* data, DType dtype, std::int64_t at) const {
    Element elements[8];
    for_each_state_element([&](int tile, int r, bool live, int offset) FLASHPORT_INLINE {
      elements[r] = load_state_element(data, dtype, at + offset, live);
      if (r < 7) return;
#pragma unroll
      for (int j = 0; j < 8; ++j) state.c[tile][j] = widen_state_element(elements[j], dtype);
    });
  }
  FLASHPORT_DEVICE void store_state(const State& state, void* data, DType dtype, std::int64_t at) const {
    with_type(data, dtype, [&](auto* to) FLASHPORT_INLINE {
      for_each_state_element([&](int tile, int r, bool live, int offset) FLASHPORT_INLINE {
        if (live) store_as(to + at + offset, state.c[tile][r]);
      });
    });
  }

 private:
  // Each verb computes these anew: else derived offsets would be kept from chunk to chunk.
  FLASHPORT_DEVICE int n() const { return block_.thread() % 16; }
  FLASHPORT_DEVICE int half() const { return block_.thread() / 16 % 2; }
  FLASHPORT_DEVICE int column() const { return first_column_ + n(); }
  FLASHPORT_DEVICE int first_key() const { return block_.wave() % kKeyWaves * 16 * kTiles; }

  FLASHPORT_DEVICE static Eight round_tile(const Floats8& c) {
    return {pack<kMath>(c[0], c[1]), pack<kMath>(c[2], c[3]), pack<kMath>(c[4], c[5]), pack<kMath>(c[6], c[7])};
  }
  // A right operand: the rows of the lower half of the wave, then those of the upper one.
  FLASHPORT_DEVICE Words8 both_halves(const Eight& own) const {
    const Eight other = {other_half(own[0]), other_half(own[1]), other_half(own[2]), other_half(own[3])};
    return half() == 0 ? join(own, other) : join(other, own);
  }
  FLASHPORT_DEVICE void multiply(Rows& product, const std::uint16_t* rows, const StateOperand& state) const {
    const std::uint16_t* own = rows + wmma_line_in_order(n()) * kPitch + first_key();
    multiply<false>(product, state, [&](int row, int tile) FLASHPORT_INLINE {
      const auto* line = reinterpret_cast<const Eight*>(own + 16 * row * kPitch + 16 * tile);
      return join(line[0], line[1]);
    });
  }
  // left(row, tile) is called right before its product, or one tile ahead.
  template <bool kAhead, class F>
  FLASHPORT_DEVICE void multiply(Rows& product, const StateOperand& right, const F& left) const {
    zero(product);
    Words8 rows[4];
    if (kAhead) {
#pragma unroll
      for (int row = 0; row < 4; ++row) rows[row] = left(row, 0);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      Floats8 sums = right.state.c[tile];
      keep_order(sums);  // else the operand for the keys would be kept for the queries
      const Words8 state = both_halves(round_tile(sums));
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        if (!kAhead) rows[row] = left(row, tile);
        product.c[row] = wmma<kMath>(rows[row], state, product.c[row]);
        if (!kAhead || tile == kTiles - 1) continue;
        rows[row] = left(row, tile + 1);
        __builtin_amdgcn_sched_barrier(0);
      }
#pragma unroll
      for (Floats8& c : product.c) keep_order(c);
    }
    if constexpr (kKeyWaves > 1) add_other_keys(product);
  }
  // Adds the sums of the wave with the other keys, two tiles at a time.
  FLASHPORT_DEVICE void add_other_keys(Rows& product) const {
    const int thread = block_.thread();
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      sync_shared();
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        *reinterpret_cast<Floats8*>(memory_.sums[thread][tile]) = product.c[2 * pair + tile];
      }
      sync_shared();
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        product.c[2 * pair + tile] += *reinterpret_cast<const Floats8*>(memory_.sums[thread ^ kWaveSize][tile]);
      }
    }
  }
  // f(tile, register, whether the head has this element, its offset in the head's state). Offsets and masks are
  // computed here and not once for the loop over the chunks, where they would take registers.
  template <class F>
  FLASHPORT_DEVICE void for_each_state_element(const F& f) const {
    const int key_stride = recompute_scalar(p_.key_major ? p_.head_dim_v : 1);
    const int own = column(), first = first_key() + 8 * half();
    const int offset = first * key_stride + own * (p_.key_major ? 1 : p_.head_dim_k);
    const int keys = own < p_.head_dim_v ? p_.head_dim_k - first : 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int r = 0; r < 8; ++r) f(tile, r, 16 * tile < keys, offset + (16 * tile + r) * key_stride);
      asm volatile("" ::: "memory");  // else the addresses of all tiles would be in registers at a time
    }
  }

  const GatedDeltaChunkParams& p_;
  const Block& block_;
  Memory& memory_;
  int first_column_ = 0, count_ = 0;
  std::int64_t at_queries_ = 0;
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
