#include "common/host/attention/append.h"

#include <algorithm>
#include <limits>
#include <string>

#include "common/host/kv/cache_layout.h"
#include "common/host/rounding.h"

namespace flashport {
namespace {

constexpr std::int64_t kRotaryStep = 16;  // of rotary_dim: half a row is whole vectors
constexpr std::int64_t kAlignment = 256;

enum Side { kQueries, kNewKeys, kNewValues };

std::int64_t seqlens_bytes(const AppendRotaryParams& p) { return align_up(std::int64_t{p.batch} * 4, kAlignment); }

// The queries, which are turned into dense rows of the workspace.
AppendRotarySide query_side(const AttentionParams& p) {
  const std::int64_t head_bytes = std::int64_t{p.head_dim_qk} * element_size(p.q.dtype);
  return {.rows = p.q,
          .cache = {.data = nullptr,
                    .page_stride = p.num_q_heads * head_bytes,
                    .token_stride = 0,
                    .head_stride = head_bytes,
                    .row_bytes = static_cast<std::int32_t>(head_bytes),
                    .copy_unit = 16},
          .format = *own_format(p.q.dtype),
          .unit_bytes = 0,
          .scale = {},
          .heads = p.num_q_heads,
          .head_dim = p.head_dim_qk,
          .is_turned = 1};
}

}  // namespace

void check_append_presence(const Check& check, const AttentionArgs& a) {
  if (a.k_new.has_value() != a.v_new.has_value()) {
    check.value_error(std::string("k_new and v_new must be given together, got ") + (a.k_new ? "k_new" : "v_new") +
                      " alone");
  }
  if (!a.k_new) {
    const char* other = a.cu_seqlens_k_new ? "cu_seqlens_k_new"
                        : a.rotary_cos     ? "rotary_cos"
                        : a.rotary_sin     ? "rotary_sin"
                                           : nullptr;
    if (other != nullptr) check.value_error(std::string(other) + " must come with k_new and v_new");
    return;
  }
  if (a.cu_seqlens_k) {
    check.value_error(
        "k_new must come with a cache, of 4 axes or on pages, and not with cu_seqlens_k, whose sequences "
        "have no room for it");
  }
  if (!a.seqused_k) check.value_error("seqused_k must come with k_new: how many keys each sequence has before them");
  if (a.rotary_cos && !kNewTypes.has(a.q.dtype)) {
    check.type_error(dtype_problem("q with rotary_cos", a.q.dtype, kNewTypes));
  }
  if (a.rotary_cos.has_value() != a.rotary_sin.has_value()) {
    check.value_error(std::string("rotary_cos and rotary_sin must be given together, got ") +
                      (a.rotary_cos ? "rotary_cos" : "rotary_sin") + " alone");
  }
}

void check_append_shapes(const Check& check, const AttentionArgs& a, const CacheExtents& cache) {
  if (!a.k_new) return;
  const TensorView& k = *a.k_new;
  if (a.cu_seqlens_k_new) {
    check.shape(k, "k_new", "(total_new, num_kv_heads, head_dim)", {kAnyExtent, cache.num_kv_heads, cache.head_dim});
    check.shape(a.v_new, "v_new", "(total_new, num_kv_heads, head_dim_v)",
                {k.shape[0], cache.num_kv_heads, cache.head_dim_v});
    check.shape(a.cu_seqlens_k_new, "cu_seqlens_k_new", "(batch + 1)", {cache.batch + 1});
  } else {
    check.shape(k, "k_new", "(batch, new_len, num_kv_heads, head_dim)",
                {cache.batch, kAnyExtent, cache.num_kv_heads, cache.head_dim});
    check.shape(a.v_new, "v_new", "(batch, new_len, num_kv_heads, head_dim_v)",
                {cache.batch, k.shape[1], cache.num_kv_heads, cache.head_dim_v});
  }
  if (k.shape[a.cu_seqlens_k_new ? 0 : 1] > std::numeric_limits<std::int32_t>::max()) {
    check.value_error("k_new must have fewer than 2^31 rows, got " + shape_text(k));
  }
  if (!a.rotary_cos) return;
  const TensorView& cos = *a.rotary_cos;
  check.shape(a.rotary_sin, "rotary_sin", "(positions, rotary_dim / 2)", {cos.shape[0], cos.shape[1]});
  const std::int64_t rotary_dim = 2 * cos.shape[1];
  if (rotary_dim < kRotaryStep || rotary_dim % kRotaryStep != 0 || rotary_dim > cache.head_dim) {
    check.value_error("rotary_cos must have half of rotary_dim columns, a multiple of " + std::to_string(kRotaryStep) +
                      " up to head_dim = " + std::to_string(cache.head_dim) + ", got " + shape_text(cos));
  }
}

AppendRotaryParams append_params(const AttentionArgs& a, const AttentionParams& p, std::int64_t pages) {
  AppendRotaryParams append{};
  const bool packed = a.cu_seqlens_k_new.has_value(), turns = a.rotary_cos.has_value();
  append.batch = p.batch;
  append.q_len = p.q_len;
  append.total_q = p.total_q;
  append.total_new = packed ? a.k_new->shape[0] : p.batch * a.k_new->shape[1];
  append.new_len = packed ? 0 : static_cast<std::int32_t>(a.k_new->shape[1]);
  append.cu_seqlens_q = p.cu_seqlens_q;
  append.seqused_q = p.seqused_q;
  append.cu_seqlens_k_new = data_of<std::int32_t>(a.cu_seqlens_k_new);
  append.cache = p.cache;
  append.pages = pages;
  const bool is_scaled = a.q.dtype != DType::kFp8E4M3;  // with which all arguments are stored numbers
  append.sides[kNewKeys] = {.rows = rows_of(*a.k_new),
                            .cache = p.cache.k,
                            .format = p.k_format,
                            .unit_bytes = unit_bytes(p.k_format),
                            .scale = is_scaled ? p.k_scale : HeadScales{},
                            .heads = p.num_kv_heads,
                            .head_dim = p.head_dim_qk,
                            .is_turned = turns};
  append.sides[kNewValues] = {.rows = rows_of(*a.v_new),
                              .cache = p.cache.v,
                              .format = p.v_format,
                              .unit_bytes = unit_bytes(p.v_format),
                              .scale = is_scaled ? p.v_scale : HeadScales{},
                              .heads = p.num_kv_heads,
                              .head_dim = p.head_dim_v,
                              .is_turned = 0};
  if (!turns) return append;
  const TensorView &cos = *a.rotary_cos, &sin = *a.rotary_sin;
  const std::int64_t most = std::numeric_limits<std::int32_t>::max();
  append.rotary = {.cos = cos.data,
                   .sin = sin.data,
                   .dtype = cos.dtype,
                   .cos_stride = cos.strides[0],
                   .sin_stride = sin.strides[0],
                   .positions = static_cast<std::int32_t>(std::min(cos.shape[0], most)),
                   .half = static_cast<std::int32_t>(cos.shape[1]),
                   .is_interleaved = a.rotary_interleaved ? 1 : 0,
                   .queries_advance = a.causal || a.window_left >= 0 || a.window_right >= 0 ? 1 : 0};
  append.sides[kQueries] = query_side(p);
  return append;
}

AppendRotaryParams append_room(const AttentionParams& p, bool turns) {
  AppendRotaryParams append{};
  append.batch = p.batch;
  append.q_len = p.q_len;
  append.total_q = p.total_q;
  if (!turns) return append;
  static constexpr float kTable = 1.0f;  // never read: that there is one is what counts
  append.rotary.cos = &kTable;
  append.sides[kQueries] = query_side(p);
  return append;
}

std::int64_t append_bytes(const AppendRotaryParams& p) {
  const std::int64_t row_bytes = p.rotary.cos == nullptr ? 0 : p.sides[kQueries].cache.page_stride;
  return seqlens_bytes(p) + align_up(p.total_q * row_bytes, kAlignment);
}

AppendedCall bind_append(AppendRotaryParams& p, const StridedRows& q, void* area) {
  p.seqlens_out = static_cast<std::int32_t*>(area);
  if (p.rotary.cos == nullptr) return {q, p.seqlens_out};
  AppendRotarySide& side = p.sides[kQueries];
  side.cache.data = static_cast<char*>(area) + seqlens_bytes(p);
  const std::int64_t head = side.head_dim, token = side.heads * head;
  return {{side.cache.data, q.dtype, p.cu_seqlens_q == nullptr ? p.q_len * token : 0, token, head, 1}, p.seqlens_out};
}

StridedRows rows_of(const TensorView& view) {
  const std::int64_t* token = view.strides + (view.rank - 3);
  return {view.data, view.dtype, view.rank == 4 ? view.strides[0] : 0, token[0], token[1], token[2]};
}

}  // namespace flashport
