// A call of flash_decode_mixed whose segments are each read by the kernel of its formats, where the caller asks for it
// and each segment has one. Such a kernel reads in down to half the time that the kernel of all formats takes
// (docs/tuning.md). Where the target has a kernel for the pair of formats, one launch reads all segments and another
// combines what it leaves; else there is a launch for each, and one that merges their results. Which kernels run
// follows from what is asked and from the formats alone: bits depend on no length and on no batch.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/host/decode/plan.h"

namespace flashport {

struct SegmentLaunches {
  std::vector<DecodePlan> segments;  // the oldest first; each a launch, or its share of the one of all
  MergeLaunch merge;
  std::int64_t workspace_bytes = 0;  // of counters and partial results; launches use them one after the other

  const KernelEntry* kernel = nullptr;  // of the launch that reads all segments; null: there is none, nor the next one
  std::int64_t grid = 0;
  const KernelEntry* combine_kernel = nullptr;
  std::int64_t combine_grid = 0;
  std::int32_t combine_parts = 0;  // its blocks of a tile
  SegmentsDecodeParams params{};
};

// Nothing where a segment has no kernel of its own, so that the kernel of all formats reads all of them.
[[nodiscard]] std::optional<SegmentLaunches> plan_segments(const DecodeProblem& problem, DeviceContext& device);

// Points the launches at their workspace, which is 16-byte aligned.
void bind_workspace(SegmentLaunches& launches, void* workspace);

// What the log of calls says of them.
[[nodiscard]] std::string text_of(const SegmentLaunches& launches);

}  // namespace flashport
