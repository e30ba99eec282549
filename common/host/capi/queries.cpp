// fp_supports, fp_which_kernel and fp_explain: the query of one operation becomes the C++ interface's.
#include <flashport/capi.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include <flashport/attention.h>
#include <flashport/decode.h>
#include <flashport/gated_delta.h>

#include "common/host/capi/calls.h"

namespace flashport {
namespace {

DType to_dtype(std::int32_t dtype, const char* function, const char* name) {
  return to_enum<DType>(dtype, fp_float8_e5m2 + 1, function, name, "one of fp_dtype");
}

DecodeQuery decode_query(const fp_query& c, const char* function) {
  DecodeQuery query;
  query.q_dtype = to_dtype(c.dtype, function, "dtype");
  query.k_format = to_format(c.k_format, function, "k_format");
  query.v_format = to_format(c.v_format, function, "v_format");
  query.head_dim_qk = c.head_dim_qk;
  query.head_dim_v = c.head_dim_v;
  query.group_size = c.group_size;
  query.q_len = c.q_len;
  for (std::int32_t format = 0; format < 32; ++format) {
    if ((c.segment_formats >> format & 1u) == 0) continue;
    const std::optional<KvFormat> named = to_format(format, function, "segment_formats");
    if (!named) throw ValueError(std::string(function) + ": segment_formats must have no bit of fp_format_own");
    query.segment_formats.push_back(*named);
  }
  query.scales_beside = c.scales_beside != 0;
  query.scale_group = c.scale_group;
  return query;
}

DecodeStage2Query decode_stage2_query(const fp_query& c, const char* function) {
  DecodeStage2Query query;
  query.out_dtype = to_dtype(c.dtype, function, "dtype");
  return query;
}

AppendQuery append_query(const fp_query& c, const char* function) {
  AppendQuery query;
  query.dtype = to_dtype(c.dtype, function, "dtype");
  query.k_format = to_format(c.k_format, function, "k_format");
  query.v_format = to_format(c.v_format, function, "v_format");
  query.head_dim_qk = c.head_dim_qk;
  query.head_dim_v = c.head_dim_v;
  query.scales_beside = c.scales_beside != 0;
  return query;
}

QuantizeQuery quantize_query(const fp_query& c, const char* function) {
  QuantizeQuery query;
  query.dtype = to_dtype(c.dtype, function, "dtype");
  query.format = to_format(c.k_format, function, "k_format").value_or(query.format);
  query.head_dim = c.head_dim_qk;
  query.dequantize = c.operation == fp_op_dequantize;
  return query;
}

MergeQuery merge_query(const fp_query& c, const char* function) {
  MergeQuery query;
  query.dtype = to_dtype(c.dtype, function, "dtype");
  query.head_dim = c.head_dim_qk;
  return query;
}

template <class Query>
Query gated_delta_query(const fp_query& c, const char* function) {
  Query query;
  query.q_dtype = to_dtype(c.dtype, function, "dtype");
  query.state_dtype = to_dtype(c.state_dtype, function, "state_dtype");
  query.head_dim_k = c.head_dim_qk;
  query.head_dim_v = c.head_dim_v;
  query.state_layout = to_state_layout(c.state_layout, function);
  query.gate = to_enum<GateForm>(c.gate, 3, function, "gate", "fp_gate_head, fp_gate_key or fp_gate_any");
  return query;
}

AttentionQuery attention_query(const fp_query& c, const char* function) {
  AttentionQuery query;
  query.dtype = to_dtype(c.dtype, function, "dtype");
  query.k_format = to_format(c.k_format, function, "k_format");
  query.v_format = to_format(c.v_format, function, "v_format");
  query.paged = c.paged != 0;
  query.head_dim_qk = c.head_dim_qk;
  query.head_dim_v = c.head_dim_v;
  query.causal = c.causal != 0;
  query.softcap = c.softcap != 0;
  query.alibi = c.alibi != 0;
  query.bias = c.bias != 0;
  query.dropout = c.dropout != 0;
  query.seqused_k = c.seqused_k != 0;
  query.scales_beside = c.scales_beside != 0;
  query.q_len = c.q_len;
  query.group_size = c.group_size;
  query.appends = c.appends != 0;
  return query;
}

// What `ask` says of the C++ query that this one is.
template <class Ask>
auto answer(const fp_query& c, const char* function, const Ask& ask) {
  const auto of_target = [&](auto query) {
    query.target = c.target != nullptr ? c.target : "";
    return ask(query);
  };
  switch (c.operation) {
    case fp_op_decode: return of_target(decode_query(c, function));
    case fp_op_decode_stage2: return of_target(decode_stage2_query(c, function));
    case fp_op_append: return of_target(append_query(c, function));
    case fp_op_merge: return of_target(merge_query(c, function));
    case fp_op_gated_delta: return of_target(gated_delta_query<GatedDeltaQuery>(c, function));
    case fp_op_gated_delta_chunk: return of_target(gated_delta_query<GatedDeltaChunkQuery>(c, function));
    case fp_op_attention: return of_target(attention_query(c, function));
    case fp_op_quantize:
    case fp_op_dequantize: return of_target(quantize_query(c, function));
    default: break;
  }
  throw ValueError(std::string(function) + ": operation must be one of fp_operation, got " +
                   std::to_string(c.operation));
}

// Heads that c.num_kv_heads and c.group_size say.
std::int64_t all_heads(const fp_query& c, const char* function) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (c.group_size >= 1 && c.group_size <= kMost && c.num_kv_heads >= 1 && c.num_kv_heads <= kMost) {
    return c.num_kv_heads * c.group_size;
  }
  throw ValueError(std::string(function) + ": num_kv_heads and group_size must be 1 or more and below 2^31, got " +
                   std::to_string(c.num_kv_heads) + " and " + std::to_string(c.group_size));
}

// The sizes of a call, as explain() takes them with its query.
DecodeScheduleQuery sized(const DecodeQuery& call, const fp_query& c, const char*) {
  DecodeScheduleQuery query{.call = call, .batch = c.batch, .num_kv_heads = c.num_kv_heads, .max_kv_len = c.max_kv_len};
  if (c.has_num_splits != 0) query.num_splits = c.num_splits;
  return query;
}

DecodeStage2ScheduleQuery sized(const DecodeStage2Query& call, const fp_query& c, const char* function) {
  return {.call = call, .batch = c.batch, .num_q_heads = all_heads(c, function)};
}

AppendScheduleQuery sized(const AppendQuery& call, const fp_query& c, const char*) {
  return {.call = call, .tokens = c.tokens, .num_kv_heads = c.num_kv_heads};
}

QuantizeScheduleQuery sized(const QuantizeQuery& call, const fp_query& c, const char*) {
  return {.call = call, .rows = c.tokens};
}

MergeScheduleQuery sized(const MergeQuery& call, const fp_query& c, const char*) {
  return {.call = call, .rows = c.tokens};
}

GatedDeltaScheduleQuery sized(const GatedDeltaQuery& call, const fp_query& c, const char* function) {
  return {.call = call, .batch = c.batch, .num_v_heads = all_heads(c, function)};
}

GatedDeltaChunkScheduleQuery sized(const GatedDeltaChunkQuery& call, const fp_query& c, const char* function) {
  return {.call = call,
          .batch = c.batch,
          .num_heads = c.num_kv_heads,
          .num_v_heads = all_heads(c, function),
          .tokens = c.tokens,
          .packed = c.packed != 0};
}

AttentionScheduleQuery sized(const AttentionQuery& call, const fp_query& c, const char* function) {
  AttentionScheduleQuery query{.call = call,
                               .batch = c.batch,
                               .num_q_heads = all_heads(c, function),
                               .num_kv_heads = c.num_kv_heads,
                               .q_len = c.q_len,
                               .kv_len = c.max_kv_len,
                               .total_q = c.total_q,
                               .total_k = c.total_k,
                               .same_offsets = c.same_offsets != 0,
                               .seqused_q = c.seqused_q != 0,
                               .leftpad_k = c.leftpad_k != 0,
                               .rotary = c.rotary != 0};
  if (c.has_num_splits != 0) query.num_splits = c.num_splits;
  if (c.has_window != 0) {
    query.window_left = c.window_left;
    query.window_right = c.window_right;
  }
  return query;
}

void write_text(const std::string& from, char* to, std::size_t size, const char* function, const char* name) {
  if (to == nullptr || size == 0) {
    throw ValueError(std::string(function) + ": " + name + " must have room, got null or size 0");
  }
  to[from.copy(to, size - 1)] = '\0';
}

}  // namespace
}  // namespace flashport

extern "C" {

fp_status fp_supports(const fp_query* query) {
  return flashport::guarded([&] {
    const flashport::Support support = flashport::answer(flashport::read_args(query, "supports"), "supports",
                                                         [](const auto& asked) { return flashport::supports(asked); });
    if (!support.supported) throw flashport::NotSupportedError(support.reason);
  });
}

fp_status fp_which_kernel(const fp_query* query, char* key, size_t size) {
  return flashport::guarded([&] {
    constexpr char kFunction[] = "which_kernel";
    const std::string found = flashport::answer(flashport::read_args(query, kFunction), kFunction,
                                                [](const auto& asked) { return flashport::which_kernel(asked); });
    flashport::write_text(found, key, size, kFunction, "key");
  });
}

fp_status fp_explain(const fp_query* query, char* text, size_t size) {
  return flashport::guarded([&] {
    constexpr char kFunction[] = "explain";
    const fp_query c = flashport::read_args(query, kFunction);
    const std::string found = flashport::answer(c, kFunction, [&](const auto& asked) {
      return flashport::explain(flashport::sized(asked, c, kFunction)).text;
    });
    flashport::write_text(found, text, size, kFunction, "text");
  });
}

}  // extern "C"
