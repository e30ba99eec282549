// Where rows of a tile lie in memory, each in the lane of the wave that looked it up.
#pragma once

#include <limits>

#include "hip/arch/words.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The value of lane `lane` of the wave.
FLASHPORT_DEVICE unsigned value_of_lane(unsigned x, unsigned lane) {
  return static_cast<unsigned>(__builtin_amdgcn_ds_bpermute(static_cast<int>(lane * 4), static_cast<int>(x)));
}

struct RowOffsets {
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::min();  // of no row; strides may be negative
  GlobalBytes data;
  std::int64_t own;

  // The address of byte `byte` of the row of lane `lane`, or of zeros.
  template <class Byte>
  FLASHPORT_DEVICE GlobalBytes address(unsigned lane, Byte byte, bool is_live) const {
    const Words2 words = __builtin_bit_cast(Words2, own);
    const Words2 theirs = {value_of_lane(words[0], lane), value_of_lane(words[1], lane)};
    const bool is_row = theirs[1] != static_cast<unsigned>(kNone >> 32);
    return is_live && is_row ? data + __builtin_bit_cast(std::int64_t, theirs) + byte : zero_row();
  }
};

}  // namespace flashport::FLASHPORT_TARGET::attention
