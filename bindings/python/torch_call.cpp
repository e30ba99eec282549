// What a call does with tensors of torch alone: gradients, programs that torch traces, and a torch without DLPack's
// exchange API (before 2.10).
#include "bindings/python/call.h"

namespace flashport::python {
namespace {

// Whether this may be the imaginary part of a conjugate, whose elements torch leaves in memory with the other sign:
// DLPack does not say so, but the elements of such a view lie at odd places of memory, counted in elements. To ask
// torch about each tensor takes some 100 ns. torch's private functions make such views elsewhere, which this does not
// see.
bool may_be_negated(const TensorView& view) {
  if (reinterpret_cast<std::uintptr_t>(view.data) / static_cast<std::uintptr_t>(element_size(view.dtype)) % 2 == 0) {
    return false;
  }
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    if (view.shape[axis] > 1 && view.strides[axis] % 2 != 0) return false;
  }
  return true;
}

}  // namespace

void Call::look_at_torch() {
  torch_ = &Torch::get();
  if (role_ == TorchRole::kQuestion) return;
  // The operator also refuses to lose the tangents of forward-mode differentiation.
  if ((torch_->has_dispatch_mode() || torch_->has_dual_level()) && !KernelScope::entered()) throw NeedsOperator{};
  records_gradients_ = role_ == TorchRole::kOperator && torch_->is_grad_enabled();
}

void Call::after_export(const char* name, PyObject* object, bool writes, const TensorView& view) {
  if (is_floating(view.dtype)) {  // no other element has a negative bit or a gradient
    if (may_be_negated(view)) refuse_negated(name, object);
    if (records_gradients_ && torch_->requires_grad(object)) refuse_gradient(name, object, writes);
  }
  if (writes) written_.at(static_cast<std::size_t>(written_count_++)) = object;
}

void Call::refuse_negated(const char* name, PyObject* tensor) const {
  if (!torch_->is_negated(tensor)) return;
  fail_type(name,
            "must not be a view with torch's negative bit, whose elements have the other sign in memory; pass its "
            "resolve_neg()");
}

void Call::refuse_gradient(const char* name, PyObject* object, bool writes) const {
  const py::object error = py::module_::import("flashport.torch.gradients")
                               .attr("refusal")(function_, name, py::reinterpret_borrow<py::object>(object), writes);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

void Call::explain_no_memory(const TypeInfo& info) const {
  const py::error_scope kept;
  if (info.library != Library::kTorch || role_ == TorchRole::kQuestion || KernelScope::entered()) return;
  if (torch_->transforms()) throw NeedsOperator{};
}

// torch's __dlpack__ would refuse a parameter also where no gradient is asked for, and make its stream wait for ours.
void Call::view_of_tensor(const char* name, PyObject* object, const TypeInfo& info, TensorView& to) {
  std::optional<DType> as;
  const auto capsule = py::reinterpret_steal<py::object>(torch_->export_capsule(object, as));
  if (!capsule) {
    explain_no_memory(info);
    fail_export(name, object);
  }
  auto* tensor = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (tensor == nullptr) throw py::error_already_set();
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  borrowed_.push_back({tensor, false});
  if (tensor->tensor.data == nullptr) explain_no_memory(info);
  convert(name, tensor->tensor, to, as);
  if (to.device.kind != DeviceKind::kCpu) find_stream(info, tensor->tensor.device);
}

}  // namespace flashport::python
