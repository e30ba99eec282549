// Launches whose blocks never meet, of operations whose kernels have no compile-time shape: how many blocks they have,
// for the launch, for explain() and for the log of calls.
#pragma once

#include <cstdint>
#include <string>

#include <flashport/decode.h>

#include "common/host/check.h"
#include "common/host/devices.h"

namespace flashport {

struct LaunchPlan {
  const KernelEntry* kernel = nullptr;
  std::int64_t work = 0;
  bool by_rows = false;  // a block for each; else a thread for each unit of a row
  std::int64_t blocks = 0;
};

// A block for each row that is written.
[[nodiscard]] LaunchPlan plan_rows(const KernelEntry& kernel, std::int64_t rows);

// A thread for each unit of 32 values of rows. Blocks are so many at most that the kernel strides over what is left.
[[nodiscard]] LaunchPlan plan_units(const KernelEntry& kernel, std::int64_t rows, std::int64_t head_dim);

// What explain() and the log of calls say of a plan.
[[nodiscard]] LaunchSchedule schedule_of(const LaunchPlan& plan);

// What explain() says of the kernel that `find(reason)` gives, or throws. `plan(kernel)` makes the plan.
template <class Find, class Plan>
LaunchSchedule explain_launch(const Check& check, const std::string& target, const Find& find, const Plan& plan) {
  std::string reason;
  const KernelEntry* kernel = find(reason);
  if (kernel == nullptr) check.not_supported(reason);
  (void)find_device(check, find_target(target, reason));
  return schedule_of(plan(*kernel));
}

// Rows of a call that explain() is asked about.
inline constexpr std::int64_t kMostExplainedRows = std::int64_t{1} << 36;

}  // namespace flashport
