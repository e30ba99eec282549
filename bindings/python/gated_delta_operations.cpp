// gated_delta_update as a Python function. Its arrays go by position, everything else by keyword (or by position in the
// same order, which saves the look-up of names); None stands for an argument left out.
#include <iterator>
#include <string>

#include <flashport/gated_delta.h>

#include "bindings/python/call.h"
#include "bindings/python/operations.h"

namespace flashport::python {
namespace {

using Arguments = PyObject* const*;

enum UpdateArgument {
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
  kUpdateArguments
};

// Behind the positional ones, in the order of UpdateArgument.
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
                                     "stream"};
constexpr int kKeywordCount = static_cast<int>(std::size(kKeywords));
static_assert(kPositional + kKeywordCount == kUpdateArguments);

bool boolean_or(const Call& call, const char* name, PyObject* object, bool otherwise) {
  return object == Py_None ? otherwise : call.boolean(name, object);
}

// Which of two words it is: true for the second. None is the first.
bool second_or_first(const Call& call, const char* name, PyObject* object, const char* first, const char* second) {
  return object != Py_None && call.is_second(name, object, first, second);
}

void gated_delta_update_by_position(Arguments a) {
  Call call("gated_delta_update", a[kStream]);
  GatedDeltaUpdateArgs args;
  args.update_state = boolean_or(call, "update_state", a[kUpdateState], true);
  args.use_qk_l2norm = boolean_or(call, "use_qk_l2norm", a[kUseQkL2norm], false);
  args.is_kda = boolean_or(call, "is_kda", a[kIsKda], false);
  if (second_or_first(call, "head_map", a[kHeadMap], "consecutive", "modulo")) args.head_map = HeadMap::kModulo;
  if (second_or_first(call, "state_layout", a[kStateLayout], "vk", "kv")) args.state_layout = StateLayout::kKV;
  args.scale = call.optional_number("scale", a[kScale]);
  args.lower_bound = call.optional_number("lower_bound", a[kLowerBound]);
  if (a[kSoftplusBeta] != Py_None) args.softplus_beta = call.number("softplus_beta", a[kSoftplusBeta]);
  if (a[kSoftplusThreshold] != Py_None) {
    args.softplus_threshold = call.number("softplus_threshold", a[kSoftplusThreshold]);
  }
  args.q = call.input("q", a[kQ]);
  args.k = call.input("k", a[kK]);
  args.v = call.input("v", a[kV]);
  args.a = call.input("a", a[kA]);
  args.b = call.input("b", a[kB]);
  args.a_log = call.input("A_log", a[kALog]);
  args.dt_bias = call.input("dt_bias", a[kDtBias]);
  if (a[kState] != Py_None) {
    args.state = args.update_state ? call.output("state", a[kState]) : call.input("state", a[kState]);
  }
  args.state_indices = call.optional_input("state_indices", a[kStateIndices]);
  args.cu_seqlens = call.optional_input("cu_seqlens", a[kCuSeqlens]);
  if (a[kIntermediateStates] != Py_None) {
    args.intermediate_states = call.output("intermediate_states", a[kIntermediateStates]);
  }
  args.intermediate_indices = call.optional_input("intermediate_indices", a[kIntermediateIndices]);
  args.parent_tokens = call.optional_input("parent_tokens", a[kParentTokens]);
  args.out = call.output("out", a[kOut]);
  call.run([&](Stream stream) { gated_delta_update(args, stream); });
}

// The place of a keyword among kKeywords; -1 if it is none. Names of calls are interned, so the first pass finds them.
int keyword_place(PyObject* name) {
  static PyObject* const* const interned = [] {
    static PyObject* names[kKeywordCount];
    for (int i = 0; i < kKeywordCount; ++i) names[i] = PyUnicode_InternFromString(kKeywords[i]);
    return names;
  }();
  for (int i = 0; i < kKeywordCount; ++i) {
    if (interned[i] == name) return i;
  }
  for (int i = 0; i < kKeywordCount; ++i) {
    if (PyUnicode_CompareWithASCIIString(name, kKeywords[i]) == 0) return i;
  }
  return -1;
}

PyObject* py_gated_delta_update(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  if (count < kPositional || count > kUpdateArguments) {
    PyErr_Format(PyExc_TypeError, "gated_delta_update: expected %d to %d arguments by position, got %zd", kPositional,
                 kUpdateArguments, count);
    return nullptr;
  }
  PyObject* all[kUpdateArguments];
  for (Py_ssize_t i = 0; i < kUpdateArguments; ++i) all[i] = i < count ? arguments[i] : Py_None;
  const Py_ssize_t keywords = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < keywords; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    const int place = keyword_place(name);
    if (place < 0 || kPositional + place < count) {
      PyErr_Format(PyExc_TypeError, "gated_delta_update: %s %R",
                   place < 0 ? "has no argument" : "got by position and by keyword", name);
      return nullptr;
    }
    all[kPositional + place] = arguments[count + i];
  }
  try {
    gated_delta_update_by_position(all);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

}  // namespace

void define_gated_delta_operations(py::module_& module) {
  static PyMethodDef methods[] = {
      {"gated_delta_update", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&py_gated_delta_update)),
       METH_FASTCALL | METH_KEYWORDS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace flashport::python
