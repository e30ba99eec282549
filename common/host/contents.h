// Checks of the contents of index tensors (lengths, page tables, slots) and in scales of caches. Where they lie in host
// memory a wrong value is a ValueError. On a GPU no call may wait, so kernels clamp lengths and nothing is checked,
// unless FLASHPORT_CHECK=1 asks for copies to the host and the same checks (a debug switch: every call then waits;
// refused while capturing).
#pragma once

#include <cstdint>
#include <string>

#include "common/host/check.h"
#include "common/host/devices.h"

namespace flashport {

// Whether this call checks contents: CPU tensors always, GPU tensors under FLASHPORT_CHECK=1.
[[nodiscard]] bool checks_contents(const Check& check, const DeviceContext& device, Stream stream);

// Each of `count` values lies in [low, high]; `limit` says in words where high comes from.
void check_index_range(const Check& check, const DeviceContext& device, Stream stream, const IndexArray& array,
                       std::int64_t count, const char* name, std::int64_t low, std::int64_t high, const char* limit);

// Each of `count` scales, if there are any, is finite and not 0: such a cache would hold nothing that is a number.
void check_scales(const Check& check, const DeviceContext& device, Stream stream, const float* scales,
                  std::int64_t count, const char* name);

// "seqlens[3] = 17" and "[0, 16]", as messages have them.
[[nodiscard]] std::string entry_text(const char* name, std::int64_t i, std::int64_t value);
[[nodiscard]] std::string range_text(std::int64_t low, std::int64_t high);

// For tests: as if FLASHPORT_CHECK were set so.
void set_content_checks(bool on);

}  // namespace flashport
