// Validation of flash_decode: presence, then ranks, shapes, dtypes, devices, memory, values; each over all arguments.
#include "common/host/decode/problem.h"

#include <algorithm>
#include <limits>
#include <string>

#include "common/host/arguments.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/decode/kernel_choice.h"
#include "common/host/kv/cache_layout.h"
#include "common/host/scores.h"

namespace flashport {
namespace {

constexpr Check kCheck("flash_decode");

// The extents that the arguments must agree on.
struct Extents : DecodeExtents {
  bool paged, pool, has_lengths;
  std::int64_t page_size;
  CacheAxes axes;
  KvFormat k_format, v_format;
};

PageArguments page_arguments(const DecodeArgs& a) {
  return {a.block_table, a.token_table, a.request_index, a.kv_indptr, a.kv_indices, a.kv_last_page_len};
}

void check_presence(const DecodeArgs& a) {
  check_page_presence(kCheck, page_arguments(a));
  if (!is_given(a.seqlens) && !a.kv_last_page_len) {
    kCheck.value_error("seqlens must be given; only kv_last_page_len can take its place");
  }
  if (!a.cu_seqlens_q && a.max_q_len != 0) kCheck.value_error("max_q_len must come with cu_seqlens_q");
  if (a.cu_seqlens_q && a.max_q_len < 1) {
    kCheck.value_error("max_q_len must be 1 or more with cu_seqlens_q, got " + std::to_string(a.max_q_len));
  }
}

ArgumentTable<19> table_of(const DecodeArgs& args) {
  const auto& [q, k_cache, v_cache, seqlens, block_table, token_table, request_index, kv_indptr, kv_indices,
               kv_last_page_len, kv_layout, cu_seqlens_q, max_q_len, softmax_scale, causal, window_left, window_right,
               softcap, alibi_slopes, sinks, tree_mask, k_scale, v_scale, k_format, v_format, num_splits, out, lse,
               workspace] = args;
  const bool ragged = cu_seqlens_q.has_value(), per_token = !ragged && q.rank == 4;
  const Axes pages = {4, cache_axes_text(4, kv_layout, false)}, slots = {3, cache_axes_text(3, kv_layout, false)};
  // 16 bits of another type than q's are taken where the call names them.
  const auto types_of = [&](const std::optional<KvFormat>& named) {
    const bool is_other = named == KvFormat::kFp16 || named == KvFormat::kBf16;
    return DTypes{is_other ? kv_format_trait(*named).dtype : q.dtype,
                  DType::kFp8E4M3,
                  DType::kFp8E4M3Fnuz,
                  DType::kFp8E5M2,
                  DType::kInt8,
                  DType::kUInt8};
  };
  const DTypes k_types = types_of(k_format), v_types = types_of(v_format);
  constexpr DTypes kFloats = {DType::kFloat16, DType::kBFloat16, DType::kFloat32}, kFloat = {DType::kFloat32};
  constexpr DTypes kInt = {DType::kInt32}, kInts = {DType::kInt32, DType::kInt64};
  using enum Strides;

  ArgumentTable<19> table;
  if (ragged) {
    table.add(q, "q", kRead, kFloats, kAny, {3, "(total_q, num_q_heads, head_dim)"});
  } else {
    table.add(q, "q", kRead, kFloats, kAny, {3, "(batch, num_q_heads, head_dim)"},
              {4, "(batch, q_len, num_q_heads, head_dim)"});
  }
  // cache_params() checks how caches lie.
  if (block_table || kv_indptr) {
    table.add(k_cache, "k_cache", kRead, k_types, kAny, pages, slots);
  } else {
    table.add(k_cache, "k_cache", kRead, k_types, kAny, token_table ? slots : pages);
  }
  table.add(v_cache, "v_cache", kRead, v_types, kAny, {k_cache.rank, cache_axes_text(k_cache.rank, kv_layout, true)});
  if (is_given(seqlens)) table.add(seqlens, "seqlens", kRead, kInts, kContiguous, {1, "(batch)"});
  add_page_arguments(table, page_arguments(args));
  table.add(cu_seqlens_q, "cu_seqlens_q", kRead, kInt, kContiguous, {1, "(batch + 1)"});
  table.add(alibi_slopes, "alibi_slopes", kRead, kFloat, kUnitInner, {1, "(num_q_heads)"}, {2, "(batch, num_q_heads)"});
  table.add(sinks, "sinks", kRead, kFloat, kContiguous, {1, "(num_q_heads)"});
  table.add(tree_mask, "tree_mask", kRead, {DType::kUInt32}, kUnitInner,
            ragged ? Axes{1, "(total_q)"} : Axes{2, "(batch, q_len)"});
  add_scale_argument(table, k_scale, "k_scale", k_cache, kRead);
  add_scale_argument(table, v_scale, "v_scale", v_cache, kRead);
  table.add(out, "out", kWritten, kFloats, kAny,
            ragged      ? Axes{3, "(total_q, num_q_heads, head_dim_v)"}
            : per_token ? Axes{4, "(batch, q_len, num_q_heads, head_dim_v)"}
                        : Axes{3, "(batch, num_q_heads, head_dim_v)"});
  table.add(lse, "lse", kWritten, kFloat, kAny,
            ragged      ? Axes{2, "(total_q, num_q_heads)"}
            : per_token ? Axes{3, "(batch, q_len, num_q_heads)"}
                        : Axes{2, "(batch, num_q_heads)"});
  table.add(workspace, "workspace", kWritten, {DType::kUInt8}, kAny, {1, "(bytes)"});
  return table;
}

// The extents of a cache's rows follow from its format, which must be known before shapes are compared.
Extents check_shapes(const DecodeArgs& a) {
  Extents e{};
  e.k_format = cache_format(kCheck, a.k_cache, "k_cache", a.k_format, "k_format");
  e.v_format = cache_format(kCheck, a.v_cache, "v_cache", a.v_format, "v_format");
  const int last = a.q.rank - 1;
  e.ragged = a.cu_seqlens_q.has_value();
  e.pool = a.k_cache.rank == 3;
  e.paged = page_arguments(a).is_given();
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
  check_page_shapes(kCheck, page_arguments(a), e.batch);
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
  check_cache_scale(kCheck, a.k_scale, "k_scale", a.k_cache, "k_cache", e.num_kv_heads, e.head_dim);
  check_cache_scale(kCheck, a.v_scale, "v_scale", a.v_cache, "v_cache", e.num_kv_heads, e.head_dim_v);
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

CacheScales scales_of(const DecodeArgs& a) { return {a.k_scale, a.k_cache, a.v_scale, a.v_cache}; }

bool lie_beside(const CacheScales& s) { return lies_beside(s.k_scale, s.k) || lies_beside(s.v_scale, s.v); }

void check_values(const DecodeArgs& a, const Extents& e) {
  check_score_numbers(kCheck, "softmax_scale", a.softmax_scale, a.softcap);
  check_window(kCheck, a.window_left, a.window_right);
  if (a.num_splits < kInvariantSplits) {
    kCheck.value_error("num_splits must be None (the invariant schedule), 0 (the heuristic) or a count, got " +
                       std::to_string(a.num_splits));
  }
  check_scale_pair(kCheck, scales_of(a), e.num_kv_heads);
}

void fill_layout(const DecodeArgs& a, const Extents& e, DecodeProblem& problem) {
  DecodeParams& p = problem.params;
  IndexBounds& bounds = problem.bounds;
  p.cache.k = cache_params(kCheck, a.k_cache, "k_cache", e.axes, e.k_format, e.head_dim);
  p.cache.v = cache_params(kCheck, a.v_cache, "v_cache", e.axes, e.v_format, e.head_dim_v);
  if (e.has_lengths) {
    p.cache.seqlens = index_array(a.seqlens);
  } else {
    bounds.lengths_name = "kv_last_page_len";
  }
  const std::int64_t capacity =
      fill_pages(page_arguments(a), a.k_cache.shape[e.axes.page], e.page_size, p.cache, bounds);
  p.cache.max_len = static_cast<std::int32_t>(std::min(capacity, kMaxSequence));
}

void fill_options(const DecodeArgs& a, DecodeParams& p) {
  fill_scores(p, a.softmax_scale, a.softcap);
  p.window_left = window_side(a.window_left);
  p.alibi_slopes = data_of<float>(a.alibi_slopes);
  if (a.alibi_slopes && a.alibi_slopes->rank == 2) p.alibi_stride_seq = a.alibi_slopes->strides[0];
  p.sinks = data_of<float>(a.sinks);
  p.tree_mask = data_of<std::uint32_t>(a.tree_mask);
  if (a.tree_mask && a.tree_mask->rank == 2) p.tree_mask_stride = a.tree_mask->strides[0];
  fill_right_window(p, a.causal && !a.tree_mask ? 0 : window_side(a.window_right));
}

DecodeProblem validate(const DecodeArgs& args, Outputs outputs) {
  check_presence(args);
  const ArgumentTable<19> table = table_of(args);
  check_ranks(kCheck, table);
  const Extents extents = check_shapes(args);
  check_tensors(kCheck, table, outputs);
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
  fill_tensors(problem, extents, args.q, args.out, args.lse, args.cu_seqlens_q);
  fill_layout(args, extents, problem);
  fill_options(args, problem.params);
  fill_scales(problem, scales_of(args), extents.axes);
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

std::int32_t window_side(std::int64_t keys) {
  // No sequence is so long that a window of its length would hide a key.
  return keys >= kMaxSequence ? -1 : static_cast<std::int32_t>(keys);
}

void fill_right_window(DecodeParams& p, std::int32_t window_right) {
  p.window_right = window_right;
  const bool hides_none = window_right < 0 || window_right >= p.max_q_len;
  p.clear_right = p.tree_mask != nullptr ? 0 : hides_none ? p.max_q_len : window_right + 1;
}

void fill_tensors(DecodeProblem& problem, const DecodeExtents& e, const TensorView& q, const TensorView& out,
                  const std::optional<TensorView>& lse, const std::optional<TensorView>& cu_seqlens_q) {
  DecodeParams& p = problem.params;
  p.batch = static_cast<std::int32_t>(e.batch);
  p.num_q_heads = static_cast<std::int32_t>(e.num_q_heads);
  p.num_kv_heads = static_cast<std::int32_t>(e.num_kv_heads);
  p.group_size = static_cast<std::int32_t>(e.num_q_heads / e.num_kv_heads);
  p.head_dim_qk = static_cast<std::int32_t>(e.head_dim);
  p.head_dim_v = static_cast<std::int32_t>(e.head_dim_v);
  p.max_q_len = static_cast<std::int32_t>(e.q_len);

  // Axes of q, out and lse: [seq] [token] head [dim]. A ragged tensor has tokens of all sequences on its first axis.
  const int head = q.rank - 2;
  const auto rows = [&](const TensorView& view, std::int64_t stride_dim) -> StridedRows {
    const std::int64_t* strides = view.strides;
    return {view.data,     view.dtype, e.ragged ? 0 : strides[0], e.ragged ? strides[0] : head == 2 ? strides[1] : 0,
            strides[head], stride_dim};
  };
  p.q = rows(q, q.strides[head + 1]);
  p.out = rows(out, out.strides[head + 1]);
  if (lse) p.lse = rows(*lse, 0);
  p.cu_seqlens_q = data_of<std::int32_t>(cu_seqlens_q);
  problem.total_q = e.ragged ? q.shape[0] : e.batch * e.q_len;
}

void check_scale_pair(const Check& check, const CacheScales& s, std::int64_t num_kv_heads) {
  if (!s.k_scale || !s.v_scale || lie_beside(s) || num_kv_heads == 1) return;
  if (is_per_head(*s.k_scale) == is_per_head(*s.v_scale)) return;
  check.value_error("k_scale and v_scale must both have one value or both one per kv head, got " +
                    shape_text(*s.k_scale) + " and " + shape_text(*s.v_scale));
}

void fill_scales(DecodeProblem& problem, const CacheScales& s, const CacheAxes& axes) {
  DecodeParams& p = problem.params;
  if (!lie_beside(s)) {
    p.k_scale = data_of<float>(s.k_scale);
    p.v_scale = data_of<float>(s.v_scale);
    const bool per_head = (s.k_scale && is_per_head(*s.k_scale)) || (s.v_scale && is_per_head(*s.v_scale));
    p.scale_stride = per_head ? 1 : 0;
    return;
  }
  problem.mixed = std::make_unique<MixedProblem>();
  problem.mixed->segments[0] = {p.cache, problem.k_format, problem.v_format,
                                key_scales(s.k_scale, s.k, axes, p.head_dim_qk),
                                key_scales(s.v_scale, s.v, axes, p.head_dim_v)};
  problem.mixed->segment_count = 1;
}

DecodeProblem validate_flash_decode(const DecodeArgs& args) { return validate(args, Outputs::kWritten); }

DecodeProblem validate_decode_size(const DecodeArgs& args) {
  if (is_given(args.out)) return validate(args, Outputs::kSizedOnly);
  DecodeArgs with_out = args;
  with_out.out = output_like(args);
  return validate(with_out, Outputs::kSizedOnly);
}

std::string call_text(const DecodeArgs& a) {
  return CallText(kCheck.function(), table_of(a))
      .word("kv_layout", a.kv_layout == KvLayout::kHND ? "HND" : "NHD", "NHD")
      .count("max_q_len", a.max_q_len, 0)
      .number("softmax_scale", a.softmax_scale)
      .word("causal", a.causal ? "True" : "False", "True")
      .window(a.window_left, a.window_right)
      .number("softcap", a.softcap, 0.0)
      .word("k_format", a.k_format ? kv_format_name(*a.k_format) : "", "")
      .word("v_format", a.v_format ? kv_format_name(*a.v_format) : "", "")
      .count("num_splits", a.num_splits, kInvariantSplits)
      .text();
}

}  // namespace flashport
