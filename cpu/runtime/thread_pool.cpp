#include "cpu/runtime/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <system_error>

namespace flashport::cpu_runtime {
namespace {

constexpr std::size_t kScratchAlignment = 64;

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
  std::atomic<std::int64_t> next = 0;
  int helpers = 0;  // workers inside run_blocks(), guarded by the pool's mutex
  std::condition_variable idle{};

  void run_blocks(void* scratch) {
    for (;;) {
      const std::int64_t block = next.fetch_add(1, std::memory_order_relaxed);
      if (block >= grid) return;
      kernel(params, block, grid, scratch);
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
  Launch launch{.kernel = kernel, .params = params, .grid = grid, .scratch_bytes = scratch_bytes};
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
  std::unique_lock lock(mutex_);
  std::erase(open_, &launch);
  launch.idle.wait(lock, [&launch] { return launch.helpers == 0; });
  return true;
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !open_.empty(); });
    if (stopping_) return;
    Launch& launch = *open_.front();
    ++launch.helpers;
    lock.unlock();
    if (void* scratch = thread_scratch(launch.scratch_bytes)) launch.run_blocks(scratch);
    lock.lock();
    // No block is left to hand out, or no scratch: either way no further helper is wanted.
    std::erase(open_, &launch);
    // Under the lock: the launch lives on its caller's stack.
    if (--launch.helpers == 0) launch.idle.notify_one();
  }
}

}  // namespace flashport::cpu_runtime
