// A call of flash_decode_mixed as a launch for each segment and one that merges their results, where the caller asks
// for it and each segment has a kernel of its own. Such a kernel reads in down to half the time that the kernel of all
// formats takes, which outweighs the launches where much is read (docs/tuning.md). Whether it is so follows from what
// is asked and from the formats alone: bits depend on no length and on no batch.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/host/decode/plan.h"

namespace flashport {

struct SegmentLaunches {
  std::vector<DecodePlan> segments;  // the oldest first
  MergeLaunch merge;
  std::int64_t workspace_bytes = 0;  // of counters and partial results, which launches use one after the other
};

// Nothing where one launch reads all segments.
[[nodiscard]] std::optional<SegmentLaunches> plan_segments(const DecodeProblem& problem, DeviceContext& device);

// Points the launches at their workspace, which is 16-byte aligned.
void bind_workspace(SegmentLaunches& launches, void* workspace);

// What the log of calls says of them.
[[nodiscard]] std::string text_of(const SegmentLaunches& launches);

}  // namespace flashport
