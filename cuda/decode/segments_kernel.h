// A kernel that reads segments of several formats one after the other: first those of 16 bits, then those of blocks,
// each as the kernel of its formats would. This saves the cost of one launch for each segment: a block
// goes on to its share of the next segment when it has done that of the one before, while others are still at theirs.
// It leaves all partial results to the launch after it (combine_segments.h): a block runs most of its code once, and
// with more of it the multiprocessor would not find it in its instruction cache (docs/tuning.md).
#pragma once

#include "cuda/decode/team_work.h"

namespace flashport::FLASHPORT_TARGET::decode {

// What the segments of a block have in common: the ranges of its teams, and where all warps meet between segments.
// Roles meet in places of their own, which __syncthreads() is not for.
template <int kTeams>
struct SegmentsShared {
  Range ranges[kMostSegments][kTeams];
  std::uint64_t barrier;
};

// Both schedules have the same threads. Compute threads that the one of 16 bits does not use are idle during its
// segments.
template <DecodeConfig kOf16Bits, DecodeConfig kOfBlocks>
struct SegmentsShape {
  static constexpr RegisterSplit kRegisters = {200, 104};
  static constexpr int kTeams = kOfBlocks.tuning.teams;
  static constexpr int kFirstProducer = first_producer<kOfBlocks>();
  static constexpr int kThreads = block_threads(kOfBlocks);
  using Shared = SegmentsShared<kTeams>;
  static constexpr int kTileBytes = shared_bytes<kOf16Bits>() > shared_bytes<kOfBlocks>() ? shared_bytes<kOf16Bits>()
                                                                                          : shared_bytes<kOfBlocks>();
  static constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(Shared));
  static_assert(kSharedBytes <= 227 * 1024 && kTileBytes % alignof(Shared) == 0);
  static_assert(kFirstProducer == 256 && kThreads == 384, "registers move between whole warpgroups");
  static_assert(!uses_wgmma(kOf16Bits.shape) && !uses_wgmma(kOfBlocks.shape), "tiles that publish whole tiles");
  static_assert(kOf16Bits.tuning.teams == 1 && compute_threads(kOf16Bits) <= kFirstProducer &&
                producer_threads(kOf16Bits) == kThreads - kFirstProducer);
  static_assert(kOf16Bits.tuning.blocks_per_multiprocessor == 1 && kOfBlocks.tuning.blocks_per_multiprocessor == 1);
};

// Finds the ranges, each by a warp.
template <class Shape, bool kMayHelp>
FLASHPORT_DEVICE void find_ranges(const SegmentsDecodeParams& p, typename Shape::Shared& shared) {
  constexpr int kTeams = Shape::kTeams;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWaveSize, 0);
  FLASHPORT_UNROLL(1)
  for (int i = warp; i < p.count * kTeams; i += Shape::kThreads / kWaveSize) {
    const int segment = i / kTeams, team = i % kTeams;
    const SegmentDecodeParams& its = p.segments[segment];
    const bool alone = segment < p.count_of_16_bits || (kMayHelp && its.teams_help);
    const Block block(nullptr, warp * kWaveSize, kWaveSize, 0, alone ? 0 : team, alone ? 1 : kTeams);
    Range range = balanced_range(its, block, [&](int seq) { return key_count(its, seq); });
    range.segment.pages = kv::page_list<SegmentDecodeParams::kPlain>(its.cache, range.segment.seq);
    if (block.lane() == 0) shared.ranges[segment][team] = range;
  }
}

// The block's share of one segment. sync_block(): waits for all warps of the block.
template <DecodeConfig kCfg, int kFirstProducer, bool kProduces, class Sync>
FLASHPORT_DEVICE void take_share(const SegmentDecodeParams& p, unsigned char* memory, const Range* ranges,
                                 const Sync& sync_block) {
  const TeamWork<kCfg, kFirstProducer> work(p, reinterpret_cast<DecodeShared<kCfg>*>(memory), kProduces);
  const bool is_idle = !kProduces && static_cast<int>(threadIdx.x) >= first_producer<kCfg>();
  if (!is_idle) work.own().ring.init(work.thread());
  sync_block();
  if (!is_idle) {
    const Range range = ranges[work.team()];
    if constexpr (kProduces) {
      work.produce(range);
    } else {
      work.compute(range);
    }
  }
  sync_block();
  if (!is_idle) work.own().ring.invalidate(work.thread());
  sync_block();  // the memory is the next segment's
}

template <DecodeConfig kOf16Bits, DecodeConfig kOfBlocks>
FLASHPORT_DEVICE void decode_segments(const SegmentsDecodeParams& p, unsigned char* memory) {
  using Shape = SegmentsShape<kOf16Bits, kOfBlocks>;
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory + Shape::kTileBytes);
  if (threadIdx.x == 0) {
    *reinterpret_cast<unsigned*>(memory) = touch_params(p);
    mbarrier_init(&shared.barrier, Shape::kThreads / kWaveSize);
  }
  begin_kernel();
  find_ranges<Shape, teams_may_help(kOfBlocks.shape, Shape::kTeams)>(p, shared);
  __syncthreads();
  const auto run = [&](auto produces) FLASHPORT_INLINE {
    unsigned phase = 0;
    const auto sync_block = [&] {
      mbarrier_arrive_wave(&shared.barrier);
      mbarrier_wait(&shared.barrier, phase);
      phase ^= 1;
    };
    FLASHPORT_UNROLL(1)
    for (int i = 0; i < p.count; ++i) {
      if (i < p.count_of_16_bits) {
        take_share<kOf16Bits, Shape::kFirstProducer, produces()>(p.segments[i], memory, shared.ranges[i], sync_block);
      } else {
        take_share<kOfBlocks, Shape::kFirstProducer, produces()>(p.segments[i], memory, shared.ranges[i], sync_block);
      }
    }
  };
  if (static_cast<int>(threadIdx.x) < Shape::kFirstProducer) {
    increase_registers<Shape::kRegisters.compute>();
    run(std::false_type{});
  } else {
    decrease_registers<Shape::kRegisters.producer>();
    run(std::true_type{});
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
