// A backend's table of functions, driven by the probe kernels, on the first device that its one target serves. Written
// once; built with each vendor's runtime and its probes, which give the backend under test.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "common/host/backend_abi.h"
#include "tests/platform/probe.h"
#include "tests/platform/probe_backend.h"
#include "tests/support/device_choice.h"

namespace flashport {
namespace {

int g_device = 0;  // its index; set by main

// What the device calls itself: a CPU runs the one target that fits it.
const char* target() {
  const BackendAbi& backend = *probe_backend();
  return backend.kind == DeviceKind::kCpu ? "cpu" : backend.targets[0];
}

// Memory of the device that mirrors a host vector.
template <class T>
class DeviceArray {
 public:
  DeviceArray(const BackendAbi& backend, std::size_t count) : backend_(backend), count_(count) {
    void* memory = nullptr;
    const char* error = backend_.allocate(g_device, bytes(), &memory);
    EXPECT_STREQ(error, nullptr);
    if (error == nullptr) error = backend_.fill_zero(g_device, 0, memory, bytes());
    EXPECT_STREQ(error, nullptr);
    data_ = static_cast<T*>(memory);
  }
  ~DeviceArray() { EXPECT_STREQ(backend_.release(g_device, data_), nullptr); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::vector<T> host() const {
    std::vector<T> values(count_);
    EXPECT_STREQ(backend_.copy(g_device, 0, values.data(), data_, bytes()), nullptr);
    EXPECT_STREQ(backend_.synchronize(g_device, 0), nullptr);
    return values;
  }

 private:
  [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }

  const BackendAbi& backend_;
  std::size_t count_;
  T* data_ = nullptr;
};

class Runtime : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_STREQ(backend.device_info(g_device, &info), nullptr);
    ASSERT_STREQ(info.target, target()) << info.name << " is " << info.architecture;
  }

  [[nodiscard]] const KernelEntry* find(const std::string& name) const {
    int count = 0;
    const KernelEntry* entries = backend.kernels(info.target, &count);
    for (int i = 0; i < count; ++i) {
      if (std::string(entries[i].key).starts_with(name + "/")) return entries + i;
    }
    ADD_FAILURE() << "no kernel " << name;
    return nullptr;
  }

  void launch(const KernelEntry* kernel, std::int64_t grid, const ProbeParams& params) const {
    ASSERT_STREQ(backend.launch(g_device, 0, kernel, LaunchGrid{grid}, &params, sizeof params), nullptr);
  }

  const BackendAbi& backend = *probe_backend();
  BackendDevice info = {};
};

TEST_F(Runtime, DescribesItself) {
  EXPECT_EQ(backend.abi_version, kBackendAbiVersion);
  EXPECT_GT(std::strlen(info.name), 0u);
  EXPECT_GT(std::strlen(info.architecture), 0u);
  EXPECT_GT(info.multiprocessors, 0);
  EXPECT_GT(info.memory_bytes, 0);
  ASSERT_NE(backend.targets[0], nullptr);
  for (const char* const* target = backend.targets; *target != nullptr; ++target) {
    int count = 0;
    EXPECT_NE(backend.kernels(*target, &count), nullptr) << *target;
    EXPECT_GT(count, 0) << *target;
  }
  int count = -1;
  EXPECT_EQ(backend.kernels("no_such_target", &count), nullptr);
  EXPECT_EQ(count, 0);
}

TEST_F(Runtime, CopiesAndFills) {
  const std::size_t count = 100003;
  std::vector<std::uint8_t> sent(count);
  std::iota(sent.begin(), sent.end(), std::uint8_t{1});
  const DeviceArray<std::uint8_t> a(backend, count);
  const DeviceArray<std::uint8_t> b(backend, count);
  EXPECT_EQ(a.host(), std::vector<std::uint8_t>(count));
  ASSERT_STREQ(backend.copy(g_device, 0, a.data(), sent.data(), count), nullptr);
  ASSERT_STREQ(backend.copy(g_device, 0, b.data(), a.data(), count), nullptr);
  EXPECT_EQ(b.host(), sent);
  ASSERT_STREQ(backend.fill_zero(g_device, 0, b.data() + 1, count - 2), nullptr);
  std::vector<std::uint8_t> expected(count);
  expected.front() = sent.front();
  expected.back() = sent.back();
  EXPECT_EQ(b.host(), expected);
  EXPECT_STREQ(backend.copy(g_device, 0, nullptr, nullptr, 0), nullptr);
  EXPECT_STREQ(backend.fill_zero(g_device, 0, nullptr, 0), nullptr);
}

TEST_F(Runtime, RunsEveryBlockOnceWithAllParams) {
  for (const std::int64_t grid : {0, 1, 2, 7, 1000}) {
    const DeviceArray<std::uint32_t> visits(backend, grid + 1);
    const DeviceArray<std::int64_t> echoes(backend, grid + 1);
    ProbeParams params = {};
    params.visits = visits.data();
    params.echoes = echoes.data();
    params.last = INT64_C(0x0123456789abcdef);
    launch(find("probe_visit"), grid, params);
    const std::vector<std::uint32_t> visited = visits.host();
    const std::vector<std::int64_t> echoed = echoes.host();
    for (std::int64_t block = 0; block < grid; ++block) {
      ASSERT_EQ(visited[block], 1u) << "block " << block << " of " << grid;
      ASSERT_EQ(echoed[block], params.last + block);
    }
    EXPECT_EQ(visited[grid], 0u);
  }
}

// The merge in one launch rests on this: see common/device/decode/chunk_tree.h.
TEST_F(Runtime, LastBlockToArriveSeesWhatAllHavePublished) {
  const int rounds = 5;
  for (const std::int64_t grid : {1, 2, 64, 150}) {
    const DeviceArray<float> published(backend, grid * kProbeThreads);
    const DeviceArray<std::uint32_t> counters(backend, 2);
    const DeviceArray<float> sums(backend, rounds * kProbeThreads);
    const DeviceArray<std::uint32_t> winners(backend, 2 * rounds);
    ProbeParams params = {};
    params.published = published.data();
    params.counters = counters.data();
    params.sums = sums.data();
    params.winners = winners.data();
    const KernelEntry* kernel = find("probe_arrive");
    for (params.round = 0; params.round < rounds; ++params.round) launch(kernel, grid, params);
    const std::vector<float> summed = sums.host();
    const std::vector<std::uint32_t> won = winners.host();
    for (int round = 0; round < rounds; ++round) {
      ASSERT_EQ(won[2 * round], 1u) << "round " << round << ", grid " << grid;
      ASSERT_EQ(won[2 * round + 1], 1u) << "round " << round << ", grid " << grid;
      for (int column = 0; column < kProbeThreads; ++column) {
        ASSERT_EQ(summed[round * kProbeThreads + column], static_cast<float>(grid * (round + 1))) << "round " << round;
      }
    }
    for (std::uint32_t count : counters.host()) EXPECT_EQ(count, 0u);
  }
}

TEST_F(Runtime, LanesOfAWaveTellEachOther) {
  const std::int64_t grid = 70;
  const KernelEntry* kernel = find("probe_wave");
  const DeviceArray<std::int64_t> lanes(backend, grid * 3 * kProbeThreads);
  ProbeParams params = {};
  params.lanes = lanes.data();
  launch(kernel, grid, params);
  const std::vector<std::int64_t> told = lanes.host();
  int wave_size = 1;  // a wave begins where no lane is before
  while (wave_size < kernel->threads && told[wave_size] != 0) ++wave_size;
  for (std::int64_t block = 0; block < grid; ++block) {
    const std::int64_t* before = told.data() + block * 3 * kProbeThreads;
    for (std::int64_t i = 0; i < kernel->threads; ++i) {
      const std::int64_t first = i / wave_size * wave_size;
      const auto sum = [&](std::int64_t end) { return (end * (end + 1) - first * (first + 1)) / 2; };
      ASSERT_EQ(before[i], sum(i));
      ASSERT_EQ(before[kProbeThreads + i], sum(first + wave_size));
      ASSERT_EQ(before[2 * kProbeThreads + i], first + block % wave_size);
    }
  }
}

TEST_F(Runtime, HoldsAtLeastOneBlock) {
  for (const char* name : {"probe_visit", "probe_arrive", "probe_wave"}) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      int blocks = 0;
      EXPECT_STREQ(backend.occupancy(g_device, find(name), &blocks), nullptr);
      EXPECT_GT(blocks, 0);
    }
  }
}

TEST_F(Runtime, DefaultStreamIsNotCapturing) {
  std::uint64_t id = 1;
  EXPECT_STREQ(backend.capture_id(g_device, 0, &id), nullptr);
  EXPECT_EQ(id, 0u);
}

TEST_F(Runtime, TakesLaunchesFromSeveralThreads) {
  const int callers = 3, repeats = 8;
  const std::int64_t grid = 19;
  const KernelEntry* kernel = find("probe_arrive");
  std::vector<std::thread> threads;
  for (int caller = 0; caller < callers; ++caller) {
    threads.emplace_back([&, caller] {
      const DeviceArray<float> published(backend, grid * kProbeThreads);
      const DeviceArray<std::uint32_t> counters(backend, 2);
      const DeviceArray<float> sums(backend, repeats * kProbeThreads);
      const DeviceArray<std::uint32_t> winners(backend, 2 * repeats);
      ProbeParams params = {};
      params.published = published.data();
      params.counters = counters.data();
      params.sums = sums.data();
      params.winners = winners.data();
      for (params.round = 0; params.round < repeats; ++params.round) launch(kernel, grid, params);
      const std::vector<float> summed = sums.host();
      for (int round = 0; round < repeats; ++round) {
        for (int column = 0; column < kProbeThreads; ++column) {
          EXPECT_EQ(summed[round * kProbeThreads + column], static_cast<float>(grid * (round + 1)))
              << "caller " << caller;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(Runtime, NamesWhatFailed) {
  void* memory = nullptr;
  const char* error = backend.allocate(1000, 64, &memory);
  ASSERT_NE(error, nullptr);
  EXPECT_NE(std::string(error).find("got index 1000"), std::string::npos) << error;

  if (backend.kind != DeviceKind::kCpu) {  // sanitizers end the process on such a request to malloc
    error = backend.allocate(g_device, std::size_t{1} << 60, &memory);
    ASSERT_NE(error, nullptr);
    EXPECT_NE(std::string(error).find("out of memory"), std::string::npos) << error;
  }

  // An error is reported once: the next call is not affected.
  EXPECT_STREQ(backend.synchronize(g_device, 0), nullptr);
  const DeviceArray<float> usable(backend, 16);
  EXPECT_EQ(usable.host(), std::vector<float>(16));
}

}  // namespace
}  // namespace flashport

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const auto choice = flashport_test::choose_device(*flashport::probe_backend(), flashport::target());
  std::printf("%s\n", choice.text.c_str());
  if (choice.index < 0) return choice.exit_code;
  flashport::g_device = choice.index;
  return RUN_ALL_TESTS();
}
