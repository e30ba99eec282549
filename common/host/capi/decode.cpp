// The C interface of decode over the C++ one, and what is asked of the library.
#include <flashport/capi.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <string>

#include <flashport/backend.h>
#include <flashport/decode.h>

#include "common/host/capi/calls.h"

namespace flashport {
namespace {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

TensorView to_view(const fp_tensor& tensor) {
  TensorView view;
  view.data = tensor.data;
  view.dtype = static_cast<DType>(tensor.dtype);
  view.device = {static_cast<DeviceKind>(tensor.device_kind), tensor.device_index};
  view.rank = tensor.rank;
  std::copy(std::begin(tensor.shape), std::end(tensor.shape), view.shape);
  std::copy(std::begin(tensor.strides), std::end(tensor.strides), view.strides);
  view.read_only = tensor.read_only != 0;
  return view;
}

void check_tensor(const fp_tensor& tensor, const char* function, const char* name) {
  const auto refuse = [&](const char* what, std::int64_t value) {
    throw ValueError(std::string(function) + ": " + name + " must have " + what + ", got " + std::to_string(value));
  };
  if (tensor.rank < 0 || tensor.rank > FP_MAX_RANK) refuse("0 to 8 dimensions", tensor.rank);
  if (tensor.dtype < fp_float32 || tensor.dtype > fp_float8_e5m2) refuse("a dtype of fp_dtype", tensor.dtype);
  if (tensor.device_kind < fp_cpu || tensor.device_kind > fp_hip) {
    refuse("a device_kind of fp_device_kind", tensor.device_kind);
  }
}

DecodeArgs to_decode(const fp_decode_args* from, bool needs_out) {
  const Tensors tensors{"flash_decode"};
  const fp_decode_args c = read_args(from, tensors.function);
  DecodeArgs a;
  a.q = tensors.needed(c.q, "q");
  a.k_cache = tensors.needed(c.k_cache, "k_cache");
  a.v_cache = tensors.needed(c.v_cache, "v_cache");
  if (c.seqlens != nullptr) a.seqlens = tensors.needed(c.seqlens, "seqlens");
  if (needs_out || c.out != nullptr) a.out = tensors.needed(c.out, "out");
  a.lse = tensors.optional(c.lse, "lse");
  a.block_table = tensors.optional(c.block_table, "block_table");
  a.token_table = tensors.optional(c.token_table, "token_table");
  a.request_index = tensors.optional(c.request_index, "request_index");
  a.kv_indptr = tensors.optional(c.kv_indptr, "kv_indptr");
  a.kv_indices = tensors.optional(c.kv_indices, "kv_indices");
  a.kv_last_page_len = tensors.optional(c.kv_last_page_len, "kv_last_page_len");
  a.cu_seqlens_q = tensors.optional(c.cu_seqlens_q, "cu_seqlens_q");
  a.alibi_slopes = tensors.optional(c.alibi_slopes, "alibi_slopes");
  a.sinks = tensors.optional(c.sinks, "sinks");
  a.tree_mask = tensors.optional(c.tree_mask, "tree_mask");
  a.k_scale = tensors.optional(c.k_scale, "k_scale");
  a.v_scale = tensors.optional(c.v_scale, "v_scale");
  a.workspace = tensors.optional(c.workspace, "workspace");
  a.kv_layout = to_layout(c.kv_layout, tensors.function);
  if (c.has_softmax_scale != 0) a.softmax_scale = c.softmax_scale;
  a.softcap = c.softcap;
  a.max_q_len = c.max_q_len;
  if (c.has_window != 0) {
    a.window_left = c.window_left;
    a.window_right = c.window_right;
  }
  if (c.has_num_splits != 0) a.num_splits = c.num_splits;
  a.k_format = to_format(c.k_format, tensors.function, "k_format");
  a.v_format = to_format(c.v_format, tensors.function, "v_format");
  return a;
}

template <class Args>
Args to_quantize(const fp_quantize_kv_args* args, const char* function) {
  const Tensors tensors{function};
  const fp_quantize_kv_args c = read_args(args, function);
  Args a;
  a.x = tensors.needed(c.x, "x");
  a.out = tensors.needed(c.out, "out");
  const std::optional<KvFormat> format = to_format(c.format, function, "format");
  if (!format) throw ValueError(std::string(function) + ": format must name a format, got fp_format_own");
  a.format = *format;
  a.scale = tensors.optional(c.scale, "scale");
  return a;
}

}  // namespace

fp_status keep_capi_error(fp_status status, const char* text) {
  try {
    last_error() = text;
  } catch (const std::bad_alloc&) {
    last_error().clear();
  }
  return status;
}

std::optional<KvFormat> to_format(std::int32_t format, const char* function, const char* name) {
  if (format == fp_format_own) return std::nullopt;
  static_assert(fp_format_int4 - 1 == static_cast<int>(KvFormat::kInt4));
  if (format > fp_format_own && format <= fp_format_int4) return static_cast<KvFormat>(format - 1);
  throw ValueError(std::string(function) + ": " + name + " must be one of fp_kv_format, got " + std::to_string(format));
}

TensorView Tensors::needed(const fp_tensor* tensor, const char* name) const {
  if (tensor == nullptr) throw ValueError(std::string(function) + ": " + name + " must be given, got null");
  check_tensor(*tensor, function, name);
  return to_view(*tensor);
}

}  // namespace flashport

extern "C" {

void fp_init_struct(void* args, size_t size) {
  std::memset(args, 0, size);
  std::memcpy(args, &size, sizeof(size));
}

fp_status fp_flash_decode(const fp_decode_args* args, fp_stream stream) {
  return flashport::guarded([&] { flashport::flash_decode(flashport::to_decode(args, true), stream); });
}

fp_status fp_decode_workspace_size(const fp_decode_args* args, int64_t* bytes) {
  return flashport::guarded([&] {
    if (bytes == nullptr) throw flashport::ValueError("decode_workspace_size: bytes must not be null");
    *bytes = flashport::decode_workspace_size(flashport::to_decode(args, false));
  });
}

fp_status fp_flash_decode_stage1(const fp_decode_stage1_args* args, fp_stream stream) {
  return flashport::guarded([&] {
    const flashport::Tensors tensors{"flash_decode_stage1"};
    const fp_decode_stage1_args c = flashport::read_args(args, tensors.function);
    flashport::DecodeStage1Args a;
    a.q = tensors.needed(c.q, "q");
    a.k = tensors.needed(c.k, "k");
    a.v = tensors.needed(c.v, "v");
    a.req_to_tokens = tensors.needed(c.req_to_tokens, "req_to_tokens");
    a.b_req_idx = tensors.needed(c.b_req_idx, "b_req_idx");
    a.b_seqlen = tensors.needed(c.b_seqlen, "b_seqlen");
    a.mid_out = tensors.needed(c.mid_out, "mid_out");
    a.mid_out_logsumexp = tensors.needed(c.mid_out_logsumexp, "mid_out_logsumexp");
    a.max_len_in_batch = c.max_len_in_batch;
    a.block_seq = c.block_seq;
    if (c.has_softmax_scale != 0) a.softmax_scale = c.softmax_scale;
    a.k_format = flashport::to_format(c.k_format, tensors.function, "k_format");
    a.v_format = flashport::to_format(c.v_format, tensors.function, "v_format");
    a.k_scale = tensors.optional(c.k_scale, "k_scale");
    a.v_scale = tensors.optional(c.v_scale, "v_scale");
    flashport::flash_decode_stage1(a, stream);
  });
}

fp_status fp_flash_decode_stage2(const fp_decode_stage2_args* args, fp_stream stream) {
  return flashport::guarded([&] {
    const flashport::Tensors tensors{"flash_decode_stage2"};
    const fp_decode_stage2_args c = flashport::read_args(args, tensors.function);
    flashport::DecodeStage2Args a;
    a.mid_out = tensors.needed(c.mid_out, "mid_out");
    a.mid_out_logexpsum = tensors.needed(c.mid_out_logexpsum, "mid_out_logexpsum");
    a.b_seqlen = tensors.needed(c.b_seqlen, "b_seqlen");
    a.out = tensors.needed(c.out, "out");
    a.lse = tensors.optional(c.lse, "lse");
    a.block_seq = c.block_seq;
    flashport::flash_decode_stage2(a, stream);
  });
}

fp_status fp_append_kv(const fp_append_kv_args* args, fp_stream stream) {
  return flashport::guarded([&] {
    const flashport::Tensors tensors{"append_kv"};
    const fp_append_kv_args c = flashport::read_args(args, tensors.function);
    flashport::AppendKvArgs a;
    a.k = tensors.needed(c.k, "k");
    a.v = tensors.needed(c.v, "v");
    a.k_cache = tensors.needed(c.k_cache, "k_cache");
    a.v_cache = tensors.needed(c.v_cache, "v_cache");
    a.positions = tensors.needed(c.positions, "positions");
    a.k_scale = tensors.optional(c.k_scale, "k_scale");
    a.v_scale = tensors.optional(c.v_scale, "v_scale");
    a.kv_layout = flashport::to_layout(c.kv_layout, tensors.function);
    a.k_format = flashport::to_format(c.k_format, tensors.function, "k_format");
    a.v_format = flashport::to_format(c.v_format, tensors.function, "v_format");
    flashport::append_kv(a, stream);
  });
}

fp_status fp_quantize_kv(const fp_quantize_kv_args* args, fp_stream stream) {
  return flashport::guarded(
      [&] { flashport::quantize_kv(flashport::to_quantize<flashport::QuantizeKvArgs>(args, "quantize_kv"), stream); });
}

fp_status fp_dequantize_kv(const fp_quantize_kv_args* args, fp_stream stream) {
  return flashport::guarded([&] {
    flashport::dequantize_kv(flashport::to_quantize<flashport::DequantizeKvArgs>(args, "dequantize_kv"), stream);
  });
}

fp_status fp_merge_states(const fp_merge_states_args* args, fp_stream stream) {
  return flashport::guarded([&] {
    const flashport::Tensors tensors{"merge_states"};
    const fp_merge_states_args c = flashport::read_args(args, tensors.function);
    flashport::MergeStatesArgs a;
    a.o = tensors.needed(c.o, "o");
    a.lse = tensors.needed(c.lse, "lse");
    a.out = tensors.needed(c.out, "out");
    a.out_lse = tensors.needed(c.out_lse, "out_lse");
    a.lse_base_2 = c.lse_base_2 != 0;
    flashport::merge_states(a, stream);
  });
}

fp_status fp_merge_state(const fp_merge_state_args* args, fp_stream stream) {
  return flashport::guarded([&] {
    const flashport::Tensors tensors{"merge_state"};
    const fp_merge_state_args c = flashport::read_args(args, tensors.function);
    flashport::MergeStateArgs a;
    a.o_a = tensors.needed(c.o_a, "o_a");
    a.lse_a = tensors.needed(c.lse_a, "lse_a");
    a.o_b = tensors.needed(c.o_b, "o_b");
    a.lse_b = tensors.needed(c.lse_b, "lse_b");
    a.out = tensors.needed(c.out, "out");
    a.out_lse = tensors.needed(c.out_lse, "out_lse");
    a.lse_base_2 = c.lse_base_2 != 0;
    flashport::merge_state(a, stream);
  });
}

int32_t fp_num_splits_heuristic(int32_t batch_nheads_mblocks, int32_t num_sms, int32_t num_n_blocks,
                                int32_t max_splits) {
  return flashport::num_splits_heuristic(batch_nheads_mblocks, num_sms, num_n_blocks, max_splits);
}

const char* fp_last_error(void) { return flashport::last_error().c_str(); }

const char* fp_version(void) { return flashport::version(); }

}  // extern "C"
