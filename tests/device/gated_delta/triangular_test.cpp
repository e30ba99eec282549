// The inverse of a unit lower triangular matrix and sums in two floats, as the kernels compute them, against fp64.
#define FLASHPORT_TARGET lanes
#define FLASHPORT_TARGET_HEADER "tests/device/gated_delta/lanes_target.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/device/gated_delta/triangular.h"
#include "common/device/gated_delta/two_float.h"
#include "tests/support/random.h"

namespace flashport::lanes::gated_delta {
namespace {

constexpr int kSize = kChunkTokens, kPitch = TriangleLanes::kPitch;

// (I + a)^-1 column by column
std::vector<double> inverse(const std::vector<float>& a) {
  std::vector<double> x(kSize * kSize, 0.0);
  for (int column = 0; column < kSize; ++column) {
    for (int row = column; row < kSize; ++row) {
      double sum = row == column ? 1 : 0;
      for (int k = column; k < row; ++k) sum -= double{a[row * kPitch + k]} * x[k * kSize + column];
      x[row * kSize + column] = sum;
    }
  }
  return x;
}

// Strictly lower, with `rows` rows that are not zero; NaN on the diagonal and above, where nothing may be read.
std::vector<float> lower(int rows, double size) {
  flashport_test::Random random(static_cast<std::uint64_t>(rows));
  std::vector<float> a(kSize * kPitch, std::numeric_limits<float>::quiet_NaN());
  for (int row = 0; row < kSize; ++row) {
    for (int column = 0; column < row; ++column) {
      a[row * kPitch + column] = row < rows ? static_cast<float>(size * random.normal()) : 0.0f;
    }
  }
  return a;
}

class Triangular : public testing::TestWithParam<int> {};

// Whatever the number of threads: one, fewer than columns, more, and one that divides nothing.
TEST_P(Triangular, InverseIsThatOfFp64) {
  const int threads_of_a_block = GetParam();
  for (int rows : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64}) {
    for (double size : {0.01, 0.2}) {
      const std::vector<float> a = lower(rows, size);
      std::vector<float> x(kSize * kPitch, std::numeric_limits<float>::quiet_NaN());
      run_blocks(1, threads_of_a_block,
                 [&](const Block& block) { invert_unit_lower<TriangleLanes>(block, a.data(), x.data()); });
      const std::vector<double> wanted = inverse(a);
      double largest = 0, error = 0;
      for (int row = 0; row < kSize; ++row) {
        for (int column = 0; column < (row / kSubBlock + 1) * kSubBlock; ++column) {
          const double got = x[row * kPitch + column];
          if (column > row) {
            ASSERT_EQ(got, 0.0) << row << " " << column;
          } else {
            ASSERT_FALSE(std::isnan(got)) << row << " " << column;
          }
          largest = std::max(largest, std::fabs(wanted[row * kSize + column]));
          error = std::max(error, std::fabs(got - wanted[row * kSize + column]));
        }
      }
      EXPECT_LE(error, 4e-6 * largest) << rows << " rows of " << size;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Blocks, Triangular, testing::Values(1, 7, 32, 96));

// A large gate before small ones: their differences keep the digits that a float of that size has not.
TEST(TwoFloat, DifferencesKeepTheirDigits) {
  TwoFloat sum = {};
  std::vector<TwoFloat> sums;
  std::vector<double> exact;
  double total = 0;
  for (int i = 0; i < 64; ++i) {
    const float g = i % 9 == 3 ? -120.0f : -1e-3f * static_cast<float>(i + 1);
    sum = sum + TwoFloat{g, 0.0f};
    total += g;
    sums.push_back(sum);
    exact.push_back(total);
  }
  for (int i = 0; i < 64; ++i) {
    EXPECT_LE(std::fabs(sums[i].lo), std::ldexp(std::fabs(sums[i].hi), -24));
    for (int j = 0; j <= i; ++j) {
      const TwoFloat two = sums[i] - sums[j];
      const double got = double{two.hi} + two.lo, wanted = exact[i] - exact[j];
      ASSERT_NEAR(got, wanted, 1e-10) << i << " " << j;
      ASSERT_NEAR(exp2_approx(two), std::exp2(wanted), 2.5e-7 * std::exp2(wanted) + 1e-37) << i << " " << j;
      const float one = difference(sums[i], sums[j]);
      ASSERT_NEAR(one, wanted, std::ldexp(std::fabs(wanted), -23) + 1e-10) << i << " " << j;
    }
  }
}

TEST(TwoFloat, ToBase2KeepsTheDigitsOfTheExponent) {
  flashport_test::Random random(3);
  for (int i = 0; i < 1000; ++i) {
    const float x = static_cast<float>(random.normal() * std::exp(3 * random.normal()));
    const TwoFloat two = to_base_2(x);
    EXPECT_LE(std::fabs(two.lo), std::ldexp(std::fabs(two.hi), -23));
    ASSERT_NEAR(double{two.hi} + two.lo, x / std::log(2.0), std::ldexp(std::fabs(x), -46)) << x;
  }
}

TEST(TwoFloat, OverflowIsInfinity) { EXPECT_EQ(exp2_approx(TwoFloat{1000.0f, 0.0f}), kInfinity); }

}  // namespace
}  // namespace flashport::lanes::gated_delta
