// The gated delta rule token by token, with the state in registers (a CPU's: in the first cache).
//
// For a sequence and value head with state S [K, V], and k, q [K] (normalised, q scaled), v [V], decay d [K] or one
// number, beta, of each token:
//   r = S^T (d k) [V];  c = S^T (d q) [V]        one pass over S
//   u = beta (v - r) [V];  out = c + (k.q) u [V]
//   S = d S + k u^T [K, V]
// which is S *= d; u = beta (v - S^T k); S += k u^T; out = S^T q with one reduction in place of two. Where columns
// decay too, that comes before; then beta may be a number for each of them.
//
// A block owns a slice of V's columns of one head and all of K: blocks do not meet, and bits depend on nothing but the
// sequence. A stored state is read again by the block that has stored it, lane by lane.
//
// What a block waits for comes in two steps: where its sequence lies, and then everything else together, the state
// first.
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
  const int head = divide(slice, p.by_slices_of_head);
  const int seq = divide(head, p.by_v_heads);
  return {seq, head - seq * static_cast<int>(p.by_v_heads.value),
          (slice - head * static_cast<int>(p.by_slices_of_head.value)) * kCfg.tuning.columns};
}

// Where a sequence lies: `count` tokens from `first` on; its slots, below 0: none.
struct SequencePlace {
  int first, count;
  int slot, steps_slot;
};

FLASHPORT_DEVICE SequencePlace sequence_place(const GatedDeltaUpdateParams& p, const Block& block, int seq) {
  int x[4];
  load_indices(block, x, [&](int i) {
    const IndexArray& array = i == 0 ? p.state.indices : i == 1 ? p.steps.indices : p.cu_seqlens;
    return short_index(array, static_cast<std::uint32_t>(i == 3 ? seq + 1 : seq));
  });
  const auto slot_of = [&](const StateSlots& slots, int index) {
    return slots.data == nullptr ? -1 : slots.indices.data == nullptr ? seq : index;
  };
  SequencePlace place{0, p.tokens, slot_of(p.state, x[0]), slot_of(p.steps, x[1])};
  if (p.cu_seqlens.data != nullptr) {
    place.first = minimum(maximum(x[2], 0), p.tokens);
    place.count = minimum(maximum(x[3], place.first), p.tokens) - place.first;
  }
  return place;
}

// With cu_seqlens the tokens of all sequences are one row.
FLASHPORT_DEVICE std::int64_t row_at(const GatedDeltaUpdateParams& p, const StridedRows& rows, int seq, int token,
                                     int head) {
  const int row = p.cu_seqlens.data == nullptr ? seq : 0;
  return row * rows.stride_seq + token * rows.stride_token + head * rows.stride_head;
}

// In a slot, where the states of a value head begin.
FLASHPORT_DEVICE std::int64_t first_state(const GatedDeltaUpdateParams& p, const Block& block,
                                          const StateSlice& slice) {
  return static_cast<std::int64_t>(block.uniform(recompute(slice.v_head))) * (p.head_dim_k * p.head_dim_v);
}

// Zeros where the block's outputs of a sequence lie. Its waves write the same ones.
template <GatedDeltaConfig kCfg>
FLASHPORT_DEVICE void clear_outputs(const GatedDeltaUpdateParams& p, const Block& block, const StateSlice& slice,
                                    const SequencePlace& place) {
  const int end = minimum(slice.column + kCfg.tuning.columns, p.head_dim_v);
  for (int t = 0; t < place.count; ++t) {
    const std::int64_t row = row_at(p, p.out, slice.seq, place.first + t, slice.v_head);
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
  const int seq = slice.seq, column = slice.column;
  const SequencePlace place = sequence_place(p, block, seq);
  const bool copies = kAny && p.final_states.data != nullptr;
  if (place.count == 0 && !copies) return;
  const int slot = place.slot, steps_slot = place.steps_slot;
  const auto at_slot = [&] { return slot * p.state.slot_stride + first_state(p, block, slice); };
  const auto at_step = [&](int step) {
    return steps_slot * p.steps.slot_stride + step * p.steps.step_stride + first_state(p, block, slice);
  };

  if (slot < 0 && p.zero_padding) return clear_outputs<kCfg>(p, block, slice, place);
  Tile tile(p, block, memory, column);
  if (slot < 0) {
    tile.clear();
  } else if constexpr (kAny) {
    tile.load(p.state.data, pool_type, at_slot());
  } else {
    tile.fetch(p.state.data, at_slot());
  }
  const auto store_pool = [&] {
    if (slot >= 0 && p.update_state) tile.store(p.state.data, pool_type, at_slot());
  };
  for (int t = 0; t < place.count; ++t) {
    // Where inputs lie is worked out for each token: no registers are left to keep it in.
    const int v_head = block.uniform(recompute(slice.v_head));
    const int shared_by = divide(v_head, p.by_heads);
    const int head = p.heads_modulo ? v_head - shared_by * static_cast<int>(p.by_heads.value) : shared_by;
    const auto at_token = [&](const StridedRows& rows, int of_head) {
      return row_at(p, rows, seq, place.first + t, of_head);
    };
    if (t > 0 && p.parents.data != nullptr && steps_slot >= 0) {
      const std::int64_t column = minimum(t, p.num_parents - 1);
      const int parent =
          load_global(short_index(p.parents, seq * p.parents_stride_seq + column * p.parents_stride_token).low);
      const int last = minimum(t, p.num_steps) - 1;
      tile.load(p.steps.data, p.steps.dtype, at_step(minimum(maximum(parent, 0), last)));
    }
    const TokenGates<kCfg> gates(p, tile, v_head, at_token);
    Keys k, q;
    Columns v, read, carried;
    tile.load_inputs(p, at_token(p.k, head), at_token(p.q, head), at_token(p.v, v_head) + column, k, q, v);
    if (t == 0) tile.settle();
    float q_factor = p.scale;
    if (p.l2norm) {
      const float k_square = tile.dot(k, k), q_square = tile.dot(q, q);
      tile.scale_keys(k, 1.0f / sqrt_full(k_square + 1e-6f));
      q_factor = p.scale / sqrt_full(q_square + 1e-6f);
    }
    tile.scale_keys(q, q_factor);
    const float key_query = tile.dot(k, q);

    Columns u;
    gates.apply(tile, [&](const auto& decay, const auto& beta) {
      tile.project(decay, k, q, read, carried);
      u = beta * (v - read);
      tile.update(decay, k, u);
    });
    if (Tile::kPoolFirst && t + 1 == place.count) store_pool();
    tile.store_columns(p.out.data, p.out.dtype, at_token(p.out, v_head) + column,
                       Tile::multiply_add(key_query, u, carried));
    if (steps_slot >= 0 && t < p.num_steps) tile.store(p.steps.data, p.steps.dtype, at_step(t));
  }
  if (!Tile::kPoolFirst && (!copies || place.count > 0)) store_pool();
  if (copies) {
    const std::int64_t at = seq * p.final_states.slot_stride + first_state(p, block, slice);
    tile.store(p.final_states.data, p.final_states.dtype, at);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
