// Values of a row, of a type that is known at run time, as vectors of floats.
#pragma once

#include "common/device/core/scalar_access.h"
#include "common/device/kv/params.h"
#include "cpu/kv/row.h"

namespace flashport::FLASHPORT_TARGET::kv {

// f(KvRow of the element type, bytes of an element)
template <class F>
FLASHPORT_DEVICE void with_loader(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFp8E4M3: f(KvRow<KvFormat::kFp8E4M3>(), 1); break;
    case DType::kFloat16: f(KvRow<KvFormat::kFp16>(), 2); break;
    case DType::kBFloat16: f(KvRow<KvFormat::kBf16>(), 2); break;
    default: f(KvRow<KvFormat::kFp32>(), 4); break;
  }
}

// f(KvRow of the format, bytes of a value; 0 where values come in blocks)
template <class F>
FLASHPORT_DEVICE void with_format(KvFormat format, const F& f) {
  switch (format) {
    case KvFormat::kFp32: f(KvRow<KvFormat::kFp32>(), 4); break;
    case KvFormat::kFp16: f(KvRow<KvFormat::kFp16>(), 2); break;
    case KvFormat::kBf16: f(KvRow<KvFormat::kBf16>(), 2); break;
    case KvFormat::kFp8E4M3: f(KvRow<KvFormat::kFp8E4M3>(), 1); break;
    case KvFormat::kFp8E4M3Fnuz: f(KvRow<KvFormat::kFp8E4M3Fnuz>(), 1); break;
    case KvFormat::kQ8_0: f(KvRow<KvFormat::kQ8_0>(), 0); break;
    case KvFormat::kQ4_0: f(KvRow<KvFormat::kQ4_0>(), 0); break;
    case KvFormat::kQ4_1: f(KvRow<KvFormat::kQ4_1>(), 0); break;
    case KvFormat::kQ5_0: f(KvRow<KvFormat::kQ5_0>(), 0); break;
    case KvFormat::kQ5_1: f(KvRow<KvFormat::kQ5_1>(), 0); break;
    case KvFormat::kFp8E5M2: f(KvRow<KvFormat::kFp8E5M2>(), 1); break;
    case KvFormat::kInt8: f(KvRow<KvFormat::kInt8>(), 1); break;
    case KvFormat::kInt4: f(KvRow<KvFormat::kInt4>(), 0); break;
    case KvFormat::kIq4Nl: f(KvRow<KvFormat::kIq4Nl>(), 0); break;
    case KvFormat::kBytes:
    case KvFormat::kBlocks:
    case KvFormat::kAny: break;
  }
}

// `count` values from `first` on; it reads no others, which are 0. Values of blocks come kVecWidth at a time.
template <class Row>
FLASHPORT_DEVICE Vec load_values(Row, const char* row, int bytes, int first, int count) {
  if (count >= kVecWidth) return Row::load(row, first);
  alignas(64) char copy[4 * kVecWidth] = {};
  __builtin_memcpy(copy, row + first * bytes, static_cast<std::size_t>(count * bytes));
  return Row::load(copy, 0);
}

// Factors of kVecWidth values of a row from `dim` on, of which `count` exist, from scales beside a cache. The row's
// first one is element `first`; a group has 8 values or a multiple of it.
FLASHPORT_DEVICE Vec load_factors(const KeyScales& scales, std::int64_t first, int dim, int count) {
  const auto factor = [&](int at) {
    const std::int64_t group = scales.dims_per_scale == 0 ? 0 : at / scales.dims_per_scale;
    return load_as_float(scales.data, scales.dtype, first + group * scales.stride_group);
  };
  constexpr int kLeastGroup = 8;
  Vec factors = broadcast(factor(dim));
  if (kVecWidth == kLeastGroup || scales.dims_per_scale == 0 || count <= kLeastGroup) return factors;
  const float high = factor(dim + kLeastGroup);
  for (int i = kLeastGroup; i < kVecWidth; ++i) factors[i] = high;
  return factors;
}

// to_bfloat16 for each element.
FLASHPORT_DEVICE HalfBits round_bf16(Vec x) {
  using Bits = std::uint32_t __attribute__((vector_size(4 * kVecWidth)));
  const auto bits = reinterpret_cast<Bits>(x);
  const auto is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const Bits rounded = is_nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
  return __builtin_convertvector(rounded >> 16, HalfBits);
}

// Stores the first `count` elements, rounded to `dtype`.
FLASHPORT_DEVICE void store_values(char* to, DType dtype, Vec x, int count) {
  const auto* from = reinterpret_cast<const float*>(&x);
  if (dtype == DType::kFloat32) {
    if (count >= kVecWidth) return store_vec(reinterpret_cast<float*>(to), x);
    __builtin_memcpy(to, from, sizeof(float) * static_cast<std::size_t>(count));
    return;
  }
  alignas(64) std::uint16_t rounded[kVecWidth];
  if (dtype == DType::kFloat16) {
    for (int i = 0; i < kVecWidth; ++i) rounded[i] = to_half(from[i]).bits;
  } else {
    const HalfBits bits = round_bf16(x);
    __builtin_memcpy(rounded, &bits, sizeof bits);
  }
  if (count >= kVecWidth) {
    __builtin_memcpy(to, rounded, sizeof rounded);
    return;
  }
  __builtin_memcpy(to, rounded, sizeof rounded[0] * static_cast<std::size_t>(count));
}

}  // namespace flashport::FLASHPORT_TARGET::kv
