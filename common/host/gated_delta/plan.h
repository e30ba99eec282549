// From validated calls of the gated delta rule to their launches: how states and tokens are cut, how many blocks take
// them, and the workspace. Functions of shapes, of the kernels and of the number of multiprocessors.
#pragma once

#include <cstdint>

#include <flashport/gated_delta.h>

#include "common/device/gated_delta/chunk_params.h"
#include "common/host/check.h"
#include "common/host/gated_delta/kernel_choice.h"

namespace flashport {

struct UpdatePlan {
  const KernelEntry* kernel = nullptr;
  std::int64_t slices = 0;  // of a state
  std::int64_t blocks = 0;  // one for each slice of all states
};

// Cuts each head's columns of V into slices, and sets by what `params` divide the number of a block.
[[nodiscard]] UpdatePlan plan_update(const Check& check, const KernelEntry& kernel, GatedDeltaUpdateParams& params);

// Parts of the workspace of gated_delta_chunk in bytes, in this order; each begins where 16 divides the address.
struct ChunkLayout {
  std::int64_t chunks, matrices, factors, signals;

  [[nodiscard]] std::int64_t bytes() const { return 2 * matrices + factors + signals; }
};

struct ChunkPlan {
  ChunkKernels kernels;
  ChunkLayout layout{};
  std::int64_t prepare_blocks = 0, chain_blocks = 0;
  bool concurrent = false;  // the chain runs beside the prepare kernel, on multiprocessors that this leaves free
};

[[nodiscard]] ChunkPlan plan_chunks(const ChunkKernels& kernels, const GatedDeltaChunkParams& params,
                                    int multiprocessors);

// Points the params to the parts of the workspace.
void bind(const ChunkPlan& plan, void* workspace, GatedDeltaChunkParams& params);

// What explain() and the log of calls say of a plan.
[[nodiscard]] GatedDeltaSchedule schedule_of(const UpdatePlan& plan);
[[nodiscard]] GatedDeltaChunkSchedule schedule_of(const ChunkPlan& plan);

}  // namespace flashport
