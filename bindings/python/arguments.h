// Python's arguments as C++ values, with the error texts of the public interface:
//   <function>: <argument> must <what was expected>, got <what came>
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include <flashport/types.h>

namespace flashport::python {

namespace py = pybind11;

// Clears the Python error that is set, so that one of ours can take its place. What is no Exception (KeyboardInterrupt,
// SystemExit) is no argument's fault, and is thrown.
void clear_error();
// The same; the first line of its text, or its type where it has none.
[[nodiscard]] std::string take_error_text();
// An attribute; null if the object has none. Any other error is thrown.
[[nodiscard]] py::object attribute_or_null(py::handle object, const char* name);

[[noreturn]] void fail_type(const char* function, const char* name, const std::string& rest);
[[noreturn]] void fail_value(const char* function, const char* name, const std::string& rest);

[[nodiscard]] double number_argument(const char* function, const char* name, PyObject* object);
[[nodiscard]] std::int64_t integer_argument(const char* function, const char* name, PyObject* object);
// The one rule for flags: True, False, or NumPy's own of these. Numbers and None are none.
[[nodiscard]] bool boolean_argument(const char* function, const char* name, PyObject* object);
// A window of keys: its left and its right side, a tuple of two integers.
struct Window {
  std::int64_t left, right;
};
[[nodiscard]] Window window_argument(const char* function, PyObject* object);
// None is the invariant schedule.
[[nodiscard]] int num_splits_argument(const char* function, PyObject* object);
[[nodiscard]] std::string text_argument(const char* function, const char* name, py::handle object);
// The place of a word among those that an argument may be.
[[nodiscard]] int word_argument(const char* function, const char* name, py::handle object,
                                std::span<const char* const> words);
[[nodiscard]] inline int word_argument(const char* function, const char* name, py::handle object,
                                       std::initializer_list<const char*> words) {
  return word_argument(function, name, object, std::span(words.begin(), words.size()));
}
// The format of a cache by its name.
[[nodiscard]] KvFormat format_argument(const char* function, const char* name, py::handle object);
// The name of an element type, of which a dtype or scalar class of any library stands for its own: "bfloat16".
[[nodiscard]] std::string type_name_argument(const char* function, const char* name, py::handle object,
                                             const char* expected = "an element type or its name");
// The element type of such a name, in either spelling: "bfloat16" or "bf16".
[[nodiscard]] DType dtype_argument(const char* function, const char* name, py::handle object);
// A tuple or other sequence of integers of 0 or more, at most kMaxRank of them, whose product is an int64.
[[nodiscard]] std::vector<std::int64_t> shape_argument(const char* function, py::handle object);

}  // namespace flashport::python
