// ggml's blocks: how 32 values become a block, with the bits of ggml's reference quantisers, and how a block becomes
// values again. A block begins at an even address, with a scale d in fp16. What follows, for value i with its code q:
//   q8_0            32 signed bytes                                         x = d q
//   q4_0            16 bytes of codes                                       x = d (q - 8)
//   q5_0            4 bytes with the codes' fifth bits, 16 of codes         x = d (q - 16)
//   q4_1, q5_1      a minimum m in fp16, then as q4_0 and q5_0              x = d q + m
//   iq4_nl          as q4_0                                                 x = d table[q]
// Byte i of the codes has the low four bits of codes i and i + 16, bit i of the fifth bits is that of code i.
//
// What ggml leaves open: if a value of a block is NaN or infinite, its scale becomes NaN and all other bytes 0, so that
// the whole block reads as NaN on every target. Where the scale is so small that its reciprocal overflows, which fp16
// stores as 0, codes are 0.
#pragma once

#include "common/device/core/scalar_access.h"
#include "common/device/kv/format.h"

namespace flashport::FLASHPORT_TARGET::kv {

inline constexpr int kBlockValues = kv_format_trait(KvFormat::kQ8_0).block_values;

FLASHPORT_DEVICE bool is_block_format(KvFormat format) {
  switch (format) {
    case KvFormat::kQ8_0:
    case KvFormat::kQ4_0:
    case KvFormat::kQ4_1:
    case KvFormat::kQ5_0:
    case KvFormat::kQ5_1:
    case KvFormat::kIq4Nl: return true;
    default: return false;
  }
}

FLASHPORT_DEVICE void store_scale(char* to, float x) {
  *reinterpret_cast<std::uint16_t*>(to) = __builtin_bit_cast(std::uint16_t, to_half(x));
}
FLASHPORT_DEVICE float load_scale(const char* from) {
  return to_float(__builtin_bit_cast(Half, *reinterpret_cast<const std::uint16_t*>(from)));
}

// 0 where 1 / d is no number.
FLASHPORT_DEVICE float finite_inverse(float d) {
  const float inverse = 1.0f / d;
  return inverse > -kInfinity && inverse < kInfinity ? inverse : 0.0f;
}

// The first value of the largest magnitude. Magnitudes are compared by their bits, which have their order, and those
// of NaN above infinity's: a maximum of floats would treat NaN as each processor does.
FLASHPORT_DEVICE float extreme_value(const float* x) {
  float extreme = x[0];
  int most_bits = __builtin_bit_cast(int, x[0]) & 0x7fffffff;
  for (int i = 1; i < kBlockValues; ++i) {
    const int bits = __builtin_bit_cast(int, x[i]) & 0x7fffffff;
    extreme = bits > most_bits ? x[i] : extreme;
    most_bits = maximum(bits, most_bits);
  }
  return extreme;
}

// Whether a block whose extreme value this is has NaN or an infinity.
FLASHPORT_DEVICE bool is_finite(float extreme) {
  constexpr int kInfinityBits = 0x7f800000;
  return (__builtin_bit_cast(int, extreme) & 0x7fffffff) < kInfinityBits;
}
FLASHPORT_DEVICE void store_nan_block(char* to, int bytes) {
  constexpr std::uint16_t kNan = 0x7e00;  // conversions of NaN differ between processors
  auto* halves = reinterpret_cast<std::uint16_t*>(to);
  halves[0] = kNan;
  for (int i = 1; i < bytes / 2; ++i) halves[i] = 0;
}

FLASHPORT_DEVICE void store_q8_0_block(char* to, const float* x) {
  constexpr int kScaleBytes = kv_format_trait(KvFormat::kQ8_0).scale_bytes;
  int most_bits = 0;
  for (int i = 0; i < kBlockValues; ++i) most_bits = maximum(most_bits, __builtin_bit_cast(int, x[i]) & 0x7fffffff);
  const float largest = __builtin_bit_cast(float, most_bits);
  if (!is_finite(largest)) return store_nan_block(to, kv_format_trait(KvFormat::kQ8_0).block_bytes);
  const float d = largest / 127.0f;
  const float inverse = finite_inverse(d);
  store_scale(to, d);
  for (int i = 0; i < kBlockValues; ++i) {
    reinterpret_cast<signed char*>(to)[kScaleBytes + i] = static_cast<signed char>(round_to_int(x[i] * inverse));
  }
}

// The largest code is `most`; also for what is no number.
FLASHPORT_DEVICE unsigned to_code(float x, int most) {
  return x < static_cast<float>(most + 1) ? static_cast<unsigned>(static_cast<int>(x)) : static_cast<unsigned>(most);
}

// code(i) of all values, of kBits bits; `to` is where the fifth bits begin, or the codes where they have four.
template <int kBits, class Code>
FLASHPORT_DEVICE void store_codes(char* to, const Code& code) {
  constexpr int kHalf = kBlockValues / 2;
  auto* halves = reinterpret_cast<std::uint16_t*>(to) + (kBits == 5 ? 2 : 0);
  unsigned fifths = 0;
  for (int i = 0; i < kHalf; i += 2) {
    unsigned two = 0;
    for (int j = 0; j < 2; ++j) {
      const unsigned low = code(i + j), high = code(i + j + kHalf);
      two |= ((low & 15u) | (high & 15u) << 4) << (8 * j);
      fifths |= low >> 4 << (i + j) | high >> 4 << (i + j + kHalf);
    }
    halves[i / 2] = static_cast<std::uint16_t>(two);
  }
  if constexpr (kBits == 5) {
    reinterpret_cast<std::uint16_t*>(to)[0] = static_cast<std::uint16_t>(fifths);
    reinterpret_cast<std::uint16_t*>(to)[1] = static_cast<std::uint16_t>(fifths >> 16);
  }
}
// f(value, its code)
template <int kBits, class F>
FLASHPORT_DEVICE void for_each_code(const char* from, const F& f) {
  constexpr int kHalf = kBlockValues / 2;
  const auto* halves = reinterpret_cast<const std::uint16_t*>(from);
  unsigned fifths = 0;
  if constexpr (kBits == 5) {
    fifths = halves[0] | static_cast<unsigned>(halves[1]) << 16;
    halves += 2;
  }
  for (int i = 0; i < kHalf; ++i) {
    const unsigned both = static_cast<unsigned>(halves[i / 2]) >> (i % 2 * 8);
    f(i, static_cast<int>((both & 15u) | (fifths >> i & 1u) << 4));
    f(i + kHalf, static_cast<int>((both >> 4 & 15u) | (fifths >> (i + kHalf) & 1u) << 4));
  }
}

// q4_0, q5_0: codes around the middle one, whose largest magnitude is the block's extreme value.
template <int kBits>
FLASHPORT_DEVICE void store_centred_block(char* to, const float* x) {
  constexpr int kMiddle = 1 << (kBits - 1), kScaleBytes = 2, kBytes = kScaleBytes + (kBits == 5 ? 4 : 0) + 16;
  const float extreme = extreme_value(x);
  if (!is_finite(extreme)) return store_nan_block(to, kBytes);
  const float d = extreme / static_cast<float>(-kMiddle);
  const float inverse = finite_inverse(d);
  const float offset = inverse == 0.0f && d != 0.0f ? 0.0f : static_cast<float>(kMiddle) + 0.5f;
  store_scale(to, d);
  store_codes<kBits>(to + kScaleBytes, [&](int i) { return to_code(mul_rn(x[i], inverse) + offset, 2 * kMiddle - 1); });
}

// q4_1, q5_1: codes from the smallest value to the largest.
template <int kBits>
FLASHPORT_DEVICE void store_ranged_block(char* to, const float* x) {
  constexpr int kMost = (1 << kBits) - 1, kScaleBytes = 4, kBytes = kScaleBytes + (kBits == 5 ? 4 : 0) + 16;
  if (!is_finite(extreme_value(x))) return store_nan_block(to, kBytes);
  float least = x[0], most = x[0];
  for (int i = 1; i < kBlockValues; ++i) {
    least = x[i] < least ? x[i] : least;
    most = x[i] > most ? x[i] : most;
  }
  const float d = (most - least) / static_cast<float>(kMost);
  const float inverse = finite_inverse(d);
  store_scale(to, d);
  store_scale(to + 2, least);
  store_codes<kBits>(to + kScaleBytes, [&](int i) { return to_code(mul_rn(x[i] - least, inverse) + 0.5f, kMost); });
}

// What a code of iq4_nl stands for: -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.
FLASHPORT_DEVICE int iq4_nl_value(int code) {
  constexpr std::uint64_t kLow = 0xf6eaddcfbfad9881u, kHigh = 0x7159453526190d01u;  // a byte each, the first lowest
  return static_cast<signed char>((code < 8 ? kLow : kHigh) >> (code % 8 * 8) & 0xffu);
}

// The code whose value is nearest, the larger one of two that are.
FLASHPORT_DEVICE int iq4_nl_code(float x) {
  int above = 1;  // or the last
  while (above < 15 && x >= static_cast<float>(iq4_nl_value(above))) ++above;
  const float below = static_cast<float>(iq4_nl_value(above - 1));
  return x - below < static_cast<float>(iq4_nl_value(above)) - x ? above - 1 : above;
}

// Codes of x / (extreme / -127); the scale is then the one of the least error, weighted by squares.
FLASHPORT_DEVICE void store_iq4_nl_block(char* to, const float* x) {
  constexpr int kScaleBytes = 2, kBytes = kScaleBytes + 16, kZeroCode = 8;
  constexpr float kLeastExtreme = 1e-15f;
  const float extreme = extreme_value(x);
  if (!is_finite(extreme)) return store_nan_block(to, kBytes);
  const bool is_zero = extreme < kLeastExtreme && -extreme < kLeastExtreme;
  const float inverse = is_zero ? 0.0f : 1.0f / (extreme / static_cast<float>(iq4_nl_value(0)));
  int codes[kBlockValues];
  float of_products = 0.0f, of_squares = 0.0f;
  for (int i = 0; i < kBlockValues; ++i) {
    codes[i] = is_zero ? kZeroCode : iq4_nl_code(mul_rn(inverse, x[i]));
    const float q = static_cast<float>(iq4_nl_value(codes[i]));
    const float weighted = mul_rn(mul_rn(x[i], x[i]), q);
    of_products = of_products + mul_rn(weighted, x[i]);
    of_squares = of_squares + mul_rn(weighted, q);
  }
  if (!(of_squares < kInfinity)) return store_nan_block(to, kBytes);  // its scale were none either
  store_scale(to, is_zero ? 0.0f : of_products / of_squares);
  store_codes<4>(to + kScaleBytes, [&](int i) { return static_cast<unsigned>(codes[i]); });
}

// Writes the block that begins at `to`. The format is one of blocks.
FLASHPORT_DEVICE void store_block(KvFormat format, char* to, const float* x) {
  switch (format) {
    case KvFormat::kQ4_0: return store_centred_block<4>(to, x);
    case KvFormat::kQ4_1: return store_ranged_block<4>(to, x);
    case KvFormat::kQ5_0: return store_centred_block<5>(to, x);
    case KvFormat::kQ5_1: return store_ranged_block<5>(to, x);
    case KvFormat::kIq4Nl: return store_iq4_nl_block(to, x);
    default: return store_q8_0_block(to, x);
  }
}

// f(i, value i) for all values of the block that begins at `from`, in any order. The format is one of blocks.
template <class F>
FLASHPORT_DEVICE void for_each_value(KvFormat format, const char* from, const F& f) {
  const float d = load_scale(from);
  const auto centred = [&](int middle) {
    return [&f, d, middle](int i, int code) { f(i, mul_rn(d, static_cast<float>(code - middle))); };
  };
  const auto ranged = [&] {
    return [&f, d, m = load_scale(from + 2)](int i, int code) { f(i, mul_rn(d, static_cast<float>(code)) + m); };
  };
  switch (format) {
    case KvFormat::kQ4_0: return for_each_code<4>(from + 2, centred(8));
    case KvFormat::kQ4_1: return for_each_code<4>(from + 4, ranged());
    case KvFormat::kQ5_0: return for_each_code<5>(from + 2, centred(16));
    case KvFormat::kQ5_1: return for_each_code<5>(from + 4, ranged());
    case KvFormat::kIq4Nl:
      return for_each_code<4>(from + 2,
                              [&](int i, int code) { f(i, mul_rn(d, static_cast<float>(iq4_nl_value(code)))); });
    default:
      for (int i = 0; i < kBlockValues; ++i) {
        f(i, mul_rn(d, static_cast<float>(reinterpret_cast<const signed char*>(from)[2 + i])));
      }
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
