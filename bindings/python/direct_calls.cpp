#include "bindings/python/direct_calls.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "bindings/python/call.h"

namespace flashport::python {
namespace {

std::vector<const Operation*>& operations() {
  static auto* all = new std::vector<const Operation*>;
  return *all;
}

// A function of the package whose calls run an operation directly, as it was when it was handed over.
struct Direct {
  PyFunctionObject* function;
  PyObject *code, *by_position, *by_keyword;  // its body and its defaults, which somebody may replace
  vectorcallfunc python;                      // what its calls did before
  const Operation* operation;
  int positional;                      // parameters that may be given by position
  PyObject* names[kMostArguments];     // of the parameters, interned
  PyObject* defaults[kMostArguments];  // null: to be given
};

std::deque<Direct>& direct_functions() {  // they stay where they are
  static auto* all = new std::deque<Direct>;
  return *all;
}

// Fills `all`, an argument for each parameter. False if the call does not fit the signature.
bool bind(const Direct& direct, Arguments arguments, Py_ssize_t count, PyObject* keywords, PyObject** all) {
  if (count > direct.positional) return false;
  const int parameters = direct.operation->arguments;
  std::copy(arguments, arguments + count, all);
  std::copy(direct.defaults + count, direct.defaults + parameters, all + count);
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const auto* place = std::find(direct.names + count, direct.names + parameters, PyTuple_GET_ITEM(keywords, i));
    if (place == direct.names + parameters) return false;
    all[place - direct.names] = arguments[count + i];
  }
  return std::find(all, all + parameters, nullptr) == all + parameters;
}

// The operator of torch of the same name.
PyObject* run_operator(const Operation& operation, Arguments arguments) {
  py::tuple all(operation.arguments);
  for (int i = 0; i < operation.arguments; ++i) all[i] = py::reinterpret_borrow<py::object>(arguments[i]);
  return py::module_::import("flashport.torch.tracing").attr("run_operator")(operation.name, *all).release().ptr();
}

PyObject* run(const Operation& operation, Arguments arguments) {
  try {
    try {
      return operation.run(arguments).release().ptr();
    } catch (const NeedsOperator&) {
      PyErr_Clear();  // that of an export
      return run_operator(operation, arguments);
    }
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

// Whether the function is still what it was, but for a dictionary of defaults that was changed in place.
bool is_unchanged(const Direct& direct) {
  const PyFunctionObject* function = direct.function;
  return function->func_code == direct.code && function->func_defaults == direct.by_position &&
         function->func_kwdefaults == direct.by_keyword;
}

// Whether a tool watches the frames of Python functions, as debuggers and profilers do, or evaluates them in the
// interpreter's place, as torch.compile does (PEP 523).
bool frames_are_wanted() {
  const PyThreadState* state = PyThreadState_Get();
  return state->c_tracefunc != nullptr || state->c_profilefunc != nullptr ||
         _PyInterpreterState_GetEvalFrameFunc(state->interp) != _PyEval_EvalFrameDefault;
}

// Whether torch traces a program by running it, as torch.export does: flashport/torch/tracing.py's question, by what
// torch.compiler.is_compiling() goes by; where torch has no such thing, it may.
bool torch_traces() {
  static PyObject* const module_name = PyUnicode_InternFromString("torch.compiler");
  static PyObject* const flag_name = PyUnicode_InternFromString("_is_compiling_flag");
  static PyObject* variables = nullptr;  // of torch.compiler, once somebody has imported it
  if (variables == nullptr) {
    PyObject* module = PyImport_GetModule(module_name);
    if (module == nullptr || !PyModule_Check(module)) {
      Py_XDECREF(module);
      PyErr_Clear();
      return false;
    }
    variables = PyModule_GetDict(module);  // the module, and so this, lives on
  }
  return PyDict_GetItemWithError(variables, flag_name) != Py_False;
}

PyObject* call_directly(PyObject* function, Arguments arguments, std::size_t count_and_flag, PyObject* keywords) {
  const auto& direct = *std::find_if(direct_functions().begin(), direct_functions().end(), [&](const Direct& each) {
    return reinterpret_cast<PyObject*>(each.function) == function;
  });
  const Operation& operation = *direct.operation;
  PyObject* all[kMostArguments];
  const bool whole = is_unchanged(direct) &&
                     bind(direct, arguments, PyVectorcall_NARGS(count_and_flag), keywords, all) &&
                     (operation.made_in_python < 0 || all[operation.made_in_python] != Py_None) &&
                     !frames_are_wanted() && !torch_traces();
  return whole ? run(operation, all) : direct.python(function, arguments, count_and_flag, keywords);
}

void set_vectorcall(PyFunctionObject* function, vectorcallfunc call) {
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(function, call);
#else
  function->vectorcall = call;
#endif
}

void add_function(py::module_& module, PyMethodDef* method) {
  const py::object name = module.attr("__name__");
  PyObject* function = PyCFunction_NewEx(method, nullptr, name.ptr());
  if (function == nullptr) throw py::error_already_set();
  module.attr(method->ml_name) = py::reinterpret_steal<py::object>(function);
}

}  // namespace

PyObject* run_by_position(const Operation& operation, Arguments arguments, Py_ssize_t count) {
  if (count == operation.arguments) return run(operation, arguments);
  PyErr_Format(PyExc_TypeError, "%s: expected %d arguments by position, got %zd", operation.name, operation.arguments,
               count);
  return nullptr;
}

void add_operation(py::module_& module, const Operation& operation, PyMethodDef* method) {
  operations().push_back(&operation);
  add_function(module, method);
}

namespace {

PyObject* run_kernel(PyObject*, Arguments arguments, Py_ssize_t count) {
  const char* name = count > 0 ? PyUnicode_AsUTF8(arguments[0]) : nullptr;
  if (name == nullptr) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_TypeError, "run_kernel: expected the name of an operation");
    return nullptr;
  }
  const auto found = std::find_if(operations().begin(), operations().end(),
                                  [&](const Operation* each) { return std::strcmp(name, each->name) == 0; });
  if (found == operations().end()) return PyErr_Format(PyExc_TypeError, "run_kernel: no operation \"%s\"", name);
  const KernelScope scope;
  return run_by_position(**found, arguments + 1, count - 1);
}

py::object direct(py::object function) {
  if (!PyFunction_Check(function.ptr())) throw py::type_error("direct: expected a Python function");
  auto* python = reinterpret_cast<PyFunctionObject*>(function.ptr());
  const auto name = py::cast<std::string>(function.attr("__name__"));
  const auto found =
      std::find_if(operations().begin(), operations().end(), [&](const Operation* each) { return name == each->name; });
  const py::object code = function.attr("__code__");
  const int positional = py::cast<int>(code.attr("co_argcount"));
  const int parameters = positional + py::cast<int>(code.attr("co_kwonlyargcount"));
  if (found == operations().end() || parameters != (*found)->arguments) {
    throw py::type_error("direct: no operation \"" + name + "\" of " + std::to_string(parameters) + " arguments");
  }
  PyObject *last = python->func_defaults, *by_keyword = python->func_kwdefaults;
  const Py_ssize_t without = positional - (last == nullptr ? 0 : PyTuple_GET_SIZE(last));
  Direct result{python, python->func_code, last, by_keyword, python->vectorcall, *found, positional, {}, {}};
  function.inc_ref();
  for (PyObject* kept : {python->func_code, last, by_keyword}) Py_XINCREF(kept);
  const auto names = py::cast<py::tuple>(code.attr("co_varnames"));
  for (int i = 0; i < parameters; ++i) {
    PyObject*& value = result.defaults[i];
    result.names[i] = py::object(names[i]).release().ptr();
    if (i >= positional) {
      if (by_keyword != nullptr) value = PyDict_GetItemWithError(by_keyword, result.names[i]);
    } else if (i >= without) {
      value = PyTuple_GET_ITEM(last, i - without);
    }
    Py_XINCREF(value);
  }
  direct_functions().push_back(result);
  set_vectorcall(python, call_directly);
  return function;
}

}  // namespace

void define_direct_calls(py::module_& module) {
  module.def("direct", &direct, py::arg("function"));
  static PyMethodDef method = {"run_kernel", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_kernel)),
                               METH_FASTCALL, nullptr};
  add_function(module, &method);
}

}  // namespace flashport::python
