// The params of the gated delta rule's kernels, as those of params.h: plain, and strides count elements.
#pragma once

#include "common/device/core/divisor.h"
#include "common/device/core/types.h"

namespace flashport {

// States of all heads, slot by slot; within a head dense.
struct StateSlots {
  void* data;  // null: there are none
  DType dtype;
  std::int64_t slot_stride, step_stride;
  IndexArray indices;  // of a sequence; null data: its own number
};

struct GatedDeltaUpdateParams {
  std::int32_t batch, tokens;  // sequences; tokens of each, or of all with cu_seqlens
  std::int32_t head_dim_k, head_dim_v;
  Divisor by_slices_of_head, by_v_heads;
  Divisor by_heads;           // of value head hv: H with heads_modulo, else HV / H
  std::int32_t heads_modulo;  // the head of value head hv is hv % H, else hv / (HV / H)
  std::int32_t l2norm, update_state;
  StridedRows q, k, v, a, b, out;
  const void *a_log, *dt_bias;
  DType a_log_dtype, dt_bias_dtype;  // A_log: fp32, but for GateForm::kAny
  IndexArray cu_seqlens;             // null data: every sequence has `tokens` tokens
  StateSlots state, steps;
  std::int32_t num_steps;     // tokens whose states `steps` can hold
  std::int32_t num_slots;     // of `state`
  std::int32_t num_parents;   // columns of `parents`; tokens after them have the last one's parent
  std::int32_t zero_padding;  // outputs of sequences without a slot are zeros, and nothing else is done for them
  IndexArray parents;         // null data: a chain
  std::int64_t parents_stride_seq, parents_stride_token;
  float scale, softplus_beta, softplus_threshold, lower_bound;
  std::int32_t has_lower_bound;

  // For GateForm::kAny alone, which also takes for missing: a (null data: no gate), a_log (null: a is the logarithm of
  // the decay), dt_bias (null: 0) and b (null data: a rate of 1; stride_dim: of columns).
  std::int32_t a_per_key, decay_per_key, beta_per_column;
  std::int32_t beta_sigmoid;
  float beta_factor;
  StridedRows gk, gv;       // logarithms of more decays, of keys and of columns; null data: none
  StateSlots final_states;  // a copy of the states that sequences end with
};

}  // namespace flashport
