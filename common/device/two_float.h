// A number as the sum of two floats. Log gates are added up so: where one gate of a chunk is extreme, the differences
// of plain fp32 sums have lost the digits of the others.
#pragma once

#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

struct TwoFloat {
  float hi, lo;  // |lo| is at most half a unit in the last place of hi
};

FLASHPORT_DEVICE TwoFloat two_sum(float a, float b) {
  const float sum = a + b;
  const float b_part = sum - a;
  return {sum, (a - (sum - b_part)) + (b - b_part)};
}

FLASHPORT_DEVICE TwoFloat operator+(TwoFloat a, TwoFloat b) {
  const TwoFloat high = two_sum(a.hi, b.hi);
  return two_sum(high.hi, high.lo + (a.lo + b.lo));
}
FLASHPORT_DEVICE TwoFloat operator-(TwoFloat a, TwoFloat b) { return a + TwoFloat{0.0f - b.hi, 0.0f - b.lo}; }

FLASHPORT_DEVICE float exp_full(TwoFloat x) { return exp_full(x.hi) * (1.0f + x.lo); }

}  // namespace flashport::FLASHPORT_TARGET
