// Room for a descriptor of a tensor that only the vendor's side can make (KernelEntry::prepare).
#pragma once

#include <cstdint>

namespace flashport {

struct alignas(64) TensorMap {
  std::uint64_t words[16];
};

}  // namespace flashport
