#include "tests/support/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace flashport_test {
namespace {

std::string format(const char* text, double a, double b, double c, std::size_t at) {
  char line[200];
  std::snprintf(line, sizeof line, text, a, b, c, at);
  return line;
}

// Empty, or why two numbers do not have the same kind (finite, NaN, infinity of one sign).
bool same_kind(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return true;
}

double largest_finite(const std::vector<double>& values) {
  double largest = 0;
  for (double value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  return largest;
}

}  // namespace

Comparison compare(const std::vector<double>& ours, const std::vector<double>& exact, const std::vector<double>& plain,
                   double floor, double last_rounding) {
  Comparison result;
  if (ours.size() != exact.size() || plain.size() != exact.size()) {
    result.failure = "sizes differ";
    return result;
  }
  double ours_squares = 0, plain_squares = 0;
  std::size_t worst = 0, finite = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    if (!same_kind(ours[i], exact[i])) {
      result.failure = format("got %g where the oracle has %g (plain %g), element %zu", ours[i], exact[i], plain[i], i);
      return result;
    }
    if (!std::isfinite(exact[i])) continue;
    ++finite;
    const double mine = std::fabs(ours[i] - exact[i]), theirs = std::fabs(plain[i] - exact[i]);
    if (mine > result.ours.largest) {
      result.ours.largest = mine;
      worst = i;
    }
    result.plain.largest = std::max(result.plain.largest, theirs);
    ours_squares += mine * mine;
    plain_squares += theirs * theirs;
  }
  if (finite == 0) return result;
  result.ours.rms = std::sqrt(ours_squares / static_cast<double>(finite));
  result.plain.rms = std::sqrt(plain_squares / static_cast<double>(finite));
  if (result.ours.largest > kErrorRatio * result.plain.largest + floor + last_rounding) {
    result.failure = format("largest error %g, the plain implementation's is %g (floor %g), element %zu",
                            result.ours.largest, result.plain.largest, floor + last_rounding, worst) +
                     format(": got %.9g, oracle %.9g, plain %.9g", ours[worst], exact[worst], plain[worst], 0);
  } else if (result.ours.rms > kErrorRatio * result.plain.rms + floor) {
    result.failure = format("rms error %g, the plain implementation's is %g (floor %g)", result.ours.rms,
                            result.plain.rms, floor, 0);
  }
  return result;
}

double fp32_floor(const std::vector<double>& exact) { return 8 * 0x1p-24 * largest_finite(exact); }
double output_rounding(const std::vector<double>& exact, reference::Type type) {
  const double mantissa = type == reference::Type::kF16 ? 0x1p-11 : type == reference::Type::kBF16 ? 0x1p-8 : 0x1p-24;
  return mantissa * largest_finite(exact);
}
double lse_floor(const std::vector<double>& exact) { return 16 * 0x1p-24 * std::max(1.0, largest_finite(exact)); }

}  // namespace flashport_test
