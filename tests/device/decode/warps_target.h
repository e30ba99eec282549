// The execution model of the test of CUDA's producers of segments: warps whose lanes are threads of the host. Lanes
// wait for each other where they exchange something, and for barriers in shared memory, whose phases are counted as PTX
// does. Copies are done when somebody waits for them, so that what is read too early is not there.
#pragma once

#include <barrier>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "tests/device/kv/word_verbs.h"

#include "common/device/core/arrival.h"

#define FLASHPORT_COLD inline

#include "common/device/core/arithmetic.h"  // with the macros above

struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace flashport::host_warps {

using namespace host_words;  // the verbs of words

inline constexpr int kWaveSize = 32;
inline constexpr int kVectorFloats = 4;
inline constexpr int kGroupsAtOnce = 2;
inline constexpr bool kFinerChunks = true;

struct BFloat16 {
  std::uint16_t bits;
};
inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
inline BFloat16 to_bfloat16(float x) { return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16)}; }

// The lanes of a warp; each is a thread.
struct Warp {
  std::barrier<> meeting{kWaveSize};
  std::uint64_t told[kWaveSize] = {};
};
struct Copy {
  void* to;
  const void* from;
};
inline thread_local Warp* my_warp = nullptr;
inline thread_local int my_thread = 0;
inline thread_local std::vector<Copy> my_copies;

inline void finish_copies() {
  for (const Copy& copy : my_copies) std::memcpy(copy.to, copy.from, 16);
  my_copies.clear();
}
inline void copy_async_unit(void* to, const void* from) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
    throw std::logic_error("a copy that the hardware would refuse");
  }
  my_copies.push_back({to, from});
}
inline void await_copies() { finish_copies(); }

template <class T>
T tell(T x, int lane) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  my_warp->told[my_thread % kWaveSize] = bits;
  my_warp->meeting.arrive_and_wait();
  std::memcpy(&x, &my_warp->told[lane], sizeof x);
  my_warp->meeting.arrive_and_wait();
  return x;
}
inline void __syncwarp() { my_warp->meeting.arrive_and_wait(); }
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return tell(x, lane);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  my_warp->told[my_thread % kWaveSize] = x;
  my_warp->meeting.arrive_and_wait();
  unsigned all = 0;
  for (int lane = 0; lane < kWaveSize; ++lane) all |= static_cast<unsigned>(my_warp->told[lane]) << lane;
  my_warp->meeting.arrive_and_wait();
  return all;
}
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((std::uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const std::uint64_t both = std::uint64_t{high} << 32 | low;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) picked |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return picked;
}

// What a barrier of shared memory holds: arrivals that a phase has, those that this one lacks, and its number.
struct Mbarrier {
  std::uint16_t count, missing;
  std::uint32_t phase;
};
static_assert(sizeof(Mbarrier) == sizeof(std::uint64_t));
inline std::mutex mbarrier_mutex;
inline std::condition_variable mbarrier_changed;
inline void mbarrier_init(std::uint64_t* barrier, int count) {
  *barrier =
      std::bit_cast<std::uint64_t>(Mbarrier{static_cast<std::uint16_t>(count), static_cast<std::uint16_t>(count), 0});
}
inline void mbarrier_arrive(std::uint64_t* barrier) {
  const std::lock_guard lock(mbarrier_mutex);
  auto now = std::bit_cast<Mbarrier>(*barrier);
  if (--now.missing == 0) now = {now.count, now.count, now.phase + 1};
  *barrier = std::bit_cast<std::uint64_t>(now);
  mbarrier_changed.notify_all();
}
inline void mbarrier_arrive_on_copies(std::uint64_t* barrier) {
  finish_copies();
  mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_wave(std::uint64_t* barrier) {
  __syncwarp();
  if (my_thread % kWaveSize == 0) mbarrier_arrive(barrier);
}
inline void mbarrier_wait(std::uint64_t* barrier, unsigned parity) {
  std::unique_lock lock(mbarrier_mutex);
  const bool done = mbarrier_changed.wait_for(lock, std::chrono::seconds(60),
                                              [&] { return (std::bit_cast<Mbarrier>(*barrier).phase & 1) != parity; });
  if (!done) {
    std::fprintf(stderr, "a barrier was waited for in vain\n");
    std::abort();
  }
}
template <int kStages>
struct PipelineState {
  int stage = 0;
  unsigned phase = 0;
  void next() {
    if (++stage < kStages) return;
    stage = 0;
    phase ^= 1;
  }
};

template <class T>
T load_global(const T* address) {
  return *address;
}
inline int recompute(int x) { return x; }
template <class Params>
const Params& reread(const Params& params) {
  return params;
}
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_full(float x) { return std::log2(x); }
inline float mul_rn(float a, float b) { return a * b; }
inline void load_published_pair(float& x, float& y, const float* from) { x = from[0], y = from[1]; }
inline void load_published_vector(float (&x)[kVectorFloats], const float* from) { std::memcpy(x, from, sizeof x); }
inline void store_published_vector(float* to, const float (&x)[kVectorFloats]) { std::memcpy(to, x, sizeof x); }

class Block {
 public:
  Block(unsigned*, int first, int threads, int) : first_(first), threads_(threads) {}
  int thread() const { return my_thread - first_; }
  int threads() const { return threads_; }
  int lane() const { return my_thread % kWaveSize; }
  int wave() const { return thread() / kWaveSize; }
  int team() const { return 0; }
  void sync() const {}
  // What only the search for a block's part of the line needs.
  std::int64_t index() const { return 0; }
  std::int64_t count() const { return 1; }
  template <class T>
  T uniform(T x) const {
    return x;
  }
  template <class T>
  T wave_exclusive_scan(T, T& total) const {
    return total = T{};
  }
  int wave_find(bool) const { return 0; }
  int wave_broadcast(int x, int) const { return x; }

 private:
  int first_, threads_;
};

}  // namespace flashport::host_warps
