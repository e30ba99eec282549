// The execution model of a CPU target: a block runs on one thread, and a wave has one lane; vectors of kVecWidth
// floats, which the target's header sets first, speed up its loops. So verbs that combine lanes do nothing. Blocks
// synchronise through atomics as on a GPU. The compiler must not contract a * b + c: only fma_rn fuses.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>
#ifdef __F16C__
#include <immintrin.h>
#endif

#include "common/device/core/arrival.h"

#define FLASHPORT_INLINE __attribute__((always_inline))  // for lambdas that use arrays in registers
#define FLASHPORT_COLD FLASHPORT_DEVICE
#define FLASHPORT_DEVICE inline __attribute__((always_inline))
#define FLASHPORT_UNROLL(count)

#include "common/device/core/arithmetic.h"  // with the macros above

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kWaveSize = 1;
inline constexpr int kVectorFloats = 64;
inline constexpr int kMergeUnroll = 1;
inline constexpr int kGroupsAtOnce = 1;      // groups of partial results in flight while they are combined
inline constexpr bool kFinerChunks = false;  // whether kernels may ask for them (chunks.h)
inline constexpr bool kHasTeams = false;     // whether blocks of the schedule may share a device block

static_assert(kVecWidth == 8 || kVecWidth == 16);
using Vec = float __attribute__((vector_size(4 * kVecWidth)));
using IntVec = std::int32_t __attribute__((vector_size(4 * kVecWidth)));
using HalfBits = std::uint16_t __attribute__((vector_size(2 * kVecWidth)));

// 0, 1, 2, ...
inline constexpr IntVec kLaneNumbers = []<int... kLane>(std::integer_sequence<int, kLane...>) {
  return IntVec{kLane...};
}(std::make_integer_sequence<int, kVecWidth>());

FLASHPORT_DEVICE Vec load_vec(const float* from) {
  Vec x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
FLASHPORT_DEVICE void store_vec(float* to, Vec x) { __builtin_memcpy(to, &x, sizeof x); }
FLASHPORT_DEVICE Vec broadcast(float x) { return x - Vec{}; }  // unlike x + 0, an identity for -0 too

// 16-bit types as storage; arithmetic is fp32.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// Rounds to nearest even by letting the addition of a power of two do the rounding; NaN and infinities pass.
FLASHPORT_DEVICE Half to_half(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // subnormal: the unit is 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u;
  return {static_cast<std::uint16_t>(sign | rounded >> 13)};
}
FLASHPORT_DEVICE BFloat16 to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
FLASHPORT_DEVICE float to_float(float x) { return x; }
FLASHPORT_DEVICE float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }
#ifdef __F16C__
FLASHPORT_DEVICE float to_float(Half x) { return _cvtsh_ss(x.bits); }
#else
FLASHPORT_DEVICE float to_float(Half x) {
  const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
  float value = std::bit_cast<float>(magnitude) * 0x1p112f;
  if (magnitude >= 0x0f800000u) value = std::bit_cast<float>(magnitude | 0x7f800000u);
  return (x.bits & 0x8000u) != 0 ? -value : value;
}
#endif

// Rounds a magnitude to e4m3 with exponent bias `bias`, saturating at `most`.
FLASHPORT_DEVICE std::uint8_t round_e4m3(float magnitude, int bias, std::uint8_t most) {
  const float unit = std::ldexp(1.0f, 1 - bias - 3);  // of the subnormals
  const auto bits = std::bit_cast<std::uint32_t>(magnitude);
  const float smallest_normal = std::ldexp(1.0f, 1 - bias);
  if (magnitude < smallest_normal) return static_cast<std::uint8_t>(std::nearbyint(magnitude / unit));
  const std::uint32_t rounded = (bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20;
  const std::uint32_t code = rounded - (static_cast<std::uint32_t>(127 - bias) << 3);
  return code > most ? most : static_cast<std::uint8_t>(code);
}
FLASHPORT_DEVICE std::uint8_t to_fp8_e4m3(float x) {
  const std::uint8_t sign = std::signbit(x) ? 0x80 : 0;
  return std::isnan(x) ? static_cast<std::uint8_t>(sign | 0x7f) : sign | round_e4m3(std::fabs(x), 7, 0x7e);
}
FLASHPORT_DEVICE std::uint8_t to_fp8_e4m3fnuz(float x) {
  if (std::isnan(x)) return 0x80;
  const std::uint8_t code = round_e4m3(std::fabs(x), 8, 0x7f);
  return std::signbit(x) && code != 0 ? code | 0x80 : code;
}

// Defined by the target.
FLASHPORT_DEVICE float fma_rn(float a, float b, float c);
FLASHPORT_DEVICE Vec fma_rn(Vec a, Vec b, Vec c);

FLASHPORT_DEVICE float reciprocal_approx(float x) { return 1.0f / x; }
// 2^x to about one unit in the last place; 0 below 2^-126. NaN stays NaN.
FLASHPORT_DEVICE float exp2_approx(float x) {
  const float clamped = x < -127.0f ? -127.0f : (x > 128.0f ? 128.0f : x);
  const float shifted = clamped + 0x1.8p23f;  // the integer part in the low bits
  const float fraction = clamped - (shifted - 0x1.8p23f);
  float y = 1.5353362e-4f;
  y = fma_rn(y, fraction, 1.3398874e-3f);
  y = fma_rn(y, fraction, 9.6184373e-3f);
  y = fma_rn(y, fraction, 5.5503324e-2f);
  y = fma_rn(y, fraction, 2.4022648e-1f);
  y = fma_rn(y, fraction, 6.9314720e-1f);
  y = fma_rn(y, fraction, 1.0f);
  const std::int32_t exponent = std::bit_cast<std::int32_t>(shifted) - 0x4b400000;
  const float scale = std::bit_cast<float>((exponent + 127) << 23);
  return y * scale;
}
FLASHPORT_DEVICE Vec exp2_approx(Vec x) {
  const Vec raised = x < -127.0f ? broadcast(-127.0f) : x;
  const Vec clamped = raised > 128.0f ? broadcast(128.0f) : raised;
  const Vec shifted = clamped + 0x1.8p23f;
  const Vec fraction = clamped - (shifted - 0x1.8p23f);
  Vec y = broadcast(1.5353362e-4f);
  for (const float coefficient : {1.3398874e-3f, 9.6184373e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f}) {
    y = fma_rn(y, fraction, broadcast(coefficient));
  }
  const IntVec exponent = reinterpret_cast<IntVec>(shifted) - 0x4b400000;
  return y * reinterpret_cast<Vec>((exponent + 127) << 23);
}
FLASHPORT_DEVICE float log2_full(float x) { return std::log2(x); }
FLASHPORT_DEVICE float exp_full(float x) { return std::exp(x); }
FLASHPORT_DEVICE float log1p_full(float x) { return std::log1p(x); }
FLASHPORT_DEVICE float sqrt_full(float x) { return std::sqrt(x); }
FLASHPORT_DEVICE float tanh_full(float x) { return std::tanh(x); }
FLASHPORT_DEVICE float mul_rn(float a, float b) { return a * b; }
FLASHPORT_DEVICE int round_to_int(float x) { return static_cast<int>(std::round(x)); }
FLASHPORT_DEVICE float wave_max(float x) { return x; }

template <class T>
FLASHPORT_DEVICE T load_global(const T* address) {
  return *address;
}
// Reads what other blocks of this launch have written.
FLASHPORT_DEVICE float load_published(const float* address) { return *address; }
FLASHPORT_DEVICE void load_published_pair(float& x, float& y, const float* from) { x = from[0], y = from[1]; }

FLASHPORT_DEVICE int recompute(int x) { return x; }
FLASHPORT_DEVICE void sync_wave() {}  // of one lane
template <class Params>
FLASHPORT_DEVICE const Params& reread(const Params& params) {
  return params;
}

template <class T>
FLASHPORT_DEVICE void load_vector(float (&x)[kVectorFloats], const T* from, std::int64_t stride, int count) {
  if (stride == 1 && count == kVectorFloats) {
    for (int i = 0; i < kVectorFloats; ++i) x[i] = to_float(from[i]);
    return;
  }
  for (int i = 0; i < kVectorFloats; ++i) x[i] = i < count ? to_float(from[i * stride]) : 0.0f;
}

FLASHPORT_DEVICE void load_published_vector(float (&x)[kVectorFloats], const float* from) {
  std::memcpy(x, from, sizeof x);
}
FLASHPORT_DEVICE void store_published_vector(float* to, const float (&x)[kVectorFloats]) {
  std::memcpy(to, x, sizeof x);
}

class Block {
 public:
  Block(std::int64_t index, std::int64_t count) : index_(index), count_(count) {}
  FLASHPORT_DEVICE int thread() const { return 0; }
  FLASHPORT_DEVICE int threads() const { return 1; }
  FLASHPORT_DEVICE int lane() const { return 0; }
  FLASHPORT_DEVICE int wave() const { return 0; }
  FLASHPORT_DEVICE std::int64_t index() const { return index_; }
  FLASHPORT_DEVICE std::int64_t count() const { return count_; }
  FLASHPORT_DEVICE void sync() const {}
  template <class T>
  FLASHPORT_DEVICE T uniform(T x) const {
    return x;
  }

  template <class T>
  FLASHPORT_DEVICE T wave_exclusive_scan(T x, T& total) const {
    total = x;
    return 0;
  }
  FLASHPORT_DEVICE int wave_find(bool) const { return 0; }
  FLASHPORT_DEVICE int wave_broadcast(int x, int) const { return x; }

  // Releases what the block has written and adds arrival(0) .. arrival(count - 1) to their signal counters, which are
  // all different. Bit i of the result says that addition i completed its counter's goal. Exactly one of the blocks
  // that add to a counter gets that bit; it acquires what all the others have written, and sets the counter back to
  // zero.
  template <class Arrivals>
  FLASHPORT_DEVICE unsigned arrive(int count, const Arrivals& arrival) const {
    unsigned reached = 0;
    for (int i = 0; i < count; ++i) {
      const Arrival mine = arrival(i);
      if (mine.add == 0) continue;
      std::atomic_ref<std::uint32_t> arrivals(*mine.counter);
      const auto add = static_cast<std::uint32_t>(mine.add);
      const std::uint32_t before = arrivals.fetch_add(add, std::memory_order_acq_rel);
      if (before + add != static_cast<std::uint32_t>(mine.goal)) continue;
      arrivals.store(0, std::memory_order_relaxed);
      reached |= 1u << i;
    }
    return reached;
  }

 private:
  std::int64_t index_, count_;
};

}  // namespace flashport::FLASHPORT_TARGET
