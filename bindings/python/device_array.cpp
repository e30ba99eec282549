// DeviceArray over the memory functions of the backends.
#include "bindings/python/device_array.h"

#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include <flashport/error.h>

#include "bindings/python/arguments.h"
#include "bindings/python/call.h"
#include "common/host/check.h"
#include "common/host/loader.h"

namespace flashport::python {
namespace {

PyTypeObject* device_array_type = nullptr;

const BackendAbi& backend_of(Device device) {
  const LoadedBackend& loaded = load_backend(device.kind);
  if (loaded.abi == nullptr) {
    throw NotSupportedError(std::string("the ") + backend_name(device.kind) +
                            " backend is not there: " + loaded.detail);
  }
  return *loaded.abi;
}

void check_backend(const char* what, const char* error) {
  if (error != nullptr) throw BackendError(std::string(what) + ": " + error);
}

// The memory of an array; exports share it with the array.
class Memory {
 public:
  Memory(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
    if (bytes > 0) check_backend("DeviceArray", backend_of(device).allocate(device.index, bytes, &data_));
  }
  ~Memory() {
    if (data_ != nullptr) backend_of(device_).release(device_.index, data_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] Device device() const { return device_; }

 private:
  Device device_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

// What an exported capsule owns.
struct Export {
  std::shared_ptr<Memory> memory;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

std::vector<std::int64_t> row_major_strides(const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = step;
    step *= shape[axis];
  }
  return strides;
}

class DeviceArray {
 public:
  // A shape that shape_argument() gave, or that of an array.
  DeviceArray(std::vector<std::int64_t> shape, DType dtype, Device device) : shape_(std::move(shape)), dtype_(dtype) {
    std::size_t bytes = element_size(dtype);
    for (const std::int64_t extent : shape_) {
      if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes)) {
        fail_value("DeviceArray", "shape", "must have extents whose product fits in memory");
      }
    }
    memory_ = std::make_shared<Memory>(device, bytes);
  }

  [[nodiscard]] const std::vector<std::int64_t>& shape() const { return shape_; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] Device device() const { return memory_->device(); }
  [[nodiscard]] std::size_t bytes() const { return memory_->bytes(); }

  [[nodiscard]] TensorView view() const {
    TensorView found;
    found.data = memory_->data();
    found.dtype = dtype_;
    found.device = memory_->device();
    found.rank = static_cast<int>(shape_.size());
    const std::vector<std::int64_t> strides = row_major_strides(shape_);
    std::memcpy(found.shape, shape_.data(), shape_.size() * sizeof(std::int64_t));
    std::memcpy(found.strides, strides.data(), strides.size() * sizeof(std::int64_t));
    return found;
  }

  // The same memory in another shape.
  [[nodiscard]] DeviceArray reshaped(const py::object& shape) const {
    DeviceArray other = *this;
    other.shape_ = shape_argument("reshape", shape);
    const std::int64_t count = other.view().numel();
    const std::int64_t kept = view().numel();
    if (count != kept) {
      fail_value("reshape", "shape",
                 "must keep the number of elements, " + std::to_string(kept) + ", got " + std::to_string(count));
    }
    return other;
  }

  // Copies a contiguous host array of the same shape and element size in, or out; blocks.
  void copy_from(const py::object& source) { copy("copy_from", source, false); }
  void copy_to(const py::object& target) { copy("copy_to", target, true); }

  void fill_zero() {
    if (bytes() == 0) return;
    check_backend("fill_zero", backend_of(device()).fill_zero(device().index, 0, memory_->data(), bytes()));
    synchronize(device(), 0);
  }

  [[nodiscard]] py::capsule export_capsule(py::object stream, py::object max_version) const {
    // The consumer orders its work after `stream`; waiting here is right for every consumer.
    if (!stream.is_none()) synchronize(device(), 0);
    const bool versioned =
        !max_version.is_none() && py::cast<std::pair<int, int>>(max_version).first >= int{dlpack::kMajorVersion};
    auto owned = std::make_unique<Export>(Export{memory_, shape_, row_major_strides(shape_)});
    dlpack::Tensor tensor{};
    tensor.data = memory_->data();
    tensor.device = device_to_dlpack(device());
    tensor.rank = static_cast<std::int32_t>(shape_.size());
    tensor.dtype = dtype_to_dlpack(dtype_);
    tensor.shape = owned->shape.data();
    tensor.strides = owned->strides.data();
    return versioned ? make_capsule<dlpack::ManagedTensorVersioned>("dltensor_versioned", tensor, std::move(owned))
                     : make_capsule<dlpack::ManagedTensor>("dltensor", tensor, std::move(owned));
  }

  [[nodiscard]] std::pair<int, int> dlpack_device() const {
    const dlpack::Device device = device_to_dlpack(memory_->device());
    return {device.type, device.index};
  }

 private:
  template <class Managed>
  static py::capsule make_capsule(const char* name, const dlpack::Tensor& tensor, std::unique_ptr<Export> owned) {
    auto managed = std::make_unique<Managed>();
    managed->tensor = tensor;
    managed->context = owned.release();
    managed->deleter = [](Managed* self) {
      delete static_cast<Export*>(self->context);
      delete self;
    };
    if constexpr (std::is_same_v<Managed, dlpack::ManagedTensorVersioned>) {
      managed->version = {dlpack::kMajorVersion, dlpack::kMinorVersion};
      managed->flags = 0;
    }
    PyObject* capsule = PyCapsule_New(managed.get(), name, [](PyObject* self) {
      // A consumer that took the tensor has renamed the capsule.
      const char* current = PyCapsule_GetName(self);
      if (current == nullptr || std::strncmp(current, "used", 4) == 0) return;
      auto* unused = static_cast<Managed*>(PyCapsule_GetPointer(self, current));
      unused->deleter(unused);
    });
    if (capsule == nullptr) throw py::error_already_set();
    managed.release();
    return py::reinterpret_steal<py::capsule>(capsule);
  }

  static py::buffer_info host_buffer(const char* function, const py::object& array, bool out) {
    std::string why;
    if (PyObject_CheckBuffer(array.ptr()) != 0) {
      try {
        return py::reinterpret_borrow<py::buffer>(array).request(out);
      } catch (const py::error_already_set& error) {
        if (!error.matches(PyExc_Exception)) throw;
        why = " (" + std::string(py::str(error.value())) + ")";
      }
    }
    fail_type(function, "array",
              std::string("must be a host array that offers its memory as a buffer") + (out ? ", not read-only" : "") +
                  ", got " + Py_TYPE(array.ptr())->tp_name + why +
                  "; pass NumPy's, of types that it does not have as a view of unsigned integers");
  }

  void copy(const char* function, const py::object& array, bool out) {
    const py::buffer_info host = host_buffer(function, array, out);
    if (host.itemsize != element_size(dtype_)) {
      fail_type(function, "array",
                "must have elements of " + std::to_string(element_size(dtype_)) + " bytes, as " + dtype_name(dtype_) +
                    " has, got " + std::to_string(host.itemsize));
    }
    if (std::vector<std::int64_t>(host.shape.begin(), host.shape.end()) != shape_ || !is_row_major(host)) {
      fail_value(function, "array",
                 "must be contiguous and have this array's shape " +
                     tuple_text(shape_.data(), static_cast<int>(shape_.size())) + ", got " +
                     tuple_text(host.shape.data(), static_cast<int>(host.ndim)) + "; pass a contiguous copy");
    }
    if (bytes() == 0) return;
    const Device where = device();
    const py::gil_scoped_release released;
    void* target = out ? host.ptr : memory_->data();
    const void* source = out ? memory_->data() : host.ptr;
    check_backend(function, backend_of(where).copy(where.index, 0, target, source, bytes()));
    synchronize(where, 0);
  }

  static bool is_row_major(const py::buffer_info& buffer) {
    py::ssize_t step = buffer.itemsize;
    for (py::ssize_t axis = buffer.ndim; axis-- > 0;) {
      if (buffer.shape[axis] > 1 && buffer.strides[axis] != step) return false;
      step *= buffer.shape[axis];
    }
    return true;
  }

  std::vector<std::int64_t> shape_;
  DType dtype_;
  std::shared_ptr<Memory> memory_;
};

}  // namespace

bool is_device_array_type(PyTypeObject* type) { return type == device_array_type; }

TensorView device_array_view(PyObject* array) { return py::cast<const DeviceArray&>(py::handle(array)).view(); }

py::object make_device_array(const std::vector<std::int64_t>& shape, DType dtype, Device device) {
  return py::cast(DeviceArray(shape, dtype, device));
}

void synchronize(Device device, Stream stream) {
  if (device.kind == DeviceKind::kCpu) return;
  check_backend("synchronize", backend_of(device).synchronize(device.index, stream));
}

Device device_argument(const char* function, py::handle object) {
  const std::string name = text_argument(function, "device", object);
  const std::size_t colon = name.find(':');
  const std::string kind = name.substr(0, colon);
  int index = 0;
  bool good = true;
  if (colon != std::string::npos) {
    const std::string digits = name.substr(colon + 1);
    good = !digits.empty() && digits.size() < 4 && digits.find_first_not_of("0123456789") == std::string::npos;
    if (good) index = std::stoi(digits);
  }
  if (good && kind == "cpu") return {DeviceKind::kCpu, 0};
  if (good && kind == "cuda") return {DeviceKind::kCuda, index};
  if (good && kind == "hip") return {DeviceKind::kHip, index};
  fail_value(function, "device", "must be \"cpu\", \"cuda:<index>\" or \"hip:<index>\", got \"" + name + "\"");
}

void define_device_array(py::module_& module) {
  auto type =
      py::class_<DeviceArray>(module, "DeviceArray",
                              "A contiguous, uninitialised array on a device such as \"cpu\", \"cuda:0\" or \"hip:0\".")
          .def(py::init([](const py::object& shape, const py::object& dtype, const py::object& device) {
                 constexpr char kFunction[] = "DeviceArray";
                 return DeviceArray(shape_argument(kFunction, shape), dtype_argument(kFunction, "dtype", dtype),
                                    device_argument(kFunction, device));
               }),
               py::arg("shape"), py::arg("dtype"), py::arg("device") = "cpu")
          .def_property_readonly("shape",
                                 [](const DeviceArray& self) {
                                   py::tuple shape(self.shape().size());
                                   for (std::size_t i = 0; i < self.shape().size(); ++i) shape[i] = self.shape()[i];
                                   return shape;
                                 })
          .def_property_readonly("dtype", [](const DeviceArray& self) { return dtype_name(self.dtype()); })
          .def_property_readonly("device", [](const DeviceArray& self) { return device_name(self.device()); })
          .def_property_readonly("nbytes", &DeviceArray::bytes)
          .def("reshape", &DeviceArray::reshaped, py::arg("shape"), "The same memory in another shape.")
          .def("copy_from", &DeviceArray::copy_from, py::arg("array"), "Copies a host array in; blocks.")
          .def("copy_to", &DeviceArray::copy_to, py::arg("array"), "Copies into a host array; blocks.")
          .def("fill_zero", &DeviceArray::fill_zero, "Sets all bytes to zero; blocks.")
          .def(
              "__dlpack__",
              [](const DeviceArray& self, py::object stream, py::object max_version, py::object, py::object) {
                return self.export_capsule(std::move(stream), std::move(max_version));
              },
              py::kw_only(), py::arg("stream") = py::none(), py::arg("max_version") = py::none(),
              py::arg("dl_device") = py::none(), py::arg("copy") = py::none())
          .def("__dlpack_device__", &DeviceArray::dlpack_device)
          .def("__repr__", [](const DeviceArray& self) {
            std::string shape;
            for (const std::int64_t extent : self.shape())
              shape += (shape.empty() ? "" : ", ") + std::to_string(extent);
            return "DeviceArray((" + shape + "), " + dtype_name(self.dtype()) + ", " + device_name(self.device()) + ")";
          });
  device_array_type = reinterpret_cast<PyTypeObject*>(type.ptr());

  module.def(
      "synchronize",
      [](const py::object& device, Stream stream) {
        const Device where = device_argument("synchronize", device);
        const py::gil_scoped_release released;
        synchronize(where, stream);
      },
      py::arg("device"), py::arg("stream") = 0, "Blocks until all work on a stream of a device has ended.");
}

}  // namespace flashport::python
