#include "cpu/runtime/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <system_error>

namespace flashport::cpu_runtime {
namespace {

constexpr std::size_t kScratchAlignment = 64;
constexpr int kPiecesPerThread = 4;
constexpr int kYields = 100;  // about as long as it takes to wake a thread that sleeps

// This thread's scratch, grown to at least `bytes`. Null if there is no memory.
void* thread_scratch(std::size_t bytes) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> scratch;
  thread_local std::size_t capacity = 0;
  if (scratch == nullptr || capacity < bytes) {
    const std::size_t wanted = std::max<std::size_t>((bytes + kScratchAlignment - 1) / kScratchAlignment, 1);
    scratch.reset();
    scratch.reset(std::aligned_alloc(kScratchAlignment, wanted * kScratchAlignment));
    capacity = scratch == nullptr ? 0 : wanted * kScratchAlignment;
  }
  return scratch.get();
}

}  // namespace

struct ThreadPool::Launch {
  Kernel kernel;
  const void* params;
  std::int64_t grid;
  std::size_t scratch_bytes;
  std::int64_t pieces;  // into which what is left is cut whenever a thread takes one
  std::atomic<std::int64_t> next = 0;
  std::atomic<int> helpers = 0;  // workers inside run_blocks(); they join under the pool's mutex

  bool has_blocks() const { return next.load(std::memory_order_relaxed) < grid; }

  // Runs of neighbours, for neighbours read neighbouring memory; towards the end single blocks, to end together.
  void run_blocks(void* scratch) {
    std::int64_t first = next.load(std::memory_order_relaxed);
    while (first < grid) {
      const std::int64_t last = first + std::max<std::int64_t>((grid - first) / pieces, 1);
      if (!next.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
      for (std::int64_t block = first; block < last; ++block) kernel(params, block, grid, scratch);
      first = next.load(std::memory_order_relaxed);
    }
  }
};

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::start_workers() {
  started_ = true;
  try {
    while (static_cast<int>(workers_.size()) < threads_ - 1) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    // The system gives no more threads: those that started and the caller do the work.
  }
}

bool ThreadPool::run(Kernel kernel, const void* params, std::int64_t grid, std::size_t scratch_bytes) {
  void* scratch = thread_scratch(scratch_bytes);
  if (scratch == nullptr) return false;
  Launch launch{.kernel = kernel,
                .params = params,
                .grid = grid,
                .scratch_bytes = scratch_bytes,
                .pieces = kPiecesPerThread * threads_};
  if (grid <= 1 || threads_ <= 1) {
    launch.run_blocks(scratch);
    return true;
  }
  std::int64_t wanted;
  {
    const std::lock_guard lock(mutex_);
    if (!started_) start_workers();
    open_.push_back(&launch);
    wanted = std::min<std::int64_t>(grid - 1, static_cast<std::int64_t>(workers_.size()));
  }
  for (std::int64_t i = 0; i < wanted; ++i) wake_.notify_one();
  launch.run_blocks(scratch);
  {
    const std::lock_guard lock(mutex_);
    std::erase(open_, &launch);
  }
  const auto idle = [&launch] { return launch.helpers.load(std::memory_order_acquire) == 0; };
  for (int i = 0; i < kYields; ++i) {
    if (idle()) return true;
    std::this_thread::yield();
  }
  std::unique_lock lock(mutex_);
  idle_.wait(lock, idle);
  return true;
}

void ThreadPool::work() {
  const auto has_blocks = [](const Launch* launch) { return launch->has_blocks(); };
  std::unique_lock lock(mutex_);
  for (;;) {
    auto open = open_.end();
    wake_.wait(lock, [&] {
      open = std::find_if(open_.begin(), open_.end(), has_blocks);
      return stopping_ || open != open_.end();
    });
    if (stopping_) return;
    Launch& launch = **open;
    void* scratch = thread_scratch(launch.scratch_bytes);
    if (scratch == nullptr) {
      open_.erase(open);  // its caller works on it
      continue;
    }
    launch.helpers.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    launch.run_blocks(scratch);
    launch.helpers.fetch_sub(1, std::memory_order_release);  // the launch, on its caller's stack, may be gone now
    lock.lock();
    idle_.notify_all();
  }
}

}  // namespace flashport::cpu_runtime
