// wgmma, the matrix products of Hopper's warpgroups. Each of the four warps has 16 rows of the left operand, in
// registers as mma.sync has them (mma.h) or in shared memory. All four multiply them by one right operand in shared
// memory.
//
// The right operand lies in panels of rows of 128 bytes. The 16-byte vectors of a row are swizzled by the row's last
// three bits; panels begin where 1024 divides the address. A panel's row is an index of the sum if the operand is
// transposed, and else a column of the product. Ordinary stores and copies write panels, so fence_async_proxy() must
// come between them and a wgmma.
#pragma once

#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kPanelColumns = 64;  // 16-bit values of a row
inline constexpr int kPanelBytes = 64 * 128;

// The offset of vector `vector` of a panel's row, in elements.
FLASHPORT_DEVICE int swizzled_offset(int row, int vector) { return row * kPanelColumns + (vector ^ (row & 7)) * 8; }

// The descriptor of a panel from byte `byte` on: 1024 bytes from eight rows to the next eight, 128-byte swizzle. A step
// of 16 elements is 32 bytes along a row, and 2048 bytes across rows.
FLASHPORT_DEVICE std::uint64_t panel_descriptor(const void* panel, int byte) {
  constexpr std::uint64_t kHigh = std::uint64_t{1} << 62 | std::uint64_t{1024 / 16} << 32;
  constexpr unsigned kLow = 1u << 16;
  // Addresses of shared memory leave the low word's upper half alone, so that several steps share what is no constant.
  return kHigh | ((shared_address(panel) >> 4) + (kLow + static_cast<unsigned>(byte) / 16));
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

// sum [16 rows of the warp, 64] (+)= a [16 rows, 16] b [16, 64], in flight until wgmma_wait(). `a` is in registers, or
// in a panel whose rows are its rows. kTransposed: the rows of b's panel are the index of the sum.
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

// Precedes the first wgmma of a product: registers that it reads or adds to have been written.
FLASHPORT_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Follows the last wgmma of a product, which is then waited for as a whole.
FLASHPORT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kLater products are in flight.
template <int kLater>
FLASHPORT_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLater) : "memory");
}
// Keeps the compiler from reading the sums before this point, and from writing them after it.
FLASHPORT_DEVICE void pin(float (&sum)[8][4]) {
#pragma unroll
  for (auto& four : sum) {
    asm volatile("" : "+f"(four[0]), "+f"(four[1]), "+f"(four[2]), "+f"(four[3])::"memory");
  }
}

// Sets the registers that each lane of the warpgroup has from here on. A warpgroup can increase them by what others
// have released by decreasing theirs.
template <int kCount>
FLASHPORT_DEVICE void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
FLASHPORT_DEVICE void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Makes this thread's writes to shared memory visible to wgmma after a barrier.
FLASHPORT_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace flashport::FLASHPORT_TARGET
