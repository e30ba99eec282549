#include "common/host/attention/few_queries.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "common/host/kv/cache_layout.h"

namespace flashport {
namespace {

// More queries fill more of a work tile of attention's own kernels than 16 of its 128 rows.
constexpr std::int64_t kMostQueries = 16, kMostGroup = 128;  // of flash_decode
// More new keys of a sequence are written sooner by a launch of their own, with blocks for all of them.
constexpr std::int64_t kMostNewKeys = 16;
constexpr int kCopyBytes = 16;

bool are_few(std::int64_t q_len, std::int64_t group) {
  return q_len >= 1 && q_len <= kMostQueries && group <= kMostGroup;
}

bool has_scales_beside(const AttentionArgs& a) { return is_beside(a, a.k_scale) || is_beside(a, a.v_scale); }

bool is_int4(const std::optional<KvFormat>& format) { return format == KvFormat::kInt4; }

bool scales_fit(const AttentionArgs& a) {
  if (a.q_scale) return false;
  const auto count = [&](const std::optional<TensorView>& scale) {
    if (!scale || is_beside(a, scale)) return std::int64_t{0};
    return scale->rank == 2 ? std::int64_t{-1} : scale->rank == 0 ? 1 : scale->shape[0];
  };
  const std::int64_t k = count(a.k_scale), v = count(a.v_scale);
  const auto is_contiguous = [&](const std::optional<TensorView>& scale) {
    return !scale || scale->rank == 0 || scale->shape[0] == 1 || scale->strides[0] == 1 || is_beside(a, scale);
  };
  return k >= 0 && v >= 0 && (k == 0 || v == 0 || k == v) && is_contiguous(a.k_scale) && is_contiguous(a.v_scale) &&
         !(a.k_new && (has_scales_beside(a) || is_int4(a.k_format) || is_int4(a.v_format)));
}

bool has_only_what_decode_has(const AttentionArgs& a) {
  return a.q.rank == 4 && !a.cu_seqlens_k && (a.seqused_k || a.kv_last_page_len) && !a.seqused_q && !a.leftpad_k &&
         !a.bias && a.dropout_p == 0.0 && a.num_splits == kInvariantSplits && scales_fit(a);
}

DecodeQuery query_of(std::string target, const AttentionParams& p, bool scales_beside) {
  return {.target = std::move(target),
          .q_dtype = p.q.dtype,
          .k_format = p.k_format,
          .v_format = p.v_format,
          .head_dim_qk = p.head_dim_qk,
          .head_dim_v = p.head_dim_v,
          .group_size = p.group_size,
          .q_len = p.q_len,
          .scales_beside = scales_beside};
}

struct Shape {
  std::int32_t head_dim_qk, head_dim_v, group_size, q_len;
  DType dtype;
  KvFormat k_format, v_format;
  bool scales_beside;
  friend bool operator==(const Shape&, const Shape&) = default;
};

// supports() of decode's query, asked once while calls are alike.
bool is_served(const DeviceContext& device, const AttentionParams& p, bool scales_beside) {
  struct Answer {
    const KernelEntry* table = nullptr;
    Shape shape{};
    bool served = false;
  };
  thread_local Answer last;
  const Shape shape{p.head_dim_qk, p.head_dim_v, p.group_size, p.q_len,
                    p.q.dtype,     p.k_format,   p.v_format,   scales_beside};
  const KernelEntry* table = device.kernels().data();
  if (last.table != table || last.shape != shape) {
    last = {table, shape, supports(query_of(device.target(), p, scales_beside)).supported};
  }
  return last.served;
}

}  // namespace

std::optional<DecodeArgs> as_decode(const AttentionArgs& a, const AttentionProblem& problem,
                                    const DeviceContext& device) {
  const AttentionParams& p = problem.params;
  if (!are_few(p.q_len, p.group_size) || p.kv_len == 0 || !has_only_what_decode_has(a) ||
      !is_served(device, p, problem.scales_beside)) {
    return std::nullopt;
  }
  DecodeArgs d;
  d.q = a.q;
  d.k_cache = a.k;
  d.v_cache = a.v;
  if (a.seqused_k) d.seqlens = *a.seqused_k;
  d.block_table = a.block_table;
  d.token_table = a.token_table;
  d.request_index = a.request_index;
  d.kv_indptr = a.kv_indptr;
  d.kv_indices = a.kv_indices;
  d.kv_last_page_len = a.kv_last_page_len;
  d.kv_layout = a.kv_layout;
  d.softmax_scale = a.softmax_scale;
  d.causal = a.causal || p.q_len == 1;  // no key is after the last query
  d.window_left = a.window_left;
  d.window_right = a.window_right;
  d.softcap = a.softcap;
  d.alibi_slopes = a.alibi_slopes;
  d.sinks = a.sinks;
  d.k_scale = a.k_scale;
  d.v_scale = a.v_scale;
  d.k_format = a.k_format;
  d.v_format = a.v_format;
  d.out = a.out;
  if (a.lse) {  // heads are after tokens there
    d.lse = a.lse;
    std::swap(d.lse->shape[1], d.lse->shape[2]);
    std::swap(d.lse->strides[1], d.lse->strides[2]);
  }
  d.workspace = a.workspace;
  return d;
}

bool may_append_in_launch(const AttentionProblem& problem) {
  const AppendRotaryParams& p = problem.append;
  const bool packed = p.cu_seqlens_k_new != nullptr;
  if (p.total_new > kMostNewKeys * p.batch) return false;
  // The kernel comes to no key to the left of all windows.
  const std::int64_t most = packed ? p.total_new : p.new_len;
  if (problem.params.window_left >= 0 && most > std::int64_t{problem.params.window_left} + p.q_len) return false;
  const auto is_aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % kCopyBytes == 0; };
  const auto are_copied = [&](const AppendRotarySide& side) {
    const StridedRows& rows = side.rows;
    const auto fits = [](std::int64_t stride) { return stride * 2 % kCopyBytes == 0; };
    return is_sixteen_bit(side.format) && own_format(rows.dtype) == side.format && side.scale.data == nullptr &&
           rows.stride_dim == 1 && is_aligned(rows.data) && fits(rows.stride_seq) && fits(rows.stride_token) &&
           fits(rows.stride_head);
  };
  const RotaryParams& r = p.rotary;
  const auto fits = [&](std::int64_t stride) { return stride * element_size(r.dtype) % kCopyBytes == 0; };
  return are_copied(p.sides[1]) && are_copied(p.sides[2]) &&
         (r.cos == nullptr || (is_aligned(r.cos) && is_aligned(r.sin) && fits(r.cos_stride) && fits(r.sin_stride)));
}

void attend_after(const AppendedCall& appended, DecodeArgs& decode) {
  const std::int64_t batch = decode.q.shape[0];
  TensorView lengths{};
  lengths.data = const_cast<std::int32_t*>(appended.seqlens);
  lengths.dtype = DType::kInt32;
  lengths.device = decode.q.device;
  lengths.rank = 1;
  lengths.shape[0] = batch;
  lengths.strides[0] = 1;
  decode.seqlens = lengths;
  decode.q.data = appended.q.data;
  const std::int64_t strides[] = {appended.q.stride_seq, appended.q.stride_token, appended.q.stride_head,
                                  appended.q.stride_dim};
  std::copy(std::begin(strides), std::end(strides), decode.q.strides);
}

TensorView workspace_view(void* data, std::int64_t bytes, Device device) {
  TensorView view{};
  view.data = data;
  view.dtype = DType::kUInt8;
  view.device = device;
  view.rank = 1;
  view.shape[0] = bytes;
  view.strides[0] = 1;
  return view;
}

std::optional<DecodeQuery> as_decode(const AttentionQuery& q) {
  if (!are_few(q.q_len, q.group_size) || !(q.paged || q.seqused_k) || q.bias || q.dropout ||
      (q.appends && (q.scales_beside || is_int4(q.k_format) || is_int4(q.v_format)))) {
    return std::nullopt;
  }
  const DecodeQuery query{.target = q.target,
                          .q_dtype = q.dtype,
                          .k_format = q.k_format,
                          .v_format = q.v_format,
                          .head_dim_qk = q.head_dim_qk,
                          .head_dim_v = q.head_dim_v,
                          .group_size = q.group_size,
                          .q_len = q.q_len,
                          .scales_beside = q.scales_beside,
                          .appends = q.appends};
  return supports(query).supported ? std::optional(query) : std::nullopt;
}

}  // namespace flashport
