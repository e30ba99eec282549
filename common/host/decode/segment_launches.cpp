#include "common/host/decode/segment_launches.h"

#include <algorithm>

#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/decode/kernel_choice.h"

namespace flashport {
namespace {

bool has_kernel_of_its_own(const DecodeProblem& problem, const CacheSegment& segment, const DeviceContext& device) {
  const DecodeParams& p = problem.params;
  const KernelRequest request{p.q.dtype,    segment.k_format, segment.v_format, p.head_dim_qk,
                              p.head_dim_v, p.group_size,     p.max_q_len};
  const KernelEntry* kernel = choose_decode_kernel(device.kernels(), device.target(), request, nullptr);
  return kernel != nullptr && !reads_segments(kernel->shape.decode.shape);
}

}  // namespace

std::optional<SegmentLaunches> plan_segments(const DecodeProblem& problem, DeviceContext& device) {
  if (!problem.by_segment || reads_segments_as_stored(problem, device)) return std::nullopt;
  const MixedProblem& mixed = *problem.mixed;
  SegmentLaunches launches;
  DecodeParams partial = problem.params;
  launches.merge = plan_merge(partial, problem.total_q, mixed.segment_count, Check(problem.function), device);
  for (std::int32_t i = 0; i < mixed.segment_count; ++i) {
    if (!has_kernel_of_its_own(problem, mixed.segments[i], device)) return std::nullopt;
    DecodeProblem its{};
    its.function = problem.function;
    its.q = problem.q;
    its.params = partial;
    its.is_partial = true;
    if (i > 0) its.params.sinks = nullptr;  // one softmax has them once
    read_one_cache(its, mixed.segments[i], mixed.bounds[i]);
    launches.segments.push_back(plan_decode(its, device));
  }
  for (const DecodePlan& its : launches.segments) {
    launches.merge.offset = std::max(launches.merge.offset, its.workspace_bytes);
  }
  launches.workspace_bytes = launches.merge.offset + launches.merge.bytes;
  return launches;
}

void bind_workspace(SegmentLaunches& launches, void* workspace) {
  MergeLaunch& merge = launches.merge;
  merge.bind(static_cast<char*>(workspace));
  for (std::size_t i = 0; i < launches.segments.size(); ++i) {
    DecodePlan& plan = launches.segments[i];
    bind_workspace(plan, workspace);
    const auto part = static_cast<std::int64_t>(i);
    plan.params.out.data = static_cast<float*>(merge.params.mid.data) + part * merge.params.mid_stride_chunk;
    plan.params.lse.data = static_cast<float*>(merge.params.mid_lse.data) + part * merge.params.mid_lse_stride_chunk;
  }
}

std::string text_of(const SegmentLaunches& launches) {
  std::string text;
  for (std::size_t i = 0; i < launches.segments.size(); ++i) {
    text += "segments[" + std::to_string(i) + "] by " + schedule_of(launches.segments[i]).text + "; ";
  }
  return text + "merged by " + launch_text(*launches.merge.kernel, launches.merge.grid);
}

}  // namespace flashport
