// How Python reaches an operation: by a function of this module that takes every argument by position, and straight
// from calls of the package's function of the same name, whose parameters are the same in the same order. Both bypass
// pybind11's argument dispatch, and the second the frame of the Python function: each alone would cost a fifth to a
// third of a call's budget.
#pragma once

#include <pybind11/pybind11.h>

namespace flashport::python {

namespace py = pybind11;

using Arguments = PyObject* const*;

// Room for the arguments of any operation; add_operation() asserts that it suffices.
inline constexpr int kMostArguments = 48;

struct Operation {
  const char* name;
  py::object (*run)(Arguments);  // None stands for an optional argument left out
  int arguments;
  int made_in_python = -1;  // an argument that the package's function makes where it is None
};

// Null with the Python error set if it fails.
PyObject* run_by_position(const Operation& operation, Arguments arguments, Py_ssize_t count);

// Adds the method to the module, and the operation to those that direct() knows.
void add_operation(py::module_& module, const Operation& operation, PyMethodDef* method);

template <const Operation& kOperation>
void add_operation(py::module_& module) {
  static_assert(kOperation.arguments <= kMostArguments, "raise kMostArguments");
  PyObject* (*const function)(PyObject*, Arguments, Py_ssize_t) = [](PyObject*, Arguments arguments, Py_ssize_t count) {
    return run_by_position(kOperation, arguments, count);
  };
  static PyMethodDef method = {kOperation.name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
                               METH_FASTCALL, nullptr};
  add_operation(module, kOperation, &method);
}

// Adds to the module direct(), and run_kernel(name, ...), which runs an operation as the kernel of the operator of
// torch of that name.
//
// direct() is a decorator of the package's functions: calls of `function` run the operation of its name without a
// Python frame, as PyFunction_SetVectorcall has it. Its body still runs for what it alone can do: to report arguments
// that do not fit its signature, to make arguments, to serve torch while that traces a program, and tools that watch
// frames or evaluate them; also once it has been given another body or other defaults. (Python 3.11
// inlines calls of Python functions and so takes the body's way, except from C and with starred arguments.)
void define_direct_calls(py::module_& module);

}  // namespace flashport::python
