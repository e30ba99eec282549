// The gates of the gated delta rule, scalar, in fp32 and with functions of full precision: every later token inherits
// the error of a gate.
#pragma once

#include "common/device/gated_delta/params.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

FLASHPORT_DEVICE float sigmoid_full(float x) { return 1.0f / (1.0f + exp_full(0.0f - x)); }

// log1p: for x far below 0 the result is exp(x), which 1 + exp(x) would lose.
FLASHPORT_DEVICE float softplus_full(float x, float beta, float threshold) {
  const float scaled = beta * x;
  return scaled <= threshold ? log1p_full(exp_full(scaled)) / beta : x;
}

// g for x = a + dt_bias and rate = exp(A_log); the state is multiplied with exp(g).
FLASHPORT_DEVICE float log_decay(const GatedDeltaUpdateParams& p, float x, float rate) {
  return p.has_lower_bound ? p.lower_bound * sigmoid_full(rate * x)
                           : 0.0f - rate * softplus_full(x, p.softplus_beta, p.softplus_threshold);
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
