// num_splits_heuristic against its definition written out naively, and where the answer is known.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include <flashport/decode.h>

namespace flashport {
namespace {

int by_definition(int work, int sms, int blocks, int max_splits) {
  if (static_cast<float>(work) >= 0.8f * static_cast<float>(sms)) return 1;
  std::vector<float> efficiency;
  float best = 0.0f;
  const int limit = std::min(std::min(max_splits, sms), blocks);
  for (int s = 1; s <= limit; ++s) {
    const bool eligible = s == 1 || (blocks + s - 1) / s != (blocks + s - 2) / (s - 1);
    const float waves = static_cast<float>(work * s) / static_cast<float>(sms);
    efficiency.push_back(eligible ? waves / std::ceil(waves) : 0.0f);
    best = std::max(best, efficiency.back());
  }
  for (int s = 1; s <= limit; ++s) {
    if (efficiency[static_cast<std::size_t>(s - 1)] > 0.0f &&
        efficiency[static_cast<std::size_t>(s - 1)] >= 0.85f * best) {
      return s;
    }
  }
  return 1;
}

TEST(NumSplitsHeuristic, AgreesWithItsDefinition) {
  for (int work : {1, 2, 3, 8, 17, 48, 100, 131, 132}) {
    for (int sms : {1, 7, 80, 108, 132, 264, 304}) {
      for (int blocks : {0, 1, 2, 3, 16, 63, 64, 1000, 8192}) {
        for (int most : {1, 2, 16, 128}) {
          EXPECT_EQ(num_splits_heuristic(work, sms, blocks, most), by_definition(work, sms, blocks, most))
              << work << " " << sms << " " << blocks << " " << most;
        }
      }
    }
  }
}

TEST(NumSplitsHeuristic, KnownAnswers) {
  EXPECT_EQ(num_splits_heuristic(106, 132, 64, 128), 1);  // at least 0.8 of the device is busy
  EXPECT_EQ(num_splits_heuristic(48, 108, 64, 128), 2);   // 96 / 108 in one wave
  EXPECT_EQ(num_splits_heuristic(1, 132, 1, 128), 1);     // nothing to split
  EXPECT_EQ(num_splits_heuristic(1, 8, 1000, 128), 7);    // 7 / 8 is within 0.85 of a full wave
}

}  // namespace
}  // namespace flashport
