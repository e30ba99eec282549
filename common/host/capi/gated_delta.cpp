// The C interface of the gated delta rule over the C++ one.
#include <flashport/capi.h>

#include <cstdint>
#include <string>

#include <flashport/gated_delta.h>

#include "common/host/capi/calls.h"

namespace flashport {
namespace {

HeadMap to_head_map(std::int32_t map, const char* function) {
  return to_enum<HeadMap>(map, 2, function, "head_map", "fp_consecutive or fp_modulo");
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

GatedDeltaChunkArgs to_chunk(const fp_gated_delta_chunk_args* from, const char* function, bool needs_out) {
  const Tensors tensors{function};
  const fp_gated_delta_chunk_args c = read_args(from, function);
  GatedDeltaChunkArgs a;
  a.q = tensors.needed(c.q, "q");
  a.k = tensors.needed(c.k, "k");
  a.v = tensors.needed(c.v, "v");
  a.g = tensors.needed(c.g, "g");
  a.beta = tensors.needed(c.beta, "beta");
  if (needs_out || c.out != nullptr) a.out = tensors.needed(c.out, "out");
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

}  // namespace
}  // namespace flashport

extern "C" {

fp_status fp_gated_delta_update(const fp_gated_delta_update_args* args, fp_stream stream) {
  return flashport::guarded([&] { flashport::gated_delta_update(flashport::to_update(args), stream); });
}

fp_status fp_gated_delta_chunk(const fp_gated_delta_chunk_args* args, fp_stream stream) {
  return flashport::guarded(
      [&] { flashport::gated_delta_chunk(flashport::to_chunk(args, "gated_delta_chunk", true), stream); });
}

fp_status fp_gated_delta_chunk_workspace_size(const fp_gated_delta_chunk_args* args, int64_t* bytes) {
  return flashport::guarded([&] {
    constexpr char kFunction[] = "gated_delta_chunk_workspace_size";
    if (bytes == nullptr) throw flashport::ValueError(std::string(kFunction) + ": bytes must not be null");
    *bytes = flashport::gated_delta_chunk_workspace_size(flashport::to_chunk(args, kFunction, false));
  });
}

}  // extern "C"
