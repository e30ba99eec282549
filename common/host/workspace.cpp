#include "common/host/workspace.h"

#include <algorithm>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <thread>
#include <tuple>

namespace flashport {
namespace {

constexpr std::int64_t kGranularity = std::int64_t{1} << 20;
constexpr std::uintptr_t kAlignment = 16;
// Both vendors' handle of "the calling thread's default stream".
constexpr Stream kPerThreadStream = 2;

using Regions = std::list<WorkspaceRegion>;

struct StreamKey {
  Stream stream;
  std::size_t thread;
  auto operator<=>(const StreamKey&) const = default;
};

// What is kept for one device and use. Regions never move; a list node's address is its identity.
struct DevicePool {
  std::mutex mutex;
  std::map<StreamKey, WorkspaceRegion> eager;
  Regions spares;
  std::map<std::pair<std::uint64_t, StreamKey>, Regions> captured;
};

struct Pools {
  std::mutex mutex;
  std::map<std::tuple<const BackendAbi*, int, WorkspaceUse>, DevicePool> devices;
};

// Never destroyed: a backend may be gone when the process ends.
Pools& pools() {
  static auto* instance = new Pools;
  return *instance;
}

DevicePool& pool_of(const DeviceContext& device, WorkspaceUse use) {
  Pools& all = pools();
  const std::lock_guard lock(all.mutex);
  return all.devices[{&device.abi(), device.device().index, use}];
}

StreamKey key_of(Stream stream) {
  const bool per_thread = stream == kPerThreadStream;
  return {stream, per_thread ? std::hash<std::thread::id>()(std::this_thread::get_id()) : 0};
}

void release(const Check& check, const DeviceContext& device, WorkspaceRegion& region) {
  if (region.data == nullptr) return;
  void* data = region.data;
  region.data = nullptr;
  region.bytes = 0;
  device.expect(check, device.abi().release(device.device().index, data));
}

// The fill is waited for: a capture may take the region to another stream.
void allocate(const Check& check, const DeviceContext& device, Stream stream, std::int64_t bytes,
              WorkspaceRegion& region) {
  const BackendAbi& abi = device.abi();
  const int index = device.device().index;
  const std::int64_t rounded = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  device.expect(check, abi.allocate(index, static_cast<std::size_t>(rounded), &region.data));
  region.origin = stream;
  device.expect(check, abi.fill_zero(index, stream, region.data, static_cast<std::size_t>(rounded)));
  device.expect(check, abi.synchronize(index, stream));
  region.bytes = rounded;
}

void grow(const Check& check, const DeviceContext& device, Stream stream, std::int64_t bytes, WorkspaceRegion& region) {
  if (region.bytes >= bytes) return;
  // Kernels of earlier calls may still be at work in it.
  if (region.data != nullptr) device.expect(check, device.abi().synchronize(device.device().index, stream));
  release(check, device, region);
  allocate(check, device, stream, bytes, region);
}

// The CPU launches at once and returns when done, so threads take turns through a list of free regions.
WorkspaceLease acquire_on_cpu(const Check& check, const DeviceContext& device, DevicePool& pool, std::int64_t bytes) {
  const std::lock_guard lock(pool.mutex);
  for (WorkspaceRegion& region : pool.spares) {
    std::unique_lock use(region.in_use, std::try_to_lock);
    if (!use.owns_lock()) continue;
    grow(check, device, 0, bytes, region);
    return {region, std::move(use)};
  }
  WorkspaceRegion& region = pool.spares.emplace_back();
  std::unique_lock use(region.in_use);
  allocate(check, device, 0, bytes, region);
  return {region, std::move(use)};
}

WorkspaceLease acquire_in_capture(const Check& check, DevicePool& pool, Stream stream, std::uint64_t capture,
                                  std::int64_t bytes) {
  const std::lock_guard lock(pool.mutex);
  Regions& mine = pool.captured[{capture, key_of(stream)}];
  const auto fits = [&](const WorkspaceRegion& region) { return region.bytes >= bytes; };
  auto found = std::find_if(mine.begin(), mine.end(), fits);
  if (found == mine.end()) {
    // The spare of this very stream, else the smallest that will do.
    auto spare = pool.spares.end();
    for (auto it = pool.spares.begin(); it != pool.spares.end(); ++it) {
      if (!fits(*it)) continue;
      const bool own = it->origin == stream;
      if (spare == pool.spares.end() || own || (spare->origin != stream && it->bytes < spare->bytes)) spare = it;
    }
    if (spare == pool.spares.end()) {
      check.value_error("no workspace of " + std::to_string(bytes) +
                        " bytes is ready for this graph, and none can be allocated while it is captured; run the call "
                        "once before you capture, or pass workspace");
    }
    mine.splice(mine.end(), pool.spares, spare);
    found = std::prev(mine.end());
  }
  return {*found, std::unique_lock(found->in_use)};
}

void prepare_spare(const Check& check, const DeviceContext& device, DevicePool& pool, Stream stream,
                   std::int64_t bytes) try {
  for (WorkspaceRegion& spare : pool.spares) {
    if (spare.origin != stream) continue;
    // Nothing has run in a spare yet, so it may be exchanged at once.
    if (spare.bytes < bytes) {
      release(check, device, spare);
      allocate(check, device, stream, bytes, spare);
    }
    return;
  }
  allocate(check, device, stream, bytes, pool.spares.emplace_back());
} catch (const BackendError&) {
  // Only a capture needs the spare, and says so where there is none; the call at hand goes on without.
}

WorkspaceLease acquire_eager(const Check& check, const DeviceContext& device, DevicePool& pool, Stream stream,
                             std::int64_t bytes) {
  std::unique_lock lock(pool.mutex);
  prepare_spare(check, device, pool, stream, bytes);
  WorkspaceRegion& region = pool.eager[key_of(stream)];
  lock.unlock();
  std::unique_lock use(region.in_use);
  grow(check, device, stream, bytes, region);
  return {region, std::move(use)};
}

WorkspaceLease check_own(const Check& check, const TensorView& own, std::int64_t bytes) {
  check.contiguous(own, "workspace");
  if (own.shape[0] < bytes) {
    check.value_error("workspace must have at least " + std::to_string(bytes) + " bytes, got " +
                      std::to_string(own.shape[0]));
  }
  check.writable(own, "workspace");
  if (reinterpret_cast<std::uintptr_t>(own.data) % kAlignment != 0) {
    check.value_error("workspace must be aligned to 16 bytes, got address " +
                      std::to_string(reinterpret_cast<std::uintptr_t>(own.data)));
  }
  return WorkspaceLease(own.data);
}

}  // namespace

WorkspaceLease acquire_workspace(const Check& check, const DeviceContext& device, Stream stream, std::int64_t bytes,
                                 const std::optional<TensorView>& from_caller, WorkspaceUse use) {
  if (from_caller) return check_own(check, *from_caller, bytes);
  if (bytes == 0) return {};
  DevicePool& pool = pool_of(device, use);
  if (device.is_cpu()) return acquire_on_cpu(check, device, pool, bytes);
  std::uint64_t capture = 0;
  device.expect(check, device.abi().capture_id(device.device().index, stream, &capture));
  if (capture != 0) return acquire_in_capture(check, pool, stream, capture, bytes);
  return acquire_eager(check, device, pool, stream, bytes);
}

void release_workspaces_for_test() {
  Pools& all = pools();
  const std::lock_guard lock(all.mutex);
  for (auto& [key, pool] : all.devices) {
    const auto [abi, index, use] = key;
    const auto free_region = [abi = abi, index = index](WorkspaceRegion& region) {
      if (region.data != nullptr) (void)abi->release(index, region.data);
    };
    for (auto& [stream, region] : pool.eager) free_region(region);
    for (WorkspaceRegion& region : pool.spares) free_region(region);
    for (auto& [capture, regions] : pool.captured) {
      for (WorkspaceRegion& region : regions) free_region(region);
    }
  }
  all.devices.clear();
}

}  // namespace flashport
