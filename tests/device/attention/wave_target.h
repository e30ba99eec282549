// A target for tests of what the lanes of a wave find out together: each lane is a thread of the host.
#pragma once

#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#define FLASHPORT_DEVICE inline
#define FLASHPORT_UNROLL(count)

#include "common/device/core/arithmetic.h"  // with the macros above

namespace flashport::wave {

template <class T>
T load_global(const T* address) {
  return *address;
}

inline constexpr int kMostLanes = 64;
inline int kWaveSize = kMostLanes;  // of the wave that is tested

// What lanes tell each other. A lane that is one exchange ahead writes to the other half.
struct Exchange {
  explicit Exchange(int lanes) : barrier(lanes) {}
  std::barrier<> barrier;
  std::array<std::array<int, kMostLanes>, 2> told = {};
};

class Block {
 public:
  Block(int lane, Exchange& exchange) : lane_(lane), exchange_(exchange) {}
  int lane() const { return lane_; }

  int wave_exclusive_scan(int value, int& total) const {
    const auto& told = tell(value);
    int before = 0;
    total = 0;
    for (int lane = 0; lane < kWaveSize; ++lane) {
      if (lane < lane_) before += told[static_cast<std::size_t>(lane)];
      total += told[static_cast<std::size_t>(lane)];
    }
    return before;
  }
  int wave_find(bool found) const {
    const auto& told = tell(found ? 1 : 0);
    return static_cast<int>(std::find(told.begin(), told.begin() + kWaveSize, 1) - told.begin());
  }

 private:
  const std::array<int, kMostLanes>& tell(int x) const {
    auto& told = exchange_.told[static_cast<std::size_t>(half_)];
    half_ = 1 - half_;
    told[static_cast<std::size_t>(lane_)] = x;
    exchange_.barrier.arrive_and_wait();
    return told;
  }

  int lane_;
  Exchange& exchange_;
  mutable int half_ = 0;
};

// f(block) on every lane of a wave of so many lanes; gives what each returns.
template <class Result, class F>
std::vector<Result> run_wave(int lanes, const F& f) {
  kWaveSize = lanes;
  Exchange exchange(lanes);
  std::vector<Result> results(static_cast<std::size_t>(lanes));
  std::vector<std::jthread> threads;
  for (int lane = 0; lane < lanes; ++lane) {
    threads.emplace_back([&, lane] { results[static_cast<std::size_t>(lane)] = f(Block(lane, exchange)); });
  }
  threads.clear();  // joins
  return results;
}

}  // namespace flashport::wave
