// The extension module flashport._core. The operations are in operations.cpp and gated_delta_operations.cpp, arguments
// in arguments.cpp, arrays in array_types.cpp, call.cpp and device_array.cpp; here is what is asked of the library
// rather than run: backends, kernels, support.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <limits>
#include <string>

#include <flashport/backend.h>
#include <flashport/decode.h>
#include <flashport/error.h>
#include <flashport/gated_delta.h>

#include "bindings/python/arguments.h"
#include "bindings/python/call.h"
#include "bindings/python/device_array.h"
#include "bindings/python/direct_calls.h"
#include "bindings/python/operations.h"
#include "bindings/python/read_memory.h"

namespace py = pybind11;

namespace flashport::python {
namespace {

// Queries of Python's arguments, in the order of the package's functions but for the target, which comes first.
DecodeQuery decode_query(const char* function, const py::args& a) {
  DecodeQuery query;
  query.target = text_argument(function, "target", a[0]);
  query.q_dtype = dtype_argument(function, "q_dtype", a[1]);
  query.kv = a[2].is_none() ? dtype_name(query.q_dtype) : type_name_argument(function, "kv", a[2]);
  const auto integer = [&](const char* name, int place) {
    return integer_argument(function, name, py::object(a[place]).ptr());
  };
  query.head_dim_qk = integer("head_dim", 3);
  query.head_dim_v = a[4].is_none() ? query.head_dim_qk : integer("head_dim_v", 4);
  query.group_size = integer("group_size", 5);
  query.q_len = integer("q_len", 6);
  return query;
}

GatedDeltaQuery gated_delta_query(const char* function, const py::args& a) {
  GatedDeltaQuery query;
  query.target = text_argument(function, "target", a[0]);
  query.operation = static_cast<GatedDeltaOperation>(word_argument(function, "operation", a[1], {"update", "chunk"}));
  query.q_dtype = dtype_argument(function, "q_dtype", a[2]);
  query.state_dtype = dtype_argument(function, "state_dtype", a[3]);
  query.head_dim_k = integer_argument(function, "head_dim_k", py::object(a[4]).ptr());
  query.head_dim_v =
      a[5].is_none() ? query.head_dim_k : integer_argument(function, "head_dim_v", py::object(a[5]).ptr());
  query.state_layout = static_cast<StateLayout>(word_argument(function, "state_layout", a[6], {"vk", "kv"}));
  query.gate = static_cast<GateForm>(word_argument(function, "gate", a[7], {"head", "key", "any"}));
  return query;
}

py::object python_answer(const Support& support) { return py::make_tuple(support.supported, support.reason); }
py::object python_answer(const std::string& key) { return py::str(key); }

// What is asked of a query that `make_query` makes of Python's arguments.
template <class Query, class Answer>
void define_query(py::module_& module, const char* name, Query (*make_query)(const char*, const py::args&),
                  Answer (*answer)(const Query&)) {
  module.def(name, [=](const py::args& arguments) { return python_answer(answer(make_query(name, arguments))); });
}

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
  module.def("num_splits_heuristic", &heuristic_of);
  define_query(module, "supports", decode_query, supports);
  define_query(module, "which_kernel", decode_query, which_kernel);
  define_query(module, "supports_gated_delta", gated_delta_query, supports_gated_delta);
  define_query(module, "which_gated_delta_kernel", gated_delta_query, which_gated_delta_kernel);
}

}  // namespace flashport::python
