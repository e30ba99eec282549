// A target for tests of what a block does together: its threads are threads of the host, a lane takes one column, and
// sync() is a barrier.
#pragma once

#include <barrier>
#include <cmath>
#include <thread>
#include <vector>

#include "common/device/gated_delta_chunk_params.h"

#define FLASHPORT_DEVICE inline

namespace flashport::lanes {

inline constexpr float kInfinity = __builtin_huge_valf();

FLASHPORT_DEVICE float exp_full(float x) { return std::exp(x); }

using LaneColumns = float;
inline constexpr int kLaneColumns = 1;
inline constexpr int kTrianglePitch = kChunkTokens + 4;
FLASHPORT_DEVICE LaneColumns load_lane_columns(const float* from) { return *from; }
FLASHPORT_DEVICE void store_lane_columns(float* to, LaneColumns x) { *to = x; }
FLASHPORT_DEVICE LaneColumns multiply_add(float factor, LaneColumns x, LaneColumns sum) {
  return std::fma(factor, x, sum);
}
FLASHPORT_DEVICE LaneColumns unit_lane_columns(int place) { return place == 0 ? 1.0f : 0.0f; }

class Block {
 public:
  Block(int thread, int threads, std::barrier<>& barrier) : thread_(thread), threads_(threads), barrier_(barrier) {}
  int thread() const { return thread_; }
  int threads() const { return threads_; }
  void sync() const { barrier_.arrive_and_wait(); }

 private:
  int thread_, threads_;
  std::barrier<>& barrier_;
};

// f(block) on every thread of one block.
template <class F>
void run_block(int threads, const F& f) {
  std::barrier<> barrier(threads);
  std::vector<std::jthread> all;
  for (int thread = 0; thread < threads; ++thread) {
    all.emplace_back([&, thread] { f(Block(thread, threads, barrier)); });
  }
}

}  // namespace flashport::lanes
