// What machine.h must do for a kernel that is wrong to fail: copies and boxes that land late, products that are
// computed late, barriers whose phases count, warps whose lanes come together, and the end of a launch in which nobody
// can go on.
#include "tests/device/machine/machine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

namespace flashport::machine {
namespace {

struct Shared {
  alignas(16) unsigned char bytes[1024];
  std::uint64_t barrier;
  int count;
};

std::string run_threads(int threads, const std::function<void(Shared&)>& kernel, std::uint64_t seed = 1) {
  return run(
      {.blocks = 1, .threads = threads, .shared_bytes = sizeof(Shared), .seed = seed, .kernel = [&](void* shared) {
         kernel(*static_cast<Shared*>(shared));
       }});
}

TEST(Machine, BytesOfACopyArePoisonUntilItIsAwaited) {
  alignas(16) static const char kFrom[16] = "fifteen letters";
  unsigned char before = 0, after = 0;
  EXPECT_EQ(run_threads(32,
                        [&](Shared& shared) {
                          if (thread_index() != 0) return;
                          shared.bytes[0] = 1;
                          copy_later(reinterpret_cast<char*>(shared.bytes), kFrom, 16, 8);
                          before = shared.bytes[0];
                          finish_copies();
                          after = shared.bytes[0];
                          EXPECT_EQ(shared.bytes[8], 0);
                        }),
            "");
  EXPECT_EQ(before, 0xff);
  EXPECT_EQ(after, 'f');
}

TEST(Machine, GroupsOfCopiesAreAwaitedInTheirOrder) {
  alignas(16) static const char kFrom[16] = "fifteen letters";
  EXPECT_EQ(run_threads(32,
                        [&](Shared& shared) {
                          auto* to = reinterpret_cast<char*>(shared.bytes) + 32 * thread_index();
                          copy_later(to, kFrom, 16, 16);
                          commit_copies();
                          copy_later(to + 16, kFrom, 16, 16);
                          commit_copies();
                          await_copy_groups(1);
                          EXPECT_EQ(to[0], 'f');
                          EXPECT_EQ(to[16], '\xff');
                          await_copy_groups(0);
                          EXPECT_EQ(to[16], 'f');
                        }),
            "");
}

TEST(Machine, APhaseEndsWithItsLastCopy) {
  alignas(16) static const char kFrom[16] = "fifteen letters";
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(run_threads(
                  64,
                  [&](Shared& shared) {
                    if (thread_index() == 0) init_barrier(&shared.barrier, 32);
                    named_barrier(0, 64, true);
                    if (thread_index() < 32) {
                      copy_later(reinterpret_cast<char*>(shared.bytes) + 16 * thread_index(), kFrom, 16, 16);
                      arrive_on_copies(&shared.barrier);
                      finish_copies();
                    } else {
                      await_phase(&shared.barrier, 0);
                      for (int i = 0; i < 32; ++i) EXPECT_EQ(shared.bytes[16 * i], 'f');
                    }
                  },
                  seed),
              "");
  }
}

TEST(Machine, SaysWhereWarpsWaitWhenNobodyCanGoOn) {
  const std::string error = run_threads(64, [&](Shared& shared) {
    if (thread_index() == 0) init_barrier(&shared.barrier, 33);
    named_barrier(0, 64, true);
    if (thread_index() < 32) {
      arrive(&shared.barrier);
    } else {
      await_phase(&shared.barrier, 0);
    }
  });
  EXPECT_NE(error.find("no thread can go on"), std::string::npos) << error;
  EXPECT_NE(error.find("warp 0: lane 0 ended"), std::string::npos) << error;
  EXPECT_NE(error.find("warp 1: lane 0 for shared memory's barrier at 1024, parity 0"), std::string::npos) << error;
}

TEST(Machine, LanesOfAWarpComeTogether) {
  const std::string error =
      run_threads(32, [](Shared&) { meet(thread_index() < 16 ? "here" : "there", nullptr, nullptr); });
  EXPECT_NE(error.find("lanes of a warp are at"), std::string::npos) << error;
}

TEST(Machine, SignalsOfNamedBarriersDoNotWait) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(run_threads(
                  64,
                  [](Shared& shared) {
                    if (thread_index() < 32) {
                      if (thread_index() == 0) shared.count = 7;
                      named_barrier(1, 64, false);
                    } else {
                      named_barrier(1, 64, true);
                      EXPECT_EQ(shared.count, 7);
                    }
                  },
                  seed),
              "");
  }
}

TEST(Machine, RefusesWhatHardwareRefuses) {
  alignas(16) static const char kFrom[32] = {};
  const auto error_of = [](const std::function<void(Shared&)>& kernel) { return run_threads(32, kernel); };
  EXPECT_NE(error_of([](Shared& s) { copy_later(reinterpret_cast<char*>(s.bytes) + 8, kFrom, 16, 16); }), "");
  EXPECT_NE(error_of([](Shared& s) { copy_later(reinterpret_cast<char*>(s.bytes), kFrom + 4, 16, 16); }), "");
  EXPECT_NE(error_of([](Shared& s) { (void)shared_address(&s + 1); }), "");
  EXPECT_NE(error_of([](Shared& s) { copy_later(reinterpret_cast<char*>(s.bytes), kFrom, 16, 16); }),
            "");  // not awaited
}

TEST(Machine, APhaseEndsWithTheLastByteOfItsBoxes) {
  std::set<unsigned char> early;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    EXPECT_EQ(run_threads(
                  64,
                  [&](Shared& shared) {
                    if (thread_index() == 0) init_barrier(&shared.barrier, 1);
                    named_barrier(0, 64, true);
                    if (thread_index() == 0) {
                      expect_bytes(&shared.barrier, 16);
                      arrive(&shared.barrier);
                      for (int i = 0; i < 2; ++i) {
                        bring_box(
                            reinterpret_cast<char*>(shared.bytes) + 8 * i, 8,
                            [](char* to) { std::memcpy(to, "letters", 8); }, &shared.barrier);
                      }
                    } else if (thread_index() == 32) {
                      early.insert(shared.bytes[0]);
                    } else if (thread_index() > 32) {
                      await_phase(&shared.barrier, 0);
                      EXPECT_EQ(shared.bytes[0] + shared.bytes[8], 2 * 'l');
                    }
                  },
                  seed),
              "");
  }
  EXPECT_EQ(early, (std::set<unsigned char>{0xff, 'l'}));
}

// Starts a product of all lanes that adds *from to x.
struct Addition {
  float* x;
  const float* from;
};
void start_addition(float& x, const float* from) {
  Addition mine{&x, from};
  meet(
      "addition",
      [](void* const* all) {
        LaneRegisters registers;
        for (int i = 0; i < kLanes; ++i) registers[i] = static_cast<const Addition*>(all[i])->x;
        const float* its = static_cast<const Addition*>(all[0])->from;
        start_product(registers, 1, [its](float* sums) {
          for (int i = 0; i < kLanes; ++i) sums[i] += *its;
        });
      },
      &mine);
}
void fence() {
  meet("fence", [](void* const*) { fence_products(); }, nullptr);
}
void commit() {
  meet("commit", [](void* const*) { commit_products(); }, nullptr);
}
template <int kLater>
void await() {
  meet("await", [](void* const*) { await_products(kLater); }, nullptr);
}

TEST(Machine, ProductsReadAtSomeTimeBeforeTheyAreAwaited) {
  std::set<float> sums;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    float from = 1, other = 5;
    EXPECT_EQ(run_threads(
                  32,
                  [&](Shared&) {
                    float x = 2, y = 0;
                    fence();
                    start_addition(x, &from);
                    start_addition(x, &from);
                    commit();
                    start_addition(y, &other);
                    commit();
                    EXPECT_TRUE(std::isnan(x));
                    from = 10;
                    await<1>();
                    if (thread_index() == 0) sums.insert(x);
                    EXPECT_TRUE(std::isnan(y));
                    await<0>();
                    EXPECT_EQ(y, 5);
                  },
                  seed),
              "");
  }
  EXPECT_TRUE(sums.contains(4) && sums.contains(22)) << sums.size();
}

TEST(Machine, RefusesWhatThePtxManualLeavesUndefinedOfProducts) {
  static const float kFrom = 1;
  const auto error_of = [](const std::function<void(float&)>& kernel) {
    return run_threads(32, [&](Shared&) {
      float x = 0;
      kernel(x);
    });
  };
  EXPECT_NE(error_of([](float& x) { start_addition(x, &kFrom); }).find("fence"), std::string::npos);
  EXPECT_NE(error_of([](float& x) {
              fence();
              start_addition(x, &kFrom);
              x = 3;
              commit();
              await<0>();
            }).find("written"),
            std::string::npos);
  EXPECT_NE(error_of([](float& x) {
              fence();
              start_addition(x, &kFrom);
              await<0>();  // of no group
            }).find("ended before its products"),
            std::string::npos);
}

// Two blocks of a cluster.
std::string run_pair(const std::function<void(Shared&)>& kernel, std::int64_t blocks = 2, std::uint64_t seed = 1) {
  return run({.blocks = blocks,
              .threads = 32,
              .shared_bytes = sizeof(Shared),
              .seed = seed,
              .cluster = 2,
              .kernel = [&](void* shared) { kernel(*static_cast<Shared*>(shared)); }});
}

TEST(Machine, BlocksOfAClusterWriteToEachOther) {
  int got[4] = {};
  EXPECT_EQ(run_pair(
                [&](Shared& shared) {
                  if (thread_index() == 0) init_barrier(&shared.barrier, 1);
                  cluster_barrier();
                  if (thread_index() == 0) {
                    const int other = cluster_rank() ^ 1, word = 7 + cluster_rank();
                    expect_bytes(&shared.barrier, sizeof word);
                    bring_to_block(
                        address_in_block(shared_address(shared.bytes), other), sizeof word,
                        [=](char* to) { std::memcpy(to, &word, sizeof word); },
                        address_in_block(shared_address(&shared.barrier), other), false);
                    arrive(&shared.barrier);
                    await_phase(&shared.barrier, 0);
                    std::memcpy(&got[block_index()], shared.bytes, sizeof word);
                  }
                  cluster_barrier();
                },
                4),
            "");
  for (int block = 0; block < 4; ++block) EXPECT_EQ(got[block], 8 - block % 2) << block;
}

TEST(Machine, ABlockOfAClusterMustStillBeThere) {
  std::set<bool> found;  // it may end before or after the other's arrival
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const std::string error = run_pair(
        [](Shared& shared) {
          if (thread_index() == 0) init_barrier(&shared.barrier, 1);
          cluster_barrier();
          if (cluster_rank() == 1 && thread_index() == 0) {
            arrive_in_block(address_in_block(shared_address(&shared.barrier), 0));
          }
        },
        2, seed);
    found.insert(error.find("a block of the cluster that is not there") != std::string::npos);
  }
  EXPECT_EQ(found.size(), 2u);
  EXPECT_NE(run_pair([](Shared&) {}, 3).find("no whole clusters"), std::string::npos);
}

}  // namespace
}  // namespace flashport::machine
