// The operations of the library as Python functions that take every argument by position: the package's own functions,
// with their keywords and docstrings, are the interface. They bypass pybind11's argument dispatch, which alone would
// cost a third of a call's budget.
#pragma once

#include <pybind11/pybind11.h>

namespace flashport::python {

void define_operations(pybind11::module_& module);
void define_gated_delta_operations(pybind11::module_& module);

// Sets the Python error that stands for the C++ exception in flight.
void set_python_error();

}  // namespace flashport::python
