// The C interface of the gated delta rule over the C++ one.
#include <flashport/capi.h>

#include <cstdint>
#include <string>

#include <flashport/gated_delta.h>

#include "common/host/capi/calls.h"

namespace flashport {
namespace {

// One of the first `count` values of an enumeration.
template <class Enum>
Enum to_enum(std::int32_t value, int count, const char* function, const char* name, const char* values) {
  if (value >= 0 && value < count) return static_cast<Enum>(value);
  throw ValueError(std::string(function) + ": " + name + " must be " + values + ", got " + std::to_string(value));
}

StateLayout to_state_layout(std::int32_t layout, const char* function) {
  return to_enum<StateLayout>(layout, 2, function, "state_layout", "fp_vk or fp_kv");
}
HeadMap to_head_map(std::int32_t map, const char* function) {
  return to_enum<HeadMap>(map, 2, function, "head_map", "fp_consecutive or fp_modulo");
}
DType to_dtype(std::int32_t dtype, const char* function, const char* name) {
  return to_enum<DType>(dtype, fp_uint8 + 1, function, name, "one of fp_dtype");
}

GatedDeltaUpdateArgs to_update(const fp_gated_delta_update_args* from) {
  const Tensors tensors{"gated_delta_update"};
  const fp_gated_delta_update_args c = read_args(from, tensors.function);
  GatedDeltaUpdateArgs a;
  a.q = tensors.needed(c.q, "q");
  a.k = tensors.needed(c.k, "k");
  a.v = tensors.needed(c.v, "v");
  a.out = tensors.needed(c.out, "out");
  a.a = tensors.optional(c.a, "a");
  a.b = tensors.optional(c.b, "b");
  a.a_log = tensors.optional(c.a_log, "A_log");
  a.dt_bias = tensors.optional(c.dt_bias, "dt_bias");
  a.g = tensors.optional(c.g, "g");
  a.gk = tensors.optional(c.gk, "gk");
  a.gv = tensors.optional(c.gv, "gv");
  a.beta = tensors.optional(c.beta, "beta");
  a.state = tensors.optional(c.state, "state");
  a.state_indices = tensors.optional(c.state_indices, "state_indices");
  a.final_states = tensors.optional(c.final_states, "final_states");
  a.cu_seqlens = tensors.optional(c.cu_seqlens, "cu_seqlens");
  a.intermediate_states = tensors.optional(c.intermediate_states, "intermediate_states");
  a.intermediate_indices = tensors.optional(c.intermediate_indices, "intermediate_indices");
  a.parent_tokens = tensors.optional(c.parent_tokens, "parent_tokens");
  a.state_layout = to_state_layout(c.state_layout, tensors.function);
  a.head_map = to_head_map(c.head_map, tensors.function);
  a.update_state = c.disable_state_update == 0;
  a.use_qk_l2norm = c.use_qk_l2norm != 0;
  a.is_kda = c.is_kda != 0;
  a.allow_neg_eigval = c.allow_neg_eigval != 0;
  a.zero_padding = c.zero_padding != 0;
  if (c.has_scale != 0) a.scale = c.scale;
  if (c.has_softplus != 0) {
    a.softplus_beta = c.softplus_beta;
    a.softplus_threshold = c.softplus_threshold;
  }
  if (c.has_lower_bound != 0) a.lower_bound = c.lower_bound;
  return a;
}

GatedDeltaChunkArgs to_chunk(const fp_gated_delta_chunk_args* from, const char* function) {
  const Tensors tensors{function};
  const fp_gated_delta_chunk_args c = read_args(from, function);
  GatedDeltaChunkArgs a;
  a.q = tensors.needed(c.q, "q");
  a.k = tensors.needed(c.k, "k");
  a.v = tensors.needed(c.v, "v");
  a.g = tensors.needed(c.g, "g");
  a.beta = tensors.needed(c.beta, "beta");
  a.out = tensors.needed(c.out, "out");
  a.a_log = tensors.optional(c.a_log, "A_log");
  a.dt_bias = tensors.optional(c.dt_bias, "dt_bias");
  a.state = tensors.optional(c.state, "state");
  a.state_indices = tensors.optional(c.state_indices, "state_indices");
  a.final_states = tensors.optional(c.final_states, "final_states");
  a.chunk_states = tensors.optional(c.chunk_states, "chunk_states");
  a.cu_seqlens = tensors.optional(c.cu_seqlens, "cu_seqlens");
  a.workspace = tensors.optional(c.workspace, "workspace");
  a.state_layout = to_state_layout(c.state_layout, function);
  a.head_map = to_head_map(c.head_map, function);
  a.update_state = c.disable_state_update == 0;
  a.use_qk_l2norm = c.use_qk_l2norm != 0;
  a.beta_sigmoid = c.beta_sigmoid != 0;
  a.allow_neg_eigval = c.allow_neg_eigval != 0;
  if (c.has_scale != 0) a.scale = c.scale;
  return a;
}

GatedDeltaQuery to_query(const fp_gated_delta_query* from, const char* function) {
  const fp_gated_delta_query c = read_args(from, function);
  GatedDeltaQuery query;
  query.target = c.target != nullptr ? c.target : "";
  query.operation = to_enum<GatedDeltaOperation>(c.operation, 2, function, "operation", "fp_update or fp_chunk");
  query.q_dtype = to_dtype(c.q_dtype, function, "q_dtype");
  query.state_dtype = to_dtype(c.state_dtype, function, "state_dtype");
  query.head_dim_k = c.head_dim_k;
  query.head_dim_v = c.head_dim_v;
  query.state_layout = to_state_layout(c.state_layout, function);
  query.gate = to_enum<GateForm>(c.gate, 3, function, "gate", "fp_gate_head, fp_gate_key or fp_gate_any");
  return query;
}

}  // namespace
}  // namespace flashport

extern "C" {

fp_status fp_gated_delta_update(const fp_gated_delta_update_args* args, fp_stream stream) {
  return flashport::guarded([&] { flashport::gated_delta_update(flashport::to_update(args), stream); });
}

fp_status fp_gated_delta_chunk(const fp_gated_delta_chunk_args* args, fp_stream stream) {
  return flashport::guarded(
      [&] { flashport::gated_delta_chunk(flashport::to_chunk(args, "gated_delta_chunk"), stream); });
}

fp_status fp_gated_delta_chunk_workspace_size(const fp_gated_delta_chunk_args* args, int64_t* bytes) {
  return flashport::guarded([&] {
    constexpr char kFunction[] = "gated_delta_chunk_workspace_size";
    if (bytes == nullptr) throw flashport::ValueError(std::string(kFunction) + ": bytes must not be null");
    *bytes = flashport::gated_delta_chunk_workspace_size(flashport::to_chunk(args, kFunction));
  });
}

fp_status fp_supports_gated_delta(const fp_gated_delta_query* query) {
  return flashport::guarded([&] {
    flashport::expect_support(flashport::supports_gated_delta(flashport::to_query(query, "supports_gated_delta")));
  });
}

fp_status fp_which_gated_delta_kernel(const fp_gated_delta_query* query, char* key, size_t size) {
  return flashport::guarded([&] {
    constexpr char kFunction[] = "which_gated_delta_kernel";
    flashport::give_key(kFunction, flashport::which_gated_delta_kernel(flashport::to_query(query, kFunction)), key,
                        size);
  });
}

}  // extern "C"
