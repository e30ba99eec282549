#include "tests/support/device_choice.h"

namespace flashport_test {

DeviceChoice choose_device(const flashport::BackendAbi& backend, const std::string& target) {
  const std::string none = "no device of target " + target + ": ";
  int count = 0;
  if (const char* error = backend.device_count(&count)) return {-1, none + error, kNoDevice};
  if (count == 0) return {-1, none + backend.name + " sees no device", kNoDevice};
  std::string seen, broken;
  for (int index = 0; index < count; ++index) {
    const std::string name = std::string(backend.name) + ":" + std::to_string(index);
    flashport::BackendDevice info{};
    if (const char* error = backend.device_info(index, &info)) {
      broken += (broken.empty() ? "" : "; ") + name + " cannot be used: " + error;
      continue;
    }
    const std::string card = std::string(info.name) + ", " + info.architecture;
    if (info.target == target) return {index, target + " runs on " + name + " (" + card + ")"};
    seen += (seen.empty() ? "" : "; ") + name + " is " + card;
  }
  if (!broken.empty()) return {-1, none + broken, 2};
  return {-1, none + seen, kNoDevice};
}

}  // namespace flashport_test
