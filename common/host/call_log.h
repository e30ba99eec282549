// The log of calls. With FLASHPORT_LOG=calls in the environment each call of an operation writes one line to stderr,
// after its kernels have been launched: its arguments as the library has understood them, and what runs.
//   flashport: merge_states(o=float32(3, 5, 64), lse=float32(3, 5), ...) on cpu: merge_states/cpu_avx512: 5 blocks
// Tensors that are not contiguous show their strides; options show where they are not the default.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "common/host/arguments.h"
#include "common/host/backend_abi.h"

namespace flashport {

// Whether there is a log. The environment is read once.
[[nodiscard]] bool logs_calls();

// Writes the line that `line()` makes, if there is a log.
void write_call(const std::string& line);
template <class Line>
void log_call(const Line& line) {
  if (logs_calls()) write_call(line());
}

// "function(argument=value, ...) on device"
class CallText {
 public:
  CallText(const char* function, std::span<const Argument> arguments);

  CallText& flag(const char* name, bool value);
  CallText& number(const char* name, const std::optional<double>& value);
  CallText& number(const char* name, double value, double usual);
  CallText& count(const char* name, std::int64_t value, std::int64_t usual);
  CallText& word(const char* name, const char* value, const char* usual);
  CallText& window(std::int64_t left, std::int64_t right);

  [[nodiscard]] std::string text() const { return text_ + ") on " + device_; }

 private:
  CallText& add(const char* name, const std::string& value);

  std::string text_, device_;
  bool first_ = true;
};

// A launch, as explain() says it too: "kernel: 5 blocks of 128 threads and 4096 bytes of shared memory". What is 0 is
// left out, and teams are named where a block of the device holds several of the grid's.
[[nodiscard]] std::string launch_text(const KernelEntry& kernel, std::int64_t blocks);
// What is said of a call that launches nothing.
inline constexpr char kNothingToDo[] = "nothing to do";

}  // namespace flashport
