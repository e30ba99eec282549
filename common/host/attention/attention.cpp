// attention: validate -> plan -> launch. New keys are written by a launch before it; few queries are decoded,
// and few new keys with them written by the same launch where a kernel does both.
#include <flashport/attention.h>

#include "common/host/append_decode.h"
#include "common/host/attention/append.h"
#include "common/host/attention/few_queries.h"
#include "common/host/attention/lengths.h"
#include "common/host/attention/plan.h"
#include "common/host/attention/problem.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/contents.h"
#include "common/host/devices.h"
#include "common/host/workspace.h"

namespace flashport {
namespace {

void launch_append(const Check& check, DeviceContext& device, Stream stream, const AppendLaunch& append) {
  if (append.kernel == nullptr) return;
  device.launch(check, stream, *append.kernel, LaunchGrid{append.grid}, append.params);
}

std::string append_text(const AppendLaunch& append) {
  return append.kernel == nullptr ? "" : std::string(append.kernel->key) + ", then ";
}

// flash_decode logs its own call, with its kernel.
void decode_few(const AttentionArgs& args, const AttentionProblem& problem, DecodeArgs decode, Stream stream) {
  const Check check(problem.function);
  DeviceContext& device = device_context(check, problem.q, "q");
  if (checks_contents(check, device, stream)) check_attention_contents(check, device, stream, problem);
  if (!problem.appends && !problem.workspace) return flash_decode(decode, stream);
  const bool may_append =
      problem.appends && device.has_kernel(KernelTag::kDecodeAppend) && may_append_in_launch(problem);
  const auto appends_in_launch = [&] {
    if (!may_append || !decode_and_append(decode, problem.append, stream)) return false;
    log_call([&] { return call_text(args) + ": flash_decode with new keys"; });
    return true;
  };
  // Such a launch takes what decoding needs alone, and needs no sizes where the call brings no workspace.
  if (!problem.workspace && appends_in_launch()) return;

  std::int64_t bytes = decode_workspace_size(decode);
  if (!problem.appends) {
    (void)acquire_workspace(check, device, stream, bytes, problem.workspace);  // refuses it in this function's name
    return flash_decode(decode, stream);
  }
  AppendLaunch append = plan_append(problem, device, bytes);
  const WorkspaceLease workspace = acquire_workspace(check, device, stream, bytes, problem.workspace);
  char* base = static_cast<char*>(workspace.data());
  decode.workspace = workspace_view(base, append.offset, args.q.device);
  if (problem.workspace && appends_in_launch()) return;
  attend_after(bind_append(append.params, problem.params.q, base + append.offset), decode);
  launch_append(check, device, stream, append);
  log_call([&] { return call_text(args) + ": " + append_text(append) + "flash_decode"; });
  flash_decode(decode, stream);
}

}  // namespace

void attention(const AttentionArgs& args, Stream stream) {
  const AttentionProblem problem = validate_attention(args);
  if (problem.empty) return log_call([&] { return call_text(args) + ": " + kNothingToDo; });
  const Check check(problem.function);
  DeviceContext& device = device_context(check, problem.q, "q");
  if (const std::optional<DecodeArgs> decode = as_decode(args, problem, device)) {
    return decode_few(args, problem, *decode, stream);
  }
  AttentionPlan plan = plan_attention(problem, device);
  if (checks_contents(check, device, stream)) check_attention_contents(check, device, stream, problem);
  const WorkspaceLease workspace = acquire_workspace(check, device, stream, plan.workspace_bytes, problem.workspace);
  bind_workspace(plan, workspace.data());
  launch_append(check, device, stream, plan.append);
  device.launch(check, stream, *plan.kernel, LaunchGrid{plan.grid, 1, 1, plan.cluster}, plan.params);
  if (plan.merge_kernel != nullptr) {
    device.launch(check, stream, *plan.merge_kernel, LaunchGrid{plan.merge_grid}, plan.params);
  }
  log_call([&] { return call_text(args) + ": " + append_text(plan.append) + schedule_of(plan).text; });
}

std::int64_t attention_workspace_size(const AttentionArgs& args) {
  const AttentionProblem problem = validate_attention_size(args);
  if (problem.empty) return 0;
  DeviceContext& device = device_context(Check(problem.function), problem.q, "q");
  if (const std::optional<DecodeArgs> decode = as_decode(args, problem, device)) {
    std::int64_t bytes = decode_workspace_size(*decode);
    (void)plan_append(problem, device, bytes);
    return bytes;
  }
  return plan_attention(problem, device).workspace_bytes;
}

}  // namespace flashport
