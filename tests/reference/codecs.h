// Element types of the reference: how numbers are stored and read, from the definition of each format.
// It has no code in common with the library. Encoding rounds to nearest, ties to even, from the exact double value.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace reference {

enum class Type {
  kF32,
  kF16,
  kBF16,
  kE4M3,
  kE4M3Fnuz,
  kE5M2,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kIq4Nl,
  kI4,  // two values a byte; rows, like those of blocks, are addressed in bytes
  kI8,
  kI32,
  kI64,
  kU32
};

// What happens beyond the largest finite value.
enum class Overflow { kInfinity, kSaturate, kSaturateFinite };

// A binary floating-point format of up to 16 bits with subnormals.
struct MiniFloat {
  int exponent_bits, mantissa_bits, bias;
  double largest;
  Overflow overflow;
  std::uint32_t nan;  // the code that NaN is encoded to
};

inline constexpr MiniFloat kHalf{5, 10, 15, 65504.0, Overflow::kInfinity, 0x7e00};
inline constexpr MiniFloat kBrain{8, 7, 127, 3.3895313892515355e38, Overflow::kInfinity, 0x7fc0};
// OCP e4m3: no infinity, one NaN of either sign (all ones).
inline constexpr MiniFloat kE4M3{4, 3, 7, 448.0, Overflow::kSaturate, 0x7f};
// FNUZ e4m3: bias 8, no infinity, no negative zero; its code, 0x80, is the NaN.
inline constexpr MiniFloat kE4M3Fnuz{4, 3, 8, 240.0, Overflow::kSaturate, 0x80};

// e5m2 has infinities, which only infinities become.
inline constexpr MiniFloat kE5M2{5, 2, 15, 57344.0, Overflow::kSaturateFinite, 0x7f};

inline std::uint32_t encode(double x, const MiniFloat& format) {
  const bool fnuz = format.nan == 0x80;
  const std::uint32_t sign = (std::signbit(x) ? 1u : 0u) << (format.exponent_bits + format.mantissa_bits);
  const std::uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
  if (std::isnan(x)) return format.nan;
  const double magnitude = std::fabs(x);
  if (magnitude == 0) return fnuz ? 0 : sign;
  if (std::isinf(magnitude) && format.overflow != Overflow::kSaturate) return sign | infinity;
  const double finite = std::isinf(magnitude) ? 2 * format.largest : magnitude;
  int exponent;
  std::frexp(finite, &exponent);
  exponent -= 1;  // finite = 1.xxx * 2^exponent
  const int smallest = 1 - format.bias;
  if (exponent < smallest) exponent = smallest;
  const double quantum = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double units = std::nearbyint(finite / quantum);
  if (units * quantum > format.largest) {
    if (format.overflow == Overflow::kInfinity) return sign | infinity;
    return encode(std::copysign(format.largest, x), format);
  }
  const auto hidden = 1u << format.mantissa_bits;
  auto whole = static_cast<std::uint32_t>(units);
  if (whole == 0) return fnuz ? 0 : sign;
  if (whole < hidden) return sign | whole;
  if (whole == 2 * hidden) {
    whole = hidden;
    exponent += 1;
  }
  return sign | (static_cast<std::uint32_t>(exponent + format.bias) << format.mantissa_bits) | (whole - hidden);
}

inline double decode(std::uint32_t code, const MiniFloat& format) {
  const std::uint32_t mantissa = code & ((1u << format.mantissa_bits) - 1);
  const std::uint32_t exponent_mask = (1u << format.exponent_bits) - 1;
  const std::uint32_t exponent = (code >> format.mantissa_bits) & exponent_mask;
  const bool negative = (code >> (format.exponent_bits + format.mantissa_bits)) & 1;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  if (format.overflow != Overflow::kSaturate && exponent == exponent_mask) {
    if (mantissa != 0) return kNan;
    return negative ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
  }
  if (format.nan == 0x7f && (code & 0x7f) == 0x7f) return kNan;
  if (format.nan == 0x80 && (code & 0xff) == 0x80) return kNan;
  const double fraction = std::ldexp(static_cast<double>(mantissa), -format.mantissa_bits);
  const double value = exponent == 0 ? std::ldexp(fraction, 1 - format.bias)
                                     : std::ldexp(1.0 + fraction, static_cast<int>(exponent) - format.bias);
  return negative ? -value : value;
}

// ggml's q8_0: 32 values in 34 bytes, an fp16 scale and 32 signed bytes; x = scale * byte.
inline constexpr int kQ8Values = 32;
inline constexpr int kQ8Bytes = 34;

// Bytes of one stored element; rows of blocks are addressed in bytes.
inline int type_bytes(Type type) {
  switch (type) {
    case Type::kF32:
    case Type::kI32:
    case Type::kU32: return 4;
    case Type::kI64: return 8;
    case Type::kF16:
    case Type::kBF16: return 2;
    default: return 1;
  }
}

template <typename T>
T load_as(const void* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
template <typename T>
void store_as(void* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

// Rounded to nearest, halves away from zero, and cut to the range; NaN becomes 0.
inline int to_integer(double x, int largest) {
  if (std::isnan(x)) return 0;
  const double most = largest;
  return static_cast<int>(std::round(x < -most ? -most : x > most ? most : x));
}

// The number stored at `at`; exact for every type but 64-bit integers past 2^53.
inline double read_number(const void* at, Type type) {
  switch (type) {
    case Type::kF32: return load_as<float>(at);
    case Type::kF16: return decode(load_as<std::uint16_t>(at), kHalf);
    case Type::kBF16: return decode(load_as<std::uint16_t>(at), kBrain);
    case Type::kE4M3: return decode(load_as<std::uint8_t>(at), kE4M3);
    case Type::kE4M3Fnuz: return decode(load_as<std::uint8_t>(at), kE4M3Fnuz);
    case Type::kE5M2: return decode(load_as<std::uint8_t>(at), kE5M2);
    case Type::kI8: return load_as<std::int8_t>(at);
    case Type::kI32: return load_as<std::int32_t>(at);
    case Type::kU32: return load_as<std::uint32_t>(at);
    case Type::kI64: return static_cast<double>(load_as<std::int64_t>(at));
    default: break;  // blocks have rows, not elements
  }
  return std::numeric_limits<double>::quiet_NaN();
}

inline void write_number(void* at, Type type, double value) {
  switch (type) {
    case Type::kF32: store_as(at, static_cast<float>(value)); break;
    case Type::kF16: store_as(at, static_cast<std::uint16_t>(encode(value, kHalf))); break;
    case Type::kBF16: store_as(at, static_cast<std::uint16_t>(encode(value, kBrain))); break;
    case Type::kE4M3: store_as(at, static_cast<std::uint8_t>(encode(value, kE4M3))); break;
    case Type::kE4M3Fnuz: store_as(at, static_cast<std::uint8_t>(encode(value, kE4M3Fnuz))); break;
    case Type::kE5M2: store_as(at, static_cast<std::uint8_t>(encode(value, kE5M2))); break;
    case Type::kI8: store_as(at, static_cast<std::int8_t>(to_integer(value, 127))); break;
    case Type::kI32: store_as(at, static_cast<std::int32_t>(value)); break;
    case Type::kU32: store_as(at, static_cast<std::uint32_t>(value)); break;
    case Type::kI64: store_as(at, static_cast<std::int64_t>(value)); break;
    default: break;
  }
}

// `value` rounded to a floating-point type.
inline double round_to(double value, Type type) {
  switch (type) {
    case Type::kF32: return static_cast<float>(value);
    case Type::kF16: return decode(encode(value, kHalf), kHalf);
    case Type::kBF16: return decode(encode(value, kBrain), kBrain);
    default: return value;
  }
}

inline double read_q8_0(const void* row, std::int64_t index) {
  const auto* block = static_cast<const unsigned char*>(row) + index / kQ8Values * kQ8Bytes;
  const double scale = decode(load_as<std::uint16_t>(block), kHalf);
  return scale * load_as<std::int8_t>(block + 2 + index % kQ8Values);
}

// As ggml's quantize_row_q8_0_ref: scale = largest / 127 in fp32, bytes rounded half away from zero from the fp32
// product with the fp32 reciprocal, the scale stored as fp16 after that. What ggml leaves open: a block with a value
// that is not finite has the scale NaN and bytes of 0.
inline void write_q8_0(void* row, const float* values, std::int64_t count) {
  auto* block = static_cast<unsigned char*>(row);
  for (std::int64_t first = 0; first < count; first += kQ8Values, block += kQ8Bytes) {
    float largest = 0;
    bool finite = true;
    for (int i = 0; i < kQ8Values; ++i) {
      largest = std::fmax(largest, std::fabs(values[first + i]));
      finite = finite && std::isfinite(values[first + i]);
    }
    if (!finite) {
      std::memset(block, 0, kQ8Bytes);
      store_as(block, static_cast<std::uint16_t>(kHalf.nan));
      continue;
    }
    const float scale = largest / 127.0f;
    const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
    store_as(block, static_cast<std::uint16_t>(encode(scale, kHalf)));
    for (int i = 0; i < kQ8Values; ++i) {
      store_as(block + 2 + i, static_cast<std::int8_t>(std::round(values[first + i] * inverse)));
    }
  }
}

}  // namespace reference
