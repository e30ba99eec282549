// The check of check_outputs_apart() over arrays by name; arguments that are None were not given.
#include "bindings/python/check_apart.h"

#include <array>
#include <cstddef>
#include <span>
#include <string>

#include "bindings/python/call.h"
#include "common/host/arguments.h"
#include "common/host/check.h"

namespace flashport::python {
namespace {

struct Given {
  std::array<std::string, kMostArguments> names;
  std::array<TensorView, kMostArguments> views;
  std::array<Argument, kMostArguments> arguments;
  std::size_t count = 0;
};

void add(Call& call, const py::dict& arrays, Access access, Given& given) {
  for (const auto& [name, array] : arrays) {
    if (array.is_none()) continue;
    if (given.count == kMostArguments) throw py::value_error("check_apart: too many arrays");
    const std::size_t i = given.count++;
    given.names[i] = name.cast<std::string>();
    call.input(given.names[i].c_str(), array.ptr(), given.views[i]);
    given.arguments[i] = {&given.views[i], given.names[i].c_str(), {}, access, Strides::kAny, {}, {}};
  }
}

void check_apart(const std::string& function, const py::dict& outputs, const py::dict& inputs) {
  Call call(function.c_str(), Py_None, TorchRole::kQuestion);
  Given given;
  add(call, outputs, kWritten, given);
  add(call, inputs, kRead, given);
  check_outputs_apart(Check(function.c_str()), std::span<const Argument>(given.arguments.data(), given.count));
}

}  // namespace

void define_check_apart(py::module_& module) {
  module.def("check_apart", &check_apart, py::arg("function"), py::arg("outputs"), py::arg("inputs"));
}

}  // namespace flashport::python
