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
  FLASHPORT_UNROLL(32)
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
inline constexpr std::uint16_t kNanScale = 0x7e00;  // in fp16; conversions of NaN differ between processors
FLASHPORT_DEVICE void store_nan_block(char* to, int bytes) {
  auto* halves = reinterpret_cast<std::uint16_t*>(to);
  halves[0] = kNanScale;
  for (int i = 1; i < bytes / 2; ++i) halves[i] = 0;
}

FLASHPORT_DEVICE void store_q8_0_block(char* to, const float* x) {
  constexpr int kScaleBytes = kv_format_trait(KvFormat::kQ8_0).scale_bytes;
  int most_bits = 0;
  for (int i = 0; i < kBlockValues; ++i) most_bits = maximum(most_bits, __builtin_bit_cast(int, x[i]) & 0x7fffffff);
  const float largest = __builtin_bit_cast(float, most_bits);
  const bool finite = is_finite(largest);
  const float d = largest / 127.0f;
  const float inverse = finite_inverse(d);
  *reinterpret_cast<std::uint16_t*>(to) = finite ? __builtin_bit_cast(std::uint16_t, to_half(d)) : kNanScale;
  for (int i = 0; i < kBlockValues; ++i) {
    const float value = finite ? x[i] * inverse : 0.0f;
    reinterpret_cast<signed char*>(to)[kScaleBytes + i] = static_cast<signed char>(round_to_int(value));
  }
}

// Codes of the 32 values of a block, eight in each word from the lowest bits on; fifth bits are a word of their own.
struct BlockCodes {
  std::uint32_t words[4] = {};
  std::uint32_t fifths = 0;

  FLASHPORT_DEVICE void set(int i, unsigned code) {
    words[i / 8] |= (code & 15u) << i % 8 * 4;
    fifths |= code >> 4 << i;
  }
  FLASHPORT_DEVICE unsigned low_bits(int i) const { return words[i / 8] >> i % 8 * 4 & 15u; }
};

// `to` is where the fifth bits begin, or the codes where they have four bits.
FLASHPORT_DEVICE void store_codes(char* to, const BlockCodes& codes, bool is_long) {
  constexpr int kHalf = kBlockValues / 2;
  auto* halves = reinterpret_cast<std::uint16_t*>(to);
  if (is_long) {
    halves[0] = static_cast<std::uint16_t>(codes.fifths);
    halves[1] = static_cast<std::uint16_t>(codes.fifths >> 16);
    halves += 2;
  }
  FLASHPORT_UNROLL(8)
  for (int i = 0; i < kHalf; i += 2) {
    halves[i / 2] = static_cast<std::uint16_t>(codes.low_bits(i) | codes.low_bits(i + kHalf) << 4 |
                                               codes.low_bits(i + 1) << 8 | codes.low_bits(i + 1 + kHalf) << 12);
  }
}

// How q4_0, q4_1, q5_0 and q5_1 differ.
struct CodeForm {
  bool is_centred;  // codes lie around the middle one, as far as the value of the largest magnitude is; else they lie
                    // between the smallest value, which the block has too, and the largest
  bool is_long;     // they have five bits
  FLASHPORT_DEVICE int levels() const { return is_long ? 32 : 16; }
  FLASHPORT_DEVICE int scale_bytes() const { return is_centred ? 2 : 4; }
  FLASHPORT_DEVICE int block_bytes() const { return scale_bytes() + (is_long ? 4 : 0) + kBlockValues / 2; }
};
FLASHPORT_DEVICE CodeForm code_form(KvFormat format) {
  return {.is_centred = format == KvFormat::kQ4_0 || format == KvFormat::kQ5_0,
          .is_long = format == KvFormat::kQ5_0 || format == KvFormat::kQ5_1};
}

// The largest code is `most`; also for what is no number.
FLASHPORT_DEVICE unsigned to_code(float x, int most) {
  return x < static_cast<float>(most + 1) ? static_cast<unsigned>(static_cast<int>(x)) : static_cast<unsigned>(most);
}

FLASHPORT_DEVICE void store_even_block(CodeForm form, char* to, const float* x) {
  const float extreme = extreme_value(x);
  if (!is_finite(extreme)) return store_nan_block(to, form.block_bytes());
  float least = x[0], most = x[0];
  FLASHPORT_UNROLL(32)
  for (int i = 1; i < kBlockValues; ++i) {
    least = x[i] < least ? x[i] : least;
    most = x[i] > most ? x[i] : most;
  }
  const int top = form.levels() - 1, middle = form.levels() / 2;
  const float d = form.is_centred ? extreme / static_cast<float>(-middle) : (most - least) / static_cast<float>(top);
  const float inverse = finite_inverse(d), base = form.is_centred ? 0.0f : least;
  const bool is_lost = inverse == 0.0f && d != 0.0f;
  const float offset = is_lost ? 0.0f : form.is_centred ? static_cast<float>(middle) + 0.5f : 0.5f;
  BlockCodes codes;
  FLASHPORT_UNROLL(32)
  for (int i = 0; i < kBlockValues; ++i) codes.set(i, to_code(mul_rn(x[i] - base, inverse) + offset, top));
  store_scale(to, d);
  if (!form.is_centred) store_scale(to + 2, least);
  store_codes(to + form.scale_bytes(), codes, form.is_long);
}

// What a code of iq4_nl stands for: -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.
FLASHPORT_DEVICE int iq4_nl_value(int code) {
  constexpr std::uint64_t kLow = 0xf6eaddcfbfad9881u, kHigh = 0x7159453526190d01u;  // a byte each, the first lowest
  return static_cast<signed char>((code < 8 ? kLow : kHigh) >> (code % 8 * 8) & 0xffu);
}

// The code whose value is nearest, the larger one of two that are.
FLASHPORT_DEVICE int iq4_nl_code(float x) {
  int below = 0;  // the last whose value is not above x; 14 for the last two, 0 where all are
  FLASHPORT_UNROLL(4)
  for (int step = 8; step >= 1; step /= 2) {
    below += x >= static_cast<float>(iq4_nl_value(below + step)) ? step : 0;
  }
  below = minimum(below, 14);
  const float from_below = x - static_cast<float>(iq4_nl_value(below));
  return from_below < static_cast<float>(iq4_nl_value(below + 1)) - x ? below : below + 1;
}

// Codes of x / (extreme / -127); the scale is then the one of the least error, weighted by squares.
FLASHPORT_DEVICE void store_iq4_nl_block(char* to, const float* x) {
  constexpr int kScaleBytes = 2, kBytes = kScaleBytes + kBlockValues / 2, kZeroCode = 8;
  constexpr float kLeastExtreme = 1e-15f;
  const float extreme = extreme_value(x);
  if (!is_finite(extreme)) return store_nan_block(to, kBytes);
  const bool is_zero = extreme < kLeastExtreme && -extreme < kLeastExtreme;
  const float inverse = is_zero ? 0.0f : 1.0f / (extreme / static_cast<float>(iq4_nl_value(0)));
  BlockCodes codes;
  float of_products = 0.0f, of_squares = 0.0f;
  FLASHPORT_UNROLL(32)
  for (int i = 0; i < kBlockValues; ++i) {
    const int code = is_zero ? kZeroCode : iq4_nl_code(mul_rn(inverse, x[i]));
    codes.set(i, static_cast<unsigned>(code));
    const float q = static_cast<float>(iq4_nl_value(code));
    const float weighted = mul_rn(mul_rn(x[i], x[i]), q);
    of_products = of_products + mul_rn(weighted, x[i]);
    of_squares = of_squares + mul_rn(weighted, q);
  }
  if (!(of_squares < kInfinity)) return store_nan_block(to, kBytes);  // its scale were none either
  store_scale(to, is_zero ? 0.0f : of_products / of_squares);
  store_codes(to + kScaleBytes, codes, false);
}

// Writes the block that begins at `to`. The format is one of blocks.
FLASHPORT_DEVICE void store_block(KvFormat format, char* to, const float* x) {
  if (format == KvFormat::kQ8_0) return store_q8_0_block(to, x);
  if (format == KvFormat::kIq4Nl) return store_iq4_nl_block(to, x);
  store_even_block(code_form(format), to, x);
}

// f(i, value i) for all values of the block that begins at `from`, in any order. The format is one of blocks.
template <class F>
FLASHPORT_DEVICE void for_each_value(KvFormat format, const char* from, const F& f) {
  constexpr int kHalf = kBlockValues / 2;
  const float d = load_scale(from);
  if (format == KvFormat::kQ8_0) {
    const auto* bytes = reinterpret_cast<const signed char*>(from) + kv_format_trait(KvFormat::kQ8_0).scale_bytes;
    for (int i = 0; i < kBlockValues; ++i) f(i, mul_rn(d, static_cast<float>(bytes[i])));
    return;
  }
  const bool is_even = format != KvFormat::kIq4Nl;
  CodeForm form = code_form(format);
  form.is_centred = form.is_centred || !is_even;
  const int middle = form.is_centred ? form.levels() / 2 : 0;
  const float base = form.is_centred ? -0.0f : load_scale(from + 2);  // a sum with -0 keeps zeros' signs
  const auto* halves = reinterpret_cast<const std::uint16_t*>(from + form.scale_bytes());
  unsigned fifths = 0;
  if (form.is_long) {
    fifths = halves[0] | static_cast<unsigned>(halves[1]) << 16;
    halves += 2;
  }
  const auto value = [&](unsigned code) {
    const int level = is_even ? static_cast<int>(code) - middle : iq4_nl_value(static_cast<int>(code));
    return mul_rn(d, static_cast<float>(level)) + base;
  };
  for (int i = 0; i < kHalf; ++i) {
    const unsigned both = static_cast<unsigned>(halves[i / 2]) >> (i % 2 * 8);
    f(i, value((both & 15u) | (fifths >> i & 1u) << 4));
    f(i + kHalf, value((both >> 4 & 15u) | (fifths >> (i + kHalf) & 1u) << 4));
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
