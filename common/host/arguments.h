// The arrays of a call as a table: what is checked of all of them alike is written once, and no pair is forgotten. An
// operation makes its table from all members of its arguments, bound by name: a member that is added does not compile
// before it is bound there.
#pragma once

#include <optional>
#include <span>

#include "common/device/core/types.h"
#include "common/host/check.h"
#include "common/host/overlap.h"

namespace flashport {

// An argument whose rank has been checked; null where it was not given.
struct Argument {
  Argument(const TensorView* argument, const char* its_name, bool is_written = false)
      : view(argument), name(its_name), written(is_written) {
    if (view != nullptr) bytes = byte_range(*view);
  }
  Argument(const TensorView& argument, const char* its_name, bool is_written = false)
      : Argument(&argument, its_name, is_written) {}
  Argument(const std::optional<TensorView>& argument, const char* its_name, bool is_written = false)
      : Argument(argument ? &*argument : nullptr, its_name, is_written) {}

  const TensorView* view;
  const char* name;
  bool written;
  ByteRange bytes;
};

inline constexpr bool kWritten = true;

// All are where the first one is.
void check_devices(const Check& check, std::span<const Argument> arguments);

void check_inputs_readable(const Check& check, std::span<const Argument> arguments);

// Whatever is written shares memory with no other argument.
void check_outputs_apart(const Check& check, std::span<const Argument> arguments);

// An argument of int32 or int64 as kernels read it; null data where it was not given.
[[nodiscard]] IndexArray index_array(const std::optional<TensorView>& view);

}  // namespace flashport
