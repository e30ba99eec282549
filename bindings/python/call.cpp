// Array arguments: the exchange API where the type offers it (no Python code runs, nothing is allocated), else the
// __dlpack__ protocol. Streams follow the library that owns the first device array of the call.
#include "bindings/python/call.h"

#include <cstring>
#include <exception>
#include <new>

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
};

// A stream object of any library as its handle.
std::optional<Stream> stream_handle(py::handle stream) {
  if (PyLong_Check(stream.ptr())) return static_cast<Stream>(PyLong_AsUnsignedLongLong(stream.ptr()));
  for (const char* attribute : {"cuda_stream", "ptr", "handle"}) {
    if (!py::hasattr(stream, attribute)) continue;
    const py::object value = stream.attr(attribute);
    if (PyLong_Check(value.ptr())) return static_cast<Stream>(PyLong_AsUnsignedLongLong(value.ptr()));
  }
  if (py::hasattr(stream, "__cuda_stream__")) {
    const auto value = py::cast<py::tuple>(stream.attr("__cuda_stream__")());
    return py::cast<Stream>(value[1]);
  }
  return std::nullopt;
}

bool is_host(std::int32_t type) {
  return type == dlpack::kCpu || type == dlpack::kCudaHost || type == dlpack::kRocmHost;
}

// First line of the text of the Python error that is set, which is cleared.
std::string take_error_text() {
  const py::error_already_set error;
  const std::string text = py::str(error.value());
  return text.substr(0, text.find('\n'));
}

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

Call::Call(const char* function, PyObject* stream) : function_(function) {
  if (stream == Py_None) return;
  const std::optional<Stream> handle = stream_handle(stream);
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (!handle) {
    fail_type("stream", std::string("must be a stream or its integer handle, got ") + Py_TYPE(stream)->tp_name);
  }
  stream_ = *handle;
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

void Call::fail_type(const char* name, const std::string& rest) const {
  throw TypeError(std::string(function_) + ": " + name + " " + rest);
}

void Call::fail_value(const char* name, const std::string& rest) const {
  throw ValueError(std::string(function_) + ": " + name + " " + rest);
}

double Call::number(const char* name, PyObject* object) const {
  if (PyFloat_CheckExact(object)) return PyFloat_AS_DOUBLE(object);
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    fail_type(name, std::string("must be a number, got ") + Py_TYPE(object)->tp_name);
  }
  return value;
}

std::int64_t Call::integer(const char* name, PyObject* object) const {
  const auto index = PyIndex_Check(object) ? py::reinterpret_steal<py::object>(PyNumber_Index(object)) : py::object();
  if (!index) {
    PyErr_Clear();
    fail_type(name, std::string("must be an integer, got ") + Py_TYPE(object)->tp_name);
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) fail_value(name, "must fit in 64 bits, got " + std::string(py::str(index)));
  return value;
}

bool Call::is_second(const char* name, PyObject* object, const char* first, const char* second) const {
  const bool text = PyUnicode_Check(object);
  if (text && PyUnicode_CompareWithASCIIString(object, first) == 0) return false;
  if (text && PyUnicode_CompareWithASCIIString(object, second) == 0) return true;
  const std::string wanted = std::string("must be \"") + first + "\" or \"" + second + "\", got ";
  if (!text) fail_type(name, wanted + Py_TYPE(object)->tp_name);
  fail_value(name, wanted + "\"" + std::string(py::str(object)) + "\"");
}
bool Call::boolean(const char* name, PyObject* object) const {
  if (object == Py_True) return true;
  if (object == Py_False) return false;
  fail_type(name, std::string("must be True or False, got ") + Py_TYPE(object)->tp_name);
}

void Call::fill_view(const char* name, PyObject* object, bool writes, TensorView& to) {
  const TypeInfo& info = type_info(Py_TYPE(object));
  if (info.library == Library::kFlashport) {
    to = device_array_view(object);
    if (to.device.kind != DeviceKind::kCpu) find_stream(info, device_to_dlpack(to.device));
    return;
  }
  if (info.exchange == nullptr) return view_by_capsule(name, object, info, to);

  // A borrowed view says nothing of writability; torch has no read-only tensors.
  if (info.exchange->export_view != nullptr && (!writes || info.library == Library::kTorch)) {
    dlpack::Tensor tensor;
    if (info.exchange->export_view(object, &tensor) != 0) fail_export(name, object);
    if (!is_host(tensor.device.type)) find_stream(info, tensor.device);
    return convert(name, tensor, to);
  }
  dlpack::ManagedTensorVersioned* managed = nullptr;
  if (info.exchange->export_managed(object, &managed) != 0) fail_export(name, object);
  take_versioned(name, managed, to);
  if (!is_host(managed->tensor.device.type)) find_stream(info, managed->tensor.device);
}

void Call::view_by_capsule(const char* name, PyObject* object, const TypeInfo& info, TensorView& to,
                           std::optional<DType> as) {
  const Names& n = names();
  PyObject* device_arguments[] = {object};
  PyObject* place = PyObject_VectorcallMethod(n.dlpack_device, device_arguments, 1, nullptr);
  if (place == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
      PyErr_Clear();
      fail_type(name, std::string("must be an array that speaks DLPack (NumPy, PyTorch, CuPy, JAX, ...), got ") +
                          Py_TYPE(object)->tp_name);
    }
    fail_export(name, object);
  }
  const auto place_held = py::reinterpret_steal<py::object>(place);
  dlpack::Device device{};
  {
    const auto pair = py::cast<py::tuple>(place_held);
    // The device type may be an enum member.
    device = {static_cast<std::int32_t>(integer(name, py::object(pair[0]).ptr())),
              static_cast<std::int32_t>(integer(name, py::object(pair[1]).ptr()))};
  }

  py::object stream = py::none();
  const bool on_device = !is_host(device.type);
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
  if (info.versioned) {
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
      const_cast<TypeInfo&>(info).versioned = false;
    }
  }
  if (!info.versioned) {
    PyObject* arguments[] = {object, stream.ptr()};
    capsule = PyObject_VectorcallMethod(n.dlpack, arguments, 1, on_device ? n.stream : nullptr);
  }
  if (capsule == nullptr) {
    if (info.library == Library::kNumpy) return view_of_numpy_extension(name, object, info, to);
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
  if (info.library == Library::kJax) to.read_only = true;  // immutable by contract, whatever the flag says
}

void Call::view_of_numpy_extension(const char* name, PyObject* object, const TypeInfo& info, TensorView& to) {
  const std::string refusal = take_error_text();
  const py::handle array = object;
  const std::string dtype = py::str(array.attr("dtype").attr("name"));
  for (const ExtensionType& type : kExtensionTypes) {
    if (dtype != type.name) continue;
    const py::object carried = array.attr("view")(type.carrier);
    return view_by_capsule(name, carried.ptr(), info, to, type.dtype);
  }
  fail_type(name, "cannot be read through DLPack: " + refusal + " (element type " + dtype + ")");
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
  switch (tensor.device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
    case dlpack::kRocmHost: break;
    case dlpack::kCuda:
    case dlpack::kCudaManaged: to.device = {DeviceKind::kCuda, tensor.device.index}; break;
    case dlpack::kRocm: to.device = {DeviceKind::kHip, tensor.device.index}; break;
    default:
      fail_value(name,
                 "must be in host, CUDA or ROCm memory, got DLPack device type " + std::to_string(tensor.device.type));
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
    PyErr_Clear();
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
      PyErr_Clear();
      throw BackendError(std::string(function_) + ": the result could not be allocated: " + problem);
    }
    convert("out", managed->tensor, result.view);
    void* object = nullptr;
    if (info.exchange->import_managed(managed, &object) != 0) throw py::error_already_set();
    result.object = py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
    return result;
  }

  if (info.library == Library::kNumpy || info.library == Library::kCupy) {
    py::tuple extents(rank);
    for (int axis = 0; axis < rank; ++axis) extents[axis] = py::int_(shape[axis]);
    const py::object own = py::handle(like).attr("dtype");
    const py::object element = dtype == like_view.dtype ? own : py::str(dtype_name(dtype));
    if (info.library == Library::kNumpy) {
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
