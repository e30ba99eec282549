// The execution model of the test of widened rows: threads of a block, each of which comes to a barrier before the next
// begins, as a test calls them.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "tests/device/kv/word_verbs.h"

#include "common/device/core/arrival.h"

#include "common/device/core/arithmetic.h"  // with the macros above

namespace flashport::host_words {

inline constexpr bool kFinerChunks = false;
inline constexpr bool kHasTeams = false;
inline constexpr int kWaveSize = 64;

struct BFloat16 {
  std::uint16_t bits;
};
inline float to_float(BFloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
inline BFloat16 to_bfloat16(float x) { return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16)}; }
template <class T>
T load_global(const T* address) {
  return *address;
}
inline int recompute_scalar(int x) { return x; }
inline void sync_wave() {}
template <class Params>
const Params& reread(const Params& params) {
  return params;
}
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline void sync_shared() {}

struct Words4 {
  unsigned words[4];
};
using GlobalBytes = const char*;
template <int kWords>
struct Words {
  unsigned words[kWords];
  unsigned operator[](int i) const { return words[i]; }
};
template <int kWords>
Words<kWords> load_words(GlobalBytes from) {
  Words<kWords> words;
  std::memcpy(&words, from, sizeof words);
  return words;
}
inline unsigned load_half_word(GlobalBytes from) {
  std::uint16_t half;
  std::memcpy(&half, from, sizeof half);
  return half;
}
inline void await_word(unsigned) {}

struct Block {
  int number, count_of_threads;
  int thread() const { return number; }
  int threads() const { return count_of_threads; }
  int lane() const { return number % kWaveSize; }
  int wave() const { return number / kWaveSize; }
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
};

}  // namespace flashport::host_words
