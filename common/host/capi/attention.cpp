// The C interface of attention over the C++ one.
#include <flashport/capi.h>

#include <cstdint>
#include <string>

#include <flashport/attention.h>

#include "common/host/capi/calls.h"

namespace flashport {
namespace {

AttentionArgs to_attention(const fp_attention_args* from, bool needs_out) {
  const Tensors tensors{"attention"};
  const fp_attention_args c = read_args(from, tensors.function);
  AttentionArgs a;
  a.q = tensors.needed(c.q, "q");
  a.k = tensors.needed(c.k, "k");
  a.v = tensors.needed(c.v, "v");
  if (needs_out || c.out != nullptr) a.out = tensors.needed(c.out, "out");
  a.lse = tensors.optional(c.lse, "lse");
  a.cu_seqlens_q = tensors.optional(c.cu_seqlens_q, "cu_seqlens_q");
  a.cu_seqlens_k = tensors.optional(c.cu_seqlens_k, "cu_seqlens_k");
  a.seqused_q = tensors.optional(c.seqused_q, "seqused_q");
  a.seqused_k = tensors.optional(c.seqused_k, "seqused_k");
  a.leftpad_k = tensors.optional(c.leftpad_k, "leftpad_k");
  a.alibi_slopes = tensors.optional(c.alibi_slopes, "alibi_slopes");
  a.sinks = tensors.optional(c.sinks, "sinks");
  a.bias = tensors.optional(c.bias, "bias");
  a.rng_state = tensors.optional(c.rng_state, "rng_state");
  a.block_table = tensors.optional(c.block_table, "block_table");
  a.token_table = tensors.optional(c.token_table, "token_table");
  a.request_index = tensors.optional(c.request_index, "request_index");
  a.kv_indptr = tensors.optional(c.kv_indptr, "kv_indptr");
  a.kv_indices = tensors.optional(c.kv_indices, "kv_indices");
  a.kv_last_page_len = tensors.optional(c.kv_last_page_len, "kv_last_page_len");
  a.q_scale = tensors.optional(c.q_scale, "q_scale");
  a.k_scale = tensors.optional(c.k_scale, "k_scale");
  a.v_scale = tensors.optional(c.v_scale, "v_scale");
  a.kv_layout = to_layout(c.kv_layout, tensors.function);
  a.k_format = to_format(c.k_format, tensors.function, "k_format");
  a.v_format = to_format(c.v_format, tensors.function, "v_format");
  a.k_new = tensors.optional(c.k_new, "k_new");
  a.v_new = tensors.optional(c.v_new, "v_new");
  a.cu_seqlens_k_new = tensors.optional(c.cu_seqlens_k_new, "cu_seqlens_k_new");
  a.rotary_cos = tensors.optional(c.rotary_cos, "rotary_cos");
  a.rotary_sin = tensors.optional(c.rotary_sin, "rotary_sin");
  a.rotary_interleaved = c.rotary_interleaved != 0;
  a.workspace = tensors.optional(c.workspace, "workspace");
  a.max_seqlen_q = c.max_seqlen_q;
  a.max_seqlen_k = c.max_seqlen_k;
  if (c.has_softmax_scale != 0) a.softmax_scale = c.softmax_scale;
  a.causal = c.causal != 0;
  a.softcap = c.softcap;
  a.dropout_p = c.dropout_p;
  if (c.has_window != 0) {
    a.window_left = c.window_left;
    a.window_right = c.window_right;
  }
  if (c.has_num_splits != 0) a.num_splits = c.num_splits;
  return a;
}

DropoutMaskArgs to_dropout_mask(const fp_dropout_mask_args* from) {
  const Tensors tensors{"dropout_mask"};
  const fp_dropout_mask_args c = read_args(from, tensors.function);
  DropoutMaskArgs a;
  a.mask = tensors.needed(c.mask, "mask");
  a.rng_state = tensors.needed(c.rng_state, "rng_state");
  a.dropout_p = c.dropout_p;
  return a;
}

}  // namespace
}  // namespace flashport

extern "C" {

fp_status fp_attention(const fp_attention_args* args, fp_stream stream) {
  return flashport::guarded([&] { flashport::attention(flashport::to_attention(args, true), stream); });
}

fp_status fp_attention_workspace_size(const fp_attention_args* args, int64_t* bytes) {
  return flashport::guarded([&] {
    if (bytes == nullptr) throw flashport::ValueError("attention_workspace_size: bytes must not be null");
    *bytes = flashport::attention_workspace_size(flashport::to_attention(args, false));
  });
}

fp_status fp_dropout_mask(const fp_dropout_mask_args* args, fp_stream stream) {
  return flashport::guarded([&] { flashport::dropout_mask(flashport::to_dropout_mask(args), stream); });
}

}  // extern "C"
