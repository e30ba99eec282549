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

// An address as descriptors have it, in units of 16 bytes. Where the blocks of a launch are in clusters, the rank of
// the block lies in it from bit 24 on.
template <bool kInCluster>
FLASHPORT_DEVICE unsigned descriptor_address(const void* panel) {
  return (kInCluster ? shared_address(panel) & 0x3ffffu : shared_address(panel)) >> 4;
}

// The descriptor of a panel from byte `byte` on: 1024 bytes from eight rows to the next eight, 128-byte swizzle. A step
// of 16 elements is 32 bytes along a row, and 2048 bytes across rows.
template <bool kInCluster = false>
FLASHPORT_DEVICE std::uint64_t panel_descriptor(const void* panel, int byte) {
  constexpr std::uint64_t kHigh = std::uint64_t{1} << 62 | std::uint64_t{1024 / 16} << 32;
  constexpr unsigned kLow = 1u << 16;
  // Addresses of shared memory leave the low word's upper half alone, so that several steps share what is no constant.
  return kHigh | (descriptor_address<kInCluster>(panel) + (kLow + static_cast<unsigned>(byte) / 16));
}

// The descriptor of panels that lie `panel_bytes` apart, for a transposed operand of more than 64 columns.
template <bool kInCluster = false>
FLASHPORT_DEVICE std::uint64_t panels_descriptor(const void* panel, int byte, int panel_bytes) {
  const std::uint64_t high = std::uint64_t{1} << 62 | std::uint64_t{1024 / 16} << 32;
  return high | (descriptor_address<kInCluster>(panel) + static_cast<unsigned>(byte) / 16 +
                 (static_cast<unsigned>(panel_bytes) / 16 << 16));
}

// The registers of 16 columns of a sum: their places in an instruction's text, and its operands.
#define FLASHPORT_AT_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FLASHPORT_AT_1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define FLASHPORT_AT_2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define FLASHPORT_AT_3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define FLASHPORT_AT_4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define FLASHPORT_AT_5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define FLASHPORT_AT_6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define FLASHPORT_AT_7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define FLASHPORT_AT_8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define FLASHPORT_AT_9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define FLASHPORT_AT_10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define FLASHPORT_AT_11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define FLASHPORT_AT_12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define FLASHPORT_AT_13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define FLASHPORT_AT_14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define FLASHPORT_AT_15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define FLASHPORT_SUMS(i)                                                                                      \
  "+f"(sum[2 * i][0]), "+f"(sum[2 * i][1]), "+f"(sum[2 * i][2]), "+f"(sum[2 * i][3]), "+f"(sum[2 * i + 1][0]), \
      "+f"(sum[2 * i + 1][1]), "+f"(sum[2 * i + 1][2]), "+f"(sum[2 * i + 1][3])
#define FLASHPORT_AT_32 FLASHPORT_AT_0 "," FLASHPORT_AT_1
#define FLASHPORT_SUMS_32 FLASHPORT_SUMS(0), FLASHPORT_SUMS(1)
#define FLASHPORT_AT_64 FLASHPORT_AT_32 "," FLASHPORT_AT_2 "," FLASHPORT_AT_3
#define FLASHPORT_SUMS_64 FLASHPORT_SUMS_32, FLASHPORT_SUMS(2), FLASHPORT_SUMS(3)
#define FLASHPORT_AT_80 FLASHPORT_AT_64 "," FLASHPORT_AT_4
#define FLASHPORT_SUMS_80 FLASHPORT_SUMS_64, FLASHPORT_SUMS(4)
#define FLASHPORT_AT_96 FLASHPORT_AT_80 "," FLASHPORT_AT_5
#define FLASHPORT_SUMS_96 FLASHPORT_SUMS_80, FLASHPORT_SUMS(5)
#define FLASHPORT_AT_128 FLASHPORT_AT_96 "," FLASHPORT_AT_6 "," FLASHPORT_AT_7
#define FLASHPORT_SUMS_128 FLASHPORT_SUMS_96, FLASHPORT_SUMS(6), FLASHPORT_SUMS(7)
#define FLASHPORT_AT_192 FLASHPORT_AT_128 "," FLASHPORT_AT_8 "," FLASHPORT_AT_9 "," FLASHPORT_AT_10 "," FLASHPORT_AT_11
#define FLASHPORT_SUMS_192 \
  FLASHPORT_SUMS_128, FLASHPORT_SUMS(8), FLASHPORT_SUMS(9), FLASHPORT_SUMS(10), FLASHPORT_SUMS(11)
#define FLASHPORT_AT_256 \
  FLASHPORT_AT_192 "," FLASHPORT_AT_12 "," FLASHPORT_AT_13 "," FLASHPORT_AT_14 "," FLASHPORT_AT_15
#define FLASHPORT_SUMS_256 \
  FLASHPORT_SUMS_192, FLASHPORT_SUMS(12), FLASHPORT_SUMS(13), FLASHPORT_SUMS(14), FLASHPORT_SUMS(15)

// The wgmma of N columns: the instruction for each of both types and places of the left operand. %a to %g are the
// places that follow those of the sums.
#define FLASHPORT_WGMMA_TEXT(type, columns, left) \
  "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" FLASHPORT_AT_##columns "}, " left
#define FLASHPORT_WGMMA_OF(columns, a, b, c, d, e, f, g)                                                          \
  template <MathType kMath, bool kAdds, bool kTransposed>                                                         \
  FLASHPORT_DEVICE void wgmma(float (&sum)[columns / 8][4], const unsigned (&left)[4], std::uint64_t right) {     \
    if constexpr (kMath == MathType::kBf16) {                                                                     \
      asm volatile(FLASHPORT_WGMMA_TEXT("bf16", columns, "{" a "," b "," c "," d "}, " e ", " f ", 1, 1, " g ";") \
                   : FLASHPORT_SUMS_##columns                                                                     \
                   : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "n"(kAdds ? 1 : 0),      \
                     "n"(kTransposed ? 1 : 0));                                                                   \
    } else {                                                                                                      \
      asm volatile(FLASHPORT_WGMMA_TEXT("f16", columns, "{" a "," b "," c "," d "}, " e ", " f ", 1, 1, " g ";")  \
                   : FLASHPORT_SUMS_##columns                                                                     \
                   : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "n"(kAdds ? 1 : 0),      \
                     "n"(kTransposed ? 1 : 0));                                                                   \
    }                                                                                                             \
  }                                                                                                               \
  template <MathType kMath, bool kAdds, bool kTransposed>                                                         \
  FLASHPORT_DEVICE void wgmma(float (&sum)[columns / 8][4], std::uint64_t left, std::uint64_t right) {            \
    if constexpr (kMath == MathType::kBf16) {                                                                     \
      asm volatile(FLASHPORT_WGMMA_TEXT("bf16", columns, a ", " b ", " c ", 1, 1, 0, " d ";")                     \
                   : FLASHPORT_SUMS_##columns                                                                     \
                   : "l"(left), "l"(right), "n"(kAdds ? 1 : 0), "n"(kTransposed ? 1 : 0));                        \
    } else {                                                                                                      \
      asm volatile(FLASHPORT_WGMMA_TEXT("f16", columns, a ", " b ", " c ", 1, 1, 0, " d ";")                      \
                   : FLASHPORT_SUMS_##columns                                                                     \
                   : "l"(left), "l"(right), "n"(kAdds ? 1 : 0), "n"(kTransposed ? 1 : 0));                        \
    }                                                                                                             \
  }

// sum [16 rows of the warp, N] (+)= left [16 rows, 16] right [16, N], in flight until wgmma_wait(). `left` is in
// registers, or in a panel whose rows are its rows. kTransposed: the rows of the right panel are the index of the sum.
FLASHPORT_WGMMA_OF(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
FLASHPORT_WGMMA_OF(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
FLASHPORT_WGMMA_OF(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
FLASHPORT_WGMMA_OF(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
FLASHPORT_WGMMA_OF(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
FLASHPORT_WGMMA_OF(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#undef FLASHPORT_WGMMA_OF
#undef FLASHPORT_WGMMA_TEXT
// The same with eight columns, where the text above counts in sixteens.
template <MathType kMath, bool kAdds, bool kTransposed>
FLASHPORT_DEVICE void wgmma(float (&sum)[1][4], const unsigned (&left)[4], std::uint64_t right) {
  static_assert(kMath == MathType::kBf16);
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, %9, 1, 1, %10;"
               : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3])
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "n"(kAdds ? 1 : 0),
                 "n"(kTransposed ? 1 : 0));
}

// Precedes the first wgmma of a product: registers that it reads or adds to have been written.
FLASHPORT_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Follows the last wgmma of a product, which is then waited for as a whole.
FLASHPORT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kLater products are in flight.
template <int kLater>
FLASHPORT_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLater) : "memory");
}
// Keeps the compiler from moving a later wgmma_wait() before what `x` is computed from, so that it runs under products:
// ptxas takes a wait for free, and orders it after stores alone. Hardly ever is there one, to a word that nothing
// reads.
FLASHPORT_DEVICE void wgmma_wait_after(unsigned x, unsigned* unread) {
  asm volatile(
      "{\n"
      ".reg .pred rare;\n"
      "setp.eq.u32 rare, %0, 0x7fc12345;\n"
      "@rare st.shared.u32 [%1], %0;\n"
      "}" ::"r"(x),
      "r"(shared_address(unread))
      : "memory");
}
// Keeps the compiler from reading the sums before this point, and from writing them after it.
template <int kTiles>
FLASHPORT_DEVICE void pin(float (&sum)[kTiles][4]) {
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
