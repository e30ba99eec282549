// flashport._core.DeviceArray: a contiguous array on any device of any backend, for use where no array library is
// installed that knows the device. It speaks DLPack, so NumPy (on the host), PyTorch, CuPy and JAX can take it over.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include <flashport/types.h>

namespace flashport::python {

// Adds the class and the functions on devices to the module.
void define_device_array(pybind11::module_& module);

bool is_device_array_type(PyTypeObject* type);
TensorView device_array_view(PyObject* array);
pybind11::object make_device_array(const std::vector<std::int64_t>& shape, DType dtype, Device device);

// Blocks until all work on `stream` has ended; nothing to do on the CPU.
void synchronize(Device device, Stream stream);

}  // namespace flashport::python
