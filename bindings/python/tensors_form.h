// What checks of a call look at in its tensors, as one key.
#pragma once

#include <pybind11/pybind11.h>

namespace flashport::python {

void define_tensors_form(pybind11::module_& module);

}  // namespace flashport::python
