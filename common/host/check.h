// Validation of arguments, with the error texts of the public interface:
//   <function>: <argument> must <what was expected>, got <what came>
// A caller checks all ranks first, then all shapes, dtypes, devices, and memory last (null data, alignment, read-only;
// overlap is in arguments.h), so that no size or stride is read of an axis that is not there. A passing check builds no
// string.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include <flashport/error.h>
#include <flashport/types.h>

namespace flashport {

// "(2, 3, 4)"; "(5,)" for one axis, as Python spells it.
[[nodiscard]] std::string tuple_text(const std::int64_t* values, int count);
[[nodiscard]] std::string shape_text(const TensorView& view);

// The shortest text that reads as this number: "1e+39".
[[nodiscard]] std::string number_text(double value);

[[nodiscard]] inline bool is_among(DType type, std::initializer_list<DType> allowed) {
  for (DType one : allowed) {
    if (one == type) return true;
  }
  return false;
}

// Empty, or "<name> must be <the types allowed>, got <type>".
[[nodiscard]] std::string dtype_problem(const char* name, DType type, std::initializer_list<DType> allowed);

// An extent that shape() accepts whatever it is.
inline constexpr std::int64_t kAnyExtent = std::numeric_limits<std::int64_t>::min();

class Check {
 public:
  // `function` is the name that messages begin with.
  explicit constexpr Check(const char* function) : function_(function) {}

  [[nodiscard]] const char* function() const { return function_; }

  // `axes` names the axes: "(batch, num_q_heads, head_dim)".
  void rank(const TensorView& view, const char* name, int rank, const char* axes) const;
  // Either of two ranks.
  void rank(const TensorView& view, const char* name, int rank, const char* axes, int other_rank,
            const char* other_axes) const;
  void shape(const TensorView& view, const char* name, const char* axes,
             std::initializer_list<std::int64_t> expected) const;
  void dtype(const TensorView& view, const char* name, std::initializer_list<DType> allowed) const {
    if (!is_among(view.dtype, allowed)) type_error(dtype_problem(name, view.dtype, allowed));
  }
  // As the tensor `like` is.
  void device(const TensorView& view, const char* name, const TensorView& like, const char* like_name) const {
    if (view.device != like.device) device_error(view, name, like, like_name);
  }

  // Data that may be read: not null unless there are no elements, and aligned to its elements.
  void readable(const TensorView& view, const char* name) const;
  // Data that may be written: also not read-only, and no two elements at one address.
  void writable(const TensorView& view, const char* name) const;
  // The last axis has stride 1 (an array of indices or scales that kernels walk by pointer).
  void inner_contiguous(const TensorView& view, const char* name) const;
  void contiguous(const TensorView& view, const char* name) const;

  // Numbers that kernels take in fp32: finite there, and where their sign matters not 0 there.
  void finite(double value, const char* name) const;
  void positive(double value, const char* name) const;
  void negative(double value, const char* name) const;

  // Optional arguments: nothing to check where they are not given.
  void rank(const std::optional<TensorView>& view, const char* name, int count, const char* axes) const {
    if (view) rank(*view, name, count, axes);
  }
  void shape(const std::optional<TensorView>& view, const char* name, const char* axes,
             std::initializer_list<std::int64_t> expected) const {
    if (view) shape(*view, name, axes, expected);
  }
  void dtype(const std::optional<TensorView>& view, const char* name, std::initializer_list<DType> allowed) const {
    if (view) dtype(*view, name, allowed);
  }
  void device(const std::optional<TensorView>& view, const char* name, const TensorView& like,
              const char* like_name) const {
    if (view) device(*view, name, like, like_name);
  }
  // readable and contiguous
  void array(const std::optional<TensorView>& view, const char* name) const {
    if (!view) return;
    readable(*view, name);
    contiguous(*view, name);
  }

  // Each throws "<function>: <text>".
  [[noreturn]] void value_error(const std::string& text) const;
  [[noreturn]] void type_error(const std::string& text) const;
  [[noreturn]] void not_supported(const std::string& text) const;
  [[noreturn]] void backend_error(const std::string& text) const;

 private:
  [[noreturn]] void device_error(const TensorView& view, const char* name, const TensorView& like,
                                 const char* like_name) const;

  const char* function_;
};

[[nodiscard]] bool has_elements(const TensorView& view);

}  // namespace flashport
