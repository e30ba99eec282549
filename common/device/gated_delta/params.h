// The params of the update kernel of the gated delta rule: plain structs, and strides count elements.
#pragma once

#include "common/device/core/divisor.h"
#include "common/device/core/types.h"

namespace flashport {

// States of all heads, slot by slot; the states of a slot are contiguous.
struct StateSlots {
  void* data;  // null: there are none
  DType dtype;
  std::int64_t slot_stride, step_stride;
  IndexArray indices;  // the slot of each sequence; null data: its own number
};

struct GatedDeltaUpdateParams {
  std::int32_t batch, tokens;  // sequences; tokens of each, or of all with cu_seqlens
  std::int32_t head_dim_k, head_dim_v;
  Divisor by_head_slices, by_v_heads;
  Divisor by_heads;           // divides a value head: by H with heads_modulo, else by HV / H
  std::int32_t heads_modulo;  // the head of value head hv is hv % H, else hv / (HV / H)
  std::int32_t l2norm, update_state;
  StridedRows q, k, v, a, b, out;
  const void *a_log, *dt_bias;
  DType a_log_dtype, dt_bias_dtype;  // A_log is fp32, except with GateForm::kAny
  IndexArray cu_seqlens;             // null data: every sequence has `tokens` tokens
  StateSlots state, steps;
  std::int32_t num_steps;     // tokens whose states `steps` can hold
  std::int32_t num_slots;     // slots of `state`
  std::int32_t num_parents;   // columns of `parents`; tokens after them have the last one's parent
  std::int32_t zero_padding;  // outputs of sequences without a slot are zeros, and nothing else is done for them
  IndexArray parents;         // null data: a chain
  std::int64_t parents_stride_seq, parents_stride_token;
  float scale, softplus_beta, softplus_threshold, lower_bound;
  std::int32_t has_lower_bound;

  // For GateForm::kAny alone, where these may be missing: a (null data: no gate), a_log (null: a is the logarithm of
  // the decay), dt_bias (null: 0) and b (null data: a rate of 1; stride_dim: from column to column).
  std::int32_t a_per_key, decay_per_key, beta_per_column;
  std::int32_t beta_sigmoid;
  float beta_factor;
  StridedRows gk, gv;       // logarithms of further decays, of keys and of columns; null data: none
  StateSlots final_states;  // a copy of the states after the last tokens
};

}  // namespace flashport
