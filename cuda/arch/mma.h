// The instructions that tile verbs are made of: asynchronous copies and their barriers, ldmatrix, mma.sync m16n8k16.
//
// Fragments of mma.m16n8k16, lane = 4 * g + c (g 0..7, c 0..3), a register holds two 16-bit values:
//   A [16, 16]: a0 (g, 2c..) a1 (g + 8, 2c..) a2 (g, 2c + 8..) a3 (g + 8, 2c + 8..)
//   B [16, 8]:  b0 (2c.., g) b1 (2c + 8.., g)      k first
//   C [16, 8]:  c0 (g, 2c) c1 (g, 2c + 1) c2 (g + 8, 2c) c3 (g + 8, 2c + 1)
#pragma once

#include "common/device/core/types.h"
#include "cuda/arch/block.h"

namespace flashport::FLASHPORT_TARGET {

FLASHPORT_DEVICE unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies the first `bytes` of kBytes (16, 8 or 4) from global to shared memory, around L1 if 16, and zeros in place of
// the others, which are not read.
template <int kBytes>
FLASHPORT_DEVICE void copy_async_first(void* to, const void* from, int bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes),
                 "r"(bytes)
                 : "memory");
  }
}
// All of them; zeros where `valid` is false.
template <int kBytes>
FLASHPORT_DEVICE void copy_async(void* to, const void* from, bool valid) {
  copy_async_first<kBytes>(to, from, valid ? kBytes : 0);
}

// `to` is an address of shared memory.
FLASHPORT_DEVICE void copy_async_unit(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// A cache line that is read once leaves L2 first: what is read again (queries, page numbers, partial results) stays.
// This is what createpolicy.fractional.L2::evict_first gives for all of the lines. As a constant it lies in uniform
// registers, where copies want it; what createpolicy returns is moved there again for each of them.
constexpr std::uint64_t kReadOncePolicy = 0x12f0000000000000;
constexpr std::uint64_t kNormalPolicy = 0x1000000000000000;
// Zeros where `zeros`. `to` is an address of shared memory.
template <int kBytes>
FLASHPORT_DEVICE void copy_async(unsigned to, const void* from, bool zeros, std::uint64_t policy) {
  if constexpr (kBytes == 16) {
    asm volatile(
        "{\n"
        ".reg .pred zeros;\n"
        "setp.ne.b32 zeros, %2, 0;\n"
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, zeros, %3;\n"
        "}" ::"r"(to),
        "l"(from), "r"(static_cast<int>(zeros)), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred zeros;\n"
        "setp.ne.b32 zeros, %3, 0;\n"
        "cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, zeros, %4;\n"
        "}" ::"r"(to),
        "l"(from), "n"(kBytes), "r"(static_cast<int>(zeros)), "l"(policy)
        : "memory");
  }
}

struct NoPolicy {};
template <int kBytes>
FLASHPORT_DEVICE void copy_async(unsigned to, const void* from, bool zeros, NoPolicy) {
  static_assert(kBytes == 16);
  asm volatile(
      "{\n"
      ".reg .pred zeros;\n"
      "setp.ne.b32 zeros, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, zeros;\n"
      "}" ::"r"(to),
      "l"(from), "r"(static_cast<int>(zeros))
      : "memory");
}

// 16 bytes, or zeros, also where `sign` is negative: one comparison makes the predicate. The compiler may move loads
// and stores across it: a wait for the copy keeps them in order.
FLASHPORT_DEVICE void copy_async_or_zeros(unsigned to, const void* from, int sign, bool zeros) {
  asm volatile(
      "{\n"
      ".reg .pred always, zeros;\n"
      "setp.ne.b32 always, %3, 0;\n"
      "setp.lt.or.s32 zeros, %2, 0, always;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, zeros;\n"
      "}" ::"r"(to),
      "l"(from), "r"(sign), "r"(static_cast<int>(zeros)));
}

// 16 bytes of shared memory, as values of which the compiler knows nothing.
FLASHPORT_DEVICE void load_shared(unsigned (&r)[4], const unsigned (&from)[4]) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(from)));
}

// mbarriers: a phase completes when all threads have arrived.
FLASHPORT_DEVICE void mbarrier_init(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Arrives when this thread's cp.async so far are complete.
FLASHPORT_DEVICE void mbarrier_arrive_on_copies(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
FLASHPORT_DEVICE void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// The arrival of a wave: one for all lanes, which have read what the barrier gives back.
FLASHPORT_DEVICE void mbarrier_arrive_wave(std::uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % kWaveSize == 0) mbarrier_arrive(barrier);
}
FLASHPORT_DEVICE void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Copies since the last commit are one group. Waits until at most kLater groups of this thread are in flight.
FLASHPORT_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLater>
FLASHPORT_DEVICE void await_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}
FLASHPORT_DEVICE void mbarrier_wait(std::uint64_t* barrier, unsigned phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

// The stage of a ring that a wave comes to next, and the phase of that stage's barriers.
template <int kStages>
struct PipelineState {
  int stage = 0;
  unsigned phase = 0;
  FLASHPORT_DEVICE void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

FLASHPORT_DEVICE void ldmatrix_x4(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
FLASHPORT_DEVICE void ldmatrix_x2(unsigned (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
FLASHPORT_DEVICE void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
FLASHPORT_DEVICE void ldmatrix_x2_trans(unsigned (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}

// Store as ldmatrix_x4 and ldmatrix_x4_trans load.
FLASHPORT_DEVICE void stmatrix_x4(void* row, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
FLASHPORT_DEVICE void stmatrix_x4_trans(void* row, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// An 8 x 8 matrix of 16-bit values, row g in the lanes 4 g + c (two a register), transposed.
FLASHPORT_DEVICE unsigned transpose_8x8(unsigned two) {
  unsigned r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(two));
  return r;
}

template <MathType kMath>
FLASHPORT_DEVICE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (kMath == MathType::kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// c [16, 8] += a [16, 8] b [8, 8] in tf32: a0 (g, c) a1 (g + 8, c) a2 (g, c + 4) a3 (g + 8, c + 4), b0 (c, g) b1
// (c + 4, g), C as above.
FLASHPORT_DEVICE void mma_tf32(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

FLASHPORT_DEVICE unsigned multiply_halves(unsigned a, unsigned b) {
  const __half2 product = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const unsigned&>(product);
}

// Two floats as a register of the math type, the first in the low half.
template <MathType kMath>
FLASHPORT_DEVICE unsigned pack(float low, float high) {
  if constexpr (kMath == MathType::kBf16) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const unsigned&>(two);
  } else {
    const __half2 two = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(two);
  }
}

}  // namespace flashport::FLASHPORT_TARGET
