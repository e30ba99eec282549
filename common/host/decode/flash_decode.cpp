// flash_decode, flash_decode_mixed and flash_decode_stage1: validate -> plan -> dispatch.
#include <algorithm>

#include <flashport/decode.h>

#include "common/host/append_decode.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/contents.h"
#include "common/host/decode/lengths.h"
#include "common/host/decode/plan.h"
#include "common/host/decode/problem.h"
#include "common/host/decode/segment_launches.h"
#include "common/host/decode/stored_segments.h"
#include "common/host/devices.h"
#include "common/host/workspace.h"

namespace flashport {
namespace {

// The plan's kernel, and the one that combines its tiles, if they are not combined in the launch.
template <class Params>
void launch_and_combine(const Check& check, const DecodePlan& plan, const Params& params, DeviceContext& device,
                        Stream stream) {
  device.launch(check, stream, *plan.kernel, LaunchGrid{plan.grid}, params);
  if (plan.combine_kernel != nullptr) {
    device.launch(check, stream, *plan.combine_kernel, LaunchGrid{plan.combine_grid}, params);
  }
}

void launch(const Check& check, const DecodeProblem& problem, const DecodePlan& plan, DeviceContext& device,
            Stream stream) {
  if (plan.kernel->shape.decode.shape.has_wide_segments) {
    return launch_and_combine(check, plan, segments_params(problem, plan), device, stream);
  }
  if (reads_segments(plan.kernel->shape.decode.shape)) {
    device.launch(check, stream, *plan.kernel, LaunchGrid{plan.grid}, mixed_params(problem, plan));
  } else if (reads_factors(plan.kernel->shape.decode.shape)) {
    device.launch(check, stream, *plan.kernel, LaunchGrid{plan.grid},
                  FactorDecodeParams{plan.params, plan.factors.k, plan.factors.v});
  } else {
    device.launch(check, stream, *plan.kernel, LaunchGrid{plan.grid}, plan.params);
  }
  if (plan.combine_kernel != nullptr) {
    device.launch(check, stream, *plan.combine_kernel, LaunchGrid{plan.combine_grid}, plan.params);
  }
}

void launch(const Check& check, const MergeLaunch& merge, DeviceContext& device, Stream stream) {
  if (merge.kernel == nullptr) return;
  device.launch(check, stream, *merge.kernel, LaunchGrid{merge.grid}, merge.params);
}

template <class Args>
void run_decode(const Args& args, const DecodeProblem& problem, Stream stream) {
  if (problem.empty) return log_call([&] { return call_text(args) + ": " + kNothingToDo; });
  const Check check(problem.function);
  DeviceContext& device = device_context(check, problem.q, "q");
  DecodePlan plan = plan_decode(problem, device);
  if (checks_contents(check, device, stream)) check_decode_contents(check, device, stream, problem);

  WorkspaceLease workspace;
  if (plan.workspace_bytes > 0) {
    workspace = acquire_workspace(check, device, stream, plan.workspace_bytes, problem.workspace);
    bind_workspace(plan, workspace.data());
  }
  launch(check, problem, plan, device, stream);
  launch(check, plan.merge, device, stream);
  log_call([&] { return call_text(args) + ": " + schedule_of(plan).text; });
}

// False, and nothing is done, where one kernel reads all segments.
bool run_by_segment(const MixedDecodeArgs& args, const DecodeProblem& problem, Stream stream) {
  if (!problem.by_segment) return false;
  const Check check(problem.function);
  DeviceContext& device = device_context(check, problem.q, "q");
  std::optional<SegmentLaunches> launches = plan_segments(problem, device);
  if (!launches) return false;
  if (checks_contents(check, device, stream)) check_decode_contents(check, device, stream, problem);
  const WorkspaceLease workspace =
      acquire_workspace(check, device, stream, launches->workspace_bytes, problem.workspace);
  bind_workspace(*launches, workspace.data());
  for (const DecodePlan& plan : launches->segments) launch(check, problem, plan, device, stream);
  launch(check, launches->merge, device, stream);
  log_call([&] { return call_text(args) + ": " + text_of(*launches); });
  return true;
}

}  // namespace

void flash_decode(const DecodeArgs& args, Stream stream) { run_decode(args, validate_flash_decode(args), stream); }

bool decode_and_append(const DecodeArgs& args, const AppendRotaryParams& append, Stream stream) {
  DecodeProblem problem = validate_flash_decode(args);
  problem.appends = true;
  const Check check(problem.function);
  DeviceContext& device = device_context(check, problem.q, "q");
  DecodePlan plan = plan_decode(problem, device);
  if (!plan.kernel->shape.decode.shape.appends) return false;
  const WorkspaceLease workspace = acquire_workspace(check, device, stream, plan.workspace_bytes, problem.workspace);
  bind_workspace(plan, workspace.data());
  launch_and_combine(check, plan, AppendDecodeParams{plan.params, append}, device, stream);
  log_call([&] { return call_text(args) + ": " + schedule_of(plan).text; });
  return true;
}

std::int64_t decode_workspace_size(const DecodeArgs& args) {
  const DecodeProblem problem = validate_decode_size(args);
  if (problem.empty) return 0;
  return plan_decode(problem, device_context(Check(problem.function), problem.q, "q")).workspace_bytes;
}

void flash_decode_mixed(const MixedDecodeArgs& args, Stream stream) {
  const DecodeProblem problem = validate_mixed(args);
  if (!run_by_segment(args, problem, stream)) run_decode(args, problem, stream);
}

std::int64_t mixed_workspace_size(const MixedDecodeArgs& args) {
  DecodeProblem problem = validate_mixed_size(args);
  if (problem.empty) return 0;
  DeviceContext& device = device_context(Check(problem.function), problem.q, "q");
  const auto bytes_of_plan = [&] {
    const std::optional<SegmentLaunches> launches = plan_segments(problem, device);
    return launches ? launches->workspace_bytes : plan_decode(problem, device).workspace_bytes;
  };
  // Where and how memory lies may ask for another kernel, and changes no size.
  problem.segments_as_stored = false;
  std::int64_t bytes = bytes_of_plan();
  if (!args.by_segment || !may_be_read_as_stored(problem)) return bytes;
  problem.segments_as_stored = true;
  for (const std::uintptr_t address : {0, 8}) {  // of whole units of 16 bytes, and of no such
    place_segments(*problem.mixed, address);
    bytes = std::max(bytes, bytes_of_plan());
  }
  return bytes;
}

void flash_decode_stage1(const DecodeStage1Args& args, Stream stream) {
  run_decode(args, validate_decode_stage1(args), stream);
}

}  // namespace flashport
