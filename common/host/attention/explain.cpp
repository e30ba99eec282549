// explain(): what plan_attention() would decide about a call of these shapes.
#include <algorithm>
#include <optional>
#include <string>

#include <flashport/attention.h>

#include "common/device/attention/pieces.h"
#include "common/host/attention/append.h"
#include "common/host/attention/few_queries.h"
#include "common/host/attention/kernel_choice.h"
#include "common/host/attention/plan.h"
#include "common/host/attention/problem.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/devices.h"
#include "common/host/scores.h"

namespace flashport {
namespace {

constexpr Check kCheck("explain");

AttentionSchedule after(const AppendLaunch& append, AttentionSchedule s) {
  if (append.kernel != nullptr) s.text = std::string(append.kernel->key) + ", then " + s.text;
  return s;
}

// Lengths and offsets of a call. Plans ask whether they are given, and of offsets whether they are the same.
constexpr std::int32_t kGiven[2] = {};

// As validation leaves such a call.
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
  p.total_q = query.total_q > 0 ? query.total_q : query.batch * query.q_len;
  p.total_k = query.total_k > 0 ? query.total_k : query.batch * query.kv_len;
  if (query.total_q > 0) p.cu_seqlens_q = kGiven;
  if (query.total_k > 0) p.cu_seqlens_k = query.same_offsets ? p.cu_seqlens_q : kGiven + 1;
  if (query.seqused_q) p.seqused_q = kGiven;
  if (query.leftpad_k) p.leftpad_k = kGiven;
  if (call.seqused_k) p.cache.seqlens = {kGiven, 0};
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
  fill_window(p, query.window_left, query.window_right, call.causal);
  problem.appends = call.appends;
  if (call.appends) problem.append = append_room(p, query.rotary);
  return problem;
}

// Few queries: what flash_decode does. New keys are written by a launch before it or by its own kernel, which both have
// the workspace of the launch before it, behind that of a call without new keys.
AttentionSchedule schedule_of(DecodeScheduleQuery asked, const AttentionScheduleQuery& query, DeviceContext& device) {
  const DecodeSchedule decode = explain(asked);
  AttentionSchedule s;
  s.kernel = decode.kernel;
  s.rows = decode.rows;
  s.keys = decode.keys;
  s.stages = decode.stages;
  s.threads = decode.threads;
  s.blocks = decode.blocks;
  s.work_tiles = decode.query_tiles;
  s.shared_bytes = decode.shared_bytes;
  s.pieces = decode.most_chunks;
  s.workspace_bytes = decode.workspace_bytes;
  s.text = "flash_decode's " + decode.text;
  if (!query.call.appends) return s;
  asked.call.appends = false;
  s.workspace_bytes = explain(asked).workspace_bytes;
  const AppendLaunch append = plan_append(problem_of(query), device, s.workspace_bytes);
  s.text += ", " + counted(s.workspace_bytes, "byte") + " with that of new keys";
  return s.kernel.starts_with(kernel_tag_name(KernelTag::kDecodeAppend)) ? s : after(append, s);
}

void check_numbers(const AttentionScheduleQuery& query) {
  constexpr std::int64_t kMostHeads = 1 << 24;  // of a batch
  constexpr std::int64_t kMostTotal = std::int64_t{1} << 40;
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
  check_window(kCheck, query.window_left, query.window_right);
  kCheck.range(query.total_q, "total_q", 0, kMostTotal);
  kCheck.range(query.total_k, "total_k", 0, kMostTotal);
  if (query.total_k > 0 && (query.total_q == 0 || query.call.paged)) {
    kCheck.value_error("total_k must come with total_q and without paged, as cu_seqlens_k with cu_seqlens_q");
  }
  if (query.same_offsets && (query.total_q == 0 || query.total_k == 0)) {
    kCheck.value_error("same_offsets must come with total_q and total_k, got " + std::to_string(query.total_q) +
                       " and " + std::to_string(query.total_k));
  }
}

// Whether it may be a call of flash_decode, as far as as_decode() is not told.
bool may_decode(const AttentionScheduleQuery& query) {
  return query.num_splits == kInvariantSplits && query.total_q == 0 && query.total_k == 0 && !query.seqused_q &&
         !query.leftpad_k && query.kv_len > 0;
}

std::string text_of(const AttentionSchedule& s, const KernelEntry& kernel, int cluster) {
  return launch_text(kernel, s.blocks) + (cluster > 1 ? " in clusters of " + std::to_string(cluster) : "") + " for " +
         counted(s.work_tiles, "work tile") + " of " + counted(s.rows, "row") + "; key tiles of " +
         counted(s.keys, "key") + ", " + counted(s.stages, "stage") + ", keys in " + counted(s.pieces, "piece") +
         (s.pieces > 1 ? ", merged in a second launch; " : "; ") + counted(s.workspace_bytes, "byte") + " of workspace";
}

}  // namespace

AttentionSchedule explain(const AttentionScheduleQuery& query) {
  check_numbers(query);
  AttentionQuery call = query.call;
  call.q_len = may_decode(query) ? query.q_len : 0;
  call.group_size = query.num_q_heads / query.num_kv_heads;
  std::string reason;
  if (const std::optional<DecodeQuery> decode = as_decode(call)) {
    return schedule_of(DecodeScheduleQuery{.call = *decode,
                                           .batch = query.batch,
                                           .num_kv_heads = query.num_kv_heads,
                                           .max_kv_len = query.kv_len,
                                           .causal = call.causal || query.q_len == 1},
                       query, find_device(kCheck, find_target(call.target, reason)));
  }
  if (find_attention_kernel(query.call, reason) == nullptr) kCheck.not_supported(reason);
  DeviceContext& device = find_device(kCheck, find_target(query.call.target, reason));

  const AttentionPlan plan = plan_attention(problem_of(query), device);
  return after(plan.append, schedule_of(plan));
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
  s.text = text_of(s, *plan.kernel, plan.cluster);
  return s;
}

}  // namespace flashport
