// A kernel that reads segments of several formats one after the other: first those of 16 bits, then those of blocks,
// each as the kernel of its formats would. What launches of their own would cost beside the work falls away: a block
// goes on to its share of the next segment when it has done that of the one before, while others are still at theirs.
// It leaves all partial results to the launch after it (combine_segments.h): a block runs most of its code once, and
// with more of it the multiprocessor would not find it in its instruction cache (docs/tuning.md).
#pragma once

#include "cuda/decode/team_work.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The ranges of a block's teams, of all segments.
template <int kTeams>
struct RangesOfSegments {
  Range of[kMostSegments][kTeams];
};

// Both schedules have the same threads: those that would compute only keys of blocks are idle while the others are at
// 16 bits.
template <DecodeConfig kOf16Bits, DecodeConfig kOfBlocks>
struct SegmentsShape {
  static constexpr RegisterSplit kRegisters = {200, 104};
  static constexpr int kTeams = kOfBlocks.tuning.teams;
  static constexpr int kFirstProducer = first_producer<kOfBlocks>();
  static constexpr int kThreads = block_threads(kOfBlocks);
  using Ranges = RangesOfSegments<kTeams>;
  static constexpr int kTileBytes = shared_bytes<kOf16Bits>() > shared_bytes<kOfBlocks>() ? shared_bytes<kOf16Bits>()
                                                                                          : shared_bytes<kOfBlocks>();
  static constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(Ranges));
  static_assert(kSharedBytes <= 227 * 1024 && kTileBytes % alignof(Ranges) == 0);
  static_assert(kOf16Bits.tuning.teams == 1 && compute_threads(kOf16Bits) <= kFirstProducer &&
                producer_threads(kOf16Bits) == kThreads - kFirstProducer);
  static_assert(kOf16Bits.tuning.blocks_per_multiprocessor == 1 && kOfBlocks.tuning.blocks_per_multiprocessor == 1);
};

// Finds the ranges, each by a warp.
template <class Shape, bool kMayHelp>
FLASHPORT_DEVICE void find_ranges(const SegmentsDecodeParams& p, typename Shape::Ranges& ranges) {
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
    if (block.lane() == 0) ranges.of[segment][team] = range;
  }
}

// The block's share of one segment.
template <DecodeConfig kCfg, int kFirstProducer, bool kProduces, class Ranges>
FLASHPORT_DEVICE void take_share(const SegmentDecodeParams& p, unsigned char* memory, const Ranges& ranges) {
  const TeamWork<kCfg, kFirstProducer> work(p, reinterpret_cast<DecodeShared<kCfg>*>(memory), kProduces);
  const bool is_idle = !kProduces && static_cast<int>(threadIdx.x) >= first_producer<kCfg>();
  __syncthreads();  // nobody is at the segment before
  if (!is_idle) work.own().ring.init(work.thread());
  __syncthreads();
  if (!is_idle) {
    const Range range = ranges[work.team()];
    if constexpr (kProduces) {
      work.produce(range);
    } else {
      work.compute(range);
    }
  }
  __syncthreads();
  if (!is_idle) work.own().ring.invalidate(work.thread());
}

template <DecodeConfig kOf16Bits, DecodeConfig kOfBlocks>
FLASHPORT_DEVICE void decode_segments(const SegmentsDecodeParams& p, unsigned char* memory) {
  using Shape = SegmentsShape<kOf16Bits, kOfBlocks>;
  auto& ranges = *reinterpret_cast<typename Shape::Ranges*>(memory + Shape::kTileBytes);
  if (threadIdx.x == 0) *reinterpret_cast<unsigned*>(memory) = touch_params(p);
  begin_kernel();
  find_ranges<Shape, teams_may_help(kOfBlocks.shape, Shape::kTeams)>(p, ranges);
  const auto run = [&](auto produces) FLASHPORT_INLINE {
    FLASHPORT_UNROLL(1)
    for (int i = 0; i < p.count; ++i) {
      if (i < p.count_of_16_bits) {
        take_share<kOf16Bits, Shape::kFirstProducer, produces()>(p.segments[i], memory, ranges.of[i]);
      } else {
        take_share<kOfBlocks, Shape::kFirstProducer, produces()>(p.segments[i], memory, ranges.of[i]);
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
