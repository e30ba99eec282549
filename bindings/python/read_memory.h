// A plain streaming read of an array: the ceiling that benchmarks hold their rates against.
#pragma once

#include <pybind11/pybind11.h>

namespace flashport::python {

void define_read_memory(pybind11::module_& module);

}  // namespace flashport::python
