// The probe kernels, in the verbs of the target that FLASHPORT_TARGET_HEADER names. Written once; platform_<vendor>
// makes kernels of them.
#pragma once

#include FLASHPORT_TARGET_HEADER

#include "tests/platform/probe.h"

namespace flashport::FLASHPORT_TARGET {

// Every block runs once and receives all of its params.
FLASHPORT_DEVICE void probe_visit(const ProbeParams& p, const Block& block) {
  if (block.thread() != 0) return;
  p.visits[block.index()] += 1;
  p.echoes[block.index()] = p.last + block.index();
}

// Blocks write and add to two signal counters, with an empty addition between; at each exactly one is the last. That of
// the first sees what all have written. The counters are left at zero.
FLASHPORT_DEVICE void probe_arrive(const ProbeParams& p, const Block& block) {
  constexpr int kColumns = kProbeThreads;
  const int step = kWaveSize == 1 ? 1 : kColumns;  // a CPU block has one thread, which takes all columns
  for (int column = block.thread(); column < kColumns; column += step) {
    p.published[block.index() * kColumns + column] = static_cast<float>(p.round + 1);
  }
  const auto blocks = static_cast<int>(block.count());
  const unsigned last =
      block.arrive(3, [&](int i) { return Arrival{p.counters + i / 2, i == 1 ? 0 : 1 + i / 2, blocks * (1 + i / 2)}; });
  std::uint32_t* winners = p.winners + 2 * p.round;
  if (block.thread() == 0 && (last & 2) != 0) winners[0] += 100;
  if (block.thread() == 0 && (last & 4) != 0) winners[1] += 1;
  if ((last & 1) == 0) return;
  for (int column = block.thread(); column < kColumns; column += step) {
    float sum = 0;
    for (std::int64_t i = 0; i < block.count(); ++i) sum += load_published(p.published + i * kColumns + column);
    p.sums[p.round * kColumns + column] = sum;
  }
  if (block.thread() == 0) winners[0] += 1;
}

// What the lanes of a wave tell each other: a scan of thread + 1 in 64 and in 32 bits (-1 if they differ), and what
// lane block % kWaveSize has.
FLASHPORT_DEVICE void probe_wave(const ProbeParams& p, const Block& block) {
  std::int64_t* at = p.lanes + block.index() * 3 * kProbeThreads + block.thread();
  std::int64_t total = 0;
  int narrow_total = 0;
  const std::int64_t before = block.wave_exclusive_scan(std::int64_t{block.thread()} + 1, total);
  const int narrow_before = block.wave_exclusive_scan(block.thread() + 1, narrow_total);
  at[0] = before == narrow_before ? before : -1;
  at[kProbeThreads] = total == narrow_total ? total : -1;
  const int finder = block.wave_find(block.lane() == block.index() % kWaveSize);
  at[2 * kProbeThreads] = block.wave_broadcast(block.thread(), finder);
}

}  // namespace flashport::FLASHPORT_TARGET
