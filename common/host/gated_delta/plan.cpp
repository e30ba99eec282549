#include "common/host/gated_delta/plan.h"

#include <algorithm>
#include <string>

#include "common/device/core/divisor.h"
#include "common/host/devices.h"

namespace flashport {
namespace {

constexpr std::int64_t kMostSlices = 0x7fffffff;  // they are counted in 32 bits
constexpr std::int64_t kMaxBlocks = 1 << 20;

// common/device/gated_delta/sequence.h says how chunks are numbered.
ChunkLayout layout_of(const GatedDeltaChunkParams& p, const KernelEntry& chain) {
  ChunkLayout layout{};
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

}  // namespace

UpdatePlan plan_update(const Check& check, const KernelEntry& kernel, GatedDeltaUpdateParams& p) {
  const int columns = kernel.shape.gated_delta_update.tuning.columns;
  const std::int64_t head_slices = (p.head_dim_v + columns - 1) / columns;
  const std::int64_t heads = std::int64_t{p.batch} * p.by_v_heads.value;
  if (heads > kMostSlices / head_slices) {
    check.not_supported("the call has " + std::to_string(heads) + " states of " + std::to_string(head_slices) +
                        " slices, more than " + std::to_string(kMostSlices) + " together; cut the batch");
  }
  p.by_head_slices = make_divisor(head_slices);
  return {&kernel, head_slices, heads * head_slices};
}

ChunkPlan plan_chunks(const ChunkKernels& kernels, const GatedDeltaChunkParams& p, int multiprocessors) {
  ChunkPlan plan{.kernels = kernels, .layout = layout_of(p, *kernels.chain), .chain_blocks = chain_blocks(p)};
  const std::int64_t work = p.tokens > 0 ? plan.layout.chunks * p.num_heads : 0;
  plan.concurrent = work > 0 && runs_concurrently(*kernels.prepare, plan.chain_blocks, multiprocessors);
  plan.prepare_blocks =
      prepare_blocks(*kernels.prepare, work, multiprocessors - (plan.concurrent ? plan.chain_blocks : 0));
  return plan;
}

void bind(const ChunkPlan& plan, void* workspace, GatedDeltaChunkParams& p) {
  const ChunkLayout& layout = plan.layout;
  auto* at = static_cast<char*>(workspace);
  auto* factors = at + 2 * layout.matrices;
  auto* signals = reinterpret_cast<unsigned*>(factors + layout.factors);
  p.workspace = {at, at + layout.matrices, reinterpret_cast<ChunkFactors*>(factors),
                 plan.concurrent ? signals : nullptr, layout.chunks};
}

}  // namespace flashport
