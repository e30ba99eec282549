// How the numbers of blocks become operands of mma.sync: as subnormals of fp16, which take moves and masks alone, but
// have too much, and are of a unit of their own.
#pragma once

#include "cuda/arch/mma.h"
#include "cuda/decode/lane_maps.h"

namespace flashport::FLASHPORT_TARGET::decode {

// What products of widened values are to be multiplied by, and what they have too much, in fp16 and negative: of keys
// for each of the two steps of 16 dims of a group, of values for each of the two tiles of 16 columns of a group, and
// there for the first and the last eight rows of the operand.
struct BlockWidening {
  float key_unit;
  unsigned keys_too_much[2];
  float value_units[2][2];
  unsigned values_too_much[2][2];
  // Probabilities take the scales of values, and are 2^exponent times as large for it, numbers of this unit: their
  // products with small scales would lose bits among fp16's subnormals, and those with large ones must not overflow.
  // With a minimum, blocks of fp16 numbers have scales of up to 2 x 65504 / 15 or 31.
  float probability_exponent, probability_unit;
};

// q8_0, and what a code of iq4_nl stands for: int8 + 128, the subnormal whose bits are that byte.
// q4_0 and q4_1: the subnormal whose bits are a code and, where it comes from high bits, 16 times that. The queries
// that meet these keys are 16th parts (query.h). The first tile of values has whole bytes, of which the products of the
// second are taken off. q5_0 and q5_1: codes of five bits; values are 1, 2, 16 and 32 times as large.
constexpr BlockWidening block_widening(KvFormat format) {
  if (has_fifth_bits(format)) {
    return {0x1p24f,
            {0x80108010u, 0x80108010u},
            {{0x1p24f, 0x1p23f}, {0x1p20f, 0x1p19f}},
            {{0x80108010u, 0x80208020u}, {0x81008100u, 0x82008200u}},
            has_minimum(format) ? 3.0f : 4.0f,
            has_minimum(format) ? 0x1p-3f : 0x1p-4f};
  }
  if (has_plain_nibbles(format)) {
    return {0x1p24f,
            {0x80088008u, 0x80808080u},
            {{0x1p24f, 0x1p24f}, {0x1p20f, 0x1p20f}},
            {{0x80888088u, 0x80888088u}, {0x80808080u, 0x80808080u}},
            has_minimum(format) ? 2.0f : 3.0f,
            has_minimum(format) ? 0x1p-2f : 0x1p-3f};
  }
  return {0x1p24f,
          {0x80808080u, 0x80808080u},
          {{0x1p24f, 0x1p24f}, {0x1p24f, 0x1p24f}},
          {{0x80808080u, 0x80808080u}, {0x80808080u, 0x80808080u}},
          6.0f,
          0x1p-6f};
}

// As a constant for device code, which an element of a constant array is not.
FLASHPORT_DEVICE constexpr float value_unit(const BlockWidening& widening, int tile, int rows) {
  return tile == 0   ? (rows == 0 ? widening.value_units[0][0] : widening.value_units[0][1])
         : rows == 0 ? widening.value_units[1][0]
                     : widening.value_units[1][1];
}

// What is too much as A operands in shared memory: of both steps of keys, and both tiles of values.
struct NothingTooMuch {};
struct TooMuchOperands {
  alignas(16) unsigned of_keys[2][4], of_values[2][4];

  // By a whole warp, of which several may write the same.
  FLASHPORT_DEVICE void set(int lane, const BlockWidening& keys, const BlockWidening& values) {
    const int of = lane / 4 % 2, i = lane % 4;
    of_keys[of][i] = of == 0 ? keys.keys_too_much[0] : keys.keys_too_much[1];
    // At constant places, or all would lie in local memory.
    const auto& of_tile = values.values_too_much;
    of_values[of][i] =
        of == 0 ? (i % 2 == 0 ? of_tile[0][0] : of_tile[0][1]) : (i % 2 == 0 ? of_tile[1][0] : of_tile[1][1]);
  }
};

// Products with it; eight of A's rows are alike. An operand that the compiler knows to be one constant is put together
// for each product anew; this one comes from shared memory, for each leaf, which takes fewer registers.
template <KvFormat kFormat>
struct TooMuch {
  // Two where steps, or tiles, differ. Without blocks none is used.
  static constexpr int kOperands = has_plain_nibbles(kFormat) || has_fifth_bits(kFormat) ? 2 : 1;
  unsigned a[kOperands][4];
  template <class Stored>
  FLASHPORT_DEVICE TooMuch(const Stored& stored, bool of_values) {
    if constexpr (is_block_cache(kFormat)) {
      const auto& from = of_values ? stored.of_values : stored.of_keys;
      for (int i = 0; i < kOperands; ++i) load_shared(a[i], from[i]);
    }
  }
  // `of`: the first or second step or tile of a group.
  template <MathType kMath>
  FLASHPORT_DEVICE void mma(int of, float (&c)[4], unsigned b0, unsigned b1) const {
    FLASHPORT_TARGET::mma<kMath>(c, a[of % kOperands], b0, b1);
  }
};

}  // namespace flashport::FLASHPORT_TARGET::decode
