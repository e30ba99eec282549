#include "common/host/gated_delta/kernel_choice.h"

#include <flashport/error.h>

#include "common/host/check.h"
#include "common/host/last_choice.h"
#include "common/host/query.h"

namespace flashport {
namespace {

constexpr std::int64_t kLeastHeadDim = 16, kHeadDimStep = 8;

// Why no target serves the request; empty if some may.
std::string limit_reason(const GatedDeltaRequest& r) {
  if (std::string problem = dtype_problem("q", r.q, kDeltaTypes); !problem.empty()) return problem;
  if (std::string problem = dtype_problem("state", r.state, kStateTypes); !problem.empty()) return problem;
  if (std::string problem = head_dim_problem("head_dim_k", r.head_dim_k); !problem.empty()) return problem;
  return head_dim_problem("head_dim_v", r.head_dim_v);
}

// The kernel of an operation that fits and has the smallest width that covers `wanted`.
template <class Width, class Fits, class Text>
const KernelEntry* choose_narrowest(const TargetView& target, KernelTag tag, std::int64_t wanted, const Width& width,
                                    const Fits& fits, const Text& request, std::string& reason) {
  const KernelEntry* best = nullptr;
  bool has_any = false;
  for (const KernelEntry& kernel : target.kernels) {
    if (kernel.tag != tag) continue;
    has_any = true;
    if (width(kernel) < wanted || !fits(kernel)) continue;
    if (best == nullptr || width(kernel) < width(*best)) best = &kernel;
  }
  if (best == nullptr) {
    reason = target.name + " has no kernel " + kernel_tag_name(tag) + (has_any ? request() : "");
  }
  return best;
}

// CPUs compute in fp32 whatever the inputs are, GPUs in their type.
MathType chunk_math(const TargetView& target, DType q) {
  if (target.kind == DeviceKind::kCpu || q == DType::kFloat32) return MathType::kFp32;
  return q == DType::kFloat16 ? MathType::kFp16 : MathType::kBf16;
}

// Null, and the reason, where the query cannot be served.
const KernelEntry* answer(const GatedDeltaQuery& query, std::string& reason) {
  const TargetView target = find_target(query.target, reason);
  return reason.empty() ? choose_gated_delta_update(target, request_of(query), reason) : nullptr;
}
const KernelEntry* answer(const GatedDeltaChunkQuery& query, std::string& reason) {
  const TargetView target = find_target(query.target, reason);
  return reason.empty() ? choose_gated_delta_chunk(target, request_of(query), reason).chain : nullptr;
}

}  // namespace

std::string head_dim_problem(const char* name, std::int64_t dim) {
  if (dim >= kLeastHeadDim && dim <= kMostDeltaHeadDim && dim % kHeadDimStep == 0) return "";
  return std::string(name) + " must be a multiple of " + std::to_string(kHeadDimStep) + " from " +
         std::to_string(kLeastHeadDim) + " to " + std::to_string(kMostDeltaHeadDim) + ", got " + std::to_string(dim);
}

const KernelEntry* choose_gated_delta_update(const TargetView& target, const GatedDeltaRequest& request,
                                             std::string& reason) {
  thread_local LastChoice<GatedDeltaRequest> last;
  if (const KernelEntry* known = last.find(target.kernels, request)) return known;
  reason = limit_reason(request);
  if (!reason.empty()) return nullptr;
  const int key_major = request.layout == StateLayout::kKV ? 1 : 0;
  // Kernels of any gates take pools of more than one type; no other kernels take fp16 pools.
  const bool is_half = request.state == DType::kFloat16;
  const GateForm gate = is_half ? GateForm::kAny : request.gate;
  const DType state = gate == GateForm::kAny && !is_half ? DType::kFloat32 : request.state;
  const KernelEntry* best = choose_narrowest(
      target, KernelTag::kGatedDeltaUpdate, request.head_dim_k,
      [](const KernelEntry& kernel) { return kernel.shape.gated_delta_update.shape.head_dim_k; },
      [&](const KernelEntry& kernel) {
        const GatedDeltaShape& shape = kernel.shape.gated_delta_update.shape;
        return shape.state == state && shape.key_major == key_major && shape.gate == gate;
      },
      [&] {
        return " for head_dim_k " + std::to_string(request.head_dim_k) + ", states " + dtype_name(request.state) +
               (key_major != 0 ? " [K, V]" : " [V, K]") +
               (gate == GateForm::kKey   ? ", a gate for each key"
                : gate == GateForm::kAny ? ", gates of any form"
                                         : "");
      },
      reason);
  if (best != nullptr) last.keep(target.kernels, request, best);
  return best;
}

ChunkKernels choose_gated_delta_chunk(const TargetView& target, const GatedDeltaRequest& request, std::string& reason) {
  reason = limit_reason(request);
  if (reason.empty() && request.gate != GateForm::kHead) {
    reason = "gated_delta_chunk takes one gate for each head; gated_delta_update takes others";
  }
  if (!reason.empty()) return {};
  const MathType math = chunk_math(target, request.q);
  const auto choose = [&](KernelTag tag) {
    return choose_narrowest(
        target, tag, request.head_dim_k,
        [](const KernelEntry& kernel) { return kernel.shape.gated_delta_chunk.head_dim_k; },
        [&](const KernelEntry& kernel) { return kernel.shape.gated_delta_chunk.math == math; },
        [&] {
          return std::string(" for ") + dtype_name(request.q) + " q and head_dim_k " +
                 std::to_string(request.head_dim_k);
        },
        reason);
  };
  const KernelEntry* chain = choose(KernelTag::kGatedDeltaChunk);
  const KernelEntry* prepare = chain == nullptr ? nullptr : choose(KernelTag::kGatedDeltaPrepare);
  return prepare == nullptr ? ChunkKernels{} : ChunkKernels{prepare, chain};
}

Support supports(const GatedDeltaQuery& query) {
  return support_answer([&](std::string& reason) { return answer(query, reason); });
}

std::string which_kernel(const GatedDeltaQuery& query) {
  return kernel_answer([&](std::string& reason) { return answer(query, reason); });
}

Support supports(const GatedDeltaChunkQuery& query) {
  return support_answer([&](std::string& reason) { return answer(query, reason); });
}

std::string which_kernel(const GatedDeltaChunkQuery& query) {
  return kernel_answer([&](std::string& reason) { return answer(query, reason); });
}

}  // namespace flashport
