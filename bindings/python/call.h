// One call from Python into the library: turns array arguments into views, finds the stream to run on, allocates
// results as the caller's own array type, and keeps everything that it borrowed alive until the call has been made.
// Used with the GIL held; only run() releases it.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <flashport/decode.h>
#include <flashport/error.h>
#include <flashport/types.h>

#include "bindings/python/arguments.h"
#include "bindings/python/array_types.h"
#include "bindings/python/dlpack_abi.h"
#include "bindings/python/torch_tensors.h"

namespace flashport::python {

namespace py = pybind11;

// Sets the Python error that stands for the C++ exception in flight.
void set_python_error();

// An array that was allocated for the caller.
struct Allocation {
  py::object object;
  TensorView view;
};

// What a function is to torch.
enum class TorchRole {
  kOperator,        // refuses to leave the graph of gradients: there is no backward
  kNoGradOperator,  // runs as under torch.no_grad()
  kQuestion,        // is no operator: it reads no element and writes none
};

class Call {
 public:
  // `stream` is None, an integer handle, or an object with cuda_stream, ptr or __cuda_stream__.
  Call(const char* function, PyObject* stream, TorchRole role = TorchRole::kOperator);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Fill `to`, which is as it was made, in place: a view is large, and a call has many.
  void input(const char* name, PyObject* object, TensorView& to) { fill_view(name, object, false, to); }
  void output(const char* name, PyObject* object, TensorView& to) {
    fill_view(name, object, role_ != TorchRole::kQuestion, to);
  }
  void optional_input(const char* name, PyObject* object, std::optional<TensorView>& to) {
    if (object != Py_None) input(name, object, to.emplace());
  }
  void optional_output(const char* name, PyObject* object, std::optional<TensorView>& to) {
    if (object != Py_None) output(name, object, to.emplace());
  }

  // A scale of append_kv: read where it has one axis or none, and written where it has those of a cache.
  void optional_scale(const char* name, PyObject* object, std::optional<TensorView>& to) {
    optional_input(name, object, to);
    if (to && to->rank >= 2) output(name, object, to.emplace());
  }

  double number(const char* name, PyObject* object) const { return number_argument(function_, name, object); }
  std::optional<double> optional_number(const char* name, PyObject* object) const {
    if (object == Py_None) return std::nullopt;
    return number(name, object);
  }
  std::int64_t integer(const char* name, PyObject* object) const { return integer_argument(function_, name, object); }
  bool boolean(const char* name, PyObject* object) const { return boolean_argument(function_, name, object); }
  Window window(PyObject* object) const { return window_argument(function_, object); }
  int num_splits(PyObject* object) const { return num_splits_argument(function_, object); }
  std::optional<KvFormat> optional_format(const char* name, PyObject* object) const {
    if (object == Py_None) return std::nullopt;
    return format_argument(function_, name, object);
  }
  // Which of two words it is: true for the second.
  bool is_second(const char* name, PyObject* object, const char* first, const char* second) const {
    return word_argument(function_, name, object, {first, second}) == 1;
  }

  KvLayout kv_layout(PyObject* object) const {
    return is_second("kv_layout", object, "NHD", "HND") ? KvLayout::kHND : KvLayout::kNHD;
  }

  // An uninitialised array of the library and on the device of `like`, whose view is `like_view`. finish() turns it
  // into what the caller gets.
  Allocation allocate(PyObject* like, const TensorView& like_view, DType dtype, const std::int64_t* shape, int rank);
  py::object finish(PyObject* like, Allocation& allocation);

  // Makes the call without the GIL.
  template <class Function>
  void run(Function&& function) {
    const Stream stream = stream_;
    {
      PyThreadState* state = PyEval_SaveThread();
      struct Restore {
        PyThreadState* state;
        ~Restore() { PyEval_RestoreThread(state); }
      } restore{state};
      function(stream);
    }
    if (written_count_ > 0) torch_->increment_versions(written_.data(), written_count_);
    if (waits_) wait();
  }

  [[noreturn]] void fail_type(const char* name, const std::string& rest) const {
    python::fail_type(function_, name, rest);
  }
  [[noreturn]] void fail_value(const char* name, const std::string& rest) const {
    python::fail_value(function_, name, rest);
  }

 private:
  struct Borrowed {
    void* tensor;
    bool versioned;
  };

  void fill_view(const char* name, PyObject* object, bool writes, TensorView& to);
  void view_by_exchange(const char* name, PyObject* object, const TypeInfo& info, bool writes, TensorView& to);
  // What is asked of a tensor of torch before it is exported, and after.
  void before_export(const TypeInfo& info) {
    if (torch_ == nullptr) look_at_torch();
    if (info.stands_for_others && role_ != TorchRole::kQuestion) throw NeedsOperator{};
  }
  void after_export(const char* name, PyObject* object, bool writes, const TensorView& view);
  void look_at_torch();
  [[noreturn]] void refuse_gradient(const char* name, PyObject* object, bool writes) const;
  // For a tensor that has no memory, or none to export: throws NeedsOperator if a transformation explains it.
  void explain_no_memory(const TypeInfo& info) const;
  // For a tensor of a torch that has no exchange API.
  void view_of_tensor(const char* name, PyObject* object, const TypeInfo& info, TensorView& to);
  // `as` is the element type that the array's own carries.
  void view_by_capsule(const char* name, PyObject* object, const TypeInfo& info, bool writes, TensorView& to,
                       std::optional<DType> as = std::nullopt);
  // What NumPy refuses to export: the types of ml_dtypes; before 2.1 read-only arrays, before 1.25 booleans.
  void view_of_numpy(const char* name, PyObject* object, const TypeInfo& info, bool writes, TensorView& to,
                     std::optional<DType> as);
  void convert(const char* name, const dlpack::Tensor& tensor, TensorView& to,
               std::optional<DType> as = std::nullopt) const;
  void take_versioned(const char* name, dlpack::ManagedTensorVersioned* tensor, TensorView& to,
                      std::optional<DType> as = std::nullopt);
  // The device that an array says it is on.
  [[nodiscard]] dlpack::Device place_of(const char* name, PyObject* object, const TypeInfo& info) const;
  [[noreturn]] void fail_device(const char* name, dlpack::Device device) const;
  [[nodiscard]] Stream stream_handle(py::handle stream) const;
  void refuse_negated(const char* name, PyObject* tensor) const;
  [[noreturn]] void fail_place(const char* name, PyObject* object, const TypeInfo& info) const;
  [[noreturn]] void fail_export(const char* name, PyObject* object) const;
  // For the first array that is on a device.
  void find_stream(const TypeInfo& info, dlpack::Device device) {
    if (!device_) choose_stream(info, device);
  }
  void choose_stream(const TypeInfo& info, dlpack::Device device);
  void wait() const;

  const char* function_;
  Stream stream_ = 0;
  bool has_stream_ = false;
  bool waits_ = false;            // an argument's library frees memory without regard to our stream
  std::optional<Device> device_;  // none: all arrays are in host memory
  std::vector<Borrowed> borrowed_;

  TorchRole role_;
  const Torch* torch_ = nullptr;  // set with the first of its tensors
  bool records_gradients_ = false;
  static constexpr std::size_t kMostOutputs = 8;
  std::array<PyObject*, kMostOutputs> written_{};  // tensors of torch, borrowed
  int written_count_ = 0;
};

}  // namespace flashport::python
