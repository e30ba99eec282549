// The operations of the gated delta rule. None stands for an argument left out.
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

bool boolean_or(const Call& call, const char* name, PyObject* object, bool otherwise) {
  return object == Py_None ? otherwise : call.boolean(name, object);
}

// Which of two words it is: true for the second. None is the first.
bool second_or_first(const Call& call, const char* name, PyObject* object, const char* first, const char* second) {
  return object != Py_None && call.is_second(name, object, first, second);
}

// The pool of states, which may be read only.
void read_state(Call& call, PyObject* object, bool updated, std::optional<TensorView>& to) {
  return updated ? call.optional_output("state", object, to) : call.optional_input("state", object, to);
}

py::object py_gated_delta_update(Arguments a) {
  using namespace update;
  Call call("gated_delta_update", a[kStream]);
  GatedDeltaUpdateArgs args;
  args.update_state = boolean_or(call, "update_state", a[kUpdateState], true);
  args.use_qk_l2norm = boolean_or(call, "use_qk_l2norm", a[kUseQkL2norm], false);
  args.is_kda = boolean_or(call, "is_kda", a[kIsKda], false);
  args.allow_neg_eigval = boolean_or(call, "allow_neg_eigval", a[kAllowNegEigval], false);
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
  call.output("out", a[kOut], args.out);
  call.run([&](Stream stream) { gated_delta_update(args, stream); });
  return py::reinterpret_borrow<py::object>(a[kOut]);
}

GatedDeltaChunkArgs chunk_args(Call& call, Arguments a) {
  using namespace chunk;
  GatedDeltaChunkArgs args;
  args.update_state = boolean_or(call, "update_state", a[kUpdateState], true);
  args.use_qk_l2norm = boolean_or(call, "use_qk_l2norm", a[kUseQkL2norm], false);
  args.beta_sigmoid = boolean_or(call, "beta_sigmoid", a[kBetaSigmoid], false);
  args.allow_neg_eigval = boolean_or(call, "allow_neg_eigval", a[kAllowNegEigval], false);
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
  call.output("out", a[kOut], args.out);
  return args;
}

py::object py_gated_delta_chunk(Arguments a) {
  Call call("gated_delta_chunk", a[chunk::kStream]);
  const GatedDeltaChunkArgs args = chunk_args(call, a);
  call.run([&](Stream stream) { gated_delta_chunk(args, stream); });
  return py::reinterpret_borrow<py::object>(a[chunk::kOut]);
}

py::object py_gated_delta_chunk_workspace_size(Arguments a) {
  Call call("gated_delta_chunk_workspace_size", a[chunk::kStream]);
  const GatedDeltaChunkArgs args = chunk_args(call, a);
  std::int64_t bytes = 0;
  call.run([&](Stream) { bytes = gated_delta_chunk_workspace_size(args); });
  return py::int_(bytes);
}

constexpr Operation kUpdate{"gated_delta_update", py_gated_delta_update, update::kArguments, update::kOut};
constexpr Operation kChunk{"gated_delta_chunk", py_gated_delta_chunk, chunk::kArguments, chunk::kOut};
constexpr Operation kChunkWorkspaceSize{"gated_delta_chunk_workspace_size", py_gated_delta_chunk_workspace_size,
                                        chunk::kArguments};

}  // namespace

void define_gated_delta_operations(py::module_& module) {
  add_operation<kUpdate>(module);
  add_operation<kChunk>(module);
  add_operation<kChunkWorkspaceSize>(module);
}

}  // namespace flashport::python
