#include "tests/device/machine/machine.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "tests/device/machine/memory.h"
#include "tests/device/machine/state.h"

namespace flashport::machine {

Machine g_machine;

namespace {

Warp& my_warp() { return me().block->warps[me().thread / kLanes]; }

void switch_away() {
  Lane* lane = g_machine.lane;
  switch_fiber(lane->fiber, g_machine.scheduler);
  g_machine.lane = lane;
}

void queue(Block& block, int number) {
  Warp& warp = block.warps[number];
  if (warp.is_queued || warp.ready == 0) return;
  warp.is_queued = true;
  g_machine.ready.emplace_back(&block, number);
}

}  // namespace

void wake(Lane& lane) {
  const int number = lane.thread / kLanes;
  lane.state = State::kReady;
  ++lane.block->warps[number].ready;
  queue(*lane.block, number);
}
void wait(State state, const void* at) {
  me().state = state;
  me().waits_at = at;
  switch_away();
}

void count_at(Block& block, std::uint64_t* barrier, unsigned arrivals, int bytes) {
  auto now = std::bit_cast<Mbarrier>(*barrier);
  if (now.count == 0 || now.missing < arrivals || now.missing > now.count) {
    g_machine.error = "an arrival at a barrier that is none";
    return;
  }
  now.missing -= arrivals;
  now.bytes += bytes;
  const bool completes = now.missing == 0 && now.bytes == 0;
  if (completes) {
    now.missing = now.count;
    ++now.phase;
  }
  *barrier = std::bit_cast<std::uint64_t>(now);
  if (!completes) return;
  for (Lane& lane : block.lanes) {
    if (lane.state == State::kAtPhase && lane.waits_at == barrier) wake(lane);
  }
}

namespace {

void arrive_at(Block& block, std::uint64_t* barrier) { count_at(block, barrier, 1, 0); }

void set_unseen(Block& block, const char* to, int bytes, bool unseen) {
  const auto first = block.unseen.begin() + (to - block.shared) / 4;
  std::fill(first, first + (bytes + 3) / 4, unseen);
}
void land(Block& block, const Copy& copy) {
  std::memcpy(copy.to, copy.from, copy.bytes);
  std::memset(copy.to + copy.bytes, 0, copy.unit - copy.bytes);
  set_unseen(block, copy.to, copy.unit, true);
  block.has_unseen = true;
}
void land_oldest(Lane& lane) {
  Batch batch = std::move(lane.flights.front());
  lane.flights.pop_front();
  for (const Copy& copy : batch.copies) land(*lane.block, copy);
  arrive_at(*lane.block, batch.barrier);
  if (lane.flights.empty()) std::erase(g_machine.in_flight, &lane);
}
void multiply_oldest(Warp& warp) {
  warp.products.multiply_oldest();
  if (warp.products.are_multiplied()) std::erase(g_machine.multiplying, &warp);
}

std::size_t count_in_flight() {
  return g_machine.in_flight.size() + g_machine.boxes.size() + g_machine.multiplying.size();
}
// Something that is in flight.
void land_one() {
  auto& m = g_machine;
  std::size_t drawn = m.lots.below(count_in_flight());
  if (drawn < m.in_flight.size()) return land_oldest(*m.in_flight[drawn]);
  drawn -= m.in_flight.size();
  if (drawn >= m.boxes.size()) return multiply_oldest(*m.multiplying[drawn - m.boxes.size()]);
  const Box box = std::move(m.boxes[drawn]);
  m.boxes.erase(m.boxes.begin() + static_cast<std::ptrdiff_t>(drawn));
  box.read(box.to);
  set_unseen(*box.block, box.to, box.bytes, false);
  count_at(*box.block, box.barrier, 0, -box.bytes);
}

// What the block has asked for and has not waited for.
const char* left_in_flight(const Block& block) {
  for (const Lane& lane : block.lanes) {
    if (!lane.flights.empty()) return "a block has ended before its copies";
  }
  for (const Box& box : g_machine.boxes) {
    if (box.block == &block || box.source == &block) return "a block has ended before its boxes";
  }
  for (const Warp& warp : block.warps) {
    if (!warp.products.empty()) return "a block has ended before its products";
  }
  return nullptr;
}

void run_lane() {
  g_machine.launch->kernel(me().block->shared);
  Lane& lane = me();
  if (!lane.open.empty() && g_machine.error.empty()) g_machine.error = "a lane has ended before its copies";
  lane.state = State::kDone;
  --lane.block->alive;
  switch_fiber(lane.fiber, g_machine.scheduler);
}

std::string where(const Block& block) {
  std::string text;
  for (std::size_t first = 0; first < block.lanes.size(); first += kLanes) {
    text += "\n  block " + std::to_string(block.index) + ", warp " + std::to_string(first / kLanes) + ":";
    std::string last;
    for (std::size_t i = first; i < first + kLanes; ++i) {
      const Lane& lane = block.lanes[i];
      std::string its;
      const auto offset = static_cast<const char*>(lane.waits_at) - block.shared;
      switch (lane.state) {
        case State::kReady: its = "ready"; break;
        case State::kInWarp: its = std::string("at ") + block.warps[first / kLanes].what; break;
        case State::kAtBarrier:
          its = "at barrier " + std::to_string(static_cast<const NamedBarrier*>(lane.waits_at) - block.barriers.data());
          break;
        case State::kAtPhase:
          its = "for shared memory's barrier at " + std::to_string(offset) + ", parity " + std::to_string(lane.parity);
          break;
        case State::kAtCluster: its = "at the cluster's barrier"; break;
        case State::kDone: its = "ended"; break;
      }
      if (its == last) continue;
      text += (last.empty() ? " lane " : "; lane ") + std::to_string(i - first) + " " + its;
      last = its;
    }
  }
  return text;
}

void start_block(const Launch& launch, std::int64_t index, char* shared, char* stacks) {
  auto block = std::make_unique<Block>();
  block->index = index;
  block->shared = shared;
  block->shared_bytes = launch.shared_bytes;
  block->unseen.resize(launch.shared_bytes / 4 + 1);
  block->alive = launch.threads;
  block->lanes.resize(launch.threads);
  block->warps.resize(launch.threads / kLanes);
  std::memset(shared, kPoison, launch.shared_bytes);
  for (int thread = 0; thread < launch.threads; ++thread) {
    Lane& lane = block->lanes[thread];
    lane.block = block.get();
    lane.thread = thread;
    start_fiber(lane.fiber, stacks + thread * kStackBytes, run_lane);
    if (thread % kLanes == 0) g_machine.ready.emplace_back(block.get(), thread / kLanes);
  }
  g_machine.blocks.push_back(std::move(block));
}

// Runs the lanes of a warp that are ready, each until it waits; at times only some of them, and other warps go on
// before the others.
void run_warp(Block& block, int number) {
  Warp& warp = block.warps[number];
  const std::size_t order = g_machine.lots.next();
  const std::size_t first = order % kLanes, step = order / kLanes % kLanes | 1;
  const int turns = static_cast<int>(g_machine.lots.below(8) == 0 ? 1 + g_machine.lots.below(kLanes) : kLanes);
  for (int turn = 0; turn < turns && g_machine.error.empty(); ++turn) {
    Lane& lane = block.lanes[number * kLanes + (first + turn * step) % kLanes];
    if (lane.state != State::kReady) continue;
    --warp.ready;
    g_machine.lane = &lane;
    lane.waits_at = nullptr;
    switch_fiber(g_machine.scheduler, lane.fiber);
  }
}

void begin_spell() {
  auto& m = g_machine;
  constexpr int kLandings[] = {0, 1, 4};
  m.steps_left = static_cast<int>(16u << m.lots.below(8));
  m.landing = kLandings[m.lots.below(3)];
  m.by_rank = m.lots.below(4) > 0;
  for (const auto& block : m.blocks) {
    for (Warp& warp : block->warps) warp.rank = m.lots.next();
  }
}
std::size_t draw_ready() {
  const auto& ready = g_machine.ready;
  if (!g_machine.by_rank) return g_machine.lots.below(ready.size());
  const auto rank = [](const auto& each) { return each.first->warps[each.second].rank; };
  return std::max_element(ready.begin(), ready.end(), [&](const auto& a, const auto& b) { return rank(a) < rank(b); }) -
         ready.begin();
}

// Until a block has ended, or nobody can go on.
void run_ready() {
  auto& m = g_machine;
  while (m.error.empty()) {
    if (m.steps_left-- <= 0) begin_spell();
    if (count_in_flight() > 0 && (m.ready.empty() || m.lots.below(4) < static_cast<std::size_t>(m.landing))) {
      land_one();
      continue;
    }
    if (m.ready.empty()) return;
    const std::size_t drawn = draw_ready();
    const auto [block, warp] = m.ready[drawn];
    m.ready[drawn] = m.ready.back();
    m.ready.pop_back();
    block->warps[warp].is_queued = false;
    run_warp(*block, warp);
    queue(*block, warp);
    if (block->alive == 0) return;
  }
}

// Copies take their time: at times others run first.
void linger(Lane& lane) {
  if (lane.open.empty() || g_machine.lots.below(4) != 0) return;
  wake(lane);
  switch_away();
}

}  // namespace

std::string run(const Launch& launch) {
  static Memory stacks, shared;
  auto& m = g_machine;
  m.launch = &launch;
  m.kernel_before_runs = launch.kernel_before != nullptr;
  m.lots = {launch.seed};
  m.error.clear();
  m.ready.clear();
  m.in_flight.clear();
  m.boxes.clear();
  m.multiplying.clear();
  m.blocks.clear();
  m.steps_left = 0;
  const auto cluster = static_cast<std::size_t>(launch.cluster);
  if (launch.blocks % launch.cluster != 0) return "a grid that is no whole clusters";
  std::vector<std::int64_t> order(launch.blocks / launch.cluster);  // of clusters, by their first blocks
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i * cluster);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[m.lots.below(i)]);
  const auto resident =
      static_cast<std::size_t>(std::clamp<std::int64_t>(launch.resident, launch.cluster, launch.blocks));
  const std::size_t block_bytes = (launch.shared_bytes + 4095) / 4096 * 4096;
  char* all_shared = shared.at_least(resident * block_bytes);
  char* all_stacks = stacks.at_least(resident * launch.threads * kStackBytes);
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < resident; ++i) places.push_back(i);
  std::size_t next = 0;
  while (m.error.empty() && (next < order.size() || !m.blocks.empty())) {
    for (; next < order.size() && places.size() >= cluster; ++next) {
      for (std::size_t rank = 0; rank < cluster; ++rank) {
        const std::size_t place = places.back();
        places.pop_back();
        start_block(launch, order[next] + static_cast<std::int64_t>(rank), all_shared + place * block_bytes,
                    all_stacks + place * launch.threads * kStackBytes);
      }
    }
    run_ready();
    if (!m.error.empty()) break;
    const auto ended = std::find_if(m.blocks.begin(), m.blocks.end(), [](const auto& b) { return b->alive == 0; });
    if (ended == m.blocks.end()) {
      m.error = "no thread can go on:";
      for (const auto& block : m.blocks) m.error += where(*block);
      break;
    }
    Block* block = ended->get();
    if (const char* left = left_in_flight(*block)) m.error = left;
    std::erase_if(m.ready, [&](const auto& each) { return each.first == block; });
    places.push_back((block->shared - all_shared) / block_bytes);
    m.blocks.erase(ended);
  }
  m.blocks.clear();
  return m.error;
}

unsigned thread_index() { return static_cast<unsigned>(me().thread); }
unsigned block_index() { return static_cast<unsigned>(me().block->index); }
void await_kernel_before() {
  if (std::exchange(g_machine.kernel_before_runs, false)) g_machine.launch->kernel_before();
}

unsigned block_count() { return static_cast<unsigned>(g_machine.launch->blocks); }
unsigned block_threads() { return static_cast<unsigned>(g_machine.launch->threads); }

void fail(const char* text) {
  if (g_machine.error.empty()) {
    g_machine.error = std::string(text) + " (block " + std::to_string(me().block->index) + ", thread " +
                      std::to_string(me().thread) + ")" + where(*me().block);
  }
  while (true) switch_away();
}

void meet(const char* what, WarpOperation run, void* operands) {
  Warp& warp = my_warp();
  if (warp.came == 0) warp.what = what;
  if (warp.what != what) {
    char text[128];
    std::snprintf(text, sizeof text, "lanes of a warp are at %s and at %s", warp.what, what);
    fail(text);
  }
  warp.operands[me().thread % kLanes] = operands;
  if (++warp.came < kLanes) return wait(State::kInWarp, nullptr);
  warp.came = 0;
  if (run != nullptr) run(warp.operands.data());
  const int first = me().thread / kLanes * kLanes;
  for (int lane = first; lane < first + kLanes; ++lane) {
    if (lane != me().thread) wake(me().block->lanes[lane]);
  }
}

void named_barrier(int number, int threads, bool waits) {
  Block& block = *me().block;
  if (number < 0 || number >= kNamedBarriers || threads % kLanes != 0 || threads > static_cast<int>(block.lanes.size()))
    fail("a named barrier that is none");
  NamedBarrier& barrier = block.barriers[number];
  if (barrier.came == 0) barrier.goal = threads;
  if (barrier.goal != threads) fail("a barrier of two numbers of threads");
  if (++barrier.came < threads) {
    if (waits) wait(State::kAtBarrier, &barrier);
    return;
  }
  barrier.came = 0;
  for (Lane& lane : block.lanes) {
    if (lane.state == State::kAtBarrier && lane.waits_at == &barrier) wake(lane);
  }
}

unsigned shared_address(const void* pointer) {
  const auto offset = static_cast<const char*>(pointer) - me().block->shared;
  if (offset < 0 || offset >= static_cast<std::ptrdiff_t>(me().block->shared_bytes)) {
    fail("an address outside of shared memory");
  }
  return kSharedWindow + static_cast<unsigned>(offset) + (static_cast<unsigned>(rank_of(*me().block)) << kRankShift);
}
char* shared_pointer(unsigned address, int bytes) {
  address -= static_cast<unsigned>(rank_of(*me().block)) << kRankShift;
  if (address < kSharedWindow || address - kSharedWindow + bytes > me().block->shared_bytes) {
    fail("an address outside of shared memory");
  }
  return me().block->shared + (address - kSharedWindow);
}

void copy_later(char* to, const void* from, int unit, int bytes) {
  const auto place = shared_pointer(shared_address(to), unit);
  if (reinterpret_cast<std::uintptr_t>(to) % unit != 0 ||
      (bytes > 0 && reinterpret_cast<std::uintptr_t>(from) % unit != 0)) {
    fail("a copy that is not aligned");
  }
  std::memset(place, kPoison, unit);
  me().open.push_back({to, from, unit, bytes, me().groups});
}
void finish_copies() {
  Lane& lane = me();
  linger(lane);
  while (!lane.flights.empty()) land_oldest(lane);
  for (const Copy& copy : lane.open) land(*lane.block, copy);
  lane.open.clear();
}
void commit_copies() { ++me().groups; }
void await_copy_groups(int later) {
  Lane& lane = me();
  linger(lane);
  while (!lane.flights.empty()) land_oldest(lane);
  std::erase_if(lane.open, [&](const Copy& copy) {
    const bool lands = copy.group < lane.groups - later;
    if (lands) land(*lane.block, copy);
    return lands;
  });
}
void arrive_on_copies(std::uint64_t* barrier) {
  Lane& lane = me();
  (void)shared_address(barrier);
  if (lane.flights.empty()) g_machine.in_flight.push_back(&lane);
  lane.flights.push_back({std::move(lane.open), barrier});
  lane.open.clear();
}

void init_barrier(std::uint64_t* barrier, int arrivals) {
  (void)shared_address(barrier);
  const auto count = static_cast<unsigned>(arrivals);
  *barrier = std::bit_cast<std::uint64_t>(Mbarrier{count, count, 0, 0});
}
void arrive(std::uint64_t* barrier) { arrive_at(*me().block, barrier); }
void await_phase(std::uint64_t* barrier, unsigned parity) {
  me().parity = parity;
  if (parity > 1) fail("a parity that is none");
  while ((std::bit_cast<Mbarrier>(*barrier).phase & 1) == parity) wait(State::kAtPhase, barrier);
}

void expect_bytes(std::uint64_t* barrier, int bytes) { count_at(*me().block, barrier, 0, bytes); }
void bring_box(char* to, int bytes, std::function<void(char*)> read, std::uint64_t* barrier) {
  (void)shared_address(barrier);
  std::memset(to, kPoison, bytes);
  g_machine.boxes.push_back({me().block, to, bytes, std::move(read), barrier});
}

AsyncView::AsyncView() : shared_(me().block->shared), unseen_(me().block->unseen) {}
unsigned AsyncView::word(unsigned address) const {
  const std::size_t at = (address - kSharedWindow) / 4;
  unsigned word = ~0u;
  if (at + 1 < unseen_.size() && !unseen_[at]) std::memcpy(&word, shared_ + 4 * at, sizeof word);
  return word;
}
void fence_async_proxy() {
  Block& block = *me().block;
  if (std::exchange(block.has_unseen, false)) block.unseen.assign(block.unseen.size(), false);
}

void fence_products() { my_warp().products.fence(); }
void start_product(const LaneRegisters& registers, int count, Multiply multiply) {
  Warp& warp = my_warp();
  if (warp.products.are_multiplied()) g_machine.multiplying.push_back(&warp);
  if (const char* wrong = warp.products.start(registers, count, std::move(multiply))) fail(wrong);
}
void commit_products() { my_warp().products.commit(); }
void await_products(int later) {
  Warp& warp = my_warp();
  if (const char* wrong = warp.products.await(later)) fail(wrong);
  if (warp.products.are_multiplied()) std::erase(g_machine.multiplying, &warp);
}

}  // namespace flashport::machine
