#include "common/host/call_log.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/host/check.h"

namespace flashport {
namespace {

bool is_contiguous(const TensorView& view) {
  std::int64_t step = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    if (view.shape[axis] != 1 && view.strides[axis] != step) return false;
    step *= view.shape[axis];
  }
  return true;
}

std::string tensor_text(const TensorView& view) {
  const std::string text = dtype_name(view.dtype) + shape_text(view);
  return is_contiguous(view) ? text : text + " strides " + tuple_text(view.strides, view.rank);
}

}  // namespace

bool logs_calls() {
  static const bool on = [] {
    const char* text = std::getenv("FLASHPORT_LOG");
    return text != nullptr && std::strcmp(text, "calls") == 0;
  }();
  return on;
}

void write_call(const std::string& line) {
  const std::string text = "flashport: " + line + "\n";  // in one piece, for other threads write lines too
  std::fwrite(text.data(), 1, text.size(), stderr);
}

CallText::CallText(const char* function, std::span<const Argument> arguments)
    : text_(std::string(function) + "("), device_(device_name(arguments[0].view->device)) {
  for (const Argument& one : arguments) add(one.name, tensor_text(*one.view));
}

CallText& CallText::flag(const char* name, bool value) { return value ? add(name, "True") : *this; }

CallText& CallText::number(const char* name, const std::optional<double>& value) {
  return value ? add(name, number_text(*value)) : *this;
}

CallText& CallText::number(const char* name, double value, double usual) {
  return value == usual ? *this : add(name, number_text(value));
}

CallText& CallText::count(const char* name, std::int64_t value, std::int64_t usual) {
  return value == usual ? *this : add(name, std::to_string(value));
}

CallText& CallText::word(const char* name, const char* value, const char* usual) {
  return std::strcmp(value, usual) == 0 ? *this : add(name, value);
}

CallText& CallText::window(std::int64_t left, std::int64_t right) {
  const std::int64_t sides[] = {left, right};
  return left == -1 && right == -1 ? *this : add("window", tuple_text(sides, 2));
}

CallText& CallText::add(const char* name, const std::string& value) {
  text_ += std::string(first_ ? "" : ", ") + name + "=" + value;
  first_ = false;
  return *this;
}

std::string launch_text(const KernelEntry& kernel, std::int64_t blocks) {
  std::string text = kernel.key + (": " + counted(blocks, "block"));
  if (kernel.teams > 1) text += " in teams of " + std::to_string(kernel.teams);
  text += " of " + counted(kernel.threads, "thread");
  if (kernel.shared_bytes > 0) text += " and " + counted(kernel.shared_bytes, "byte") + " of shared memory";
  return text;
}

}  // namespace flashport
