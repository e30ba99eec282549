// The verbs of common/device/kv/widen.h on a host: words of two halves or four bytes.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#define FLASHPORT_DEVICE inline
#define FLASHPORT_INLINE
#define FLASHPORT_UNROLL(count)

namespace flashport::host_words {

using Half = _Float16;
inline Half to_half(float x) { return static_cast<Half>(x); }
inline float to_float(Half x) { return static_cast<float>(x); }

struct Words2 {
  unsigned x, y;
};

inline unsigned pick_each(unsigned high, unsigned low, unsigned selector) {
  unsigned picked = 0;
  for (int i = 0; i < 32; i += 8) {
    const unsigned from = selector >> i & 0xff;
    picked |= ((from < 4 ? low >> 8 * from : high >> 8 * (from - 4)) & 0xff) << i;
  }
  return picked;
}
inline unsigned pick_nibbles(unsigned high, unsigned low, unsigned selector) {
  return pick_each(high, low,
                   (selector & 7u) | (selector & 0x70u) << 4 | (selector & 0x700u) << 8 | (selector & 0x7000u) << 12);
}
template <unsigned kSelector>
unsigned pick_bytes(unsigned high, unsigned low) {
  return pick_each(high, low, kSelector);
}

template <unsigned kMask>
unsigned select_bits(unsigned a, unsigned b) {
  return (a & kMask) | (b & ~kMask);
}
template <unsigned kMask, unsigned kOnes>
unsigned mask_and_set(unsigned x) {
  return (x & kMask) | kOnes;
}

inline unsigned bytes_of_ones(unsigned x) { return x * 0xffu; }

template <class F>
unsigned each_half(unsigned a, unsigned b, unsigned c, const F& f) {
  unsigned both = 0;
  for (int i = 0; i < 32; i += 16) {
    const auto half = [&](unsigned x) {
      return static_cast<float>(std::bit_cast<Half>(static_cast<std::uint16_t>(x >> i)));
    };
    both |= unsigned{std::bit_cast<std::uint16_t>(static_cast<Half>(f(half(a), half(b), half(c))))} << i;
  }
  return both;
}
inline unsigned add_halves(unsigned a, unsigned b) {
  return each_half(a, b, 0, [](double x, double y, double) { return x + y; });
}
inline unsigned multiply_halves(unsigned a, unsigned b) {
  return each_half(a, b, 0, [](double x, double y, double) { return x * y; });
}
inline unsigned fma_halves(unsigned a, unsigned b, unsigned c) {  // doubles hold products of halves and most sums
  return each_half(a, b, c, [](double x, double y, double z) { return x * y + z; });
}
inline unsigned minus_fma_halves(unsigned a, unsigned b, unsigned c) {
  return fma_halves(a ^ 0x80008000u, b, c ^ 0x80008000u);
}
struct Floats2 {
  float x, y;
};
inline Floats2 halves_to_floats(unsigned two) {
  const auto part = [&](int i) {
    return static_cast<float>(std::bit_cast<Half>(static_cast<std::uint16_t>(two >> i)));
  };
  return {part(0), part(16)};
}
inline Floats2 bf16_to_floats(unsigned two) {
  return {std::bit_cast<float>(two << 16), std::bit_cast<float>(two & 0xffff0000u)};
}
inline unsigned floats_to_bf16(Floats2 x) {
  const auto part = [](float f) {
    const auto bits = std::bit_cast<std::uint32_t>(f);
    return (std::isnan(f) ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  };
  return part(x.x) | part(x.y) << 16;
}
inline unsigned fma_bf16(unsigned a, unsigned b, unsigned c) {  // floats hold products of bf16 and the sums asked for
  const Floats2 x = bf16_to_floats(a), y = bf16_to_floats(b), z = bf16_to_floats(c);
  return floats_to_bf16({std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y)});
}
inline unsigned subtract_bf16(unsigned a, unsigned b) { return fma_bf16(b, 0xbf80bf80u, a); }
inline unsigned multiply_bf16(unsigned a, unsigned b) { return fma_bf16(a, b, 0x80008000u); }
inline unsigned floats_to_halves(Floats2 x) {
  return unsigned{std::bit_cast<std::uint16_t>(static_cast<Half>(x.x))} |
         unsigned{std::bit_cast<std::uint16_t>(static_cast<Half>(x.y))} << 16;
}
inline unsigned bf16_to_halves(unsigned two) { return floats_to_halves(bf16_to_floats(two)); }
inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }

// Each target has its own of fp8 (tests/ops).
inline Words2 widen_e4m3(unsigned) { return {}; }
inline Words2 widen_e4m3fnuz(unsigned) { return {}; }

}  // namespace flashport::host_words
