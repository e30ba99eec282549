// A plain streaming read: what memory-bound kernels are held against. Every block sums its own contiguous range; the
// sum is stored only if `bytes` is negative, which it never is, so that nothing but loads remains.
#pragma once

#include <cstdint>

#include "common/device/params.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

// `data` is aligned to 16 bytes.
template <int kThreads>
FLASHPORT_DEVICE void read_bandwidth(const ReadBandwidthParams& p, const Block& block) {
  constexpr int kDepth = kVectorFloats > 8 ? 1 : 8;  // loads in flight of a thread
  constexpr std::int64_t kRow = std::int64_t{kThreads} * kVectorFloats;
  constexpr std::int64_t kTile = kDepth * kRow;
  const auto* data = static_cast<const float*>(__builtin_assume_aligned(p.data, 16));
  const std::int64_t tiles = p.bytes / static_cast<std::int64_t>(sizeof(float)) / kTile;
  const std::int64_t first = tiles * block.index() / block.count();
  const std::int64_t last = tiles * (block.index() + 1) / block.count();
  float sum[kVectorFloats] = {};
  for (std::int64_t tile = first; tile < last; ++tile) {
    const float* from = data + tile * kTile + block.thread() * kVectorFloats;
    float x[kDepth][kVectorFloats];
    FLASHPORT_UNROLL(8)
    for (int d = 0; d < kDepth; ++d) load_vector(x[d], from + d * kRow, 1, kVectorFloats);
    FLASHPORT_UNROLL(8)
    for (int d = 0; d < kDepth; ++d) {
      for (int i = 0; i < kVectorFloats; ++i) sum[i] += x[d][i];
    }
  }
  float total = 0.0f;
  for (int i = 0; i < kVectorFloats; ++i) total += sum[i];
  if (block.index() == block.count() - 1) {  // less than a tile is left
    for (std::int64_t i = tiles * kTile + block.thread(); i < p.bytes / 4; i += kThreads) total += data[i];
  }
  if (p.bytes < 0) *static_cast<float*>(p.data) = total;
}

}  // namespace flashport::FLASHPORT_TARGET
