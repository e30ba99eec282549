// In place of CUDA's own, for kernels that run on machine.h: the same names.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "common/device/core/arrival.h"
#include "tests/device/kv/word_verbs.h"
#include "tests/device/machine/machine.h"

#define FLASHPORT_COLD inline

#include "common/device/core/arithmetic.h"  // with the macros above

#define __builtin_assume(condition) static_cast<void>(0)

namespace flashport::FLASHPORT_TARGET {

using namespace host_words;  // the verbs of words

inline constexpr int kWaveSize = 32;
inline constexpr int kVectorFloats = 4;
inline constexpr int kMergeUnroll = 4;
inline constexpr int kGroupsAtOnce = 2;
inline constexpr bool kFinerChunks = true;
inline constexpr bool kHasTeams = true;

struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) longlong2 {
  long long x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <unsigned (*kNumber)()>
struct Special {
  struct {
    operator unsigned() const { return kNumber(); }
  } x;
};
inline constexpr Special<machine::thread_index> threadIdx{};
inline constexpr Special<machine::block_index> blockIdx{};
inline constexpr Special<machine::block_threads> blockDim{};
inline constexpr Special<machine::block_count> gridDim{};

inline void __syncwarp() { machine::meet("__syncwarp", nullptr, nullptr); }
inline void __syncthreads() { machine::named_barrier(0, static_cast<int>(machine::block_threads()), true); }
inline void __threadfence_block() {}

struct Exchange {
  std::uint64_t bits;
  int lane;  // that the value comes from
};
template <class T>
T exchange(const char* what, T x, int lane) {
  static_assert(sizeof(T) <= 8);
  Exchange mine{0, lane};
  std::memcpy(&mine.bits, &x, sizeof x);
  machine::meet(
      what,
      [](void* const* all) {
        std::uint64_t told[kWaveSize];
        for (int i = 0; i < kWaveSize; ++i) told[i] = static_cast<const Exchange*>(all[i])->bits;
        for (int i = 0; i < kWaveSize; ++i) {
          auto& its = *static_cast<Exchange*>(all[i]);
          its.bits = told[its.lane & (kWaveSize - 1)];
        }
      },
      &mine);
  std::memcpy(&x, &mine.bits, sizeof x);
  return x;
}
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return exchange("__shfl_sync", x, lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int distance) {
  return exchange("__shfl_xor_sync", x, static_cast<int>(threadIdx.x % kWaveSize) ^ distance);
}
inline float wave_max(float x) {
  for (int distance = kWaveSize / 2; distance > 0; distance /= 2) x = std::fmax(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned mine = x ? 1 : 0;
  machine::meet(
      "__ballot_sync",
      [](void* const* all) {
        unsigned set = 0;
        for (int i = 0; i < kWaveSize; ++i) set |= *static_cast<const unsigned*>(all[i]) << i;
        for (int i = 0; i < kWaveSize; ++i) *static_cast<unsigned*>(all[i]) = set;
      },
      &mine);
  return mine;
}
inline bool __all_sync(unsigned, bool x) { return __ballot_sync(~0u, x) == ~0u; }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline Half __ushort_as_half(unsigned short bits) { return std::bit_cast<Half>(bits); }
inline float __half2float(Half x) { return to_float(x); }
inline unsigned atomicAdd(unsigned* to, unsigned x) { return std::exchange(*to, *to + x); }
inline unsigned atomicExch(unsigned* to, unsigned x) { return std::exchange(*to, x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((std::uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t both = std::uint64_t{high} << 32 | low;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned from = selector >> 4 * i & 15;
    const unsigned byte = static_cast<unsigned>(both >> 8 * (from & 7)) & 0xff;
    picked |= (from < 8 ? byte : byte < 0x80 ? 0u : 0xffu) << 8 * i;
  }
  return picked;
}
template <class T>
T __ldg(const T* address) {
  return *address;
}

struct BFloat16 {
  std::uint16_t bits;
};
inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
inline BFloat16 to_bfloat16(float x) { return {static_cast<std::uint16_t>(floats_to_bf16({x, 0.0f}))}; }
inline float maximum(float a, float b) { return std::fmax(a, b); }
inline float minimum_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b); }

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float log2_full(float x) { return std::log2(x); }
inline float tanh_full(float x) { return std::tanh(x); }
inline float mul_rn(float a, float b) { return a * b; }

template <class T>
T load_global(const T* address) {
  return *address;
}
inline void prefetch_l1(const void*) {}
template <class T>
T load_around_l1(const T* address) {
  return *address;
}
inline float load_published(const float* address) { return *address; }
inline void load_published_pair(float& x, float& y, const float* from) { x = from[0], y = from[1]; }
inline void load_published_vector(float (&x)[kVectorFloats], const float* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) machine::fail("a vector that is not aligned");
  std::memcpy(x, from, sizeof x);
}
inline void store_published_vector(float* to, const float (&x)[kVectorFloats]) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0) machine::fail("a vector that is not aligned");
  std::memcpy(to, x, sizeof x);
}
// `count` values at a stride; the rest is 0.
template <class T>
void load_vector(float (&x)[kVectorFloats], const T* from, std::int64_t stride, int count) {
  for (int i = 0; i < kVectorFloats; ++i) x[i] = i < count ? to_float(from[i * stride]) : 0.0f;
}
inline int recompute(int x) { return x; }
inline bool at_each_use(bool x) { return x; }
template <class T>
void keep_in_memory(T&) {}
inline void sync_wave() { __syncwarp(); }
template <class Params>
const Params& reread(const Params& params) {
  return params;
}

inline void barrier_signal(int barrier, int threads) { machine::named_barrier(barrier, threads, false); }
inline void barrier_await(int barrier, int threads) { machine::named_barrier(barrier, threads, true); }
inline void begin_kernel() { machine::await_kernel_before(); }
template <class Params>
unsigned touch_params(const Params&) {
  return 0;
}
template <int kRegisters>
void increase_registers() {}
template <int kRegisters>
void decrease_registers() {}

inline unsigned add_arrivals(const Arrival& mine) {
  bool last = false;
  if (mine.add > 0) {
    *mine.counter += mine.add;
    last = *mine.counter == static_cast<unsigned>(mine.goal);
    if (last) *mine.counter = 0;
  }
  return __ballot_sync(~0u, last);
}
template <class T>
T exclusive_sum(T x, T& total) {
  struct Sum {
    T x, before;
  } mine{x, T{}};
  machine::meet(
      "exclusive_sum",
      [](void* const* all) {
        T sum{};
        for (int i = 0; i < kWaveSize; ++i) {
          auto& its = *static_cast<Sum*>(all[i]);
          its.before = sum;
          sum += its.x;
        }
        for (int i = 0; i < kWaveSize; ++i) static_cast<Sum*>(all[i])->x = sum;
      },
      &mine);
  total = mine.x;
  return mine.before;
}

}  // namespace flashport::FLASHPORT_TARGET

#include "cuda/arch/waves.h"
