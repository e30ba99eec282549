// Blocks of a launch that meet at a counter: what one of them adds, and the sum at which all have come.
#pragma once

#include <cstdint>

namespace flashport {

struct Arrival {
  std::uint32_t* counter;
  int add;  // 0: nothing to tell
  int goal;
};

}  // namespace flashport
