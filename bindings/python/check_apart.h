// Whether outputs of calls that Python composes share memory with other arguments, which no single call sees.
#pragma once

#include <pybind11/pybind11.h>

namespace flashport::python {

void define_check_apart(pybind11::module_& module);

}  // namespace flashport::python
