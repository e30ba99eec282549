// Rows whose scales lie beside them, from the definition: a group of values has one scale, its largest magnitude / the
// largest number of the format, rounded to the type of scales; stored = value / scale. int4 has two values a byte, the
// first in the low bits, as LightLLM has them. No code in common with the library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "tests/reference/codecs.h"

namespace reference {

inline double largest_number(Type type) {
  switch (type) {
    case Type::kE4M3: return kE4M3.largest;
    case Type::kE4M3Fnuz: return kE4M3Fnuz.largest;
    case Type::kE5M2: return kE5M2.largest;
    case Type::kI8: return 127;
    default: return 7;  // int4
  }
}

inline double read_scaled_value(Type type, const void* row, std::int64_t index) {
  const auto* bytes = static_cast<const unsigned char*>(row);
  if (type != Type::kI4) return read_number(bytes + index, type);
  const int code = bytes[index / 2] >> (index % 2 == 0 ? 0 : 4) & 15;
  return code < 8 ? code : code - 16;
}

// Writes value `index` of a row, rounded to what the type stores.
inline void write_scaled_value(Type type, void* row, std::int64_t index, double x) {
  auto* bytes = static_cast<unsigned char*>(row);
  if (type != Type::kI4) return write_number(bytes + index, type, x);
  const int shift = index % 2 == 0 ? 0 : 4;
  unsigned char& pair = bytes[index / 2];
  pair = static_cast<unsigned char>((pair & ~(15 << shift)) | (to_integer(x, 7) & 15) << shift);
}

// Writes `count` values of one group and gives its scale. The row begins at `row`, the group with value `first`.
inline double write_scaled_group(Type type, Type scale_type, void* row, std::int64_t first, const float* values,
                                 std::int64_t count) {
  float largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool finite = std::isfinite(values[i]);
    largest = finite && !std::isnan(largest) ? std::fmax(largest, std::fabs(values[i]))
                                             : std::numeric_limits<float>::quiet_NaN();
  }
  const auto scale = static_cast<float>(round_to(largest / static_cast<float>(largest_number(type)), scale_type));
  for (std::int64_t i = first; i < first + count; ++i) {
    const float x = scale > 0 && std::isfinite(scale) ? values[i - first] / scale : 0.0f;
    write_scaled_value(type, row, i, x);
  }
  return scale;
}

}  // namespace reference
