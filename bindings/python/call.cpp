// Array arguments: the exchange API where the type offers it (no Python code runs, nothing is allocated), else the
// __dlpack__ protocol. Streams follow the library that owns the first device array of the call.
#include "bindings/python/call.h"

#include <cstring>
#include <exception>
#include <new>
#include <string_view>

#include "bindings/python/device_array.h"

namespace flashport::python {
namespace {

struct Names {
  PyObject* dlpack = PyUnicode_InternFromString("__dlpack__");
  PyObject* dlpack_device = PyUnicode_InternFromString("__dlpack_device__");
  PyObject* stream_and_version = Py_BuildValue("(ss)", "stream", "max_version");
  PyObject* version = Py_BuildValue("(s)", "max_version");
  PyObject* stream = Py_BuildValue("(s)", "stream");
  PyObject* max_version = Py_BuildValue("(ii)", 1, 0);
};
const Names& names() {
  static const Names* instance = new Names;  // outlives the interpreter's teardown
  return *instance;
}

// The element types that NumPy gets from ml_dtypes, by name. DLPack export of them is refused.
struct ExtensionType {
  const char* name;
  const char* carrier;
  DType dtype;
};
constexpr ExtensionType kExtensionTypes[] = {
    {"bfloat16", "uint16", DType::kBFloat16},
    {"float8_e4m3fn", "uint8", DType::kFp8E4M3},
    {"float8_e4m3fnuz", "uint8", DType::kFp8E4M3Fnuz},
    {"float8_e5m2", "uint8", DType::kFp8E5M2},
};

}  // namespace

void set_python_error() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const ValueError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const NotSupportedError& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

Call::Call(const char* function, PyObject* stream, TorchRole role) : function_(function), role_(role) {
  if (stream == Py_None) return;
  stream_ = stream_handle(stream);
  has_stream_ = true;
}

Call::~Call() {
  for (const Borrowed& borrowed : borrowed_) {
    if (borrowed.versioned) {
      auto* tensor = static_cast<dlpack::ManagedTensorVersioned*>(borrowed.tensor);
      if (tensor->deleter != nullptr) tensor->deleter(tensor);
    } else {
      auto* tensor = static_cast<dlpack::ManagedTensor*>(borrowed.tensor);
      if (tensor->deleter != nullptr) tensor->deleter(tensor);
    }
  }
}

Stream Call::stream_handle(py::handle stream) const {
  py::object handle = py::reinterpret_borrow<py::object>(stream);
  for (const char* attribute : {"cuda_stream", "ptr", "handle"}) {
    if (PyLong_Check(handle.ptr())) break;
    if (py::object value = attribute_or_null(stream, attribute)) handle = std::move(value);
  }
  if (!PyLong_Check(handle.ptr())) {
    if (const py::object method = attribute_or_null(stream, "__cuda_stream__")) {
      const py::object given = method();
      if (PySequence_Check(given.ptr()) != 0 && py::len(given) == 2) handle = given[py::int_(1)];
      if (!PyLong_Check(handle.ptr())) {
        fail_type("stream",
                  "must have a __cuda_stream__() that gives (0, handle), got " + std::string(py::repr(given)));
      }
    }
  }
  if (!PyLong_Check(handle.ptr()) || PyBool_Check(handle.ptr())) {
    fail_type("stream", std::string("must be a stream or its integer handle, got ") + Py_TYPE(stream.ptr())->tp_name);
  }
  const unsigned long long value = PyLong_AsUnsignedLongLong(handle.ptr());
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
    clear_error();
    fail_value("stream", "must have a handle from 0 to 2**64 - 1, got " + std::string(py::str(handle)));
  }
  return static_cast<Stream>(value);
}

void Call::fill_view(const char* name, PyObject* object, bool writes, TensorView& to) {
  const TypeInfo& info = type_info(Py_TYPE(object));
  if (info.library == Library::kFlashport) {
    to = device_array_view(object);
    if (to.device.kind != DeviceKind::kCpu) find_stream(info, device_to_dlpack(to.device));
    return;
  }
  if (info.is_masked) {
    fail_type(name, "must not be a masked array, whose mask has no effect; pass its filled() or data");
  }
  const bool is_tensor = info.library == Library::kTorch;
  if (is_tensor) before_export(info);
  if (info.exchange != nullptr) {
    view_by_exchange(name, object, info, writes, to);
  } else if (is_tensor) {
    view_of_tensor(name, object, info, to);
  } else {
    view_by_capsule(name, object, info, writes, to);
  }
  if (is_tensor) after_export(name, object, writes, to);
}

void Call::view_by_exchange(const char* name, PyObject* object, const TypeInfo& info, bool writes, TensorView& to) {
  dlpack::Device device;
  // A borrowed view says nothing of writability; torch has no read-only tensors.
  if (info.exchange->export_view != nullptr && (!writes || info.library == Library::kTorch)) {
    dlpack::Tensor tensor;
    const bool exported = info.exchange->export_view(object, &tensor) == 0;
    if (!exported || tensor.data == nullptr) explain_no_memory(info);
    if (!exported) fail_export(name, object);
    convert(name, tensor, to);
    device = tensor.device;
  } else {
    dlpack::ManagedTensorVersioned* managed = nullptr;
    if (info.exchange->export_managed(object, &managed) != 0) fail_export(name, object);
    take_versioned(name, managed, to);
    device = managed->tensor.device;
  }
  if (to.device.kind != DeviceKind::kCpu) find_stream(info, device);
}

dlpack::Device Call::place_of(const char* name, PyObject* object, const TypeInfo& info) const {
  PyObject* arguments[] = {object};
  const auto place =
      py::reinterpret_steal<py::object>(PyObject_VectorcallMethod(names().dlpack_device, arguments, 1, nullptr));
  if (!place) fail_place(name, object, info);
  std::int32_t pair[2] = {};
  bool good = PyTuple_Check(place.ptr()) && PyTuple_GET_SIZE(place.ptr()) == 2;
  for (int i = 0; good && i < 2; ++i) {
    PyObject* part = PyTuple_GET_ITEM(place.ptr(), i);
    good = PyIndex_Check(part) != 0;  // the device type may be an enum's member
    if (!good) break;
    const Py_ssize_t value = PyNumber_AsSsize_t(part, nullptr);
    if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    pair[i] = static_cast<std::int32_t>(value);
    good = pair[i] == value;
  }
  if (good) return {pair[0], pair[1]};
  fail_type(name, "must have a __dlpack_device__() that gives (device type, index) as two integers, got " +
                      std::string(py::repr(place)));
}

void Call::fail_place(const char* name, PyObject* object, const TypeInfo& info) const {
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) fail_export(name, object);
  py::error_already_set error;
  if (attribute_or_null(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__dlpack_device__")) {  // the error is its own
    error.restore();
    fail_export(name, object);
  }
  const std::string type = Py_TYPE(object)->tp_name;
  if (info.library == Library::kJax) {
    fail_type(name, "must be an array with values, got " + type +
                        "; call it outside of what JAX traces, or through jax.pure_callback");
  }
  fail_type(name, "must be an array that speaks DLPack (NumPy, PyTorch, CuPy, JAX, ...), got " + type);
}

void Call::fail_device(const char* name, dlpack::Device device) const {
  fail_value(name, "must be in host, CUDA or ROCm memory, got DLPack device type " + std::to_string(device.type) +
                       "; pass a copy there");
}

void Call::view_by_capsule(const char* name, PyObject* object, const TypeInfo& info, bool writes, TensorView& to,
                           std::optional<DType> as) {
  const Names& n = names();
  const dlpack::Device device = place_of(name, object, info);
  py::object stream = py::none();
  const std::optional<Device> ours = device_from_dlpack(device);
  if (!ours) fail_device(name, device);
  const bool on_device = ours->kind != DeviceKind::kCpu;
  if (on_device) {
    find_stream(info, device);
    // In the protocol 0 is no CUDA stream; 1 is the legacy default stream.
    stream = py::int_(stream_ == 0 && device.type != dlpack::kRocm ? Stream{1} : stream_);
    // Such a library may hand the memory to someone else while our kernel still reads it.
    if (info.library != Library::kCupy && info.library != Library::kTorch) waits_ = true;
  } else if (info.library == Library::kJax) {
    py::handle(object).attr("block_until_ready")();
  }

  PyObject* capsule = nullptr;
  bool is_old = !info.versioned;
  if (!is_old) {
    PyObject* arguments[] = {object, nullptr, nullptr};
    if (on_device) {
      arguments[1] = stream.ptr();
      arguments[2] = n.max_version;
      capsule = PyObject_VectorcallMethod(n.dlpack, arguments, 1, n.stream_and_version);
    } else {
      arguments[1] = n.max_version;
      capsule = PyObject_VectorcallMethod(n.dlpack, arguments, 1, n.version);
    }
    if (capsule == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {
      PyErr_Clear();
      is_old = true;
    }
  }
  if (is_old) {
    PyObject* arguments[] = {object, stream.ptr()};
    capsule = PyObject_VectorcallMethod(n.dlpack, arguments, 1, on_device ? n.stream : nullptr);
    if (capsule != nullptr) const_cast<TypeInfo&>(info).versioned = false;
  }
  if (capsule == nullptr) {
    if (info.library == Library::kNumpy) return view_of_numpy(name, object, info, writes, to, as);
    fail_export(name, object);
  }

  const auto capsule_held = py::reinterpret_steal<py::object>(capsule);
  if (PyCapsule_IsValid(capsule, "dltensor_versioned") != 0) {
    auto* tensor = static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    PyCapsule_SetName(capsule, "used_dltensor_versioned");
    take_versioned(name, tensor, to, as);
  } else if (PyCapsule_IsValid(capsule, "dltensor") != 0) {
    auto* tensor = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    PyCapsule_SetName(capsule, "used_dltensor");
    borrowed_.push_back({tensor, false});
    convert(name, tensor->tensor, to, as);
  } else {
    fail_type(name, std::string("gave no DLPack capsule: ") + Py_TYPE(object)->tp_name);
  }
  if ((to.device.kind != DeviceKind::kCpu) != on_device) {
    fail_value(name, "must be on the device of its __dlpack_device__(), DLPack device type " +
                         std::to_string(device.type) + ", got memory on " + device_name(to.device));
  }
  if (writes && info.library == Library::kJax) {
    fail_value(name,
               "is written and must not be read-only, as arrays of JAX are; pass an array of NumPy or CuPy or a "
               "flashport.DeviceArray");
  }
}

void Call::view_of_numpy(const char* name, PyObject* object, const TypeInfo& info, bool writes, TensorView& to,
                         std::optional<DType> as) {
  const std::string refusal = take_error_text();
  const py::handle array = object;
  const py::object own = array.attr("dtype");
  const std::string dtype = py::str(own.attr("name"));
  for (const ExtensionType& type : kExtensionTypes) {
    if (dtype != type.name) continue;
    const py::object carried = array.attr("view")(type.carrier);
    return view_by_capsule(name, carried.ptr(), info, writes, to, type.dtype);
  }
  static constexpr std::string_view kKinds = "iufcb";
  static constexpr std::uint8_t kCodes[] = {dlpack::kInt, dlpack::kUInt, dlpack::kFloat, dlpack::kComplex,
                                            dlpack::kBool};
  const auto kind = kKinds.find(py::cast<char>(own.attr("kind")));
  Py_buffer buffer;
  if (kind == kKinds.npos || py::cast<int>(own.attr("isbuiltin")) != 1 ||
      PyObject_GetBuffer(object, &buffer, PyBUF_STRIDES) != 0) {
    if (PyErr_Occurred() != nullptr) clear_error();
    fail_type(name, "cannot be read through DLPack: " + refusal + " (element type " + std::string(py::str(own)) + ")");
  }
  struct Release {
    Py_buffer* buffer;
    ~Release() { PyBuffer_Release(buffer); }  // the caller's array keeps the memory
  } const release{&buffer};
  std::vector<std::int64_t> shape(buffer.shape, buffer.shape + buffer.ndim);
  std::vector<std::int64_t> strides(buffer.strides, buffer.strides + buffer.ndim);
  for (std::int64_t& stride : strides) {
    if (stride % buffer.itemsize != 0) {
      fail_value(name, "must have strides of whole elements, got " + std::to_string(stride) +
                           " bytes for elements of " + std::to_string(buffer.itemsize) + "; pass a copy");
    }
    stride /= buffer.itemsize;
  }
  dlpack::Tensor tensor{};
  tensor.data = buffer.buf;
  tensor.device = {dlpack::kCpu, 0};
  tensor.rank = buffer.ndim;
  tensor.dtype = {kCodes[kind], static_cast<std::uint8_t>(buffer.itemsize * 8), 1};
  tensor.shape = shape.data();
  tensor.strides = strides.data();
  convert(name, tensor, to, as);
  to.read_only = buffer.readonly != 0;
}

void Call::take_versioned(const char* name, dlpack::ManagedTensorVersioned* tensor, TensorView& to,
                          std::optional<DType> as) {
  borrowed_.push_back({tensor, true});
  if (tensor->version.major != dlpack::kMajorVersion) {
    fail_type(name, "comes as DLPack " + std::to_string(tensor->version.major) + ", expected major version 1");
  }
  convert(name, tensor->tensor, to, as);
  to.read_only = (tensor->flags & dlpack::kFlagReadOnly) != 0;
}

void Call::convert(const char* name, const dlpack::Tensor& tensor, TensorView& to, std::optional<DType> as) const {
  const std::optional<DType> dtype = as ? as : dtype_from_dlpack(tensor.dtype);
  if (!dtype) fail_type(name, "has element type " + dlpack_type_name(tensor.dtype) + ", which no argument may have");
  if (tensor.rank > kMaxRank) {
    fail_value(name,
               "must have at most " + std::to_string(kMaxRank) + " dimensions, got " + std::to_string(tensor.rank));
  }
  to.dtype = *dtype;
  if (const std::optional<Device> device = device_from_dlpack(tensor.device)) {
    to.device = *device;
  } else {
    fail_device(name, tensor.device);
  }
  to.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  to.rank = tensor.rank;
  for (int axis = 0; axis < tensor.rank; ++axis) to.shape[axis] = tensor.shape[axis];
  if (tensor.strides != nullptr) {
    for (int axis = 0; axis < tensor.rank; ++axis) to.strides[axis] = tensor.strides[axis];
  } else {
    std::int64_t step = 1;
    for (int axis = tensor.rank - 1; axis >= 0; --axis) {
      to.strides[axis] = step;
      step *= to.shape[axis];
    }
  }
}

void Call::fail_export(const char* name, PyObject* object) const {
  fail_type(name,
            std::string("cannot be read through DLPack: ") + take_error_text() + " (" + Py_TYPE(object)->tp_name + ")");
}

void Call::choose_stream(const TypeInfo& info, dlpack::Device device) {
  device_ = {device.type == dlpack::kRocm ? DeviceKind::kHip : DeviceKind::kCuda, device.index};
  if (has_stream_) return;
  has_stream_ = true;
  if (info.exchange != nullptr && info.exchange->current_stream != nullptr) {
    void* handle = nullptr;
    if (info.exchange->current_stream(device.type, device.index, &handle) == 0) {
      stream_ = reinterpret_cast<Stream>(handle);
      return;
    }
    clear_error();
  }
  if (info.library == Library::kTorch) {
    const py::object current = py::module_::import("torch").attr("cuda").attr("current_stream")(device.index);
    stream_ = py::cast<Stream>(current.attr("cuda_stream"));
  } else if (info.library == Library::kCupy) {
    const py::object current = py::module_::import("cupy").attr("cuda").attr("get_current_stream")(device.index);
    stream_ = py::cast<Stream>(current.attr("ptr"));
  }
}

void Call::wait() const { synchronize(device_.value_or(Device{}), stream_); }

Allocation Call::allocate(PyObject* like, const TensorView& like_view, DType dtype, const std::int64_t* shape,
                          int rank) {
  const TypeInfo& info = type_info(Py_TYPE(like));
  Allocation result;
  if (info.exchange != nullptr && info.exchange->allocate != nullptr && info.exchange->import_managed != nullptr) {
    dlpack::Tensor prototype{};
    prototype.device = device_to_dlpack(like_view.device);
    prototype.rank = rank;
    prototype.dtype = dtype_to_dlpack(dtype);
    prototype.shape = const_cast<std::int64_t*>(shape);
    dlpack::ManagedTensorVersioned* managed = nullptr;
    std::string problem;
    const auto set_error = [](void* context, const char* kind, const char* message) {
      *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
    };
    if (info.exchange->allocate(&prototype, &managed, &problem, set_error) != 0) {
      if (PyErr_Occurred() != nullptr) clear_error();
      throw BackendError(std::string(function_) + ": the result could not be allocated: " + problem);
    }
    convert("out", managed->tensor, result.view);
    void* object = nullptr;
    if (info.exchange->import_managed(managed, &object) != 0) throw py::error_already_set();
    result.object = py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
    return result;
  }

  if (info.library == Library::kTorch) {
    result.object = torch_->empty(like, dtype, shape, rank);
    input("out", result.object.ptr(), result.view);
    return result;
  }

  if (info.library == Library::kNumpy || info.library == Library::kCupy) {
    py::tuple extents(rank);
    for (int axis = 0; axis < rank; ++axis) extents[axis] = py::int_(shape[axis]);
    const py::object own = py::handle(like).attr("dtype");
    const py::object element = dtype == like_view.dtype ? own : py::str(dtype_name(dtype));
    if (info.library == Library::kNumpy) {
      if (dtype != like_view.dtype && dtype != DType::kFloat16 && dtype != DType::kFloat32) {
        py::module_::import("flashport.arrays")
            .attr("require_numpy_type")(function_, py::handle(like), dtype_name(dtype), "pass an out of that type");
      }
      result.object = py::module_::import("numpy").attr("empty")(extents, element);
    } else {
      struct CurrentDevice {
        py::object device;
        explicit CurrentDevice(py::object on) : device(std::move(on)) { device.attr("__enter__")(); }
        ~CurrentDevice() { device.attr("__exit__")(py::none(), py::none(), py::none()); }
      } current(py::handle(like).attr("device"));
      result.object = py::module_::import("cupy").attr("empty")(extents, element);
    }
    output("out", result.object.ptr(), result.view);
    return result;
  }

  result.object = make_device_array(std::vector<std::int64_t>(shape, shape + rank), dtype, like_view.device);
  result.view = device_array_view(result.object.ptr());
  return result;
}

py::object Call::finish(PyObject* like, Allocation& allocation) {
  const TypeInfo& info = type_info(Py_TYPE(like));
  if (info.library == Library::kFlashport || !is_device_array_type(Py_TYPE(allocation.object.ptr()))) {
    return std::move(allocation.object);
  }
  // The importing library runs on streams of its own.
  wait();
  py::object space;
  if (info.library == Library::kJax) {
    space = py::module_::import("jax").attr("dlpack");
  } else if (py::hasattr(like, "__array_namespace__")) {
    space = py::handle(like).attr("__array_namespace__")();
  } else {
    return std::move(allocation.object);
  }
  return space.attr("from_dlpack")(allocation.object);
}

}  // namespace flashport::python
