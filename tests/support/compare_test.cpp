// The yardstick itself: what compare() lets pass and what it does not.
#include "tests/support/compare.h"

#include <gtest/gtest.h>

#include <cmath>

namespace flashport_test {
namespace {

const std::vector<double> kExact = {1.0, -2.0, 0.5, 0.0};
const std::vector<double> kPlain = {1.001, -2.0, 0.5, 0.0};

TEST(Compare, AllowsHalfAsMuchAgain) {
  EXPECT_EQ(compare({1.0, -2.0014, 0.5, 0.0}, kExact, kPlain, 0).failure, "");
  EXPECT_NE(compare({1.0, -2.0016, 0.5, 0.0}, kExact, kPlain, 0).failure, "");
  EXPECT_EQ(compare({1.0, -2.0016, 0.5, 0.0}, kExact, kPlain, 2e-4).failure, "");
}

TEST(Compare, HoldsTheRootMeanSquareToo) {
  EXPECT_NE(compare({1.0012, -2.0012, 0.5012, 0.0012}, kExact, kPlain, 0).failure, "");
  // The allowance for the last rounding is the maximum's alone.
  EXPECT_NE(compare({1.002, -2.002, 0.502, 0.002}, kExact, kPlain, 0, 1.0).failure, "");
}

TEST(Compare, WantsNanAndInfinityAtEqualPlaces) {
  const std::vector<double> exact = {NAN, INFINITY, -INFINITY, 1.0};
  EXPECT_EQ(compare(exact, exact, exact, 0).failure, "");
  EXPECT_NE(compare({0.0, INFINITY, -INFINITY, 1.0}, exact, exact, 1e9).failure, "");
  EXPECT_NE(compare({NAN, -INFINITY, -INFINITY, 1.0}, exact, exact, 1e9).failure, "");
  EXPECT_NE(compare({NAN, INFINITY, -INFINITY, NAN}, exact, exact, 1e9).failure, "");
}

TEST(Compare, WantsAllElements) { EXPECT_NE(compare({1.0}, kExact, kPlain, 1e9).failure, ""); }

}  // namespace
}  // namespace flashport_test
