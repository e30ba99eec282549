// A call of flash_decode_mixed whose segments are each read by the kernel of its formats, where the caller asks for it,
// no kernel reads all of them as they are stored, and each segment has one: a launch for each, and one that merges
// their results. Such a kernel reads in down to half the time that the kernel of all formats takes (docs/tuning.md).
// Which kernels run follows from what is asked and from the formats alone: bits depend on no length and on no batch.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/host/decode/plan.h"

namespace flashport {

struct SegmentLaunches {
  std::vector<DecodePlan> segments;  // the oldest first
  MergeLaunch merge;
  std::int64_t workspace_bytes = 0;  // of counters and partial results; launches use them one after the other
};

// Nothing where one kernel reads all segments: as they are stored, or since one of them has no kernel of its own.
[[nodiscard]] std::optional<SegmentLaunches> plan_segments(const DecodeProblem& problem, DeviceContext& device);

// Points the launches at their workspace, which is 16-byte aligned.
void bind_workspace(SegmentLaunches& launches, void* workspace);

// What the log of calls says of them.
[[nodiscard]] std::string text_of(const SegmentLaunches& launches);

}  // namespace flashport
