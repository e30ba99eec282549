// attention: validate -> plan -> launch.
#include <flashport/attention.h>

#include "common/host/attention/lengths.h"
#include "common/host/attention/plan.h"
#include "common/host/attention/problem.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/contents.h"
#include "common/host/devices.h"
#include "common/host/workspace.h"

namespace flashport {

void attention(const AttentionArgs& args, Stream stream) {
  const AttentionProblem problem = validate_attention(args);
  if (problem.empty) return log_call([&] { return call_text(args) + ": " + kNothingToDo; });
  const Check check(problem.function);
  DeviceContext& device = device_context(check, problem.q, "q");
  AttentionPlan plan = plan_attention(problem, device);
  if (checks_contents(check, device, stream)) check_attention_contents(check, device, stream, problem);
  const WorkspaceLease workspace = acquire_workspace(check, device, stream, plan.workspace_bytes, problem.workspace);
  bind_workspace(plan, workspace.data());
  device.launch(check, stream, *plan.kernel, LaunchGrid{plan.grid}, plan.params);
  if (plan.merge_kernel != nullptr) {
    device.launch(check, stream, *plan.merge_kernel, LaunchGrid{plan.merge_grid}, plan.params);
  }
  log_call([&] { return call_text(args) + ": " + schedule_of(plan).text; });
}

std::int64_t attention_workspace_size(const AttentionArgs& args) {
  const AttentionProblem problem = validate_attention_size(args);
  if (problem.empty) return 0;
  return plan_attention(problem, device_context(Check(problem.function), problem.q, "q")).workspace_bytes;
}

}  // namespace flashport
