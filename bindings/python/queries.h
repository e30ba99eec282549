// What is asked of the library about calls that are not made.
#pragma once

#include <pybind11/pybind11.h>

namespace flashport::python {

// Adds to the module supports(operation, options), which_kernel(operation, options) and explain(operation, options),
// whose options are a dict of those that the operation has, and kv_format_blocks(): of each cache format's name, the
// values of a block and the elements of a tensor that carry them.
void define_queries(pybind11::module_& module);

}  // namespace flashport::python
