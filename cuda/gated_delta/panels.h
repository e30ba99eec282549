// Copies of rows of queries, keys and values to panels in shared memory (wgmma.h).
#pragma once

#include "common/device/gated_delta/sequence.h"
#include "cuda/arch/wgmma.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

template <int kPanels>
struct alignas(1024) Panels {
  std::uint16_t x[kPanels][kChunkTokens * kPanelColumns];
};

// Whether rows of 16-bit values can be copied 16 bytes at a time.
FLASHPORT_DEVICE bool has_wide_rows(const StridedRows& rows) {
  const auto bits = reinterpret_cast<std::uintptr_t>(rows.data) |
                    2 * static_cast<std::uintptr_t>(rows.stride_seq | rows.stride_token | rows.stride_head);
  return bits % 16 == 0;
}

// Begins to copy `count` rows of `columns` values from offset `at` on, by kThreads threads of which this one is
// `thread`. Rows and columns that do not exist are zeros.
template <int kThreads, int kPanels>
FLASHPORT_DEVICE void copy_rows(Panels<kPanels>& panels, const StridedRows& rows, std::int64_t at, int count,
                                int columns, bool wide, int thread) {
  constexpr int kVectors = kPanels * 8;
  constexpr int kRowsAtOnce = kThreads / kVectors;
  const int vector = thread % kVectors, first = thread / kVectors;
  const auto* data = static_cast<const std::uint16_t*>(rows.data);
  const std::uint16_t* from = data + at + first * rows.stride_token + vector * 8;
  std::uint16_t* panel = panels.x[vector / 8];
  if (wide && count == kChunkTokens && columns == kPanels * kPanelColumns) {
    const std::int64_t step = kRowsAtOnce * rows.stride_token;
#pragma unroll
    for (int i = 0; i < kChunkTokens / kRowsAtOnce; ++i, from += step) {
      copy_async<16>(panel + swizzled_offset(first + i * kRowsAtOnce, vector % 8), from, true);
    }
    return;
  }
#pragma unroll 1
  for (int row = first; row < kChunkTokens; row += kRowsAtOnce, from += kRowsAtOnce * rows.stride_token) {
    const bool valid = row < count && vector * 8 < columns;
    const std::uint16_t* source = valid ? from : data;
    std::uint16_t* to = panel + swizzled_offset(row, vector % 8);
    if (wide) {
      copy_async<16>(to, source, valid);
      continue;
    }
    alignas(16) std::uint16_t eight[8];
    for (int i = 0; i < 8; ++i) eight[i] = valid ? source[i] : 0;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(eight);
  }
}

// Two values of the math type as floats.
template <MathType kMath>
FLASHPORT_DEVICE float2 unpack(unsigned two) {
  if constexpr (kMath == MathType::kBf16) {
    return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(two));
  }
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
