// Prefetches the states of a block's slice into L2 before the kernel waits for the kernel before it on the stream,
// whose end leaves memory idle.
//
// That kernel may still write the slot indices and the states. So an index that is read here may be an old one or any
// number: it is used only where it is a slot of the pool. A prefetch of another slot costs time and changes no result,
// since L2 is coherent with memory, and the update reads index and state again after the wait.
#pragma once

#include "common/device/gated_delta/update_kernel.h"
#include FLASHPORT_GATED_DELTA_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

template <GatedDeltaConfig kCfg>
FLASHPORT_DEVICE void prefetch_states(const GatedDeltaUpdateParams& p, const Block& block, const StateSlice& slice) {
  constexpr int kThreads = kCfg.tuning.waves * kWaveSize;
  constexpr int kElementBytes = is_packed(kCfg.shape) ? 2 : 4;
  constexpr int kRowBytes = kCfg.tuning.columns * kElementBytes, kBlockBytes = kCfg.shape.head_dim_k * kRowBytes;
  constexpr int kLineBytes = 128;
  if (p.state.data == nullptr || block.index() >= kPrefetchedBytes / kBlockBytes) return;
  int slot = slice.seq;
  if (p.state.indices.data != nullptr) {
    const std::int32_t* index = short_index(p.state.indices, static_cast<std::uint32_t>(slice.seq)).low;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(slot) : "l"(index));  // L1 keeps no copy
  }
  if (slot < 0 || slot >= p.num_slots) return;
  const int bytes = p.state.dtype == DType::kFloat32 ? 4 : 2;
  const char* head = static_cast<const char*>(p.state.data) +
                     (slot * p.state.slot_stride + head_state_offset(p, block, slice)) * bytes;
  const auto prefetch = [&](int at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(head + at)); };
  if constexpr (kCfg.shape.key_major != 0) {  // each thread has a key
    static_assert(kCfg.shape.head_dim_k == kThreads);
    const int at = (block.thread() * p.head_dim_v + slice.column) * bytes;
#pragma unroll
    for (int line = 0; line < kRowBytes; line += kLineBytes) {
      if (block.thread() < p.head_dim_k && slice.column * bytes + line < p.head_dim_v * bytes) prefetch(at + line);
    }
  } else {  // each thread has a line
    static_assert(kBlockBytes == kThreads * kLineBytes);
    const int end = minimum(slice.column + kCfg.tuning.columns, p.head_dim_v);
    const int at = slice.column * p.head_dim_k * bytes + block.thread() * kLineBytes;
    if (at < end * p.head_dim_k * bytes) prefetch(at);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
