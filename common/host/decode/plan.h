// From a validated decode call to launches: which kernel, how many blocks, what workspace. Pure but for the device's
// kernel table and occupancy.
//   invariant schedule  one launch of a persistent grid; counters and partial results in the workspace
//   n equal splits      n == 1: one launch; else partial results go to the workspace and decode_stage2 merges them
//   stage 1             one launch, one block per chunk; out and lse are the caller's mid tensors
// A long split may be combined through the workspace, so that launches of fixed splits may need one too.
#pragma once

#include <cstdint>

#include "common/device/decode/params.h"
#include "common/device/merge/params.h"
#include "common/host/backend_abi.h"
#include "common/host/decode/problem.h"
#include "common/host/devices.h"

namespace flashport {

// The launch that merges results of parts of the keys, which the launches before it leave in the workspace:
//   mid [sequence, token] or [row of a ragged q], [head, part, head_dim_v], then lse of the same axes.
struct MergeLaunch {
  const KernelEntry* kernel = nullptr;  // null: there is none
  std::int64_t grid = 0;
  Stage2Params params{};
  std::int64_t bytes = 0;   // that the results take
  std::int64_t offset = 0;  // of them in the workspace
  std::int64_t lse_offset = 0;

  void bind(char* workspace);
};

// Merges the results of `parts` of the keys; `params` then write these in place of the output.
[[nodiscard]] MergeLaunch plan_merge(DecodeParams& params, std::int64_t total_q, std::int64_t parts, const Check& check,
                                     const DeviceContext& device);

// Scales that lie beside the only cache, as kernels read them that read factors (FactorDecodeParams).
struct FactorRows {
  Factors kind = Factors::kNone;  // kNone: none of these does
  CacheParams k{}, v{};
};

struct DecodePlan {
  const KernelEntry* kernel = nullptr;
  std::int64_t grid = 0;
  DecodeParams params{};
  FactorRows factors;
  std::int64_t workspace_bytes = 0;  // counters first, whatever the schedule
  std::int64_t partials_offset = 0;

  const KernelEntry* combine_kernel = nullptr;  // null: tiles are combined in the launch
  std::int64_t combine_grid = 0;

  MergeLaunch merge;
};

[[nodiscard]] DecodePlan plan_decode(const DecodeProblem& problem, DeviceContext& device);

// Whether one kernel reads the segments of the call as they are stored.
[[nodiscard]] bool reads_segments_as_stored(const DecodeProblem& problem, DeviceContext& device);

// What a kernel that reads segments takes in place of the plan's params: the call's, or its cache as the only one.
[[nodiscard]] MixedDecodeParams mixed_params(const DecodeProblem& problem, const DecodePlan& plan);

// The same of a kernel that reads segments as they are stored.
[[nodiscard]] SegmentsDecodeParams segments_params(const DecodeProblem& problem, const DecodePlan& plan);

// What explain() and the log of calls say of a plan.
[[nodiscard]] DecodeSchedule schedule_of(const DecodePlan& plan);

// Points the plan at its workspace, which is 16-byte aligned.
void bind_workspace(DecodePlan& plan, void* workspace);

}  // namespace flashport
