// What scores are subtracted from before exp2. It need not be the maximum: any number near it gives the same quotient
// o / l. So a row's reference stays while its scores exceed it by kHeadroom at most, and o is rescaled only when it
// rises: in the first leaf of a chunk, and rarely after that. Whether a row's reference rises follows from that row's
// own scores alone, so that rows do not change each other's bits.
#pragma once

#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::decode {

// Base 2: probabilities are at most 2^8, far below the end of fp16, and their sums below that of fp32.
inline constexpr float kHeadroom = 8.0f;

FLASHPORT_DEVICE float raised_reference(float reference, float row_max) {
  return row_max > reference + kHeadroom ? row_max : reference;
}
// No NaN where all scores are -inf.
FLASHPORT_DEVICE float finite(float reference) { return reference == -kInfinity ? 0.0f : reference; }

FLASHPORT_DEVICE bool any_lane(bool x) { return __ballot(x) != 0; }

}  // namespace flashport::FLASHPORT_TARGET::decode
