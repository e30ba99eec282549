// Values that are stored one by one, and rows whose scales lie beside the cache: a row, or each group of so many of its
// values, has one scale, which is its largest magnitude / the largest that the format stores (KvFormatTrait::largest),
// rounded to the type of scales; stored = value / scale. Where a value of a row or group is NaN or infinite, its scale
// becomes NaN; where the scale is NaN, infinite or 0, what is stored is 0.
#pragma once

#include "common/device/kv/blocks.h"
#include "common/device/kv/paged_kv.h"

namespace flashport::FLASHPORT_TARGET::kv {

// Element `at` of the row that begins at `row`, of the formats that append_kv writes.
FLASHPORT_DEVICE void store_value(KvFormat format, char* row, int at, float x) {
  switch (format) {
    case KvFormat::kFp32: reinterpret_cast<float*>(row)[at] = x; break;
    case KvFormat::kFp16: reinterpret_cast<Half*>(row)[at] = to_half(x); break;
    case KvFormat::kBf16: reinterpret_cast<BFloat16*>(row)[at] = to_bfloat16(x); break;
    case KvFormat::kFp8E4M3Fnuz: reinterpret_cast<std::uint8_t*>(row)[at] = to_fp8_e4m3fnuz(x); break;
    default: reinterpret_cast<std::uint8_t*>(row)[at] = to_fp8_e4m3(x); break;
  }
}

// Rounds to nearest, halves away from zero; NaN, which integers do not have, becomes 0.
FLASHPORT_DEVICE int to_integer(float x, int largest) {
  const auto most = static_cast<float>(largest);
  return x == x ? round_to_int(x < most ? x > -most ? x : -most : most) : 0;
}

// The same, of any format whose elements are values.
FLASHPORT_DEVICE void store_any_value(KvFormat format, char* row, int at, float x) {
  if (format == KvFormat::kInt8) {
    reinterpret_cast<signed char*>(row)[at] = static_cast<signed char>(to_integer(x, 127));
  } else if (format == KvFormat::kFp8E5M2) {
    reinterpret_cast<std::uint8_t*>(row)[at] = to_fp8_e5m2(x);
  } else {
    store_value(format, row, at, x);
  }
}

// Element `at` of a row of fp8, int8 or int4.
FLASHPORT_DEVICE float load_any_value(KvFormat format, const char* row, int at) {
  const unsigned byte = static_cast<std::uint8_t>(row[format == KvFormat::kInt4 ? at / 2 : at]);
  switch (format) {
    case KvFormat::kInt4: return static_cast<float>(static_cast<int>(byte << (at % 2 == 0 ? 28 : 24)) >> 28);
    case KvFormat::kInt8: return static_cast<float>(static_cast<signed char>(byte));
    case KvFormat::kFp8E5M2:
      return to_float(__builtin_bit_cast(Half, static_cast<std::uint16_t>(byte << 8)));  // the upper half of an fp16
    default: break;
  }
  const bool is_fnuz = format == KvFormat::kFp8E4M3Fnuz;
  const unsigned magnitude = byte & 0x7f;
  if (is_fnuz ? byte == 0x80 : magnitude == 0x7f) return __builtin_nanf("");
  // Exponent and mantissa in the place of an fp16's, 2^8 or 2^7 for the difference of the biases.
  const float x =
      to_float(__builtin_bit_cast(Half, static_cast<std::uint16_t>(magnitude << 7))) * (is_fnuz ? 128.0f : 256.0f);
  return byte < 0x80 ? x : -x;
}

// A row of numbers, from element `first` on.
struct NumberRow {
  const void* data;
  DType dtype;
  std::int64_t first, stride;
  int dims;
  FLASHPORT_DEVICE float operator[](int i) const { return load_as_float(data, dtype, first + i * stride); }
};

// Values `first` to `first` + `count` - 1, `to` being where they begin; `scale` is the element of the row's first
// scale, and a group's is written with its first value.
FLASHPORT_DEVICE void store_scaled_unit(KvFormat format, char* to, const NumberRow& row, int first, int count,
                                        const KeyScales& scales, std::int64_t scale) {
  constexpr int kOctet = 8;
  const int group_dims = scales.dims_per_scale == 0 ? row.dims : scales.dims_per_scale;
  const int largest = kv_format_trait(format).largest;
  int known = -1;  // the group whose scale d is
  float d = 0.0f;
  FLASHPORT_UNROLL(1)
  for (int at = 0; at < count; at += kOctet) {
    const int dim = first + at, group = dim / group_dims;
    if (group != known) {
      known = group;
      int most_bits = 0;
      FLASHPORT_UNROLL(8)
      for (int i = group * group_dims; i < (group + 1) * group_dims; ++i) {
        most_bits = maximum(most_bits, __builtin_bit_cast(int, row[i]) & 0x7fffffff);
      }
      const float most = __builtin_bit_cast(float, most_bits);
      d = is_finite(most) ? most / static_cast<float>(largest) : __builtin_nanf("");
      const std::int64_t element = scale + group * scales.stride_group;
      const bool is_first = dim == group * group_dims;
      if (scales.dtype == DType::kFloat16) {
        const std::uint16_t bits = is_finite(most) ? __builtin_bit_cast(std::uint16_t, to_half(d)) : kNanScale;
        if (is_first) static_cast<std::uint16_t*>(scales.data)[element] = bits;
        d = to_float(__builtin_bit_cast(Half, bits));
      } else if (is_first) {
        static_cast<float*>(scales.data)[element] = d;
      }
    }
    const bool stores = d > 0.0f && d < kInfinity;
    unsigned pairs = 0;  // of int4, the first value in the lowest bits
    for (int i = 0; i < minimum(kOctet, count - at); ++i) {
      const float x = stores ? row[dim + i] / d : 0.0f;
      if (format == KvFormat::kInt4) {
        pairs |= (static_cast<unsigned>(to_integer(x, largest)) & 15u) << (4 * i);
      } else {
        store_any_value(format, to, at + i, x);
      }
    }
    if (format == KvFormat::kInt4) {
      for (int i = 0; i < kOctet / 2; ++i) {
        reinterpret_cast<std::uint8_t*>(to)[at / 2 + i] = static_cast<std::uint8_t>(pairs >> (8 * i));
      }
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
