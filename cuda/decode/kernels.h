// Makes decode kernels of a CUDA target: the __global__ function `symbol` and its KernelEntry `<symbol>_entry`.
#pragma once

#include "common/device/decode/combine_kernel.h"
#include "common/device/decode/kernel.h"
#include "cuda/arch/define_kernel.h"
#include "cuda/decode/early_range.h"
#include "cuda/decode/kv_producer.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Registers of a thread that computes and of one that does not, where some give up what others take; 0: all have what
// the compiler allots.
struct RegisterSplit {
  int compute, producer;
};
constexpr RegisterSplit register_split(const DecodeConfig& cfg) {
  if (reads_segments(cfg.shape)) return cfg.tuning.waves == 4 ? RegisterSplit{200, 104} : RegisterSplit{168, 88};
  // Two warpgroups of teams compute and one copies. A pair of teams of q8_0 is slower so.
  if (cfg.tuning.teams == 4 || (cfg.tuning.teams == 2 && cfg.shape.k_format == KvFormat::kQ4_0)) return {200, 104};
  // Two blocks of a multiprocessor have 128 registers a thread, three warpgroups of one 168.
  const bool moves = uses_wgmma(cfg.shape) && (cfg.tuning.blocks_per_multiprocessor == 2 || warpgroups(cfg) == 2);
  return moves ? RegisterSplit{warpgroups(cfg) == 2 ? 232 : 216, 40} : RegisterSplit{};
}

// A team is a block as the schedule counts them. Its waves part: the first compute, the others bring them keys and
// values. Where multiprocessors are more than there is work for, a device block counts as one: its first team computes,
// and the others help it to copy.
template <DecodeConfig kCfg>
FLASHPORT_DEVICE void decode_block(const DecodeParamsOf<kCfg>& p, DecodeShared<kCfg>* shared) {
  constexpr int kTeams = kCfg.tuning.teams;
  constexpr RegisterSplit kRegisters = register_split(kCfg);
  constexpr int kReserved = 1024;  // of each block, for the system
  static_assert((kTeams * sizeof(DecodeShared<kCfg>) + kReserved) * kCfg.tuning.blocks_per_multiprocessor <= 228 * 1024,
                "shared memory of a multiprocessor's blocks");
  static_assert(kFirstTeamBarrier + kTeams * kTeamBarriers <= 16, "a block has 16 barriers");
  constexpr int kCompute = compute_threads(kCfg), kProducers = producer_threads(kCfg);
  // Compute threads of all teams come first, so that registers move between whole warpgroups.
  static_assert(kRegisters.compute == 0 || (kTeams * kCompute % 128 == 0 && kTeams * kProducers % 128 == 0));
  const int of_producers = static_cast<int>(threadIdx.x) - kTeams * kCompute;
  const bool produces = of_producers >= 0;
  const int team = kTeams == 1 ? 0 : __shfl_sync(~0u, produces ? of_producers / kProducers : threadIdx.x / kCompute, 0);
  const int first = produces ? kTeams * kCompute + team * kProducers - kCompute : team * kCompute;
  const int thread = static_cast<int>(threadIdx.x) - first;  // of the team's
  DecodeShared<kCfg>& own = shared[team];
  own.ring.init(thread);
  if constexpr (reads_segments(kCfg.shape)) own.stored.init(thread);
  if (thread == 0) own.arrive_flag = touch_params(p);
  const bool helps = teams_may_help(kCfg.shape, kTeams) && p.teams_help;
  const auto part = [&](int begin, int threads, TeamBarrier barrier) {
    const int its_barrier = kFirstTeamBarrier + team * kTeamBarriers + barrier;
    return Block(&own.arrive_flag, first + begin, threads, its_barrier, helps ? 0 : team, helps ? 1 : kTeams);
  };
  const Range range = begin_range<kCfg>(p, part(0, kCompute + kProducers, kRangeBarrier), own.lengths);
  const bool together = teams_share_rows<kCfg>(p, range);
  if (!produces) {
    if constexpr (kRegisters.compute > 0) increase_registers<kRegisters.compute>();
    const Block block = part(0, kCompute, kComputeBarrier);
    if constexpr (kTeams > 1) {
      if (thread == 0) own.heads_together = together;
      block.sync();
    }
    if (helps && team > 0) return;
    decode<kCfg>(p, range, block, own);
  } else {
    if constexpr (kRegisters.producer > 0) decrease_registers<kRegisters.producer>();
    const Block producers = part(kCompute, kProducers, kProducerBarrier);
    if constexpr (reads_segments(kCfg.shape)) {
      produce_segments<kCfg>(p, range, producers, first + kCompute, own);
    } else if (together) {
      KvProducer<kCfg, Sharing::kRows, DecodeShared<kCfg>>(p, producers, range.line, shared).run(p, range);
    } else if (helps) {
      if constexpr (teams_may_help(kCfg.shape, kTeams)) {
        const Block all(&shared[0].arrive_flag, kTeams * kCompute, kTeams * kProducers, 0);
        KvProducer<kCfg, Sharing::kFirstTeam, DecodeShared<kCfg>>(p, all, range.line, shared).run(p, range);
      }
    } else {
      KvProducer<kCfg, Sharing::kNone, DecodeShared<kCfg>>(p, producers, range.line, shared).run(p, range);
    }
  }
}

constexpr KernelTag decode_tag(const DecodeShape& shape) {
  if (shape.appends) return shape.plain ? KernelTag::kDecodeAppendPlain : KernelTag::kDecodeAppend;
  if (!shape.plain) return shape.large_cache ? KernelTag::kDecodeLarge : KernelTag::kDecode;
  return shape.large_cache ? KernelTag::kDecodePlainLarge : KernelTag::kDecodePlain;
}

// Functions, as nvcc 13.0 spells the names of such types wrong where it writes out variables of a namespace.
template <DecodeConfig kCfg>
constexpr int shared_bytes() {
  return kCfg.tuning.teams * static_cast<int>(sizeof(DecodeShared<kCfg>));
}

}  // namespace flashport::FLASHPORT_TARGET::decode

// The next call may begin at once: it waits for this launch, which ends after the one before it.
#define FLASHPORT_DEFINE_COMBINE(symbol, name, its_tag, Params)                                \
  namespace flashport::FLASHPORT_TARGET::decode {                                              \
  extern "C" __global__ void __launch_bounds__(128) symbol(const __grid_constant__ Params p) { \
    __shared__ CombineShared shared;                                                           \
    launch_dependents();                                                                       \
    decode_combine(p, Block(nullptr), shared, [] { await_kernel_before(); });                  \
  }                                                                                            \
  FLASHPORT_DEFINE_ENTRY(symbol, name, its_tag, 128, 0)                                        \
  }
#define FLASHPORT_DEFINE_DECODE_COMBINE(symbol, name) \
  FLASHPORT_DEFINE_COMBINE(symbol, name, KernelTag::kDecodeCombine, DecodeParams)
#define FLASHPORT_DEFINE_DECODE_APPEND_COMBINE(symbol, name) \
  FLASHPORT_DEFINE_COMBINE(symbol, name, KernelTag::kDecodeAppendCombine, AppendDecodeParams)
#define FLASHPORT_DEFINE_DECODE_PLAIN_COMBINE(symbol, name) \
  FLASHPORT_DEFINE_COMBINE(symbol, name, KernelTag::kDecodePlainCombine, PlainDecodeParams)

// math, k_format, v_format, head_dim_qk, head_dim_v, rows, whether it appends, is for plain calls, for large caches
#define FLASHPORT_DEFINE_DECODE(symbol, name, ...)                                                             \
  namespace flashport::FLASHPORT_TARGET::decode {                                                              \
  constexpr DecodeConfig symbol##_config = decode_config(__VA_ARGS__);                                         \
  extern "C" __global__ void __launch_bounds__(block_threads(symbol##_config),                                 \
                                               symbol##_config.tuning.blocks_per_multiprocessor)               \
      symbol(const __grid_constant__ DecodeParamsOf<symbol##_config> params) {                                 \
    extern __shared__ __align__(1024) unsigned char memory[];                                                  \
    decode_block<symbol##_config>(params, reinterpret_cast<DecodeShared<symbol##_config>*>(memory));           \
  }                                                                                                            \
  FLASHPORT_DEFINE_ENTRY(symbol, name, decode_tag(symbol##_config.shape), block_threads(symbol##_config),      \
                         shared_bytes<symbol##_config>(), .shape = {.decode = symbol##_config},                \
                         .teams = symbol##_config.tuning.teams, .decode_split = decode_split(symbol##_config)) \
  }
