#include "common/host/arguments.h"

#include <string>

namespace flashport {
namespace {

void check_apart(const Check& check, const Argument& output, const Argument& other) {
  switch (find_overlap(*output.view, *other.view)) {
    case Overlap::kNone: return;
    case Overlap::kShared:
      check.value_error(std::string(output.name) + " must not share memory with " + other.name +
                        "; pass another tensor");
    case Overlap::kUndecided:
      check.value_error(std::string(output.name) + " must not share memory with " + other.name +
                        ", and their strides are too irregular to find out whether they do; pass another tensor");
  }
}

}  // namespace

void check_devices(const Check& check, std::span<const Argument> arguments) {
  const Argument& first = arguments[0];
  for (const Argument& one : arguments.subspan(1)) {
    if (one.view != nullptr) check.device(*one.view, one.name, *first.view, first.name);
  }
}

void check_inputs_readable(const Check& check, std::span<const Argument> arguments) {
  for (const Argument& one : arguments) {
    if (one.view != nullptr && !one.written) check.readable(*one.view, one.name);
  }
}

void check_outputs_apart(const Check& check, std::span<const Argument> arguments) {
  for (const Argument& output : arguments) {
    if (output.view == nullptr || !output.written) continue;
    for (const Argument& other : arguments) {
      // What is not given, or has no elements, has no bytes that could meet.
      if (!output.bytes.meets(other.bytes) || &other == &output) continue;
      if (other.written && &other > &output) continue;  // which meets this one then
      check_apart(check, output, other);
    }
  }
}

IndexArray index_array(const std::optional<TensorView>& view) {
  if (!view) return {nullptr, 0};
  return {view->data, view->data != nullptr && view->dtype == DType::kInt64};
}

}  // namespace flashport
