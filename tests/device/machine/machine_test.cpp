// What machine.h must do for a kernel that is wrong to fail: copies that land late, barriers whose phases count, warps
// whose lanes come together, and the end of a launch in which nobody can go on.
#include "tests/device/machine/machine.h"

#include <gtest/gtest.h>

#include <cstring>

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

}  // namespace
}  // namespace flashport::machine
