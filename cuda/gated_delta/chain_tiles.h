// The tile verbs of the chain over the chunks of the gated delta rule, on wgmma, for two warpgroups that run its text
// concurrently: CarryTiles has the state, and OutputTiles the outputs. CarryTiles passes the rounded operands of its
// products through shared memory to OutputTiles. A verb on what the other warpgroup has does nothing.
//
// V is the side of 64 rows: a warp has 16 columns of V, all of K and all tokens of a chunk, transposed, so that the
// sums of one product are, rounded, the left operand of the next without leaving their lanes. In each tile of 8 tokens
// or keys, lane 4 g + c has columns g and g + 8 of V, and tokens or keys 2 c and 2 c + 1.
#pragma once

#include "common/device/core/scalar_access.h"
#include "cuda/gated_delta/chain_memory.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

using Sums = float[8][4];  // [64, V]

template <int kSteps>  // steps of 16 tokens or keys
struct Operand {
  unsigned a[kSteps][4];
};

// What both warpgroups have: the ring of chunks, and the map from lanes to elements.
template <GatedDeltaChunkConfig kCfg>
class ChainTiles {
 protected:
  static_assert(kCfg.columns == 4 * 16);
  static constexpr MathType kMath = kCfg.math;
  using Memory = ChainMemory<kCfg>;
  static constexpr int kPanels = ChainStage<kCfg>::kPanels;

 public:
  FLASHPORT_DEVICE ChainTiles(const GatedDeltaChunkParams& p, const Block& block, Memory& memory)
      : p_(p),
        memory_(memory),
        lane_(block.lane()),
        warp_column_(block.wave() * 16),
        g_(block.lane() / 4),
        c_(block.lane() % 4) {}

  // Waits for the chain's first chunk before it touches the state.
  FLASHPORT_DEVICE void begin(const Chain& chain) {
    column_ = chain.column + warp_column_;
    if (chain.chunks > 0) await_chunk_signal(p_.workspace, chunk_coord(p_, chain, 0).index);
  }

  // Waits until the tiles of the next chunk are loaded; finish() releases them.
  FLASHPORT_DEVICE void fetch(const ChunkCoord&) {
    finish();
    mbarrier_wait(&memory_.full[pipe_.stage], pipe_.phase);
    fence_async_proxy();  // the readers' task: no producer thread waits for its copies to complete
    holds_stage_ = true;
  }
  FLASHPORT_DEVICE void finish() {
    if (!holds_stage_) return;
    mbarrier_arrive(&memory_.empty[pipe_.stage]);
    pipe_.next();
    holds_stage_ = false;
  }

  FLASHPORT_DEVICE const Panels<kPanels>& queries() const { return memory_.stages[pipe_.stage].q; }
  FLASHPORT_DEVICE const Panels<kPanels>& keys() const { return memory_.stages[pipe_.stage].k; }
  FLASHPORT_DEVICE const Panels<1>& inverse() const { return memory_.stages[pipe_.stage].inverse; }
  FLASHPORT_DEVICE const Panels<1>& scores() const { return memory_.stages[pipe_.stage].scores; }
  // The factors of the chunk that fetch() waited for; the reference stays valid until the next fetch().
  FLASHPORT_DEVICE const ChunkFactors& factors() const { return memory_.factors[pipe_.stage]; }

  FLASHPORT_DEVICE static float multiply_add(float factor, float x, float sum) { return fma_rn(factor, x, sum); }

 protected:
  // sum [c, V] (+)= left [c, n] right [n, V]
  template <bool kAdds, int kInnerPanels, int kSteps>
  FLASHPORT_DEVICE static void begin_product(Sums& sum, const Panels<kInnerPanels>& left,
                                             const Operand<kSteps>& right) {
    static_assert(kSteps == 4 * kInnerPanels);
    wgmma_begin();
    wgmma<kMath, kAdds, false>(sum, right.a[0], panel_descriptor(left.x[0], 0));
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
      wgmma<kMath, true, false>(sum, right.a[step], panel_descriptor(left.x[step / 4], step % 4 * 32));
    }
    wgmma_commit();
  }
  // The offset of this lane's row of a step of an operand in shared memory, as stmatrix and ldmatrix address it.
  FLASHPORT_DEVICE int operand_offset(int step) const {
    return swizzled_offset(warp_column_ + lane_ % 16, step % 4 * 2 + lane_ / 16);
  }
  FLASHPORT_DEVICE int row_of(int i) const { return i / 4 * 8 + 2 * c_ + i % 2; }
  // The offset of this lane's row for an ldmatrix of the warp's columns and tokens 16 pair .. 16 pair + 15.
  FLASHPORT_DEVICE int tile_offset(int pair) const {
    return swizzled_offset(pair * 16 + lane_ / 16 * 8 + lane_ % 8, warp_column_ / 8 + lane_ / 8 % 2);
  }
  FLASHPORT_DEVICE static void round_step(unsigned (&a)[4], const float (&low)[4], const float (&high)[4]) {
    a[0] = pack<kMath>(low[0], low[1]);
    a[1] = pack<kMath>(low[2], low[3]);
    a[2] = pack<kMath>(high[0], high[1]);
    a[3] = pack<kMath>(high[2], high[3]);
  }

  const GatedDeltaChunkParams& p_;
  Memory& memory_;
  int lane_, warp_column_, g_, c_;
  int column_ = 0;
  bool holds_stage_ = false;
  PipelineState<Memory::kStages> pipe_;
  unsigned phase_ = 0;  // of the barriers of the state, the new values and the outputs
};

template <GatedDeltaChunkConfig kCfg>
class CarryTiles : public ChainTiles<kCfg> {
  using Base = ChainTiles<kCfg>;
  using Base::c_, Base::column_, Base::g_, Base::phase_, Base::kMath, Base::kPanels, Base::lane_, Base::memory_;
  using Base::p_, Base::operand_offset, Base::tile_offset, Base::round_step, Base::row_of, Base::pipe_,
      Base::warp_column_;
  static constexpr bool kInRegisters = kPanels <= 2;

 public:
  struct State {
    float c[kPanels][8][4];
  };
  struct Rows {
    Sums c;
  };
  struct Out {};
  // The state as an operand where registers have no room for it: the copy that the other warpgroup reads.
  struct InShared {};

  using Base::Base;

  // Reads the values ahead of the first product: later, their wait would lie amid its instructions.
  FLASHPORT_DEVICE void fetch(const ChunkCoord& coord) {
    Base::fetch(coord);
    const Panels<1>& v = memory_.stages[pipe_.stage].v;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) ldmatrix_x4_trans(values_[pair], v.x[0] + tile_offset(pair));
  }

  FLASHPORT_DEVICE static void zero(State& state) { state = {}; }
  FLASHPORT_DEVICE auto to_operand(const State& state) const {
    const auto round = [&](unsigned (&a)[4], int step) {
      round_step(a, state.c[step / 4][step % 4 * 2], state.c[step / 4][step % 4 * 2 + 1]);
    };
    if constexpr (kInRegisters) {
      Operand<kPanels * 4> operand;
#pragma unroll
      for (int step = 0; step < kPanels * 4; ++step) round(operand.a[step], step);
      return operand;
    } else {
      store_operand(memory_.state_barriers, memory_.state, round);
      return InShared{};
    }
  }
  FLASHPORT_DEVICE static Operand<4> to_operand(const Rows& rows) {
    Operand<4> operand;
#pragma unroll
    for (int step = 0; step < 4; ++step) round_step(operand.a[step], rows.c[2 * step], rows.c[2 * step + 1]);
    return operand;
  }

  // product [c, V] = left [c, K] S [K, V]
  FLASHPORT_DEVICE static void multiply(Rows& product, const Panels<kPanels>& left, const Operand<kPanels * 4>& state) {
    Base::template begin_product<false>(product.c, left, state);
  }
  FLASHPORT_DEVICE void multiply(Rows& product, const Panels<kPanels>& left, InShared) const {
    memory_.state_barriers.wait(phase_);
    wgmma_begin();
    wgmma<kMath, false, false>(product.c, panel_descriptor(memory_.state.x[0], 0), panel_descriptor(left.x[0], 0));
#pragma unroll
    for (int step = 1; step < 4 * kPanels; ++step) {
      const int panel = step / 4, byte = step % 4 * 32;
      const std::uint64_t right = panel_descriptor(memory_.state.x[panel], byte);
      wgmma<kMath, true, false>(product.c, right, panel_descriptor(left.x[panel], byte));
    }
    wgmma_commit();
  }
  FLASHPORT_DEVICE void multiply(Out&, const Panels<kPanels>&, const Operand<kPanels * 4>& state) const {
    store_operand(memory_.state_barriers, memory_.state, state);
  }
  FLASHPORT_DEVICE static void multiply(Out&, const Panels<kPanels>&, InShared) {}
  // product [c, V] = left [c, c] right [c, V], left lower triangular
  FLASHPORT_DEVICE static void multiply_lower(Rows& product, const Panels<1>& left, const Operand<4>& right) {
    Base::template begin_product<false>(product.c, left, right);
  }
  FLASHPORT_DEVICE void add_product_lower(Out&, const Panels<1>&, const Operand<4>& right) {
    store_operand(memory_.new_values_barriers, memory_.new_values, right);
    phase_ ^= 1;
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
  // A warpgroup has one product in flight at a time: those begun after it are the other warpgroup's.
  template <int kLater>
  FLASHPORT_DEVICE static void settle(Rows& rows) {
    wgmma_wait<0>();
    pin(rows.c);
  }
  template <int kLater>
  FLASHPORT_DEVICE void settle(State& state) {
    wgmma_wait<0>();
#pragma unroll
    for (auto& panel : state.c) pin(panel);
    this->finish();  // the last product of a chunk
  }
  template <int kLater>
  FLASHPORT_DEVICE static void settle(Out&) {}
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
  template <class F>
  FLASHPORT_DEVICE static void for_each(Out&, const F&) {}

  FLASHPORT_DEVICE void load_rows(Rows& rows, std::int64_t) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 x = unpack<kMath>(values_[i / 4][i % 4]);
      rows.c[i / 2][i % 2 * 2] = x.x;
      rows.c[i / 2][i % 2 * 2 + 1] = x.y;
    }
  }
  FLASHPORT_DEVICE static void store_rows(const Out&, const StridedRows&, std::int64_t) {}

  // `at`: the offset of the head's state, in elements.
  FLASHPORT_DEVICE void load_state(State& state, const void* data, DType dtype, std::int64_t at) const {
    with_type(const_cast<void*>(data), dtype, [&](const auto* from) {
      for_each_state_element(state, [&](float& x, int key, int column) {
        const bool valid = key < p_.head_dim_k && column < p_.head_dim_v;
        x = valid ? to_float(from[at + state_offset(key, column)]) : 0.0f;
      });
    });
  }
  FLASHPORT_DEVICE void store_state(const State& state, void* data, DType dtype, std::int64_t at) const {
    with_type(data, dtype, [&](auto* to) {
      for_each_state_element(state, [&](const float& x, int key, int column) {
        if (key < p_.head_dim_k && column < p_.head_dim_v) store_as(to + at + state_offset(key, column), x);
      });
    });
  }

 private:
  template <int kToPanels, int kSteps>
  FLASHPORT_DEVICE void store_operand(StageBarriers& barriers, Panels<kToPanels>& to,
                                      const Operand<kSteps>& operand) const {
    static_assert(kSteps == 4 * kToPanels);
    store_operand(barriers, to, [&](unsigned (&a)[4], int step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = operand.a[step][i];
    });
  }
  // round(a, step) sets a step's registers.
  template <int kToPanels, class F>
  FLASHPORT_DEVICE void store_operand(StageBarriers& barriers, Panels<kToPanels>& to, const F& round) const {
    barriers.acquire(phase_);
#pragma unroll
    for (int step = 0; step < 4 * kToPanels; ++step) {
      unsigned a[4];
      round(a, step);
      stmatrix_x4(to.x[step / 4] + operand_offset(step), a);
    }
    if constexpr (!kInRegisters) fence_async_proxy();
    barriers.commit();
  }

  FLASHPORT_DEVICE std::int64_t state_offset(int key, int column) const {
    return p_.key_major ? std::int64_t{key} * p_.head_dim_v + column : std::int64_t{column} * p_.head_dim_k + key;
  }
  template <class S, class F>
  FLASHPORT_DEVICE void for_each_state_element(S& state, const F& f) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        f(state.c[panel][i / 4][i % 4], panel * 64 + row_of(i), column_ + g_ + i % 4 / 2 * 8);
      }
    }
  }

  unsigned values_[4][4];
};

template <GatedDeltaChunkConfig kCfg>
class OutputTiles : public ChainTiles<kCfg> {
  using Base = ChainTiles<kCfg>;
  using Base::begin_product, Base::phase_, Base::kMath, Base::kPanels, Base::lane_, Base::memory_;
  using Base::p_, Base::operand_offset, Base::tile_offset, Base::round_step, Base::row_of, Base::warp_column_;

 public:
  struct State {};
  struct Rows {};
  struct Out {
    Sums c;
  };
  struct InShared {};  // an operand that the other warpgroup stores in shared memory

  using Base::Base;

  // product [c, V] = left [c, K] S [K, V]
  FLASHPORT_DEVICE void multiply(Out& product, const Panels<kPanels>& left, const InShared&) const {
    multiply<false>(product, left, memory_.state_barriers, memory_.state);
  }
  // sum [c, V] += left [c, c] right [c, V], left lower triangular
  FLASHPORT_DEVICE void add_product_lower(Out& sum, const Panels<1>& left, const InShared&) {
    multiply<true>(sum, left, memory_.new_values_barriers, memory_.new_values);
    phase_ ^= 1;
    this->finish();
  }
  template <class F>
  FLASHPORT_DEVICE void for_each(Out& out, const F& f) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) f(row_of(i), out.c[i / 4][i % 4]);
  }
  // Stores to shared memory; the producer warpgroup copies to `out`.
  FLASHPORT_DEVICE void store_rows(const Out& rows, const StridedRows&, std::int64_t) const {
    memory_.out_barriers.acquire(phase_ ^ 1);  // this chunk's phase: add_product_lower() has flipped it already
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      unsigned two[4];
      round_step(two, rows.c[2 * pair], rows.c[2 * pair + 1]);
      stmatrix_x4_trans(memory_.out.x[0] + tile_offset(pair), two);
    }
    memory_.out_barriers.commit();
  }

  // Verbs on what the other warpgroup has.
  FLASHPORT_DEVICE static void zero(State&) {}
  FLASHPORT_DEVICE static void load_state(State&, const void*, DType, std::int64_t) {}
  FLASHPORT_DEVICE static void store_state(const State&, void*, DType, std::int64_t) {}
  FLASHPORT_DEVICE static void scale(State&, float) {}
  FLASHPORT_DEVICE static InShared to_operand(const State&) { return {}; }
  FLASHPORT_DEVICE static InShared to_operand(const Rows&) { return {}; }
  FLASHPORT_DEVICE static void load_rows(Rows&, std::int64_t) {}
  FLASHPORT_DEVICE static void multiply(Rows&, const Panels<kPanels>&, const InShared&) {}
  FLASHPORT_DEVICE static void multiply_lower(Rows&, const Panels<1>&, const InShared&) {}
  FLASHPORT_DEVICE static void add_product_transposed(State&, const Panels<kPanels>&, const InShared&) {}
  template <int kLater, class Any>
  FLASHPORT_DEVICE static void settle(Any&) {}
  template <class F>
  FLASHPORT_DEVICE static void for_each(Rows&, const F&) {}
  template <class F>
  FLASHPORT_DEVICE static void for_each(Rows&, Rows&, const F&) {}

 private:
  template <bool kAdds, int kLeftPanels>
  FLASHPORT_DEVICE void multiply(Out& sum, const Panels<kLeftPanels>& left, StageBarriers& barriers,
                                 const Panels<kLeftPanels>& right) const {
    Operand<4 * kLeftPanels> operand;
    barriers.wait(phase_);
#pragma unroll
    for (int step = 0; step < 4 * kLeftPanels; ++step) {
      ldmatrix_x4(operand.a[step], right.x[step / 4] + operand_offset(step));
    }
    barriers.release();
    begin_product<kAdds>(sum.c, left, operand);
    wgmma_wait<0>();
    pin(sum.c);
  }
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
