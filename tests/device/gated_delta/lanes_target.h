// A target for tests of what a block does together: its threads are threads of the host, each a wave of its own, a lane
// takes one column, and sync() is a barrier.
#pragma once

#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#include "common/device/gated_delta/chunk_params.h"

#define FLASHPORT_DEVICE inline
#define FLASHPORT_UNROLL(count)

#include "common/device/core/arithmetic.h"  // with the macros above

namespace flashport::lanes {

inline constexpr int kWaveSize = 1;

template <class T>
T load_global(const T* address) {
  return *address;
}

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
FLASHPORT_DEVICE float to_float(Half) { return kInfinity; }  // no test has any
FLASHPORT_DEVICE Half to_half(float) { return {}; }
FLASHPORT_DEVICE float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }
FLASHPORT_DEVICE BFloat16 to_bfloat16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

FLASHPORT_DEVICE float exp_full(float x) { return std::exp(x); }
FLASHPORT_DEVICE float log1p_full(float x) { return std::log1p(x); }
FLASHPORT_DEVICE float sqrt_full(float x) { return std::sqrt(x); }

FLASHPORT_DEVICE float exp2_approx(float x) { return std::exp2(x); }
FLASHPORT_DEVICE float mul_rn(float a, float b) { return a * b; }
FLASHPORT_DEVICE float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }

struct TriangleLanes {
  using Columns = float;
  static constexpr int kColumns = 1;
  static constexpr int kPitch = kChunkTokens + 4;

  static float load(const float* from) { return *from; }
  static void store(float* to, float x) { *to = x; }
  static float multiply_add(float factor, float x, float sum) { return std::fma(factor, x, sum); }
  static float basis(int column) { return column == 0 ? 1.0f : 0.0f; }
};

class Block {
 public:
  Block(int thread, int threads, std::barrier<>& barrier, std::int64_t index, std::int64_t count)
      : thread_(thread), threads_(threads), barrier_(barrier), index_(index), count_(count) {}
  int thread() const { return thread_; }
  int threads() const { return threads_; }
  int lane() const { return 0; }
  int wave() const { return thread_; }
  std::int64_t index() const { return index_; }
  std::int64_t count() const { return count_; }
  void sync() const { barrier_.arrive_and_wait(); }
  template <class T>
  T uniform(T x) const {
    return x;
  }
  template <class T>
  T wave_exclusive_scan(T x, T& total) const {
    total = x;
    return 0;
  }

 private:
  int thread_, threads_;
  std::barrier<>& barrier_;
  std::int64_t index_, count_;
};

// f(block) on every thread of `blocks` blocks, one after the other.
template <class F>
void run_blocks(std::int64_t blocks, int threads, const F& f) {
  std::barrier<> barrier(threads);
  std::vector<std::jthread> all;
  for (int thread = 0; thread < threads; ++thread) {
    all.emplace_back([&, thread] {
      for (std::int64_t index = 0; index < blocks; ++index) {
        f(Block(thread, threads, barrier, index, blocks));
        barrier.arrive_and_wait();
      }
    });
  }
}

}  // namespace flashport::lanes
