// The execution model of the tests of decode's schedule: a wave whose lanes take turns. As none can wait for another,
// all of them run from the beginning again until what they tell each other has settled, one exchange more with each
// round. Where threads work on states, a block has one.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/device/core/arrival.h"

#define FLASHPORT_COLD inline
#define FLASHPORT_DEVICE inline
#define FLASHPORT_UNROLL(count)

#include "common/device/core/arithmetic.h"  // with the macros above

namespace flashport::turns {

inline constexpr int kVectorFloats = 4;
inline constexpr int kGroupsAtOnce = 2;
inline constexpr bool kFinerChunks = false;  // whether kernels may ask for them (chunks.h)
inline constexpr bool kHasTeams = false;     // whether blocks of the schedule may share a device block

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
inline float to_float(Half x) { return x.bits; }
inline float to_float(BFloat16 x) { return x.bits; }
inline Half to_half(float x) { return {static_cast<std::uint16_t>(x)}; }
inline BFloat16 to_bfloat16(float x) { return {static_cast<std::uint16_t>(x)}; }

template <class T>
T load_global(const T* address) {
  return *address;
}
inline int recompute(int x) { return x; }
inline void sync_wave() {}
template <class Params>
const Params& reread(const Params& params) {
  return params;
}

// Off by two units in the last place, one way or the other.
inline float reciprocal_approx(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const float to = (bits >> 13 ^ bits >> 19) % 2 == 0 ? 0.0f : x;
  return std::nextafter(std::nextafter(1.0f / x, to), to);
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_full(float x) { return std::log2(x); }
inline float tanh_full(float x) { return std::tanh(x); }
inline float mul_rn(float a, float b) { return a * b; }
inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }

// Floats that a launch may write once each.
struct OnceMemory {
  float* data = nullptr;
  std::vector<int> writes;
  bool fault = false;

  void write(const float* at, int count) {
    for (const float* each = at; each < at + count; ++each) {
      const auto place = static_cast<std::size_t>(each - data);
      fault = fault || each < data || place >= writes.size();
      if (!fault) ++writes[place];
    }
  }
};
inline OnceMemory once_memory;  // of the launch that is tested

inline void load_published_pair(float& x, float& y, const float* from) { x = from[0], y = from[1]; }
inline void load_published_vector(float (&x)[kVectorFloats], const float* from) { std::memcpy(x, from, sizeof x); }
inline void store_published_vector(float* to, const float (&x)[kVectorFloats]) {
  once_memory.write(to, kVectorFloats);
  std::memcpy(to, x, sizeof x);
}

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

  // The block's one thread, when it works on states.
  int thread() const { return 0; }
  int threads() const { return 1; }
  void sync() const {}
  template <class Arrivals>
  unsigned arrive(int count, const Arrivals& arrival) const {
    unsigned reached = 0;
    for (int i = 0; i < count; ++i) {
      const Arrival mine = arrival(i);
      *mine.counter += static_cast<unsigned>(mine.add);
      if (*mine.counter != static_cast<unsigned>(mine.goal)) continue;
      *mine.counter = 0;
      reached |= 1u << i;
    }
    return reached;
  }

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
