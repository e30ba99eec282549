// The argument of the streaming read (read_kernel.h).
#pragma once

#include <cstdint>

namespace flashport {

// A plain streaming read of `bytes` bytes (16-byte units): the ceiling of memory-bound kernels. The kernel keeps its
// sum alive by storing it if `bytes` is negative, which it never is.
struct ReadBandwidthParams {
  void* data;
  std::int64_t bytes;
};

}  // namespace flashport
