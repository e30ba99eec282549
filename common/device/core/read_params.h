// The argument of the streaming read (read_kernel.h).
#pragma once

#include <cstdint>

namespace flashport {

// A streaming read of `bytes` bytes, in vectors of 16: the ceiling of memory-bound kernels.
struct ReadBandwidthParams {
  void* data;
  std::int64_t bytes;
};

}  // namespace flashport
