// The extension module flashport._core. The operations are in operations.cpp and gated_delta_operations.cpp, arrays in
// array_types.cpp, call.cpp and device_array.cpp; here is what is asked of the library rather than run: backends,
// kernels, support.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <initializer_list>
#include <string>

#include <flashport/backend.h>
#include <flashport/decode.h>
#include <flashport/error.h>
#include <flashport/gated_delta.h>

#include "bindings/python/call.h"
#include "bindings/python/device_array.h"
#include "bindings/python/direct_calls.h"
#include "bindings/python/operations.h"
#include "bindings/python/read_memory.h"

namespace py = pybind11;

namespace flashport::python {
namespace {

DecodeQuery decode_query(const std::string& target, const std::string& q_dtype, const std::string& kv,
                         std::int64_t head_dim_qk, std::int64_t head_dim_v, std::int64_t group_size,
                         std::int64_t q_len) {
  return {target, dtype_from_name(q_dtype, "q_dtype"), kv, head_dim_qk, head_dim_v, group_size, q_len};
}

// The place of a word among those that an argument may be.
int place_of(const char* name, const std::string& word, std::initializer_list<const char*> words) {
  std::string text = std::string(name) + " must be";
  int place = 0;
  for (const char* one : words) {
    if (word == one) return place;
    text += std::string(place++ == 0                              ? " \""
                        : place == static_cast<int>(words.size()) ? " or \""
                                                                  : ", \"") +
            one + "\"";
  }
  throw ValueError(text + ", got \"" + word + "\"");
}

GatedDeltaQuery gated_delta_query(const std::string& target, const std::string& operation, const std::string& q_dtype,
                                  const std::string& state_dtype, std::int64_t head_dim_k, std::int64_t head_dim_v,
                                  const std::string& state_layout, const std::string& gate) {
  return {target,
          static_cast<GatedDeltaOperation>(place_of("operation", operation, {"update", "chunk"})),
          dtype_from_name(q_dtype, "q_dtype"),
          dtype_from_name(state_dtype, "state_dtype"),
          head_dim_k,
          head_dim_v,
          static_cast<StateLayout>(place_of("state_layout", state_layout, {"vk", "kv"})),
          static_cast<GateForm>(place_of("gate", gate, {"head", "key", "any"}))};
}

// What is asked of a query that `make_query` makes of Python's arguments.
template <class Query, class... Arguments>
void define_query(py::module_& module, const char* name, Query (*make_query)(Arguments...),
                  Support (*answer)(const Query&)) {
  module.def(name, [=](Arguments... arguments) {
    const Support support = answer(make_query(arguments...));
    return py::make_tuple(support.supported, support.reason);
  });
}
template <class Query, class... Arguments>
void define_query(py::module_& module, const char* name, Query (*make_query)(Arguments...),
                  std::string (*answer)(const Query&)) {
  module.def(name, [=](Arguments... arguments) { return answer(make_query(arguments...)); });
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
  module.def("direct", &direct, py::arg("function"));
  define_device_array(module);
  define_backends(module);
  define_read_memory(module);
  module.def("num_splits_heuristic", &num_splits_heuristic);
  define_query(module, "supports", decode_query, supports);
  define_query(module, "which_kernel", decode_query, which_kernel);
  define_query(module, "supports_gated_delta", gated_delta_query, supports_gated_delta);
  define_query(module, "which_gated_delta_kernel", gated_delta_query, which_gated_delta_kernel);
}

}  // namespace flashport::python
