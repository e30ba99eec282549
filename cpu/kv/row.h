// The element type of K and V as a loader policy: kVecWidth consecutive values of a stored row as floats, from a
// multiple of kVecWidth on.
#pragma once

#include "common/device/kv/blocks.h"

namespace flashport::FLASHPORT_TARGET::kv {

template <KvFormat kFormat>
struct KvRow;

template <>
struct KvRow<KvFormat::kFp32> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    return load_vec(reinterpret_cast<const float*>(row) + dim);
  }
};

template <>
struct KvRow<KvFormat::kFp16> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    return widen_fp16(reinterpret_cast<const std::uint16_t*>(row) + dim);
  }
};

template <>
struct KvRow<KvFormat::kBf16> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    return reinterpret_cast<Vec>(widen(reinterpret_cast<const std::uint16_t*>(row) + dim) << 16);
  }
};

template <>
struct KvRow<KvFormat::kFp8E4M3> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    const IntVec wide = widen(reinterpret_cast<const std::uint8_t*>(row) + dim);
    const IntVec magnitude = wide & 0x7f;
    // Exponent and mantissa in place, 2^120 for the difference of the biases; subnormals come out right.
    const Vec value = reinterpret_cast<Vec>(magnitude << 20) * 0x1p120f;
    const IntVec nan = reinterpret_cast<IntVec>(magnitude == 0x7f) & 0x7fc00000;
    return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(value) | nan | ((wide & 0x80) << 24));
  }
};

template <>
struct KvRow<KvFormat::kFp8E4M3Fnuz> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    const IntVec wide = widen(reinterpret_cast<const std::uint8_t*>(row) + dim);
    const Vec value = reinterpret_cast<Vec>((wide & 0x7f) << 20) * 0x1p119f;
    const IntVec nan = reinterpret_cast<IntVec>(wide == 0x80) & 0x7fc00000;
    return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(value) | nan | ((wide & 0x80) << 24));
  }
};

template <>
struct KvRow<KvFormat::kFp8E5M2> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    const IntVec wide = widen(reinterpret_cast<const std::uint8_t*>(row) + dim);
    const IntVec magnitude = wide & 0x7f;
    const Vec value = reinterpret_cast<Vec>(magnitude << 21) * 0x1p112f;
    const IntVec infinity = reinterpret_cast<IntVec>(magnitude >= 0x7c) & 0x7f800000;  // or NaN, by the mantissa
    return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(value) | infinity | ((wide & 0x80) << 24));
  }
};

template <>
struct KvRow<KvFormat::kInt8> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    return __builtin_convertvector(widen(reinterpret_cast<const std::int8_t*>(row) + dim), Vec);
  }
};

template <>
struct KvRow<KvFormat::kInt4> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    std::uint8_t pairs[kVecWidth] = {};  // each byte twice: its low bits, then its high ones
    for (int i = 0; i < kVecWidth; ++i) pairs[i] = static_cast<std::uint8_t>(row[dim / 2 + i / 2]);
    return __builtin_convertvector(widen(pairs) << (28 - (kLaneNumbers & 1) * 4) >> 28, Vec);
  }
};

template <>
struct KvRow<KvFormat::kQ8_0> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    const char* block = row + dim / 32 * 34;
    const IntVec wide = widen(reinterpret_cast<const std::int8_t*>(block) + 2 + dim % 32);
    return __builtin_convertvector(wide, Vec) * load_scale(block);
  }
};

// ggml's blocks of codes of 4 and 5 bits, as common/device/kv/blocks.h has them.

// The low four bits of the codes of values from dim % 32 of a block on.
FLASHPORT_DEVICE IntVec load_codes(const char* codes, int dim) {
  const IntVec both = widen(reinterpret_cast<const std::uint8_t*>(codes) + dim % 16);
  return dim % 32 < 16 ? both & 15 : both >> 4;
}
// Codes of five bits, of which the fifth ones come first.
FLASHPORT_DEVICE IntVec load_long_codes(const char* fifth_bits, int dim) {
  std::uint16_t bits = 0;
  __builtin_memcpy(&bits, fifth_bits + dim % 32 / 8, kVecWidth / 8);
  const IntVec fifths = (IntVec{} + static_cast<int>(bits)) >> kLaneNumbers & 1;
  return load_codes(fifth_bits + 4, dim) | fifths << 4;
}

template <>
struct KvRow<KvFormat::kQ4_0> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    const char* block = row + dim / 32 * kv_format_trait(KvFormat::kQ4_0).block_bytes;
    return __builtin_convertvector(load_codes(block + 2, dim) - 8, Vec) * load_scale(block);
  }
};

template <>
struct KvRow<KvFormat::kQ4_1> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    const char* block = row + dim / 32 * kv_format_trait(KvFormat::kQ4_1).block_bytes;
    return __builtin_convertvector(load_codes(block + 4, dim), Vec) * load_scale(block) + load_scale(block + 2);
  }
};

template <>
struct KvRow<KvFormat::kQ5_0> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    const char* block = row + dim / 32 * kv_format_trait(KvFormat::kQ5_0).block_bytes;
    return __builtin_convertvector(load_long_codes(block + 2, dim) - 16, Vec) * load_scale(block);
  }
};

template <>
struct KvRow<KvFormat::kQ5_1> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    const char* block = row + dim / 32 * kv_format_trait(KvFormat::kQ5_1).block_bytes;
    return __builtin_convertvector(load_long_codes(block + 4, dim), Vec) * load_scale(block) + load_scale(block + 2);
  }
};

template <>
struct KvRow<KvFormat::kIq4Nl> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    static constexpr float kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    const char* block = row + dim / 32 * kv_format_trait(KvFormat::kIq4Nl).block_bytes;
    return look_up(kValues, load_codes(block + 2, dim)) * load_scale(block);
  }
};

}  // namespace flashport::FLASHPORT_TARGET::kv
