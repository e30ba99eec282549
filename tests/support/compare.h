// The tolerance of DESIGN's numerics: our error against fp64 is at most 1.5 times that of the plain same-precision
// implementation, in the maximum and in the root mean square, plus a floor of a few roundings; infinities and NaN lie
// at equal indices.
#pragma once

#include <string>
#include <vector>

#include "tests/reference/codecs.h"

namespace flashport_test {

struct Errors {
  double largest = 0, rms = 0;
};

struct Comparison {
  Errors ours, plain;
  std::string failure;  // empty: within the tolerance
};

inline constexpr double kErrorRatio = 1.5;

// `floor`: below this, two implementations cannot be ranked. `last_rounding`: added to the maximum's floor alone.
[[nodiscard]] Comparison compare(const std::vector<double>& ours, const std::vector<double>& exact,
                                 const std::vector<double>& plain, double floor, double last_rounding = 0);

// The floor of sums of fp32 products whose result is at most `largest` in magnitude: eight roundings of fp32. The plain
// implementation's luck (a result that happens to need no rounding) must not make a correct one fail.
[[nodiscard]] double fp32_floor(const std::vector<double>& exact);
// Half a unit in the last place of the largest result. A maximum over one short request has few samples: where the
// plain one's last rounding happened to go the right way, a correct one's may not. Over a whole call no such allowance
// is made.
[[nodiscard]] double output_rounding(const std::vector<double>& exact, reference::Type type);
// The same for an lse, which is a maximum plus a logarithm: sixteen roundings, of 1 where all of them are small.
[[nodiscard]] double lse_floor(const std::vector<double>& exact);

}  // namespace flashport_test
