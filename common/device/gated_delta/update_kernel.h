// The gated delta rule token by token, with the state in registers (on a CPU: in the first-level cache).
//
// For a sequence and value head with state S [K, V], and k, q [K] (normalised, q scaled), v [V], decay d [K] or one
// number, beta, of each token:
//   r = S^T (d k) [V];  c = S^T (d q) [V]        one pass over S
//   u = beta (v - r) [V];  out = c + (k.q) u [V]
//   S = d S + k u^T [K, V]
// which is S *= d; u = beta (v - S^T k); S += k u^T; out = S^T q with one reduction in place of two. Where columns
// decay too, S is multiplied by their decay first; then beta may be a number for each column.
//
// A block owns a slice of V's columns of one head and all of K: blocks need nothing of each other, and bits depend on
// nothing but the sequence. A stored state is read again by the block that has stored it, each lane its own elements.
//
// A block waits for memory twice: for its sequence's offsets and slots, and then for everything else together, which
// the state begins.
#pragma once

#include "common/device/core/divide.h"
#include "common/device/gated_delta/token_gates.h"
#include FLASHPORT_GATED_DELTA_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

// The kernel of a row of cmake/gated_delta_instances.txt, on the schedule that the target has for its shape.
constexpr GatedDeltaConfig gated_delta_config(const GatedDeltaShape& shape) {
  return {shape, gated_delta_tuning(shape)};
}

// The work of one block. Slices are counted fastest, then value heads, then sequences, so that neighbours read
// neighbouring memory.
struct StateSlice {
  int seq, v_head, column;
};

template <GatedDeltaConfig kCfg>
FLASHPORT_DEVICE StateSlice state_slice(const GatedDeltaUpdateParams& p, const Block& block) {
  const int slice = static_cast<int>(block.index());
  const int head = divide(slice, p.by_head_slices);
  const int seq = divide(head, p.by_v_heads);
  return {seq, head - seq * static_cast<int>(p.by_v_heads.value),
          (slice - head * static_cast<int>(p.by_head_slices.value)) * kCfg.tuning.columns};
}

// The tokens of a sequence, `count` from `first` on, and its slots; below 0: none.
struct SequenceSpan {
  int first, count;
  int slot, steps_slot;
};

FLASHPORT_DEVICE SequenceSpan sequence_span(const GatedDeltaUpdateParams& p, const Block& block, int seq) {
  int x[4];
  load_indices(block, x, [&](int i) {
    const IndexArray& array = i == 0 ? p.state.indices : i == 1 ? p.steps.indices : p.cu_seqlens;
    return short_index(array, static_cast<std::uint32_t>(i == 3 ? seq + 1 : seq));
  });
  const auto slot_of = [&](const StateSlots& slots, int index) {
    return slots.data == nullptr ? -1 : slots.indices.data == nullptr ? seq : index;
  };
  SequenceSpan span{0, p.tokens, slot_of(p.state, x[0]), slot_of(p.steps, x[1])};
  if (p.cu_seqlens.data != nullptr) {
    span.first = minimum(maximum(x[2], 0), p.tokens);
    span.count = minimum(maximum(x[3], span.first), p.tokens) - span.first;
  }
  return span;
}

// The offset of a token's row of a head. With cu_seqlens all tokens are in row 0 of the inputs.
FLASHPORT_DEVICE std::int64_t row_offset(const GatedDeltaUpdateParams& p, const StridedRows& rows, int seq, int token,
                                         int head) {
  const int row = p.cu_seqlens.data == nullptr ? seq : 0;
  return row * rows.stride_seq + token * rows.stride_token + head * rows.stride_head;
}

// The offset of a value head's states within a slot.
FLASHPORT_DEVICE std::int64_t head_state_offset(const GatedDeltaUpdateParams& p, const Block& block,
                                                const StateSlice& slice) {
  return static_cast<std::int64_t>(block.uniform(recompute(slice.v_head))) * (p.head_dim_k * p.head_dim_v);
}

// Element offsets of what a block reads and writes token by token; `t` counts the tokens of its sequence. They are
// computed where they are used: no registers are left to keep them in.
struct UpdateOffsets {
  const GatedDeltaUpdateParams& p;
  const Block& block;
  const StateSlice slice;
  const SequenceSpan span;

  FLASHPORT_DEVICE std::int64_t row(const StridedRows& rows, int t, int head) const {
    return row_offset(p, rows, slice.seq, span.first + t, head);
  }
  FLASHPORT_DEVICE std::int64_t state() const {
    return span.slot * p.state.slot_stride + head_state_offset(p, block, slice);
  }
  FLASHPORT_DEVICE std::int64_t step(int t) const {
    return span.steps_slot * p.steps.slot_stride + t * p.steps.step_stride + head_state_offset(p, block, slice);
  }
  // The step state of the token that precedes token t in the tree.
  FLASHPORT_DEVICE std::int64_t parent_step(int t) const {
    const std::int64_t column = minimum(t, p.num_parents - 1);
    const std::int64_t entry = slice.seq * p.parents_stride_seq + column * p.parents_stride_token;
    const int parent = load_global(short_index(p.parents, entry).low);
    const int last = minimum(t, p.num_steps) - 1;
    return step(minimum(maximum(parent, 0), last));
  }
};

// Sets the block's outputs of a sequence to zeros; all waves store the same.
template <GatedDeltaConfig kCfg>
FLASHPORT_DEVICE void clear_outputs(const GatedDeltaUpdateParams& p, const Block& block, const StateSlice& slice,
                                    const SequenceSpan& span) {
  const int end = minimum(slice.column + kCfg.tuning.columns, p.head_dim_v);
  for (int t = 0; t < span.count; ++t) {
    const std::int64_t row = row_offset(p, p.out, slice.seq, span.first + t, slice.v_head);
    for (int column = slice.column + block.lane(); column < end; column += kWaveSize) {
      store_as(p.out.data, p.out.dtype, row + column, 0.0f);
    }
  }
}

template <GatedDeltaConfig kCfg>
FLASHPORT_DEVICE void gated_delta_update(const GatedDeltaUpdateParams& p, const Block& block, const StateSlice& slice,
                                         StateTileMemory<kCfg>& memory) {
  using Tile = StateTile<kCfg>;
  using Keys = typename Tile::Keys;
  using Columns = typename Tile::Columns;
  constexpr bool kAny = kCfg.shape.gate == GateForm::kAny;
  const DType pool_type = kAny ? p.state.dtype : kCfg.shape.state;
  const SequenceSpan span = sequence_span(p, block, slice.seq);
  const bool copies = kAny && p.final_states.data != nullptr;
  if (span.count == 0 && !copies) return;
  if (span.slot < 0 && p.zero_padding) return clear_outputs<kCfg>(p, block, slice, span);

  const UpdateOffsets at{p, block, slice, span};
  Tile tile(p, block, memory, slice.column);
  if (span.slot < 0) {
    tile.clear();
  } else if constexpr (kAny) {
    tile.load(p.state.data, pool_type, at.state());
  } else {
    tile.fetch(p.state.data, at.state());
  }
  const auto store_pool = [&] {
    if (span.slot >= 0 && p.update_state) tile.store(p.state.data, pool_type, at.state());
  };
  for (int t = 0; t < span.count; ++t) {
    const int v_head = block.uniform(recompute(slice.v_head));
    const int quotient = divide(v_head, p.by_heads);
    const int head = p.heads_modulo ? v_head - quotient * static_cast<int>(p.by_heads.value) : quotient;
    const auto row = [&](const StridedRows& rows, int its_head) { return at.row(rows, t, its_head); };
    if (t > 0 && p.parents.data != nullptr && span.steps_slot >= 0) {
      tile.load(p.steps.data, p.steps.dtype, at.parent_step(t));
    }
    const TokenGates<kCfg> gates(p, tile, v_head, row);
    Keys k, q;
    Columns v, r, c;
    tile.load_inputs(p, row(p.k, head), row(p.q, head), row(p.v, v_head) + slice.column, k, q, v);
    if (t == 0) tile.settle();
    float q_factor = p.scale;
    if (p.l2norm) {
      const float k_square = tile.dot(k, k), q_square = tile.dot(q, q);
      tile.scale_keys(k, 1.0f / sqrt_full(k_square + 1e-6f));
      q_factor = p.scale / sqrt_full(q_square + 1e-6f);
    }
    tile.scale_keys(q, q_factor);
    const float kq = tile.dot(k, q);
    Columns u;
    gates.apply(tile, [&](const auto& d, const auto& beta) {
      tile.project(d, k, q, r, c);  // r = S^T (d k), c = S^T (d q)
      u = beta * (v - r);
      tile.update(d, k, u);  // S = d S + k u^T
    });
    if (Tile::kPoolFirst && t + 1 == span.count) store_pool();
    tile.store_columns(p.out.data, p.out.dtype, row(p.out, v_head) + slice.column, Tile::multiply_add(kq, u, c));
    if (span.steps_slot >= 0 && t < p.num_steps) tile.store(p.steps.data, p.steps.dtype, at.step(t));
  }
  if (!Tile::kPoolFirst && (!copies || span.count > 0)) store_pool();
  if (copies) {
    const std::int64_t final_state = slice.seq * p.final_states.slot_stride + head_state_offset(p, block, slice);
    tile.store(p.final_states.data, p.final_states.dtype, final_state);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
