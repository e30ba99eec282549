#include "bindings/python/tensors_form.h"

#include <cstdint>
#include <cstring>

#include "bindings/python/array_types.h"

namespace flashport::python {
namespace {

constexpr int kMostTensors = 16;
constexpr int kMostBytes = kMostTensors * (2 + static_cast<int>(sizeof(dlpack::Device) + sizeof(dlpack::DataType)) +
                                           2 * kMaxRank * static_cast<int>(sizeof(std::int64_t)));

class Form {
 public:
  template <class T>
  void add(const T* values, int count = 1) {
    std::memcpy(bytes_ + size_, values, sizeof(T) * static_cast<std::size_t>(count));
    size_ += static_cast<int>(sizeof(T)) * count;
  }
  // False for what has no table of DLPack's functions, or more axes than any argument.
  bool add_tensor(PyObject* object) {
    dlpack::Tensor tensor{};
    std::int8_t rank = -1;  // None
    if (object == Py_None) return add(&rank), true;
    const dlpack::ExchangeApi* exchange = type_info(Py_TYPE(object)).exchange;
    if (exchange == nullptr || exchange->export_view == nullptr) return false;
    if (exchange->export_view(object, &tensor) != 0) return PyErr_Clear(), false;
    if (tensor.rank > kMaxRank || tensor.strides == nullptr) return false;
    rank = static_cast<std::int8_t>(tensor.rank);
    add(&rank);
    add(&tensor.device);
    add(&tensor.dtype);
    add(tensor.shape, tensor.rank);
    add(tensor.strides, tensor.rank);
    return true;
  }
  [[nodiscard]] pybind11::bytes bytes() const { return {bytes_, static_cast<std::size_t>(size_)}; }

 private:
  char bytes_[kMostBytes];
  int size_ = 0;
};

pybind11::object tensors_form(const pybind11::tuple& tensors) {
  Form form;
  if (tensors.size() > kMostTensors) return pybind11::none();
  for (const pybind11::handle tensor : tensors) {
    if (!form.add_tensor(tensor.ptr())) return pybind11::none();
  }
  return form.bytes();
}

}  // namespace

void define_tensors_form(pybind11::module_& module) {
  module.def("tensors_form", &tensors_form, pybind11::arg("tensors"), pybind11::pos_only());
}

}  // namespace flashport::python
