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
  // `offsets`: room for an offset of each row, in shared memory, which only this warp uses.
  FLASHPORT_DEVICE RowCopies(unsigned char* tile, std::int64_t* offsets, int lane)
      : tile_(tile), offsets_(offsets), lane_(lane) {}

  // row_at(row): byte offset of a row, or -1; lane l is asked for rows l, l + 32, ...
  template <class RowAt>
  FLASHPORT_DEVICE void find_rows(const RowAt& row_at) const {
#pragma unroll 1
    for (int row = lane_; row < kRows; row += kWaveSize) offsets_[row] = row_at(row);
    __syncwarp();
  }

  // The rows that were found, from `data` on. All lanes return when the tile, and all copies that they had in flight,
  // are complete.
  FLASHPORT_DEVICE void copy(const void* data, int columns, Stored stored, bool aligned) const {
    const char* from = static_cast<const char*>(data);
    const bool by_bytes = stored == Stored::kFp8 && aligned;
    if (by_bytes) {
      for_each_vector<kByteVectors>(
          [&](unsigned char* to, int i, std::int64_t at) { copy_vector(to, from, at, i * 16, columns); });
    } else if (aligned) {
      for_each_vector<kVectors>(
          [&](unsigned char* to, int i, std::int64_t at) { copy_vector(to, from, at, i * 16, 2 * columns); });
    } else {
      for_each_vector<kVectors>(
          [&](unsigned char* to, int i, std::int64_t at) { copy_elements(to, from, at, i * 8, columns, stored); });
    }
    await_copies();
    __syncwarp();
    if constexpr (kWidens) {
      if (by_bytes) widen_bytes();
      if (stored == Stored::kBf16 && aligned) convert_all();
    }
    fence_async_proxy();
    __syncwarp();
  }

 private:
  // The lane's number as the compiler has not seen it: what follows from it is computed where it is needed, and takes
  // no registers in between.
  FLASHPORT_DEVICE int fresh_lane() const {
    int lane = lane_;
    asm volatile("" : "+r"(lane));
    return lane;
  }
  FLASHPORT_DEVICE static int place(int row, int i) { return i / 8 * kRows * 128 + 2 * swizzled_offset(row, i % 8); }
  FLASHPORT_DEVICE uint4& vector(int row, int i) const { return *reinterpret_cast<uint4*>(tile_ + place(row, i)); }

  // f(place, vector of the last kCount of a row's, the row's offset). Eight rows at a time: so many loads of offsets,
  // and copies, are in flight together.
  template <int kCount, class F>
  FLASHPORT_DEVICE void for_each_vector(const F& f) const {
    const int lane = fresh_lane();
#pragma unroll 1
    for (int first = 0; first < kRows; first += 8) {
#pragma unroll(kCount > 16 ? 4 : kCount / 4)
      for (int step = 0; step < kCount / 4; ++step) {
        const int row = (step * kWaveSize + lane) / kCount, i = (step * kWaveSize + lane) % kCount;
        f(tile_ + first * 128 + place(row, kVectors - kCount + i), i, offsets_[first + row]);
      }
    }
  }

  // 16 bytes of a row that has `bytes`, from byte `first` on.
  FLASHPORT_DEVICE static void copy_vector(unsigned char* to, const char* from, std::int64_t at, int first, int bytes) {
    const int count = at < 0 ? 0 : minimum(maximum(bytes - first, 0), 16);
    copy_async_some(to, from + (count > 0 ? at + first : 0), count);
  }
  FLASHPORT_DEVICE static void copy_elements(unsigned char* to, const char* from, std::int64_t at, int first,
                                             int columns, Stored stored) {
#pragma unroll 1
    for (int j = 0; j < 8; ++j) {
      const bool valid = at >= 0 && first + j < columns;
      reinterpret_cast<std::uint16_t*>(to)[j] = valid ? element(from + at, first + j, stored) : 0;
    }
  }

  FLASHPORT_DEVICE void widen_bytes() const {
    constexpr int kAtOnce = kRows * kByteVectors % (2 * kWaveSize) == 0 ? 2 : 1;
    const int lane = fresh_lane();
#pragma unroll 1
    for (int first = lane; first < kRows * kByteVectors; first += kAtOnce * kWaveSize) {
      uint4 bytes[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int i = first + n * kWaveSize;
        bytes[n] = vector(i / kByteVectors, kByteVectors + i % kByteVectors);
      }
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int i = first + n * kWaveSize, row = i / kByteVectors, unit = i % kByteVectors;
        vector(row, 2 * unit) = widened(bytes[n].x, bytes[n].y);
        vector(row, 2 * unit + 1) = widened(bytes[n].z, bytes[n].w);
      }
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
    for (int i = fresh_lane(); i < kRows * kVectors; i += kWaveSize) {
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
  std::int64_t* offsets_;
  const int lane_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
