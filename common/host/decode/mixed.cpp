// Validation of flash_decode_mixed: presence, then ranks, shapes, dtypes, devices, memory, values; each over all
// arguments. What is wrong with a segment is said of "segments[i]". One segment that kernels of flash_decode may read,
// without a mask, becomes a call of it; several may become a call each (segment_launches.h).
#include <algorithm>
#include <limits>
#include <string>

#include "common/host/arguments.h"
#include "common/host/call_log.h"
#include "common/host/check.h"
#include "common/host/decode/problem.h"
#include "common/host/decode/stored_segments.h"
#include "common/host/kv/cache_layout.h"
#include "common/host/scores.h"

namespace flashport {
namespace {

constexpr Check kCheck("flash_decode_mixed");
constexpr Check kSegmentChecks[] = {Check("flash_decode_mixed: segments[0]"), Check("flash_decode_mixed: segments[1]"),
                                    Check("flash_decode_mixed: segments[2]"), Check("flash_decode_mixed: segments[3]")};
static_assert(std::size(kSegmentChecks) == kMostSegments && kMostSegments == kMostDecodeSegments);

// As messages about all arguments name a segment's, in the order of table_of().
constexpr const char* kSegmentNames[kMostSegments][10] = {
    {"segments[0]: k", "segments[0]: v", "segments[0]: seqlens", "segments[0]: block_table", "segments[0]: token_table",
     "segments[0]: request_index", "segments[0]: kv_indptr", "segments[0]: kv_indices", "segments[0]: k_scale",
     "segments[0]: v_scale"},
    {"segments[1]: k", "segments[1]: v", "segments[1]: seqlens", "segments[1]: block_table", "segments[1]: token_table",
     "segments[1]: request_index", "segments[1]: kv_indptr", "segments[1]: kv_indices", "segments[1]: k_scale",
     "segments[1]: v_scale"},
    {"segments[2]: k", "segments[2]: v", "segments[2]: seqlens", "segments[2]: block_table", "segments[2]: token_table",
     "segments[2]: request_index", "segments[2]: kv_indptr", "segments[2]: kv_indices", "segments[2]: k_scale",
     "segments[2]: v_scale"},
    {"segments[3]: k", "segments[3]: v", "segments[3]: seqlens", "segments[3]: block_table", "segments[3]: token_table",
     "segments[3]: request_index", "segments[3]: kv_indptr", "segments[3]: kv_indices", "segments[3]: k_scale",
     "segments[3]: v_scale"}};

const std::optional<TensorView> kNone;

PageArguments page_arguments(const DecodeSegment& s) {
  return {s.block_table, s.token_table, s.request_index, s.kv_indptr, s.kv_indices, kNone};
}

void check_presence(const MixedDecodeArgs& a) {
  const auto count = static_cast<std::int64_t>(a.segments.size());
  if (count < 1 || count > kMostSegments) {
    kCheck.value_error("segments must be 1 to " + std::to_string(kMostSegments) + ", got " + std::to_string(count));
  }
  for (std::size_t i = 0; i < a.segments.size(); ++i) {
    const DecodeSegment& segment = a.segments[i];
    check_page_presence(kSegmentChecks[i], page_arguments(segment));
    if (!is_given(segment.seqlens) && page_arguments(segment).is_given()) {
      kSegmentChecks[i].value_error("seqlens must be given with a table of pages or tokens");
    }
  }
  if (!a.cu_seqlens_q && a.max_q_len != 0) kCheck.value_error("max_q_len must come with cu_seqlens_q");
  if (a.cu_seqlens_q && a.max_q_len < 1) {
    kCheck.value_error("max_q_len must be 1 or more with cu_seqlens_q, got " + std::to_string(a.max_q_len));
  }
  if (a.mask_slopes && !a.mask) kCheck.value_error("mask_slopes must come with mask");
}

constexpr std::size_t kMostRows = 9 + kMostSegments * 10;

// Axes of caches and their scales are checked with their shapes, which depend on each other.
ArgumentTable<kMostRows> table_of(const MixedDecodeArgs& args) {
  const auto& [q, segments, cu_seqlens_q, max_q_len, softmax_scale, window_left, window_right, softcap, alibi_slopes,
               sinks, mask, mask_slopes, by_segment, out, lse, workspace] = args;
  const bool ragged = cu_seqlens_q.has_value(), per_token = !ragged && q.rank == 4;
  constexpr DTypes kFloats = {DType::kFloat16, DType::kBFloat16, DType::kFloat32}, kFloat = {DType::kFloat32};
  constexpr DTypes kInt = {DType::kInt32}, kInts = {DType::kInt32, DType::kInt64};
  constexpr DTypes kFactors = {DType::kFloat32, DType::kFloat16};
  constexpr DTypes kCaches = {DType::kFloat16,     DType::kBFloat16, DType::kFloat32, DType::kFp8E4M3,
                              DType::kFp8E4M3Fnuz, DType::kFp8E5M2,  DType::kInt8,    DType::kUInt8};
  using enum Strides;

  ArgumentTable<kMostRows> table;
  if (ragged) {
    table.add(q, "q", kRead, kFloats, kAny, {3, "(total_q, num_q_heads, head_dim)"});
  } else {
    table.add(q, "q", kRead, kFloats, kAny, {3, "(batch, num_q_heads, head_dim)"},
              {4, "(batch, q_len, num_q_heads, head_dim)"});
  }
  for (std::size_t i = 0; i < segments.size() && i < kMostSegments; ++i) {
    const auto& [k, v, seqlens, block_table, token_table, request_index, kv_indptr, kv_indices, kv_layout, k_scale,
                 v_scale, k_format, v_format] = segments[i];
    const char* const* names = kSegmentNames[i];
    const Axes pages = {4, cache_axes_text(4, kv_layout, false)}, slots = {3, cache_axes_text(3, kv_layout, false)};
    if (block_table || kv_indptr) {
      table.add(k, names[0], kRead, kCaches, kAny, pages, slots);
    } else {
      table.add(k, names[0], kRead, kCaches, kAny, token_table ? slots : pages);
    }
    table.add(v, names[1], kRead, kCaches, kAny, {k.rank, cache_axes_text(k.rank, kv_layout, true)});
    if (is_given(seqlens)) table.add(seqlens, names[2], kRead, kInts, kContiguous, {1, "(batch)"});
    table.add(block_table, names[3], kRead, kInt, kUnitInner, {2, "(batch, max_pages)"});
    table.add(token_table, names[4], kRead, kInt, kUnitInner, {2, "(requests, max_len)"});
    table.add(request_index, names[5], kRead, kInts, kContiguous, {1, "(batch)"});
    table.add(kv_indptr, names[6], kRead, kInt, kContiguous, {1, "(batch + 1)"});
    table.add(kv_indices, names[7], kRead, kInt, kContiguous, {1, "(pages)"});
    table.add(k_scale, names[8], kRead, kFactors, kAny);
    table.add(v_scale, names[9], kRead, kFactors, kAny);
  }
  table.add(cu_seqlens_q, "cu_seqlens_q", kRead, kInt, kContiguous, {1, "(batch + 1)"});
  table.add(alibi_slopes, "alibi_slopes", kRead, kFloat, kUnitInner, {1, "(num_q_heads)"}, {2, "(batch, num_q_heads)"});
  table.add(sinks, "sinks", kRead, kFloat, kContiguous, {1, "(num_q_heads)"});
  table.add(mask, "mask", kRead, kFactors, kAny, {4, "(batch or 1, num_q_heads or 1, q_len, keys)"});
  table.add(mask_slopes, "mask_slopes", kRead, kFloat, kContiguous, {1, "(num_q_heads)"});
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

struct Formats {
  KvFormat k, v;
};

void check_segment_shapes(const Check& check, const DecodeSegment& s, const Formats& formats, const DecodeExtents& e) {
  for (const auto& [format, name, dim] :
       {std::tuple(formats.k, "head_dim", e.head_dim), std::tuple(formats.v, "head_dim_v", e.head_dim_v)}) {
    if (const std::string problem = block_problem(format, name, dim); !problem.empty()) check.not_supported(problem);
  }
  const PageArguments pages = page_arguments(s);
  const CacheAxes axes = cache_axes(s.k.rank, s.kv_layout);
  const char* k_text = cache_axes_text(s.k.rank, s.kv_layout, false);
  const char* v_text = cache_axes_text(s.k.rank, s.kv_layout, true);
  const std::int64_t k_extent = stored_extent(formats.k, e.head_dim);
  const std::int64_t v_extent = stored_extent(formats.v, e.head_dim_v);
  const std::int64_t* k = s.k.shape;
  if (!pages.is_given() && k[0] != e.batch) {
    check.value_error("k must have a row for each request: batch is " + std::to_string(e.batch) + ", got " +
                      shape_text(s.k) + "; a cache in pages needs block_table, or kv_indptr and kv_indices");
  }
  if (s.k.rank == 3) {
    check.shape(s.k, "k", k_text, {kAnyExtent, e.num_kv_heads, k_extent});
    check.shape(s.v, "v", v_text, {k[0], k[1], v_extent});
  } else if (s.kv_layout == KvLayout::kNHD) {
    check.shape(s.k, "k", k_text, {kAnyExtent, kAnyExtent, e.num_kv_heads, k_extent});
    check.shape(s.v, "v", v_text, {k[0], k[1], k[2], v_extent});
  } else {
    check.shape(s.k, "k", k_text, {kAnyExtent, e.num_kv_heads, kAnyExtent, k_extent});
    check.shape(s.v, "v", v_text, {k[0], k[1], k[2], v_extent});
  }
  if (pages.is_given() && axes.token >= 0 && k[axes.token] < 1) {
    check.value_error("k must have a page_size of 1 or more, got " + shape_text(s.k));
  }
  if (is_given(s.seqlens)) check.shape(s.seqlens, "seqlens", "(batch)", {e.batch});
  check_page_shapes(check, pages, e.batch);
  check_cache_scale(check, s.k_scale, "k_scale", s.k, "k", e.num_kv_heads, e.head_dim);
  check_cache_scale(check, s.v_scale, "v_scale", s.v, "v", e.num_kv_heads, e.head_dim_v);
}

void check_mask_shape(const TensorView& mask, const DecodeExtents& e) {
  const std::int64_t* m = mask.shape;
  if ((m[0] == 1 || m[0] == e.batch) && (m[1] == 1 || m[1] == e.num_q_heads) && m[2] >= e.q_len) return;
  kCheck.value_error("mask must have shape (batch or 1, num_q_heads or 1, q_len or more, keys) = (" +
                     std::to_string(e.batch) + " or 1, " + std::to_string(e.num_q_heads) + " or 1, " +
                     std::to_string(e.q_len) + " or more, keys), got " + shape_text(mask));
}

DecodeExtents check_shapes(const MixedDecodeArgs& a, Formats* formats) {
  for (std::size_t i = 0; i < a.segments.size(); ++i) {
    const DecodeSegment& s = a.segments[i];
    formats[i] = {cache_format(kSegmentChecks[i], s.k, "k", s.k_format, "k_format"),
                  cache_format(kSegmentChecks[i], s.v, "v", s.v_format, "v_format")};
  }
  DecodeExtents e{};
  const DecodeSegment& first = a.segments[0];
  const CacheAxes axes = cache_axes(first.k.rank, first.kv_layout);
  const int last = a.q.rank - 1;
  e.ragged = a.cu_seqlens_q.has_value();
  if (e.ragged && a.cu_seqlens_q->shape[0] < 1) {
    kCheck.value_error("cu_seqlens_q must have shape (batch + 1,), got " + shape_text(*a.cu_seqlens_q));
  }
  e.batch = e.ragged ? a.cu_seqlens_q->shape[0] - 1 : a.q.shape[0];
  e.q_len = e.ragged ? a.max_q_len : a.q.rank == 4 ? a.q.shape[1] : 1;
  e.num_q_heads = a.q.shape[last - 1];
  e.head_dim = a.q.shape[last];
  e.head_dim_v = stored_head_dim(formats[0].v, first.v.shape[axes.dim]);
  e.num_kv_heads = first.k.shape[axes.head];
  for (std::size_t i = 0; i < a.segments.size(); ++i) {
    check_segment_shapes(kSegmentChecks[i], a.segments[i], formats[i], e);
  }
  if (e.num_q_heads > 0 && (e.num_kv_heads == 0 || e.num_q_heads % e.num_kv_heads != 0)) {
    kCheck.value_error("num_q_heads must be a multiple of num_kv_heads, got q " + shape_text(a.q) +
                       " and segments[0]: k " + shape_text(first.k));
  }
  if (a.alibi_slopes && a.alibi_slopes->rank == 1) {
    kCheck.shape(*a.alibi_slopes, "alibi_slopes", "(num_q_heads)", {e.num_q_heads});
  } else {
    kCheck.shape(a.alibi_slopes, "alibi_slopes", "(batch, num_q_heads)", {e.batch, e.num_q_heads});
  }
  kCheck.shape(a.sinks, "sinks", "(num_q_heads)", {e.num_q_heads});
  if (a.mask) check_mask_shape(*a.mask, e);
  kCheck.shape(a.mask_slopes, "mask_slopes", "(num_q_heads)", {e.num_q_heads});
  if (a.q.rank == 4) {
    kCheck.shape(a.out, "out", "(batch, q_len, num_q_heads, head_dim_v of the segments)",
                 {e.batch, e.q_len, e.num_q_heads, e.head_dim_v});
    kCheck.shape(a.lse, "lse", "(batch, q_len, num_q_heads)", {e.batch, e.q_len, e.num_q_heads});
  } else {
    kCheck.shape(a.out, "out",
                 e.ragged ? "(total_q, num_q_heads, head_dim_v of the segments)"
                          : "(batch, num_q_heads, head_dim_v of the segments)",
                 {a.q.shape[0], e.num_q_heads, e.head_dim_v});
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

// Describes a segment, and gives how many keys it can have.
std::int64_t fill_segment(const Check& check, const DecodeSegment& s, const Formats& formats, const DecodeExtents& e,
                          CacheSegment& to, IndexBounds& bounds) {
  const CacheAxes axes = cache_axes(s.k.rank, s.kv_layout);
  PagedCache& cache = to.cache;
  cache = {};
  cache.k = cache_params(check, s.k, "k", axes, formats.k, e.head_dim);
  cache.v = cache_params(check, s.v, "v", axes, formats.v, e.head_dim_v);
  if (is_given(s.seqlens)) cache.seqlens = index_array(s.seqlens);
  const std::int64_t page_size = axes.token < 0 ? 1 : s.k.shape[axes.token];
  const std::int64_t capacity = fill_pages(page_arguments(s), s.k.shape[axes.page], page_size, cache, bounds);
  cache.max_len = static_cast<std::int32_t>(std::min(capacity, kMaxSequence));
  to.k_format = formats.k;
  to.v_format = formats.v;
  to.k_scale = key_scales(s.k_scale, s.k, axes, e.head_dim);
  to.v_scale = key_scales(s.v_scale, s.v, axes, e.head_dim_v);
  return cache.max_len;
}

void fill_mask(const MixedDecodeArgs& a, MixedProblem& mixed) {
  if (!a.mask) return;
  const TensorView& mask = *a.mask;
  const auto stride = [&](int axis) { return mask.shape[axis] == 1 ? 0 : mask.strides[axis]; };
  mixed.mask_keys = mask.shape[3];
  mixed.bias = {mask.data, mask.dtype, stride(0), stride(1), stride(2), mask.strides[3], data_of<float>(a.mask_slopes)};
}

// Whether a segment is one that flash_decode takes: of formats that go with the queries, and scales as it has them.
bool is_plain(const DecodeSegment& s, const Formats& formats, DType q_dtype) {
  for (const KvFormat format : {formats.k, formats.v}) {
    if (format == KvFormat::kFp32 && q_dtype != DType::kFloat32) return false;
  }
  for (const std::optional<TensorView>& scale : {s.k_scale, s.v_scale}) {
    if (scale && (scale->dtype != DType::kFloat32 || scale->rank > 1)) return false;
    if (scale && is_per_head(*scale) && scale->strides[0] != 1) return false;
  }
  return !s.k_scale || !s.v_scale || is_per_head(*s.k_scale) == is_per_head(*s.v_scale);
}

// Whether the segments are to be read one by one: a lone query sees all of their keys, and where one lies is nothing
// to it.
bool are_apart(const MixedDecodeArgs& a, const DecodeExtents& e) {
  return a.by_segment && a.segments.size() > 1 && e.q_len == 1 && !e.ragged && !a.mask && a.window_left < 0 &&
         a.window_right < 0 && !a.alibi_slopes;
}

DecodeProblem validate(const MixedDecodeArgs& args, Outputs outputs) {
  check_presence(args);
  const ArgumentTable<kMostRows> table = table_of(args);
  check_ranks(kCheck, table);
  Formats formats[kMostSegments];
  const DecodeExtents extents = check_shapes(args, formats);
  check_tensors(kCheck, table, outputs);
  check_score_numbers(kCheck, "softmax_scale", args.softmax_scale, args.softcap);
  check_window(kCheck, args.window_left, args.window_right);

  DecodeProblem problem;
  problem.function = kCheck.function();
  problem.q = args.q;
  problem.workspace = args.workspace;
  problem.empty = !has_elements(args.out) && (!args.lse || !has_elements(*args.lse));
  if (extents.num_kv_heads == 0 || extents.batch == 0) problem.empty = true;
  if (problem.empty) return problem;
  fill_tensors(problem, extents, args.q, args.out, args.lse, args.cu_seqlens_q);
  DecodeParams& p = problem.params;
  fill_scores(p, args.softmax_scale, args.softcap);
  p.window_left = window_side(args.window_left);
  fill_right_window(p, args.mask ? window_side(args.window_right) : 0);
  p.alibi_slopes = data_of<float>(args.alibi_slopes);
  if (args.alibi_slopes && args.alibi_slopes->rank == 2) p.alibi_stride_seq = args.alibi_slopes->strides[0];
  p.sinks = data_of<float>(args.sinks);

  problem.mixed = std::make_unique<MixedProblem>();
  MixedProblem& mixed = *problem.mixed;
  std::int64_t capacity = 0;
  for (std::size_t i = 0; i < args.segments.size(); ++i) {
    capacity +=
        fill_segment(kSegmentChecks[i], args.segments[i], formats[i], extents, mixed.segments[i], mixed.bounds[i]);
    mixed.formats |= format_bit(formats[i].k) | format_bit(formats[i].v);
  }
  mixed.segment_count = static_cast<std::int32_t>(args.segments.size());
  if (mixed.segment_count == 1) problem.bounds = mixed.bounds[0];
  fill_mask(args, mixed);
  problem.k_format = formats[0].k;
  problem.v_format = formats[0].v;
  bool all_plain = true, all_alike = true;
  for (std::size_t i = 0; i < args.segments.size(); ++i) {
    all_plain = all_plain && is_plain(args.segments[i], formats[i], args.q.dtype);
    all_alike = all_alike && formats[i].k == formats[0].k && formats[i].v == formats[0].v;
  }
  if (all_plain && args.segments.size() == 1 && !args.mask) {
    const std::unique_ptr<MixedProblem> only = std::move(problem.mixed);
    read_one_cache(problem, only->segments[0], only->bounds[0]);
    return problem;
  }
  problem.by_segment = all_plain && !all_alike && are_apart(args, extents);
  // A mask has all keys that a sequence may have; more are refused where lengths are known, and else not read.
  if (args.mask) capacity = std::min(capacity, mixed.mask_keys);
  p.cache.max_len = static_cast<std::int32_t>(std::min(capacity, kMaxSequence));
  p.cache.page_size = 1;
  problem.segments_as_stored = args.by_segment && may_be_read_as_stored(problem) && lies_as_stored_segments(problem);
  return problem;
}

// `out` as a call makes it, without memory; as it is where q or v has no axes to take its shape from.
TensorView output_like(const MixedDecodeArgs& a) {
  TensorView out;
  if (a.segments.empty() || a.q.rank < 1 || a.segments[0].v.rank < 1) return out;
  const DecodeSegment& first = a.segments[0];
  out = a.q;
  out.data = nullptr;
  const KvFormat v_format = cache_format(kSegmentChecks[0], first.v, "v", first.v_format, "v_format");
  out.shape[out.rank - 1] = stored_head_dim(v_format, first.v.shape[first.v.rank - 1]);
  return out;
}

}  // namespace

void read_one_cache(DecodeProblem& problem, const CacheSegment& segment, const IndexBounds& bounds) {
  problem.k_format = segment.k_format;
  problem.v_format = segment.v_format;
  problem.bounds = bounds;
  DecodeParams& p = problem.params;
  p.cache = segment.cache;
  p.k_scale = static_cast<const float*>(segment.k_scale.data);
  p.v_scale = static_cast<const float*>(segment.v_scale.data);
  p.scale_stride = segment.k_scale.stride_head != 0 || segment.v_scale.stride_head != 0 ? 1 : 0;
}

DecodeProblem validate_mixed(const MixedDecodeArgs& args) { return validate(args, Outputs::kWritten); }

DecodeProblem validate_mixed_size(const MixedDecodeArgs& args) {
  if (is_given(args.out)) return validate(args, Outputs::kSizedOnly);
  MixedDecodeArgs with_out = args;
  with_out.out = output_like(args);
  return validate(with_out, Outputs::kSizedOnly);
}

std::string call_text(const MixedDecodeArgs& a) {
  return CallText(kCheck.function(), table_of(a))
      .count("max_q_len", a.max_q_len, 0)
      .number("softmax_scale", a.softmax_scale)
      .window(a.window_left, a.window_right)
      .number("softcap", a.softcap, 0.0)
      .flag("by_segment", a.by_segment)
      .text();
}

}  // namespace flashport
