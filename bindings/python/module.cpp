// The extension module flashport._core. The operations are in operations.cpp, attention_operations.cpp and
// gated_delta_operations.cpp, arguments in arguments.cpp, arrays in array_types.cpp, call.cpp and device_array.cpp,
// supports(), which_kernel() and explain() in queries.cpp; here are backends and kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <limits>
#include <string>

#include <flashport/backend.h>
#include <flashport/decode.h>
#include <flashport/error.h>

#include "bindings/python/arguments.h"
#include "bindings/python/call.h"
#include "bindings/python/check_apart.h"
#include "bindings/python/device_array.h"
#include "bindings/python/direct_calls.h"
#include "bindings/python/operations.h"
#include "bindings/python/queries.h"
#include "bindings/python/read_memory.h"
#include "bindings/python/tensors_form.h"

namespace py = pybind11;

namespace flashport::python {
namespace {

int heuristic_of(const py::args& a) {
  constexpr char kFunction[] = "num_splits_heuristic";
  const auto count = [&](const char* name, int place) {
    const std::int64_t value = integer_argument(kFunction, name, py::object(a[place]).ptr());
    constexpr std::int64_t kMost = std::numeric_limits<int>::max();
    if (value < 0 || value > kMost) {
      fail_value(kFunction, name, "must be from 0 to " + std::to_string(kMost) + ", got " + std::to_string(value));
    }
    return static_cast<int>(value);
  };
  return num_splits_heuristic(count("batch_nheads_mblocks", 0), count("num_SMs", 1), count("num_n_blocks", 2),
                              count("max_splits", 3));
}

void define_backends(py::module_& module) {
  py::class_<DeviceProperties>(module, "DeviceProperties", "A device that a backend found.")
      .def_property_readonly("device", [](const DeviceProperties& self) { return device_name(self.device); })
      .def_readonly("name", &DeviceProperties::name)
      .def_readonly("target", &DeviceProperties::target)
      .def_readonly("multiprocessors", &DeviceProperties::multiprocessors)
      .def_readonly("memory_bytes", &DeviceProperties::memory_bytes)
      .def("__repr__", [](const DeviceProperties& self) {
        return "DeviceProperties(" + device_name(self.device) + ", \"" + self.name + "\", target=\"" + self.target +
               "\")";
      });
  py::class_<BackendStatus>(module, "BackendStatus", "A backend of this build, or why it is not available.")
      .def_readonly("name", &BackendStatus::name)
      .def_readonly("available", &BackendStatus::available)
      .def_readonly("detail", &BackendStatus::detail)
      .def_readonly("targets", &BackendStatus::targets)
      .def_readonly("devices", &BackendStatus::devices)
      .def("__repr__", [](const BackendStatus& self) {
        return "BackendStatus(\"" + self.name + "\", available=" + (self.available ? "True" : "False") + ", \"" +
               self.detail + "\")";
      });
  module.def("backends", &backends);
  module.def("kernel_keys", &kernel_keys, py::arg("target"));
  module.def("set_multiprocessor_limit", &set_multiprocessor_limit, py::arg("count"));
  module.def("version", &version);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled half of flashport; use the functions of the package.";
  py::register_exception_translator([](std::exception_ptr error) {
    if (!error) return;
    try {
      std::rethrow_exception(error);
    } catch (const Error&) {
      set_python_error();
    }
  });

  define_operations(module);
  define_direct_calls(module);
  define_device_array(module);
  define_backends(module);
  define_read_memory(module);
  define_check_apart(module);
  define_tensors_form(module);
  module.def("num_splits_heuristic", &heuristic_of);
  define_queries(module);
}

}  // namespace flashport::python
