// What every format widens to against the reference's codecs: rows of random bytes, in which blocks have scales of
// ordinary size.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <type_traits>
#include <vector>

#define FLASHPORT_TARGET host_words
#define FLASHPORT_WORDS_HEADER "tests/device/kv/word_verbs.h"
#include "cuda/decode/widen_block.h"
#include "tests/device/kv/random_rows.h"

namespace flashport::host_words {
namespace {

constexpr int kDims = 192;

struct Row {
  const unsigned char* bytes;
  unsigned half(int byte) const { return reference::load_as<std::uint16_t>(bytes + byte); }
  unsigned word(int byte) const {
    EXPECT_EQ(byte % 2, 0);
    return reference::load_as<std::uint32_t>(bytes + byte);
  }
  unsigned crossed_word(int byte) const { return pick_bytes<0x03010200>(0, word(byte)); }
};

double half_at(const unsigned (&x)[8], int i) {
  return reference::decode(x[i / 2] >> i % 2 * 16 & 0xffff, reference::kHalf);
}

TEST(Widen, RowsAreTheReferencesRoundedOnce) {
  std::mt19937 random(1);
  for (const Format& f : kFormats) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      const std::vector<unsigned char> bytes = random_row(f.format, kDims, random);
      for (int unit = 0; unit < kDims / kv::kUnitValues; ++unit) {
        unsigned x[8], brain[8];
        const Row row{bytes.data()};
        kv::widen_unit(x, f.format, row, unit);
        kv::with_format(f.format, [&](auto constant) {
          [[maybe_unused]] constexpr KvFormat kFormat = constant;
          for (int i = 0; i < 4; ++i) {
            const Words2 four =
                kv::load_four<MathType::kBf16, kFormat, false>(row, kv::kUnitValues * unit + 4 * i, 0.0f);
            brain[2 * i] = four.x;
            brain[2 * i + 1] = four.y;
          }
        });
        for (int i = 0; i < kv::kUnitValues; ++i) {
          const double exact = stored_value(bytes.data(), f.type, kv::kUnitValues * unit + i);
          const double want = reference::round_to(exact, reference::Type::kF16), got = half_at(x, i);
          ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want)))
              << kv_format_trait(f.format).name << ", value " << kv::kUnitValues * unit + i << ": " << got
              << ", expected " << want;
          const double rounded = reference::round_to(exact, reference::Type::kBF16);
          const double short_one = reference::decode(brain[i / 2] >> i % 2 * 16 & 0xffff, reference::kBrain);
          ASSERT_TRUE(short_one == rounded || (std::isnan(short_one) && std::isnan(rounded)));
        }
      }
    }
  }
}

// Two values of 16 bits; zero has no sign.
unsigned without_sign_of_zero(unsigned two) {
  for (const unsigned half : {0xffffu, 0xffff0000u}) {
    if ((two & half & 0x7fff7fffu) == 0) two &= ~half;
  }
  return two;
}

TEST(Widen, BlocksAreTheirValues) {
  std::mt19937 random(3);
  for (const Format& f : kFormats) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      const std::vector<unsigned char> bytes = random_row(f.format, kDims, random);
      kv::with_format(f.format, [&](auto constant) {
        [[maybe_unused]] constexpr KvFormat kFormat = constant;
        const Row row{bytes.data()};
        const auto expect_same = [&](auto math) {
          constexpr MathType kMath = decltype(math)::value;
          Words2 block[8];
          kv::load_block<kMath, kFormat>(block, row);
          for (int i = 0; i < 8; ++i) {
            const Words2 four = kv::load_four<kMath, kFormat, false>(row, 4 * i, 1.0f);
            EXPECT_EQ(without_sign_of_zero(block[i].x), without_sign_of_zero(four.x))
                << kv_format_trait(f.format).name << ", value " << 4 * i;
            EXPECT_EQ(without_sign_of_zero(block[i].y), without_sign_of_zero(four.y))
                << kv_format_trait(f.format).name << ", value " << 4 * i + 2;
          }
        };
        expect_same(std::integral_constant<MathType, MathType::kFp16>());
        expect_same(std::integral_constant<MathType, MathType::kBf16>());
      });
    }
  }
}

// The sum of two halves is the factor to one part in 2^21, so products differ from the exact ones by hardly more than
// the rounding: of every code that has factors beside it, by factors of all magnitudes, which for e5m2 are about 2^-16.
TEST(Widen, FactorsKeepTheirPrecision) {
  std::mt19937 random(2);
  std::uniform_real_distribution<float> any(1.0f, 2.0f);
  for (int repeat = 0; repeat < 20000; ++repeat) {
    const float factor = std::ldexp(any(random), static_cast<int>(random() % 32) - 30);
    const reference::Type type =
        std::array{reference::Type::kE5M2, reference::Type::kE4M3, reference::Type::kI8}[repeat % 3];
    const unsigned char code_bytes[8] = {static_cast<unsigned char>(random())};  // the widest type's, for the compiler
    const double value = reference::read_number(code_bytes, type), exact = value * static_cast<double>(factor);
    if (!(std::fabs(exact) < 65504)) continue;
    const auto bits = reference::encode(value, reference::kHalf);
    const unsigned code = kv::multiply_halves(bits | bits << 16, kv::factor_of(factor));
    // What the second half adds, and what is no normal number, is rounded to a multiple of 2^-24.
    const double unit = std::ldexp(1.0, exact == 0 ? -24 : std::max(std::ilogb(exact) - 10, -24));
    const double most = 0.502 * unit + 0x1p-25;
    EXPECT_LE(std::fabs(reference::decode(code & 0xffff, reference::kHalf) - exact), most) << value << " * " << factor;
    EXPECT_EQ(code & 0xffff, code >> 16);
  }
}

}  // namespace
}  // namespace flashport::host_words
