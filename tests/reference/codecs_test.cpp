// The reference's codecs against their definitions: known codes, round trips of every code, rounding of ties.
#include "tests/reference/codecs.h"
#include "tests/reference/blocks.h"
#include "tests/reference/scaled_rows.h"

#include <gtest/gtest.h>

namespace reference {
namespace {

void expect_round_trip(const MiniFloat& format, std::uint32_t codes) {
  for (std::uint32_t code = 0; code < codes; ++code) {
    const double value = decode(code, format);
    if (std::isnan(value)) continue;
    ASSERT_EQ(encode(value, format), code) << value;
  }
}

TEST(Codecs, EveryCodeSurvivesARoundTrip) {
  expect_round_trip(kHalf, 1u << 16);
  expect_round_trip(kBrain, 1u << 16);
  expect_round_trip(kE4M3, 1u << 8);
  expect_round_trip(kE4M3Fnuz, 1u << 8);
  expect_round_trip(kE5M2, 1u << 8);
}

TEST(Codecs, KnownCodes) {
  EXPECT_EQ(encode(1.0, kHalf), 0x3c00u);
  EXPECT_EQ(encode(-2.0, kHalf), 0xc000u);
  EXPECT_EQ(encode(65504.0, kHalf), 0x7bffu);
  EXPECT_EQ(encode(65519.9, kHalf), 0x7bffu);
  EXPECT_EQ(encode(65520.0, kHalf), 0x7c00u);
  EXPECT_EQ(encode(5.960464477539063e-08, kHalf), 1u);
  EXPECT_EQ(encode(1.0, kBrain), 0x3f80u);
  EXPECT_EQ(encode(std::numeric_limits<double>::infinity(), kBrain), 0x7f80u);
  EXPECT_EQ(encode(1.0, kE4M3), 0x38u);
  EXPECT_EQ(encode(448.0, kE4M3), 0x7eu);
  EXPECT_EQ(encode(1e9, kE4M3), 0x7eu);
  EXPECT_EQ(encode(-1e9, kE4M3), 0xfeu);
  EXPECT_EQ(encode(0.001953125, kE4M3), 1u);
  EXPECT_EQ(encode(1.0, kE4M3Fnuz), 0x40u);
  EXPECT_EQ(encode(240.0, kE4M3Fnuz), 0x7fu);
  EXPECT_EQ(encode(1e9, kE4M3Fnuz), 0x7fu);
  EXPECT_EQ(encode(-0.0, kE4M3Fnuz), 0u);
  EXPECT_EQ(encode(1.0, kE5M2), 0x3cu);
  EXPECT_EQ(encode(-57344.0, kE5M2), 0xfbu);
  EXPECT_EQ(encode(1e9, kE5M2), 0x7bu);
  EXPECT_EQ(encode(-std::numeric_limits<double>::infinity(), kE5M2), 0xfcu);
  EXPECT_EQ(decode(0x7c, kE5M2), std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(decode(0x7f, kE5M2)));
  EXPECT_TRUE(std::isnan(decode(0x80, kE4M3Fnuz)));
  EXPECT_TRUE(std::isnan(decode(0xff, kE4M3)));
  EXPECT_TRUE(std::isnan(decode(0x7f, kE4M3)));
}

TEST(Codecs, TiesGoToTheEvenCode) {
  EXPECT_EQ(encode(1.0 + 1.0 / 16, kE4M3), 0x38u);
  EXPECT_EQ(encode(1.0 + 3.0 / 16, kE4M3), 0x3au);
  EXPECT_EQ(encode(1.0 + 1.0 / 256, kBrain), 0x3f80u);
  EXPECT_EQ(encode(1.0 + 3.0 / 256, kBrain), 0x3f82u);
  EXPECT_EQ(encode(std::nextafter(1.0 + 1.0 / 256, 2.0), kBrain), 0x3f81u);
}

TEST(Codecs, ScaledGroupsHoldTheirLargestValueAsTheLargestCode) {
  const float values[8] = {1, -2, 3.5, -7, 0.4f, 0.5f, -0.5f, 6.6f};
  unsigned char row[4] = {};
  EXPECT_EQ(write_scaled_group(Type::kI4, Type::kF16, row, 0, values, 8), 1.0);
  EXPECT_EQ(row[0], 0xe1);  // -2 in the high bits, 1 in the low ones
  EXPECT_EQ(row[1], 0x94);
  EXPECT_EQ(row[2], 0x10);
  EXPECT_EQ(row[3], 0x7f);
  EXPECT_EQ(read_scaled_value(Type::kI4, row, 3), -7);
  EXPECT_EQ(read_scaled_value(Type::kI4, row, 6), -1);
  std::int8_t bytes[8] = {};
  EXPECT_EQ(write_scaled_group(Type::kI8, Type::kF32, bytes, 0, values, 8), 7.0f / 127.0f);
  EXPECT_EQ(bytes[3], -127);
  EXPECT_EQ(bytes[1], -36);
  const float bad[2] = {1, std::numeric_limits<float>::infinity()};
  EXPECT_TRUE(std::isnan(write_scaled_group(Type::kI8, Type::kF32, bytes, 0, bad, 2)));
  EXPECT_EQ(bytes[0], 0);
}

TEST(Codecs, Q8BlocksHoldAScaleAndBytes) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = static_cast<float>(i < 32 ? i - 16 : 0);
  unsigned char row[2 * kQ8Bytes];
  write_q8_0(row, values, 64);
  EXPECT_EQ(load_as<std::uint16_t>(row), encode(16.0f / 127.0f, kHalf));
  EXPECT_EQ(load_as<std::int8_t>(row + 2), -127);
  EXPECT_EQ(read_q8_0(row, 16), 0.0);
  EXPECT_NEAR(read_q8_0(row, 31), 15.0, 0.07);
  EXPECT_EQ(load_as<std::uint16_t>(row + kQ8Bytes), 0);
  EXPECT_EQ(read_q8_0(row, 40), 0.0);
}

TEST(Codecs, Q8BlocksWithoutANumberAreNan) {
  for (float x : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    float values[64] = {1, -x};
    values[40] = 2;
    unsigned char row[2 * kQ8Bytes];
    write_q8_0(row, values, 64);
    EXPECT_EQ(load_as<std::uint16_t>(row), 0x7e00);
    for (int i = 0; i < 32; ++i) EXPECT_TRUE(std::isnan(read_q8_0(row, i)));
    EXPECT_NEAR(read_q8_0(row, 40), 2.0, 0.01);
  }
}

// One block each, by hand: the scale, the minimum, the fifth bits and the codes of values 0 and 16 to 17.
TEST(Codecs, BlocksAreThoseOfTheirDefinition) {
  float values[kBlockValues] = {};
  values[0] = -8;
  values[16] = 7;
  values[17] = 3.5;
  unsigned char block[34];
  write_blocks(Type::kQ4_0, block, values, kBlockValues);
  EXPECT_EQ(load_as<std::uint16_t>(block), 0x3c00);  // 1
  EXPECT_EQ(block[2], 0xf0);                         // -8 is code 0, 7 is code 15
  EXPECT_EQ(block[3], 0xc8);                         // 0 is code 8, 3.5 is rounded up to 4
  EXPECT_EQ(read_block_value(Type::kQ4_0, block, 17), 4);
  write_blocks(Type::kQ4_1, block, values, kBlockValues);
  EXPECT_EQ(load_as<std::uint16_t>(block), 0x3c00);
  EXPECT_EQ(load_as<std::uint16_t>(block + 2), 0xc800);  // -8
  EXPECT_EQ(block[4], 0xf0);
  EXPECT_EQ(read_block_value(Type::kQ4_1, block, 16), 7);
  values[0] = -16;
  write_blocks(Type::kQ5_0, block, values, kBlockValues);
  EXPECT_EQ(load_as<std::uint16_t>(block), 0x3c00);
  EXPECT_EQ(load_as<std::uint32_t>(block + 2), 0xfffffffeu);  // all codes but the first are 16 and more
  EXPECT_EQ(block[6], 0x70);
  EXPECT_EQ(read_block_value(Type::kQ5_0, block, 0), -16);
  EXPECT_EQ(read_block_value(Type::kQ5_0, block, 16), 7);
  values[16] = 15;
  write_blocks(Type::kQ5_1, block, values, kBlockValues);
  EXPECT_EQ(load_as<std::uint16_t>(block), 0x3c00);
  EXPECT_EQ(load_as<std::uint16_t>(block + 2), 0xcc00);  // -16
  EXPECT_EQ(load_as<std::uint32_t>(block + 4), 0xfffffffeu);
  EXPECT_EQ(block[8], 0xf0);
  EXPECT_EQ(read_block_value(Type::kQ5_1, block, 16), 15);
  for (int i = 0; i < kBlockValues; ++i) values[i] = static_cast<float>(kIq4NlValues[i % 16]);
  write_blocks(Type::kIq4Nl, block, values, kBlockValues);
  EXPECT_EQ(load_as<std::uint16_t>(block), 0x3c00);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(block[2 + i], 17 * i);
  for (int i = 0; i < kBlockValues; ++i) EXPECT_EQ(read_block_value(Type::kIq4Nl, block, i), values[i]);
}

TEST(Codecs, BlocksWithoutANumberAreNan) {
  for (const Type type : kBlockTypes) {
    float values[kBlockValues] = {1, 2};
    values[20] = -std::numeric_limits<float>::infinity();
    unsigned char block[34];
    write_blocks(type, block, values, kBlockValues);
    EXPECT_EQ(load_as<std::uint16_t>(block), 0x7e00);
    for (int i = 2; i < block_bytes(type); ++i) EXPECT_EQ(block[i], 0);
    for (int i = 0; i < kBlockValues; ++i) EXPECT_TRUE(std::isnan(read_block_value(type, block, i)));
  }
}

}  // namespace
}  // namespace reference
