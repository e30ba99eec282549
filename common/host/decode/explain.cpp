// explain(): what plan_decode() would decide about a call of these shapes. Lengths are not known here; the tile
// scheduler cuts each sequence by its own.
#include <algorithm>
#include <limits>
#include <string>

#include <flashport/decode.h>

#include "common/device/decode/chunks.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/decode/kernel_choice.h"
#include "common/host/decode/plan.h"
#include "common/host/devices.h"

namespace flashport {
namespace {

constexpr Check kCheck("explain");

// Scales of a contiguous cache, as kernels that read factors want them.
void lay_out_factors(DecodeProblem& problem, Factors factors) {
  alignas(16) static char nothing[16];  // not read
  const DecodeParams& p = problem.params;
  const auto scales_of = [&](int head_dim) -> KeyScales {
    const std::int64_t count = factors == Factors::kOfGroups ? head_dim / kFactoredValues : 1;
    const std::int64_t token = p.num_kv_heads * count;
    if (factors == Factors::kOfRows) return {nothing, DType::kFloat32, token * p.cache.max_len, token, 1, 0, 0};
    return {nothing, DType::kFloat16, token * p.cache.max_len, token, count, 1, kFactoredValues};
  };
  problem.mixed->segments[0] = {p.cache, problem.k_format, problem.v_format, scales_of(p.head_dim_qk),
                                scales_of(p.head_dim_v)};
  problem.mixed->segment_count = 1;
}

// As validation leaves a plain call (PlainDecodeParams) on contiguous keys [token, head], whose sequences have room for
// max_kv_len each.
DecodeProblem problem_of(const DecodeScheduleQuery& query) {
  const DecodeQuery& call = query.call;
  DecodeProblem problem{};
  problem.function = kCheck.function();
  const KernelRequest request = request_of(call);
  problem.k_format = request.k_format;
  problem.v_format = request.v_format;
  if (request.segment_formats != 0 || request.scales_beside) {
    problem.mixed = std::make_unique<MixedProblem>();
    problem.mixed->formats = request.segment_formats;
  }
  problem.appends = call.appends;
  problem.num_splits = query.num_splits;
  problem.total_q = query.batch * call.q_len;
  DecodeParams& p = problem.params;
  p.batch = static_cast<std::int32_t>(query.batch);
  p.num_kv_heads = static_cast<std::int32_t>(query.num_kv_heads);
  p.group_size = static_cast<std::int32_t>(call.group_size);
  p.num_q_heads = p.num_kv_heads * p.group_size;
  p.head_dim_qk = static_cast<std::int32_t>(call.head_dim_qk);
  p.head_dim_v = static_cast<std::int32_t>(call.head_dim_v);
  p.max_q_len = static_cast<std::int32_t>(call.q_len);
  p.q.dtype = p.out.dtype = call.q_dtype;
  p.q.stride_dim = p.out.stride_dim = 1;
  p.window_left = -1;
  fill_right_window(p, query.causal ? 0 : -1);
  static constexpr std::int32_t kLengths[1] = {};  // not read
  p.cache.seqlens.data = kLengths;
  p.cache.k.copy_unit = p.cache.v.copy_unit = 16;
  p.cache.k.row_bytes = p.cache.k.head_stride = kv_row_bytes(problem.k_format, p.head_dim_qk);
  p.cache.v.row_bytes = p.cache.v.head_stride = kv_row_bytes(problem.v_format, p.head_dim_v);
  p.cache.max_len = static_cast<std::int32_t>(query.max_kv_len);
  p.cache.page_size = 1;
  if (request.factors != Factors::kNone) lay_out_factors(problem, request.factors);
  return problem;
}

std::string text_of(const DecodeSchedule& s, const KernelEntry& kernel) {
  std::string text =
      launch_text(kernel, s.blocks) + " for " + counted(s.query_tiles, "query tile") + " of " + counted(s.rows, "row");
  if (s.most_chunks == 1) {
    text += ", each in one chunk";
  } else {
    text += ", each in at most " + std::to_string(s.most_chunks) + " chunks of ";
    if (s.shortest_chunk != s.longest_chunk) text += std::to_string(s.shortest_chunk) + " to ";
    text += std::to_string(s.longest_chunk) + " keys";
  }
  text += "; " + counted(s.keys, "key") + " a turn, " + counted(s.stages, "stage");
  switch (s.combine) {
    case Combine::kNone: text += "; nothing to combine"; break;
    case Combine::kInLaunch: text += "; combined in the launch"; break;
    case Combine::kSecondLaunch: text += "; combined in a second launch"; break;
  }
  return text + "; " + counted(s.workspace_bytes, "byte") + " of workspace";
}

}  // namespace

DecodeSchedule explain(const DecodeScheduleQuery& query) {
  constexpr std::int64_t kMostHeads = 1 << 24;  // of a batch: all counts fit 64 bits, and num_q_heads 32
  kCheck.range(query.batch, "batch", 1, kMostHeads);
  kCheck.range(query.num_kv_heads, "num_kv_heads", 1, kMostHeads / query.batch);
  kCheck.range(query.max_kv_len, "max_kv_len", 0, kMaxSequence);
  kCheck.range(query.num_splits, "num_splits", kInvariantSplits, std::numeric_limits<int>::max());
  std::string reason;
  const KernelEntry* kernel = find_decode_kernel(query.call, reason);
  if (kernel == nullptr) kCheck.not_supported(reason);
  DeviceContext& device = find_device(kCheck, find_target(query.call.target, reason));

  return schedule_of(plan_decode(problem_of(query), device));
}

DecodeSchedule schedule_of(const DecodePlan& plan) {
  const DecodeParams& p = plan.params;
  const std::int64_t leaves = std::max<std::int64_t>(leaves_of(p.cache.max_len), 1);
  const KernelEntry& kernel = *plan.kernel;
  DecodeSchedule s;
  s.kernel = kernel.key;
  s.rows = kernel.shape.decode.shape.rows;
  s.keys = std::int64_t{kLeafKeys} * kernel.decode_split.turn_leaves;
  s.stages = kernel.shape.decode.tuning.stages;
  s.threads = kernel.threads;
  s.teams = kernel.teams;
  s.shared_bytes = kernel.shared_bytes;
  s.blocks = plan.grid;
  s.query_tiles = std::int64_t{p.batch} * p.num_kv_heads * p.row_tiles;
  s.workspace_bytes = plan.workspace_bytes;
  if (p.num_chunks > 0) {
    s.most_chunks = p.num_chunks;
    s.shortest_chunk = kLeafKeys;
    s.longest_chunk = (leaves + p.num_chunks - 1) / p.num_chunks * kLeafKeys;
  } else {
    s.most_chunks = most_chunks(leaves, p.chunk_rule);
    s.shortest_chunk = kLeafKeys << p.chunk_rule.least_shift;
    s.longest_chunk = std::int64_t{kLeafKeys} * chunk_size(static_cast<int>(leaves), p.chunk_rule).leaves;
  }
  if (s.most_chunks > 1) {
    const bool later = plan.combine_kernel != nullptr || plan.merge.kernel != nullptr;
    s.combine = later ? Combine::kSecondLaunch : Combine::kInLaunch;
  }
  s.text = text_of(s, kernel);
  return s;
}

}  // namespace flashport
