// Copies of rows of a tile by one warp: what TMA cannot bring. Rows come by cp.async wherever they lie, with zeros
// where there are none; rows that are not aligned to 16 bytes come element by element.
//
// Numbers of another type than the products' are widened on the way. Those of 16 bits are converted where they have
// landed. Bytes land in the second half of their own rows, from which they are widened in ascending order: vector u of
// 16 bytes becomes vectors 2 u and 2 u + 1, which lie before all bytes that are still to be read.
#pragma once

#include "common/device/core/constant.h"
#include "cuda/arch/fp8.h"
#include "cuda/attention/memory.h"

namespace flashport::FLASHPORT_TARGET::attention {

// What rows in memory hold. kOwn: the math type.
enum class Stored { kOwn, kBf16, kFp8 };

template <MathType kMath, bool kWidens, int kPanels, int kRows>
class RowCopies {
  static constexpr int kVectors = kPanels * 8, kByteVectors = kVectors / 2;  // of a row, in the tile and as bytes

 public:
  FLASHPORT_DEVICE RowCopies(unsigned char* tile, int lane) : tile_(tile), lane_(lane) {}

  // row_at(row): byte offset of a row from `data`, or -1; lane l asks for rows l, l + 32, ... All lanes return when the
  // tile, and all copies that they had in flight, are complete.
  template <class RowAt>
  FLASHPORT_DEVICE void copy(const void* data, int columns, Stored stored, bool aligned, const RowAt& row_at) const {
    const char* from = static_cast<const char*>(data);
    const bool by_bytes = stored == Stored::kFp8 && aligned;
#pragma unroll 1
    for (int first = 0; first < kRows; first += kWaveSize) {
      const std::int64_t own = first + lane_ < kRows ? row_at(first + lane_) : -1;
      const auto each = [&](auto count, const auto& copy_one) {  // copy_one(row, vector of `count`, its row's offset)
        const int rows = minimum(kRows - first, kWaveSize);
#pragma unroll 1
        for (int i = lane_; i < rows * count; i += kWaveSize) {
          copy_one(first + i / count, i % count, __shfl_sync(~0u, own, i / count));
        }
      };
      if (by_bytes) {
        each(Constant<kByteVectors>(), [&](int row, int i, std::int64_t at) {
          copy_vector(vector(row, kByteVectors + i), from, at, i * 16, columns);
        });
      } else if (aligned) {
        each(Constant<kVectors>(),
             [&](int row, int i, std::int64_t at) { copy_vector(vector(row, i), from, at, i * 16, 2 * columns); });
      } else {
        each(Constant<kVectors>(),
             [&](int row, int i, std::int64_t at) { copy_elements(vector(row, i), from, at, i * 8, columns, stored); });
      }
    }
    await_copies();
    if constexpr (kWidens) {
      __syncwarp();
      if (by_bytes) widen_bytes();
      if (stored == Stored::kBf16 && aligned) convert_all();
    }
    fence_async_proxy();
    __syncwarp();
  }

 private:
  FLASHPORT_DEVICE uint4& vector(int row, int i) const {
    return *reinterpret_cast<uint4*>(tile_ + i / 8 * kRows * 128 + 2 * swizzled_offset(row, i % 8));
  }

  // 16 bytes of a row that has `bytes`, from byte `first` on.
  FLASHPORT_DEVICE static void copy_vector(uint4& to, const char* from, std::int64_t at, int first, int bytes) {
    const int count = at < 0 ? 0 : minimum(maximum(bytes - first, 0), 16);
    copy_async_some(&to, from + (count > 0 ? at + first : 0), count);
  }
  FLASHPORT_DEVICE static void copy_elements(uint4& to, const char* from, std::int64_t at, int first, int columns,
                                             Stored stored) {
#pragma unroll 1
    for (int j = 0; j < 8; ++j) {
      const bool valid = at >= 0 && first + j < columns;
      reinterpret_cast<std::uint16_t*>(&to)[j] = valid ? element(from + at, first + j, stored) : 0;
    }
  }

  FLASHPORT_DEVICE void widen_bytes() const {
#pragma unroll 1
    for (int i = lane_; i < kRows * kByteVectors; i += kWaveSize) {
      const int row = i / kByteVectors, unit = i % kByteVectors;
      const uint4 bytes = vector(row, kByteVectors + unit);
      __syncwarp();
      vector(row, 2 * unit) = widened(bytes.x, bytes.y);
      vector(row, 2 * unit + 1) = widened(bytes.z, bytes.w);
    }
  }
  FLASHPORT_DEVICE static uint4 widened(unsigned first, unsigned second) {
    uint4 x;
    widen_fp8(x.x, x.y, first);
    widen_fp8(x.z, x.w, second);
    return x;
  }

  // From bf16.
  FLASHPORT_DEVICE void convert_all() const {
#pragma unroll 1
    for (int i = lane_; i < kRows * kVectors; i += kWaveSize) {
      uint4& x = vector(i / kVectors, i % kVectors);
      x = {converted(x.x), converted(x.y), converted(x.z), converted(x.w)};
    }
  }
  FLASHPORT_DEVICE static unsigned converted(unsigned two) {
    return pack<kMath>(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
  }

  FLASHPORT_DEVICE static std::uint16_t element(const char* row, int column, Stored stored) {
    if (kWidens && stored == Stored::kFp8) {
      unsigned low, high;
      widen_fp8(low, high, reinterpret_cast<const std::uint8_t*>(row)[column]);
      return static_cast<std::uint16_t>(low);
    }
    const unsigned x = reinterpret_cast<const std::uint16_t*>(row)[column];
    return static_cast<std::uint16_t>(kWidens && stored == Stored::kBf16 ? converted(x) : x);
  }

  unsigned char* tile_;
  const int lane_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
