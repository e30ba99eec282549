// The execution model of a HIP target: a block of waves, its barrier, signal counters in global memory, a scan over the
// wave, and the scalar arithmetic that common/device is written in. A target's header includes it after its tuning,
// which defines kWaveSize. The compiler must not contract a * b + c: only fma_rn fuses.
#pragma once

#include <hip/hip_runtime.h>

#include <cstdint>
#include <cstring>  // rocPRIM uses it without including it

#include <rocprim/warp/warp_scan.hpp>

#include "common/device/core/arrival.h"

#pragma clang fp contract(off)

#define FLASHPORT_COLD FLASHPORT_DEVICE
#define FLASHPORT_DEVICE __device__ __forceinline__
// For lambdas that use an array in registers: if such a lambda were left out of line, the compiler would keep the array
// in memory.
#define FLASHPORT_INLINE __attribute__((always_inline))
#define FLASHPORT_PRAGMA(text) _Pragma(#text)
#define FLASHPORT_UNROLL(count) FLASHPORT_PRAGMA(unroll count)

#include "common/device/core/arithmetic.h"  // with the macros above

namespace flashport::FLASHPORT_TARGET {

// The form of fp8 numbers: NVIDIA's and the Open Compute Project's, or AMD's first, which has one zero and one NaN.
enum class Fp8Form { kNone, kOcp, kFnuz };

inline constexpr int kVectorFloats = 4;      // columns of a row that a thread takes at a time
inline constexpr int kMergeUnroll = 8;       // parts in flight while merging
inline constexpr int kGroupsAtOnce = 2;      // groups of partial results in flight while they are combined
inline constexpr bool kFinerChunks = false;  // whether kernels may ask for them (chunks.h)
inline constexpr bool kHasTeams = false;     // whether blocks of the schedule may share a device block

using Half = _Float16;
using BFloat16 = __bf16;
FLASHPORT_DEVICE Half to_half(float x) { return static_cast<Half>(x); }
FLASHPORT_DEVICE BFloat16 to_bfloat16(float x) { return static_cast<BFloat16>(x); }
FLASHPORT_DEVICE float to_float(float x) { return x; }
FLASHPORT_DEVICE float to_float(Half x) { return static_cast<float>(x); }
FLASHPORT_DEVICE float to_float(BFloat16 x) { return static_cast<float>(x); }

FLASHPORT_DEVICE float maximum(float a, float b) { return __builtin_fmaxf(a, b); }

FLASHPORT_DEVICE float exp2_approx(float x) { return __builtin_amdgcn_exp2f(x); }
FLASHPORT_DEVICE float reciprocal_approx(float x) { return __builtin_amdgcn_rcpf(x); }
FLASHPORT_DEVICE float log2_full(float x) { return log2f(x); }
FLASHPORT_DEVICE float exp_full(float x) { return expf(x); }
FLASHPORT_DEVICE float log1p_full(float x) { return log1pf(x); }
FLASHPORT_DEVICE float sqrt_full(float x) { return sqrtf(x); }
FLASHPORT_DEVICE float tanh_full(float x) { return tanhf(x); }
FLASHPORT_DEVICE float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FLASHPORT_DEVICE float mul_rn(float a, float b) { return a * b; }
FLASHPORT_DEVICE int round_to_int(float x) { return static_cast<int>(__builtin_roundf(x)); }

template <class T>
FLASHPORT_DEVICE T load_global(const T* address) {
  return *(const T __attribute__((address_space(1)))*)address;
}

// Reads what other blocks of this launch have written; bypasses the vector cache and never uses the scalar one.
FLASHPORT_DEVICE float load_published(const float* address) {
  return __hip_atomic_load(address, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
FLASHPORT_DEVICE void load_published_pair(float& x, float& y, const float* from) {
  const std::uint64_t bits =
      __hip_atomic_load(reinterpret_cast<const std::uint64_t*>(from), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  const float2 two = __builtin_bit_cast(float2, bits);
  x = two.x;
  y = two.y;
}
FLASHPORT_DEVICE void load_published_vector(float (&x)[kVectorFloats], const float* from) {
#pragma unroll
  for (int i = 0; i < kVectorFloats; i += 2) load_published_pair(x[i], x[i + 1], from + i);
}
FLASHPORT_DEVICE void store_published_vector(float* to, const float (&x)[kVectorFloats]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}

// Rounds a magnitude to e4m3 of exponent bias `bias`, to nearest even, saturating at the code `most`.
FLASHPORT_DEVICE unsigned round_e4m3(float magnitude, int bias, unsigned most) {
  const float smallest_normal = __builtin_bit_cast(float, (128u - bias) << 23);
  if (magnitude < smallest_normal) {
    const float units = magnitude * __builtin_bit_cast(float, (129u + bias) << 23);
    return static_cast<unsigned>(__builtin_rintf(units));
  }
  const unsigned bits = __builtin_bit_cast(unsigned, magnitude);
  const unsigned code = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - ((127u - bias) << 3);
  return minimum(code, most);
}
FLASHPORT_DEVICE std::uint8_t to_fp8_e4m3(float x) {
  const unsigned sign = __builtin_bit_cast(unsigned, x) >> 24 & 0x80u;
  const unsigned code = x != x ? 0x7fu : round_e4m3(__builtin_fabsf(x), 7, 0x7e);
  return static_cast<std::uint8_t>(sign | code);
}
// No minus zero: its code is the one NaN.
FLASHPORT_DEVICE std::uint8_t to_fp8_e4m3fnuz(float x) {
  if (x != x) return 0x80;
  const unsigned sign = __builtin_bit_cast(unsigned, x) >> 24 & 0x80u;
  const unsigned code = round_e4m3(__builtin_fabsf(x), 8, 0x7f);
  return static_cast<std::uint8_t>(code == 0 ? 0 : sign | code);
}

// The same value, but what is derived from it is computed where it is used: what only a rare path needs must not stay
// in registers while the hot loop runs.
FLASHPORT_DEVICE int recompute(int x) {
  asm volatile("" : "+v"(x));
  return x;
}
FLASHPORT_DEVICE int recompute_scalar(int x) {
  asm volatile("" : "+s"(x));
  return x;
}

FLASHPORT_DEVICE float wave_max(float x) {
#pragma unroll
  for (int distance = kWaveSize / 2; distance > 0; distance /= 2) {
    x = maximum(x, __shfl_xor(x, distance, kWaveSize));
  }
  return x;
}

// `count` (at most kVectorFloats) values at a stride, as one access where they are contiguous and aligned; rest is 0.
template <class T>
FLASHPORT_DEVICE void load_vector(float (&x)[kVectorFloats], const T* from, std::int64_t stride, int count) {
  using Vector = T __attribute__((ext_vector_type(kVectorFloats)));
  if (stride == 1 && count == kVectorFloats && reinterpret_cast<std::uintptr_t>(from) % sizeof(Vector) == 0) {
    const Vector four = *reinterpret_cast<const Vector*>(from);
#pragma unroll
    for (int i = 0; i < kVectorFloats; ++i) x[i] = to_float(four[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVectorFloats; ++i) x[i] = i < count ? to_float(from[i * stride]) : 0.0f;
}

// A kernel's only argument, read where it lies, without a copy.
template <class Params>
FLASHPORT_DEVICE const Params& kernel_params() {
  return *(const Params*)__builtin_amdgcn_kernarg_segment_ptr();
}
// The lanes of a wave are together, and each sees what the others have written.
FLASHPORT_DEVICE void sync_wave() { __builtin_amdgcn_wave_barrier(); }
// The same params, for a rare path: the compiler loads them again there, and does not keep them in scalar registers
// while the hot loop runs.
template <class Params>
FLASHPORT_DEVICE const Params& reread(const Params& params) {
  auto address = (const Params __attribute__((address_space(4)))*)&params;
  asm volatile("" : "+s"(address));
  return *(const Params*)address;
}

// A barrier that orders shared memory alone. Block::sync() may also wait for every global load in flight: RDNA's waves
// of a block may run on two CUs, whose vector caches it makes agree.
FLASHPORT_DEVICE void sync_shared() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// Waits until this wave's stores have reached the cache that its block shares; defined by the target.
FLASHPORT_DEVICE void await_stores();

// Makes visible to all blocks of the device what this wave has written, and what other waves wrote before a barrier
// that this wave has passed. It must precede every signal to another block. The fence alone is not enough: on CDNA
// clang (22.1.8 at least) omits the wait for the write-back (LLVM pull request 178316), and the signal could overtake
// the data.
FLASHPORT_DEVICE void release_to_device() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  await_stores();
}

class Block {
 public:
  // `teams` greater than 1: waves work alone, each is a block as grids count them, and a device block has `teams` of
  // them. Such a block has no barrier.
  FLASHPORT_DEVICE explicit Block(unsigned* flag, int teams = 1) : flag_(flag), teams_(teams) {}

  FLASHPORT_DEVICE int thread() const { return recompute(static_cast<int>(threadIdx.x)); }
  FLASHPORT_DEVICE int threads() const { return static_cast<int>(blockDim.x); }
  FLASHPORT_DEVICE int lane() const { return static_cast<int>(threadIdx.x) % kWaveSize; }
  FLASHPORT_DEVICE int wave() const {
    return __builtin_amdgcn_readfirstlane(static_cast<int>(threadIdx.x) / kWaveSize);
  }
  FLASHPORT_DEVICE std::int64_t index() const {
    const int block = recompute_scalar(static_cast<int>(blockIdx.x));
    return teams_ == 1 ? block : block * teams_ + wave();
  }
  FLASHPORT_DEVICE std::int64_t count() const { return std::int64_t{gridDim.x} * teams_; }
  FLASHPORT_DEVICE void sync() const { __syncthreads(); }
  // A value that is the same in all lanes, moved to scalar registers: what is derived from it takes no vector registers
  // and no masks.
  template <class T>
  FLASHPORT_DEVICE T uniform(const T& x) const {
    static_assert(sizeof(T) % 4 == 0);
    struct Words {
      unsigned word[sizeof(T) / 4];
    };
    Words words = __builtin_bit_cast(Words, x);
#pragma unroll
    for (unsigned& word : words.word) word = __builtin_amdgcn_readfirstlane(word);
    return __builtin_bit_cast(T, words);
  }

  // The sum of the lanes before this one, and of all.
  template <class T>
  FLASHPORT_DEVICE T wave_exclusive_scan(T x, T& total) const {
    using Scan = rocprim::warp_scan<T, kWaveSize>;
    typename Scan::storage_type none;
    T before;
    Scan().exclusive_scan(x, before, T{0}, total, none, rocprim::plus<T>());
    total = uniform(total);
    return before;
  }
  // The number of the one lane that has found something; the value of a lane.
  FLASHPORT_DEVICE int wave_find(bool found) const { return __builtin_ctzll(__ballot(found)); }
  FLASHPORT_DEVICE int wave_broadcast(int x, int lane) const { return __builtin_amdgcn_readlane(x, lane); }

  // Releases what the block has written and adds arrival(0) .. arrival(count - 1) to their signal counters, which are
  // all different. Bit i of the result says that addition i completed its counter's goal. Exactly one of the blocks
  // that add to a counter gets that bit; it acquires what all the others have written, and sets the counter back to
  // zero.
  template <class Arrivals>
  FLASHPORT_DEVICE unsigned arrive(int count, const Arrivals& arrival) const {
    Arrival mine = arrival(minimum(lane(), count - 1));  // a lane for each counter, all at once
    if (lane() >= count) mine.add = 0;
    await_stores();  // the barrier orders the waves, but does not wait for what they have in flight
    sync();
    if (wave() == 0) {
      bool last = false;
      if (mine.add > 0) {
        release_to_device();
        const auto add = static_cast<std::uint32_t>(mine.add);
        const std::uint32_t before =
            __hip_atomic_fetch_add(mine.counter, add, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
        last = before + add == static_cast<std::uint32_t>(mine.goal);
        if (last) {
          __hip_atomic_store(mine.counter, 0u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
          __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
        }
      }
      const auto reached = static_cast<unsigned>(__ballot(last));
      if (lane() == 0) *flag_ = reached;
    }
    sync();
    return __builtin_amdgcn_readfirstlane(*flag_);
  }

 private:
  unsigned* flag_;  // in shared memory
  int teams_;
};

}  // namespace flashport::FLASHPORT_TARGET
