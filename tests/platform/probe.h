// What the probe kernels take: they test what the kernels take for granted about a runtime and an execution model.
#pragma once

#include <cstdint>

namespace flashport {

inline constexpr int kProbeThreads = 128;  // of a block on a GPU

struct ProbeParams {
  std::uint32_t* visits;    // [grid]: how often a block ran
  std::int64_t* echoes;     // [grid]: `last` as the block received it, plus the block's index
  float* published;         // [grid, kProbeThreads]
  std::uint32_t* counters;  // [2]: signal counters
  float* sums;              // [rounds, kProbeThreads]: what the last block to signal found, by column
  std::uint32_t* winners;   // [rounds, 2]: how many blocks took themselves for the last at a counter
  std::int64_t* lanes;      // [grid, 3, kProbeThreads]: sums of the lanes before, of all, and what a found lane had
  std::int64_t round;
  char filler[440];  // as large as the largest params struct of a real kernel, and then some
  std::int64_t last;
};

}  // namespace flashport
