// The arrays of a call as a table: a row says all that is checked of an argument alone, so that a check of all rows
// forgets none and no pair. An operation makes its table from all members of its arguments, bound by name: a member
// that is added does not compile before it is bound there. What several arguments must agree on (extents,
// combinations) is checked by hand between these checks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "common/device/core/types.h"
#include "common/host/check.h"

namespace flashport {

enum Access : std::uint8_t { kRead, kWritten };

// How an argument must lie in memory. kUnitInner: its last axis has stride 1. kSlots: only its first axis may have
// gaps.
enum class Strides : std::uint8_t { kAny, kUnitInner, kContiguous, kSlots };

// kOrScalar: a tensor without axes will do as well.
enum class Rank : std::uint8_t { kExact, kOrScalar, kAtLeast };

// The axes of an argument, and what messages call them: "(batch, num_q_heads)". No text: its rank is checked by hand.
struct Axes {
  int rank = 0;
  const char* text = nullptr;
  Rank rule = Rank::kExact;
};

struct Argument {
  const TensorView* view;
  const char* name;
  DTypes types;
  Access access;
  Strides strides;
  Axes axes, other_axes;  // either of two
};

inline constexpr std::size_t kMostArguments = 64;

// The arguments that were given. The views live as long as the call's arguments do.
template <std::size_t kMost>
class ArgumentTable {
  static_assert(kMost <= kMostArguments);

 public:
  void add(const TensorView& view, const char* name, Access access, const DTypes& types, Strides strides,
           const Axes& axes = {}, const Axes& other_axes = {}) {
    rows_[count_++] = {&view, name, types, access, strides, axes, other_axes};
  }
  void add(const std::optional<TensorView>& view, const char* name, Access access, const DTypes& types, Strides strides,
           const Axes& axes = {}, const Axes& other_axes = {}) {
    if (view) add(*view, name, access, types, strides, axes, other_axes);
  }

  operator std::span<const Argument>() const { return {rows_.data(), count_}; }

 private:
  std::array<Argument, kMost> rows_;  // the first count_ are filled
  std::size_t count_ = 0;
};

// kSizedOnly: the call asks for sizes, its outputs have no memory yet.
enum class Outputs : std::uint8_t { kWritten, kSizedOnly };

// Rows are checked in the table's order, and a check is through all of them before the next begins.
void check_ranks(const Check& check, std::span<const Argument> arguments);
// Types; that all are where the first one is; that inputs can be read and outputs written, that both lie as their rows
// say, and that outputs are apart.
void check_tensors(const Check& check, std::span<const Argument> arguments, Outputs outputs = Outputs::kWritten);
// What is written shares memory with no other argument.
void check_outputs_apart(const Check& check, std::span<const Argument> arguments);

// Whether a tensor that is no std::optional was given: a size may be asked for without an output.
[[nodiscard]] inline bool is_given(const TensorView& view) { return view.rank != 0 || view.data != nullptr; }

// Null where an argument was not given.
template <class T>
[[nodiscard]] const T* data_of(const std::optional<TensorView>& view) {
  return view ? static_cast<const T*>(view->data) : nullptr;
}

// An argument of int32 or int64 as kernels read it; null data where it was not given.
[[nodiscard]] IndexArray index_array(const std::optional<TensorView>& view);

}  // namespace flashport
