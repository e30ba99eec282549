// Validation of attention: presence, then ranks, shapes, types, devices, memory, values; each over all arguments.
#include "common/host/attention/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "common/device/attention/pieces.h"
#include "common/host/arguments.h"
#include "common/host/attention/append.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/kv/cache_layout.h"
#include "common/host/scores.h"

namespace flashport {
namespace {

constexpr Check kCheck("attention");

constexpr char kPackedQuery[] = "(total_q, num_q_heads, head_dim)";
constexpr char kPackedKey[] = "(total_k, num_kv_heads, head_dim)";
constexpr char kPackedValue[] = "(total_k, num_kv_heads, head_dim_v)";
constexpr char kPackedOut[] = "(total_q, num_q_heads, head_dim_v)";
constexpr char kDenseQuery[] = "(batch, q_len, num_q_heads, head_dim)";
constexpr char kDenseKey[] = "(batch, kv_len, num_kv_heads, head_dim)";
constexpr char kDenseValue[] = "(batch, kv_len, num_kv_heads, head_dim_v)";
constexpr char kDenseOut[] = "(batch, q_len, num_q_heads, head_dim_v)";

// The extents that the arguments must agree on. Packed: q_len and kv_len are those of the longest sequence.
struct Extents {
  bool packed, packed_keys, paged;
  std::int64_t batch, q_len, kv_len, num_q_heads, num_kv_heads, head_dim, head_dim_v;
  std::int64_t page_size;
  CacheAxes axes;  // of k and v; packed keys are a pool of one token a page
  KvFormat k_format, v_format;
};

PageArguments page_arguments(const AttentionArgs& a) {
  return {a.block_table, a.token_table, a.request_index, a.kv_indptr, a.kv_indices, a.kv_last_page_len};
}

// The axes of k or v.
const char* key_axes(const AttentionArgs& a, int rank, bool is_value) {
  if (a.cu_seqlens_k) return is_value ? kPackedValue : kPackedKey;
  const bool is_dense = !page_arguments(a).is_given() && a.kv_layout == KvLayout::kNHD;
  if (is_dense) return is_value ? kDenseValue : kDenseKey;
  return cache_axes_text(rank, a.kv_layout, is_value);
}

bool is_fp8(const TensorView& view) { return view.dtype == DType::kFp8E4M3; }

// What k or v may be. A 16-bit type that is not q's has to be named, so that it is none by mistake.
DTypes key_types(const TensorView& q, std::optional<KvFormat> named) {
  if (is_fp8(q)) return {DType::kFp8E4M3};
  const bool is_other = named && is_sixteen_bit(*named) && (q.dtype == DType::kFloat16 || q.dtype == DType::kBFloat16);
  const DType own = is_other ? kv_format_trait(*named).dtype : q.dtype;
  return {own, DType::kFp8E4M3, DType::kFp8E4M3Fnuz, DType::kFp8E5M2, DType::kInt8, DType::kUInt8};
}

bool drops(const AttentionArgs& a) { return a.dropout_p != 0.0; }

// The number of sequences, where the rank that it is read from may still be wrong.
std::int64_t batch_of(const AttentionArgs& a) {
  if (a.cu_seqlens_q) return a.cu_seqlens_q->rank == 1 ? a.cu_seqlens_q->shape[0] - 1 : 0;
  return a.q.rank == 4 ? a.q.shape[0] : 0;
}

void check_presence(const AttentionArgs& a) {
  const bool paged = page_arguments(a).is_given();
  check_page_presence(kCheck, page_arguments(a));
  check_append_presence(kCheck, a);
  if (paged && a.cu_seqlens_k) {
    kCheck.value_error("cu_seqlens_k must not come with keys on pages, whose lengths seqused_k has");
  }
  const bool takes_rows = paged || (a.q.rank == 3 && a.k.rank == 4);  // packed queries over keys that are not packed
  if (a.cu_seqlens_q.has_value() != a.cu_seqlens_k.has_value() && !(a.cu_seqlens_q && takes_rows)) {
    kCheck.value_error(std::string("cu_seqlens_q and cu_seqlens_k must be given together, got ") +
                       (a.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k") + " alone");
  }
  if (!a.cu_seqlens_q && a.max_seqlen_q != 0) kCheck.value_error("max_seqlen_q must come with cu_seqlens_q");
  if (!a.cu_seqlens_k && a.max_seqlen_k != 0) kCheck.value_error("max_seqlen_k must come with cu_seqlens_k");
  if (a.kv_indptr && !a.seqused_k && !a.kv_last_page_len) {
    kCheck.value_error("seqused_k or kv_last_page_len must come with kv_indptr and kv_indices");
  }
  if (a.seqused_k && a.kv_last_page_len) {
    kCheck.value_error("seqused_k must not come with kv_last_page_len, which has the lengths too");
  }
  if (a.bias) {
    const char* other = a.cu_seqlens_q ? "cu_seqlens_q"
                        : paged        ? "keys on pages"
                        : a.leftpad_k  ? "leftpad_k"
                        : a.k_new      ? "k_new"
                                       : nullptr;
    if (other != nullptr) {
      kCheck.value_error(std::string("bias has a row for each query of dense sequences and an entry for each key, and "
                                     "must not come with ") +
                         other + "; hide keys by entries of -inf");
    }
  }
  if (drops(a) && !a.rng_state) {
    kCheck.value_error("rng_state (seed and offset) must come with dropout_p, got dropout_p " +
                       number_text(a.dropout_p) + " alone");
  }
}

ArgumentTable<30> table_of(const AttentionArgs& args) {
  const auto& [q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, leftpad_k,
               block_table, token_table, request_index, kv_indptr, kv_indices, kv_last_page_len, kv_layout, k_new,
               v_new, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved, softmax_scale, causal, window_left,
               window_right, softcap, alibi_slopes, sinks, bias, dropout_p, rng_state, q_scale, k_scale, v_scale,
               k_format, v_format, num_splits, out, lse, workspace] = args;
  const bool packed = cu_seqlens_q.has_value();
  const auto axes = [packed](const char* packed_text, const char* dense_text) {
    return packed ? Axes{3, packed_text} : Axes{4, dense_text};
  };
  constexpr DTypes kFloat = {DType::kFloat32};
  constexpr DTypes kInt = {DType::kInt32};
  const DType math = is_fp8(q) ? (is_given(out) ? out.dtype : DType::kBFloat16) : q.dtype;
  const DTypes bias_types = math == DType::kFloat32 ? kFloat : DTypes{DType::kFloat32, math};
  const DTypes out_types = is_fp8(q) ? DTypes{DType::kBFloat16, DType::kFloat16} : DTypes{q.dtype};
  const DTypes k_types = key_types(q, k_format), v_types = key_types(q, v_format);
  const Axes pages = {4, key_axes(args, 4, false)}, slots = {3, key_axes(args, 3, false)};
  using enum Strides;

  ArgumentTable<30> table;
  table.add(q, "q", kRead, {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFp8E4M3}, kUnitInner,
            axes(kPackedQuery, kDenseQuery));
  // cache_params() checks how keys and values lie.
  const Access of_cache = k_new ? kWritten : kRead;
  if (block_table || kv_indptr) {
    table.add(k, "k", of_cache, k_types, kAny, pages, slots);
  } else {
    table.add(k, "k", of_cache, k_types, kAny, cu_seqlens_k || token_table ? slots : pages);
  }
  table.add(v, "v", of_cache, v_types, kAny, {k.rank, key_axes(args, k.rank, true)});
  add_append_arguments(table, args);
  add_page_arguments(table, page_arguments(args));
  table.add(cu_seqlens_q, "cu_seqlens_q", kRead, kInt, kContiguous, {1, "(batch + 1)"});
  table.add(cu_seqlens_k, "cu_seqlens_k", kRead, kInt, kContiguous, {1, "(batch + 1)"});
  table.add(seqused_q, "seqused_q", kRead, kInt, kContiguous, {1, "(batch)"});
  table.add(seqused_k, "seqused_k", kRead, kInt, kContiguous, {1, "(batch)"});
  table.add(leftpad_k, "leftpad_k", kRead, kInt, kContiguous, {1, "(batch)"});
  table.add(alibi_slopes, "alibi_slopes", kRead, kFloat, kUnitInner, {1, "(num_q_heads)"}, {2, "(batch, num_q_heads)"});
  table.add(sinks, "sinks", kRead, kFloat, kContiguous, {1, "(num_q_heads)"});
  table.add(bias, "bias", kRead, bias_types, kAny, {4, "(batch or 1, num_q_heads or 1, q_len, kv_len)"});
  table.add(rng_state, "rng_state", kRead, {DType::kInt64}, kContiguous, {1, "(2)"});
  add_head_scale_argument(table, q_scale, "q_scale", false);
  add_head_scale_argument(table, k_scale, "k_scale", is_beside(args, k_scale));
  add_head_scale_argument(table, v_scale, "v_scale", is_beside(args, v_scale));
  table.add(out, "out", kWritten, out_types, kAny, axes(kPackedOut, kDenseOut));
  table.add(lse, "lse", kWritten, kFloat, kAny,
            packed ? Axes{2, "(num_q_heads, total_q)"} : Axes{3, "(batch, num_q_heads, q_len)"});
  table.add(workspace, "workspace", kWritten, {DType::kUInt8}, kAny, {1, "(bytes)"});
  return table;
}

// The longest sequence of a packed tensor. A call without tokens may well have a longest of 0.
std::int64_t longest(std::int64_t most, std::int64_t total, const char* name, const char* offsets) {
  if (most < (total > 0 ? 1 : 0)) {
    kCheck.value_error(std::string(name) + " must be 1 or more with " + offsets + ", got " + std::to_string(most));
  }
  return std::min(most, total);
}

Extents packed_extents(const AttentionArgs& a) {
  if (a.cu_seqlens_q->shape[0] < 1) {
    kCheck.value_error("cu_seqlens_q must have shape (batch + 1,), got " + shape_text(*a.cu_seqlens_q));
  }
  Extents e{};
  e.packed = true;
  e.batch = a.cu_seqlens_q->shape[0] - 1;
  e.q_len = longest(a.max_seqlen_q, a.q.shape[0], "max_seqlen_q", "cu_seqlens_q");
  return e;
}

Extents dense_extents(const AttentionArgs& a) {
  Extents e{};
  e.batch = a.q.shape[0];
  e.q_len = a.q.shape[1];
  return e;
}

// The extents of k and v. Those of their rows follow from the formats, which must be known first.
void check_key_shapes(const AttentionArgs& a, Extents& e) {
  const TensorView &k = a.k, &v = a.v;
  e.packed_keys = a.cu_seqlens_k.has_value();
  e.paged = page_arguments(a).is_given();
  e.k_format = cache_format(kCheck, k, "k", a.k_format, "k_format");
  e.v_format = cache_format(kCheck, v, "v", a.v_format, "v_format");
  e.axes = cache_axes(k.rank, a.kv_layout);
  e.num_kv_heads = k.shape[e.axes.head];
  e.page_size = k.rank == 4 ? k.shape[e.axes.token] : 1;
  e.head_dim_v = stored_head_dim(e.v_format, v.shape[e.axes.dim]);
  if (const std::string problem = block_problem(e.k_format, "head_dim", e.head_dim); !problem.empty()) {
    kCheck.not_supported(problem);
  }
  const std::int64_t k_extent = stored_extent(e.k_format, e.head_dim);
  const std::int64_t v_extent = stored_extent(e.v_format, e.head_dim_v);
  const char *k_text = key_axes(a, k.rank, false), *v_text = key_axes(a, k.rank, true);
  const std::int64_t any_v = v_extent == v.shape[e.axes.dim] ? kAnyExtent : v_extent;
  if (k.rank == 3) {
    kCheck.shape(k, "k", k_text, {kAnyExtent, kAnyExtent, k_extent});
    kCheck.shape(v, "v", v_text, {k.shape[0], k.shape[1], any_v});
  } else {
    kCheck.shape(k, "k", k_text, {e.paged ? kAnyExtent : e.batch, kAnyExtent, kAnyExtent, k_extent});
    kCheck.shape(v, "v", v_text, {k.shape[0], k.shape[1], k.shape[2], any_v});
  }
  if (e.paged && e.page_size < 1) {
    kCheck.value_error("k must have a page_size of 1 or more, got " + shape_text(k));
  }
  check_page_shapes(kCheck, page_arguments(a), e.batch);
  kCheck.shape(a.cu_seqlens_k, "cu_seqlens_k", "(batch + 1)", {e.batch + 1});
  // As many pages as a table has room for.
  const std::int64_t table_pages = a.block_table   ? a.block_table->shape[1]
                                   : a.token_table ? a.token_table->shape[1]
                                   : a.kv_indices  ? a.kv_indices->shape[0]
                                                   : 1;
  e.kv_len = e.packed_keys ? longest(a.max_seqlen_k, k.shape[0], "max_seqlen_k", "cu_seqlens_k")
             : e.paged     ? std::min(table_pages * e.page_size, kMostTokens)
                           : e.page_size;
}

void check_scale_shapes(const AttentionArgs& a, const Extents& e) {
  const auto check_keys = [&](const auto& scale, const char* name, const TensorView& rows, const char* rows_name,
                              std::int64_t head_dim) {
    if (is_beside(a, scale)) {
      check_cache_scale(kCheck, scale, name, rows, rows_name, e.num_kv_heads, head_dim);
    } else {
      check_head_scale(kCheck, scale, name, e.batch, e.num_kv_heads);
    }
  };
  check_head_scale(kCheck, a.q_scale, "q_scale", e.batch, e.num_kv_heads);
  check_keys(a.k_scale, "k_scale", a.k, "k", e.head_dim);
  check_keys(a.v_scale, "v_scale", a.v, "v", e.head_dim_v);
}

Extents check_shapes(const AttentionArgs& a) {
  Extents e = a.cu_seqlens_q ? packed_extents(a) : dense_extents(a);
  const std::int64_t total_q = a.q.shape[0];  // where sequences are packed
  e.num_q_heads = a.q.shape[a.q.rank - 2];
  e.head_dim = a.q.shape[a.q.rank - 1];
  check_key_shapes(a, e);
  check_scale_shapes(a, e);
  check_append_shapes(kCheck, a, {e.batch, e.num_kv_heads, e.head_dim, e.head_dim_v});
  if (e.num_q_heads > 0 && (e.num_kv_heads == 0 || e.num_q_heads % e.num_kv_heads != 0)) {
    kCheck.value_error("num_q_heads must be a multiple of num_kv_heads, got q " + shape_text(a.q) + " and k " +
                       shape_text(a.k));
  }
  kCheck.shape(a.seqused_q, "seqused_q", "(batch)", {e.batch});
  kCheck.shape(a.seqused_k, "seqused_k", "(batch)", {e.batch});
  kCheck.shape(a.leftpad_k, "leftpad_k", "(batch)", {e.batch});
  if (a.alibi_slopes && a.alibi_slopes->rank == 1) {
    kCheck.shape(*a.alibi_slopes, "alibi_slopes", "(num_q_heads)", {e.num_q_heads});
  } else {
    kCheck.shape(a.alibi_slopes, "alibi_slopes", "(batch, num_q_heads)", {e.batch, e.num_q_heads});
  }
  kCheck.shape(a.sinks, "sinks", "(num_q_heads)", {e.num_q_heads});
  if (a.bias) {
    const std::int64_t* shape = a.bias->shape;
    kCheck.shape(*a.bias, "bias", "(batch or 1, num_q_heads or 1, q_len, kv_len)",
                 {shape[0] == 1 ? 1 : e.batch, shape[1] == 1 ? 1 : e.num_q_heads, e.q_len, e.kv_len});
  }
  kCheck.shape(a.rng_state, "rng_state", "(2)", {2});
  if (e.packed) {
    kCheck.shape(a.out, "out", "(total_q, num_q_heads, head_dim_v of v)", {total_q, e.num_q_heads, e.head_dim_v});
    kCheck.shape(a.lse, "lse", "(num_q_heads, total_q)", {e.num_q_heads, total_q});
  } else {
    kCheck.shape(a.out, "out", "(batch, q_len, num_q_heads, head_dim_v of v)",
                 {e.batch, e.q_len, e.num_q_heads, e.head_dim_v});
    kCheck.shape(a.lse, "lse", "(batch, num_q_heads, q_len)", {e.batch, e.num_q_heads, e.q_len});
  }
  const auto check_extents = [](const TensorView& view, const char* name, std::int64_t tokens,
                                std::initializer_list<std::int64_t> others) {
    if (tokens > kMostTokens) {
      kCheck.value_error(std::string(name) + " must have at most 2^30 tokens a sequence, got " + shape_text(view));
    }
    for (const std::int64_t extent : others) {
      if (extent <= std::numeric_limits<std::int32_t>::max()) continue;
      kCheck.value_error(std::string(name) + " must have a batch and heads below 2^31, got " + shape_text(view));
    }
  };
  check_extents(a.q, "q", e.q_len, {e.batch, e.num_q_heads});
  check_extents(a.k, "k", e.kv_len, {e.num_kv_heads});
  return e;
}

void check_values(const AttentionArgs& a) {
  check_score_numbers(kCheck, "softmax_scale", a.softmax_scale, a.softcap);
  check_window(kCheck, a.window_left, a.window_right);
  check_dropout(kCheck, a.dropout_p);
  if (a.num_splits >= kInvariantSplits && a.num_splits <= kMostPieces) return;
  kCheck.value_error("num_splits must be None (the invariant schedule), 0 (the heuristic) or a count" +
                     (a.num_splits < 0 ? std::string() : " of at most " + std::to_string(kMostPieces)) + ", got " +
                     std::to_string(a.num_splits));
}

// Those beside keys or values, whose packed tokens are no pages.
KeyScales row_scales_of(const std::optional<TensorView>& scale, const TensorView& rows, const Extents& e,
                        std::int64_t head_dim) {
  KeyScales scales = key_scales(scale, rows, e.axes, head_dim);
  if (e.packed_keys) scales.stride_token = std::exchange(scales.stride_page, 0);
  return scales;
}

// Keys and values as pages. Without a table a page is a sequence; packed sequences share one.
void fill_keys(const AttentionArgs& a, const Extents& e, AttentionProblem& problem) {
  AttentionParams& p = problem.params;
  p.k_format = e.k_format;
  p.v_format = e.v_format;
  p.cache.k = cache_params(kCheck, a.k, "k", e.axes, e.k_format, e.head_dim);
  p.cache.v = cache_params(kCheck, a.v, "v", e.axes, e.v_format, e.head_dim_v);
  if (e.packed_keys) {
    for (CacheParams* cache : {&p.cache.k, &p.cache.v}) cache->token_stride = std::exchange(cache->page_stride, 0);
  }
  problem.paged = e.paged;
  problem.bounds.lengths_name = a.kv_last_page_len ? "kv_last_page_len" : "seqused_k";
  (void)fill_pages(page_arguments(a), a.k.shape[e.axes.page], e.page_size, p.cache, problem.bounds);
  p.cache.max_len = p.kv_len;
  p.cache.seqlens = index_array(a.seqused_k);
  p.q_scale = head_scales(a.q_scale);
  const bool k_beside = is_beside(a, a.k_scale), v_beside = is_beside(a, a.v_scale);
  if (k_beside) p.k_row_scales = row_scales_of(a.k_scale, a.k, e, e.head_dim);
  if (v_beside) p.v_row_scales = row_scales_of(a.v_scale, a.v, e, e.head_dim_v);
  if (!k_beside) p.k_scale = head_scales(a.k_scale);
  if (!v_beside) p.v_scale = head_scales(a.v_scale);
  problem.scales_beside = k_beside || v_beside;
  p.total_k = e.paged ? a.k.shape[e.axes.page] * e.page_size : e.packed_keys ? a.k.shape[0] : e.batch * e.kv_len;
  p.cu_seqlens_k = data_of<std::int32_t>(a.cu_seqlens_k);
  p.leftpad_k = data_of<std::int32_t>(a.leftpad_k);
}

void fill_tensors(const AttentionArgs& a, const Extents& e, AttentionParams& p) {
  p.batch = static_cast<std::int32_t>(e.batch);
  p.q_len = static_cast<std::int32_t>(e.q_len);
  p.kv_len = static_cast<std::int32_t>(e.kv_len);
  p.num_q_heads = static_cast<std::int32_t>(e.num_q_heads);
  p.num_kv_heads = static_cast<std::int32_t>(e.num_kv_heads);
  p.group_size = p.num_q_heads / p.num_kv_heads;
  p.head_dim_qk = static_cast<std::int32_t>(e.head_dim);
  p.head_dim_v = static_cast<std::int32_t>(e.head_dim_v);
  p.q = rows_of(a.q);
  p.out = rows_of(a.out);
  p.total_q = e.packed ? a.q.shape[0] : e.batch * e.q_len;
  p.cu_seqlens_q = data_of<std::int32_t>(a.cu_seqlens_q);
  p.seqused_q = data_of<std::int32_t>(a.seqused_q);
  if (a.lse) {
    const int head = e.packed ? 0 : 1;
    p.lse = static_cast<float*>(a.lse->data);
    p.lse_stride_seq = e.packed ? 0 : a.lse->strides[0];
    p.lse_stride_head = a.lse->strides[head];
    p.lse_stride_token = a.lse->strides[head + 1];
  }
}

// A side of a window that hides no key from any query is infinite. `reach`: no query and key lie further apart.
std::int32_t window_side(std::int64_t keys, std::int64_t reach) {
  return keys >= reach ? -1 : static_cast<std::int32_t>(keys);
}

void fill_options(const AttentionArgs& a, AttentionParams& p) {
  fill_scores(p, a.softmax_scale, a.softcap);
  fill_window(p, a.window_left, a.window_right, a.causal);
  p.alibi_slopes = data_of<float>(a.alibi_slopes);
  if (a.alibi_slopes && a.alibi_slopes->rank == 2) p.alibi_stride_seq = a.alibi_slopes->strides[0];
  p.sinks = data_of<float>(a.sinks);
  if (a.bias) {
    const auto stride = [&](int axis) { return a.bias->shape[axis] == 1 ? 0 : a.bias->strides[axis]; };
    p.bias = {a.bias->data, a.bias->dtype, 0, stride(0), stride(1), stride(2), stride(3)};
  }
  if (drops(a)) p.dropout = dropout_params(*a.rng_state, a.dropout_p);
}

ScoreNeeds needs_of(const AttentionParams& p) {
  ScoreNeeds needs = score_needs(p.cap_scale != 0.0f, p.alibi_slopes != nullptr, p.bias.data != nullptr,
                                 p.dropout.rng_state != nullptr, p.score_scale >= std::numeric_limits<float>::min());
  needs.bias_in_rows = p.bias.data == nullptr || p.bias.stride_key == 1 || p.kv_len == 1;
  needs.small_cap = p.cap_scale <= kMostUnshiftedScore;
  return needs;
}

AttentionProblem validate(const AttentionArgs& args, Outputs outputs) {
  check_presence(args);
  const ArgumentTable<30> table = table_of(args);
  check_ranks(kCheck, table);
  const Extents extents = check_shapes(args);
  check_tensors(kCheck, table, outputs);
  check_values(args);

  AttentionProblem problem;
  problem.function = kCheck.function();
  problem.q = args.q;
  problem.workspace = args.workspace;
  problem.empty = extents.batch == 0 || extents.q_len == 0 || extents.num_q_heads == 0;
  if (problem.empty && extents.batch > 0 && args.k_new) {
    kCheck.value_error("k_new must come with queries, got q " + shape_text(args.q) + "; append_kv writes keys alone");
  }
  if (problem.empty) return problem;
  fill_tensors(args, extents, problem.params);
  fill_keys(args, extents, problem);
  if (args.k_new) {
    problem.appends = true;
    problem.append = append_params(args, problem.params, args.k.shape[extents.axes.page]);
  }
  fill_options(args, problem.params);
  problem.num_splits = args.num_splits;
  problem.needs = needs_of(problem.params);
  return problem;
}

// `out` as a call makes it, without memory; as it is where q or v has no axes to take its shape from.
TensorView output_like(const AttentionArgs& a) {
  TensorView out;
  if (a.q.rank < 1 || a.v.rank < 1) return out;
  out = a.q;
  out.data = nullptr;
  if (is_fp8(a.q)) out.dtype = DType::kBFloat16;
  const KvFormat v_format = cache_format(kCheck, a.v, "v", a.v_format, "v_format");
  out.shape[out.rank - 1] = stored_head_dim(v_format, a.v.shape[a.v.rank - 1]);
  return out;
}

}  // namespace

AttentionProblem validate_attention(const AttentionArgs& args) { return validate(args, Outputs::kWritten); }

AttentionProblem validate_attention_size(const AttentionArgs& args) {
  if (is_given(args.out)) return validate(args, Outputs::kSizedOnly);
  AttentionArgs with_out = args;
  with_out.out = output_like(args);
  return validate(with_out, Outputs::kSizedOnly);
}

bool is_beside(const AttentionArgs& args, const std::optional<TensorView>& scale) {
  return lies_beside(scale, args.k) && (scale->rank != 2 || scale->shape[0] != batch_of(args));
}

std::string call_text(const AttentionArgs& a) {
  return CallText(kCheck.function(), table_of(a))
      .count("max_seqlen_q", a.max_seqlen_q, 0)
      .count("max_seqlen_k", a.max_seqlen_k, 0)
      .word("kv_layout", a.kv_layout == KvLayout::kHND ? "HND" : "NHD", "NHD")
      .number("softmax_scale", a.softmax_scale)
      .flag("rotary_interleaved", a.rotary_interleaved)
      .flag("causal", a.causal)
      .window(a.window_left, a.window_right)
      .number("softcap", a.softcap, 0.0)
      .number("dropout_p", a.dropout_p, 0.0)
      .word("k_format", a.k_format ? kv_format_name(*a.k_format) : "", "")
      .word("v_format", a.v_format ? kv_format_name(*a.v_format) : "", "")
      .count("num_splits", a.num_splits, kInvariantSplits)
      .text();
}

void fill_window(AttentionParams& p, std::int64_t left, std::int64_t right, bool causal) {
  // The last query stands at the last key, whatever the lengths of a sequence are.
  p.window_left = window_side(left, std::int64_t{p.kv_len} - 1);
  p.window_right = window_side(causal ? 0 : right, std::int64_t{p.q_len} - 1);
}

void check_dropout(const Check& check, double dropout_p) {
  if (dropout_p >= 0.0 && dropout_p < 1.0) return;
  check.value_error("dropout_p must be at least 0 and below 1, got " + number_text(dropout_p));
}

DropoutParams dropout_params(const TensorView& rng_state, double dropout_p) {
  constexpr double kValues = 256;  // of a weight's byte of random bits; some weight is always kept
  const double below = std::min(std::nearbyint(dropout_p * kValues), kValues - 1);
  return {static_cast<const std::int64_t*>(rng_state.data), static_cast<std::uint32_t>(below),
          static_cast<float>(1.0 / (1.0 - dropout_p))};
}

}  // namespace flashport
