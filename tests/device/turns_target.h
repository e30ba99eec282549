// The execution model of schedule_test.cpp: a wave whose lanes take turns. As none can wait for another, all of them run
// from the beginning again until what they tell each other has settled: the values that are scanned after the first
// round, what one of them finds after the second.
#pragma once

#include <array>
#include <cstdint>

#define FLASHPORT_COLD inline
#define FLASHPORT_DEVICE inline

namespace flashport::turns {

template <class T>
T minimum(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T maximum(T a, T b) {
  return a < b ? b : a;
}
template <class T>
T load_global(const T* address) {
  return *address;
}

inline float reciprocal_approx(float x) { return 1.0f / x; }

inline constexpr int kMostLanes = 64;
inline int kWaveSize = kMostLanes;  // of the launch that is tested

// What the lanes of a wave tell each other.
struct Wave {
  std::array<std::int64_t, kMostLanes> scanned{};
  std::array<int, 8 * kMostLanes> told{};  // of up to eight broadcasts
  int finder = 0;
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

  std::int64_t wave_exclusive_scan(std::int64_t value, std::int64_t& total) const {
    wave_.scanned[lane_] = value;
    std::int64_t before = 0;
    total = 0;
    for (int lane = 0; lane < kWaveSize; ++lane) {
      if (lane < lane_) before += wave_.scanned[lane];
      total += wave_.scanned[lane];
    }
    return before;
  }
  int wave_find(bool found) const {
    if (found) wave_.finder = lane_;
    return wave_.finder;
  }
  int wave_broadcast(int x, int lane) const {
    int* told = &wave_.told[broadcasts_++ * kMostLanes];
    told[lane_] = x;
    return told[lane];
  }

 private:
  std::int64_t index_, count_;
  int lane_;
  Wave& wave_;
  mutable int broadcasts_ = 0;
};

}  // namespace flashport::turns
