// Rows of queries, keys and values on their way to panels in shared memory (wgmma.h).
#pragma once

#include "common/device/gated_delta_sequence.h"
#include "cuda/target/wgmma.h"

namespace flashport::FLASHPORT_TARGET {

template <int kPanels>
struct alignas(1024) Panels {
  std::uint16_t x[kPanels][kChunkTokens * kPanelColumns];
};

// Whether rows of 16-bit values can be copied 16 bytes at a time.
FLASHPORT_DEVICE bool has_wide_rows(const TokenRows& rows) {
  const auto bits = reinterpret_cast<std::uintptr_t>(rows.data) |
                    2 * static_cast<std::uintptr_t>(rows.stride_seq | rows.stride_token | rows.stride_head);
  return bits % 16 == 0;
}

// Begins to copy `count` rows of `columns` values from element `at` on, by `threads` threads of which this one is
// `thread`; zeros where there are no rows or columns.
template <int kPanels>
FLASHPORT_DEVICE void copy_rows(Panels<kPanels>& panels, const TokenRows& rows, std::int64_t at, int count, int columns,
                                bool wide, int thread, int threads) {
  constexpr int kUnits = kPanels * 8;
  const auto* data = static_cast<const std::uint16_t*>(rows.data);
  const int unit = thread % kUnits;
  const bool has_unit = unit * 8 < columns;
  const std::uint16_t* from = data + at + unit * 8;
  std::uint16_t* panel = panels.x[unit / 8];
#pragma unroll 4
  for (int row = thread / kUnits; row < kChunkTokens; row += threads / kUnits) {
    const bool valid = has_unit && row < count;
    const std::uint16_t* source = valid ? from + row * rows.stride_token : data;
    std::uint16_t* to = panel + panel_place(row, unit % 8);
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

}  // namespace flashport::FLASHPORT_TARGET
