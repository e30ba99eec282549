// The operations of the gated delta rule. None stands for an argument left out.
#include <algorithm>
#include <string>

#include <flashport/gated_delta.h>

#include "bindings/python/call.h"
#include "bindings/python/direct_calls.h"
#include "bindings/python/operations.h"

namespace flashport::python {
namespace {

namespace update {

enum Argument {
  kQ,
  kK,
  kV,
  kA,
  kB,
  kALog,
  kDtBias,
  kState,
  kStateIndices,
  kScale,
  kSoftplusBeta,
  kSoftplusThreshold,
  kLowerBound,
  kUseQkL2norm,
  kIsKda,
  kHeadMap,
  kStateLayout,
  kUpdateState,
  kCuSeqlens,
  kIntermediateStates,
  kIntermediateIndices,
  kParentTokens,
  kG,
  kGk,
  kGv,
  kBeta,
  kAllowNegEigval,
  kFinalStates,
  kOut,
  kStream,
  kArguments
};

}  // namespace update

namespace packed {

enum Argument {
  kMixedQkv,
  kA,
  kB,
  kALog,
  kDtBias,
  kState,
  kStateIndices,
  kScale,
  kUseQkL2norm,
  kStateLayout,
  kOut,
  kStream,
  kArguments
};

}  // namespace packed

namespace chunk {

enum Argument {
  kQ,
  kK,
  kV,
  kG,
  kBeta,
  kState,
  kStateIndices,
  kScale,
  kUseQkL2norm,
  kBetaSigmoid,
  kAllowNegEigval,
  kALog,
  kDtBias,
  kHeadMap,
  kStateLayout,
  kUpdateState,
  kCuSeqlens,
  kFinalStates,
  kChunkStates,
  kWorkspace,
  kOut,
  kStream,
  kArguments
};

}  // namespace chunk

// Which of two words it is: true for the second. None is the first.
bool second_or_first(const Call& call, const char* name, PyObject* object, const char* first, const char* second) {
  return object != Py_None && call.is_second(name, object, first, second);
}

// The output, which the package's function has made where it can.
void read_out(Call& call, PyObject* q, PyObject* v, PyObject* out, TensorView& to) {
  if (out == Py_None) {
    call.fail_type("out", std::string("must be given, since none can be made like q (") + Py_TYPE(q)->tp_name +
                              ") in the shape of v (" + Py_TYPE(v)->tp_name +
                              "); pass an array of torch, NumPy or CuPy or a flashport.DeviceArray");
  }
  call.output("out", out, to);
}

// The pool of states, which may be read only.
void read_state(Call& call, PyObject* object, bool updated, std::optional<TensorView>& to) {
  return updated ? call.optional_output("state", object, to) : call.optional_input("state", object, to);
}

py::object py_gated_delta_update(Arguments a) {
  using namespace update;
  Call call("gated_delta_update", a[kStream]);
  GatedDeltaUpdateArgs args;
  args.update_state = call.boolean("update_state", a[kUpdateState]);
  args.use_qk_l2norm = call.boolean("use_qk_l2norm", a[kUseQkL2norm]);
  args.is_kda = call.boolean("is_kda", a[kIsKda]);
  args.allow_neg_eigval = call.boolean("allow_neg_eigval", a[kAllowNegEigval]);
  if (second_or_first(call, "head_map", a[kHeadMap], "consecutive", "modulo")) args.head_map = HeadMap::kModulo;
  if (second_or_first(call, "state_layout", a[kStateLayout], "vk", "kv")) args.state_layout = StateLayout::kKV;
  args.scale = call.optional_number("scale", a[kScale]);
  args.lower_bound = call.optional_number("lower_bound", a[kLowerBound]);
  if (a[kSoftplusBeta] != Py_None) args.softplus_beta = call.number("softplus_beta", a[kSoftplusBeta]);
  if (a[kSoftplusThreshold] != Py_None) {
    args.softplus_threshold = call.number("softplus_threshold", a[kSoftplusThreshold]);
  }
  call.input("q", a[kQ], args.q);
  call.input("k", a[kK], args.k);
  call.input("v", a[kV], args.v);
  call.optional_input("a", a[kA], args.a);
  call.optional_input("b", a[kB], args.b);
  call.optional_input("A_log", a[kALog], args.a_log);
  call.optional_input("dt_bias", a[kDtBias], args.dt_bias);
  call.optional_input("g", a[kG], args.g);
  call.optional_input("gk", a[kGk], args.gk);
  call.optional_input("gv", a[kGv], args.gv);
  call.optional_input("beta", a[kBeta], args.beta);
  read_state(call, a[kState], args.update_state, args.state);
  call.optional_input("state_indices", a[kStateIndices], args.state_indices);
  call.optional_input("cu_seqlens", a[kCuSeqlens], args.cu_seqlens);
  call.optional_output("final_states", a[kFinalStates], args.final_states);
  call.optional_output("intermediate_states", a[kIntermediateStates], args.intermediate_states);
  call.optional_input("intermediate_indices", a[kIntermediateIndices], args.intermediate_indices);
  call.optional_input("parent_tokens", a[kParentTokens], args.parent_tokens);
  read_out(call, a[kQ], a[kV], a[kOut], args.out);
  call.run([&](Stream stream) { gated_delta_update(args, stream); });
  return py::reinterpret_borrow<py::object>(a[kOut]);
}

// The queries, keys and values of a token a row, one after the other in a row; how many heads follows from the state.
void split_qkv(const Call& call, const TensorView& mixed, GatedDeltaUpdateArgs& args) {
  if (mixed.rank != 2) {
    call.fail_value("mixed_qkv",
                    "must have 2 dimensions (batch, 2 * heads * head_dim_k + num_v_heads * head_dim_v), got " +
                        std::to_string(mixed.rank));
  }
  const TensorView& state = *args.state;
  if (state.rank != 4) {
    call.fail_value("initial_state", "must have 4 dimensions (slots, num_v_heads, head_dim_v, head_dim_k), got " +
                                         std::to_string(state.rank));
  }
  const bool vk = args.state_layout == StateLayout::kVK;
  const std::int64_t v_heads = state.shape[1], dim_k = state.shape[vk ? 3 : 2], dim_v = state.shape[vk ? 2 : 3];
  const std::int64_t of_keys = (mixed.shape[1] - v_heads * dim_v) / 2, heads = dim_k > 0 ? of_keys / dim_k : 0;
  if (heads < 1 || 2 * heads * dim_k + v_heads * dim_v != mixed.shape[1]) {
    call.fail_value("mixed_qkv", "must have 2 * heads * " + std::to_string(dim_k) + " + " + std::to_string(v_heads) +
                                     " * " + std::to_string(dim_v) + " columns by the shape of initial_state, got " +
                                     std::to_string(mixed.shape[1]));
  }
  const std::int64_t bytes = element_size(mixed.dtype), column = mixed.strides[1];
  const auto part = [&](std::int64_t first, std::int64_t count, std::int64_t dim) {
    TensorView view = mixed;
    view.data = static_cast<char*>(mixed.data) + first * column * bytes;
    view.rank = 4;
    const std::int64_t shape[] = {mixed.shape[0], 1, count, dim};
    const std::int64_t strides[] = {mixed.strides[0], mixed.strides[0], dim * column, column};
    std::copy(shape, shape + 4, view.shape);
    std::copy(strides, strides + 4, view.strides);
    return view;
  };
  args.q = part(0, heads, dim_k);
  args.k = part(of_keys, heads, dim_k);
  args.v = part(2 * of_keys, v_heads, dim_v);
}

py::object py_gated_delta_packed_decode(Arguments a) {
  using namespace packed;
  Call call("fused_recurrent_gated_delta_rule_packed_decode", a[kStream]);
  GatedDeltaUpdateArgs args;
  args.zero_padding = true;
  args.use_qk_l2norm = call.boolean("use_qk_l2norm_in_kernel", a[kUseQkL2norm]);
  if (call.is_second("state_layout", a[kStateLayout], "vk", "kv")) args.state_layout = StateLayout::kKV;
  args.scale = call.optional_number("scale", a[kScale]);
  TensorView mixed;
  call.input("mixed_qkv", a[kMixedQkv], mixed);
  call.input("a", a[kA], args.a.emplace());
  call.input("b", a[kB], args.b.emplace());
  call.input("A_log", a[kALog], args.a_log.emplace());
  call.input("dt_bias", a[kDtBias], args.dt_bias.emplace());
  call.output("initial_state", a[kState], args.state.emplace());
  call.input("ssm_state_indices", a[kStateIndices], args.state_indices.emplace());
  call.output("out", a[kOut], args.out);
  split_qkv(call, mixed, args);
  call.run([&](Stream stream) { gated_delta_update(args, stream); });
  return py::reinterpret_borrow<py::object>(a[kOut]);
}

GatedDeltaChunkArgs chunk_args(Call& call, Arguments a) {
  using namespace chunk;
  GatedDeltaChunkArgs args;
  args.update_state = call.boolean("update_state", a[kUpdateState]);
  args.use_qk_l2norm = call.boolean("use_qk_l2norm", a[kUseQkL2norm]);
  args.beta_sigmoid = call.boolean("beta_sigmoid", a[kBetaSigmoid]);
  args.allow_neg_eigval = call.boolean("allow_neg_eigval", a[kAllowNegEigval]);
  if (second_or_first(call, "head_map", a[kHeadMap], "consecutive", "modulo")) args.head_map = HeadMap::kModulo;
  if (second_or_first(call, "state_layout", a[kStateLayout], "vk", "kv")) args.state_layout = StateLayout::kKV;
  args.scale = call.optional_number("scale", a[kScale]);
  call.input("q", a[kQ], args.q);
  call.input("k", a[kK], args.k);
  call.input("v", a[kV], args.v);
  call.input("g", a[kG], args.g);
  call.input("beta", a[kBeta], args.beta);
  call.optional_input("A_log", a[kALog], args.a_log);
  call.optional_input("dt_bias", a[kDtBias], args.dt_bias);
  read_state(call, a[kState], args.update_state, args.state);
  call.optional_input("state_indices", a[kStateIndices], args.state_indices);
  call.optional_input("cu_seqlens", a[kCuSeqlens], args.cu_seqlens);
  call.optional_output("final_states", a[kFinalStates], args.final_states);
  call.optional_output("chunk_states", a[kChunkStates], args.chunk_states);
  call.optional_output("workspace", a[kWorkspace], args.workspace);
  return args;
}

py::object py_gated_delta_chunk(Arguments a) {
  Call call("gated_delta_chunk", a[chunk::kStream]);
  GatedDeltaChunkArgs args = chunk_args(call, a);
  read_out(call, a[chunk::kQ], a[chunk::kV], a[chunk::kOut], args.out);
  call.run([&](Stream stream) { gated_delta_chunk(args, stream); });
  return py::reinterpret_borrow<py::object>(a[chunk::kOut]);
}

py::object py_gated_delta_chunk_workspace_size(Arguments a) {
  Call call("gated_delta_chunk_workspace_size", a[chunk::kStream], TorchRole::kQuestion);
  GatedDeltaChunkArgs args = chunk_args(call, a);
  if (a[chunk::kOut] != Py_None) call.output("out", a[chunk::kOut], args.out);
  std::int64_t bytes = 0;
  call.run([&](Stream) { bytes = gated_delta_chunk_workspace_size(args); });
  return py::int_(bytes);
}

constexpr Operation kUpdate{"gated_delta_update", py_gated_delta_update, update::kArguments, update::kOut};
constexpr Operation kPackedDecode{"gated_delta_packed_decode", py_gated_delta_packed_decode, packed::kArguments};
constexpr Operation kChunk{"gated_delta_chunk", py_gated_delta_chunk, chunk::kArguments, chunk::kOut};
constexpr Operation kChunkWorkspaceSize{"gated_delta_chunk_workspace_size", py_gated_delta_chunk_workspace_size,
                                        chunk::kArguments};

}  // namespace

void define_gated_delta_operations(py::module_& module) {
  add_operation<kUpdate>(module);
  add_operation<kPackedDecode>(module);
  add_operation<kChunk>(module);
  add_operation<kChunkWorkspaceSize>(module);
}

}  // namespace flashport::python
