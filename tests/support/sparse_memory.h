// Memory for offsets past 2^31 elements.
#pragma once

#include <sys/mman.h>

#include <cstddef>

#include "tests/support/device.h"

namespace flashport_test {

// Gigabytes of addresses of which a few pages are touched.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes) : bytes_(bytes) {
    if (device().kind == flashport::DeviceKind::kCpu) {
      memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory_ == MAP_FAILED) memory_ = nullptr;
    } else if (backend().allocate(device().index, bytes, &memory_) != nullptr) {
      memory_ = nullptr;
    }
  }
  ~SparseMemory() {
    if (memory_ == nullptr) return;
    if (device().kind == flashport::DeviceKind::kCpu) {
      munmap(memory_, bytes_);
    } else {
      backend().release(device().index, memory_);
    }
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  [[nodiscard]] char* data() const { return static_cast<char*>(memory_); }

 private:
  std::size_t bytes_;
  void* memory_ = nullptr;
};

}  // namespace flashport_test
