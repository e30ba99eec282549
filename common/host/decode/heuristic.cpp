// The published split-count heuristic: as few splits as fill the device about as well as the best count does.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include <flashport/decode.h>

#include "common/host/rounding.h"

namespace flashport {

int num_splits_heuristic(int batch_nheads_mblocks, int num_sms, int num_n_blocks, int max_splits) {
  if (static_cast<float>(batch_nheads_mblocks) >= 0.8f * static_cast<float>(num_sms)) return 1;
  const std::int64_t most = std::min({max_splits, num_sms, num_n_blocks});
  // A count that leaves the blocks of the longest split as they were cannot help.
  const auto eligible = [&](std::int64_t splits) {
    return splits == 1 || ceil_div(num_n_blocks, splits) != ceil_div(num_n_blocks, splits - 1);
  };
  const auto efficiency = [&](std::int64_t splits) {
    const float waves =
        static_cast<float>(batch_nheads_mblocks) * static_cast<float>(splits) / static_cast<float>(num_sms);
    return waves / std::ceil(waves);
  };
  float best = 0.0f;
  for (std::int64_t splits = 1; splits <= most; ++splits) {
    if (eligible(splits)) best = std::max(best, efficiency(splits));
  }
  for (std::int64_t splits = 1; splits <= most; ++splits) {
    if (eligible(splits) && efficiency(splits) >= 0.85f * best) return static_cast<int>(splits);
  }
  return 1;
}

}  // namespace flashport
