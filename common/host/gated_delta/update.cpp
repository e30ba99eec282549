// gated_delta_update: validate -> params -> a block for each sequence, value head and slice of V.
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include <flashport/gated_delta.h>

#include "common/host/call_log.h"
#include "common/host/contents.h"
#include "common/host/devices.h"
#include "common/host/gated_delta/checks.h"
#include "common/host/gated_delta/kernel_choice.h"
#include "common/host/gated_delta/plan.h"
#include "common/host/gated_delta/problem.h"
#include "common/host/host_indices.h"

namespace flashport {
namespace {

constexpr Check kCheck("gated_delta_update");

void check_steps(const GatedDeltaUpdateArgs& a, const GatedDeltaUpdateParams& p, const DeviceContext& device,
                 Stream stream, const std::vector<std::int64_t>& lengths) {
  const HostIndices slots(kCheck, device, stream, p.steps.indices, p.batch);
  check_slots(kCheck, slots, p.batch, "intermediate_indices", "intermediate_states", a.intermediate_states->shape[0],
              true);
  const std::int64_t columns = a.parent_tokens ? a.parent_tokens->shape[1] : p.num_steps;
  for (std::int64_t n = 0; n < p.batch; ++n) {
    const std::int64_t length = lengths[static_cast<std::size_t>(n)];
    if (slots[n] < 0) continue;
    if (length > p.num_steps || length > columns) {
      const bool steps = length > p.num_steps;
      kCheck.value_error(std::string(steps ? "intermediate_states" : "parent_tokens") +
                         " must have a step for each of "
                         "the " +
                         std::to_string(length) + " tokens of sequence " + std::to_string(n) + ", got " +
                         std::to_string(steps ? p.num_steps : columns));
    }
    if (!a.parent_tokens) continue;
    for (std::int64_t t = 1; t < length; ++t) {
      const IndexArray& parents = p.parents;
      const std::int64_t at = n * p.parents_stride_seq + t * p.parents_stride_token;
      const char* entry = static_cast<const char*>(parents.data) + at * (parents.is_int64 ? 8 : 4);
      const HostIndices value(kCheck, device, stream, {entry, parents.is_int64}, 1);
      const std::int64_t parent = value[0];
      if (parent >= 0 && parent < t) continue;
      kCheck.value_error("parent_tokens[" + std::to_string(n) + ", " + std::to_string(t) +
                         "] = " + std::to_string(parent) + " must lie in [0, " + std::to_string(t - 1) +
                         "] (a token before it)");
    }
  }
}

void check_update_contents(const GatedDeltaUpdateArgs& a, const GatedDeltaUpdateParams& p, const DeviceContext& device,
                           Stream stream) {
  const std::vector<std::int64_t> lengths = sequence_lengths(kCheck, device, stream, p.batch, p.tokens, p.cu_seqlens);
  if (p.state.indices.data != nullptr) {
    const HostIndices slots(kCheck, device, stream, p.state.indices, p.batch);
    check_slots(kCheck, slots, p.batch, "state_indices", "state", a.state->shape[0], a.update_state);
  }
  if (a.intermediate_states) check_steps(a, p, device, stream, lengths);
}

GateForm gate_form(const GatedDeltaUpdateArgs& a) {
  const bool made = a.a && a.dt_bias && a.b && a.b->rank != 4 && a.a_log->dtype == DType::kFloat32;
  if (!made || a.allow_neg_eigval || a.gk || a.gv || a.final_states) return GateForm::kAny;
  return a.is_kda ? GateForm::kKey : GateForm::kHead;
}

// The pool's type, but fp16 where any of the states are fp16: a kernel has one 16-bit type.
DType state_type(const GatedDeltaUpdateArgs& a) {
  const std::optional<TensorView>* const all[] = {&a.state, &a.final_states, &a.intermediate_states};
  const auto has = [&](DType dtype) {
    return std::any_of(std::begin(all), std::end(all), [&](auto* view) { return *view && (*view)->dtype == dtype; });
  };
  if (!has(DType::kFloat16)) return a.state ? a.state->dtype : DType::kFloat32;
  if (has(DType::kBFloat16)) {
    kCheck.not_supported("state, final_states and intermediate_states must not be float16 and bfloat16 in one call");
  }
  return DType::kFloat16;
}

const KernelEntry& choose_kernel(const GatedDeltaUpdateArgs& a, const DeviceContext& device) {
  const GatedDeltaRequest request{a.q.dtype, state_type(a), a.q.shape[3], a.v.shape[3], a.state_layout, gate_form(a)};
  std::string reason;
  const KernelEntry* kernel = choose_gated_delta_update(device.target_view(), request, reason);
  if (kernel == nullptr) kCheck.not_supported(reason);
  return *kernel;
}

}  // namespace

void gated_delta_update(const GatedDeltaUpdateArgs& args, Stream stream) {
  GatedDeltaUpdateParams p = gated_delta_update_problem(kCheck, args);
  if (p.batch == 0 || (p.tokens == 0 && !args.final_states)) {
    return log_call([&] { return call_text(kCheck, args) + ": " + kNothingToDo; });
  }
  DeviceContext& device = device_context(kCheck, args.q, "q");
  const KernelEntry& kernel = choose_kernel(args, device);
  const UpdatePlan plan = plan_update(kCheck, kernel, p);
  if (checks_contents(kCheck, device, stream)) check_update_contents(args, p, device, stream);
  device.launch(kCheck, stream, kernel, LaunchGrid{plan.blocks}, p);
  log_call([&] { return call_text(kCheck, args) + ": " + schedule_of(plan).text; });
}

}  // namespace flashport
