// Validation of flash_decode_stage1. Messages spell the arguments as LightLLM does.
#include <algorithm>
#include <limits>
#include <string>

#include "common/host/arguments.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/decode/problem.h"
#include "common/host/kv/cache_layout.h"
#include "common/host/scores.h"

namespace flashport {
namespace {

constexpr Check kCheck("flash_decode_stage1");

ArgumentTable<10> table_of(const DecodeStage1Args& args) {
  const auto& [q, k, v, req_to_tokens, b_req_idx, b_seqlen, max_len_in_batch, mid_out, mid_out_logsumexp, block_seq,
               softmax_scale, k_format, v_format, k_scale, v_scale] = args;
  constexpr DTypes kFloat = {DType::kFloat32}, kInts = {DType::kInt32, DType::kInt64};
  using enum Strides;
  ArgumentTable<10> table;
  table.add(q, "q", kRead, {DType::kFloat16, DType::kBFloat16, DType::kFloat32}, kAny,
            {3, "(batch, num_q_heads, head_dim)"});
  // cache_params() checks how caches lie.
  const DTypes kv_types = {q.dtype, DType::kFp8E4M3, DType::kFp8E4M3Fnuz, DType::kFp8E5M2, DType::kInt8, DType::kUInt8};
  table.add(k, "k", kRead, kv_types, kAny, {3, "(slots, num_kv_heads, head_dim)"});
  table.add(v, "v", kRead, kv_types, kAny, {3, "(slots, num_kv_heads, head_dim)"});
  table.add(req_to_tokens, "Req_to_tokens", kRead, {DType::kInt32}, kUnitInner, {2, "(max_requests, max_len)"});
  table.add(b_req_idx, "B_req_idx", kRead, kInts, kContiguous, {1, "(batch)"});
  table.add(b_seqlen, "B_Seqlen", kRead, kInts, kContiguous, {1, "(batch)"});
  add_scale_argument(table, k_scale, "k_scale", k, kRead);
  add_scale_argument(table, v_scale, "v_scale", v, kRead);
  table.add(mid_out, "mid_out", kWritten, kFloat, kAny, {4, "(batch, num_q_heads, blocks, head_dim)"});
  table.add(mid_out_logsumexp, "mid_out_logsumexp", kWritten, kFloat, kAny, {3, "(batch, num_q_heads, blocks)"});
  return table;
}

// Blocks of the longest request that the call may have.
std::int64_t blocks_of(const DecodeStage1Args& a) {
  return a.max_len_in_batch == 0 ? 0 : (a.max_len_in_batch - 1) / a.block_seq + 1;
}

struct Formats {
  KvFormat k, v;
};

// The extents of a cache's rows follow from its format, which must be known before shapes are compared.
Formats check_shapes(const DecodeStage1Args& a) {
  const Formats formats{cache_format(kCheck, a.k, "k", a.k_format, "k_format"),
                        cache_format(kCheck, a.v, "v", a.v_format, "v_format")};
  const std::int64_t batch = a.q.shape[0];
  const std::int64_t num_q_heads = a.q.shape[1];
  const std::int64_t head_dim = a.q.shape[2];
  const std::int64_t num_kv_heads = a.k.shape[1];
  const std::int64_t blocks = a.mid_out.shape[2];
  for (const KvFormat format : {formats.k, formats.v}) {
    if (const std::string problem = block_problem(format, "head_dim", head_dim); !problem.empty()) {
      kCheck.not_supported(problem);
    }
  }
  kCheck.shape(a.k, "k", "(slots, num_kv_heads, head_dim)",
               {kAnyExtent, kAnyExtent, stored_extent(formats.k, head_dim)});
  kCheck.shape(a.v, "v", "(slots, num_kv_heads, head_dim)",
               {a.k.shape[0], num_kv_heads, stored_extent(formats.v, head_dim)});
  if (num_q_heads > 0 && (num_kv_heads == 0 || num_q_heads % num_kv_heads != 0)) {
    kCheck.value_error("num_q_heads must be a multiple of num_kv_heads, got q " + shape_text(a.q) + " and k " +
                       shape_text(a.k));
  }
  check_cache_scale(kCheck, a.k_scale, "k_scale", a.k, "k", num_kv_heads, head_dim);
  check_cache_scale(kCheck, a.v_scale, "v_scale", a.v, "v", num_kv_heads, head_dim);
  kCheck.shape(a.b_req_idx, "B_req_idx", "(batch)", {batch});
  kCheck.shape(a.b_seqlen, "B_Seqlen", "(batch)", {batch});
  kCheck.shape(a.mid_out, "mid_out", "(batch, num_q_heads, blocks, head_dim)",
               {batch, num_q_heads, kAnyExtent, head_dim});
  kCheck.shape(a.mid_out_logsumexp, "mid_out_logsumexp", "(batch, num_q_heads, blocks)", {batch, num_q_heads, blocks});
  if (a.block_seq < 1) kCheck.value_error("block_seq must be 1 or more, got " + std::to_string(a.block_seq));
  if (a.max_len_in_batch < 0) {
    kCheck.value_error("max_len_in_batch must be 0 or more, got " + std::to_string(a.max_len_in_batch));
  }
  const std::int64_t needed = blocks_of(a);
  if (blocks < needed) {
    kCheck.value_error("mid_out must have at least ceil(max_len_in_batch / block_seq) = " + std::to_string(needed) +
                       " blocks for max_len_in_batch " + std::to_string(a.max_len_in_batch) + " and block_seq " +
                       std::to_string(a.block_seq) + ", got " + std::to_string(blocks) + ": " + shape_text(a.mid_out));
  }
  for (std::int64_t extent : {batch, num_q_heads, num_kv_heads, blocks}) {
    if (extent > std::numeric_limits<std::int32_t>::max()) {
      kCheck.value_error("mid_out must have extents below 2^31, got " + shape_text(a.mid_out));
    }
  }
  return formats;
}

}  // namespace

DecodeProblem validate_decode_stage1(const DecodeStage1Args& a) {
  const ArgumentTable<10> table = table_of(a);
  check_ranks(kCheck, table);
  const Formats formats = check_shapes(a);
  check_tensors(kCheck, table);
  check_score_numbers(kCheck, "sm_scale", a.softmax_scale, 0.0);
  const CacheScales scales{a.k_scale, a.k, a.v_scale, a.v};
  check_scale_pair(kCheck, scales, a.k.shape[1]);

  DecodeProblem problem;
  problem.function = kCheck.function();
  problem.q = a.q;
  problem.k_format = formats.k;
  problem.v_format = formats.v;
  DecodeParams& p = problem.params;
  p.batch = static_cast<std::int32_t>(a.q.shape[0]);
  p.num_q_heads = static_cast<std::int32_t>(a.q.shape[1]);
  p.num_kv_heads = static_cast<std::int32_t>(a.k.shape[1]);
  problem.empty = p.batch == 0 || p.num_q_heads == 0;
  if (problem.empty) return problem;
  p.group_size = p.num_q_heads / p.num_kv_heads;
  p.head_dim_qk = static_cast<std::int32_t>(a.q.shape[2]);
  p.head_dim_v = p.head_dim_qk;
  p.max_q_len = 1;
  p.q = {a.q.data, a.q.dtype, a.q.strides[0], 0, a.q.strides[1], a.q.strides[2]};

  const CacheAxes axes = cache_axes(3, KvLayout::kNHD);
  p.cache.k = cache_params(kCheck, a.k, "k", axes, formats.k, p.head_dim_qk);
  p.cache.v = cache_params(kCheck, a.v, "v", axes, formats.v, p.head_dim_v);
  p.cache.page_size = 1;
  p.cache.page_shift = 0;
  p.cache.seqlens = index_array(a.b_seqlen);
  p.cache.table = static_cast<const std::int32_t*>(a.req_to_tokens.data);
  p.cache.table_stride = a.req_to_tokens.strides[0];
  p.cache.table_row = index_array(a.b_req_idx);
  p.cache.max_len = static_cast<std::int32_t>(std::min({a.max_len_in_batch, a.req_to_tokens.shape[1], kMaxSequence}));
  problem.bounds = {.lengths_name = "B_Seqlen",
                    .rows_name = "B_req_idx",
                    .table_name = "Req_to_tokens",
                    .capacity_name = "max_len_in_batch and Req_to_tokens",
                    .pages = a.k.shape[0],
                    .table_rows = a.req_to_tokens.shape[0]};

  fill_scales(problem, scales, axes);
  fill_scores(p, a.softmax_scale, 0.0);
  p.window_left = -1;
  fill_right_window(p, 0);
  p.out = {a.mid_out.data, DType::kFloat32, a.mid_out.strides[0], 0, a.mid_out.strides[1], a.mid_out.strides[3]};
  p.out_stride_chunk = a.mid_out.strides[2];
  const std::int64_t* lse = a.mid_out_logsumexp.strides;
  p.lse = {a.mid_out_logsumexp.data, DType::kFloat32, lse[0], 0, lse[1], 0};
  p.lse_stride_chunk = lse[2];
  problem.chunk_keys = a.block_seq;
  problem.fixed_chunks = blocks_of(a);
  return problem;
}

std::string call_text(const DecodeStage1Args& a) {
  return CallText(kCheck.function(), table_of(a))
      .count("max_len_in_batch", a.max_len_in_batch, -1)
      .count("block_seq", a.block_seq, -1)
      .number("sm_scale", a.softmax_scale)
      .word("k_format", a.k_format ? kv_format_name(*a.k_format) : "", "")
      .word("v_format", a.v_format ? kv_format_name(*a.v_format) : "", "")
      .text();
}

}  // namespace flashport
