// Copies of rows of a tile by one warp: what TMA cannot bring. Rows come by cp.async wherever they lie, with zeros
// where there are none; rows that are not aligned to 16 bytes come element by element.
//
// Numbers of another format than the products' are widened on the way. They land in the rows of the tile as they are
// stored, and a warp reads whole rows of them before it writes what they become: so it does not matter where in a row
// they lie. The format is a run-time switch for each row (common/device/kv/widen.h).
#pragma once

#include "common/device/kv/widen.h"
#include "cuda/attention/memory.h"

namespace flashport::FLASHPORT_TARGET::attention {

// Rows in memory, as copies are told of them.
struct StoredRows {
  const void* data;
  int columns;
  int bytes;  // of a row
  int unit;   // 16, 8, 4, 2 or 1 bytes: what all rows are aligned to
  KvFormat format;
};

// Whether a format has to be widened; the others are 16-bit types.
FLASHPORT_DEVICE constexpr bool is_narrow(KvFormat format) {
  return format != KvFormat::kFp16 && format != KvFormat::kBf16;
}

// Which rows of a tile a warp copies: every step-th eight of them, from the first-th on.
struct Share {
  int first, step;
  FLASHPORT_DEVICE int row(int i) const { return (first + i / 8 * step) * 8 + i % 8; }  // its i-th
};

// What a copy widens: nothing; bf16 and e4m3, which queries may have; or every format.
enum class Widened { kNothing, kQueries, kAll };

// kAtOnce: vectors of 16 bytes that a lane converts together, of queries.
template <MathType kMath, Widened kWidened, int kPanels, int kRows, int kAtOnce = 1>
class RowCopies {
  static constexpr bool kWidens = kWidened != Widened::kNothing;
  static constexpr int kVectors = kPanels * 8, kByteVectors = kVectors / 2;  // of a row, in the tile and as bytes
  static constexpr int kUnits = kVectors / 2;                                // of kv::kUnitValues
  static_assert(!kWidens || kWaveSize % kUnits == 0);                        // a warp reads whole rows at a time

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

  // The rows that were found. All lanes return when the tile, and all copies that they had in flight, are complete.
  FLASHPORT_DEVICE void copy(const StoredRows& rows) const {
    const char* from = static_cast<const char*>(rows.data);
    const bool widens = kWidens && is_narrow(rows.format);
    if (widens) {
      copy_narrow(from, rows);
    } else if (rows.unit == 16) {
      copy_vectors<kVectors>(from, 2 * rows.columns);
    } else {
      copy_elements(from, rows.columns);
    }
    await_copies();
    __syncwarp();
    if constexpr (kWidens) {
      if (widens) {
        widen_all(rows.format, rows.columns);
      } else if (kMath == MathType::kFp16 && rows.format == KvFormat::kBf16) {
        convert_all();
      }
    }
    fence_async_proxy();
    __syncwarp();
  }

  // The same in two steps, for rows of the products' type that are aligned to 16 bytes: begins to copy them. What has
  // landed is complete.
  FLASHPORT_DEVICE void begin(const StoredRows& rows) const {
    copy_vectors<kVectors, 6>(static_cast<const char*>(rows.data), 2 * rows.columns);
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

  // `bytes` of each row, to the first kCount vectors of its place. Eight rows at a time, of which a lane copies kAll
  // vectors, kSteps of them together. Where a copy of the warp has whole rows, those of a lane are neighbours, so that
  // it reads their offsets together.
  template <int kCount, int kUnroll = 1>
  FLASHPORT_DEVICE void copy_vectors(const char* from, int bytes) const {
    constexpr unsigned kAll = kCount / 4, kSteps = kAll % 4 == 0 ? 4 : kAll % 3 == 0 ? 3 : kAll;
    constexpr unsigned kRepeats = kAll / kSteps;
    constexpr bool kWholeRows = kWaveSize % kCount == 0;
    const unsigned lane = fresh_lane();  // divisions of unsigned numbers take fewer instructions
    const auto row_of = [&](unsigned step) {
      return kWholeRows ? lane / kCount * kAll + step : (step * kWaveSize + lane) / kCount;
    };
    const auto vector_of = [&](unsigned step) { return (step * kWaveSize + lane) % kCount; };
    const unsigned tile = shared_address(tile_);
    unsigned to[kSteps];
    const auto find_places = [&](unsigned first_step) {
#pragma unroll
      for (unsigned i = 0; i < kSteps; ++i) {
        const unsigned row = row_of(first_step + i), vector = vector_of(first_step + i);
        to[i] = tile + vector / 8 * (kRows * 128) + row * 128 + (vector ^ row) % 8 * 16;
      }
    };
    if (kRepeats == 1) find_places(0);
    const auto after = [&](unsigned n) {
      return (n + 1) % kRepeats == 0 ? n + 1 + (share_.step - 1) * kRepeats : n + 1;
    };
#pragma unroll kUnroll
    for (unsigned n = share_.first * kRepeats; n < kRows / 8 * kRepeats; n = after(n)) {
      const unsigned first_step = n % kRepeats * kSteps;
      if (kRepeats > 1) find_places(first_step);
      const std::int64_t* offsets = offsets_ + n / kRepeats * 8;
      std::int64_t at[kSteps];
      if constexpr (kWholeRows && kSteps % 2 == 0) {
#pragma unroll
        for (unsigned i = 0; i < kSteps; i += 2) {
          const longlong2 two = *reinterpret_cast<const longlong2*>(offsets + row_of(first_step + i));
          at[i] = two.x;
          at[i + 1] = two.y;
        }
      } else {
#pragma unroll
        for (unsigned i = 0; i < kSteps; ++i) at[i] = offsets[row_of(first_step + i)];
      }
#pragma unroll
      for (unsigned i = 0; i < kSteps; ++i) {
        const int byte = vector_of(first_step + i) * 16;
        copy_async_or_zeros(to[i] + n / kRepeats * 1024, from + byte + at[i], static_cast<int>(at[i] >> 32),
                            byte >= bytes);
      }
    }
  }

  // From rows at any address.
  FLASHPORT_DEVICE void copy_elements(const char* from, int columns) const {
#pragma unroll 1
    for (int i = fresh_lane(); share_.row(i / kVectors) < kRows; i += kWaveSize) {
      const int row = share_.row(i / kVectors), first = i % kVectors * 8;
      auto* to = reinterpret_cast<std::uint16_t*>(&vector(row, i % kVectors));
#pragma unroll 1
      for (int j = 0; j < 8; ++j) {
        const bool valid = offsets_[row] >= 0 && first + j < columns;
        to[j] = valid ? reinterpret_cast<const std::uint16_t*>(from + offsets_[row])[first + j] : std::uint16_t{0};
      }
    }
  }

  // Rows as they are stored, with zeros up to a whole vector after them.
  FLASHPORT_DEVICE void copy_narrow(const char* from, const StoredRows& rows) const {
    if constexpr (kWidens) {
      if (rows.unit == 16 && rows.bytes == rows.columns) {
        copy_vectors<kByteVectors>(from, rows.columns);
      } else if (rows.unit >= 8) {
        copy_pieces<8>(from, rows.bytes);
      } else if (rows.unit == 4) {
        copy_pieces<4>(from, rows.bytes);
      } else {
        copy_pieces<1>(from, rows.bytes);
      }
    }
  }
  // Four lanes share a row. kUnit 1: byte by byte.
  template <int kUnit>
  FLASHPORT_DEVICE void copy_pieces(const char* from, int bytes) const {
    constexpr int kLanes = 4;
    const int lane = fresh_lane();
#pragma unroll 1
    for (int i = lane / kLanes; share_.row(i) < kRows; i += kWaveSize / kLanes) {
      const int row = share_.row(i);
      const std::int64_t at = offsets_[row];
#pragma unroll 1
      for (int byte = lane % kLanes * kUnit; byte < (bytes + 15) / 16 * 16; byte += kLanes * kUnit) {
        const bool valid = at >= 0 && byte < bytes;
        unsigned char* to = tile_ + place(row, byte / 16) + byte % 16;
        if constexpr (kUnit == 1) {
          *to = valid ? from[at + byte] : 0;
        } else {
          copy_async<kUnit>(to, valid ? from + at + byte : from, valid);
        }
      }
    }
  }

  // A row as it is stored, in its place in the tile.
  struct StoredRow {
    const unsigned char* tile;
    int row;
    FLASHPORT_DEVICE unsigned aligned_word(int byte) const {
      return *reinterpret_cast<const unsigned*>(tile + place(row, byte / 16) + byte % 16 / 4 * 4);
    }
    FLASHPORT_DEVICE unsigned word(int byte) const {
      const unsigned first = aligned_word(byte);
      return byte % 4 == 0 ? first : __funnelshift_r(first, aligned_word(byte + 4), 16);
    }
    FLASHPORT_DEVICE unsigned half(int byte) const { return aligned_word(byte) >> byte % 4 * 8 & 0xffffu; }
  };
  FLASHPORT_DEVICE static void widen_unit(unsigned (&x)[8], KvFormat format, const StoredRow& row, int unit) {
    if constexpr (kWidened == Widened::kQueries) {
      kv::widen_unit<KvFormat::kFp8E4M3>(x, row, unit);
    } else {
      kv::widen_unit(x, format, row, unit);
    }
  }
  FLASHPORT_DEVICE void widen_all(KvFormat format, int columns) const {
#pragma unroll 1
    for (int i = fresh_lane(); share_.row(i / kUnits) < kRows; i += kWaveSize) {
      const int row = share_.row(i / kUnits), unit = i % kUnits;
      unsigned x[8] = {};
      if (unit * kv::kUnitValues < columns) widen_unit(x, format, StoredRow{tile_, row}, unit);
      __syncwarp();  // units of eight rows are a multiple of 32
      vector(row, 2 * unit) = {x[0], x[1], x[2], x[3]};
      vector(row, 2 * unit + 1) = {x[4], x[5], x[6], x[7]};
    }
  }

  // From bf16.
  FLASHPORT_DEVICE void convert_all() const {
    static_assert(kVectors / 4 % kAtOnce == 0);  // those of eight rows
#pragma unroll 1
    for (int i = fresh_lane(); share_.row(i / kVectors) < kRows; i += kAtOnce * kWaveSize) {
      uint4 x[kAtOnce], *places[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int at = i + n * kWaveSize;
        places[n] = &vector(share_.row(at / kVectors), at % kVectors);
        x[n] = *places[n];
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        *places[n] = {converted(x[n].x), converted(x[n].y), converted(x[n].z), converted(x[n].w)};
      }
    }
  }
  FLASHPORT_DEVICE static unsigned converted(unsigned two) {
    return pack<kMath>(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
  }

  unsigned char* tile_;
  std::int64_t* offsets_;
  const int lane_;
  const Share share_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
