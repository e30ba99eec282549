// wgmma, the products of Hopper's warpgroups: four warps, each with 16 rows of the left operand in registers as
// mma.sync has them (mma.h), or in shared memory, multiply them with a right operand in shared memory that all share.
//
// The right operand lies in panels of rows of 128 bytes, the 16-byte units of a row swizzled by the row's last three
// bits; panels begin where 1024 divides the address. Its row is either the index that is summed over, or (plain) the
// other one. Copies to it are ordinary ones, so who made them has to fence_async_proxy() before the barrier.
#pragma once

#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kPanelColumns = 64;  // of 16-bit values
inline constexpr int kPanelBytes = 64 * 128;

// The place of unit `unit` of a panel's row, in elements.
FLASHPORT_DEVICE int panel_place(int row, int unit) { return row * kPanelColumns + (unit ^ (row & 7)) * 8; }

// A panel from `address` on, as wgmma is told: 1024 bytes from eight rows to the next, 128-byte swizzle. Steps of 16
// along a row are 32 bytes, along the rows 2048.
FLASHPORT_DEVICE std::uint64_t panel_descriptor(const void* panel, int byte) {
  constexpr std::uint64_t kFixed = std::uint64_t{1} << 62 | std::uint64_t{1024 / 16} << 32 | std::uint64_t{1} << 16;
  return kFixed | (shared_address(panel) + static_cast<unsigned>(byte)) >> 4;
}

#define FLASHPORT_WGMMA_SUMS(type, operands, ...)                                                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                             \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"  \
               "%27,%28,%29,%30,%31}, " operands                                                                       \
               : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]), "+f"(sum[1][0]), "+f"(sum[1][1]), \
                 "+f"(sum[1][2]), "+f"(sum[1][3]), "+f"(sum[2][0]), "+f"(sum[2][1]), "+f"(sum[2][2]), "+f"(sum[2][3]), \
                 "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]), "+f"(sum[3][3]), "+f"(sum[4][0]), "+f"(sum[4][1]), \
                 "+f"(sum[4][2]), "+f"(sum[4][3]), "+f"(sum[5][0]), "+f"(sum[5][1]), "+f"(sum[5][2]), "+f"(sum[5][3]), \
                 "+f"(sum[6][0]), "+f"(sum[6][1]), "+f"(sum[6][2]), "+f"(sum[6][3]), "+f"(sum[7][0]), "+f"(sum[7][1]), \
                 "+f"(sum[7][2]), "+f"(sum[7][3])                                                                      \
               : __VA_ARGS__)

// sum [16 rows of the warp, 64] (+)= a [16 rows, 16] b [16, 64], on its way until wgmma_wait(). `a` is in registers, or
// rows of panels that are summed over along the row. kTransposed: the rows of b's panel are what is summed over.
template <MathType kMath, bool kAdds, bool kTransposed>
FLASHPORT_DEVICE void wgmma(float (&sum)[8][4], const unsigned (&a)[4], std::uint64_t b) {
#define FLASHPORT_WGMMA(type)                                                                                       \
  FLASHPORT_WGMMA_SUMS(type, "{%32,%33,%34,%35}, %36, %37, 1, 1, %38;", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), \
                       "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposed ? 1 : 0))
  if constexpr (kMath == MathType::kBf16) {
    FLASHPORT_WGMMA("bf16");
  } else {
    FLASHPORT_WGMMA("f16");
  }
#undef FLASHPORT_WGMMA
}
template <MathType kMath, bool kAdds, bool kTransposed>
FLASHPORT_DEVICE void wgmma(float (&sum)[8][4], std::uint64_t a, std::uint64_t b) {
#define FLASHPORT_WGMMA(type)                                                                    \
  FLASHPORT_WGMMA_SUMS(type, "%32, %33, %34, 1, 1, 0, %35;", "l"(a), "l"(b), "n"(kAdds ? 1 : 0), \
                       "n"(kTransposed ? 1 : 0))
  if constexpr (kMath == MathType::kBf16) {
    FLASHPORT_WGMMA("bf16");
  } else {
    FLASHPORT_WGMMA("f16");
  }
#undef FLASHPORT_WGMMA
}
#undef FLASHPORT_WGMMA_SUMS

// Before the first of a product: registers that it reads or adds to are written.
FLASHPORT_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Behind the last: they are one product.
FLASHPORT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until no more than kLater products are on their way.
template <int kLater>
FLASHPORT_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLater) : "memory");
}
// Not read before this point.
FLASHPORT_DEVICE void pin(float (&sum)[8][4]) {
#pragma unroll
  for (auto& four : sum) {
    asm volatile("" : "+f"(four[0]), "+f"(four[1]), "+f"(four[2]), "+f"(four[3])::"memory");
  }
}

// A warpgroup's registers a lane from here on, of those that the block began with; what it takes another one leaves.
template <int kCount>
FLASHPORT_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
FLASHPORT_DEVICE void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// What this thread has written to shared memory may be read by wgmma, behind a barrier.
FLASHPORT_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace flashport::FLASHPORT_TARGET
