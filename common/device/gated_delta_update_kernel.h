// The gated delta rule token by token, with the state in registers (a CPU's: in the first cache).
//
// For a sequence and value head with state S [K, V], and k, q [K] (normalised, q scaled), v [V], decay d [K] or one
// number, beta, of each token:
//   r = S^T (d k) [V];  c = S^T (d q) [V]        one pass over S
//   u = beta (v - r) [V];  out = c + (k.q) u [V]
//   S = d S + k u^T [K, V]
// which is S *= d; u = beta (v - S^T k); S += k u^T; out = S^T q with one reduction in place of two.
//
// A wave owns a slice of V columns of one head and all of K: waves do not meet, and bits depend on nothing but the
// sequence. A stored state is read again by the wave that has stored it, lane by lane.
#pragma once

#include "common/device/gated_delta_gate.h"
#include "common/device/paged_kv.h"
#include "common/device/scalar_load.h"
#include FLASHPORT_STATE_TILE_HEADER

namespace flashport::FLASHPORT_TARGET {

// The tokens of one sequence: `count` of them from `first` on, in row `row` of the inputs.
struct TokenRange {
  std::int64_t row, first;
  int count;
};

FLASHPORT_DEVICE TokenRange token_range(const GatedDeltaUpdateParams& p, std::int64_t seq) {
  if (p.cu_seqlens.data == nullptr) return {seq, 0, p.tokens};
  const std::int64_t most = p.tokens;
  const std::int64_t first = minimum(maximum(index_at(p.cu_seqlens, seq), std::int64_t{0}), most);
  const std::int64_t end = minimum(maximum(index_at(p.cu_seqlens, seq + 1), first), most);
  return {0, first, static_cast<int>(end - first)};
}

FLASHPORT_DEVICE std::int64_t row_at(const TokenRows& rows, std::int64_t row, std::int64_t token, std::int64_t head) {
  return row * rows.stride_seq + token * rows.stride_token + head * rows.stride_head;
}

// The slot of a sequence; -1: none.
FLASHPORT_DEVICE std::int64_t slot_of(const StateSlots& slots, std::int64_t seq) {
  if (slots.data == nullptr) return -1;
  return slots.indices.data == nullptr ? seq : index_at(slots.indices, seq);
}

template <class Tile>
FLASHPORT_DEVICE void update_slice(const GatedDeltaUpdateParams& p, Tile tile, std::int64_t seq, int v_head,
                                   int column) {
  using Keys = typename Tile::Keys;
  using Columns = typename Tile::Columns;
  const TokenRange tokens = token_range(p, seq);
  if (tokens.count == 0) return;
  const int head = p.heads_modulo ? v_head % p.num_heads : v_head / p.group_size;
  const std::int64_t slot = slot_of(p.state, seq);
  const std::int64_t steps_slot = slot_of(p.steps, seq);
  const std::int64_t head_states = static_cast<std::int64_t>(v_head) * p.head_dim_k * p.head_dim_v;
  const std::int64_t at_slot = slot * p.state.slot_stride + head_states;
  const auto at_step = [&](std::int64_t step) {
    return steps_slot * p.steps.slot_stride + step * p.steps.step_stride + head_states;
  };
  const float rate = exp_full(p.a_log[v_head]);

  if (slot >= 0) {
    tile.load(p.state.data, p.state.dtype, at_slot);
  } else {
    tile.clear();
  }
  for (int t = 0; t < tokens.count; ++t) {
    if (t > 0 && p.parents.data != nullptr && steps_slot >= 0) {
      const std::int64_t parent = index_at(p.parents, seq * p.parents_stride_seq + t * p.parents_stride_token);
      const int last = minimum(t, p.num_steps) - 1;
      tile.load(p.steps.data, p.steps.dtype, at_step(minimum(maximum(parent, std::int64_t{0}), std::int64_t{last})));
    }
    const std::int64_t token = tokens.first + t;
    Keys k, q, decay;
    tile.load_keys(k, p.k.data, p.k.dtype, row_at(p.k, tokens.row, token, head));
    tile.load_keys(q, p.q.data, p.q.dtype, row_at(p.q, tokens.row, token, head));
    float q_factor = p.scale;
    if (p.l2norm) {
      tile.scale_keys(k, 1.0f / sqrt_full(tile.dot(k, k) + 1e-6f));
      q_factor = p.scale / sqrt_full(tile.dot(q, q) + 1e-6f);
    }
    tile.scale_keys(q, q_factor);
    const std::int64_t at_gate = row_at(p.a, tokens.row, token, v_head);
    if (p.gate_per_key) {
      const std::int64_t bias = static_cast<std::int64_t>(v_head) * p.head_dim_k;
      tile.set_keys(decay, [&](int key) {
        const float x = load_as_float(p.a.data, p.a.dtype, at_gate + key * p.a.stride_dim) +
                        load_as_float(p.dt_bias, p.dt_bias_dtype, bias + key);
        return gate_decay(p, x, rate);
      });
    } else {
      const float x = load_as_float(p.a.data, p.a.dtype, at_gate) + load_as_float(p.dt_bias, p.dt_bias_dtype, v_head);
      tile.fill_keys(decay, gate_decay(p, x, rate));
    }
    const float beta = sigmoid_full(load_as_float(p.b.data, p.b.dtype, row_at(p.b, tokens.row, token, v_head)));

    Columns read, carried, v;
    tile.project(decay, k, q, read, carried);
    tile.load_columns(v, p.v.data, p.v.dtype, row_at(p.v, tokens.row, token, v_head) + column);
    const Columns u = beta * (v - read);
    tile.update(decay, k, u);
    tile.store_columns(p.out.data, p.out.dtype, row_at(p.out, tokens.row, token, v_head) + column,
                       Tile::multiply_add(tile.dot(k, q), u, carried));
    if (steps_slot >= 0 && t < p.num_steps) tile.store(p.steps.data, p.steps.dtype, at_step(t));
  }
  if (slot >= 0 && p.update_state) tile.store(p.state.data, p.state.dtype, at_slot);
}

// Slices fastest, then value heads, then sequences, so that neighbours read neighbouring memory.
template <int kThreads>
FLASHPORT_DEVICE void gated_delta_update(const GatedDeltaUpdateParams& p, const Block& block, StateTileMemory* memory) {
  constexpr int kWaves = kThreads / kWaveSize;
  const int slices = (p.head_dim_v + kStateColumns - 1) / kStateColumns;
  const std::int64_t work = static_cast<std::int64_t>(p.batch) * p.num_v_heads * slices;
  for (std::int64_t i = block.index() * kWaves + block.wave(); i < work; i += block.count() * kWaves) {
    const int column = static_cast<int>(i % slices) * kStateColumns;
    const int v_head = static_cast<int>(i / slices % p.num_v_heads);
    const std::int64_t seq = i / slices / p.num_v_heads;
    if (p.key_major) {
      update_slice(p, StateTile<true>(p, block, memory[block.wave()], column), seq, v_head, column);
    } else {
      update_slice(p, StateTile<false>(p, block, memory[block.wave()], column), seq, v_head, column);
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET
