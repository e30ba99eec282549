// flash_decode_stage2: validate -> params -> one block per output row. Messages spell the arguments as LightLLM does.
#include <limits>
#include <string>

#include <flashport/decode.h>

#include "common/device/merge/params.h"
#include "common/host/arguments.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/contents.h"
#include "common/host/devices.h"
#include "common/host/launch_plan.h"
#include "common/host/query.h"

namespace flashport {
namespace {

constexpr Check kCheck("flash_decode_stage2");
constexpr DTypes kOutTypes = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

ArgumentTable<5> table_of(const DecodeStage2Args& args) {
  const auto& [mid_out, mid_out_logexpsum, b_seqlen, out, lse, block_seq] = args;
  constexpr DTypes kFloat = {DType::kFloat32};
  using enum Strides;
  ArgumentTable<5> table;
  table.add(mid_out, "mid_out", kRead, kFloat, kAny, {4, "(batch, num_q_heads, blocks, head_dim)"});
  table.add(mid_out_logexpsum, "mid_out_logexpsum", kRead, kFloat, kAny, {3, "(batch, num_q_heads, blocks)"});
  table.add(b_seqlen, "B_Seqlen", kRead, {DType::kInt32, DType::kInt64}, kContiguous, {1, "(batch)"});
  table.add(out, "Out", kWritten, kOutTypes, kAny, {3, "(batch, num_q_heads, head_dim)"});
  table.add(lse, "lse", kWritten, kFloat, kAny, {2, "(batch, num_q_heads)"});
  return table;
}

void validate(const DecodeStage2Args& a) {
  const ArgumentTable<5> table = table_of(a);
  check_ranks(kCheck, table);

  const std::int64_t* mid = a.mid_out.shape;
  kCheck.shape(a.mid_out_logexpsum, "mid_out_logexpsum", "(batch, num_q_heads, blocks)", {mid[0], mid[1], mid[2]});
  kCheck.shape(a.b_seqlen, "B_Seqlen", "(batch)", {mid[0]});
  kCheck.shape(a.out, "Out", "(batch, num_q_heads, head_dim)", {mid[0], mid[1], mid[3]});
  kCheck.shape(a.lse, "lse", "(batch, num_q_heads)", {mid[0], mid[1]});
  if (a.block_seq < 1) kCheck.value_error("block_seq must be 1 or more, got " + std::to_string(a.block_seq));
  for (int axis = 0; axis < 4; ++axis) {
    if (mid[axis] > std::numeric_limits<std::int32_t>::max()) {
      kCheck.value_error("mid_out must have extents below 2^31, got " + shape_text(a.mid_out));
    }
  }

  check_tensors(kCheck, table);
}

Stage2Params stage2_params(const DecodeStage2Args& a) {
  Stage2Params p{};
  p.batch = static_cast<std::int32_t>(a.mid_out.shape[0]);
  p.num_heads = static_cast<std::int32_t>(a.mid_out.shape[1]);
  p.max_chunks = static_cast<std::int32_t>(a.mid_out.shape[2]);
  p.head_dim = static_cast<std::int32_t>(a.mid_out.shape[3]);
  p.tokens = 1;
  const std::int64_t *mid = a.mid_out.strides, *mid_lse = a.mid_out_logexpsum.strides;
  p.mid = {a.mid_out.data, DType::kFloat32, mid[0], 0, mid[1], mid[3]};
  p.mid_stride_chunk = mid[2];
  p.mid_lse = {a.mid_out_logexpsum.data, DType::kFloat32, mid_lse[0], 0, mid_lse[1], 0};
  p.mid_lse_stride_chunk = mid_lse[2];
  p.seqlens = index_array(a.b_seqlen);
  p.chunk_keys = a.block_seq;
  p.out = {a.out.data, a.out.dtype, a.out.strides[0], 0, a.out.strides[1], a.out.strides[2]};
  if (a.lse) p.lse = {a.lse->data, DType::kFloat32, a.lse->strides[0], 0, a.lse->strides[1], 0};
  return p;
}

const KernelEntry* answer(const DecodeStage2Query& query, std::string& reason) {
  reason = dtype_problem("Out", query.out_dtype, kOutTypes);
  if (!reason.empty()) return nullptr;
  const TargetView target = find_target(query.target, reason);
  return reason.empty() ? find_plain_kernel(target, KernelTag::kDecodeStage2, reason) : nullptr;
}

}  // namespace

Support supports(const DecodeStage2Query& query) {
  return support_answer([&](std::string& reason) { return answer(query, reason); });
}

std::string which_kernel(const DecodeStage2Query& query) {
  return kernel_answer([&](std::string& reason) { return answer(query, reason); });
}

LaunchSchedule explain(const DecodeStage2ScheduleQuery& query) {
  constexpr Check check("explain");
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  check.range(query.batch, "batch", 1, kMost);
  check.range(query.num_q_heads, "num_q_heads", 1, kMost);
  return explain_launch(
      check, query.call.target, [&](std::string& reason) { return answer(query.call, reason); },
      [&](const KernelEntry& kernel) { return plan_rows(kernel, query.batch * query.num_q_heads); });
}

void flash_decode_stage2(const DecodeStage2Args& args, Stream stream) {
  validate(args);
  const auto call = [&] {
    return CallText(kCheck.function(), table_of(args)).count("block_seq", args.block_seq, -1).text() + ": ";
  };
  if (!has_elements(args.out) && (!args.lse || !has_elements(*args.lse))) {
    return log_call([&] { return call() + kNothingToDo; });
  }
  DeviceContext& device = device_context(kCheck, args.mid_out, "mid_out");
  const Stage2Params params = stage2_params(args);
  if (checks_contents(kCheck, device, stream)) {
    const std::int64_t longest =
        params.max_chunks == 0 || args.block_seq <= std::numeric_limits<std::int64_t>::max() / params.max_chunks
            ? params.max_chunks * args.block_seq
            : std::numeric_limits<std::int64_t>::max();
    check_index_range(kCheck, device, stream, params.seqlens, params.batch, "B_Seqlen", 0, longest,
                      "blocks * block_seq");
  }
  const LaunchPlan plan =
      plan_rows(device.plain_kernel(kCheck, KernelTag::kDecodeStage2), std::int64_t{params.batch} * params.num_heads);
  device.launch(kCheck, stream, *plan.kernel, LaunchGrid{plan.blocks}, params);
  log_call([&] { return call() + schedule_of(plan).text; });
}

}  // namespace flashport
