// flash_decode_stage2: validate -> params -> one block per output row. Messages spell the arguments as LightLLM does.
#include <array>
#include <initializer_list>
#include <limits>
#include <string>

#include <flashport/decode.h>

#include "common/device/merge/params.h"
#include "common/host/arguments.h"
#include "common/host/check.h"
#include "common/host/contents.h"
#include "common/host/devices.h"
#include "common/host/query.h"

namespace flashport {
namespace {

constexpr Check kCheck("flash_decode_stage2");
constexpr std::initializer_list<DType> kOutTypes = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

std::array<Argument, 5> arguments_of(const DecodeStage2Args& args) {
  const auto& [mid_out, mid_out_logexpsum, b_seqlen, out, lse, block_seq] = args;
  return {{{mid_out, "mid_out"},
           {mid_out_logexpsum, "mid_out_logexpsum"},
           {b_seqlen, "B_Seqlen"},
           {out, "Out", kWritten},
           {lse, "lse", kWritten}}};
}

void validate(const DecodeStage2Args& a) {
  kCheck.rank(a.mid_out, "mid_out", 4, "(batch, num_q_heads, blocks, head_dim)");
  kCheck.rank(a.mid_out_logexpsum, "mid_out_logexpsum", 3, "(batch, num_q_heads, blocks)");
  kCheck.rank(a.b_seqlen, "B_Seqlen", 1, "(batch)");
  kCheck.rank(a.out, "Out", 3, "(batch, num_q_heads, head_dim)");
  kCheck.rank(a.lse, "lse", 2, "(batch, num_q_heads)");

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

  kCheck.dtype(a.mid_out, "mid_out", {DType::kFloat32});
  kCheck.dtype(a.mid_out_logexpsum, "mid_out_logexpsum", {DType::kFloat32});
  kCheck.dtype(a.b_seqlen, "B_Seqlen", {DType::kInt32, DType::kInt64});
  kCheck.dtype(a.out, "Out", kOutTypes);
  kCheck.dtype(a.lse, "lse", {DType::kFloat32});

  const auto arguments = arguments_of(a);
  check_devices(kCheck, arguments);
  check_inputs_readable(kCheck, arguments);
  kCheck.contiguous(a.b_seqlen, "B_Seqlen");
  kCheck.writable(a.out, "Out");
  if (a.lse) kCheck.writable(*a.lse, "lse");
  check_outputs_apart(kCheck, arguments);
}

Stage2Params stage2_params(const DecodeStage2Args& a) {
  Stage2Params p{};
  p.batch = static_cast<std::int32_t>(a.mid_out.shape[0]);
  p.num_heads = static_cast<std::int32_t>(a.mid_out.shape[1]);
  p.max_chunks = static_cast<std::int32_t>(a.mid_out.shape[2]);
  p.head_dim = static_cast<std::int32_t>(a.mid_out.shape[3]);
  p.tokens = 1;
  p.mid = static_cast<const float*>(a.mid_out.data);
  p.mid_stride_seq = a.mid_out.strides[0];
  p.mid_stride_head = a.mid_out.strides[1];
  p.mid_stride_chunk = a.mid_out.strides[2];
  p.mid_stride_dim = a.mid_out.strides[3];
  p.mid_lse = static_cast<const float*>(a.mid_out_logexpsum.data);
  p.mid_lse_stride_seq = a.mid_out_logexpsum.strides[0];
  p.mid_lse_stride_head = a.mid_out_logexpsum.strides[1];
  p.mid_lse_stride_chunk = a.mid_out_logexpsum.strides[2];
  p.seqlens = index_array(a.b_seqlen);
  p.chunk_keys = a.block_seq;
  p.out = {a.out.data, a.out.dtype, a.out.strides[0], 0, a.out.strides[1], a.out.strides[2]};
  if (a.lse) {
    p.lse = static_cast<float*>(a.lse->data);
    p.lse_stride_seq = a.lse->strides[0];
    p.lse_stride_head = a.lse->strides[1];
  }
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

void flash_decode_stage2(const DecodeStage2Args& args, Stream stream) {
  validate(args);
  if (!has_elements(args.out) && (!args.lse || !has_elements(*args.lse))) return;
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
  device.launch(kCheck, stream, device.plain_kernel(kCheck, KernelTag::kDecodeStage2),
                LaunchGrid{std::int64_t{params.batch} * params.num_heads}, params);
}

}  // namespace flashport
