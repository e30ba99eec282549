// The order of narrow caches in the operands of NVIDIA's mma.sync against the definitions: what ldmatrix and the
// fragments of m16n8k16 are in the PTX manual, and where a row has its dims.
#include "cuda/decode/lane_maps.h"

#include <gtest/gtest.h>

namespace flashport {
namespace {

constexpr KvFormat kFormats[] = {KvFormat::kFp8E4M3, KvFormat::kQ8_0, KvFormat::kQ4_0, KvFormat::kIq4Nl};
constexpr int kDims[] = {64, 128, 192, 256, 512};

constexpr bool is_of_four_bits(KvFormat format) { return format == KvFormat::kQ4_0 || format == KvFormat::kIq4Nl; }
constexpr int block_bytes(KvFormat format) { return is_of_four_bits(format) ? 18 : 34; }

// The dim whose value is byte `byte` of a row or, of formats of four bits, its low or its high four bits; -1 for a byte
// of a scale or beyond.
int dim_at(KvFormat format, int dims, int byte, bool high) {
  if (format == KvFormat::kFp8E4M3) return byte < dims ? byte : -1;
  const int block = byte / block_bytes(format);
  const int of_block = byte % block_bytes(format) - 2;
  return block < dims / 32 && of_block >= 0 ? block * 32 + of_block + (is_of_four_bits(format) && high ? 16 : 0) : -1;
}

// Byte i of those that __byte_perm selects from `first` (0 .. 3) and `last` (4 .. 7).
int selected(unsigned selector, int i) { return static_cast<int>(selector >> (4 * i) & 7); }

// The row's byte that is byte i of lane 4 g + c in a step of a group of 32 dims of keys.
int key_byte(KvFormat format, int group, int step, int c, int i) {
  if (format == KvFormat::kFp8E4M3) return 32 * group + 16 * step + 4 * c + i;
  const int unit = block_unit(format, group);
  if (format == KvFormat::kQ8_0 && step == 1) return 16 * (unit + 1) + 4 * c + i;
  const int from = selected(block_selector(format, group, c), i);
  return 16 * (from < 4 ? unit : unit + units_of_block(format)) + 4 * c + from % 4;
}
// Where byte i is: k of the step. Words of q4_0 give bytes 0 and 2, then 1 and 3.
int key_place(KvFormat format, int c, int i) {
  return format == KvFormat::kQ4_0 ? 2 * c + i / 2 + i % 2 * 8 : 2 * c + i % 2 + i / 2 * 8;
}

// The row's byte that is column 2 g + half of a tile of 16 columns of values.
int value_byte(KvFormat format, int tile, int g, int half) {
  if (format == KvFormat::kFp8E4M3) return 16 * tile + 2 * g + half;
  const int block = tile / 2;
  const int first = block_unit(format, block);
  const bool is_split = is_of_four_bits(format) || tile % 2 == 0;
  const int unit = !is_split ? first + 1 : g > block % 8 ? first : first + units_of_block(format);
  return 16 * unit + 2 * g + half;
}

TEST(ByteOperands, KeysMeetTheirQueryDims) {
  for (KvFormat format : kFormats) {
    for (int dims : kDims) {
      for (int dim = 0; dim < dims; ++dim) {
        int met = 0;
        for (int step = 0; step < 2; ++step) {
          for (int c = 0; c < 4; ++c) {
            for (int i = 0; i < 4; ++i) {
              if (dim_at(format, dims, key_byte(format, dim / 32, step, c, i), step == 1) != dim) continue;
              ++met;
              // Bytes 0 and 1 are k = 2 c and 2 c + 1, bytes 2 and 3 are k = 2 c + 8 and 2 c + 9; the query's columns
              // come eight by eight, k = 0 .. 7 and k = 8 .. 15.
              EXPECT_EQ(query_column(format, 0, dim), dim / 32 * 32 + 16 * step + key_place(format, c, i));
            }
          }
        }
        EXPECT_EQ(met, 1) << "dim " << dim;
      }
    }
  }
}

TEST(ByteOperands, ValuesHaveTheirColumns) {
  for (KvFormat format : kFormats) {
    for (int dims : kDims) {
      for (int tile = 0; tile < dims / 16; ++tile) {
        for (int g = 0; g < 8; ++g) {
          for (int half = 0; half < 2; ++half) {
            EXPECT_EQ(dim_at(format, dims, value_byte(format, tile, g, half), tile % 2 == 1),
                      value_column(format, 0, tile, g, half));
          }
        }
      }
    }
  }
}

// Transposed, place g of a unit is in lanes 4 g + c: those of a block's scale have g = block % 8 of its first unit.
TEST(ByteOperands, ScalesLieInTheFirstUnit) {
  for (KvFormat format : {KvFormat::kQ8_0, KvFormat::kQ4_0, KvFormat::kIq4Nl}) {
    for (int block = 0; block < 16; ++block) {
      EXPECT_EQ(16 * block_unit(format, block) + 2 * (block % 8), block_bytes(format) * block);
    }
  }
}

}  // namespace
}  // namespace flashport
