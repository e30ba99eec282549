#include "common/host/check.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

namespace flashport {
namespace {

constexpr double kLargestFloat = std::numeric_limits<float>::max();
constexpr double kSmallestFloat = std::numeric_limits<float>::min();  // GPUs may flush smaller numbers to 0

void check_extents(const Check& check, const TensorView& view, const char* name) {
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] < 0) check.value_error(std::string(name) + " has a negative extent: " + shape_text(view));
  }
}

std::string dimensions(int rank) { return std::to_string(rank) + (rank == 1 ? " dimension" : " dimensions"); }

std::string strides_text(const TensorView& view) { return tuple_text(view.strides, view.rank); }

// Whether the strides prove that no two elements have one address: in the order of size, each stride is longer than all
// that the smaller ones reach.
bool elements_are_apart(const TensorView& view) {
  struct Axis {
    std::int64_t stride, extent;
  };
  Axis axes[kMaxRank];  // by stride
  int count = 0;
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] == 1) continue;
    const Axis next{view.strides[axis] < 0 ? -view.strides[axis] : view.strides[axis], view.shape[axis]};
    int i = count++;
    for (; i > 0 && axes[i - 1].stride > next.stride; --i) axes[i] = axes[i - 1];
    axes[i] = next;
  }
  std::int64_t reach = 0;
  for (int axis = 0; axis < count; ++axis) {
    if (axes[axis].stride <= reach) return false;
    reach += (axes[axis].extent - 1) * axes[axis].stride;
  }
  return true;
}

}  // namespace

std::string tuple_text(const std::int64_t* values, int count) {
  std::string text = "(";
  for (int i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += values[i] == kAnyExtent ? "any" : std::to_string(values[i]);
  }
  return text + (count == 1 ? ",)" : ")");
}

std::string number_text(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::string counted(std::int64_t count, const char* one) {
  return std::to_string(count) + " " + one + (count == 1 ? "" : "s");
}

std::string shape_text(const TensorView& view) { return tuple_text(view.shape, std::clamp(view.rank, 0, kMaxRank)); }

bool has_elements(const TensorView& view) {
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] == 0) return false;
  }
  return true;
}

void Check::rank(const TensorView& view, const char* name, int rank, const char* axes) const {
  if (view.rank != rank) {
    value_error(std::string(name) + " must have " + dimensions(rank) + " " + axes + ", got " +
                std::to_string(view.rank) + ": " + shape_text(view));
  }
  check_extents(*this, view, name);
}

void Check::rank(const TensorView& view, const char* name, int rank, const char* axes, int other_rank,
                 const char* other_axes) const {
  if (view.rank != rank && view.rank != other_rank) {
    value_error(std::string(name) + " must have " + std::to_string(rank) + " dimensions " + axes + " or " +
                std::to_string(other_rank) + " " + other_axes + ", got " + std::to_string(view.rank) + ": " +
                shape_text(view));
  }
  check_extents(*this, view, name);
}

void Check::shape(const TensorView& view, const char* name, const char* axes,
                  std::initializer_list<std::int64_t> expected) const {
  const std::int64_t* want = expected.begin();
  const int count = static_cast<int>(expected.size());
  bool same = view.rank == count;
  for (int axis = 0; same && axis < count; ++axis) same = want[axis] == kAnyExtent || view.shape[axis] == want[axis];
  if (same) return;
  value_error(std::string(name) + " must have shape " + axes + " = " + tuple_text(want, count) + ", got " +
              shape_text(view));
}

std::string dtype_problem(const char* name, DType type, const DTypes& allowed) {
  if (allowed.has(type)) return "";
  std::string text = std::string(name) + " must be ";
  for (int i = 0; i < allowed.count(); ++i) {
    if (i > 0) text += i + 1 == allowed.count() ? " or " : ", ";
    text += dtype_name(allowed[i]);
  }
  return text + ", got " + dtype_name(type);
}

void Check::device_error(const TensorView& view, const char* name, const TensorView& like,
                         const char* like_name) const {
  value_error(std::string(name) + " must be on " + device_name(like.device) + " as " + like_name + " is, got " +
              device_name(view.device));
}

void Check::readable(const TensorView& view, const char* name) const {
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  const int size = element_size(view.dtype);  // a power of two
  const bool is_aligned = (address & static_cast<std::uintptr_t>(size - 1)) == 0;
  if ((address != 0 && is_aligned) || !has_elements(view)) return;
  if (address == 0) {
    value_error(std::string(name) + " must have data, got a null pointer with shape " + shape_text(view));
  }
  value_error(std::string(name) + " must be aligned to its elements (" + std::to_string(size) +
              " bytes), got address " + std::to_string(address));
}

void Check::writable(const TensorView& view, const char* name) const {
  if (view.read_only) value_error(std::string(name) + " is written and must not be read-only; pass a copy");
  if (!has_elements(view)) return;
  readable(view, name);
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.strides[axis] == 0 && view.shape[axis] > 1) {
      value_error(std::string(name) + " is written and must not be broadcast, got stride 0 along axis " +
                  std::to_string(axis) + " of shape " + shape_text(view) + "; pass a copy");
    }
  }
  if (!elements_are_apart(view)) {
    value_error(std::string(name) + " is written and its elements must not overlap, got shape " + shape_text(view) +
                " with strides " + strides_text(view) + "; pass a copy");
  }
}

void Check::inner_contiguous(const TensorView& view, const char* name) const {
  const int last = view.rank - 1;
  if (view.strides[last] == 1 || view.shape[last] == 1 || !has_elements(view)) return;
  value_error(std::string(name) + " must have stride 1 along its last axis, got strides " + strides_text(view) +
              "; pass a contiguous copy");
}

void Check::contiguous(const TensorView& view, const char* name) const {
  std::int64_t step = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    if (view.shape[axis] != 1 && view.strides[axis] != step) {
      if (!has_elements(view)) return;
      value_error(std::string(name) + " must be contiguous, got shape " + shape_text(view) + " with strides " +
                  strides_text(view) + "; pass a contiguous copy");
    }
    step *= view.shape[axis];
  }
}

void Check::contiguous_slots(const TensorView& view, const char* name) const {
  if (!has_elements(view)) return;
  std::int64_t step = 1;
  for (int axis = view.rank - 1; axis > 0; --axis) {
    if (view.shape[axis] != 1 && view.strides[axis] != step) {
      value_error(std::string(name) + " must be contiguous within a slot, got shape " + shape_text(view) +
                  " with strides " + strides_text(view) + "; only its first axis may have another stride");
    }
    step *= view.shape[axis];
  }
}

void Check::range(std::int64_t value, const char* name, std::int64_t least, std::int64_t most) const {
  if (value >= least && value <= most) return;
  value_error(std::string(name) + " must be from " + std::to_string(least) + " to " + std::to_string(most) + ", got " +
              std::to_string(value));
}

void Check::finite(double value, const char* name) const {
  if (std::fabs(value) <= kLargestFloat) return;
  value_error(std::string(name) + " must be finite in fp32 (at most 3.40282e+38 in magnitude), got " +
              number_text(value));
}

void Check::positive(double value, const char* name) const {
  if (value >= kSmallestFloat && value <= kLargestFloat) return;
  value_error(std::string(name) + " must be positive and finite in fp32 (1.17549e-38 to 3.40282e+38), got " +
              number_text(value));
}

void Check::negative(double value, const char* name) const {
  if (-value >= kSmallestFloat && -value <= kLargestFloat) return;
  value_error(std::string(name) + " must be negative and finite in fp32 (-3.40282e+38 to -1.17549e-38), got " +
              number_text(value));
}

void Check::value_error(const std::string& text) const { throw ValueError(std::string(function_) + ": " + text); }
void Check::type_error(const std::string& text) const { throw TypeError(std::string(function_) + ": " + text); }
void Check::not_supported(const std::string& text) const {
  throw NotSupportedError(std::string(function_) + ": " + text);
}
void Check::backend_error(const std::string& text) const { throw BackendError(std::string(function_) + ": " + text); }

}  // namespace flashport
