// The registers of mma.sync's sums, tile by tile.
#pragma once

#include "cuda/arch/block.h"

namespace flashport::FLASHPORT_TARGET::decode {

// f(register, tile of the first axis, tile of the second, i)
template <class Float, int kFirst, int kSecond, class F>
FLASHPORT_DEVICE void for_each_register(Float (&c)[kFirst][kSecond][4], F&& f) {
#pragma unroll
  for (int first = 0; first < kFirst; ++first) {
#pragma unroll
    for (int second = 0; second < kSecond; ++second) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(c[first][second][i], first, second, i);
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
