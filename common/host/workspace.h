// Workspace of a call: the caller's own, or one that is kept per device, use and stream.
// A kept region is zero-filled when it is allocated and grows only outside of graph capture. A capture takes a region
// for good, from the spares that earlier eager calls allocated. Its graph may be replayed at any time on any stream, so
// that region is never freed, grown or used by another graph. All calls of one capture on one stream use the same one.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "common/host/check.h"
#include "common/host/devices.h"

namespace flashport {

// kCounters: the region begins with counters that are zero before and after every call. kScratch: calls leave anything
// in it.
enum class WorkspaceUse { kCounters, kScratch };

// Bytes at the beginning of a region of counters in which calls have nothing but counters: operations share regions.
inline constexpr std::int64_t kCounterAreaBytes = std::int64_t{128} << 10;

struct WorkspaceRegion {
  void* data = nullptr;
  std::int64_t bytes = 0;
  Stream origin = 0;  // stream of the eager call that allocated it
  std::mutex in_use;
};

// A workspace for the launches of one call; no other call launches into it meanwhile.
class WorkspaceLease {
 public:
  WorkspaceLease() = default;
  explicit WorkspaceLease(void* data) : data_(data) {}
  WorkspaceLease(WorkspaceRegion& region, std::unique_lock<std::mutex> lock)
      : data_(region.data), lock_(std::move(lock)) {}

  [[nodiscard]] void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  std::unique_lock<std::mutex> lock_;
};

[[nodiscard]] WorkspaceLease acquire_workspace(const Check& check, const DeviceContext& device, Stream stream,
                                               std::int64_t bytes, const std::optional<TensorView>& from_caller,
                                               WorkspaceUse use = WorkspaceUse::kCounters);

// Frees every kept region, also those of captures. For tests.
void release_workspaces_for_test();

}  // namespace flashport
