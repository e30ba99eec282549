#include "common/host/arguments.h"

#include <string>

#include "common/host/overlap.h"

namespace flashport {
namespace {

void check_strides(const Check& check, const Argument& argument) {
  switch (argument.strides) {
    case Strides::kAny: return;
    case Strides::kUnitInner: return check.inner_contiguous(*argument.view, argument.name);
    case Strides::kContiguous: return check.contiguous(*argument.view, argument.name);
    case Strides::kSlots: return check.contiguous_slots(*argument.view, argument.name);
  }
}

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

void check_ranks(const Check& check, std::span<const Argument> arguments) {
  for (const Argument& one : arguments) {
    const Axes &axes = one.axes, &other = one.other_axes;
    if (axes.text == nullptr || (axes.rule == Rank::kOrScalar && one.view->rank == 0)) continue;
    if (other.text != nullptr) {
      check.rank(*one.view, one.name, axes.rank, axes.text, other.rank, other.text);
    } else if (axes.rule != Rank::kAtLeast || one.view->rank < axes.rank) {
      check.rank(*one.view, one.name, axes.rank, axes.text);
    }
  }
}

void check_tensors(const Check& check, std::span<const Argument> arguments, Outputs outputs) {
  for (const Argument& one : arguments) check.dtype(*one.view, one.name, one.types);
  const Argument& first = arguments[0];
  for (const Argument& one : arguments.subspan(1)) check.device(*one.view, one.name, *first.view, first.name);
  for (const Argument& one : arguments) {
    if (one.access == kWritten) {
      if (outputs == Outputs::kSizedOnly) continue;
      check.writable(*one.view, one.name);
    } else {
      check.readable(*one.view, one.name);
    }
    check_strides(check, one);
  }
  if (outputs == Outputs::kWritten) check_outputs_apart(check, arguments);
}

void check_outputs_apart(const Check& check, std::span<const Argument> arguments) {
  ByteRange bytes[kMostArguments];
  for (std::size_t i = 0; i < arguments.size(); ++i) bytes[i] = byte_range(*arguments[i].view);
  for (std::size_t output = 0; output < arguments.size(); ++output) {
    if (arguments[output].access != kWritten) continue;
    for (std::size_t other = 0; other < arguments.size(); ++other) {
      if (other == output || !bytes[output].meets(bytes[other])) continue;
      if (arguments[other].access == kWritten && other > output) continue;  // its own turn compares the two
      check_apart(check, arguments[output], arguments[other]);
    }
  }
}

IndexArray index_array(const std::optional<TensorView>& view) {
  if (!view) return {nullptr, 0};
  return {view->data, view->data != nullptr && view->dtype == DType::kInt64};
}

}  // namespace flashport
