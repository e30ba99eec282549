// gated_delta_chunk: validate -> params -> workspace -> two launches, the prepare kernel and the chains over the
// chunks. The two run concurrently where the chains leave multiprocessors free. Nothing here depends on lengths, so
// that a graph may be replayed with other lengths.
#include <string>
#include <vector>

#include <flashport/gated_delta.h>

#include "common/host/call_log.h"
#include "common/host/contents.h"
#include "common/host/devices.h"
#include "common/host/gated_delta/checks.h"
#include "common/host/gated_delta/kernel_choice.h"
#include "common/host/gated_delta/plan.h"
#include "common/host/gated_delta/problem.h"
#include "common/host/workspace.h"

namespace flashport {
namespace {

constexpr Check kCheck("gated_delta_chunk");
ChunkKernels choose_kernels(const Check& check, const GatedDeltaChunkArgs& a, const DeviceContext& device) {
  const GatedDeltaRequest request{a.q.dtype,      a.state ? a.state->dtype : DType::kFloat32,
                                  a.q.shape[3],   a.v.shape[3],
                                  a.state_layout, GateForm::kHead};
  std::string reason;
  const ChunkKernels kernels = choose_gated_delta_chunk(device.target_view(), request, reason);
  if (!reason.empty()) check.not_supported(reason);
  return kernels;
}

void check_contents(const GatedDeltaChunkArgs& a, const GatedDeltaChunkParams& p, const DeviceContext& device,
                    Stream stream) {
  const std::vector<std::int64_t> lengths = sequence_lengths(kCheck, device, stream, p.batch, p.tokens, p.cu_seqlens);
  if (p.state.indices.data != nullptr) {
    const HostIndices slots(kCheck, device, stream, p.state.indices, p.batch);
    check_slots(kCheck, slots, p.batch, "state_indices", "state", a.state->shape[0], a.update_state);
  }
  if (!a.chunk_states || !a.cu_seqlens) return;
  std::int64_t chunks = 0;
  for (const std::int64_t length : lengths) chunks += (length + kChunkTokens - 1) / kChunkTokens;
  if (chunks <= a.chunk_states->shape[1]) return;
  kCheck.value_error("chunk_states must have a chunk for each " + std::to_string(kChunkTokens) +
                     " tokens of every sequence, " + std::to_string(chunks) + " together, got shape " +
                     shape_text(*a.chunk_states));
}

}  // namespace

void gated_delta_chunk(const GatedDeltaChunkArgs& args, Stream stream) {
  GatedDeltaChunkParams p = gated_delta_chunk_problem(kCheck, args);
  if (p.batch == 0 || (p.tokens == 0 && !args.final_states)) {
    return log_call([&] { return call_text(kCheck, args) + ": " + kNothingToDo; });
  }
  DeviceContext& device = device_context(kCheck, args.q, "q");
  const ChunkKernels kernels = choose_kernels(kCheck, args, device);
  if (checks_contents(kCheck, device, stream)) check_contents(args, p, device, stream);
  const ChunkPlan plan = plan_chunks(kernels, p, device.multiprocessors());
  const WorkspaceLease workspace =
      acquire_workspace(kCheck, device, stream, plan.layout.bytes(), args.workspace, WorkspaceUse::kScratch);
  bind(plan, workspace.data(), p);
  device.launch(kCheck, stream, *kernels.prepare, LaunchGrid{plan.prepare_blocks}, p);
  device.launch(kCheck, stream, *kernels.chain, LaunchGrid{plan.chain_blocks}, p);
  log_call([&] { return call_text(kCheck, args) + ": " + schedule_of(plan).text; });
}

std::int64_t gated_delta_chunk_workspace_size(const GatedDeltaChunkArgs& args) {
  constexpr Check check("gated_delta_chunk_workspace_size");
  const GatedDeltaChunkParams p = gated_delta_chunk_size_problem(check, args);
  const DeviceContext& device = device_context(check, args.q, "q");
  return plan_chunks(choose_kernels(check, args, device), p, device.multiprocessors()).layout.bytes();
}

}  // namespace flashport
