// From a validated attention call to its launch: which kernel, how many blocks, in which order their work lies. Pure
// but for the device's kernel table and occupancy, and for what tests limit.
#pragma once

#include <cstdint>

#include "common/host/attention/problem.h"
#include "common/host/backend_abi.h"
#include "common/host/devices.h"

namespace flashport {

// The launch that writes new keys, and what it leaves for those after it, in the workspace after theirs.
struct AppendLaunch {
  const KernelEntry* kernel = nullptr;
  std::int64_t grid = 0;
  AppendRotaryParams params{};
  std::int64_t offset = 0;  // in the workspace
};

// `workspace_bytes` of the launches after it; grows by what this one needs.
[[nodiscard]] AppendLaunch plan_append(const AttentionProblem& problem, DeviceContext& device,
                                       std::int64_t& workspace_bytes);

struct AttentionPlan {
  const KernelEntry* kernel = nullptr;
  std::int64_t work_tiles = 0;  // no call of these shapes has more
  std::int64_t grid = 0;        // blocks, which take work tiles until there are no more
  int cluster = 1;              // of them: neighbours that share key tiles, where TMA can read these
  AttentionParams params{};     // all but the workspace's
  std::int64_t workspace_bytes = 0;

  // Where keys may be cut: the merge of the pieces, and where their partial results lie in the workspace.
  const KernelEntry* merge_kernel = nullptr;
  std::int64_t merge_grid = 0;
  std::int64_t partial_out_offset = 0, partial_lse_offset = 0;

  AppendLaunch append;  // before it; no kernel where there are no new keys
};

[[nodiscard]] AttentionPlan plan_attention(const AttentionProblem& problem, DeviceContext& device);

// Points the params to the parts of the workspace.
void bind_workspace(AttentionPlan& plan, void* workspace);

// What explain() and the log of calls say of a plan.
[[nodiscard]] AttentionSchedule schedule_of(const AttentionPlan& plan);

}  // namespace flashport
