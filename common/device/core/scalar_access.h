// Loads and stores of one element of a tensor whose type is known at run time. An Element holds the raw bits that
// load_element() has read, so that several loads are in flight together before the first is converted.
#pragma once

#include "common/device/core/types.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

// Rounds to nearest even; values beyond 57344 become that, infinities stay, and all NaN are one.
FLASHPORT_DEVICE std::uint8_t to_fp8_e5m2(float x) {
  constexpr std::uint32_t kInfinityBits = 0x7f800000, kMostBits = 0x47600000, kLeastNormal = 0x38800000;
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t magnitude = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
  if (magnitude > kInfinityBits) return 0x7f;
  std::uint32_t code = (minimum(magnitude, kMostBits) + 0xfffff + (magnitude >> 21 & 1) - (112u << 23)) >> 21;
  if (magnitude < kLeastNormal) {  // units of 2^-16, which are the last place of 128
    code = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, magnitude) + 128.0f) & 0xff;
  }
  return static_cast<std::uint8_t>(sign | (magnitude == kInfinityBits ? 0x7c : code));
}

FLASHPORT_DEVICE float load_as_float(const void* data, DType dtype, std::int64_t at) {
  switch (dtype) {
    case DType::kFloat16: return to_float(static_cast<const Half*>(data)[at]);
    case DType::kBFloat16: return to_float(static_cast<const BFloat16*>(data)[at]);
    default: return static_cast<const float*>(data)[at];
  }
}

// The bits as two halves; an element of 16 bits is in both. So no type needs a branch, which would have to wait for the
// loads.
struct Element {
  std::uint16_t low, high;
};

FLASHPORT_DEVICE Element load_element(const void* data, DType dtype, std::int64_t at) {
  const int last = dtype == DType::kFloat32 ? 1 : 0;
  const auto* from = static_cast<const std::uint16_t*>(data) + (at << last);
  return {load_global(from), load_global(from + last)};
}

FLASHPORT_DEVICE float to_float(Element x, DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return to_float(__builtin_bit_cast(Half, x.low));
    case DType::kBFloat16: return to_float(__builtin_bit_cast(BFloat16, x.low));
    default: return __builtin_bit_cast(float, x.low | static_cast<std::uint32_t>(x.high) << 16);
  }
}

// The address of an index. Slots, offsets and tokens fit 32 bits, so the low half of a 64-bit index says all but its
// sign.
struct ShortIndex {
  const std::int32_t* low;  // null: no index was given
  std::int32_t is_int64;    // 1: the half with the sign follows
};

// `i` unsigned, or of 64 bits.
template <class Number>
FLASHPORT_DEVICE ShortIndex short_index(const IndexArray& array, Number i) {
  const auto* low = static_cast<const std::int32_t*>(array.data) + (i << array.is_int64);
  return {array.data == nullptr ? nullptr : low, array.is_int64};
}

FLASHPORT_DEVICE int with_sign(int low, int high) { return (low & 0x7fffffff) | (high & ~0x7fffffff); }

FLASHPORT_DEVICE void store_as(Half* to, float value) { *to = to_half(value); }
FLASHPORT_DEVICE void store_as(BFloat16* to, float value) { *to = to_bfloat16(value); }
FLASHPORT_DEVICE void store_as(float* to, float value) { *to = value; }

// f(data as its type)
template <class F>
FLASHPORT_DEVICE void with_type(void* data, DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: f(static_cast<Half*>(data)); break;
    case DType::kBFloat16: f(static_cast<BFloat16*>(data)); break;
    default: f(static_cast<float*>(data));
  }
}
FLASHPORT_DEVICE void store_as(void* data, DType dtype, std::int64_t offset, float value) {
  with_type(data, dtype, [&](auto* to) { store_as(to + offset, value); });
}

}  // namespace flashport::FLASHPORT_TARGET
