// The order of narrow caches in the operands of NVIDIA's mma.sync against the definitions: what ldmatrix and the
// fragments of m16n8k16 are in the PTX manual, and where a row has its dims.
#include "cuda/decode/lane_maps.h"

#include <gtest/gtest.h>

namespace flashport {
namespace {

constexpr KvFormat kFormats[] = {KvFormat::kFp8E4M3, KvFormat::kQ8_0, KvFormat::kQ4_0, KvFormat::kIq4Nl,
                                 KvFormat::kQ4_1,    KvFormat::kQ5_0, KvFormat::kQ5_1};
constexpr int kDims[] = {64, 128, 192, 256, 512};

// ggml's blocks: bytes before the codes, and all.
struct BlockBytes {
  int header, all;
};
constexpr BlockBytes bytes_of(KvFormat format) {
  switch (format) {
    case KvFormat::kQ8_0: return {2, 34};
    case KvFormat::kQ4_1: return {4, 20};
    case KvFormat::kQ5_0: return {6, 22};
    case KvFormat::kQ5_1: return {8, 24};
    default: return {2, 18};
  }
}
constexpr bool is_of_two_a_byte(KvFormat format) { return format != KvFormat::kFp8E4M3 && format != KvFormat::kQ8_0; }

// The dim whose code is byte `byte` of a row or, of formats with two in a byte, its low or its high four bits; -1 for a
// byte of a header or beyond.
int dim_at(KvFormat format, int dims, int byte, bool high) {
  if (format == KvFormat::kFp8E4M3) return byte < dims ? byte : -1;
  const BlockBytes bytes = bytes_of(format);
  const int block = byte / bytes.all;
  const int of_block = byte % bytes.all - bytes.header;
  return block < dims / 32 && of_block >= 0 ? block * 32 + of_block + (is_of_two_a_byte(format) && high ? 16 : 0) : -1;
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
// Where byte i is: k of the step. Words of most formats with two codes a byte give bytes 0 and 2, then 1 and 3.
int key_place(KvFormat format, int c, int i) {
  return is_of_two_a_byte(format) && format != KvFormat::kIq4Nl ? 2 * c + i / 2 + i % 2 * 8 : 2 * c + i % 2 + i / 2 * 8;
}

// The row's byte that is column 2 g + half of a tile of 16 columns of values.
int value_byte(KvFormat format, int tile, int g, int half) {
  if (format == KvFormat::kFp8E4M3) return 16 * tile + 2 * g + half;
  const int block = tile / 2;
  const int first = block_unit(format, block);
  const bool is_split = is_of_two_a_byte(format) || tile % 2 == 0;
  const int unit = !is_split ? first + 1 : 2 * g >= block_turn(format, block) ? first : first + units_of_block(format);
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
              EXPECT_EQ(query_column(dim_order(format), 0, dim), dim / 32 * 32 + 16 * step + key_place(format, c, i));
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
                      value_column(dim_order(format), 0, tile, g, half));
          }
        }
      }
    }
  }
}

// The codes of a block are in the unit where they begin and in its last one, which are neighbours but for q8_0.
TEST(ByteOperands, UnitsOfABlock) {
  for (KvFormat format : kFormats) {
    if (format == KvFormat::kFp8E4M3) continue;
    const BlockBytes bytes = bytes_of(format);
    for (int block = 0; block < 16; ++block) {
      const int begin = bytes.all * block + bytes.header, end = bytes.all * (block + 1),
                turn = block_turn(format, block);
      EXPECT_EQ((end - 1) / 16, block_unit(format, block) + units_of_block(format));
      EXPECT_EQ(begin, 16 * block_unit(format, block) + turn);
      EXPECT_TRUE(turn > 0 && turn <= 16) << turn;
      for (int lane : {0, 15, 16, 31}) {
        if (has_long_header(format))
          EXPECT_EQ(block_units_byte(end, lane), 16 * (block_unit(format, block) + lane / 16));
      }
    }
  }
}

// Transposed, place g of a unit is in lanes 4 g + c: those of a block's scale have g = block % 8 of its first unit.
TEST(ByteOperands, ScalesLieInTheFirstUnit) {
  for (KvFormat format : {KvFormat::kQ8_0, KvFormat::kQ4_0, KvFormat::kIq4Nl}) {
    for (int block = 0; block < 16; ++block) {
      EXPECT_EQ(16 * block_unit(format, block) + 2 * (block % 8), bytes_of(format).all * block);
    }
  }
}

}  // namespace
}  // namespace flashport
