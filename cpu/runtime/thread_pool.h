// Runs the blocks of a kernel on a few threads. Blocks of one launch may run in any order and on any number of threads:
// kernels synchronise through atomics, and no block waits for another. So the calling thread runs blocks too, a launch
// ends even if no worker is free, and launches from several threads divide the workers among them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace flashport::cpu_runtime {

using Kernel = void (*)(const void* params, std::int64_t block, std::int64_t grid, void* scratch);

class ThreadPool {
 public:
  // `threads` counts the caller's; the others start with the first launch that can use them.
  explicit ThreadPool(int threads) : threads_(threads) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Runs blocks 0 .. grid - 1 and returns when all are done. `scratch` of a block is 64-byte aligned, `scratch_bytes`
  // long, holds anything and belongs to the thread. False, and nothing has run, if there is no memory for it.
  [[nodiscard]] bool run(Kernel kernel, const void* params, std::int64_t grid, std::size_t scratch_bytes);

 private:
  struct Launch;
  void start_workers();
  void work();

  const int threads_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;  // for the workers; for the callers
  std::deque<Launch*> open_;             // launches that workers may join
  std::vector<std::thread> workers_;
  bool started_ = false;
  bool stopping_ = false;
};

}  // namespace flashport::cpu_runtime
