#include "common/host/scores.h"

#include <cmath>
#include <limits>
#include <string>

namespace flashport {
namespace {

constexpr double kLog2e = 1.4426950408889634;
constexpr double kLargestFloat = std::numeric_limits<float>::max();
constexpr double kSmallestFloat = std::numeric_limits<float>::min();
constexpr double kMostScore = 2.3e38;  // times log2(e), in which scores are kept, just below the largest float

}  // namespace

void check_score_numbers(const Check& check, const char* scale_name, const std::optional<double>& softmax_scale,
                         double softcap) {
  const double scale = softmax_scale.value_or(1.0);
  if (!(std::fabs(scale) <= kMostScore)) {
    check.value_error(std::string(scale_name) +
                      " must be finite in fp32, times log2(e) (at most 2.3e+38 in magnitude), got " +
                      number_text(scale));
  }
  if (softcap == 0.0) return;
  if (!(softcap >= kSmallestFloat && softcap <= kMostScore)) {
    check.value_error("softcap must be 0 (off) or a positive number of fp32 (1.17549e-38 to 2.3e+38), got " +
                      number_text(softcap));
  }
  if (std::fabs(scale / softcap) <= kLargestFloat) return;
  check.value_error(std::string(scale_name) + " / softcap must be finite in fp32 (at most 3.40282e+38), got " +
                    number_text(scale) + " / " + number_text(softcap));
}

ScoreScales score_scales(const std::optional<double>& softmax_scale, double softcap, std::int64_t head_dim) {
  const double scale = softmax_scale ? *softmax_scale : 1.0 / std::sqrt(static_cast<double>(head_dim));
  if (softcap > 0.0) return {static_cast<float>(scale / softcap), static_cast<float>(softcap * kLog2e)};
  return {static_cast<float>(scale * kLog2e), 0.0f};
}

void check_window(const Check& check, std::int64_t left, std::int64_t right) {
  if (left >= -1 && right >= -1) return;
  check.value_error("window must be two numbers from -1 (infinite) on, got (" + std::to_string(left) + ", " +
                    std::to_string(right) + ")");
}

}  // namespace flashport
