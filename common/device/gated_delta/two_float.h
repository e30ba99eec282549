// A number as the sum of two floats. Log gates are added up in this form: where one gate of a chunk is extreme, the
// differences of plain fp32 sums have lost the digits of the others.
#pragma once

#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

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

// The rounding error is relative to the difference, with one rounding more than necessary.
FLASHPORT_DEVICE float difference(TwoFloat a, TwoFloat b) { return (a.hi - b.hi) + (a.lo - b.lo); }

// A number times log2(e), for exp2.
FLASHPORT_DEVICE TwoFloat to_base_2(float x) {
  constexpr float kHigh = 0x1.715476p+0f, kLow = 0x1.4ae0cp-26f;  // of log2(e)
  const float product = mul_rn(x, kHigh);
  return {product, fma_rn(x, kHigh, 0.0f - product) + mul_rn(x, kLow)};
}
using FLASHPORT_TARGET::exp2_approx;  // for floats
FLASHPORT_DEVICE float exp2_approx(TwoFloat x) { return exp2_approx(x.hi) * fma_rn(x.lo, 0.69314718f, 1.0f); }

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
