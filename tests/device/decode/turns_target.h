// The execution model of schedule_test.cpp: a wave whose lanes take turns. As none can wait for another, all of them
// run from the beginning again until what they tell each other has settled, one exchange more with each round.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#define FLASHPORT_COLD inline
#define FLASHPORT_DEVICE inline
#define FLASHPORT_UNROLL(count)

#include "common/device/core/arithmetic.h"  // with the macros above

namespace flashport::turns {

template <class T>
T load_global(const T* address) {
  return *address;
}

inline float reciprocal_approx(float x) { return 1.0f / x; }

inline constexpr int kMostLanes = 64;
inline int kWaveSize = kMostLanes;  // of the launch that is tested

// What the lanes of a wave tell each other, exchange by exchange.
struct Wave {
  std::vector<std::array<std::int64_t, kMostLanes>> told;
};

class Block {
 public:
  Block(std::int64_t index, std::int64_t count, int lane, Wave& wave)
      : index_(index), count_(count), lane_(lane), wave_(wave) {}
  int lane() const { return lane_; }
  std::int64_t index() const { return index_; }
  std::int64_t count() const { return count_; }
  template <class T>
  T uniform(T x) const {
    return x;
  }

  template <class T>
  T wave_exclusive_scan(T value, T& total) const {
    const auto& told = tell(value);
    T before = 0;
    total = 0;
    for (int lane = 0; lane < kWaveSize; ++lane) {
      if (lane < lane_) before += static_cast<T>(told[lane]);
      total += static_cast<T>(told[lane]);
    }
    return before;
  }
  int wave_find(bool found) const {
    const auto& told = tell(found);
    int lane = 0;
    while (lane < kWaveSize - 1 && told[lane] == 0) ++lane;
    return lane;
  }
  int wave_broadcast(int x, int lane) const { return static_cast<int>(tell(x)[lane]); }

 private:
  const std::array<std::int64_t, kMostLanes>& tell(std::int64_t x) const {
    if (wave_.told.size() == exchange_) wave_.told.emplace_back();
    auto& told = wave_.told[exchange_++];
    told[lane_] = x;
    return told;
  }

  std::int64_t index_, count_;
  int lane_;
  Wave& wave_;
  mutable std::size_t exchange_ = 0;
};

}  // namespace flashport::turns
