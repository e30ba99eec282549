// What the machine knows of a launch (machine.h), for the files that are its parts.
#pragma once

#include <array>
#include <deque>
#include <utility>

#include "tests/device/machine/fiber.h"
#include "tests/device/machine/machine.h"

namespace flashport::machine {

inline constexpr unsigned kSharedWindow = 0x1000;  // 32-bit addresses of shared memory begin here: 0 is none of them
inline constexpr unsigned char kPoison = 0xff;     // NaN as fp16, bf16 and fp32

// splitmix64
struct Lots {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t x = state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  std::size_t below(std::size_t count) { return next() % count; }
};

struct Block;
struct Copy {
  char* to;
  const void* from;
  int unit, bytes;
  int group;  // of its lane
};
// Copies that one barrier is told of, or none yet.
struct Batch {
  std::vector<Copy> copies;
  std::uint64_t* barrier;
};
struct Box {
  Block* block;
  char* to;
  int bytes;
  std::function<void(char*)> read;
  std::uint64_t* barrier;
  Block* source = nullptr;  // the block whose shared memory it is read from
};

enum class State { kReady, kInWarp, kAtBarrier, kAtPhase, kAtCluster, kDone };

struct Lane {
  Fiber fiber;
  Block* block = nullptr;
  int thread = 0;
  State state = State::kReady;
  const void* waits_at = nullptr;
  unsigned parity = 0;
  std::vector<Copy> open;     // since the last arrival
  int groups = 0;             // of copies, that were committed
  std::deque<Batch> flights;  // oldest first
};

struct Warp {
  std::uint64_t rank = 0;  // of the ready ones the highest runs, while ranks count
  const char* what = nullptr;
  int came = 0, ready = kLanes;
  bool is_queued = true;
  std::array<void*, kLanes> operands;
  Products products;
};

struct NamedBarrier {
  int came = 0, goal = 0;
};

struct Block {
  std::int64_t index = 0;
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  std::array<NamedBarrier, kNamedBarriers> barriers;
  char* shared = nullptr;
  std::size_t shared_bytes = 0;
  std::vector<bool> unseen;  // for each word of shared memory: AsyncView
  bool has_unseen = false;
  int alive = 0;
  int at_cluster = 0;  // lanes that have come to the cluster's barrier; of its first block, of all blocks
};

// Arrivals that a phase has, those that this one lacks, and its number; the bytes that this one lacks, or that have
// landed before they were expected.
struct Mbarrier {
  unsigned count : 11, missing : 11, phase : 10;
  int bytes;
};
static_assert(sizeof(Mbarrier) == sizeof(std::uint64_t));

struct Machine {
  const Launch* launch = nullptr;
  bool kernel_before_runs = false;
  Lots lots{0};
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::pair<Block*, int>> ready;  // warps with lanes that are
  std::vector<Lane*> in_flight;               // lanes with flights
  std::vector<Box> boxes;                     // that have not landed
  std::vector<Warp*> multiplying;             // warps with products whose operands were not read
  Lane* lane = nullptr;
  Fiber scheduler;
  std::string error;
  // How the next steps are drawn: in some spells by ranks, so that a warp may stand still until all others wait for it,
  // and copies land at once, at times, or when nothing else can happen.
  int steps_left = 0, landing = 0;  // landing: of four steps
  bool by_rank = false;
};
extern Machine g_machine;

// The lane that runs; what wakes one, and what makes it wait.
inline Lane& me() { return *g_machine.lane; }
void wake(Lane& lane);
void wait(State state, const void* at);

// As mbarrier's pending count and tx-count do.
void count_at(Block& block, std::uint64_t* barrier, unsigned arrivals, int bytes);

// The bits of a shared address that say which block of its cluster has it. Those of blocks alone have none.
inline constexpr int kRankShift = 24;
inline int cluster_blocks() { return g_machine.launch->cluster; }
inline int rank_of(const Block& block) { return static_cast<int>(block.index % cluster_blocks()); }

}  // namespace flashport::machine
