// The execution model of a CUDA target: barriers, signals and signal counters in global memory, exchanges between
// lanes, the scalar arithmetic that common/device is written in, and a block of warps (waves.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "common/device/core/arrival.h"

#define FLASHPORT_INLINE __attribute__((always_inline))  // for lambdas that use arrays in registers
#define FLASHPORT_COLD static __device__ __noinline__    // rare code, kept out of line where calls are cheap
#define FLASHPORT_DEVICE __device__ __forceinline__
#define FLASHPORT_PRAGMA(text) _Pragma(#text)
#define FLASHPORT_UNROLL(count) FLASHPORT_PRAGMA(unroll count)

#include "common/device/core/arithmetic.h"  // with the macros above

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kWaveSize = 32;
inline constexpr int kVectorFloats = 4;     // columns of a row that a thread takes at a time
inline constexpr int kMergeUnroll = 4;      // parts in flight while merging (docs/tuning.md)
inline constexpr int kGroupsAtOnce = 2;     // groups of partial results in flight while they are combined
inline constexpr bool kFinerChunks = true;  // whether kernels may ask for them (chunks.h)
inline constexpr bool kHasTeams = true;     // whether blocks of the schedule may share a device block

using Half = __half;
using BFloat16 = __nv_bfloat16;
FLASHPORT_DEVICE Half to_half(float x) { return __float2half_rn(x); }
FLASHPORT_DEVICE BFloat16 to_bfloat16(float x) { return __float2bfloat16_rn(x); }
FLASHPORT_DEVICE float to_float(float x) { return x; }
FLASHPORT_DEVICE float to_float(Half x) { return __half2float(x); }
FLASHPORT_DEVICE float to_float(BFloat16 x) { return __bfloat162float(x); }

FLASHPORT_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }

// NaN if one of them is.
FLASHPORT_DEVICE float minimum_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}

// The compiler's own lowering of the cast product adds a zero to its high half.
FLASHPORT_DEVICE std::uint64_t multiply_wide(std::uint32_t a, std::uint32_t b) {
  std::uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

FLASHPORT_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Of a normal number: no more than the instruction.
FLASHPORT_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLASHPORT_DEVICE float log2_full(float x) { return log2f(x); }
FLASHPORT_DEVICE float exp_full(float x) { return expf(x); }
FLASHPORT_DEVICE float log1p_full(float x) { return log1pf(x); }
FLASHPORT_DEVICE float sqrt_full(float x) { return sqrtf(x); }
FLASHPORT_DEVICE float tanh_full(float x) { return tanhf(x); }
FLASHPORT_DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FLASHPORT_DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }

template <class T>
FLASHPORT_DEVICE T load_global(const T* address) {
  return __ldg(address);
}
// Reads what a kernel before this one may still write. Nothing stays in L1, which is not coherent.
template <class T>
FLASHPORT_DEVICE T load_around_l1(const T* address) {
  return __ldcg(address);
}
// Asks for the line that has the address, if there is one.
FLASHPORT_DEVICE void prefetch_l1(const void* address) { asm volatile("prefetch.global.L1 [%0];" ::"l"(address)); }
// Reads what other blocks of this launch have written: L1 is not coherent, L2 is.
FLASHPORT_DEVICE float load_published(const float* address) { return __ldcg(address); }
FLASHPORT_DEVICE void load_published_pair(float& x, float& y, const float* from) {
  const float2 two = __ldcg(reinterpret_cast<const float2*>(from));
  x = two.x, y = two.y;
}
FLASHPORT_DEVICE void load_published_vector(float (&x)[kVectorFloats], const float* from) {
  const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}
FLASHPORT_DEVICE void store_published_vector(float* to, const float (&x)[kVectorFloats]) {
  __stcg(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
}
// The same value, but what is derived from it is computed where it is used, and not kept in registers.
FLASHPORT_DEVICE int recompute(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// The same condition. Where code for many cases tests one, ptxas otherwise makes a bit of a register for each test, all
// of them beforehand.
FLASHPORT_DEVICE bool at_each_use(bool x) { return recompute(x ? 1 : 0) != 0; }
// Leaves the registers that x would take to what a loop uses.
template <class T>
FLASHPORT_DEVICE void keep_in_memory(T& x) {
  asm volatile("" ::"l"(&x) : "memory");
}
// The lanes of a wave are together, and each sees what the others have written.
FLASHPORT_DEVICE void sync_wave() { __syncwarp(); }
template <class Params>
FLASHPORT_DEVICE const Params& reread(const Params& params) {
  return params;
}

FLASHPORT_DEVICE int round_to_int(float x) { return static_cast<int>(roundf(x)); }

// Rounds to nearest even and saturates; NaN stays NaN.
FLASHPORT_DEVICE std::uint8_t to_fp8_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
// FNUZ has the codes of OCP at half the value, one more of them (240) where OCP has NaN, and NaN where that has -0.
FLASHPORT_DEVICE std::uint8_t to_fp8_e4m3fnuz(float x) {
  if (x != x) return 0x80;
  const float twice = fabsf(2.0f * x);
  const std::uint8_t code = twice > 464.0f ? 0x7f : to_fp8_e4m3(twice);
  return x < 0.0f && code != 0 ? code | 0x80 : code;
}

FLASHPORT_DEVICE float wave_max(float x) {
  for (int distance = kWaveSize / 2; distance > 0; distance /= 2) x = maximum(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// `count` (at most kVectorFloats) values at a stride, as one access where they are contiguous and aligned; rest is 0.
FLASHPORT_DEVICE void load_vector(float (&x)[kVectorFloats], const float* from, std::int64_t stride, int count) {
  if (stride == 1 && count == kVectorFloats && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
    const float4 four = __ldcs(reinterpret_cast<const float4*>(from));
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    return;
  }
  for (int i = 0; i < kVectorFloats; ++i) x[i] = i < count ? from[i * stride] : 0.0f;
}
template <class T>
FLASHPORT_DEVICE void load_vector(float (&x)[kVectorFloats], const T* from, std::int64_t stride, int count) {
  for (int i = 0; i < kVectorFloats; ++i) x[i] = i < count ? to_float(from[i * stride]) : 0.0f;
}

// A barrier of `threads` threads. Threads that signal do not wait; threads that await wait for all others.
FLASHPORT_DEVICE void barrier_signal(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
FLASHPORT_DEVICE void barrier_await(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Programmatic dependent launch; in a kernel that was launched without it both do nothing.
FLASHPORT_DEVICE void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
FLASHPORT_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Nearly every kernel begins with this. A kernel is launched while the kernel before it on the stream ends; until that
// has ended it may touch its own shared memory, prefetch into L2 and load around L1 what it reads again afterwards, and
// nothing else. Then it lets the next kernel launch as early.
FLASHPORT_DEVICE void begin_kernel() {
  await_kernel_before();
  launch_dependents();
}

// A signal is a word in global memory by which a block says that what it has written is complete, to blocks of this
// launch or of the next kernel. One thread sends it, after a barrier of all threads that have written.
FLASHPORT_DEVICE void send_signal(unsigned* word) {
  asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(word) : "memory");
}
FLASHPORT_DEVICE void await_signal(const unsigned* word) {
  unsigned there = 0;
  while (there == 0) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(word) : "memory");
}

// Loads params into the constant cache with all misses in flight together; later they would follow each other. The
// caller stores the result somewhere, so that the compiler keeps the reads.
template <class Params>
FLASHPORT_DEVICE unsigned touch_params(const Params& params) {
  constexpr int kLineWords = 16;
  const auto* words = reinterpret_cast<const unsigned*>(&params);
  unsigned sum = 0;
#pragma unroll
  for (int word = 0; word < static_cast<int>(sizeof(Params) / 4); word += kLineWords) sum ^= words[word];
  return sum;
}

// Adds each lane's arrival and says whose completed their goals (Block::arrive).
FLASHPORT_DEVICE unsigned add_arrivals(const Arrival& mine) {
  bool last = false;
  if (mine.add > 0) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(mine.counter), "r"(mine.add)
                 : "memory");
    last = before + mine.add == static_cast<unsigned>(mine.goal);
    if (last) *mine.counter = 0;
  }
  return __ballot_sync(~0u, last);
}

// x and what the lane `distance` before this one has; x where there is no such lane.
FLASHPORT_DEVICE int add_from_before(int x, int distance) {
  int sum;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      ".reg .s32 other;\n"
      "shfl.sync.up.b32 other|there, %1, %2, 0, -1;\n"
      "@there add.s32 other, other, %1;\n"
      "mov.s32 %0, other;\n"
      "}"
      : "=r"(sum)
      : "r"(x), "r"(distance));
  return sum;
}
FLASHPORT_DEVICE std::int64_t add_from_before(std::int64_t x, int distance) {
  const std::int64_t other = __shfl_up_sync(~0u, x, distance);
  return static_cast<int>(threadIdx.x % kWaveSize) >= distance ? x + other : x;
}

// The sum of the lanes before this one, and of all. CUB's headers would be half of the compile time of a small unit
// (docs/tuning.md).
template <class T>
FLASHPORT_DEVICE T exclusive_sum(T x, T& total) {
  T sum = x;
#pragma unroll
  for (int distance = 1; distance < kWaveSize; distance *= 2) sum = add_from_before(sum, distance);
  total = __shfl_sync(~0u, sum, kWaveSize - 1);
  return sum - x;
}

}  // namespace flashport::FLASHPORT_TARGET

#include "cuda/arch/waves.h"
