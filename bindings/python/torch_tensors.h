// What torch says of its tensors before the library reads or writes them, and what it is told afterwards. The module
// is not linked with torch: it takes torch's own functions the first time that somebody hands in one of its tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include <flashport/types.h>

namespace flashport::python {

namespace py = pybind11;

// Thrown before anything is written, where a call belongs to the operators of torch.ops.flashport: torch traces a
// program or transforms it, or a tensor stands for others.
struct NeedsOperator {};

// While one lives, the thread runs the kernel of such an operator, which no call goes back to.
class KernelScope {
 public:
  KernelScope();
  ~KernelScope();
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;
  static bool entered();

 private:
  bool outer_;
};

// What no argument may have counts as it.
constexpr bool is_floating(DType dtype) {
  switch (dtype) {
    case DType::kInt32:
    case DType::kInt64:
    case DType::kUInt32:
    case DType::kUInt8: return false;
    default: return true;
  }
}

class Torch {
 public:
  // Needs the module torch to have been imported.
  static const Torch& get();

  [[nodiscard]] bool is_tensor_type(PyTypeObject* type) const;
  // Whether tensors of this type, which is one of tensors, stand for others: their operators run code of Python.
  [[nodiscard]] bool stands_for_others(PyTypeObject* type) const;

  // Whether torch records gradients.
  [[nodiscard]] bool is_grad_enabled() const;
  // Whether somebody watches all operators of torch, as make_fx and FakeTensorMode do.
  [[nodiscard]] bool has_dispatch_mode() const;
  // Whether torch.autograd.forward_ad.dual_level() is entered.
  [[nodiscard]] bool has_dual_level() const;
  // Whether a function runs that is transformed, as vmap and grad of torch.func do: its tensors may have no memory.
  [[nodiscard]] bool transforms() const;
  [[nodiscard]] bool requires_grad(PyObject* tensor) const;
  // Whether its elements have the other sign in memory.
  [[nodiscard]] bool is_negated(PyObject* tensor) const;
  // Lets autograd know that these were written; what has no version, as inference tensors, is left alone.
  void increment_versions(PyObject* const* tensors, int count) const;

  // A DLPack capsule, with no wait for any stream; null with the Python error set if torch cannot make it. `as` is
  // set where torch does not export the element type and another one carries it.
  PyObject* export_capsule(PyObject* tensor, std::optional<DType>& as) const;
  // torch.empty on the device of `like`.
  [[nodiscard]] py::object empty(PyObject* like, DType dtype, const std::int64_t* shape, int rank) const;

 private:
  Torch();

  // A function of torch of one argument, or of none, which null stands for; called by its address where that can be.
  struct Function {
    PyObject* callable;
    PyCFunction address;
    Function(py::object function, int flags);
    py::object operator()(PyObject* argument) const;
  };
  // An attribute that torch computes in C.
  struct Attribute {
    PyGetSetDescrObject* descriptor;
    explicit Attribute(py::object found);
    [[nodiscard]] py::object of(PyObject* tensor) const;
  };

  py::module_ torch_, internal_;
  Function is_grad_enabled_, dispatch_modes_, increment_version_;
  Attribute requires_grad_, dtype_;
  PyObject *to_dlpack_, *no_dispatch_, *is_neg_;
  PyObject *forward_ad_, *current_level_;  // the variables of torch.autograd.forward_ad, and the name of one
  PyObject *fp8_e4m3_, *fp8_e4m3fnuz_, *fp8_e5m2_, *uint8_;
  PyObject *zero_, *minus_one_;  // Python has one object for each small integer
};

}  // namespace flashport::python
