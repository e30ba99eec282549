// The operations of the library, as Python reaches them.
#pragma once

#include <pybind11/pybind11.h>

namespace flashport::python {

void define_operations(pybind11::module_& module);
void define_gated_delta_operations(pybind11::module_& module);
void define_attention_operations(pybind11::module_& module);
void define_mixed_operations(pybind11::module_& module);

}  // namespace flashport::python
