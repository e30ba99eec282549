// gated_delta_update: validate -> params -> a wave for each sequence, value head and slice of V.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <flashport/gated_delta.h>

#include "common/host/devices.h"
#include "common/host/gated_delta_problem.h"
#include "common/host/host_indices.h"
#include "common/host/lengths.h"

namespace flashport {
namespace {

constexpr Check kCheck("gated_delta_update");
constexpr std::int64_t kUnit = 16;            // columns of V that a wave takes at the least
constexpr std::int64_t kMaxBlocks = 1 << 20;  // the kernel strides over what is left

std::string at_text(const char* name, std::int64_t place) {
  return std::string(name) + "[" + std::to_string(place) + "]";
}

// Slots below `slots`; of those that are written no two are the same.
void check_slots(const HostIndices& indices, std::int64_t count, const char* name, const char* pool, std::int64_t slots,
                 bool written) {
  std::vector<std::pair<std::int64_t, std::int64_t>> taken;  // slot, place
  for (std::int64_t n = 0; n < count; ++n) {
    if (indices[n] >= slots) {
      kCheck.value_error(at_text(name, n) + " = " + std::to_string(indices[n]) + " must be below " +
                         std::to_string(slots) + " (the slots of " + pool + "); an index below 0 takes no slot");
    }
    if (written && indices[n] >= 0) taken.emplace_back(indices[n], n);
  }
  std::sort(taken.begin(), taken.end());
  const auto same = std::adjacent_find(taken.begin(), taken.end(),
                                       [](const auto& one, const auto& next) { return one.first == next.first; });
  if (same == taken.end()) return;
  kCheck.value_error(at_text(name, same->second) + " and " + at_text(name, (same + 1)->second) +
                     " must not be the same slot of " + pool + ", got " + std::to_string(same->first) +
                     " for both; give each sequence its own, or -1");
}

// Tokens of each sequence.
std::vector<std::int64_t> sequence_lengths(const GatedDeltaUpdateParams& p, const DeviceContext& device,
                                           Stream stream) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(p.batch), p.tokens);
  if (p.cu_seqlens.data == nullptr) return lengths;
  const HostIndices offsets(kCheck, device, stream, p.cu_seqlens, std::int64_t{p.batch} + 1);
  if (offsets[0] != 0) kCheck.value_error("cu_seqlens must begin with 0, got " + std::to_string(offsets[0]));
  for (std::int64_t n = 0; n < p.batch; ++n) {
    if (offsets[n + 1] < offsets[n] || offsets[n + 1] > p.tokens) {
      kCheck.value_error("cu_seqlens must rise within the " + std::to_string(p.tokens) + " tokens of q, got " +
                         std::to_string(offsets[n]) + " and " + std::to_string(offsets[n + 1]) + " for sequence " +
                         std::to_string(n));
    }
    lengths[static_cast<std::size_t>(n)] = offsets[n + 1] - offsets[n];
  }
  return lengths;
}

void check_steps(const GatedDeltaUpdateArgs& a, const GatedDeltaUpdateParams& p, const DeviceContext& device,
                 Stream stream, const std::vector<std::int64_t>& lengths) {
  const HostIndices slots(kCheck, device, stream, p.steps.indices, p.batch);
  check_slots(slots, p.batch, "intermediate_indices", "intermediate_states", a.intermediate_states->shape[0], true);
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
  const std::vector<std::int64_t> lengths = sequence_lengths(p, device, stream);
  if (p.state.indices.data != nullptr) {
    const HostIndices slots(kCheck, device, stream, p.state.indices, p.batch);
    check_slots(slots, p.batch, "state_indices", "state", a.state->shape[0], a.update_state);
  }
  if (a.intermediate_states) check_steps(a, p, device, stream, lengths);
}

}  // namespace

void gated_delta_update(const GatedDeltaUpdateArgs& args, Stream stream) {
  const GatedDeltaUpdateParams p = gated_delta_update_problem(kCheck, args);
  if (p.batch == 0 || p.tokens == 0) return;
  DeviceContext& device = device_context(kCheck, args.q, "q");
  const KernelEntry& kernel = device.gated_delta_update(kCheck);
  if (checks_contents(kCheck, device, stream)) check_update_contents(args, p, device, stream);
  const std::int64_t slices = (p.head_dim_v + kUnit - 1) / kUnit;
  const std::int64_t blocks = std::int64_t{p.batch} * p.num_v_heads * slices;
  device.launch(kCheck, stream, kernel, std::min(blocks, kMaxBlocks), p);
}

}  // namespace flashport
