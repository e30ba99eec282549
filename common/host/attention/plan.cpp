#include "common/host/attention/plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "common/device/attention/pieces.h"
#include "common/host/attention/append.h"
#include "common/host/attention/kernel_choice.h"
#include "common/host/check.h"
#include "common/host/published_splits.h"
#include "common/host/rounding.h"
#include "common/host/workspace.h"

namespace flashport {
namespace {

constexpr std::int64_t kCounterBytes = 256;  // of one counter, which shares no cache line
constexpr std::int64_t kSectionBytes = 32
                                       << 20;  // of keys and values that the last cache level holds, with room to spare

// Whether lengths on the device may be less than those that shapes say.
bool has_own_queries(const AttentionParams& p) { return p.cu_seqlens_q != nullptr || p.seqused_q != nullptr; }
bool has_own_keys(const AttentionParams& p) {
  return p.cu_seqlens_k != nullptr || p.cache.seqlens.data != nullptr || p.cache.kv_indptr != nullptr ||
         p.leftpad_k != nullptr;
}

// Work tiles of one head: each sequence's last one may have few queries. A sequence that is cut by its lengths has no
// more tiles than the rule wants.
std::int64_t tiles_of_head(const AttentionParams& p, std::int64_t rows) {
  const std::int64_t tiles = ceil_div(p.q_len, rows), pieces = std::max(p.pieces.most, 1);
  const std::int64_t whole =
      p.cu_seqlens_q == nullptr ? p.batch * tiles : std::min(p.batch * tiles, p.total_q / rows + p.batch);
  return p.pieces.rule.count > 0 ? whole * pieces
                                 : std::min(whole * pieces, whole + std::int64_t{p.batch} * p.pieces.rule.work_tiles);
}

// The most pieces of a sequence of this call.
int most_pieces(const AttentionParams& p) {
  const PieceRule& rule = p.pieces.rule;
  // Keys to the left of the first query's window are in no piece.
  const auto first_key = [&](std::int64_t q_len) {
    return p.window_left < 0 ? 0 : static_cast<int>(std::max<std::int64_t>(p.kv_len - q_len - p.window_left, 0));
  };
  if (!has_own_queries(p) && !has_own_keys(p)) return cut_keys(rule, p.q_len, first_key(p.q_len), p.kv_len).count;
  if (rule.count > 0) return std::min<int>(rule.count, static_cast<int>(ceil_div(std::max(p.kv_len, 1), rule.keys)));
  // As many queries as keys: one tensor has the offsets of both.
  if (p.cu_seqlens_q != nullptr && p.cu_seqlens_q == p.cu_seqlens_k && p.seqused_q == nullptr) return 1;
  const int fewest = has_own_queries(p) ? 1 : p.q_len;
  const std::int64_t keys = p.kv_len - first_key(p.q_len);
  const std::int64_t by_keys = keys / std::max(kLeastPieceKeys, kLeastPieceKeysOfQuery * std::min(fewest, 1 << 20));
  const std::int64_t by_tiles = rule.work_tiles / ceil_div(fewest, rule.rows);
  return static_cast<int>(std::clamp<std::int64_t>(std::min(by_keys, by_tiles), 1, kMostPieces));
}

// Where sequences have their partial results: whatever takes the least. With as many rows for each query as it may have
// pieces; by lengths also so many a sequence, or one for every four keys.
void plan_partials(AttentionParams& p) {
  PieceParams& pieces = p.pieces;
  const bool packed = p.cu_seqlens_q != nullptr, by_lengths = pieces.rule.count == 0;
  pieces.rows = pieces.most * (packed ? p.total_q : std::int64_t{p.batch} * p.q_len);
  pieces.rows_of_query = packed ? pieces.most : 0;
  pieces.rows_of_sequence = packed ? 0 : std::int64_t{pieces.most} * p.q_len;
  if (!by_lengths) return;
  const std::int64_t of_sequence = std::min({std::int64_t{pieces.rule.work_tiles} * pieces.rule.rows,
                                             std::int64_t{pieces.most} * p.q_len, std::int64_t{p.kv_len} / 4});
  if (of_sequence * p.batch < pieces.rows) {
    pieces.rows = of_sequence * p.batch;
    pieces.rows_of_query = 0;
    pieces.rows_of_sequence = of_sequence;
  }
  static_assert(kLeastPieceKeysOfQuery == 4);
  if (p.cu_seqlens_k != nullptr && p.total_k / 4 < pieces.rows) {
    pieces.rows = p.total_k / 4;
    pieces.rows_of_query = 0;
    pieces.rows_of_sequence = 0;
    pieces.rows_of_four_keys = 1;
  }
}

// As many kv heads as keep the keys and values of all sequences together in a cache.
std::int32_t section_heads(const AttentionParams& p) {
  const std::int64_t row_bytes = kv_row_bytes(p.k_format, p.head_dim_qk) + kv_row_bytes(p.v_format, p.head_dim_v);
  const std::int64_t head_bytes =
      std::max<std::int64_t>(std::min(p.total_k, std::int64_t{p.batch} * p.kv_len), 1) * row_bytes;
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(kSectionBytes / head_bytes, 1, p.num_kv_heads));
}

// On CUDA blocks stay and take tiles as they come; elsewhere each has a tile of its own, unless tests limit the blocks.
std::int64_t blocks_of(const AttentionPlan& plan, const Check& check, DeviceContext& device) {
  std::int64_t most = multiprocessor_limit() > 0 ? multiprocessor_limit() : plan.work_tiles;
  if (device.device().kind == DeviceKind::kCuda) {
    most = std::int64_t{device.multiprocessors()} * device.occupancy(check, *plan.kernel);
  }
  return std::max<std::int64_t>(std::min(plan.work_tiles, most) / plan.cluster, 1) * plan.cluster;
}

// How keys are cut. Nothing is set where none can be.
void plan_pieces(AttentionPlan& plan, int num_splits, const Check& check, DeviceContext& device) {
  AttentionParams& p = plan.params;
  const AttentionTuning& tuning = plan.kernel->shape.attention.tuning;
  int count = num_splits == kInvariantSplits ? 0 : num_splits;
  if (num_splits == 0) {
    count = published_splits({std::int64_t{p.batch} * p.num_q_heads, p.q_len, p.kv_len, p.head_dim_qk},
                             device.multiprocessors());
  }
  if (count == 1) return;
  p.pieces.rule = {count, tuning.work_tiles / p.num_q_heads, tuning.rows, tuning.keys};
  p.pieces.most = most_pieces(p);
  if (p.pieces.most == 1) {
    p.pieces = {};
    return;
  }
  p.pieces.columns = plan.kernel->shape.attention.shape.head_dim_v;
  plan_partials(p);
  plan.merge_kernel = &device.plain_kernel(check, KernelTag::kAttentionMerge);
}

// Calls without pieces have the counter alone, so that calls of all shapes may share a workspace.
void plan_workspace(AttentionPlan& plan, const Check& check, DeviceContext& device) {
  const AttentionParams& p = plan.params;
  plan.workspace_bytes = kCounterBytes;
  if (plan.merge_kernel == nullptr) return;
  const std::int64_t rows = p.pieces.rows * p.num_q_heads;
  plan.merge_grid =
      std::min(rows / 2, std::int64_t{device.multiprocessors()} * device.occupancy(check, *plan.merge_kernel));
  plan.partial_out_offset = kCounterAreaBytes;
  plan.partial_lse_offset = plan.partial_out_offset + align_up(rows * p.pieces.columns * 4, 16);
  plan.workspace_bytes = plan.partial_lse_offset + align_up(rows * 4, 16);
}

}  // namespace

AppendLaunch plan_append(const AttentionProblem& problem, DeviceContext& device, std::int64_t& workspace_bytes) {
  if (!problem.appends) return {};
  constexpr std::int64_t kMostBlocks = 1 << 20;  // the kernel strides over what is left
  const AppendRotaryParams& p = problem.append;
  if (p.rotary.cos != nullptr && p.total_q > std::numeric_limits<std::int32_t>::max()) {  // which the kernel numbers
    Check(problem.function)
        .not_supported(std::to_string(p.total_q) +
                       " queries are more than one call turns; cut the "
                       "batch");
  }
  const std::int64_t rows = (p.rotary.cos == nullptr ? 0 : p.total_q) + p.total_new;
  const KernelEntry& kernel = device.plain_kernel(Check(problem.function), KernelTag::kAppendRotary);
  // A block has a row where these are few, else each of its waves has one, of 32 threads or of 64.
  constexpr std::int64_t kRowsOfMultiprocessor = 4;
  const std::int64_t rows_at_once =
      rows <= kRowsOfMultiprocessor * device.multiprocessors() ? 1 : std::max(kernel.threads / 64, 1);
  AppendLaunch launch{.kernel = &kernel,
                      .grid = std::clamp<std::int64_t>(ceil_div(rows, rows_at_once), 1, kMostBlocks),
                      .params = p,
                      .offset = std::max(align_up(workspace_bytes, kCounterBytes), kCounterAreaBytes)};
  workspace_bytes = launch.offset + append_bytes(p);
  return launch;
}

AttentionPlan plan_attention(const AttentionProblem& problem, DeviceContext& device) {
  const Check check(problem.function);
  AttentionPlan plan;
  plan.params = problem.params;
  AttentionParams& p = plan.params;
  const AttentionRequest request{
      p.q.dtype,     p.out.dtype,           p.k_format,     p.v_format, problem.paged, p.head_dim_qk, p.head_dim_v,
      problem.needs, problem.scales_beside, problem.appends};
  std::string reason;
  plan.kernel = choose_attention_kernel(device.kernels(), device.target(), request, &reason);
  if (plan.kernel == nullptr) check.not_supported(reason);
  plan_pieces(plan, problem.num_splits, check, device);
  plan.work_tiles = tiles_of_head(p, plan.kernel->shape.attention.tuning.rows) * p.num_q_heads;
  const std::int64_t partial_rows = p.pieces.rows * p.num_q_heads;
  if (std::max(plan.work_tiles, partial_rows) > std::numeric_limits<std::int32_t>::max()) {  // which kernels number
    check.not_supported("batch " + std::to_string(p.batch) + " with " + std::to_string(p.q_len) + " queries and " +
                        std::to_string(p.num_q_heads) + " heads each" +
                        (p.pieces.most > 1 ? " in " + std::to_string(p.pieces.most) + " pieces" : "") +
                        " is more than one call takes; cut the batch");
  }
  p.section_heads = section_heads(p);
  const int cluster = plan.kernel->shape.attention.tuning.cluster;
  if (p.group_size % cluster == 0) plan.cluster = cluster;
  plan.grid = blocks_of(plan, check, device);
  plan_workspace(plan, check, device);
  plan.append = plan_append(problem, device, plan.workspace_bytes);
  return plan;
}

void bind_workspace(AttentionPlan& plan, void* workspace) {
  char* base = static_cast<char*>(workspace);
  plan.params.counter = reinterpret_cast<std::uint32_t*>(base);
  if (plan.append.kernel != nullptr) {
    const AppendedCall after = bind_append(plan.append.params, plan.params.q, base + plan.append.offset);
    plan.params.q = after.q;
    plan.params.cache.seqlens = {after.seqlens, 0};
  }
  if (plan.merge_kernel == nullptr) return;
  plan.params.pieces.out = reinterpret_cast<float*>(base + plan.partial_out_offset);
  plan.params.pieces.lse = reinterpret_cast<float*>(base + plan.partial_lse_offset);
}

}  // namespace flashport
