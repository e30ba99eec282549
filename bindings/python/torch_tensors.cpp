#include "bindings/python/torch_tensors.h"

#include <string>

namespace flashport::python {
namespace {

thread_local bool in_kernel = false;

// Borrowed tensors for a function that takes an iterable. It lives on the stack: nothing is allocated.
struct TensorIterator {
  PyObject base;
  PyObject* const* next;
  PyObject* const* end;

  static PyObject* take_next(PyObject* self) {
    auto* iterator = reinterpret_cast<TensorIterator*>(self);
    return iterator->next == iterator->end ? nullptr : Py_NewRef(*iterator->next++);
  }
};
PyTypeObject iterator_type = [] {
  PyTypeObject type{};
  type.ob_base = PyVarObject{PyObject_HEAD_INIT(nullptr) 0};
  type.tp_name = "flashport._core.TensorIterator";
  type.tp_basicsize = sizeof(TensorIterator);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  type.tp_iter = PyObject_SelfIter;
  type.tp_iternext = TensorIterator::take_next;
  return type;
}();

PyObject* kept(py::object object) { return object.release().ptr(); }

}  // namespace

KernelScope::KernelScope() : outer_(in_kernel) { in_kernel = true; }
KernelScope::~KernelScope() { in_kernel = outer_; }
bool KernelScope::entered() { return in_kernel; }

Torch::Function::Function(py::object function, int flags) : callable(kept(std::move(function))), address(nullptr) {
  if (PyCFunction_CheckExact(callable) && PyCFunction_GET_FLAGS(callable) == flags) {
    address = PyCFunction_GET_FUNCTION(callable);
  }
}

py::object Torch::Function::operator()(PyObject* argument) const {
  PyObject* answer = address != nullptr ? address(PyCFunction_GET_SELF(callable), argument)
                                        : PyObject_CallFunctionObjArgs(callable, argument, nullptr);
  if (answer == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(answer);
}

Torch::Attribute::Attribute(py::object found) {
  if (Py_TYPE(found.ptr()) != &PyGetSetDescr_Type) throw py::type_error("torch.Tensor has no attributes in C");
  descriptor = reinterpret_cast<PyGetSetDescrObject*>(kept(std::move(found)));
}

py::object Torch::Attribute::of(PyObject* tensor) const {
  PyObject* value = descriptor->d_getset->get(tensor, descriptor->d_getset->closure);
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

const Torch& Torch::get() {
  static const Torch* instance = new Torch;  // outlives the interpreter's teardown
  return *instance;
}

Torch::Torch()
    : torch_(py::module_::import("torch")),
      internal_(torch_.attr("_C")),
      is_grad_enabled_(internal_.attr("is_grad_enabled"), METH_NOARGS),
      dispatch_modes_(internal_.attr("_len_torch_dispatch_stack"), METH_NOARGS),
      increment_version_(internal_.attr("_increment_version"), METH_O),
      requires_grad_(torch_.attr("Tensor").attr("requires_grad")),
      dtype_(torch_.attr("Tensor").attr("dtype")),
      to_dlpack_(kept(internal_.attr("_to_dlpack"))),
      no_dispatch_(kept(torch_.attr("Tensor").attr("__torch_dispatch__"))),
      is_neg_(PyUnicode_InternFromString("is_neg")),
      forward_ad_(PyModule_GetDict(kept(py::module_::import("torch.autograd.forward_ad")))),
      current_level_(PyUnicode_InternFromString("_current_level")),
      fp8_e4m3_(kept(torch_.attr("float8_e4m3fn"))),
      fp8_e4m3fnuz_(kept(torch_.attr("float8_e4m3fnuz"))),
      fp8_e5m2_(kept(torch_.attr("float8_e5m2"))),
      uint8_(kept(torch_.attr("uint8"))),
      zero_(PyLong_FromLong(0)),
      minus_one_(PyLong_FromLong(-1)) {
  if (PyType_Ready(&iterator_type) < 0) throw py::error_already_set();
}

bool Torch::is_tensor_type(PyTypeObject* type) const {
  return PyType_IsSubtype(type, requires_grad_.descriptor->d_common.d_type) != 0;
}

bool Torch::stands_for_others(PyTypeObject* type) const {
  return py::handle(reinterpret_cast<PyObject*>(type)).attr("__torch_dispatch__").ptr() != no_dispatch_;
}

bool Torch::is_grad_enabled() const { return is_grad_enabled_(nullptr).ptr() == Py_True; }

bool Torch::has_dispatch_mode() const { return dispatch_modes_(nullptr).ptr() != zero_; }

bool Torch::has_dual_level() const {
  PyObject* level = PyDict_GetItemWithError(forward_ad_, current_level_);  // borrowed; -1 outside of any
  return level != minus_one_ && level != nullptr && PyLong_AsLong(level) >= 0;
}

bool Torch::transforms() const { return !internal_.attr("_functorch").attr("maybe_current_level")().is_none(); }

bool Torch::requires_grad(PyObject* tensor) const { return requires_grad_.of(tensor).ptr() == Py_True; }

bool Torch::is_negated(PyObject* tensor) const {
  PyObject* arguments[] = {tensor};
  const auto answer = py::reinterpret_steal<py::object>(PyObject_VectorcallMethod(is_neg_, arguments, 1, nullptr));
  if (!answer) throw py::error_already_set();
  return answer.ptr() == Py_True;
}

void Torch::increment_versions(PyObject* const* tensors, int count) const {
  TensorIterator all{{}, tensors, tensors + count};
  increment_version_(PyObject_Init(&all.base, &iterator_type));
}

PyObject* Torch::export_capsule(PyObject* tensor, std::optional<DType>& as) const {
  const PyObject* dtype = dtype_.of(tensor).ptr();  // torch holds them all
  if (dtype == fp8_e4m3_) as = DType::kFp8E4M3;
  if (dtype == fp8_e4m3fnuz_) as = DType::kFp8E4M3Fnuz;
  if (dtype == fp8_e5m2_) as = DType::kFp8E5M2;
  if (!as) return PyObject_CallOneArg(to_dlpack_, tensor);
  const py::object bytes = py::handle(tensor).attr("detach")().attr("view")(py::handle(uint8_));
  return PyObject_CallOneArg(to_dlpack_, bytes.ptr());
}

py::object Torch::empty(PyObject* like, DType dtype, const std::int64_t* shape, int rank) const {
  py::tuple extents(rank);
  for (int axis = 0; axis < rank; ++axis) extents[axis] = py::int_(shape[axis]);
  return torch_.attr("empty")(extents, py::arg("dtype") = torch_.attr(dtype_name(dtype)),
                              py::arg("device") = py::handle(like).attr("device"));
}

}  // namespace flashport::python
