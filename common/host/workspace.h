// Workspace of a call: the caller's own, or one that is kept per device, use and stream.
// A kept region is zero-filled when it is allocated and grows only outside of graph capture. A capture takes a region
// of its own for good, from spares that earlier eager calls prepared: the graph may be replayed at any time on any
// stream, so its region is never freed, grown or shared with another graph. Calls of one capture on one stream share
// it.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "common/host/check.h"
#include "common/host/devices.h"

namespace flashport {

// Decode's holds counters that every call leaves as it finds them, zero; calls that write anything have their own.
enum class WorkspaceUse { kCounters, kScratch };

struct WorkspaceRegion {
  void* data = nullptr;
  std::int64_t bytes = 0;
  Stream origin = 0;  // stream of the eager call that prepared it
  std::mutex in_use;
};

// A workspace for the launches of one call; nobody else launches into it meanwhile.
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
