// explain(): what plan_update() and plan_chunks() decide about calls of these shapes.
#include <string>

#include <flashport/gated_delta.h>

#include "common/device/core/divisor.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/devices.h"
#include "common/host/gated_delta/checks.h"
#include "common/host/gated_delta/kernel_choice.h"
#include "common/host/gated_delta/plan.h"

namespace flashport {
namespace {

constexpr Check kCheck("explain");

}  // namespace

GatedDeltaSchedule explain(const GatedDeltaScheduleQuery& query) {
  kCheck.range(query.batch, "batch", 1, kMostDeltaExtent);
  kCheck.range(query.num_v_heads, "num_v_heads", 1, kMostDeltaExtent);
  std::string reason;
  const TargetView target = find_target(query.call.target, reason);
  if (!reason.empty()) kCheck.not_supported(reason);
  const KernelEntry* kernel = choose_gated_delta_update(target, request_of(query.call), reason);
  if (kernel == nullptr) kCheck.not_supported(reason);
  (void)find_device(kCheck, target);

  GatedDeltaUpdateParams p{};
  p.batch = static_cast<std::int32_t>(query.batch);
  p.head_dim_v = static_cast<std::int32_t>(query.call.head_dim_v);
  p.by_v_heads = make_divisor(query.num_v_heads);
  return schedule_of(plan_update(kCheck, *kernel, p));
}

GatedDeltaChunkSchedule explain(const GatedDeltaChunkScheduleQuery& query) {
  kCheck.range(query.batch, "batch", 1, kMostDeltaExtent);
  kCheck.range(query.num_heads, "num_heads", 1, kMostDeltaExtent);
  kCheck.range(query.num_v_heads, "num_v_heads", 1, kMostDeltaExtent);
  kCheck.range(query.tokens, "tokens", 1, kMostDeltaExtent);
  if (query.num_v_heads % query.num_heads != 0) {
    kCheck.value_error("num_v_heads must be a multiple of num_heads, got " + std::to_string(query.num_v_heads) +
                       " and " + std::to_string(query.num_heads));
  }
  std::string reason;
  const TargetView target = find_target(query.call.target, reason);
  if (!reason.empty()) kCheck.not_supported(reason);
  const ChunkKernels kernels = choose_gated_delta_chunk(target, request_of(query.call), reason);
  if (!reason.empty()) kCheck.not_supported(reason);
  const DeviceContext& device = find_device(kCheck, target);

  GatedDeltaChunkParams p{};
  p.batch = static_cast<std::int32_t>(query.batch);
  p.tokens = static_cast<std::int32_t>(query.tokens);
  p.num_heads = static_cast<std::int32_t>(query.num_heads);
  p.num_v_heads = static_cast<std::int32_t>(query.num_v_heads);
  p.head_dim_v = static_cast<std::int32_t>(query.call.head_dim_v);
  constexpr static std::int32_t kOffsets = 0;  // never read: that they are given is what counts
  if (query.packed) p.cu_seqlens = {&kOffsets, 0};
  return schedule_of(plan_chunks(kernels, p, device.multiprocessors()));
}

GatedDeltaSchedule schedule_of(const UpdatePlan& plan) {
  const KernelEntry& kernel = *plan.kernel;
  GatedDeltaSchedule s;
  s.kernel = kernel.key;
  s.columns = kernel.shape.gated_delta_update.tuning.columns;
  s.threads = kernel.threads;
  s.teams = kernel.teams;
  s.slices = plan.slices;
  s.blocks = plan.blocks;
  s.shared_bytes = kernel.shared_bytes;
  s.text = launch_text(kernel, plan.blocks) + ", each for " + counted(s.columns, "column") + " of a state";
  return s;
}

GatedDeltaChunkSchedule schedule_of(const ChunkPlan& plan) {
  const KernelEntry &prepare = *plan.kernels.prepare, &chain = *plan.kernels.chain;
  GatedDeltaChunkSchedule s;
  s.kernel = chain.key;
  s.columns = chain.shape.gated_delta_chunk.columns;
  s.threads = chain.threads;
  s.blocks = plan.chain_blocks;
  s.shared_bytes = chain.shared_bytes;
  s.prepare_kernel = prepare.key;
  s.prepare_threads = prepare.threads;
  s.prepare_teams = prepare.teams;
  s.prepare_blocks = plan.prepare_blocks;
  s.prepare_shared_bytes = prepare.shared_bytes;
  s.chunk_tokens = kChunkTokens;
  s.chunks = plan.layout.chunks;
  s.concurrent = plan.concurrent;
  s.workspace_bytes = plan.layout.bytes();
  s.text = launch_text(prepare, plan.prepare_blocks) + " for " + counted(s.chunks, "chunk") + " of " +
           counted(s.chunk_tokens, "token") + (plan.concurrent ? ", and beside it " : ", then ") +
           launch_text(chain, plan.chain_blocks) + " for " + counted(s.columns, "column") + " of a state each; " +
           counted(s.workspace_bytes, "byte") + " of workspace";
  return s;
}

}  // namespace flashport
