// explain(): what plan_attention() would decide about a call of these shapes.
#include <algorithm>
#include <limits>
#include <string>

#include <flashport/attention.h>

#include "common/device/attention/pieces.h"
#include "common/host/attention/few_queries.h"
#include "common/host/attention/kernel_choice.h"
#include "common/host/attention/plan.h"
#include "common/host/attention/problem.h"
#include "common/host/check.h"
#include "common/host/devices.h"
#include "common/host/query.h"

namespace flashport {
namespace {

constexpr Check kCheck("explain");

// As validation leaves a call of dense sequences.
AttentionProblem problem_of(const AttentionScheduleQuery& query) {
  const AttentionQuery& call = query.call;
  AttentionProblem problem{};
  problem.function = kCheck.function();
  const AttentionRequest request = request_of(call);
  problem.needs = request.needs;
  problem.paged = request.paged;
  problem.scales_beside = request.scales_beside;
  problem.num_splits = query.num_splits;
  AttentionParams& p = problem.params;
  p.batch = static_cast<std::int32_t>(query.batch);
  p.q_len = static_cast<std::int32_t>(query.q_len);
  p.kv_len = static_cast<std::int32_t>(query.kv_len);
  p.total_q = query.batch * query.q_len;
  p.total_k = query.batch * query.kv_len;
  p.num_q_heads = static_cast<std::int32_t>(query.num_q_heads);
  p.num_kv_heads = static_cast<std::int32_t>(query.num_kv_heads);
  p.group_size = p.num_q_heads / p.num_kv_heads;
  p.head_dim_qk = static_cast<std::int32_t>(call.head_dim_qk);
  p.head_dim_v = static_cast<std::int32_t>(call.head_dim_v);
  p.cache.max_len = p.kv_len;
  p.q.dtype = request.q_dtype;
  p.out.dtype = request.dtype;
  p.k_format = request.k_format;
  p.v_format = request.v_format;
  p.window_left = -1;
  p.window_right = call.causal ? 0 : -1;
  return problem;
}

// Few queries: what flash_decode does.
AttentionSchedule schedule_of(const DecodeSchedule& decode) {
  AttentionSchedule s;
  s.kernel = decode.kernel;
  s.blocks = decode.blocks;
  s.work_tiles = decode.query_tiles;
  s.pieces = decode.most_chunks;
  s.workspace_bytes = decode.workspace_bytes;
  s.text = "flash_decode's " + decode.text;
  return s;
}

// Kernels that do not append come after the launch that does.
AttentionSchedule with_append(AttentionSchedule s, const AttentionQuery& call) {
  if (!call.appends || s.kernel.starts_with(kernel_tag_name(KernelTag::kDecodeAppend))) return s;
  std::string reason;
  const KernelEntry* append = find_plain_kernel(find_target(call.target, reason), KernelTag::kAppendRotary, reason);
  if (append == nullptr) kCheck.not_supported(reason);
  s.text = std::string(append->key) + ", then " + s.text;
  return s;
}

std::string text_of(const AttentionSchedule& s) {
  return s.kernel + ": " + counted(s.blocks, "block") + " of " + counted(s.threads, "thread") + " and " +
         counted(s.shared_bytes, "byte") + " of shared memory for " + counted(s.work_tiles, "work tile") + " of " +
         counted(s.rows, "row") + "; key tiles of " + counted(s.keys, "key") + ", " + counted(s.stages, "stage") +
         ", keys in " + counted(s.pieces, "piece") + (s.pieces > 1 ? ", merged in a second launch; " : "; ") +
         counted(s.workspace_bytes, "byte") + " of workspace";
}

}  // namespace

AttentionSchedule explain(const AttentionScheduleQuery& query) {
  constexpr std::int64_t kMostHeads = 1 << 24;  // of a batch
  kCheck.range(query.batch, "batch", 1, kMostHeads);
  kCheck.range(query.num_q_heads, "num_q_heads", 1, kMostHeads / query.batch);
  kCheck.range(query.num_kv_heads, "num_kv_heads", 1, query.num_q_heads);
  if (query.num_q_heads % query.num_kv_heads != 0) {
    kCheck.value_error("num_q_heads must be a multiple of num_kv_heads, got " + std::to_string(query.num_q_heads) +
                       " and " + std::to_string(query.num_kv_heads));
  }
  kCheck.range(query.q_len, "q_len", 1, kMostTokens);
  kCheck.range(query.kv_len, "kv_len", 0, kMostTokens);
  kCheck.range(query.num_splits, "num_splits", kInvariantSplits, kMostPieces);
  AttentionQuery call = query.call;
  call.q_len = query.num_splits == kInvariantSplits ? query.q_len : 0;
  call.group_size = query.num_q_heads / query.num_kv_heads;
  if (const std::optional<DecodeQuery> decode = as_decode(call); decode && query.kv_len > 0) {
    return with_append(
        schedule_of(explain(DecodeScheduleQuery{
            .call = *decode, .batch = query.batch, .num_kv_heads = query.num_kv_heads, .max_kv_len = query.kv_len})),
        query.call);
  }
  std::string reason;
  if (find_attention_kernel(query.call, reason) == nullptr) kCheck.not_supported(reason);
  DeviceContext& device = find_device(kCheck, find_target(query.call.target, reason));

  return with_append(schedule_of(plan_attention(problem_of(query), device)), query.call);
}

AttentionSchedule schedule_of(const AttentionPlan& plan) {
  const AttentionTuning& tuning = plan.kernel->shape.attention.tuning;
  AttentionSchedule s;
  s.kernel = plan.kernel->key;
  s.rows = tuning.rows;
  s.keys = tuning.keys;
  s.stages = tuning.stages;
  s.threads = plan.kernel->threads;
  s.blocks = plan.grid;
  s.work_tiles = plan.work_tiles;
  s.pieces = std::max(plan.params.pieces.most, 1);
  s.shared_bytes = plan.kernel->shared_bytes;
  s.workspace_bytes = plan.workspace_bytes;
  s.text = text_of(s);
  return s;
}

}  // namespace flashport
