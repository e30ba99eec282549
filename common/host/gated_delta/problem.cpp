#include "common/host/gated_delta/problem.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "common/device/core/divisor.h"
#include "common/host/arguments.h"
#include "common/host/gated_delta/checks.h"
#include "common/host/gated_delta/kernel_choice.h"

namespace flashport {
namespace {

constexpr char kStateVk[] = "(slots, num_v_heads, head_dim_v, head_dim_k)";
constexpr char kStateKv[] = "(slots, num_v_heads, head_dim_k, head_dim_v)";
constexpr char kFinalVk[] = "(sequences, num_v_heads, head_dim_v, head_dim_k)";
constexpr char kFinalKv[] = "(sequences, num_v_heads, head_dim_k, head_dim_v)";
constexpr char kStepsVk[] = "(slots, steps, num_v_heads, head_dim_v, head_dim_k)";
constexpr char kStepsKv[] = "(slots, steps, num_v_heads, head_dim_k, head_dim_v)";

struct Sizes {
  std::int64_t batch, tokens, heads, v_heads, dim_k, dim_v, sequences;
};

constexpr char kKeyGates[] = "(batch, tokens, num_v_heads, head_dim_k)";
constexpr char kColumnGates[] = "(batch, tokens, num_v_heads, head_dim_v)";

bool is_vk(const GatedDeltaUpdateArgs& a) { return a.state_layout == StateLayout::kVK; }

using Arguments = std::array<Argument, 19>;

Arguments arguments_of(const GatedDeltaUpdateArgs& args) {
  const auto& [q, k, v, a, b, a_log, dt_bias, g, gk, gv, beta, state, state_indices, state_layout, update_state,
               final_states, cu_seqlens, intermediate_states, intermediate_indices, parent_tokens, scale, softplus_beta,
               softplus_threshold, lower_bound, use_qk_l2norm, is_kda, allow_neg_eigval, zero_padding, head_map, out] =
      args;
  return {{{q, "q"},
           {k, "k"},
           {v, "v"},
           {a, "a"},
           {b, "b"},
           {g, "g"},
           {gk, "gk"},
           {gv, "gv"},
           {beta, "beta"},
           {a_log, "A_log"},
           {dt_bias, "dt_bias"},
           {state, "state", update_state},
           {state_indices, "state_indices"},
           {final_states, "final_states", kWritten},
           {cu_seqlens, "cu_seqlens"},
           {intermediate_states, "intermediate_states", kWritten},
           {intermediate_indices, "intermediate_indices"},
           {parent_tokens, "parent_tokens"},
           {out, "out", kWritten}}};
}

// A number a head, and a token in either form, or if there may be (`columns`) one for each column.
void check_head_gate_rank(const Check& check, const std::optional<TensorView>& view, const char* name, bool columns) {
  if (!view || (columns && view->rank == 4)) return;
  check.rank(*view, name, 3, "(batch, tokens, num_v_heads)", 2, "(batch * tokens, num_v_heads)");
}

void check_ranks(const Check& check, const GatedDeltaUpdateArgs& a) {
  check.rank(a.q, "q", 4, "(batch, tokens, num_heads, head_dim_k)");
  check.rank(a.k, "k", 4, "(batch, tokens, num_heads, head_dim_k)");
  check.rank(a.v, "v", 4, "(batch, tokens, num_v_heads, head_dim_v)");
  if (!a.is_kda) {
    check_head_gate_rank(check, a.a, "a", false);
  } else if (a.a && a.a->rank != 4) {
    check.rank(*a.a, "a", 3, "(batch, tokens, num_v_heads * head_dim_k)", 2,
               "(batch * tokens, num_v_heads * head_dim_k)");
  }
  check_head_gate_rank(check, a.b, "b", true);
  check_head_gate_rank(check, a.g, "g", false);
  check.rank(a.gk, "gk", 4, kKeyGates);
  check.rank(a.gv, "gv", 4, kColumnGates);
  check_head_gate_rank(check, a.beta, "beta", true);
  if (a.a_log && a.a_log->rank < 1) check.rank(a.a_log, "A_log", 1, "(num_v_heads)");
  if (a.dt_bias && a.dt_bias->rank < 1) check.rank(a.dt_bias, "dt_bias", 1, "(num_v_heads)");
  check.rank(a.state, "state", 4, is_vk(a) ? kStateVk : kStateKv);
  check.rank(a.state_indices, "state_indices", 1, "(sequences)");
  check.rank(a.final_states, "final_states", 4, is_vk(a) ? kFinalVk : kFinalKv);
  check.rank(a.cu_seqlens, "cu_seqlens", 1, "(sequences + 1)");
  check.rank(a.intermediate_states, "intermediate_states", 5, is_vk(a) ? kStepsVk : kStepsKv);
  check.rank(a.intermediate_indices, "intermediate_indices", 1, "(sequences)");
  check.rank(a.parent_tokens, "parent_tokens", 2, "(sequences, steps)");
  check.rank(a.out, "out", 4, "(batch, tokens, num_v_heads, head_dim_v)");
}

// One row a token, in either of the forms that inputs of a number per head come in.
void check_token_rows(const Check& check, const std::optional<TensorView>& view, const char* name, const Sizes& s,
                      std::int64_t width) {
  if (!view) return;
  if (view->rank == 2) return check.shape(view, name, "(batch * tokens, ...)", {s.batch * s.tokens, width});
  check.shape(view, name, "(batch, tokens, ...)", {s.batch, s.tokens, width});
}

// The same, or one number a column.
void check_rates(const Check& check, const std::optional<TensorView>& view, const char* name, const Sizes& s) {
  if (!view || view->rank != 4) return check_token_rows(check, view, name, s, s.v_heads);
  check.shape(view, name, kColumnGates, {s.batch, s.tokens, s.v_heads, s.dim_v});
}

// Whether a gate of each key has its tokens in one axis, heads and keys in two.
bool is_row_of_keys(const TensorView& view, const Sizes& s) {
  return view.rank == 3 && view.shape[0] == s.batch * s.tokens && view.shape[1] == s.v_heads &&
         view.shape[2] == s.dim_k;
}

Sizes check_shapes(const Check& check, const GatedDeltaUpdateArgs& a) {
  Sizes s{a.q.shape[0], a.q.shape[1], a.q.shape[2], a.v.shape[2], a.q.shape[3], a.v.shape[3], a.q.shape[0]};
  check.shape(a.k, "k", "(batch, tokens, num_heads, head_dim_k)", {s.batch, s.tokens, s.heads, s.dim_k});
  check.shape(a.v, "v", "(batch, tokens, num_v_heads, head_dim_v)", {s.batch, s.tokens, s.v_heads, s.dim_v});
  check_heads(check, a.q, a.v);
  s.sequences = sequence_count(check, a.q, a.cu_seqlens);
  const std::int64_t gates = a.is_kda ? s.v_heads * s.dim_k : s.v_heads;
  if (a.a && a.a->rank == 4) {
    check.shape(a.a, "a", kKeyGates, {s.batch, s.tokens, s.v_heads, s.dim_k});
  } else if (a.is_kda && a.a && is_row_of_keys(*a.a, s)) {
    // (batch * tokens, num_v_heads, head_dim_k)
  } else {
    check_token_rows(check, a.a, "a", s, gates);
  }
  check_rates(check, a.b, "b", s);
  check_token_rows(check, a.g, "g", s, s.v_heads);
  check.shape(a.gk, "gk", kKeyGates, {s.batch, s.tokens, s.v_heads, s.dim_k});
  check.shape(a.gv, "gv", kColumnGates, {s.batch, s.tokens, s.v_heads, s.dim_v});
  check_rates(check, a.beta, "beta", s);
  if (a.a_log) check_elements(check, *a.a_log, "A_log", "num_v_heads", s.v_heads);
  if (a.dt_bias) {
    check_elements(check, *a.dt_bias, "dt_bias", a.is_kda ? "num_v_heads * head_dim_k" : "num_v_heads", gates);
  }
  const std::int64_t outer = is_vk(a) ? s.dim_v : s.dim_k, inner = is_vk(a) ? s.dim_k : s.dim_v;
  check.shape(a.state, "state", is_vk(a) ? kStateVk : kStateKv, {kAnyExtent, s.v_heads, outer, inner});
  check.shape(a.state_indices, "state_indices", "(sequences)", {s.sequences});
  check.shape(a.final_states, "final_states", is_vk(a) ? kFinalVk : kFinalKv, {s.sequences, s.v_heads, outer, inner});
  check.shape(a.intermediate_states, "intermediate_states", is_vk(a) ? kStepsVk : kStepsKv,
              {kAnyExtent, kAnyExtent, s.v_heads, outer, inner});
  check.shape(a.intermediate_indices, "intermediate_indices", "(sequences)", {s.sequences});
  check.shape(a.parent_tokens, "parent_tokens", "(sequences, steps)", {s.sequences, kAnyExtent});
  check.shape(a.out, "out", "(batch, tokens, num_v_heads, head_dim_v)", {s.batch, s.tokens, s.v_heads, s.dim_v});
  return s;
}

// Arguments that must be passed together, and the room for tokens.
void check_combinations(const Check& check, const GatedDeltaUpdateArgs& a, const Sizes& s) {
  if (a.a && a.g) check.value_error("a and g must not both be given; a is what g is made of with A_log");
  if (a.a.has_value() != a.a_log.has_value()) {
    check.value_error("a and A_log must be given together; pass both, or g, which is a logarithm already");
  }
  if (!a.a && (a.dt_bias || a.is_kda || a.lower_bound)) {
    const char* name = a.dt_bias ? "dt_bias" : a.is_kda ? "is_kda" : "lower_bound";
    check.value_error(std::string(name) + " needs a, of which a gate is made; g, gk and gv are taken as they are");
  }
  if (a.b && a.beta) check.value_error("b and beta must not both be given; beta is the sigmoid of b");
  if (a.allow_neg_eigval && !a.b) check.value_error("allow_neg_eigval needs b, whose sigmoid it doubles");
  if (a.state_indices && !a.state) check.value_error("state_indices needs state; pass the pool, or neither");
  if (a.state && !a.state_indices && a.state->shape[0] < s.sequences) {
    check.value_error("state must have a slot for each of the " + std::to_string(s.sequences) +
                      " sequences without state_indices, got " + shape_text(*a.state));
  }
  if (a.intermediate_states.has_value() != a.intermediate_indices.has_value()) {
    check.value_error("intermediate_states and intermediate_indices must be given together; pass both or neither");
  }
  if (a.parent_tokens && !a.intermediate_states) {
    check.value_error("parent_tokens needs intermediate_states, where the parents' states are stored");
  }
  if (a.zero_padding && (!a.state_indices || a.final_states || a.intermediate_states)) {
    check.value_error("zero_padding needs state_indices, and neither final_states nor intermediate_states");
  }
  // With cu_seqlens the longest sequence is known from its contents alone.
  const std::int64_t longest = a.cu_seqlens ? 1 : s.tokens;
  if (a.intermediate_states && a.intermediate_states->shape[1] < longest) {
    check.value_error("intermediate_states must have at least " + std::to_string(longest) + " steps, got shape " +
                      shape_text(*a.intermediate_states));
  }
  if (a.parent_tokens && a.parent_tokens->shape[1] < longest) {
    check.value_error("parent_tokens must have at least " + std::to_string(longest) + " steps, got shape " +
                      shape_text(*a.parent_tokens));
  }
}

void check_numbers(const Check& check, const GatedDeltaUpdateArgs& a) {
  if (a.scale) check.positive(*a.scale, "scale");
  check.positive(a.softplus_beta, "softplus_beta");
  check.finite(a.softplus_threshold, "softplus_threshold");
  if (a.lower_bound) check.negative(*a.lower_bound, "lower_bound");
}

void check_types_and_devices(const Check& check, const GatedDeltaUpdateArgs& a, const Arguments& arguments) {
  check.dtype(a.q, "q", kDeltaTypes);
  check.dtype(a.k, "k", {a.q.dtype});
  check.dtype(a.v, "v", {a.q.dtype});
  check.dtype(a.a, "a", kDeltaTypes);
  check.dtype(a.b, "b", kDeltaTypes);
  check.dtype(a.g, "g", kDeltaTypes);
  check.dtype(a.gk, "gk", kDeltaTypes);
  check.dtype(a.gv, "gv", kDeltaTypes);
  check.dtype(a.beta, "beta", kDeltaTypes);
  check.dtype(a.a_log, "A_log", kDeltaTypes);
  check.dtype(a.dt_bias, "dt_bias", {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  check.dtype(a.state, "state", kStateTypes);
  check.dtype(a.state_indices, "state_indices", {DType::kInt32, DType::kInt64});
  check.dtype(a.final_states, "final_states", kStateTypes);
  check.dtype(a.cu_seqlens, "cu_seqlens", {DType::kInt32, DType::kInt64});
  check.dtype(a.intermediate_states, "intermediate_states", kStateTypes);
  check.dtype(a.intermediate_indices, "intermediate_indices", {DType::kInt32, DType::kInt64});
  check.dtype(a.parent_tokens, "parent_tokens", {DType::kInt32, DType::kInt64});
  check.dtype(a.out, "out", {a.q.dtype});
  check_devices(check, arguments);
}

void check_memory(const Check& check, const GatedDeltaUpdateArgs& a, const Arguments& arguments) {
  check_inputs_readable(check, arguments);
  check.inner_contiguous(a.q, "q");
  check.inner_contiguous(a.k, "k");
  check.inner_contiguous(a.v, "v");
  check.array(a.a_log, "A_log");
  check.array(a.dt_bias, "dt_bias");
  check.array(a.state_indices, "state_indices");
  check.array(a.cu_seqlens, "cu_seqlens");
  check.array(a.intermediate_indices, "intermediate_indices");
  check.writable(a.out, "out");
  check.inner_contiguous(a.out, "out");
  if (a.state) check_state_pool(check, *a.state, "state", a.update_state);
  if (a.final_states) check_state_pool(check, *a.final_states, "final_states", true);
  if (a.intermediate_states) check_state_pool(check, *a.intermediate_states, "intermediate_states", true);
  check_outputs_apart(check, arguments);
}

// A number per value head, or one per value head and key or column. Null data where there is none.
StridedRows gate_rows(const std::optional<TensorView>& view, const Sizes& s, bool per_key) {
  StridedRows rows{};
  if (!view) return rows;
  rows.data = view->data;
  rows.dtype = view->dtype;
  const bool by_heads = per_key && is_row_of_keys(*view, s);
  const bool one_axis = view->rank == 2 || by_heads;  // for the tokens of all rows
  rows.stride_token = view->strides[one_axis ? 0 : 1];
  rows.stride_seq = one_axis ? s.tokens * rows.stride_token : view->strides[0];
  const std::int64_t inner = view->strides[view->rank - 1];
  rows.stride_dim = per_key || view->rank == 4 ? inner : 0;
  rows.stride_head = view->rank == 4 || by_heads ? view->strides[view->rank - 2] : per_key ? s.dim_k * inner : inner;
  return rows;
}

}  // namespace

GatedDeltaUpdateParams gated_delta_update_problem(const Check& check, const GatedDeltaUpdateArgs& a) {
  check_ranks(check, a);
  const Sizes s = check_shapes(check, a);
  check_combinations(check, a, s);
  check_numbers(check, a);
  const Arguments arguments = arguments_of(a);
  check_types_and_devices(check, a, arguments);
  check_memory(check, a, arguments);

  GatedDeltaUpdateParams p{};
  p.batch = static_cast<std::int32_t>(s.sequences);
  p.tokens = static_cast<std::int32_t>(s.tokens);
  p.head_dim_k = static_cast<std::int32_t>(s.dim_k);
  p.head_dim_v = static_cast<std::int32_t>(s.dim_v);
  p.heads_modulo = a.head_map == HeadMap::kModulo ? 1 : 0;
  p.by_v_heads = make_divisor(s.v_heads);
  p.by_heads = make_divisor(p.heads_modulo != 0 ? s.heads : s.v_heads / s.heads);
  p.l2norm = a.use_qk_l2norm ? 1 : 0;
  p.update_state = a.update_state ? 1 : 0;
  p.zero_padding = a.zero_padding ? 1 : 0;
  p.q = token_rows(a.q);
  p.k = token_rows(a.k);
  p.v = token_rows(a.v);
  p.out = token_rows(a.out);
  const std::optional<TensorView>& rates = a.b ? a.b : a.beta;
  p.a = gate_rows(a.a ? a.a : a.g, s, a.is_kda);
  p.b = gate_rows(rates, s, false);
  p.gk = gate_rows(a.gk, s, true);
  p.gv = gate_rows(a.gv, s, true);
  p.a_per_key = a.is_kda ? 1 : 0;
  p.decay_per_key = a.is_kda || a.gk ? 1 : 0;
  p.beta_per_column = rates && rates->rank == 4 ? 1 : 0;
  p.beta_sigmoid = a.b ? 1 : 0;
  p.beta_factor = a.allow_neg_eigval ? 2.0f : 1.0f;
  if (a.a_log) {
    p.a_log = a.a_log->data;
    p.a_log_dtype = a.a_log->dtype;
  }
  if (a.dt_bias) {
    p.dt_bias = a.dt_bias->data;
    p.dt_bias_dtype = a.dt_bias->dtype;
  }
  p.cu_seqlens = index_array(a.cu_seqlens);
  if (a.state) {
    p.state = {a.state->data, a.state->dtype, a.state->strides[0], 0, index_array(a.state_indices)};
    p.num_slots = extent_of(*a.state, 0);
  }
  if (a.final_states) {
    p.final_states = {a.final_states->data, a.final_states->dtype, a.final_states->strides[0], 0, index_array({})};
  }
  if (a.intermediate_states) {
    const TensorView& steps = *a.intermediate_states;
    p.steps = {steps.data, steps.dtype, steps.strides[0], s.v_heads * s.dim_k * s.dim_v,
               index_array(a.intermediate_indices)};
    p.num_steps = extent_of(steps, 1);
  }
  if (a.parent_tokens) {
    p.parents = index_array(a.parent_tokens);
    p.num_parents = extent_of(*a.parent_tokens, 1);
    p.parents_stride_seq = a.parent_tokens->strides[0];
    p.parents_stride_token = a.parent_tokens->strides[1];
  }
  p.scale = static_cast<float>(a.scale ? *a.scale : 1.0 / std::sqrt(static_cast<double>(s.dim_k)));
  p.softplus_beta = static_cast<float>(a.softplus_beta);
  p.softplus_threshold = static_cast<float>(a.softplus_threshold);
  p.has_lower_bound = a.lower_bound ? 1 : 0;
  p.lower_bound = static_cast<float>(a.lower_bound.value_or(0.0));
  return p;
}

}  // namespace flashport
