#include "bindings/python/arguments.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <string_view>
#include <utility>

#include <flashport/error.h>

#include "common/host/kv/cache_layout.h"

namespace flashport::python {
namespace {

std::string type_text(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// As fail_type() and fail_value(), of an argument that must be something else.
[[noreturn]] void fail_kind(const char* function, const char* name, const std::string& expected, py::handle object) {
  fail_type(function, name, "must be " + expected + ", got " + type_text(object));
}

bool is_numpy_boolean(PyObject* object) {
  const std::string_view type = Py_TYPE(object)->tp_name;
  return type == "numpy.bool" || type == "numpy.bool_";  // since and before NumPy 2
}

// Python takes booleans for numbers. The usual number, an int, costs no look at a type's name.
bool is_boolean(PyObject* object) {
  return PyBool_Check(object) || (!PyLong_CheckExact(object) && is_numpy_boolean(object));
}

constexpr DType kNamedTypes[] = {DType::kFloat32,     DType::kFloat16, DType::kBFloat16, DType::kFp8E4M3,
                                 DType::kFp8E4M3Fnuz, DType::kInt32,   DType::kInt64,    DType::kUInt32,
                                 DType::kUInt8,       DType::kInt8,    DType::kFp8E5M2};
constexpr std::pair<const char*, DType> kShortNames[] = {{"fp32", DType::kFloat32},
                                                         {"fp16", DType::kFloat16},
                                                         {"bf16", DType::kBFloat16},
                                                         {"fp8_e4m3", DType::kFp8E4M3},
                                                         {"fp8_e4m3fnuz", DType::kFp8E4M3Fnuz},
                                                         {"fp8_e5m2", DType::kFp8E5M2}};

}  // namespace

void clear_error() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw py::error_already_set();
  PyErr_Clear();
}

std::string take_error_text() {
  const py::error_already_set error;
  if (!error.matches(PyExc_Exception)) throw error;
  const std::string text = py::str(error.value());
  return text.empty() ? type_text(error.value()) : text.substr(0, text.find('\n'));
}

py::object attribute_or_null(py::handle object, const char* name) {
  PyObject* value = PyObject_GetAttrString(object.ptr(), name);
  if (value == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
    PyErr_Clear();
  }
  return py::reinterpret_steal<py::object>(value);
}

void fail_type(const char* function, const char* name, const std::string& rest) {
  throw TypeError(std::string(function) + ": " + name + " " + rest);
}

void fail_value(const char* function, const char* name, const std::string& rest) {
  throw ValueError(std::string(function) + ": " + name + " " + rest);
}

double number_argument(const char* function, const char* name, PyObject* object) {
  if (PyFloat_CheckExact(object)) return PyFloat_AS_DOUBLE(object);
  if (is_boolean(object)) fail_kind(function, name, "a number", object);
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    clear_error();
    if (too_large) fail_value(function, name, "must be finite in double precision, got an integer beyond it");
    fail_kind(function, name, "a number", object);
  }
  return value;
}

std::int64_t integer_argument(const char* function, const char* name, PyObject* object) {
  if (is_boolean(object)) fail_kind(function, name, "an integer", object);
  const auto index = PyIndex_Check(object) ? py::reinterpret_steal<py::object>(PyNumber_Index(object)) : py::object();
  if (!index) {
    if (PyErr_Occurred() != nullptr) clear_error();
    fail_kind(function, name, "an integer", object);
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) fail_value(function, name, "must fit in 64 bits, got " + std::string(py::str(index)));
  return value;
}

bool boolean_argument(const char* function, const char* name, PyObject* object) {
  if (object == Py_True) return true;
  if (object == Py_False) return false;
  if (is_numpy_boolean(object)) return PyObject_IsTrue(object) == 1;
  fail_kind(function, name, "True or False", object);
}

Window window_argument(const char* function, PyObject* object) {
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 2) {
    fail_type(function, "window", "must be a tuple (left, right), got " + std::string(py::repr(object)));
  }
  return {integer_argument(function, "window[0]", PyTuple_GET_ITEM(object, 0)),
          integer_argument(function, "window[1]", PyTuple_GET_ITEM(object, 1))};
}

int num_splits_argument(const char* function, PyObject* object) {
  if (object == Py_None) return kInvariantSplits;
  const std::int64_t splits = integer_argument(function, "num_splits", object);
  if (splits < 0 || splits > 1 << 20) {
    fail_value(function, "num_splits",
               "must be None (the batch-invariant schedule), 0 (the heuristic) or a positive count, got " +
                   std::to_string(splits));
  }
  return static_cast<int>(splits);
}

std::string text_argument(const char* function, const char* name, py::handle object) {
  if (!PyUnicode_Check(object.ptr())) fail_kind(function, name, "a str", object);
  return py::cast<std::string>(object);
}

int word_argument(const char* function, const char* name, py::handle object, std::span<const char* const> words) {
  const bool is_text = PyUnicode_Check(object.ptr());
  const auto found = std::find_if(words.begin(), words.end(), [&](const char* word) {
    return is_text && PyUnicode_CompareWithASCIIString(object.ptr(), word) == 0;
  });
  if (found != words.end()) return static_cast<int>(found - words.begin());
  std::string expected;
  for (auto word = words.begin(); word != words.end(); ++word) {
    if (word != words.begin()) expected += word + 1 == words.end() ? " or " : ", ";
    expected += "\"" + std::string(*word) + "\"";
  }
  if (!is_text) fail_kind(function, name, expected, object);
  fail_value(function, name, "must be " + expected + ", got \"" + py::cast<std::string>(object) + "\"");
}

KvFormat format_argument(const char* function, const char* name, py::handle object) {
  static const auto* const names = [] {
    auto* all = new std::array<const char*, kKvFormats>;
    for (int i = 0; i < kKvFormats; ++i) (*all)[static_cast<std::size_t>(i)] = kv_format_name(static_cast<KvFormat>(i));
    return all;
  }();
  return static_cast<KvFormat>(word_argument(function, name, object, *names));
}

std::string type_name_argument(const char* function, const char* name, py::handle object, const char* expected) {
  py::object text = py::reinterpret_borrow<py::object>(object);
  if (!PyUnicode_Check(object.ptr())) {
    const bool is_torch = type_text(object) == "torch.dtype";  // which has no name but its text
    text = is_torch ? py::object(py::str(object))
                    : attribute_or_null(object, PyType_Check(object.ptr()) != 0 ? "__name__" : "name");
    if (!text || !PyUnicode_Check(text.ptr())) fail_kind(function, name, expected, object);
  }
  const auto full = py::cast<std::string>(text);
  return full.substr(full.rfind('.') + 1);  // also "torch.bfloat16"
}

DType dtype_argument(const char* function, const char* name, py::handle object) {
  const std::string wanted = type_name_argument(function, name, object);
  for (const DType dtype : kNamedTypes) {
    if (wanted == dtype_name(dtype)) return dtype;
  }
  for (const auto& [text, dtype] : kShortNames) {
    if (wanted == text) return dtype;
  }
  std::string expected = "must be one of";
  for (const DType dtype : kNamedTypes) {
    expected += std::string(dtype == kNamedTypes[0] ? " " : ", ") + dtype_name(dtype);
  }
  fail_value(function, name, expected + ", got \"" + wanted + "\"");
}

std::vector<std::int64_t> shape_argument(const char* function, py::handle object) {
  const bool is_text = PyUnicode_Check(object.ptr()) || PyBytes_Check(object.ptr());
  if (is_text || PySequence_Check(object.ptr()) == 0) fail_kind(function, "shape", "a tuple of integers", object);
  const auto items = py::reinterpret_steal<py::object>(PySequence_Tuple(object.ptr()));
  if (!items) {
    const std::string text = take_error_text();
    fail_type(function, "shape", "must be a tuple of integers, got " + type_text(object) + " (" + text + ")");
  }
  const Py_ssize_t rank = PyTuple_GET_SIZE(items.ptr());
  if (rank > kMaxRank) {
    fail_value(function, "shape",
               "must have at most " + std::to_string(kMaxRank) + " dimensions, got " + std::to_string(rank));
  }
  std::vector<std::int64_t> shape;
  std::int64_t product = 1;  // of the extents but 0: strides of an array without elements are made of them too
  for (Py_ssize_t axis = 0; axis < rank; ++axis) {
    const std::string name = "shape[" + std::to_string(axis) + "]";
    const std::int64_t extent = integer_argument(function, name.c_str(), PyTuple_GET_ITEM(items.ptr(), axis));
    if (extent < 0) fail_value(function, name.c_str(), "must be non-negative, got " + std::to_string(extent));
    if (__builtin_mul_overflow(product, std::max<std::int64_t>(extent, 1), &product)) {
      fail_value(function, "shape",
                 "must have extents whose product fits in memory, got " + std::string(py::str(items)));
    }
    shape.push_back(extent);
  }
  return shape;
}

}  // namespace flashport::python
