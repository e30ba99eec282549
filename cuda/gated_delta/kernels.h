// Makes the kernels of the gated delta rule of a CUDA target: the __global__ function `symbol` and its KernelEntry
// `<symbol>_entry`.
#pragma once

#include "common/device/gated_delta/chunk_kernel.h"
#include "common/device/gated_delta/prepare_kernel.h"
#include "common/device/gated_delta/update_kernel.h"
#include "cuda/arch/define_kernel.h"
#include "cuda/gated_delta/state_prefetch.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

// A block of the prepare kernel has several teams, as many as fit its shared memory, and each team computes chunks of
// its own. Few chunks are spread over all multiprocessors. Where the chain runs concurrently, a team first clears the
// signals of its chunks, which earlier launches may have set, and only then may the chain start.
template <GatedDeltaChunkConfig kCfg>
constexpr int prepare_teams() {
  constexpr int kRoom = kMostSharedBytes / static_cast<int>(sizeof(PrepareShared<kCfg>));
  return kRoom < kMaxPrepareTeams ? kRoom : kMaxPrepareTeams;
}

FLASHPORT_DEVICE int longest_sequence(const GatedDeltaChunkParams& p, const Block& block) {
  if (p.cu_seqlens.data == nullptr) return p.tokens;
  int longest = 0;
  for (int seq = block.lane(); seq < p.batch; seq += kWaveSize) {
    longest = maximum(longest, sequence_tokens(p, seq).count);
  }
  return __reduce_max_sync(~0u, longest);
}

// f(chunk, index, head) for the chunks of one team. If the chain runs concurrently, and if all sequences have one
// length, the first chunks of all sequences are followed by the second ones and so on, which is the order of the
// chains; else the order is that of the indices, since there may be many short sequences. Teams of a block take
// neighbouring heads, whose rows are neighbours in memory; where there are fewer chunks than teams, each multiprocessor
// takes one.
template <int kTeams, class F>
FLASHPORT_DEVICE void for_each_chunk(const GatedDeltaChunkParams& p, const Block& block, const F& f) {
  const bool by_index = p.cu_seqlens.data != nullptr && p.workspace.signals == nullptr;
  const int items =
      (by_index ? static_cast<int>(p.workspace.chunks) : chunks_of(longest_sequence(p, block)) * p.batch) * p.num_heads;
  const int blocks = static_cast<int>(gridDim.x), stride = kTeams * blocks;
  const int first =
      items < stride ? block.team() * blocks + static_cast<int>(blockIdx.x) : static_cast<int>(block.index());
  for (int i = first; i < items; i += stride) {
    const int heads = recompute(p.num_heads), batch = recompute(p.batch), row = i / heads;
    std::int64_t index = row;
    SequenceTokens chunk;
    if (by_index) {
      chunk = chunk_of_index(p, index);
    } else {
      const SequenceTokens tokens = sequence_tokens(p, row % batch);
      index = first_chunk_index(p, row % batch, tokens) + row / batch;
      chunk = tokens_of_chunk(tokens, row / batch);
    }
    if (chunk.count > 0) f(chunk, index, i % heads);
  }
}

template <GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void gated_delta_prepare_block(const GatedDeltaChunkParams& p, PrepareShared<kCfg>* shared) {
  constexpr int kTeams = prepare_teams<kCfg>();
  const int team = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kPrepareThreads, 0);
  PrepareShared<kCfg>& own = shared[team];
  const Block block(&own.tiles.flag, team * kPrepareThreads, kPrepareThreads, kFirstTeamBarrier + team, team, kTeams);
  await_kernel_before();
  if (p.workspace.signals != nullptr) {
    for_each_chunk<kTeams>(p, block, [&](SequenceTokens, std::int64_t index, int head) {
      for (int i = block.thread(); i < p.group_size; i += kPrepareThreads) {
        p.workspace.signals[index * p.num_v_heads + value_head(p, head, i)] = 0;
      }
    });
    __threadfence();
    __syncthreads();
  }
  launch_dependents();
  for_each_chunk<kTeams>(p, block, [&](SequenceTokens chunk, std::int64_t index, int head) {
    prepare_chunk<kCfg>(p, block, chunk, index, head, own);
  });
}

// One warpgroup carries the state, one computes the outputs, and the producer copies for both. The first gets the
// registers that the others can spare.
//
// Where the chain runs concurrently with the prepare kernel, it does not wait for it at its beginning. It starts only
// after all blocks of the prepare kernel have waited for the kernels before that, and the prepare kernel signals each
// chunk that it has stored.
template <GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void gated_delta_chunk_block(const GatedDeltaChunkParams& p, ChainMemory<kCfg>& memory) {
  if (threadIdx.x == 0) memory.init_barriers();
  memory.clear_triangles(static_cast<int>(threadIdx.x));
  __syncthreads();
  static_assert(sizeof(ChainMemory<kCfg>) <= kMostSharedBytes);
  if (p.workspace.signals == nullptr) await_kernel_before();
  launch_dependents();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const Block block(&memory.flag, warpgroup * kWarpgroup, kWarpgroup, kChainBarrier + warpgroup);
  if (warpgroup == 0) {
    increase_registers<240>();
    gated_delta_chunk<CarryTiles<kCfg>>(p, block, memory);
  } else if (warpgroup == 1) {
    decrease_registers<152>();
    gated_delta_chunk<OutputTiles<kCfg>>(p, block, memory);
  } else {
    decrease_registers<104>();
    ChunkProducer<kCfg> producer(p, block, memory);
    for_each_chain(p, block, kCfg.columns, [&](const Chain& chain) { producer.run(chain); });
  }
  await_kernel_before();  // so that a kernel that waits for this one waits for the prepare kernel too
}

// These are functions because nvcc 13.0 writes the types' names wrong where such values are variables of a namespace.
template <GatedDeltaChunkConfig kCfg>
constexpr int prepare_bytes() {
  return prepare_teams<kCfg>() * static_cast<int>(sizeof(PrepareShared<kCfg>));
}
template <GatedDeltaChunkConfig kCfg>
constexpr int chain_bytes() {
  return static_cast<int>(sizeof(ChainMemory<kCfg>));
}

template <GatedDeltaConfig kCfg>
FLASHPORT_DEVICE void gated_delta_update_block(const GatedDeltaUpdateParams& p) {
  __shared__ unsigned touched;
  if (threadIdx.x == 0) touched = touch_params(p);
  __shared__ StateTileMemory<kCfg> memory;
  const Block block(&touched, 0, kCfg.tuning.waves * kWaveSize, 0);
  const StateSlice slice = state_slice<kCfg>(p, block);
  prefetch_states<kCfg>(p, block, slice);
  begin_kernel();
  gated_delta_update<kCfg>(p, block, slice, memory);
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta

// head_dim_k, state, key_major, gate
#define FLASHPORT_DEFINE_GATED_DELTA_UPDATE(symbol, name, ...)                                                     \
  namespace flashport::FLASHPORT_TARGET::gated_delta {                                                             \
  constexpr GatedDeltaConfig symbol##_config = gated_delta_config({__VA_ARGS__});                                  \
  constexpr int symbol##_threads = symbol##_config.tuning.waves * kWaveSize;                                       \
  extern "C" __global__ void __launch_bounds__(symbol##_threads, symbol##_config.tuning.blocks_per_multiprocessor) \
      symbol(const __grid_constant__ GatedDeltaUpdateParams params) {                                              \
    gated_delta_update_block<symbol##_config>(params);                                                             \
  }                                                                                                                \
  FLASHPORT_DEFINE_ENTRY(symbol, name, KernelTag::kGatedDeltaUpdate, symbol##_threads, 0,                          \
                         .shape = {.gated_delta_update = symbol##_config})                                         \
  }

// math, head_dim_k
#define FLASHPORT_DEFINE_GATED_DELTA_PREPARE(symbol, name, ...)                                                    \
  namespace flashport::FLASHPORT_TARGET::gated_delta {                                                             \
  constexpr GatedDeltaChunkConfig symbol##_config{__VA_ARGS__};                                                    \
  constexpr int symbol##_threads = prepare_teams<symbol##_config>() * kPrepareThreads;                             \
  extern "C" __global__ void __launch_bounds__(symbol##_threads, 1)                                                \
      symbol(const __grid_constant__ GatedDeltaChunkParams params) {                                               \
    extern __shared__ __align__(1024) unsigned char panels[];                                                      \
    gated_delta_prepare_block<symbol##_config>(params, reinterpret_cast<PrepareShared<symbol##_config>*>(panels)); \
  }                                                                                                                \
  FLASHPORT_DEFINE_ENTRY(symbol, name, KernelTag::kGatedDeltaPrepare, symbol##_threads,                            \
                         prepare_bytes<symbol##_config>(), .shape = {.gated_delta_chunk = symbol##_config},        \
                         .teams = prepare_teams<symbol##_config>(), .signals = true)                               \
  }

#define FLASHPORT_DEFINE_GATED_DELTA_CHUNK(symbol, name, ...)                                                      \
  namespace flashport::FLASHPORT_TARGET::gated_delta {                                                             \
  constexpr GatedDeltaChunkConfig symbol##_config{__VA_ARGS__};                                                    \
  extern "C" __global__ void __launch_bounds__(kChainThreads, 1)                                                   \
      symbol(const __grid_constant__ GatedDeltaChunkParams params) {                                               \
    extern __shared__ __align__(1024) unsigned char panels[];                                                      \
    gated_delta_chunk_block<symbol##_config>(params, *reinterpret_cast<ChainMemory<symbol##_config>*>(panels));    \
  }                                                                                                                \
  FLASHPORT_DEFINE_ENTRY(symbol, name, KernelTag::kGatedDeltaChunk, kChainThreads, chain_bytes<symbol##_config>(), \
                         .shape = {.gated_delta_chunk = symbol##_config})                                          \
  }
