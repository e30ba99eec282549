#include "bindings/python/direct_calls.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include <flashport/error.h>

#include "bindings/python/array_types.h"

namespace flashport::python {
namespace {

constexpr int kMostArguments = 32;

std::vector<const Operation*>& operations() {
  static auto* all = new std::vector<const Operation*>;
  return *all;
}

// A function of the package whose calls run an operation directly.
struct Direct {
  PyObject* function;
  vectorcallfunc python;  // what its calls did before
  const Operation* operation;
  int positional;                      // parameters that may be given by position
  PyObject* names[kMostArguments];     // of the parameters, interned
  PyObject* defaults[kMostArguments];  // null: to be given
};

std::vector<Direct>& direct_functions() {
  static auto* all = new std::vector<Direct>;
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

PyObject* run(const Operation& operation, Arguments arguments) {
  try {
    return operation.run(arguments).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

// Whether somebody, as torch.compile does, evaluates the frames of Python functions in the interpreter's place (PEP
// 523).
bool frames_are_wanted() {
  return _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) != _PyEval_EvalFrameDefault;
}

PyObject* call_directly(PyObject* function, Arguments arguments, std::size_t count_and_flag, PyObject* keywords) {
  const auto& direct = *std::find_if(direct_functions().begin(), direct_functions().end(),
                                     [&](const Direct& each) { return each.function == function; });
  const Operation& operation = *direct.operation;
  PyObject* all[kMostArguments];
  const bool whole = bind(direct, arguments, PyVectorcall_NARGS(count_and_flag), keywords, all) &&
                     (operation.made_in_python < 0 || all[operation.made_in_python] != Py_None) &&
                     !type_info(Py_TYPE(all[0])).traceable && !frames_are_wanted();
  return whole ? run(operation, all) : direct.python(function, arguments, count_and_flag, keywords);
}

void set_vectorcall(PyFunctionObject* function, vectorcallfunc call) {
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(function, call);
#else
  function->vectorcall = call;
#endif
}

}  // namespace

void set_python_error() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const NotSupportedError& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

PyObject* run_by_position(const Operation& operation, Arguments arguments, Py_ssize_t count) {
  if (count == operation.arguments) return run(operation, arguments);
  PyErr_Format(PyExc_TypeError, "%s: expected %d arguments by position, got %zd", operation.name, operation.arguments,
               count);
  return nullptr;
}

void add_operation(py::module_& module, const Operation& operation, PyMethodDef* method) {
  operations().push_back(&operation);
  module.attr(operation.name) = py::reinterpret_steal<py::object>(PyCFunction_New(method, nullptr));
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
  if (found == operations().end() || parameters != (*found)->arguments || parameters > kMostArguments) {
    throw py::type_error("direct: no operation \"" + name + "\" of " + std::to_string(parameters) + " arguments");
  }
  Direct result{function.inc_ref().ptr(), python->vectorcall, *found, positional, {}, {}};
  const auto names = py::cast<py::tuple>(code.attr("co_varnames"));
  const py::object by_position = function.attr("__defaults__"), by_keyword = function.attr("__kwdefaults__");
  const auto last = by_position.is_none() ? py::tuple() : py::cast<py::tuple>(by_position);
  for (int i = 0; i < parameters; ++i) {
    const py::object parameter = names[i];
    result.names[i] = parameter.inc_ref().ptr();
    const int from_end = positional - static_cast<int>(last.size());
    if (i < positional && i >= from_end) result.defaults[i] = py::object(last[i - from_end]).inc_ref().ptr();
    if (i < positional || by_keyword.is_none()) continue;
    const auto defaults = py::cast<py::dict>(by_keyword);
    if (defaults.contains(parameter)) result.defaults[i] = py::object(defaults[parameter]).inc_ref().ptr();
  }
  direct_functions().push_back(result);
  set_vectorcall(python, call_directly);
  return function;
}

}  // namespace flashport::python
