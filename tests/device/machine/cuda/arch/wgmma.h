// In place of CUDA's own. Descriptors, operands and sums lie as the PTX manual says ("Asynchronous warpgroup level
// matrix instructions": register fragments, matrix descriptors, strides and the 128-byte swizzle of addresses). When a
// product is computed products.h says. Each warp of a warpgroup has the products of its 16 rows for itself.
#pragma once

#include <array>

#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelBytes = 64 * 128;
inline int swizzled_offset(int row, int vector) { return row * kPanelColumns + (vector ^ (row & 7)) * 8; }
inline void fence_async_proxy() { machine::fence_async_proxy(); }

// Bits 0 to 13 are the address, 16 to 29 the bytes of the leading dimension and 32 to 45 those of the stride, all of
// them without their last four bits. 1 at bit 62 is the 128-byte swizzle.
template <bool kInCluster = false>
std::uint64_t panels_descriptor(const void* panel, int byte, int panel_bytes) {
  if (!kInCluster && machine::cluster_rank() != 0) machine::fail("a descriptor with the rank of the block");
  const auto field = [](unsigned bytes) { return std::uint64_t{bytes / 16 & 0x3fff}; };
  return std::uint64_t{1} << 62 | field(1024) << 32 | field(static_cast<unsigned>(panel_bytes)) << 16 |
         field(shared_address(panel) + static_cast<unsigned>(byte));
}
template <bool kInCluster = false>
std::uint64_t panel_descriptor(const void* panel, int byte) {
  return panels_descriptor<kInCluster>(panel, byte, 16);
}

// A matrix of 16-bit numbers that a descriptor names.
class Matrix {
 public:
  explicit Matrix(std::uint64_t descriptor)
      : address_(field(descriptor)), leading_(field(descriptor >> 16)), stride_(field(descriptor >> 32)) {
    if (descriptor >> 62 != 1) machine::fail("a descriptor without the 128-byte swizzle");
    // Where eight rows do not begin at a multiple of 1024, a descriptor has a base offset.
    if ((descriptor >> 49 & 7) != 0 || address_ % 1024 >= 128) machine::fail("a matrix whose rows are not aligned");
    (void)machine::shared_pointer(machine::address_in_block(address_, machine::cluster_rank()), 128);
  }
  // Numbers (row, k) and (row, k + 1) where k is along a row of 128 bytes; k is even.
  template <MathType kMath>
  void read_along(double* two, int row, int k) const {
    read<kMath>(two, row / 8 * stride_ + row % 8 * 128 + k * 2);
  }
  // Numbers (column, k) and (column + 1, k) where columns are along a row of 128 bytes; `column` is even.
  template <MathType kMath>
  void read_across(double* two, int column, int k) const {
    read<kMath>(two, column / 64 * leading_ + k / 8 * stride_ + k % 8 * 128 + column % 64 * 2);
  }

 private:
  static unsigned field(std::uint64_t bits) { return static_cast<unsigned>(bits & 0x3fff) << 4; }
  template <MathType kMath>
  void read(double* two, unsigned offset) const {
    const unsigned address = address_ + offset;
    const unsigned word = view_.word(address ^ (address >> 7 & 7) << 4);
    for (int half = 0; half < 2; ++half) two[half] = Product<kMath>::number(word, half);
  }

  unsigned address_, leading_, stride_;
  machine::AsyncView view_;
};

using Fragment = std::array<unsigned, 4>;

// The 16 rows of the left operand that a warp multiplies: in its registers, or in shared memory.
template <MathType kMath>
class LeftRows {
 public:
  LeftRows(Fragment (&fragments)[kWaveSize]) {
    for (int lane = 0; lane < kWaveSize; ++lane) {
      for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
          rows_[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + half] =
              Product<kMath>::number(fragments[lane][i], half);
        }
      }
    }
  }
  void read() {}
  const double* row(int i) const { return rows_[i]; }

 private:
  double rows_[16][16];
};
template <MathType kMath>
class StoredLeftRows {
 public:
  StoredLeftRows(std::uint64_t (&descriptors)[kWaveSize])
      : matrix_(descriptors[0]), first_(static_cast<int>(threadIdx.x) % 128 / kWaveSize * 16) {}
  void read() {
    for (int i = 0; i < 16; ++i) {
      for (int k = 0; k < 16; k += 2) matrix_.read_along<kMath>(&rows_[i][k], first_ + i, k);
    }
  }
  const double* row(int i) const { return rows_[i]; }

 private:
  Matrix matrix_;
  int first_;
  double rows_[16][16];
};

template <MathType kMath, bool kAdds, bool kTransposed, int kTiles, class Left>
struct WarpProduct {
  float* sums;
  Left left;
  std::uint64_t right;

  static void start(void* const* all) {
    machine::LaneRegisters registers;
    Left lefts[kWaveSize];
    for (int lane = 0; lane < kWaveSize; ++lane) {
      const auto& its = *static_cast<const WarpProduct*>(all[lane]);
      registers[lane] = its.sums;
      lefts[lane] = its.left;
      const auto& first = *static_cast<const WarpProduct*>(all[0]);
      if (its.right != first.right) machine::fail("lanes have other descriptors");
      if constexpr (std::is_same_v<Left, std::uint64_t>) {
        if (its.left != first.left) machine::fail("lanes have other descriptors");
      }
    }
    using Rows = std::conditional_t<std::is_same_v<Left, Fragment>, LeftRows<kMath>, StoredLeftRows<kMath>>;
    const auto multiply = [rows = Rows(lefts),
                           columns = Matrix(static_cast<const WarpProduct*>(all[0])->right)](float* sums) mutable {
      rows.read();
      double tile[8][16];
      for (int first = 0; first < kTiles * 8; first += 8) {
        read_columns(columns, first, tile);
        for (int lane = 0; lane < kWaveSize; ++lane) {
          for (int i = 0; i < 4; ++i) {
            float& x = sums[(lane * kTiles + first / 8) * 4 + i];
            x = machine::sum_of_products(rows.row(lane / 4 + i / 2 * 8), tile[lane % 4 * 2 + i % 2], kAdds ? x : 0.0f);
          }
        }
      }
    };
    machine::start_product(registers, kTiles * 4, multiply);
  }
  static void read_columns(const Matrix& matrix, int first, double (&columns)[8][16]) {
    for (int i = 0; i < 64; ++i) {
      double two[2];
      if constexpr (kTransposed) {
        const int column = i % 4 * 2, k = i / 4;
        matrix.read_across<kMath>(two, first + column, k);
        columns[column][k] = two[0], columns[column + 1][k] = two[1];
      } else {
        matrix.read_along<kMath>(&columns[i / 8][i % 8 * 2], first + i / 8, i % 8 * 2);
      }
    }
  }
};

template <MathType kMath, bool kAdds, bool kTransposed, int kTiles>
void wgmma(float (&sum)[kTiles][4], std::uint64_t left, std::uint64_t right) {
  WarpProduct<kMath, kAdds, kTransposed, kTiles, std::uint64_t> mine{sum[0], left, right};
  machine::meet("wgmma.mma_async", mine.start, &mine);
}
template <MathType kMath, bool kAdds, bool kTransposed, int kTiles>
void wgmma(float (&sum)[kTiles][4], const unsigned (&left)[4], std::uint64_t right) {
  WarpProduct<kMath, kAdds, kTransposed, kTiles, Fragment> mine{sum[0], {left[0], left[1], left[2], left[3]}, right};
  machine::meet("wgmma.mma_async", mine.start, &mine);
}
inline void wgmma_begin() {
  machine::meet("wgmma.fence", [](void* const*) { machine::fence_products(); }, nullptr);
}
inline void wgmma_commit() {
  machine::meet("wgmma.commit_group", [](void* const*) { machine::commit_products(); }, nullptr);
}
template <int kLater>
void wgmma_wait() {
  machine::meet("wgmma.wait_group", [](void* const*) { machine::await_products(kLater); }, nullptr);
}
inline void wgmma_wait_after(unsigned, unsigned*) {}
template <int kTiles>
void pin(float (&)[kTiles][4]) {}

}  // namespace flashport::FLASHPORT_TARGET
