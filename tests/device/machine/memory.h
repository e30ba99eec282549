// Memory of fibers and of blocks, which is kept from launch to launch.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>

#include "tests/device/machine/fiber.h"

namespace flashport::machine {

struct Memory {
  char* begin = nullptr;
  std::size_t bytes = 0;
  char* at_least(std::size_t wanted) {
    if (wanted <= bytes) return begin;
    if (begin != nullptr) munmap(begin, bytes);
    begin = static_cast<char*>(
        mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (begin == MAP_FAILED) std::abort();
    forget_frames(begin, wanted);  // of stacks that were there
    bytes = wanted;
    return begin;
  }
};

}  // namespace flashport::machine
