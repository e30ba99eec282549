// Validation of arguments, with the error texts of the public interface:
//   <function>: <argument> must <what was expected>, got <what came>
// A caller checks all ranks first, then all shapes, dtypes, devices, and memory last (null data, alignment, read-only,
// overlap), so that no size or stride is read of an axis that is not there; arguments.h has the table that these checks
// walk through. A passing check builds no string.
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

// "1 block", "2 blocks".
[[nodiscard]] std::string counted(std::int64_t count, const char* one);

// A few element types, in the order in which messages list them.
class DTypes {
 public:
  DTypes() = default;  // holds nothing yet
  constexpr DTypes(std::initializer_list<DType> types) : types_{}, count_(0) {
    for (DType type : types) types_[count_++] = static_cast<std::uint8_t>(type);
  }

  [[nodiscard]] constexpr int count() const { return count_; }
  [[nodiscard]] constexpr DType operator[](int i) const { return static_cast<DType>(types_[i]); }
  [[nodiscard]] constexpr bool has(DType type) const {
    for (int i = 0; i < count_; ++i) {
      if ((*this)[i] == type) return true;
    }
    return false;
  }

 private:
  std::uint8_t types_[11];
  std::uint8_t count_;
};

// Empty, or "<name> must be <the types allowed>, got <type>".
[[nodiscard]] std::string dtype_problem(const char* name, DType type, const DTypes& allowed);

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
  void dtype(const TensorView& view, const char* name, const DTypes& allowed) const {
    if (!allowed.has(view.dtype)) type_error(dtype_problem(name, view.dtype, allowed));
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
  // Slots that are contiguous each and may have gaps between them: only the first axis has a free stride.
  void contiguous_slots(const TensorView& view, const char* name) const;

  void range(std::int64_t value, const char* name, std::int64_t least, std::int64_t most) const;
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
  void dtype(const std::optional<TensorView>& view, const char* name, const DTypes& allowed) const {
    if (view) dtype(*view, name, allowed);
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
