// How products of queries and keys become logits in base 2: softmax_scale and softcap, checked, and as kernels take
// them.
#pragma once

#include <cstdint>
#include <optional>

#include "common/host/check.h"

namespace flashport {

// Refuses numbers that kernels, which take them in fp32, would find infinite, or 0 where that means another thing.
void check_score_numbers(const Check& check, const char* scale_name, const std::optional<double>& softmax_scale,
                         double softcap);

// Without a softcap logits are q.k * score_scale, with one cap_scale * tanh(q.k * score_scale).
struct ScoreScales {
  float score_scale, cap_scale;
};
[[nodiscard]] ScoreScales score_scales(const std::optional<double>& softmax_scale, double softcap,
                                       std::int64_t head_dim);

// Sets them in an operation's params.
template <class Params>
void fill_scores(Params& params, const std::optional<double>& softmax_scale, double softcap) {
  const ScoreScales scales = score_scales(softmax_scale, softcap, params.head_dim_qk);
  params.score_scale = scales.score_scale;
  params.cap_scale = scales.cap_scale;
}

// Both sides of a window are -1 (infinite) or a count of keys.
void check_window(const Check& check, std::int64_t left, std::int64_t right);

}  // namespace flashport
