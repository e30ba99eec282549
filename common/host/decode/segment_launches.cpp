#include "common/host/decode/segment_launches.h"

#include <algorithm>

#include "common/device/decode/chunks.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/decode/kernel_choice.h"
#include "common/host/rounding.h"

namespace flashport {
namespace {

bool has_kernel_of_its_own(const DecodeProblem& problem, const CacheSegment& segment, const DeviceContext& device) {
  const DecodeParams& p = problem.params;
  const KernelRequest request{p.q.dtype,    segment.k_format, segment.v_format, p.head_dim_qk,
                              p.head_dim_v, p.group_size,     p.max_q_len};
  const KernelEntry* kernel = choose_decode_kernel(device.kernels(), device.target(), request, nullptr);
  return kernel != nullptr && !reads_segments(kernel->shape.decode.shape);
}

bool stores_16_bits(const DecodePlan& plan) { return !is_quantised(plan.kernel->shape.decode.shape.k_format); }

// The kernel that reads segments one after the other as `of_16_bits` and `of_blocks` would. Null: there is none.
const KernelEntry* find_kernel_of_pair(const DeviceContext& device, const KernelEntry* of_16_bits,
                                       const KernelEntry* of_blocks) {
  struct Known {
    const KernelEntry *of_16_bits = nullptr, *of_blocks = nullptr, *found = nullptr;
  };
  thread_local Known last;  // what was asked for last
  if (last.of_16_bits == of_16_bits && last.of_blocks == of_blocks) return last.found;
  last = {of_16_bits, of_blocks, nullptr};
  for (const KernelEntry& entry : device.kernels()) {
    if (entry.tag != KernelTag::kDecodeSegments) continue;
    const DecodeSegmentsConfig& its = entry.shape.decode_segments;
    if (is_same_tile(its.of_16_bits.shape, of_16_bits->shape.decode.shape) &&
        !of_16_bits->shape.decode.shape.large_cache &&
        is_same_tile(its.of_blocks.shape, of_blocks->shape.decode.shape) &&
        its.of_blocks.shape.large_cache == of_blocks->shape.decode.shape.large_cache) {
      last.found = &entry;
    }
  }
  return last.found;
}

// Whether segments of the same formats have two kernels, as some have room for many keys.
bool have_two_kernels(const std::vector<DecodePlan>& plans) {
  for (const DecodePlan& a : plans) {
    for (const DecodePlan& b : plans) {
      if (a.kernel != b.kernel && is_same_tile(a.kernel->shape.decode.shape, b.kernel->shape.decode.shape)) return true;
    }
  }
  return false;
}

// Whether the launch of all knows keys and queries like those of the segment, and tiles that are shared like its own.
bool may_join(const DecodePlan& plan) {
  return reads_plain_rows(plan.params, plan.kernel->shape.decode.shape) && plan.kernel->decode_split.row_slices == 1 &&
         plan.params.row_tiles == 1;
}

// The bytes of all results of a segment: also tiles that a block has whole are published.
std::int64_t bytes_of_results(const DecodePlan& plan) {
  const DecodeParams& p = plan.params;
  const std::int64_t floats = std::int64_t{p.slices} * p.slice_floats;
  return partials_bytes(plan.grid, p.side_partials, static_cast<int>(floats)) +
         std::int64_t{p.batch} * p.num_kv_heads * floats * 4;
}

// Makes one launch of those of the segments, and another for their results, if a kernel reads all of them. The
// workspace has room for both ways: layouts and types, which may ask for the other one, change no size.
void join(SegmentLaunches& launches, const Check& check, DeviceContext& device) {
  if (!device.has_kernel(KernelTag::kDecodeSegments)) return;
  const KernelEntry *of_16_bits = nullptr, *of_blocks = nullptr;
  std::int64_t grid = 0, results = 0;
  for (const DecodePlan& plan : launches.segments) {
    const KernelEntry*& its = stores_16_bits(plan) ? of_16_bits : of_blocks;
    if (its != nullptr && its != plan.kernel) return;
    its = plan.kernel;
    grid = std::max(grid, ceil_div(plan.grid, plan.kernel->teams));
    results += bytes_of_results(plan);
  }
  if (of_16_bits == nullptr || of_blocks == nullptr) return;
  const KernelEntry* kernel = find_kernel_of_pair(device, of_16_bits, of_blocks);
  if (kernel == nullptr) return;
  launches.workspace_bytes = std::max(launches.workspace_bytes, kCounterBytes + results);
  if (!std::ranges::all_of(launches.segments, may_join)) return;
  launches.kernel = kernel;
  launches.grid = grid;
  launches.combine_kernel = &device.plain_kernel(check, KernelTag::kDecodeSegmentsCombine);
  const DecodeParams& p = launches.segments[0].params;
  const std::int64_t tiles = std::int64_t{p.batch} * p.num_kv_heads;
  // As many as let each thread have a piece of one segment.
  const int threads = launches.combine_kernel->threads / static_cast<int>(launches.segments.size());
  launches.combine_parts =
      combine_parts(*launches.combine_kernel, threads, tiles, std::int64_t{p.group_size} * p.head_dim_v, check, device);
  launches.combine_grid = tiles * launches.combine_parts;
}

// The params of both launches, in the order of the kernel.
void join_params(SegmentLaunches& launches, char* workspace) {
  SegmentsDecodeParams& all = launches.params;
  all.count = 0;
  char* partials = workspace + kCounterBytes;
  for (const bool of_16_bits : {true, false}) {
    for (const DecodePlan& plan : launches.segments) {
      if (stores_16_bits(plan) != of_16_bits) continue;
      const DecodeConfig& its = plan.kernel->shape.decode;
      DecodeParams& p = all.segments[all.count];
      p = plan.params;
      p.counters = nullptr;  // all is combined by the other launch
      p.partials = reinterpret_cast<float*>(partials);
      p.combine = {launches.combine_parts, its.shape.rows,
                   its.shape.head_dim_v / plan.kernel->decode_split.column_slices};
      partials += bytes_of_results(plan);
      ++all.count;
    }
    if (of_16_bits) all.count_of_16_bits = all.count;
  }
  DecodeParams& first = all.segments[0];
  first.out = launches.merge.params.out;
  first.lse = launches.merge.params.lse;
  first.sinks = launches.segments[0].params.sinks;
}

}  // namespace

std::optional<SegmentLaunches> plan_segments(const DecodeProblem& problem, DeviceContext& device) {
  if (!problem.by_segment) return std::nullopt;
  const MixedProblem& mixed = *problem.mixed;
  SegmentLaunches launches;
  DecodeParams partial = problem.params;
  launches.merge = plan_merge(partial, problem.total_q, mixed.segment_count, Check(problem.function), device);
  const auto plan = [&](std::int32_t i, bool may_be_large) {
    DecodeProblem its{};
    its.function = problem.function;
    its.q = problem.q;
    its.params = partial;
    its.is_partial = true;
    its.may_be_large = may_be_large;
    if (i > 0) its.params.sinks = nullptr;  // one softmax has them once
    read_one_cache(its, mixed.segments[i], mixed.bounds[i]);
    return plan_decode(its, device);
  };
  for (std::int32_t i = 0; i < mixed.segment_count; ++i) {
    if (!has_kernel_of_its_own(problem, mixed.segments[i], device)) return std::nullopt;
    launches.segments.push_back(plan(i, true));
  }
  // One launch has one kernel of a pair of formats; and whether there is one launch must not depend on the batch.
  if (have_two_kernels(launches.segments)) {
    for (std::int32_t i = 0; i < mixed.segment_count; ++i)
      launches.segments[static_cast<std::size_t>(i)] = plan(i, false);
  }
  for (const DecodePlan& its : launches.segments) {
    launches.merge.offset = std::max(launches.merge.offset, its.workspace_bytes);
  }
  launches.workspace_bytes = launches.merge.offset + launches.merge.bytes;
  join(launches, Check(problem.function), device);
  return launches;
}

void bind_workspace(SegmentLaunches& launches, void* workspace) {
  if (launches.kernel != nullptr) return join_params(launches, static_cast<char*>(workspace));
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
  if (launches.kernel != nullptr) {
    return counted(launches.params.count, "segment") + " by " + launch_text(*launches.kernel, launches.grid) +
           "; combined by " + launch_text(*launches.combine_kernel, launches.combine_grid);
  }
  std::string text;
  for (std::size_t i = 0; i < launches.segments.size(); ++i) {
    text += "segments[" + std::to_string(i) + "] by " + schedule_of(launches.segments[i]).text + "; ";
  }
  return text + "merged by " + launch_text(*launches.merge.kernel, launches.merge.grid);
}

}  // namespace flashport
