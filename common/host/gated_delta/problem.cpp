#include "common/host/gated_delta/problem.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "common/device/core/divisor.h"
#include "common/host/arguments.h"
#include "common/host/call_log.h"
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

struct GateAxes {
  Axes one, other;
};
// A number for each token and head, with an axis for the batch or without; with `columns` also one for each column.
GateAxes head_gate_axes(const std::optional<TensorView>& view, bool columns) {
  if (columns && view && view->rank == 4) return {{4, kColumnGates}, {}};
  return {{3, "(batch, tokens, num_v_heads)"}, {2, "(batch * tokens, num_v_heads)"}};
}

// `a`: a gate for each head or, with is_kda, for each key.
GateAxes a_axes(const GatedDeltaUpdateArgs& args) {
  if (!args.is_kda) return head_gate_axes(args.a, false);
  if (args.a && args.a->rank == 4) return {{4, kKeyGates}, {}};
  return {{3, "(batch, tokens, num_v_heads * head_dim_k)"}, {2, "(batch * tokens, num_v_heads * head_dim_k)"}};
}

ArgumentTable<19> table_of(const GatedDeltaUpdateArgs& args) {
  const auto& [q, k, v, a, b, a_log, dt_bias, g, gk, gv, beta, state, state_indices, state_layout, update_state,
               final_states, cu_seqlens, intermediate_states, intermediate_indices, parent_tokens, scale, softplus_beta,
               softplus_threshold, lower_bound, use_qk_l2norm, is_kda, allow_neg_eigval, zero_padding, head_map, out] =
      args;
  const bool vk = is_vk(args);
  const GateAxes of_a = a_axes(args), of_b = head_gate_axes(b, true), of_beta = head_gate_axes(beta, true);
  const GateAxes of_g = head_gate_axes(g, false);
  constexpr DTypes kInts = {DType::kInt32, DType::kInt64};
  using enum Strides;
  ArgumentTable<19> table;
  table.add(q, "q", kRead, kDeltaTypes, kUnitInner, {4, "(batch, tokens, num_heads, head_dim_k)"});
  table.add(k, "k", kRead, {q.dtype}, kUnitInner, {4, "(batch, tokens, num_heads, head_dim_k)"});
  table.add(v, "v", kRead, {q.dtype}, kUnitInner, {4, "(batch, tokens, num_v_heads, head_dim_v)"});
  table.add(a, "a", kRead, kDeltaTypes, kAny, of_a.one, of_a.other);
  table.add(b, "b", kRead, kDeltaTypes, kAny, of_b.one, of_b.other);
  table.add(g, "g", kRead, kDeltaTypes, kAny, of_g.one, of_g.other);
  table.add(gk, "gk", kRead, kDeltaTypes, kAny, {4, kKeyGates});
  table.add(gv, "gv", kRead, kDeltaTypes, kAny, {4, kColumnGates});
  table.add(beta, "beta", kRead, kDeltaTypes, kAny, of_beta.one, of_beta.other);
  table.add(a_log, "A_log", kRead, kDeltaTypes, kContiguous, {1, "(num_v_heads)", Rank::kAtLeast});
  table.add(dt_bias, "dt_bias", kRead, kDeltaTypes, kContiguous, {1, "(num_v_heads)", Rank::kAtLeast});
  table.add(state, "state", update_state ? kWritten : kRead, kStateTypes, kSlots, {4, vk ? kStateVk : kStateKv});
  table.add(state_indices, "state_indices", kRead, kInts, kContiguous, {1, "(sequences)"});
  table.add(final_states, "final_states", kWritten, kStateTypes, kSlots, {4, vk ? kFinalVk : kFinalKv});
  table.add(cu_seqlens, "cu_seqlens", kRead, kInts, kContiguous, {1, "(sequences + 1)"});
  table.add(intermediate_states, "intermediate_states", kWritten, kStateTypes, kSlots, {5, vk ? kStepsVk : kStepsKv});
  table.add(intermediate_indices, "intermediate_indices", kRead, kInts, kContiguous, {1, "(sequences)"});
  table.add(parent_tokens, "parent_tokens", kRead, kInts, kAny, {2, "(sequences, steps)"});
  table.add(out, "out", kWritten, {q.dtype}, kUnitInner, {4, "(batch, tokens, num_v_heads, head_dim_v)"});
  return table;
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
  const ArgumentTable<19> table = table_of(a);
  check_ranks(check, table);
  const Sizes s = check_shapes(check, a);
  check_combinations(check, a, s);
  check_numbers(check, a);
  check_tensors(check, table);

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

std::string call_text(const Check& check, const GatedDeltaUpdateArgs& a) {
  return CallText(check.function(), table_of(a))
      .number("scale", a.scale)
      .number("softplus_beta", a.softplus_beta, 1.0)
      .number("softplus_threshold", a.softplus_threshold, 20.0)
      .number("lower_bound", a.lower_bound)
      .flag("use_qk_l2norm", a.use_qk_l2norm)
      .flag("is_kda", a.is_kda)
      .flag("allow_neg_eigval", a.allow_neg_eigval)
      .word("head_map", a.head_map == HeadMap::kModulo ? "modulo" : "consecutive", "consecutive")
      .word("state_layout", a.state_layout == StateLayout::kKV ? "kv" : "vk", "vk")
      .word("update_state", a.update_state ? "True" : "False", "True")
      .text();
}

}  // namespace flashport
