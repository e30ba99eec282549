// In place of CUDA's own: products are there at once. A descriptor is the address that it stands for.
#pragma once

#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelBytes = 64 * 128;
inline int swizzled_offset(int row, int vector) { return row * kPanelColumns + (vector ^ (row & 7)) * 8; }
inline void fence_async_proxy() {}

inline std::uint64_t panel_descriptor(const void* panel, int byte) {
  const unsigned address = shared_address(panel);
  if (address % 1024 != 0) machine::fail("a panel that is not aligned");
  return address + static_cast<unsigned>(byte);
}

// Rows of the panel that a descriptor points into; three bits of an address say how the 16-byte vectors of its row are
// exchanged.
template <MathType kMath>
class PanelRows {
 public:
  explicit PanelRows(std::uint64_t descriptor)
      : address_(static_cast<unsigned>(descriptor)), first_(machine::shared_pointer(address_, 1)) {}
  // Values `column` and the next one of row `row`; column is even.
  void read(float* two, int row, int column) const {
    const auto address = address_ + static_cast<unsigned>(row * 128 + column * 2);
    unsigned word;
    std::memcpy(&word, first_ + ((address ^ (address >> 7 & 7) << 4) - address_), sizeof word);
    for (int half = 0; half < 2; ++half) two[half] = Product<kMath>::number(word, half);
  }

 private:
  unsigned address_;
  const char* first_;
};

// The 16 values of the two rows of the left operand that a lane has sums of.
struct LeftRows {
  float of[2][16];
};
template <MathType kMath>
LeftRows left_rows(std::uint64_t left) {
  const int lane = static_cast<int>(threadIdx.x % 128);
  const PanelRows<kMath> panel(left);
  LeftRows rows;
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 16; k += 2) panel.read(&rows.of[i][k], lane / 32 * 16 + lane % 32 / 4 + 8 * i, k);
  }
  return rows;
}
template <MathType kMath>
LeftRows left_rows(const unsigned (&left)[4]) {
  const int lane = static_cast<int>(threadIdx.x % kWaveSize);
  LeftRows rows;
  for (int c = 0; c < 4; ++c) {
    for (int i = 0; i < 4; ++i) {
      const unsigned two = __shfl_sync(~0u, left[i], lane / 4 * 4 + c);
      for (int half = 0; half < 2; ++half) {
        rows.of[i % 2][2 * c + i / 2 * 8 + half] = Product<kMath>::number(two, half);
      }
    }
  }
  return rows;
}

template <MathType kMath, bool kAdds, bool kTransposed, int kTiles, class Left>
void wgmma(float (&sum)[kTiles][4], const Left& left, std::uint64_t right) {
  const LeftRows rows = left_rows<kMath>(left);
  const PanelRows<kMath> panel(right);
  for (int tile = 0; tile < kTiles; ++tile) {
    const int first = tile * 8 + static_cast<int>(threadIdx.x) % 4 * 2;  // of the lane's two columns
    float columns[2][16];
    if constexpr (kTransposed) {
      for (int k = 0; k < 16; ++k) {
        float two[2];
        panel.read(two, k, first);
        columns[0][k] = two[0], columns[1][k] = two[1];
      }
    } else {
      for (int i = 0; i < 16; ++i) panel.read(&columns[i / 8][i % 8 * 2], first + i / 8, i % 8 * 2);
    }
    for (int i = 0; i < 4; ++i) {
      float& x = sum[tile][i];
      x = sum_of_products(rows.of[i / 2], columns[i % 2], kAdds ? x : 0.0f);
    }
  }
}
inline void wgmma_begin() {}
inline void wgmma_commit() {}
template <int kLater>
void wgmma_wait() {}
template <int kTiles>
void pin(float (&)[kTiles][4]) {}

}  // namespace flashport::FLASHPORT_TARGET
