// The copies of rows of K and V from device memory into a tile of shared memory, by one wave. Where the rows begin lies
// in shared memory: shuffles would give halves of addresses, and the moves that join them wait for the copies before to
// have left.
#pragma once

#include "common/device/kv/paged_kv.h"
#include "cuda/arch/mma.h"
#include "cuda/decode/row_layout.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Whether the cache's rows are what a tile has, and can be copied in the widest units.
template <class Layout>
FLASHPORT_DEVICE bool is_as_stored(const CacheParams& cache) {
  return cache.copy_unit >= widest_unit(Layout::kHeadBytes) && cache.row_bytes == Layout::kHeadBytes;
}

// What a tile has in place of rows past the end, of which there are some beside rows that are there: zeros for values,
// which probabilities of 0 multiply, or the last row again for keys, whose scores are masked. That takes no condition a
// row. Where a wave has no row at all, zeros.
enum class PastEnd { kZeros, kLastRow };

// kRows rows of a tile from `first_row` on, of each the bytes of kHeads heads, which begin in the tile's rows at byte
// `first_byte`. kInUnits: of one head that may begin or end inside a unit of 16 bytes the whole units that it lies in.
template <class Layout, int kRows, int kHeads = 1, bool kInUnits = false>
struct RowCopies {
  static constexpr int kRowBytes = [] {
    if constexpr (kInUnits)
      return Layout::kColumn;
    else
      return kHeads * Layout::kHeadBytes;
  }();
  static constexpr int kUnit = widest_unit(kRowBytes);

  // Rows as stored, of which the first `count` are there. row_at(i): where row i of the tile begins in the cache or, if
  // it is not there, the last one that is (kLastRow) or anything that can be read.
  template <PastEnd kPastEnd, class RowAt, class Policy>
  FLASHPORT_DEVICE static void copy_whole(int lane, char* tile, int first_row, int first_byte, int count,
                                          const RowAt& row_at, Policy policy) {
    constexpr int kUnits = kRowBytes / kUnit;
    constexpr int kLanes = lanes_of_row(kUnits);
    constexpr int kAtOnce = kWaveSize / kLanes;
    // A lane keeps its column of the tile; rows are a power of two at once, so a row's swizzle is xored in.
    const int byte = lane % kLanes * kUnit;
    const int first = lane / kLanes;
    unsigned to = opaque_address(tile + Layout::row_offset(first_row + first));
    if constexpr (kHeads > 1 || kInUnits) to = __shfl_sync(~0u, to, lane);  // opaque to ptxas, too
    const int column = Layout::column(first_byte + byte) ^ Layout::swizzle(first_row + first);
    const int left = count - first;  // from the lane's first row on
    const bool none = count <= 0;
    const auto is_zeros = [&](int row) { return kPastEnd == PastEnd::kLastRow ? none : row >= left; };
    // Addresses first: eight copies then leave one after the other.
    constexpr int kBatch = kRows / kAtOnce < 8 ? kRows / kAtOnce : 8;
#pragma unroll
    for (int batch = 0; batch < kRows; batch += kBatch * kAtOnce) {
      const char* from[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) from[i] = row_at(first_row + batch + i * kAtOnce + first) + byte;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = batch + i * kAtOnce;
#pragma unroll
        for (int part = 0; part < kUnits / kLanes; ++part) {
          const int before = part * kLanes * kUnit;  // whole panels, where there are panels
          copy_async<kUnit>(to + Layout::row_offset(row) + ((column ^ Layout::swizzle(row)) + Layout::column(before)),
                            from[i] + before, is_zeros(row), policy);
        }
      }
    }
    // Units that do not fill the lanes are left over, of all rows at once; two of a row go side by side.
    constexpr int kOver = kUnits % kLanes;
    constexpr int kOverAtOnce = kOver == 2 && kRows == kWaveSize ? 2 : kWaveSize / kRows;
    constexpr int kOverRows = kWaveSize / kOverAtOnce;
#pragma unroll
    for (int part = 0; part < kRows; part += kOverRows) {
#pragma unroll
      for (int over = kUnits - kOver; over < kUnits; over += kOverAtOnce) {
        const int row = part + lane / kOverAtOnce;
        const int unit = over + lane % kOverAtOnce;
        if (kUnits - over >= kOverAtOnce || unit < kUnits) {
          copy_async<kUnit>(tile + Layout::offset(first_row + row, first_byte + unit * kUnit),
                            row_at(first_row + row) + unit * kUnit, !is_zeros(row - first));
        }
      }
    }
  }

  // Zeros for rows and dims that are not there. rows[i]: where row i of the tile begins, or null.
  FLASHPORT_DEVICE static void copy_part(int lane, char* tile, int first_row, int first_byte, const CacheParams& cache,
                                         const char* const* rows) {
    const int bytes = kHeads * cache.row_bytes;
    if (kHeads > 1 || cache.copy_unit >= kUnit) {
      copy_units<kUnit>(lane, tile, first_row, first_byte, bytes, cache.data, rows);
    } else if (cache.copy_unit >= 4) {
      copy_units<4>(lane, tile, first_row, first_byte, bytes, cache.data, rows);
    } else {
      copy_units<2>(lane, tile, first_row, first_byte, bytes, cache.data, rows);
      __threadfence_block();
    }
  }

 private:
  // Opaque to the compiler: ptxas 13.0 makes an illegal instruction of a uniform address of shared memory beside a
  // cache policy (ci/audit_cuda.py finds it).
  FLASHPORT_DEVICE static unsigned opaque_address(const char* at) {
    return recompute(static_cast<int>(shared_address(at)));
  }

  template <int kBytes>
  FLASHPORT_DEVICE static void copy_units(int lane, char* tile, int first_row, int first_byte, int row_bytes,
                                          const void* anywhere, const char* const* rows) {
    constexpr int kUnits = kRowBytes / kBytes;
    constexpr int kCopies = kRows * kUnits;
#pragma unroll 1
    for (int copy = lane; copy < kCopies; copy += kWaveSize) {
      const int row = first_row + copy / kUnits;
      const int byte = copy % kUnits * kBytes;
      const char* from = rows[row];
      const bool valid = from != nullptr && byte < row_bytes;
      char* to = tile + Layout::offset(row, first_byte + byte);
      const char* source = valid ? from + byte : static_cast<const char*>(anywhere);
      if constexpr (kBytes >= 4) {
        copy_async<kBytes>(to, source, valid);
      } else {
        *reinterpret_cast<std::uint16_t*>(to) = valid ? __ldg(reinterpret_cast<const std::uint16_t*>(source)) : 0;
      }
    }
  }

  static constexpr int lanes_of_row(int units) {
    if (kHeads > 1 && units <= 8 && (units & (units - 1)) == 0) return units;
    if (kHeads > 1) return units < kWaveSize ? 16 : kWaveSize;
    if (units % 4 != 0) return units < 8 ? 4 : units < 16 ? 8 : 16;
    const int even = units & -units;
    return even < kWaveSize ? even : kWaveSize;
  }
};

}  // namespace flashport::FLASHPORT_TARGET::decode
