// The C interface of decode over segments.
#include <flashport/capi.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "common/host/capi/calls.h"

namespace flashport {
namespace {

constexpr char kFunction[] = "flash_decode_mixed";

DecodeSegment to_segment(const fp_decode_segment& c, std::int64_t number) {
  const std::string function = std::string(kFunction) + ": segments[" + std::to_string(number) + "]";
  const Tensors tensors{function.c_str()};
  DecodeSegment s;
  s.k = tensors.needed(c.k, "k");
  s.v = tensors.needed(c.v, "v");
  if (c.seqlens != nullptr) s.seqlens = tensors.needed(c.seqlens, "seqlens");
  s.block_table = tensors.optional(c.block_table, "block_table");
  s.token_table = tensors.optional(c.token_table, "token_table");
  s.request_index = tensors.optional(c.request_index, "request_index");
  s.kv_indptr = tensors.optional(c.kv_indptr, "kv_indptr");
  s.kv_indices = tensors.optional(c.kv_indices, "kv_indices");
  s.k_scale = tensors.optional(c.k_scale, "k_scale");
  s.v_scale = tensors.optional(c.v_scale, "v_scale");
  s.kv_layout = to_layout(c.kv_layout, tensors.function);
  s.k_format = to_format(c.k_format, tensors.function, "k_format");
  s.v_format = to_format(c.v_format, tensors.function, "v_format");
  return s;
}

MixedDecodeArgs to_mixed(const fp_mixed_decode_args* from, bool needs_out) {
  const Tensors tensors{kFunction};
  const fp_mixed_decode_args c = read_args(from, kFunction);
  const auto refuse = [](const std::string& text) { throw ValueError(std::string(kFunction) + ": " + text); };
  if (c.segment_size < offsetof(fp_decode_segment, seqlens) || c.segment_size > sizeof(fp_decode_segment)) {
    refuse("segment_size must be sizeof(fp_decode_segment), at most " + std::to_string(sizeof(fp_decode_segment)) +
           ", got " + std::to_string(c.segment_size));
  }
  if (c.num_segments < 1 || c.num_segments > kMostDecodeSegments) {
    refuse("num_segments must be 1 to " + std::to_string(kMostDecodeSegments) + ", got " +
           std::to_string(c.num_segments));
  }
  if (c.segments == nullptr) refuse("segments must be given, got null");
  MixedDecodeArgs a;
  a.q = tensors.needed(c.q, "q");
  for (std::int64_t i = 0; i < c.num_segments; ++i) {
    fp_decode_segment segment{};
    const std::size_t offset = static_cast<std::size_t>(i) * c.segment_size;
    std::memcpy(&segment, reinterpret_cast<const char*>(c.segments) + offset, c.segment_size);
    a.segments.push_back(to_segment(segment, i));
  }
  if (needs_out || c.out != nullptr) a.out = tensors.needed(c.out, "out");
  a.lse = tensors.optional(c.lse, "lse");
  a.mask = tensors.optional(c.mask, "mask");
  a.mask_slopes = tensors.optional(c.mask_slopes, "mask_slopes");
  a.cu_seqlens_q = tensors.optional(c.cu_seqlens_q, "cu_seqlens_q");
  a.alibi_slopes = tensors.optional(c.alibi_slopes, "alibi_slopes");
  a.sinks = tensors.optional(c.sinks, "sinks");
  a.workspace = tensors.optional(c.workspace, "workspace");
  a.max_q_len = c.max_q_len;
  if (c.has_softmax_scale != 0) a.softmax_scale = c.softmax_scale;
  a.softcap = c.softcap;
  a.by_segment = c.by_segment != 0;
  if (c.has_window != 0) {
    a.window_left = c.window_left;
    a.window_right = c.window_right;
  }
  return a;
}

}  // namespace
}  // namespace flashport

extern "C" {

fp_status fp_flash_decode_mixed(const fp_mixed_decode_args* args, fp_stream stream) {
  return flashport::guarded([&] { flashport::flash_decode_mixed(flashport::to_mixed(args, true), stream); });
}

fp_status fp_mixed_workspace_size(const fp_mixed_decode_args* args, int64_t* bytes) {
  return flashport::guarded([&] {
    if (bytes == nullptr) throw flashport::ValueError("mixed_workspace_size: bytes must not be null");
    *bytes = flashport::mixed_workspace_size(flashport::to_mixed(args, false));
  });
}

}  // extern "C"
