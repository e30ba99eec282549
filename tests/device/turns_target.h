// The execution model of schedule_test.cpp: a block whose threads take turns. As none can wait for another, all of them
// run from the beginning again until what they tell each other in shared memory (ScanScratch) has settled: the values
// that are scanned after the first round, the sequence that one of them finds after the second.
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

class Block {
 public:
  Block(std::int64_t index, std::int64_t count, int thread) : index_(index), count_(count), thread_(thread) {}
  int thread() const { return thread_; }
  std::int64_t index() const { return index_; }
  std::int64_t count() const { return count_; }
  void sync() const {}
  template <class T>
  T uniform(T x) const {
    return x;
  }

 private:
  std::int64_t index_, count_;
  int thread_;
};

template <int kThreads>
struct ScanScratch {
  std::array<std::int64_t, kThreads> values{};
  std::int64_t start = 0;
  int seq = 0;
};

template <int kThreads>
std::int64_t block_exclusive_scan(const Block& block, ScanScratch<kThreads>& scratch, std::int64_t value,
                                  std::int64_t& total) {
  scratch.values[block.thread()] = value;
  std::int64_t before = 0;
  total = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    if (thread < block.thread()) before += scratch.values[thread];
    total += scratch.values[thread];
  }
  return before;
}

}  // namespace flashport::turns
