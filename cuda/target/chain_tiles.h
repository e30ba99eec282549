// The tile verbs of the chain over the chunks of the gated delta rule, on wgmma: a warpgroup computes, another one
// brings it the chunks. V is the side of 64 rows: a warp has 16 columns of V, all of K and all tokens of a chunk,
// transposed, so that the sums of one product are, rounded, the left operand of the next without leaving their lanes. A
// lane 4 g + c has, of each tile of 8 tokens or keys, columns g and g + 8 and of the eight the two from 2 c on.
//
// The chunks of a block's chains lie in a ring of stages: one is `ready` when its copies have landed, and `free` when
// it has been worked on.
#pragma once

#include "common/device/scalar_access.h"
#include "cuda/target/panels.h"

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kWarpgroup = 128;
inline constexpr int kChainBarrier = 1;  // the first warpgroup's own; the second's is the next

template <GatedDeltaChunkConfig kCfg>
struct ChainStage {
  static constexpr int kPanels = kCfg.head_dim_k / kPanelColumns;
  Panels<kPanels> q, k;
  Panels<1> transform, scores, v;
};

template <GatedDeltaChunkConfig kCfg>
struct ChainMemory {
  static constexpr int kStages = kCfg.head_dim_k > 128 ? 2 : 3;  // chunks that are there or on their way
  ChainStage<kCfg> stages[kStages];
  Panels<1> out;
  alignas(16) ChunkFactors factors[kStages];
  std::uint64_t ready[kStages], free[kStages];
  unsigned flag;

  // By one thread, behind which the block meets.
  FLASHPORT_DEVICE void init_barriers() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&ready[i], kWarpgroup);
      mbarrier_init(&free[i], kWarpgroup);
    }
  }
};

// The copying warpgroup's share of the chain, in the same order.
template <GatedDeltaChunkConfig kCfg>
class ChunkCopies {
  using Memory = ChainMemory<kCfg>;

 public:
  FLASHPORT_DEVICE ChunkCopies(const GatedDeltaChunkParams& p, const Block& block, Memory& memory)
      : p_(p),
        memory_(memory),
        thread_(block.thread()),
        wide_{has_wide_rows(p.q), has_wide_rows(p.k), has_wide_rows(p.v)} {}

  FLASHPORT_DEVICE void run(const Chain& chain) {
    for (int i = 0; i < Memory::kStages - 1; ++i) bring(chain, i);
    for (int chunk = 0; chunk < chain.chunks; ++chunk) {
      asm volatile("cp.async.wait_group %0;" ::"n"(Memory::kStages - 2) : "memory");
      fence_async_proxy();
      mbarrier_arrive(&memory_.ready[landed_.tile]);
      landed_.next();
      bring(chain, chunk + Memory::kStages - 1);
    }
  }
  // wgmma reads blocks above the diagonal too, which nobody brings.
  FLASHPORT_DEVICE void clear_triangles() const {
    for (ChainStage<kCfg>& stage : memory_.stages) {
      for (int i = thread_; i < kPanelBytes / 16; i += kWarpgroup) {
        const int row = i / 8, unit = i % 8, at = panel_place(row, unit);
        if (unit / 2 <= row / 16) continue;
        *reinterpret_cast<uint4*>(stage.transform.x[0] + at) = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(stage.scores.x[0] + at) = make_uint4(0, 0, 0, 0);
      }
    }
  }

 private:
  FLASHPORT_DEVICE void bring(const Chain& chain, int chunk) {
    if (chunk < chain.chunks) {
      mbarrier_wait(&memory_.free[filled_.tile], filled_.phase ^ 1);
      const ChunkPlace place = place_of(p_, chain, chunk);
      const int count = place.tokens.count;
      ChainStage<kCfg>& stage = memory_.stages[filled_.tile];
      copy_rows<kWarpgroup>(stage.k, p_.k, place.k, count, p_.head_dim_k, wide_.k, thread_);
      copy_rows<kWarpgroup>(stage.q, p_.q, place.q, count, p_.head_dim_k, wide_.q, thread_);
      const int columns = minimum(p_.head_dim_v - chain.column, kCfg.columns);
      copy_rows<kWarpgroup>(stage.v, p_.v, place.v + chain.column, count, columns, wide_.v, thread_);
      bring_triangles(stage, place.workspace);
      const auto* factors = reinterpret_cast<const char*>(p_.workspace.factors + place.workspace);
      auto* to = reinterpret_cast<char*>(memory_.factors + filled_.tile);
      constexpr int kUnits = sizeof(ChunkFactors) / 16;
      if (thread_ < kUnits) copy_async<16>(to + thread_ * 16, factors + thread_ * 16, true);
      filled_.next();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Both matrices, but for what lies above the diagonal's blocks of 16.
  FLASHPORT_DEVICE void bring_triangles(ChainStage<kCfg>& stage, std::int64_t place) const {
    constexpr int kRowsAtOnce = kWarpgroup / 8;
    const int unit = thread_ % 8, first = thread_ / 8;
    const std::int64_t from = (place * kChunkTokens + first) * kChunkTokens + unit * 8;
    const auto* transform = static_cast<const std::uint16_t*>(p_.workspace.transforms) + from;
    const auto* scores = static_cast<const std::uint16_t*>(p_.workspace.scores) + from;
#pragma unroll
    for (int i = 0; i < kChunkTokens / kRowsAtOnce; ++i) {
      if (unit / 2 > i) continue;
      const int to = panel_place(first + i * kRowsAtOnce, unit);
      copy_async<16>(stage.transform.x[0] + to, transform + i * kRowsAtOnce * kChunkTokens, true);
      copy_async<16>(stage.scores.x[0] + to, scores + i * kRowsAtOnce * kChunkTokens, true);
    }
  }
  static_assert(kWarpgroup / 8 == 16);

  const GatedDeltaChunkParams& p_;
  Memory& memory_;
  const int thread_;
  const struct {
    bool q, k, v;
  } wide_;
  RingPlace<Memory::kStages> filled_, landed_;
};
static_assert(sizeof(ChunkFactors) % 16 == 0 && sizeof(ChunkFactors) / 16 <= kWarpgroup);

template <GatedDeltaChunkConfig kCfg>
class DeltaTiles {
  static_assert(kCfg.columns == 4 * 16);
  static constexpr MathType kMath = kCfg.math;
  using Memory = ChainMemory<kCfg>;
  static constexpr int kPanels = ChainStage<kCfg>::kPanels;

 public:
  struct State {
    float c[kPanels][8][4];
  };
  struct Rows {
    float c[8][4];
  };
  template <int kSteps>  // of 16 tokens or keys
  struct Operand {
    unsigned a[kSteps][4];
  };

  FLASHPORT_DEVICE DeltaTiles(const GatedDeltaChunkParams& p, const Block& block, Memory& memory)
      : p_(p),
        memory_(memory),
        lane_(block.lane()),
        warp_column_(block.wave() * 16),
        g_(block.lane() / 4),
        c_(block.lane() % 4) {}

  FLASHPORT_DEVICE void begin(const Chain& chain) { column_ = chain.column + warp_column_; }

  // Waits for the tiles of the next chunk; those of the one before are not read any more, nor, behind finish(), any.
  FLASHPORT_DEVICE void fetch(const ChunkPlace& place) {
    finish();
    count_ = place.tokens.count;
    mbarrier_wait(&memory_.ready[stage_.tile], stage_.phase);
    holds_stage_ = true;
  }
  FLASHPORT_DEVICE void finish() {
    if (!holds_stage_) return;
    mbarrier_arrive(&memory_.free[stage_.tile]);
    stage_.next();
    holds_stage_ = false;
  }

  FLASHPORT_DEVICE const Panels<kPanels>& queries() const { return memory_.stages[stage_.tile].q; }
  FLASHPORT_DEVICE const Panels<kPanels>& keys() const { return memory_.stages[stage_.tile].k; }
  FLASHPORT_DEVICE const Panels<1>& transform() const { return memory_.stages[stage_.tile].transform; }
  FLASHPORT_DEVICE const Panels<1>& scores() const { return memory_.stages[stage_.tile].scores; }
  // Of the chunk that fetch() waited for, and, in its memory, until the next fetch().
  FLASHPORT_DEVICE const ChunkFactors& factors() const { return memory_.factors[stage_.tile]; }

  FLASHPORT_DEVICE static void zero(State& state) { state = {}; }
  FLASHPORT_DEVICE static Operand<kPanels * 4> to_operand(const State& state) {
    Operand<kPanels * 4> operand;
#pragma unroll
    for (int step = 0; step < kPanels * 4; ++step) {
      round_step(operand.a[step], state.c[step / 4][step % 4 * 2], state.c[step / 4][step % 4 * 2 + 1]);
    }
    return operand;
  }
  FLASHPORT_DEVICE static Operand<4> to_operand(const Rows& rows) {
    Operand<4> operand;
#pragma unroll
    for (int step = 0; step < 4; ++step) round_step(operand.a[step], rows.c[2 * step], rows.c[2 * step + 1]);
    return operand;
  }
  FLASHPORT_DEVICE static float multiply_add(float factor, float x, float sum) { return fma_rn(factor, x, sum); }

  // product [c, V] = left [c, K] S [K, V]
  FLASHPORT_DEVICE static void multiply(Rows& product, const Panels<kPanels>& left, const Operand<kPanels * 4>& state) {
    begin_product<false>(product, left, state);
  }
  // product [c, V] = left [c, c] right [c, V], left lower triangular; or is added to sum
  FLASHPORT_DEVICE static void multiply_lower(Rows& product, const Panels<1>& left, const Operand<4>& right) {
    begin_product<false>(product, left, right);
  }
  FLASHPORT_DEVICE static void add_product_lower(Rows& sum, const Panels<1>& left, const Operand<4>& right) {
    begin_product<true>(sum, left, right);
  }
  // S [K, V] += left^T [K, c] right [c, V]
  FLASHPORT_DEVICE static void add_product_transposed(State& state, const Panels<kPanels>& left,
                                                      const Operand<4>& right) {
    wgmma_begin();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        wgmma<kMath, true, true>(state.c[panel], right.a[step], panel_descriptor(left.x[panel], step * 16 * 128));
      }
    }
    wgmma_commit();
  }
  template <int kLater>
  FLASHPORT_DEVICE static void settle(Rows& rows) {
    wgmma_wait<kLater>();
    pin(rows.c);
  }
  template <int kLater>
  FLASHPORT_DEVICE static void settle(State& state) {
    wgmma_wait<kLater>();
#pragma unroll
    for (auto& panel : state.c) pin(panel);
  }
  FLASHPORT_DEVICE static void scale(State& state, float factor) {
#pragma unroll
    for (auto& panel : state.c) {
#pragma unroll
      for (auto& tile : panel) {
#pragma unroll
        for (float& x : tile) x *= factor;
      }
    }
  }

  // f(row, x) and f(row, x, y) for all elements
  template <class F>
  FLASHPORT_DEVICE void for_each(Rows& rows, const F& f) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) f(row_of(i), rows.c[i / 4][i % 4]);
  }
  template <class F>
  FLASHPORT_DEVICE void for_each(Rows& rows, Rows& others, const F& f) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) f(row_of(i), rows.c[i / 4][i % 4], others.c[i / 4][i % 4]);
  }

  FLASHPORT_DEVICE void load_rows(Rows& rows, std::int64_t) const {
    const Panels<1>& v = memory_.stages[stage_.tile].v;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      unsigned two[4];
      ldmatrix_x4_trans(two, v.x[0] + place_in_out(pair));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack<kMath>(two[i]);
        rows.c[2 * pair + i / 2][i % 2 * 2] = x.x;
        rows.c[2 * pair + i / 2][i % 2 * 2 + 1] = x.y;
      }
    }
  }
  FLASHPORT_DEVICE void store_rows(const Rows& rows, const TokenRows& to, std::int64_t at) const {
    std::uint16_t* out = memory_.out.x[0];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      unsigned two[4];
      round_step(two, rows.c[2 * pair], rows.c[2 * pair + 1]);
      stmatrix_x4_trans(out + place_in_out(pair), two);
    }
    __syncwarp();
    const int unit = warp_column_ / 8 + lane_ % 2, column = column_ + lane_ % 2 * 8;
    if (column < p_.head_dim_v) {
      const bool wide = has_wide_rows(to);
#pragma unroll
      for (int row = lane_ / 2; row < kChunkTokens; row += 16) {
        if (row >= count_) break;
        const std::uint16_t* from = out + panel_place(row, unit);
        auto* target = static_cast<std::uint16_t*>(to.data) + at + row * to.stride_token + column;
        if (wide) {
          *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(from);
        } else {
          for (int i = 0; i < 8; ++i) target[i] = from[i];
        }
      }
    }
    __syncwarp();
  }

  // `at`: the element that the head's state begins with.
  FLASHPORT_DEVICE void load_state(State& state, const void* data, DType dtype, std::int64_t at) const {
    with_type(const_cast<void*>(data), dtype, [&](const auto* from) {
      for_each_of_state(state, [&](float& x, int key, int column) {
        const bool valid = key < p_.head_dim_k && column < p_.head_dim_v;
        x = valid ? to_float(from[at + place_in_state(key, column)]) : 0.0f;
      });
    });
  }
  FLASHPORT_DEVICE void store_state(const State& state, void* data, DType dtype, std::int64_t at) const {
    with_type(data, dtype, [&](auto* to) {
      for_each_of_state(state, [&](const float& x, int key, int column) {
        if (key < p_.head_dim_k && column < p_.head_dim_v) store_as(to + at + place_in_state(key, column), x);
      });
    });
  }

 private:
  FLASHPORT_DEVICE static void round_step(unsigned (&a)[4], const float (&low)[4], const float (&high)[4]) {
    a[0] = pack<kMath>(low[0], low[1]);
    a[1] = pack<kMath>(low[2], low[3]);
    a[2] = pack<kMath>(high[0], high[1]);
    a[3] = pack<kMath>(high[2], high[3]);
  }
  template <bool kAdds, int kLeftPanels, int kSteps>
  FLASHPORT_DEVICE static void begin_product(Rows& sum, const Panels<kLeftPanels>& left, const Operand<kSteps>& right) {
    static_assert(kSteps == 4 * kLeftPanels);
    wgmma_begin();
    wgmma<kMath, kAdds, false>(sum.c, right.a[0], panel_descriptor(left.x[0], 0));
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
      wgmma<kMath, true, false>(sum.c, right.a[step], panel_descriptor(left.x[step / 4], step % 4 * 32));
    }
    wgmma_commit();
  }

  FLASHPORT_DEVICE int row_of(int i) const { return i / 4 * 8 + 2 * c_ + i % 2; }
  // Where this lane's row of an ldmatrix of the warp's columns lies: of tokens 16 pair .. + 15.
  FLASHPORT_DEVICE int place_in_out(int pair) const {
    return panel_place(pair * 16 + lane_ / 16 * 8 + lane_ % 8, warp_column_ / 8 + lane_ / 8 % 2);
  }
  FLASHPORT_DEVICE std::int64_t place_in_state(int key, int column) const {
    return p_.key_major ? std::int64_t{key} * p_.head_dim_v + column : std::int64_t{column} * p_.head_dim_k + key;
  }
  template <class S, class F>
  FLASHPORT_DEVICE void for_each_of_state(S& state, const F& f) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        f(state.c[panel][i / 4][i % 4], panel * 64 + row_of(i), column_ + g_ + i % 4 / 2 * 8);
      }
    }
  }

  const GatedDeltaChunkParams& p_;
  Memory& memory_;
  int lane_, warp_column_, g_, c_;
  int column_ = 0, count_ = 0;
  bool holds_stage_ = false;
  RingPlace<Memory::kStages> stage_;
};

}  // namespace flashport::FLASHPORT_TARGET
