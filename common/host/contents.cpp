#include "common/host/contents.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "common/host/host_indices.h"

namespace flashport {
namespace {

bool switch_from_environment() {
  const char* text = std::getenv("FLASHPORT_CHECK");
  return text != nullptr && *text != '\0' && std::strcmp(text, "0") != 0;
}

std::atomic<bool>& content_checks() {
  static std::atomic<bool> on = switch_from_environment();
  return on;
}

}  // namespace

std::string entry_text(const char* name, std::int64_t i, std::int64_t value) {
  return std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(value);
}

std::string range_text(std::int64_t low, std::int64_t high) {
  std::string text = "[";
  text.append(std::to_string(low)).append(", ").append(std::to_string(high)).append("]");
  return text;
}

bool checks_contents(const Check& check, const DeviceContext& device, Stream stream) {
  if (device.is_cpu()) return true;
  if (!content_checks().load(std::memory_order_relaxed)) return false;
  std::uint64_t capture = 0;
  device.expect(check, device.abi().capture_id(device.device().index, stream, &capture));
  if (capture != 0) {
    check.value_error("FLASHPORT_CHECK=1 waits for the device and cannot be used while a graph is captured; unset it");
  }
  return true;
}

void set_content_checks(bool on) { content_checks().store(on, std::memory_order_relaxed); }

void check_index_range(const Check& check, const DeviceContext& device, Stream stream, const IndexArray& array,
                       std::int64_t count, const char* name, std::int64_t low, std::int64_t high, const char* limit) {
  const HostIndices values(check, device, stream, array, count);
  for (std::int64_t i = 0; i < count; ++i) {
    if (values[i] >= low && values[i] <= high) continue;
    check.value_error(entry_text(name, i, values[i]) + " must lie in " + range_text(low, high) + " (" + limit + ")");
  }
}

void check_scales(const Check& check, const DeviceContext& device, Stream stream, const float* scales,
                  std::int64_t count, const char* name) {
  if (scales == nullptr) return;
  const HostBytes bytes(check, device, stream, scales, count * static_cast<std::int64_t>(sizeof(float)));
  for (std::int64_t i = 0; i < count; ++i) {
    const float scale = bytes.as<float>()[i];
    if (std::isfinite(scale) && scale != 0.0f) continue;
    check.value_error(std::string(name) + "[" + std::to_string(i) + "] = " + number_text(scale) +
                      " must be finite and not 0; pass None for a scale of 1");
  }
}

}  // namespace flashport
