// A plain streaming read, with which the speed of memory-bound kernels is compared. Every block sums its own contiguous
// range. The sum is stored only if `bytes` is negative, which it never is, so that nothing but loads remains.
#pragma once

#include <cstdint>

#include "common/device/core/read_params.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

struct alignas(16) ReadVector {
  float x[4];
};

// `data` is aligned to 16 bytes.
template <int kThreads>
FLASHPORT_DEVICE void read_bandwidth(const ReadBandwidthParams& p, const Block& block) {
  constexpr int kDepth = 8;  // loads that a thread has in flight
  constexpr std::int64_t kTile = std::int64_t{kDepth} * kThreads;
  const auto* data = static_cast<const ReadVector*>(p.data);
  const std::int64_t tiles = p.bytes / static_cast<std::int64_t>(sizeof(ReadVector)) / kTile;
  const std::int64_t first = tiles * block.index() / block.count();
  const std::int64_t last = tiles * (block.index() + 1) / block.count();
  float sum[kDepth][4] = {};
  for (std::int64_t tile = first; tile < last; ++tile) {
    const ReadVector* from = data + tile * kTile + block.thread();
    ReadVector vector[kDepth];
    FLASHPORT_UNROLL(8)
    for (int d = 0; d < kDepth; ++d) vector[d] = from[d * kThreads];
    FLASHPORT_UNROLL(8)
    for (int d = 0; d < kDepth; ++d) {
      for (int i = 0; i < 4; ++i) sum[d][i] += vector[d].x[i];
    }
  }
  float total = 0.0f;
  for (int d = 0; d < kDepth; ++d) {
    for (int i = 0; i < 4; ++i) total += sum[d][i];
  }
  if (block.index() == block.count() - 1) {  // less than a tile is left
    const auto* rest = reinterpret_cast<const float*>(data + tiles * kTile);
    const std::int64_t count = (p.bytes - tiles * kTile * static_cast<std::int64_t>(sizeof(ReadVector))) / 4;
    for (std::int64_t i = block.thread(); i < count; i += kThreads) total += rest[i];
  }
  if (p.bytes < 0) *static_cast<float*>(p.data) = total;
}

}  // namespace flashport::FLASHPORT_TARGET
