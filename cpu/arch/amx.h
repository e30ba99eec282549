// AMX: eight tile registers of 16 rows x 64 bytes, and the product of bf16 tiles with sums in fp32 (Intel SDM volume 1,
// chapter 18). The compiler knows nothing of them: each function names its registers, and orders them with memory.
//
// multiply_tile: sums [16, 16] += a [16, 32] b [32, 16], where row i of b's register holds rows 2 i and 2 i + 1 of b,
// an element of each in turn.
#pragma once

#include <cstdint>

#include "cpu/arch/avx512.h"

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kTileRows = 16, kTileBytes = 64;

// All eight registers in whole, while it lives.
class TileRegisters {
 public:
  TileRegisters() {
    const Config config;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileRegisters() { asm volatile("tilerelease" : :); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  struct alignas(64) Config {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
};

template <int kTile>
FLASHPORT_DEVICE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
// `pitch`: bytes from row to row
template <int kTile>
FLASHPORT_DEVICE void load_tile(const void* from, std::int64_t pitch) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(pitch) : "memory");
}
template <int kTile>
FLASHPORT_DEVICE void store_tile(void* to, std::int64_t pitch) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(pitch) : "memory");
}
template <int kSums, int kA, int kB>
FLASHPORT_DEVICE void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

}  // namespace flashport::FLASHPORT_TARGET
