// Validation of flash_decode: presence, then ranks, shapes, dtypes, devices, memory, values; each over all arguments.
#include "common/host/decode/problem.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "common/host/arguments.h"
#include "common/host/check.h"
#include "common/host/decode/kernel_choice.h"
#include "common/host/kv/cache_layout.h"

namespace flashport {
namespace {

constexpr Check kCheck("flash_decode");
constexpr double kLog2e = 1.4426950408889634;
constexpr double kLargestFloat = std::numeric_limits<float>::max();
constexpr double kSmallestFloat = std::numeric_limits<float>::min();
constexpr double kMostScore = 2.3e38;  // times log2(e), in which scores are kept, just below the largest float

// The extents that the arguments must agree on.
struct Extents {
  bool ragged, paged, pool, csr, has_lengths;
  std::int64_t batch, q_len, num_q_heads, head_dim, head_dim_v, num_kv_heads, page_size;
  CacheAxes axes;
  KvFormat k_format, v_format;
};

bool is_given(const TensorView& view) { return view.rank != 0 || view.data != nullptr; }

void check_presence(const DecodeArgs& a) {
  const bool csr = a.kv_indptr.has_value() || a.kv_indices.has_value() || a.kv_last_page_len.has_value();
  const int layouts =
      static_cast<int>(a.block_table.has_value()) + static_cast<int>(a.token_table.has_value()) + static_cast<int>(csr);
  if (layouts > 1) {
    kCheck.value_error("give at most one of block_table, token_table, and kv_indptr with kv_indices");
  }
  if (csr && (!a.kv_indptr || !a.kv_indices)) kCheck.value_error("kv_indptr and kv_indices must be given together");
  if (a.request_index && !a.token_table) kCheck.value_error("request_index must come with token_table");
  if (!is_given(a.seqlens) && !a.kv_last_page_len) {
    kCheck.value_error("seqlens must be given; only kv_last_page_len can take its place");
  }
  if (!a.cu_seqlens_q && a.max_q_len != 0) kCheck.value_error("max_q_len must come with cu_seqlens_q");
  if (a.cu_seqlens_q && a.max_q_len < 1) {
    kCheck.value_error("max_q_len must be 1 or more with cu_seqlens_q, got " + std::to_string(a.max_q_len));
  }
}

void check_scale_rank(const std::optional<TensorView>& scale, const char* name) {
  if (scale && scale->rank != 0) kCheck.rank(*scale, name, 1, "(1 or num_kv_heads)");
}

void check_ranks(const DecodeArgs& a) {
  const bool ragged = a.cu_seqlens_q.has_value();
  if (ragged) {
    kCheck.rank(a.q, "q", 3, "(total_q, num_q_heads, head_dim)");
  } else {
    kCheck.rank(a.q, "q", 3, "(batch, num_q_heads, head_dim)", 4, "(batch, q_len, num_q_heads, head_dim)");
  }
  if (a.token_table) {
    kCheck.rank(a.k_cache, "k_cache", 3, cache_axes_text(3, a.kv_layout, false));
  } else if (a.block_table || a.kv_indptr) {
    kCheck.rank(a.k_cache, "k_cache", 4, cache_axes_text(4, a.kv_layout, false), 3,
                cache_axes_text(3, a.kv_layout, false));
  } else {
    kCheck.rank(a.k_cache, "k_cache", 4, cache_axes_text(4, a.kv_layout, false));
  }
  kCheck.rank(a.v_cache, "v_cache", a.k_cache.rank, cache_axes_text(a.k_cache.rank, a.kv_layout, true));
  if (is_given(a.seqlens)) kCheck.rank(a.seqlens, "seqlens", 1, "(batch)");
  kCheck.rank(a.block_table, "block_table", 2, "(batch, max_pages)");
  kCheck.rank(a.token_table, "token_table", 2, "(requests, max_len)");
  kCheck.rank(a.request_index, "request_index", 1, "(batch)");
  kCheck.rank(a.kv_indptr, "kv_indptr", 1, "(batch + 1)");
  kCheck.rank(a.kv_indices, "kv_indices", 1, "(pages)");
  kCheck.rank(a.kv_last_page_len, "kv_last_page_len", 1, "(batch)");
  kCheck.rank(a.cu_seqlens_q, "cu_seqlens_q", 1, "(batch + 1)");
  if (a.alibi_slopes) {
    kCheck.rank(*a.alibi_slopes, "alibi_slopes", 1, "(num_q_heads)", 2, "(batch, num_q_heads)");
  }
  kCheck.rank(a.sinks, "sinks", 1, "(num_q_heads)");
  kCheck.rank(a.tree_mask, "tree_mask", ragged ? 1 : 2, ragged ? "(total_q)" : "(batch, q_len)");
  check_scale_rank(a.k_scale, "k_scale");
  check_scale_rank(a.v_scale, "v_scale");
  if (a.q.rank == 4) {
    kCheck.rank(a.out, "out", 4, "(batch, q_len, num_q_heads, head_dim_v)");
    kCheck.rank(a.lse, "lse", 3, "(batch, q_len, num_q_heads)");
  } else {
    kCheck.rank(a.out, "out", 3, ragged ? "(total_q, num_q_heads, head_dim_v)" : "(batch, num_q_heads, head_dim_v)");
    kCheck.rank(a.lse, "lse", 2, ragged ? "(total_q, num_q_heads)" : "(batch, num_q_heads)");
  }
  kCheck.rank(a.workspace, "workspace", 1, "(bytes)");
}

void check_scale_shape(const std::optional<TensorView>& scale, const char* name, std::int64_t num_kv_heads) {
  if (!scale || scale->rank == 0 || scale->shape[0] == 1 || scale->shape[0] == num_kv_heads) return;
  kCheck.value_error(std::string(name) + " must have shape (1,) or (num_kv_heads,) = (" + std::to_string(num_kv_heads) +
                     ",), got " + shape_text(*scale));
}

// The extents of a cache's rows follow from its format, which must be known before shapes are compared.
Extents check_shapes(const DecodeArgs& a) {
  Extents e{};
  e.k_format = cache_format(kCheck, a.k_cache, "k_cache", a.k_format, "k_format");
  e.v_format = cache_format(kCheck, a.v_cache, "v_cache", a.v_format, "v_format");
  const int last = a.q.rank - 1;
  e.ragged = a.cu_seqlens_q.has_value();
  e.csr = a.kv_indptr.has_value();
  e.pool = a.k_cache.rank == 3;
  e.paged = a.block_table.has_value() || a.token_table.has_value() || e.csr;
  e.has_lengths = is_given(a.seqlens);
  e.axes = cache_axes(a.k_cache.rank, a.kv_layout);
  if (e.ragged && a.cu_seqlens_q->shape[0] < 1) {
    kCheck.value_error("cu_seqlens_q must have shape (batch + 1,), got " + shape_text(*a.cu_seqlens_q));
  }
  e.batch = e.ragged ? a.cu_seqlens_q->shape[0] - 1 : a.q.shape[0];
  e.q_len = e.ragged ? a.max_q_len : a.q.rank == 4 ? a.q.shape[1] : 1;
  e.num_q_heads = a.q.shape[last - 1];
  e.head_dim = a.q.shape[last];
  e.head_dim_v = stored_head_dim(e.v_format, a.v_cache.shape[e.axes.dim]);
  e.num_kv_heads = a.k_cache.shape[e.axes.head];
  e.page_size = e.pool ? 1 : a.k_cache.shape[e.axes.token];

  if (const std::string problem = block_problem(e.k_format, "head_dim", e.head_dim); !problem.empty()) {
    kCheck.not_supported(problem);
  }
  const char* k_text = cache_axes_text(a.k_cache.rank, a.kv_layout, false);
  const char* v_text = cache_axes_text(a.k_cache.rank, a.kv_layout, true);
  const std::int64_t k_extent = stored_extent(e.k_format, e.head_dim);
  const std::int64_t v_extent = stored_extent(e.v_format, e.head_dim_v);
  const std::int64_t* k = a.k_cache.shape;
  if (!e.paged && k[0] != e.batch) {
    kCheck.value_error("k_cache must have a row for each request: batch is " + std::to_string(e.batch) + ", got " +
                       shape_text(a.k_cache) + "; a cache in pages needs block_table, or kv_indptr and kv_indices");
  }
  if (e.pool) {
    kCheck.shape(a.k_cache, "k_cache", k_text, {kAnyExtent, kAnyExtent, k_extent});
    kCheck.shape(a.v_cache, "v_cache", v_text, {k[0], k[1], v_extent});
  } else {
    kCheck.shape(a.k_cache, "k_cache", k_text, {kAnyExtent, kAnyExtent, kAnyExtent, k_extent});
    kCheck.shape(a.v_cache, "v_cache", v_text, {k[0], k[1], k[2], v_extent});
  }
  if (e.num_q_heads > 0 && (e.num_kv_heads == 0 || e.num_q_heads % e.num_kv_heads != 0)) {
    kCheck.value_error("num_q_heads must be a multiple of num_kv_heads, got q " + shape_text(a.q) + " and k_cache " +
                       shape_text(a.k_cache));
  }
  if (e.paged && e.page_size < 1) {
    kCheck.value_error("k_cache must have a page_size of 1 or more, got " + shape_text(a.k_cache));
  }
  if (e.has_lengths) kCheck.shape(a.seqlens, "seqlens", "(batch)", {e.batch});
  kCheck.shape(a.block_table, "block_table", "(batch, max_pages)", {e.batch, kAnyExtent});
  kCheck.shape(a.request_index, "request_index", "(batch)", {e.batch});
  if (a.token_table && !a.request_index && a.token_table->shape[0] < e.batch) {
    kCheck.value_error("token_table must have a row per request, or request_index be given: batch is " +
                       std::to_string(e.batch) + ", got " + shape_text(*a.token_table));
  }
  kCheck.shape(a.kv_indptr, "kv_indptr", "(batch + 1)", {e.batch + 1});
  kCheck.shape(a.kv_last_page_len, "kv_last_page_len", "(batch)", {e.batch});
  if (a.alibi_slopes && a.alibi_slopes->rank == 1) {
    kCheck.shape(*a.alibi_slopes, "alibi_slopes", "(num_q_heads)", {e.num_q_heads});
  } else {
    kCheck.shape(a.alibi_slopes, "alibi_slopes", "(batch, num_q_heads)", {e.batch, e.num_q_heads});
  }
  kCheck.shape(a.sinks, "sinks", "(num_q_heads)", {e.num_q_heads});
  if (e.ragged) {
    kCheck.shape(a.tree_mask, "tree_mask", "(total_q)", {a.q.shape[0]});
  } else {
    kCheck.shape(a.tree_mask, "tree_mask", "(batch, q_len)", {e.batch, e.q_len});
  }
  check_scale_shape(a.k_scale, "k_scale", e.num_kv_heads);
  check_scale_shape(a.v_scale, "v_scale", e.num_kv_heads);
  if (a.q.rank == 4) {
    kCheck.shape(a.out, "out", "(batch, q_len, num_q_heads, head_dim_v of v_cache)",
                 {e.batch, e.q_len, e.num_q_heads, e.head_dim_v});
    kCheck.shape(a.lse, "lse", "(batch, q_len, num_q_heads)", {e.batch, e.q_len, e.num_q_heads});
  } else {
    const char* out_text =
        e.ragged ? "(total_q, num_q_heads, head_dim_v of v_cache)" : "(batch, num_q_heads, head_dim_v of v_cache)";
    kCheck.shape(a.out, "out", out_text, {a.q.shape[0], e.num_q_heads, e.head_dim_v});
    kCheck.shape(a.lse, "lse", e.ragged ? "(total_q, num_q_heads)" : "(batch, num_q_heads)",
                 {a.q.shape[0], e.num_q_heads});
  }
  for (std::int64_t extent : {e.batch, e.q_len, e.num_q_heads, e.num_kv_heads, a.q.shape[0]}) {
    if (extent > std::numeric_limits<std::int32_t>::max()) {
      kCheck.value_error("q must have extents below 2^31, got " + shape_text(a.q));
    }
  }
  return e;
}

void check_dtypes(const DecodeArgs& a) {
  kCheck.dtype(a.q, "q", {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  kCheck.dtype(a.k_cache, "k_cache", {a.q.dtype, DType::kFp8E4M3, DType::kFp8E4M3Fnuz, DType::kUInt8});
  kCheck.dtype(a.v_cache, "v_cache", {a.q.dtype, DType::kFp8E4M3, DType::kFp8E4M3Fnuz, DType::kUInt8});
  if (is_given(a.seqlens)) kCheck.dtype(a.seqlens, "seqlens", {DType::kInt32, DType::kInt64});
  kCheck.dtype(a.block_table, "block_table", {DType::kInt32});
  kCheck.dtype(a.token_table, "token_table", {DType::kInt32});
  kCheck.dtype(a.request_index, "request_index", {DType::kInt32, DType::kInt64});
  kCheck.dtype(a.kv_indptr, "kv_indptr", {DType::kInt32});
  kCheck.dtype(a.kv_indices, "kv_indices", {DType::kInt32});
  kCheck.dtype(a.kv_last_page_len, "kv_last_page_len", {DType::kInt32});
  kCheck.dtype(a.cu_seqlens_q, "cu_seqlens_q", {DType::kInt32});
  kCheck.dtype(a.alibi_slopes, "alibi_slopes", {DType::kFloat32});
  kCheck.dtype(a.sinks, "sinks", {DType::kFloat32});
  kCheck.dtype(a.tree_mask, "tree_mask", {DType::kUInt32});
  kCheck.dtype(a.k_scale, "k_scale", {DType::kFloat32});
  kCheck.dtype(a.v_scale, "v_scale", {DType::kFloat32});
  kCheck.dtype(a.out, "out", {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  kCheck.dtype(a.lse, "lse", {DType::kFloat32});
  kCheck.dtype(a.workspace, "workspace", {DType::kUInt8});
}

std::array<Argument, 19> arguments_of(const DecodeArgs& args) {
  const auto& [q, k_cache, v_cache, seqlens, block_table, token_table, request_index, kv_indptr, kv_indices,
               kv_last_page_len, kv_layout, cu_seqlens_q, max_q_len, softmax_scale, window_left, window_right, softcap,
               alibi_slopes, sinks, tree_mask, k_scale, v_scale, k_format, v_format, num_splits, out, lse, workspace] =
      args;
  return {{{q, "q"},
           {k_cache, "k_cache"},
           {v_cache, "v_cache"},
           {is_given(seqlens) ? &seqlens : nullptr, "seqlens"},
           {block_table, "block_table"},
           {token_table, "token_table"},
           {request_index, "request_index"},
           {kv_indptr, "kv_indptr"},
           {kv_indices, "kv_indices"},
           {kv_last_page_len, "kv_last_page_len"},
           {cu_seqlens_q, "cu_seqlens_q"},
           {alibi_slopes, "alibi_slopes"},
           {sinks, "sinks"},
           {tree_mask, "tree_mask"},
           {k_scale, "k_scale"},
           {v_scale, "v_scale"},
           {out, "out", kWritten},
           {lse, "lse", kWritten},
           {workspace, "workspace", kWritten}}};
}

// cache_params() checks how caches lie, acquire_workspace() the workspace.
void check_memory(const DecodeArgs& a, bool writes) {
  const auto arguments = arguments_of(a);
  check_devices(kCheck, arguments);
  check_inputs_readable(kCheck, arguments);
  if (is_given(a.seqlens)) kCheck.contiguous(a.seqlens, "seqlens");
  if (a.block_table) kCheck.inner_contiguous(*a.block_table, "block_table");
  if (a.token_table) kCheck.inner_contiguous(*a.token_table, "token_table");
  if (a.alibi_slopes) kCheck.inner_contiguous(*a.alibi_slopes, "alibi_slopes");
  if (a.tree_mask) kCheck.inner_contiguous(*a.tree_mask, "tree_mask");
  kCheck.array(a.request_index, "request_index");
  kCheck.array(a.kv_indptr, "kv_indptr");
  kCheck.array(a.kv_indices, "kv_indices");
  kCheck.array(a.kv_last_page_len, "kv_last_page_len");
  kCheck.array(a.cu_seqlens_q, "cu_seqlens_q");
  kCheck.array(a.sinks, "sinks");
  kCheck.array(a.k_scale, "k_scale");
  kCheck.array(a.v_scale, "v_scale");
  if (!writes) return;
  kCheck.writable(a.out, "out");
  if (a.lse) kCheck.writable(*a.lse, "lse");
  check_outputs_apart(kCheck, arguments);
}

void check_values(const DecodeArgs& a, const Extents& e) {
  check_score_numbers(kCheck, "softmax_scale", a.softmax_scale, a.softcap);
  if (a.window_left < -1 || a.window_right < -1) {
    kCheck.value_error("window must be two numbers from -1 (infinite) on, got (" + std::to_string(a.window_left) +
                       ", " + std::to_string(a.window_right) + ")");
  }
  if (a.num_splits < kInvariantSplits) {
    kCheck.value_error("num_splits must be None (the invariant schedule), 0 (the heuristic) or a count, got " +
                       std::to_string(a.num_splits));
  }
  if (a.k_scale && a.v_scale) {
    const auto per_head = [](const TensorView& scale) { return scale.rank == 1 && scale.shape[0] != 1; };
    if (e.num_kv_heads > 1 && per_head(*a.k_scale) != per_head(*a.v_scale)) {
      kCheck.value_error("k_scale and v_scale must both have one value or both one per kv head, got " +
                         shape_text(*a.k_scale) + " and " + shape_text(*a.v_scale));
    }
  }
}

template <class T>
const T* data_of(const std::optional<TensorView>& view) {
  return view ? static_cast<const T*>(view->data) : nullptr;
}

void fill_layout(const DecodeArgs& a, const Extents& e, DecodeProblem& problem) {
  DecodeParams& p = problem.params;
  IndexBounds& bounds = problem.bounds;
  p.cache.k = cache_params(kCheck, a.k_cache, "k_cache", e.axes, e.k_format, e.head_dim);
  p.cache.v = cache_params(kCheck, a.v_cache, "v_cache", e.axes, e.v_format, e.head_dim_v);
  p.cache.page_size = std::max<std::int64_t>(e.page_size, 1);
  p.cache.page_shift = std::has_single_bit(static_cast<std::uint64_t>(p.cache.page_size))
                           ? std::countr_zero(static_cast<std::uint64_t>(p.cache.page_size))
                           : -1;
  bounds.pages = a.k_cache.shape[e.axes.page];
  if (e.has_lengths) {
    p.cache.seqlens = index_array(a.seqlens);
  } else {
    p.cache.kv_last_page_len = data_of<std::int32_t>(a.kv_last_page_len);
    bounds.lengths_name = "kv_last_page_len";
  }
  std::int64_t capacity = e.page_size;
  if (a.block_table || a.token_table) {
    const TensorView& table = a.block_table ? *a.block_table : *a.token_table;
    bounds.table_name = a.block_table ? "block_table" : "token_table";
    bounds.table_rows = table.shape[0];
    p.cache.table = static_cast<const std::int32_t*>(table.data);
    p.cache.table_stride = table.strides[0];
    p.cache.table_row = index_array(a.request_index);
    capacity = table.shape[1] * e.page_size;
  } else if (e.csr) {
    bounds.table_name = "kv_indices";
    bounds.table_entries = a.kv_indices->shape[0];
    p.cache.table = data_of<std::int32_t>(a.kv_indices);
    p.cache.kv_indptr = data_of<std::int32_t>(a.kv_indptr);
    capacity = a.kv_indices->shape[0] * e.page_size;
  }
  p.cache.max_len = static_cast<std::int32_t>(std::min(capacity, kMaxSequence));
}

void fill_options(const DecodeArgs& a, DecodeParams& p) {
  fill_scores(p, a.softmax_scale, a.softcap);
  // No sequence is so long that a window of its length would hide a key.
  const auto window = [](std::int64_t keys) { return keys >= kMaxSequence ? -1 : static_cast<std::int32_t>(keys); };
  p.window_left = window(a.window_left);
  p.window_right = window(a.window_right);
  p.alibi_slopes = data_of<float>(a.alibi_slopes);
  if (a.alibi_slopes && a.alibi_slopes->rank == 2) p.alibi_stride_seq = a.alibi_slopes->strides[0];
  p.sinks = data_of<float>(a.sinks);
  p.tree_mask = data_of<std::uint32_t>(a.tree_mask);
  if (a.tree_mask && a.tree_mask->rank == 2) p.tree_mask_stride = a.tree_mask->strides[0];
  p.k_scale = data_of<float>(a.k_scale);
  p.v_scale = data_of<float>(a.v_scale);
  const auto per_head = [](const std::optional<TensorView>& scale) {
    return scale && scale->rank == 1 && scale->shape[0] > 1;
  };
  p.scale_stride = per_head(a.k_scale) || per_head(a.v_scale) ? 1 : 0;
}

void fill_tensors(const DecodeArgs& a, const Extents& e, DecodeProblem& problem) {
  DecodeParams& p = problem.params;
  p.batch = static_cast<std::int32_t>(e.batch);
  p.num_q_heads = static_cast<std::int32_t>(e.num_q_heads);
  p.num_kv_heads = static_cast<std::int32_t>(e.num_kv_heads);
  p.group_size = static_cast<std::int32_t>(e.num_q_heads / e.num_kv_heads);
  p.head_dim_qk = static_cast<std::int32_t>(e.head_dim);
  p.head_dim_v = static_cast<std::int32_t>(e.head_dim_v);
  p.max_q_len = static_cast<std::int32_t>(e.q_len);

  // Axes of q, out and lse: [seq] [token] head [dim]. A ragged tensor has tokens of all sequences on its first axis.
  const int last = a.q.rank - 1;
  const auto seq_stride = [&](const TensorView& view) { return e.ragged ? 0 : view.strides[0]; };
  const auto token_stride = [&](const TensorView& view) {
    return e.ragged ? view.strides[0] : a.q.rank == 4 ? view.strides[1] : 0;
  };
  p.q.data = a.q.data;
  p.q.dtype = a.q.dtype;
  p.q.stride_seq = seq_stride(a.q);
  p.q.stride_token = token_stride(a.q);
  p.q.stride_head = a.q.strides[last - 1];
  p.q.stride_dim = a.q.strides[last];
  p.cu_seqlens_q = data_of<std::int32_t>(a.cu_seqlens_q);
  problem.bounds.total_q = e.ragged ? a.q.shape[0] : e.batch * e.q_len;
  p.out = {a.out.data,         a.out.dtype, seq_stride(a.out), token_stride(a.out), a.out.strides[last - 1],
           a.out.strides[last]};
  if (a.lse) {
    p.lse = static_cast<float*>(a.lse->data);
    p.lse_stride_seq = seq_stride(*a.lse);
    p.lse_stride_token = token_stride(*a.lse);
    p.lse_stride_head = a.lse->strides[last - 1];
  }
}

}  // namespace

void check_score_numbers(const Check& check, const char* scale_name, const std::optional<double>& softmax_scale,
                         double softcap) {
  const double scale = softmax_scale.value_or(1.0);
  if (!(std::fabs(scale) <= kMostScore)) {
    check.value_error(std::string(scale_name) +
                      " must be finite in fp32, times log2(e) (at most 2.3e+38 in magnitude), got " +
                      number_text(scale));
  }
  if (softcap == 0.0) return;
  if (!(softcap >= kSmallestFloat && softcap <= kMostScore)) {
    check.value_error("softcap must be 0 (off) or a positive number of fp32 (1.17549e-38 to 2.3e+38), got " +
                      number_text(softcap));
  }
  if (std::fabs(scale / softcap) <= kLargestFloat) return;
  check.value_error(std::string(scale_name) + " / softcap must be finite in fp32 (at most 3.40282e+38), got " +
                    number_text(scale) + " / " + number_text(softcap));
}

void fill_scores(DecodeParams& params, std::optional<double> softmax_scale, double softcap) {
  const double scale = softmax_scale ? *softmax_scale : 1.0 / std::sqrt(static_cast<double>(params.head_dim_qk));
  if (softcap > 0.0) {
    params.score_scale = static_cast<float>(scale / softcap);
    params.cap_scale = static_cast<float>(softcap * kLog2e);
  } else {
    params.score_scale = static_cast<float>(scale * kLog2e);
    params.cap_scale = 0.0f;
  }
}

namespace {

DecodeProblem validate(const DecodeArgs& args, bool writes) {
  check_presence(args);
  check_ranks(args);
  const Extents extents = check_shapes(args);
  check_dtypes(args);
  check_memory(args, writes);
  check_values(args, extents);

  DecodeProblem problem;
  problem.function = kCheck.function();
  problem.q = args.q;
  problem.k_format = extents.k_format;
  problem.v_format = extents.v_format;
  problem.num_splits = args.num_splits;
  problem.workspace = args.workspace;
  problem.empty = !has_elements(args.out) && (!args.lse || !has_elements(*args.lse));
  if (extents.num_kv_heads == 0 || extents.batch == 0) problem.empty = true;
  if (problem.empty) return problem;
  fill_tensors(args, extents, problem);
  fill_layout(args, extents, problem);
  fill_options(args, problem.params);
  return problem;
}

// `out` as a call makes it, without memory; as it is where q or v_cache has no axes to take its shape from.
TensorView output_like(const DecodeArgs& a) {
  TensorView out;
  if (a.q.rank < 1 || a.v_cache.rank < 1) return out;
  out = a.q;
  out.data = nullptr;
  const KvFormat v_format = cache_format(kCheck, a.v_cache, "v_cache", a.v_format, "v_format");
  out.shape[out.rank - 1] = stored_head_dim(v_format, a.v_cache.shape[a.v_cache.rank - 1]);
  return out;
}

}  // namespace

DecodeProblem validate_flash_decode(const DecodeArgs& args) { return validate(args, true); }

DecodeProblem validate_decode_size(const DecodeArgs& args) {
  if (is_given(args.out)) return validate(args, false);
  DecodeArgs with_out = args;
  with_out.out = output_like(args);
  return validate(with_out, false);
}

}  // namespace flashport
