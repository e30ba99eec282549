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

// Which rows of a tile a warp copies: every step-th eight of them, from the first-th on.
struct Share {
  int first, step;
  FLASHPORT_DEVICE int row(int i) const { return (first + i / 8 * step) * 8 + i % 8; }  // its i-th
};

template <MathType kMath, bool kWidens, int kPanels, int kRows>
class RowCopies {
  static constexpr int kVectors = kPanels * 8, kByteVectors = kVectors / 2;  // of a row, in the tile and as bytes

 public:
  // `offsets`: room for an offset of each row, in shared memory, where a warp uses that of its own rows.
  FLASHPORT_DEVICE RowCopies(unsigned char* tile, std::int64_t* offsets, int lane, Share share)
      : tile_(tile), offsets_(offsets), lane_(lane), share_(share) {}

  // row_at(row): byte offset of a row, or -1; lane l is asked for rows l, l + 32, ... of the warp's
  template <class RowAt>
  FLASHPORT_DEVICE void find_rows(const RowAt& row_at) const {
#pragma unroll 1
    for (int i = lane_; share_.row(i) < kRows; i += kWaveSize) offsets_[share_.row(i)] = row_at(share_.row(i));
    __syncwarp();
  }

  // The rows that were found, from `data` on. All lanes return when the tile, and all copies that they had in flight,
  // are complete.
  FLASHPORT_DEVICE void copy(const void* data, int columns, Stored stored, bool aligned) const {
    const char* from = static_cast<const char*>(data);
    const bool by_bytes = stored == Stored::kFp8 && aligned;
    if (by_bytes) {
      copy_vectors<kByteVectors>(from, columns);
    } else if (aligned) {
      copy_vectors<kVectors>(from, 2 * columns);
    } else {
      copy_elements(from, columns, stored);
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

  // `bytes` of each row, to the last kCount vectors of its place. Eight rows at a time, so that several copies are
  // issued together.
  template <int kCount>
  FLASHPORT_DEVICE void copy_vectors(const char* from, int bytes) const {
    constexpr int kAll = kCount / 4, kSteps = kAll % 4 == 0 ? 4 : kAll % 3 == 0 ? 3 : kAll, kRepeats = kAll / kSteps;
    const int lane = fresh_lane();
    const auto row_of = [&](int step) { return (step * kWaveSize + lane) / kCount; };
    const auto vector_of = [&](int step) { return (step * kWaveSize + lane) % kCount; };
    const unsigned tile = shared_address(tile_);
    unsigned to[kSteps];
    const auto find_places = [&](int first_step) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        to[i] = tile + place(row_of(first_step + i), kVectors - kCount + vector_of(first_step + i));
      }
    };
    if (kRepeats == 1) find_places(0);
    const auto after = [&](int n) { return (n + 1) % kRepeats == 0 ? n + 1 + (share_.step - 1) * kRepeats : n + 1; };
#pragma unroll 1
    for (int n = share_.first * kRepeats; n < kRows / 8 * kRepeats; n = after(n)) {
      if (kRepeats > 1) find_places(n % kRepeats * kSteps);
      std::int64_t at[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) at[i] = offsets_[n / kRepeats * 8 + row_of(n % kRepeats * kSteps + i)];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int byte = vector_of(n % kRepeats * kSteps + i) * 16;
        copy_async_or_zeros(to[i] + n / kRepeats * 1024, from + byte + at[i], at[i] < 0 || byte >= bytes);
      }
    }
  }

  // From rows at any address.
  FLASHPORT_DEVICE void copy_elements(const char* from, int columns, Stored stored) const {
#pragma unroll 1
    for (int i = fresh_lane(); share_.row(i / kVectors) < kRows; i += kWaveSize) {
      const int row = share_.row(i / kVectors), first = i % kVectors * 8;
      auto* to = reinterpret_cast<std::uint16_t*>(&vector(row, i % kVectors));
#pragma unroll 1
      for (int j = 0; j < 8; ++j) {
        const bool valid = offsets_[row] >= 0 && first + j < columns;
        to[j] = valid ? element(from + offsets_[row], first + j, stored) : 0;
      }
    }
  }

  FLASHPORT_DEVICE void widen_bytes() const {
#pragma unroll 1
    for (int i = fresh_lane(); share_.row(i / kByteVectors) < kRows; i += kWaveSize) {
      const int row = share_.row(i / kByteVectors), unit = i % kByteVectors;
      const uint4 bytes = vector(row, kByteVectors + unit);
      __syncwarp();  // whole vectors of eight rows are a multiple of 32
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
    for (int i = fresh_lane(); share_.row(i / kVectors) < kRows; i += kWaveSize) {
      uint4& x = vector(share_.row(i / kVectors), i % kVectors);
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
  const Share share_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
