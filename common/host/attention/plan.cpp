#include "common/host/attention/plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "common/host/attention/kernel_choice.h"
#include "common/host/check.h"

namespace flashport {
namespace {

constexpr std::int64_t kCounterBytes = 256;  // of one counter, which shares no cache line
constexpr std::int64_t kSectionBytes = 32
                                       << 20;  // of keys and values that the last cache level holds, with room to spare

// Work tiles of one head: each sequence's last one may have few queries.
std::int64_t tiles_of_head(const AttentionParams& p, std::int64_t rows) {
  const std::int64_t most = p.batch * ((p.q_len + rows - 1) / rows);
  return p.cu_seqlens_q == nullptr ? most : std::min(most, p.total_q / rows + p.batch);
}

// As many kv heads as keep the keys and values of all sequences together in a cache.
std::int32_t section_heads(const AttentionParams& p) {
  const std::int64_t row_bytes = kv_row_bytes(p.k_format, p.head_dim_qk) + kv_row_bytes(p.v_format, p.head_dim_v);
  const std::int64_t head_bytes = std::max<std::int64_t>(p.total_k, 1) * row_bytes;
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(kSectionBytes / head_bytes, 1, p.num_kv_heads));
}

// On CUDA blocks stay and take tiles as they come; elsewhere each has a tile of its own, unless tests limit the blocks.
std::int64_t blocks_of(const AttentionPlan& plan, const Check& check, DeviceContext& device) {
  std::int64_t most = multiprocessor_limit() > 0 ? multiprocessor_limit() : plan.work_tiles;
  if (device.device().kind == DeviceKind::kCuda) {
    most = std::int64_t{device.multiprocessors()} * device.occupancy(check, *plan.kernel);
  }
  return std::min(plan.work_tiles, most);
}

}  // namespace

AttentionPlan plan_attention(const AttentionProblem& problem, DeviceContext& device) {
  const Check check(problem.function);
  AttentionPlan plan;
  plan.params = problem.params;
  AttentionParams& p = plan.params;
  const AttentionRequest request{p.q.dtype,     p.out.dtype,   p.k_format,   p.v_format,
                                 problem.paged, p.head_dim_qk, p.head_dim_v, problem.needs};
  std::string reason;
  plan.kernel = choose_attention_kernel(device.kernels(), device.target(), request, &reason);
  if (plan.kernel == nullptr) check.not_supported(reason);
  plan.work_tiles = tiles_of_head(p, plan.kernel->shape.attention.tuning.rows) * p.num_q_heads;
  if (plan.work_tiles > std::numeric_limits<std::int32_t>::max()) {  // which kernels number
    check.not_supported("batch " + std::to_string(p.batch) + " with " + std::to_string(p.q_len) + " queries and " +
                        std::to_string(p.num_q_heads) + " heads each is more than one call takes; cut the batch");
  }
  p.section_heads = section_heads(p);
  plan.grid = blocks_of(plan, check, device);
  plan.workspace_bytes = kCounterBytes;
  return plan;
}

}  // namespace flashport
