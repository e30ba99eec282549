#include "common/host/launch_plan.h"

#include <algorithm>

#include "common/host/call_log.h"

namespace flashport {
namespace {

constexpr std::int64_t kUnit = 32;  // values that one thread takes
constexpr std::int64_t kMaxBlocks = 1 << 20;

}  // namespace

LaunchPlan plan_rows(const KernelEntry& kernel, std::int64_t rows) { return {&kernel, rows, true, rows}; }

LaunchPlan plan_units(const KernelEntry& kernel, std::int64_t rows, std::int64_t head_dim) {
  const std::int64_t work = rows * ((head_dim + kUnit - 1) / kUnit), threads = std::max(kernel.threads, 1);
  return {&kernel, work, false, std::min((work + threads - 1) / threads, kMaxBlocks)};
}

LaunchSchedule schedule_of(const LaunchPlan& plan) {
  LaunchSchedule s;
  s.kernel = plan.kernel->key;
  s.threads = plan.kernel->threads;
  s.blocks = plan.blocks;
  s.work = plan.work;
  s.shared_bytes = plan.kernel->shared_bytes;
  s.text = launch_text(*plan.kernel, plan.blocks) + " for " + counted(plan.work, plan.by_rows ? "row" : "unit");
  if (!plan.by_rows) s.text += " of " + std::to_string(kUnit) + " values";
  return s;
}

}  // namespace flashport
