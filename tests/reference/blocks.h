// ggml's blocks of 32 values from the definition of each format; no code in common with the library. A block has a
// scale d in fp16, in q4_1 and q5_1 then a minimum m in fp16, in q5_0 and q5_1 then 32 bits, the fifth ones of the
// codes, then 16 bytes of two codes each, in q8_0 32 bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "tests/reference/codecs.h"

namespace reference {

inline constexpr int kBlockValues = 32;
inline constexpr std::array<Type, 6> kBlockTypes = {Type::kQ8_0, Type::kQ4_0, Type::kQ4_1,
                                                    Type::kQ5_0, Type::kQ5_1, Type::kIq4Nl};
inline constexpr std::array<int, 16> kIq4NlValues = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                     1,    13,   25,  38,  53,  69,  89,  113};

// One byte a value.
inline bool is_of_bytes(Type type) {
  return type == Type::kI8 || type == Type::kE4M3 || type == Type::kE4M3Fnuz || type == Type::kE5M2;
}
inline bool is_blocks(Type type) {
  return std::find(kBlockTypes.begin(), kBlockTypes.end(), type) != kBlockTypes.end();
}

inline bool has_minimum(Type type) { return type == Type::kQ4_1 || type == Type::kQ5_1; }
inline bool has_fifth_bits(Type type) { return type == Type::kQ5_0 || type == Type::kQ5_1; }
inline int codes_begin(Type type) { return 2 + (has_minimum(type) ? 2 : 0) + (has_fifth_bits(type) ? 4 : 0); }
inline int block_bytes(Type type) { return type == Type::kQ8_0 ? 34 : codes_begin(type) + 16; }

// Elements of the last axis for rows of `dim` values.
inline std::int64_t stored_extent(Type type, std::int64_t dim) {
  if (type == Type::kI4) return dim / 2;
  return is_blocks(type) ? dim / kBlockValues * block_bytes(type) : dim;
}
inline std::int64_t stored_dim(Type type, std::int64_t extent) {
  if (type == Type::kI4) return extent * 2;
  return is_blocks(type) ? extent / block_bytes(type) * kBlockValues : extent;
}

inline double read_block_value(Type type, const void* row, std::int64_t index) {
  if (type == Type::kQ8_0) return read_q8_0(row, index);
  const auto* block = static_cast<const unsigned char*>(row) + index / kBlockValues * block_bytes(type);
  const auto at = static_cast<int>(index % kBlockValues);
  int code = block[codes_begin(type) + at % 16] >> (at < 16 ? 0 : 4) & 15;
  if (has_fifth_bits(type))
    code += 16 * static_cast<int>(load_as<std::uint32_t>(block + codes_begin(type) - 4) >> at & 1);
  const double d = decode(load_as<std::uint16_t>(block), kHalf);
  if (has_minimum(type)) return d * code + decode(load_as<std::uint16_t>(block + 2), kHalf);
  return d * (type == Type::kIq4Nl ? kIq4NlValues[code] : code - (type == Type::kQ5_0 ? 16 : 8));
}

namespace detail {

struct Quantised {
  float d = 0, m = 0;
  std::array<int, kBlockValues> codes{};
};

inline int truncated(float x, int most) {
  return std::isnan(x) ? most : static_cast<int>(std::clamp(x, 0.0f, 1.0f * most));
}
inline float reciprocal(float d) { return std::isfinite(1.0f / d) ? 1.0f / d : 0.0f; }

inline float extreme_of(const float* x) {
  return *std::max_element(x, x + kBlockValues, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
}

inline Quantised centred(const float* x, int middle) {
  Quantised q;
  q.d = extreme_of(x) / static_cast<float>(-middle);
  for (int i = 0; i < kBlockValues; ++i) {
    const float scaled = x[i] * reciprocal(q.d);
    const bool is_lost = q.d != 0 && reciprocal(q.d) == 0;
    q.codes[i] = is_lost ? 0 : truncated(scaled + (static_cast<float>(middle) + 0.5f), 2 * middle - 1);
  }
  return q;
}

inline Quantised ranged(const float* x, int most) {
  Quantised q;
  q.m = *std::min_element(x, x + kBlockValues);
  q.d = (*std::max_element(x, x + kBlockValues) - q.m) / static_cast<float>(most);
  for (int i = 0; i < kBlockValues; ++i) {
    const float scaled = (x[i] - q.m) * reciprocal(q.d);
    q.codes[i] = truncated(scaled + 0.5f, most);
  }
  return q;
}

// The nearest of the 16 values, then the scale that has the least error weighted by squares.
inline Quantised nonlinear(const float* x) {
  Quantised q;
  const float extreme = extreme_of(x);
  if (std::fabs(extreme) < 1e-15f) {
    q.codes.fill(8);
    return q;
  }
  const float inverse = 1.0f / (extreme / -127.0f);
  float upper = 0, lower = 0;
  for (int i = 0; i < kBlockValues; ++i) {
    const float scaled = inverse * x[i];
    int best = 0;
    for (int code = 1; code < 16; ++code) {
      const float to_lower = scaled - static_cast<float>(kIq4NlValues[code - 1]);
      const float to_upper = static_cast<float>(kIq4NlValues[code]) - scaled;
      if (to_upper <= to_lower) best = code;
    }
    q.codes[i] = best;
    const float weight = x[i] * x[i], value = static_cast<float>(kIq4NlValues[best]);
    const float weighted = weight * value;
    const float product = weighted * x[i], square = weighted * value;
    upper = upper + product;
    lower = lower + square;
  }
  q.d = std::isfinite(lower) ? upper / lower : std::numeric_limits<float>::quiet_NaN();
  return q;
}

}  // namespace detail

// As ggml's reference quantisers. What ggml leaves open: a block with a value that is not finite has the scale NaN and
// 0 in all other bytes.
inline void write_blocks(Type type, void* row, const float* values, std::int64_t count) {
  if (type == Type::kQ8_0) return write_q8_0(row, values, count);
  auto* block = static_cast<unsigned char*>(row);
  for (const float* x = values; x < values + count; x += kBlockValues, block += block_bytes(type)) {
    std::memset(block, 0, block_bytes(type));
    if (!std::all_of(x, x + kBlockValues, [](float one) { return std::isfinite(one); })) {
      store_as(block, static_cast<std::uint16_t>(kHalf.nan));
      continue;
    }
    const detail::Quantised q = type == Type::kIq4Nl ? detail::nonlinear(x)
                                : has_minimum(type)  ? detail::ranged(x, has_fifth_bits(type) ? 31 : 15)
                                                     : detail::centred(x, has_fifth_bits(type) ? 16 : 8);
    store_as(block, static_cast<std::uint16_t>(encode(q.d, kHalf)));
    if (std::isnan(q.d)) continue;  // squares of iq4_nl overflow
    if (has_minimum(type)) store_as(block + 2, static_cast<std::uint16_t>(encode(q.m, kHalf)));
    std::uint32_t fifths = 0;
    for (int i = 0; i < kBlockValues; ++i) {
      block[codes_begin(type) + i % 16] |= static_cast<unsigned char>((q.codes[i] & 15) << (i < 16 ? 0 : 4));
      fifths |= static_cast<std::uint32_t>(q.codes[i] >> 4) << i;
    }
    if (has_fifth_bits(type)) store_as(block + codes_begin(type) - 4, fifths);
  }
}

}  // namespace reference
