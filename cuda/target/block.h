// The execution model of a CUDA target: a block of warps, its barrier, the arrival at a counter in global memory, a
// scan over the block, and the scalar arithmetic that common/device is written in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cub/warp/warp_scan.cuh>

#define FLASHPORT_COLD static __device__ __noinline__  // rare code, kept out of line where calls are cheap
#define FLASHPORT_DEVICE __device__ __forceinline__
#define FLASHPORT_PRAGMA(text) _Pragma(#text)
#define FLASHPORT_UNROLL(count) FLASHPORT_PRAGMA(unroll count)

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kWaveSize = 32;
inline constexpr int kVectorFloats = 4;    // columns of a row that a thread takes at a time
inline constexpr int kMergeUnroll = 4;     // parts in flight while merging (docs/tuning.md)
inline constexpr int kFoldAtOnce = 2;      // states in flight while folding inside the loop,
inline constexpr int kFoldAllAtOnce = 12;  // and behind it
inline constexpr float kInfinity = __builtin_huge_valf();
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

using Half = __half;
using BFloat16 = __nv_bfloat16;
FLASHPORT_DEVICE Half to_half(float x) { return __float2half_rn(x); }
FLASHPORT_DEVICE BFloat16 to_bfloat16(float x) { return __float2bfloat16_rn(x); }
FLASHPORT_DEVICE float to_float(float x) { return x; }
FLASHPORT_DEVICE float to_float(Half x) { return __half2float(x); }
FLASHPORT_DEVICE float to_float(BFloat16 x) { return __bfloat162float(x); }

template <class T>
FLASHPORT_DEVICE T minimum(T a, T b) {
  return b < a ? b : a;
}
template <class T>
FLASHPORT_DEVICE T maximum(T a, T b) {
  return a < b ? b : a;
}
FLASHPORT_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }

FLASHPORT_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLASHPORT_DEVICE float log2_full(float x) { return log2f(x); }
FLASHPORT_DEVICE float tanh_full(float x) { return tanhf(x); }
FLASHPORT_DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FLASHPORT_DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }

template <class T>
FLASHPORT_DEVICE T load_global(const T* address) {
  return __ldg(address);
}
// Reads what other blocks of this launch have written: L1 is not coherent, L2 is.
FLASHPORT_DEVICE float load_published(const float* address) { return __ldcg(address); }
FLASHPORT_DEVICE void load_published_vector(float (&x)[kVectorFloats], const float* from) {
  const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}
FLASHPORT_DEVICE void store_published_vector(float* to, const float (&x)[kVectorFloats]) {
  __stcg(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
}
FLASHPORT_DEVICE void load_shared_vector(float (&x)[kVectorFloats], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}
FLASHPORT_DEVICE void store_pair(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = make_float2(a, b); }
FLASHPORT_DEVICE void store_shared_vector(float* to, const float (&x)[kVectorFloats]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}

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

// The largest x of the lanes before this one among kGroup lanes side by side; -inf in the first.
template <int kGroup>
FLASHPORT_DEVICE float group_max_before(float x) {
  const unsigned place = threadIdx.x % kGroup;
#pragma unroll
  for (unsigned distance = 1; distance < kGroup; distance *= 2) {
    const float other = __shfl_up_sync(~0u, x, distance, kGroup);
    x = place >= distance ? maximum(x, other) : x;
  }
  const float before = __shfl_up_sync(~0u, x, 1, kGroup);
  return place == 0 ? -kInfinity : before;
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

// Every kernel begins so, and touches no memory but its own shared memory before: it is launched while the kernel
// before it on the stream ends, and lets the next one come as early (programmatic dependent launch; without it both are
// nothing).
FLASHPORT_DEVICE void begin_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
}

// A block, or some waves of it that do one job: `threads` threads from `first` on, with a barrier of their own.
class Block {
 public:
  FLASHPORT_DEVICE explicit Block(unsigned* flag) : Block(flag, 0, static_cast<int>(blockDim.x), 0) {}
  // By all lanes together: the wave's number is made uniform.
  FLASHPORT_DEVICE Block(unsigned* flag, int first, int threads, int barrier)
      : flag_(flag),
        first_(first),
        threads_(threads),
        barrier_(barrier),
        wave_(__shfl_sync(~0u, (static_cast<int>(threadIdx.x) - first) / kWaveSize, 0)) {}

  FLASHPORT_DEVICE int thread() const { return static_cast<int>(threadIdx.x) - first_; }
  FLASHPORT_DEVICE int threads() const { return threads_; }
  FLASHPORT_DEVICE int lane() const { return thread() % kWaveSize; }
  FLASHPORT_DEVICE int wave() const { return wave_; }
  FLASHPORT_DEVICE std::int64_t index() const { return blockIdx.x; }
  FLASHPORT_DEVICE std::int64_t count() const { return gridDim.x; }
  FLASHPORT_DEVICE void sync() const {
    if (threads_ == kWaveSize) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(barrier_), "r"(threads_) : "memory");
    }
  }
  template <class T>
  FLASHPORT_DEVICE T uniform(T x) const {
    return x;
  }

  // Publishes what the block has written and adds `add` to the counter. True in the one block whose addition reaches
  // `goal`; that block sees what all the others have published, and the counter is zero again.
  FLASHPORT_DEVICE bool arrive(std::uint32_t* counter, int add, int goal) const {
    sync();
    if (thread() == 0) {
      unsigned before;
      asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(add) : "memory");
      const bool last = before + add == static_cast<unsigned>(goal);
      if (last) *counter = 0;
      *flag_ = last;
    }
    sync();
    return *flag_ != 0;
  }

 private:
  unsigned* flag_;  // in shared memory
  int first_, threads_, barrier_;
  int wave_;
};

// A scan over the waves of a part of the block, which cub::BlockScan, with its barrier of the whole one, cannot do.
template <int kThreads>
struct ScanScratch {
  typename cub::WarpScan<std::int64_t>::TempStorage scan[kThreads / kWaveSize];
  std::int64_t totals[kThreads / kWaveSize];
  std::int64_t start;
  int seq;
};

template <int kThreads>
FLASHPORT_DEVICE std::int64_t block_exclusive_scan(const Block& block, ScanScratch<kThreads>& scratch,
                                                   std::int64_t value, std::int64_t& total) {
  std::int64_t before;
  cub::WarpScan<std::int64_t>(scratch.scan[block.wave()]).ExclusiveSum(value, before, total);
  if constexpr (kThreads > kWaveSize) {
    if (block.lane() == 0) scratch.totals[block.wave()] = total;
    block.sync();
    total = 0;
    for (int wave = 0; wave < kThreads / kWaveSize; ++wave) {
      if (wave < block.wave()) before += scratch.totals[wave];
      total += scratch.totals[wave];
    }
  }
  return before;
}

}  // namespace flashport::FLASHPORT_TARGET
