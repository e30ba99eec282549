// gated_delta_chunk: validate -> params -> workspace -> two launches, the prepare kernel and the chains over the
// chunks. The two run concurrently where the chains leave multiprocessors free. Nothing here depends on lengths, so
// that a graph may be replayed with other lengths.
#include <algorithm>
#include <string>
#include <vector>

#include <flashport/gated_delta.h>

#include "common/host/call_log.h"
#include "common/host/contents.h"
#include "common/host/devices.h"
#include "common/host/gated_delta/checks.h"
#include "common/host/gated_delta/kernel_choice.h"
#include "common/host/gated_delta/problem.h"
#include "common/host/workspace.h"

namespace flashport {
namespace {

constexpr Check kCheck("gated_delta_chunk");
constexpr std::int64_t kMaxBlocks = 1 << 20;

// Parts of the workspace in bytes, in this order; each begins where 16 divides the address.
struct Layout {
  std::int64_t chunks, matrices, factors, signals;

  [[nodiscard]] std::int64_t bytes() const { return 2 * matrices + factors + signals; }
};

// common/device/gated_delta/sequence.h says how chunks are numbered.
Layout layout_of(const GatedDeltaChunkParams& p, const KernelEntry& chain) {
  Layout layout{};
  layout.chunks = p.cu_seqlens.data != nullptr
                      ? p.tokens / kChunkTokens + std::int64_t{p.batch}
                      : std::int64_t{p.batch} * ((p.tokens + std::int64_t{kChunkTokens} - 1) / kChunkTokens);
  const std::int64_t head_chunks = layout.chunks * p.num_v_heads;
  const std::int64_t element_bytes = chain.shape.gated_delta_chunk.math == MathType::kFp32 ? 4 : 2;
  layout.matrices = head_chunks * kChunkTokens * kChunkTokens * element_bytes;
  layout.factors = head_chunks * static_cast<std::int64_t>(sizeof(ChunkFactors));
  layout.signals = head_chunks * static_cast<std::int64_t>(sizeof(unsigned));
  return layout;
}

void bind(const Layout& layout, void* data, GatedDeltaChunkParams& p) {
  auto* at = static_cast<char*>(data);
  auto* factors = at + 2 * layout.matrices;
  p.workspace = {at, at + layout.matrices, reinterpret_cast<ChunkFactors*>(factors),
                 reinterpret_cast<unsigned*>(factors + layout.factors), layout.chunks};
}

// Blocks of the chain's kernel, which strides over the chains: tests limit the blocks, so that each takes many chains.
std::int64_t chain_blocks(const GatedDeltaChunkParams& p) {
  const std::int64_t slices = (p.head_dim_v + kChunkColumns - 1) / kChunkColumns;
  const int limit = multiprocessor_limit();
  return std::min(std::int64_t{p.batch} * p.num_v_heads * slices, limit > 0 ? limit : kMaxBlocks);
}

// Whether the chain runs concurrently with the prepare kernel, on multiprocessors that the prepare kernel leaves free.
// Where the chain takes more than half of them, one kernel after the other is faster.
bool runs_concurrently(const KernelEntry& prepare, std::int64_t chains, int multiprocessors) {
  return prepare.signals && 2 * chains <= multiprocessors;
}

// Blocks of the prepare kernel: if it strides over its work, one for each multiprocessor that it has to itself.
std::int64_t prepare_blocks(const KernelEntry& prepare, std::int64_t work, std::int64_t multiprocessors) {
  return prepare.signals ? std::min(work, multiprocessors) * prepare.teams : work;
}

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
  const Layout layout = layout_of(p, *kernels.chain);
  const WorkspaceLease workspace =
      acquire_workspace(kCheck, device, stream, layout.bytes(), args.workspace, WorkspaceUse::kScratch);
  bind(layout, workspace.data(), p);
  const std::int64_t chains = chain_blocks(p), work = p.tokens > 0 ? layout.chunks * p.num_heads : 0;
  const int multiprocessors = device.multiprocessors();
  const bool concurrent = work > 0 && runs_concurrently(*kernels.prepare, chains, multiprocessors);
  if (!concurrent) p.workspace.signals = nullptr;
  const std::int64_t blocks = prepare_blocks(*kernels.prepare, work, multiprocessors - (concurrent ? chains : 0));
  device.launch(kCheck, stream, *kernels.prepare, LaunchGrid{blocks}, p);
  device.launch(kCheck, stream, *kernels.chain, LaunchGrid{chains}, p);
  log_call([&] {
    return call_text(kCheck, args) + ": " + launch_text(*kernels.prepare, blocks) +
           (concurrent ? ", and beside it " : ", then ") + launch_text(*kernels.chain, chains) + "; " +
           counted(layout.bytes(), "byte") + " of workspace";
  });
}

std::int64_t gated_delta_chunk_workspace_size(const GatedDeltaChunkArgs& args) {
  constexpr Check check("gated_delta_chunk_workspace_size");
  const GatedDeltaChunkParams p = gated_delta_chunk_size_problem(check, args);
  return layout_of(p, *choose_kernels(check, args, device_context(check, args.q, "q")).chain).bytes();
}

}  // namespace flashport
