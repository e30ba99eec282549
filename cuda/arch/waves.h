// A block of warps, and a warp by itself, as common/device knows them. block.h, which has what they are made of,
// includes this.
#pragma once

namespace flashport::FLASHPORT_TARGET {

// A block, or some waves of it that have one task: `threads` threads from `first` on, with a barrier of their own.
class Block {
 public:
  FLASHPORT_DEVICE explicit Block(unsigned* flag) : Block(flag, 0, static_cast<int>(blockDim.x), 0) {}
  // All lanes of a wave construct it together, which makes the wave's number uniform. A device block has `teams` such
  // Blocks, neighbours, and this is number `team`.
  FLASHPORT_DEVICE Block(unsigned* flag, int first, int threads, int barrier, int team = 0, int teams = 1)
      : team_(team),
        teams_(teams),
        index_(static_cast<int>(blockIdx.x) * teams + team),
        flag_(flag),
        first_(first),
        threads_(threads),
        barrier_(barrier),
        wave_(__shfl_sync(~0u, (static_cast<int>(threadIdx.x) - first) / kWaveSize, 0)) {
    __builtin_assume(wave_ >= 0 && wave_ < 32);
    __builtin_assume(team_ >= 0 && team_ < teams);
  }

  FLASHPORT_DEVICE int thread() const { return static_cast<int>(threadIdx.x) - first_; }
  FLASHPORT_DEVICE int threads() const { return threads_; }
  FLASHPORT_DEVICE int lane() const { return static_cast<int>(threadIdx.x % kWaveSize); }
  FLASHPORT_DEVICE int wave() const { return wave_; }
  FLASHPORT_DEVICE std::int64_t index() const { return index_; }
  FLASHPORT_DEVICE std::int64_t count() const { return std::int64_t{gridDim.x} * teams_; }
  FLASHPORT_DEVICE int team() const { return team_; }
  FLASHPORT_DEVICE void sync() const {
    if (threads_ == kWaveSize) {
      __syncwarp();
    } else {
      barrier_await(barrier_, threads_);
    }
  }
  template <class T>
  FLASHPORT_DEVICE T uniform(T x) const {
    return x;
  }

  // The sum of the lanes before this one, and of all.
  template <class T>
  FLASHPORT_DEVICE T wave_exclusive_scan(T x, T& total) const {
    return exclusive_sum(x, total);
  }
  // The number of the one lane that has found something; the value of a lane.
  FLASHPORT_DEVICE int wave_find(bool found) const { return __ffs(static_cast<int>(__ballot_sync(~0u, found))) - 1; }
  FLASHPORT_DEVICE int wave_broadcast(int x, int lane) const { return __shfl_sync(~0u, x, lane); }

  // Releases what the block has written and adds arrival(0) .. arrival(count - 1) to their signal counters, which are
  // all different. Bit i of the result says that addition i completed its counter's goal. Exactly one of the blocks
  // that add to a counter gets that bit; it acquires what all the others have written, and sets the counter back to
  // zero.
  template <class Arrivals>
  FLASHPORT_DEVICE unsigned arrive(int count, const Arrivals& arrival) const {
    Arrival mine = arrival(minimum(lane(), count - 1));  // a lane for each counter, all at once
    if (lane() >= count) mine.add = 0;
    sync();
    if (wave() == 0) {
      const unsigned reached = add_arrivals(mine);
      if (lane() == 0) *flag_ = reached;
    }
    sync();
    return *flag_;
  }

 private:
  int team_, teams_;
  int index_;
  unsigned* flag_;  // in shared memory
  int first_, threads_, barrier_;
  int wave_;
};

// A wave that has a task by itself, with what a Block has for threads that share a task.
class Wave {
 public:
  FLASHPORT_DEVICE static int thread() { return static_cast<int>(threadIdx.x % kWaveSize); }
  FLASHPORT_DEVICE static constexpr int threads() { return kWaveSize; }
  FLASHPORT_DEVICE static void sync() { __syncwarp(); }
  // As Block::arrive().
  template <class Arrivals>
  FLASHPORT_DEVICE static unsigned arrive(int count, const Arrivals& arrival) {
    Arrival mine = arrival(minimum(thread(), count - 1));
    if (thread() >= count) mine.add = 0;
    __syncwarp();
    return add_arrivals(mine);
  }
};

}  // namespace flashport::FLASHPORT_TARGET
