// The element type of K and V as a loader policy: 16 consecutive values of a stored row as floats.
#pragma once

#include "common/device/kv/format.h"
#include FLASHPORT_TARGET_HEADER

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
struct KvRow<KvFormat::kQ8_0> {
  FLASHPORT_DEVICE static Vec load(const char* row, int dim) {
    const char* block = row + dim / 32 * 34;
    Half d;
    __builtin_memcpy(&d, block, sizeof d);
    const IntVec wide = widen(reinterpret_cast<const std::int8_t*>(block) + 2 + dim % 32);
    return __builtin_convertvector(wide, Vec) * to_float(d);
  }
};

}  // namespace flashport::FLASHPORT_TARGET::kv
