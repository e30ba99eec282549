// Validation of gated_delta_chunk: ranks, shapes, numbers, types, devices, memory; then the params.
#include <algorithm>
#include <cmath>
#include <string>

#include "common/host/arguments.h"
#include "common/host/call_log.h"
#include "common/host/gated_delta/checks.h"
#include "common/host/gated_delta/kernel_choice.h"
#include "common/host/gated_delta/problem.h"

namespace flashport {
namespace {

constexpr char kKeyAxes[] = "(batch, tokens, num_heads, head_dim_k)";
constexpr char kValueAxes[] = "(batch, tokens, num_v_heads, head_dim_v)";
constexpr char kGateAxes[] = "(batch, tokens, num_v_heads)";

// Axes of the states in each layout.
struct StateAxes {
  const char *pool, *finals, *chunks;
};
constexpr StateAxes kVkAxes = {"(slots, num_v_heads, head_dim_v, head_dim_k)",
                               "(sequences, num_v_heads, head_dim_v, head_dim_k)",
                               "(batch, chunks, num_v_heads, head_dim_v, head_dim_k)"};
constexpr StateAxes kKvAxes = {"(slots, num_v_heads, head_dim_k, head_dim_v)",
                               "(sequences, num_v_heads, head_dim_k, head_dim_v)",
                               "(batch, chunks, num_v_heads, head_dim_k, head_dim_v)"};

bool is_vk(const GatedDeltaChunkArgs& a) { return a.state_layout == StateLayout::kVK; }
const StateAxes& axes_of(const GatedDeltaChunkArgs& a) { return is_vk(a) ? kVkAxes : kKvAxes; }

ArgumentTable<14> table_of(const GatedDeltaChunkArgs& args) {
  const auto& [q, k, v, g, beta, a_log, dt_bias, beta_sigmoid, allow_neg_eigval, state, state_indices, state_layout,
               update_state, final_states, chunk_states, cu_seqlens, scale, use_qk_l2norm, head_map, workspace, out] =
      args;
  const StateAxes& states = axes_of(args);
  constexpr DTypes kGateTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  constexpr DTypes kInts = {DType::kInt32, DType::kInt64};
  using enum Strides;
  ArgumentTable<14> table;
  table.add(q, "q", kRead, kDeltaTypes, kUnitInner, {4, kKeyAxes});
  table.add(k, "k", kRead, {q.dtype}, kUnitInner, {4, kKeyAxes});
  table.add(v, "v", kRead, {q.dtype}, kUnitInner, {4, kValueAxes});
  table.add(g, "g", kRead, kGateTypes, kAny, {3, kGateAxes});
  table.add(beta, "beta", kRead, kGateTypes, kAny, {3, kGateAxes});
  table.add(a_log, "A_log", kRead, kDeltaTypes, kContiguous, {1, "(num_v_heads)", Rank::kAtLeast});
  table.add(dt_bias, "dt_bias", kRead, kGateTypes, kContiguous, {1, "(num_v_heads)", Rank::kAtLeast});
  table.add(state, "state", update_state ? kWritten : kRead, kStateTypes, kSlots, {4, states.pool});
  table.add(state_indices, "state_indices", kRead, kInts, kContiguous, {1, "(sequences)"});
  table.add(final_states, "final_states", kWritten, kStateTypes, kSlots, {4, states.finals});
  table.add(chunk_states, "chunk_states", kWritten, {q.dtype}, kSlots, {5, states.chunks});
  table.add(cu_seqlens, "cu_seqlens", kRead, kInts, kContiguous, {1, "(sequences + 1)"});
  table.add(workspace, "workspace", kWritten, {DType::kUInt8}, kAny, {1, "(bytes)"});
  table.add(out, "out", kWritten, {q.dtype}, kUnitInner, {4, kValueAxes});
  return table;
}

// Returns the number of sequences.
std::int64_t check_shapes(const Check& check, const GatedDeltaChunkArgs& a) {
  const std::int64_t batch = a.q.shape[0], tokens = a.q.shape[1], heads = a.q.shape[2], dim_k = a.q.shape[3];
  const std::int64_t v_heads = a.v.shape[2], dim_v = a.v.shape[3];
  check.shape(a.k, "k", kKeyAxes, {batch, tokens, heads, dim_k});
  check.shape(a.v, "v", kValueAxes, {batch, tokens, v_heads, dim_v});
  check_heads(check, a.q, a.v);
  const std::int64_t sequences = sequence_count(check, a.q, a.cu_seqlens);
  check.shape(a.g, "g", kGateAxes, {batch, tokens, v_heads});
  check.shape(a.beta, "beta", kGateAxes, {batch, tokens, v_heads});
  if (a.a_log) check_elements(check, *a.a_log, "A_log", "num_v_heads", v_heads);
  if (a.dt_bias) check_elements(check, *a.dt_bias, "dt_bias", "num_v_heads", v_heads);
  const std::int64_t outer = is_vk(a) ? dim_v : dim_k, inner = is_vk(a) ? dim_k : dim_v;
  check.shape(a.state, "state", axes_of(a).pool, {kAnyExtent, v_heads, outer, inner});
  check.shape(a.state_indices, "state_indices", "(sequences)", {sequences});
  check.shape(a.final_states, "final_states", axes_of(a).finals, {sequences, v_heads, outer, inner});
  // With cu_seqlens the number of chunks is known from its contents alone.
  const std::int64_t chunks = a.cu_seqlens ? kAnyExtent : (tokens + kChunkTokens - 1) / kChunkTokens;
  check.shape(a.chunk_states, "chunk_states", axes_of(a).chunks, {batch, chunks, v_heads, outer, inner});
  check.shape(a.workspace, "workspace", "(bytes)", {kAnyExtent});
  check.shape(a.out, "out", kValueAxes, {batch, tokens, v_heads, dim_v});
  return sequences;
}

// Arguments that must be passed together, and numbers.
void check_combinations(const Check& check, const GatedDeltaChunkArgs& a, std::int64_t sequences) {
  if (a.state_indices && !a.state) check.value_error("state_indices needs state; pass the pool, or neither");
  if (a.state && !a.state_indices && a.state->shape[0] < sequences) {
    check.value_error("state must have a slot for each of the " + std::to_string(sequences) +
                      " sequences without state_indices, got " + shape_text(*a.state));
  }
  if (a.dt_bias && !a.a_log) check.value_error("dt_bias needs A_log, without which g is the gate's logarithm itself");
  if (a.allow_neg_eigval && !a.beta_sigmoid) {
    check.value_error("allow_neg_eigval needs beta_sigmoid, whose result it doubles");
  }
  if (a.scale) check.positive(*a.scale, "scale");
}

StridedRows gate_rows(const TensorView& view) {
  return {view.data, view.dtype, view.strides[0], view.strides[1], view.strides[2], 0};
}

GatedDeltaChunkParams problem_of(const Check& check, const GatedDeltaChunkArgs& a, Outputs outputs) {
  const ArgumentTable<14> table = table_of(a);
  check_ranks(check, table);
  const std::int64_t sequences = check_shapes(check, a);
  check_combinations(check, a, sequences);
  check_tensors(check, table, outputs);

  GatedDeltaChunkParams p{};
  p.batch = static_cast<std::int32_t>(sequences);
  p.tokens = static_cast<std::int32_t>(a.q.shape[1]);
  p.num_heads = static_cast<std::int32_t>(a.q.shape[2]);
  p.num_v_heads = static_cast<std::int32_t>(a.v.shape[2]);
  p.group_size = p.num_v_heads / p.num_heads;
  p.head_dim_k = static_cast<std::int32_t>(a.q.shape[3]);
  p.head_dim_v = static_cast<std::int32_t>(a.v.shape[3]);
  p.heads_modulo = a.head_map == HeadMap::kModulo ? 1 : 0;
  p.key_major = is_vk(a) ? 0 : 1;
  p.l2norm = a.use_qk_l2norm ? 1 : 0;
  p.beta_sigmoid = a.beta_sigmoid ? 1 : 0;
  p.beta_factor = a.allow_neg_eigval ? 2.0f : 1.0f;
  p.update_state = a.update_state ? 1 : 0;
  p.q = token_rows(a.q);
  p.k = token_rows(a.k);
  p.v = token_rows(a.v);
  p.out = token_rows(a.out);
  p.g = gate_rows(a.g);
  p.beta = gate_rows(a.beta);
  if (a.a_log) {
    p.a_log = a.a_log->data;
    p.a_log_dtype = a.a_log->dtype;
  }
  if (a.dt_bias) {
    p.dt_bias = a.dt_bias->data;
    p.dt_bias_dtype = a.dt_bias->dtype;
  }
  p.cu_seqlens = index_array(a.cu_seqlens);
  const IndexArray none = {nullptr, 0};
  if (a.state) p.state = {a.state->data, a.state->dtype, a.state->strides[0], 0, index_array(a.state_indices)};
  if (a.final_states) {
    p.final_states = {a.final_states->data, a.final_states->dtype, a.final_states->strides[0], 0, none};
  }
  if (a.chunk_states) {
    const TensorView& chunks = *a.chunk_states;
    p.chunk_states = {chunks.data, chunks.dtype, chunks.strides[0], a.v.shape[2] * a.v.shape[3] * a.q.shape[3], none};
    p.chunk_states_count = extent_of(chunks, 1);
  }
  p.scale = static_cast<float>(a.scale ? *a.scale : 1.0 / std::sqrt(static_cast<double>(a.q.shape[3])));
  return p;
}

}  // namespace

GatedDeltaChunkParams gated_delta_chunk_problem(const Check& check, const GatedDeltaChunkArgs& a) {
  return problem_of(check, a, Outputs::kWritten);
}

GatedDeltaChunkParams gated_delta_chunk_size_problem(const Check& check, const GatedDeltaChunkArgs& a) {
  if (is_given(a.out)) return problem_of(check, a, Outputs::kSizedOnly);
  GatedDeltaChunkArgs with_out = a;
  with_out.out = a.v;
  with_out.out.data = nullptr;
  return problem_of(check, with_out, Outputs::kSizedOnly);
}

std::string call_text(const Check& check, const GatedDeltaChunkArgs& a) {
  return CallText(check.function(), table_of(a))
      .number("scale", a.scale)
      .flag("use_qk_l2norm", a.use_qk_l2norm)
      .flag("beta_sigmoid", a.beta_sigmoid)
      .flag("allow_neg_eigval", a.allow_neg_eigval)
      .word("head_map", a.head_map == HeadMap::kModulo ? "modulo" : "consecutive", "consecutive")
      .word("state_layout", a.state_layout == StateLayout::kKV ? "kv" : "vk", "vk")
      .word("update_state", a.update_state ? "True" : "False", "True")
      .text();
}

}  // namespace flashport
