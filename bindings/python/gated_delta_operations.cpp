// The operations of the gated delta rule as Python functions. Their arrays go by position, everything else by keyword
// (or by position in the same order, which saves the look-up of names); None stands for an argument left out.
#include <algorithm>
#include <iterator>
#include <span>
#include <string>

#include <flashport/gated_delta.h>

#include "bindings/python/call.h"
#include "bindings/python/operations.h"

namespace flashport::python {
namespace {

using Arguments = PyObject* const*;

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
  kOut,
  kPositional,
  kScale = kPositional,
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
  kStream,
  kG,
  kGk,
  kGv,
  kBeta,
  kAllowNegEigval,
  kFinalStates,
  kArguments
};

// Behind the positional ones, in the order of Argument.
constexpr const char* kKeywords[] = {"scale",
                                     "softplus_beta",
                                     "softplus_threshold",
                                     "lower_bound",
                                     "use_qk_l2norm",
                                     "is_kda",
                                     "head_map",
                                     "state_layout",
                                     "update_state",
                                     "cu_seqlens",
                                     "intermediate_states",
                                     "intermediate_indices",
                                     "parent_tokens",
                                     "stream",
                                     "g",
                                     "gk",
                                     "gv",
                                     "beta",
                                     "allow_neg_eigval",
                                     "final_states"};
static_assert(kPositional + std::size(kKeywords) == kArguments);

}  // namespace update

// The same of gated_delta_chunk.
namespace chunk {

enum Argument {
  kQ,
  kK,
  kV,
  kG,
  kBeta,
  kState,
  kStateIndices,
  kOut,
  kPositional,
  kScale = kPositional,
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
  kStream,
  kArguments
};

constexpr const char* kKeywords[] = {
    "scale",        "use_qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "A_log",        "dt_bias",   "head_map",
    "state_layout", "update_state",  "cu_seqlens",   "final_states",     "chunk_states", "workspace", "stream"};
static_assert(kPositional + std::size(kKeywords) == kArguments);

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

py::object gated_delta_update_by_position(Arguments a) {
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
  return py::none();
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

py::object gated_delta_chunk_by_position(Arguments a) {
  Call call("gated_delta_chunk", a[chunk::kStream]);
  const GatedDeltaChunkArgs args = chunk_args(call, a);
  call.run([&](Stream stream) { gated_delta_chunk(args, stream); });
  return py::none();
}

py::object gated_delta_chunk_workspace_size_by_position(Arguments a) {
  Call call("gated_delta_chunk_workspace_size", a[chunk::kStream]);
  const GatedDeltaChunkArgs args = chunk_args(call, a);
  std::int64_t bytes = 0;
  call.run([&](Stream) { bytes = gated_delta_chunk_workspace_size(args); });
  return py::int_(bytes);
}

// How a function takes its arguments.
struct Signature {
  const char* function;
  int positional;
  std::span<const char* const> keywords;
  py::object (*run)(Arguments);
};

constexpr Signature kUpdate = {"gated_delta_update", update::kPositional, update::kKeywords,
                               gated_delta_update_by_position};
constexpr Signature kChunk = {"gated_delta_chunk", chunk::kPositional, chunk::kKeywords, gated_delta_chunk_by_position};
constexpr Signature kChunkWorkspaceSize = {"gated_delta_chunk_workspace_size", chunk::kPositional, chunk::kKeywords,
                                           gated_delta_chunk_workspace_size_by_position};
constexpr int kMostArguments = std::max<int>(update::kArguments, chunk::kArguments);

// The place of a keyword in a signature; -1 if it is none. Names of calls are interned, so the first pass finds them.
template <const Signature& kSignature>
int keyword_place(PyObject* name) {
  constexpr int kCount = static_cast<int>(kSignature.keywords.size());
  static PyObject* const* const interned = [] {
    static PyObject* names[kCount];
    for (int i = 0; i < kCount; ++i) names[i] = PyUnicode_InternFromString(kSignature.keywords[i]);
    return names;
  }();
  for (int i = 0; i < kCount; ++i) {
    if (interned[i] == name) return i;
  }
  for (int i = 0; i < kCount; ++i) {
    if (PyUnicode_CompareWithASCIIString(name, kSignature.keywords[i]) == 0) return i;
  }
  return -1;
}

template <const Signature& kSignature>
PyObject* call_by_signature(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  constexpr int kLeast = kSignature.positional, kMost = kLeast + static_cast<int>(kSignature.keywords.size());
  if (count < kLeast || count > kMost) {
    PyErr_Format(PyExc_TypeError, "%s: expected %d to %d arguments by position, got %zd", kSignature.function, kLeast,
                 kMost, count);
    return nullptr;
  }
  PyObject* all[kMostArguments];
  for (Py_ssize_t i = 0; i < kMost; ++i) all[i] = i < count ? arguments[i] : Py_None;
  const Py_ssize_t keywords = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < keywords; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    const int place = keyword_place<kSignature>(name);
    if (place < 0 || kLeast + place < count) {
      PyErr_Format(PyExc_TypeError, "%s: %s %R", kSignature.function,
                   place < 0 ? "has no argument" : "got by position and by keyword", name);
      return nullptr;
    }
    all[kLeast + place] = arguments[count + i];
  }
  try {
    return kSignature.run(all).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

template <const Signature& kSignature>
PyMethodDef method() {
  auto* function = reinterpret_cast<void (*)()>(&call_by_signature<kSignature>);
  return {kSignature.function, reinterpret_cast<PyCFunction>(function), METH_FASTCALL | METH_KEYWORDS, nullptr};
}

}  // namespace

void define_gated_delta_operations(py::module_& module) {
  static PyMethodDef methods[] = {
      method<kUpdate>(), method<kChunk>(), method<kChunkWorkspaceSize>(), {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace flashport::python
