#include "common/host/decode/kernel_choice.h"

#include <algorithm>
#include <vector>

#include "common/host/check.h"
#include "common/host/devices.h"
#include "common/host/kv/cache_layout.h"
#include "common/host/last_choice.h"
#include "common/host/query.h"

namespace flashport {
namespace {

bool has_formats(const KernelEntry& kernel, const KernelRequest& request) {
  if (kernel.tag != KernelTag::kDecode) return false;
  const DecodeShape& shape = kernel.shape.decode.shape;
  for (const KvFormat format : {request.k_format, request.v_format}) {  // as q is, or kernels of any formats widen it
    if (!is_quantised(format) && own_format(request.q_dtype) != format) return false;
  }
  const bool is_bare = request.segment_formats == 0 && !request.scales_beside;
  const bool fills_tile = shape.head_dim_qk == request.head_dim_qk && shape.head_dim_v == request.head_dim_v;
  switch (factors_of(shape)) {
    case Factors::kNone:
      if (!is_bare) return false;
      break;
    case Factors::kOfGroups:
      if (request.factors != Factors::kOfGroups || !fills_tile) return false;
      break;
    case Factors::kOfRows:
      if (request.factors != Factors::kOfRows && !is_bare) return false;
      break;
  }
  return may_be_stored_in(shape.k_format, request.k_format) && may_be_stored_in(shape.v_format, request.v_format);
}

std::uint32_t formats_of(const KernelRequest& r) {
  return r.segment_formats != 0 ? r.segment_formats : format_bit(r.k_format) | format_bit(r.v_format);
}

// Products in 16 bits are of bf16 where one of the formats is: fp16 might not hold its values.
bool widens_formats(const KernelEntry& kernel, const KernelRequest& request) {
  if (kernel.tag != KernelTag::kDecode || !reads_segments(kernel.shape.decode.shape)) return false;
  const std::uint32_t formats = formats_of(request);
  if ((formats & ~kernel.formats) != 0) return false;
  const MathType math = kernel.shape.decode.shape.math;
  if (math == MathType::kFp32) return true;
  if ((formats & format_bit(KvFormat::kFp32)) != 0) return false;
  return math == ((formats & format_bit(KvFormat::kBf16)) != 0 ? MathType::kBf16 : MathType::kFp16);
}

// Whether it reads segments of the request's formats as they are stored: of its own, at least one, and of q's type.
bool reads_as_stored(const KernelEntry& kernel, const KernelRequest& request) {
  if (kernel.tag != KernelTag::kDecodeSegments || !request.segments_as_stored) return false;
  const DecodeShape& shape = kernel.shape.decode.shape;
  const std::optional<KvFormat> own = own_format(request.q_dtype);
  if (!own || *own == KvFormat::kFp32) return false;
  const std::uint32_t blocks = format_bit(shape.k_format);
  const bool has_formats =
      (request.segment_formats & blocks) != 0 && (request.segment_formats & ~(blocks | format_bit(*own))) == 0;
  return has_formats && request.q_len == 1 && request.group_size <= shape.rows &&
         shape.head_dim_qk == request.head_dim_qk && shape.head_dim_v == request.head_dim_v;
}

bool serves_types(const KernelEntry& kernel, const KernelRequest& request) {
  // float32 queries are never rounded to a shorter type without the caller's knowledge.
  return (has_formats(kernel, request) || widens_formats(kernel, request)) &&
         (request.q_dtype != DType::kFloat32 || kernel.shape.decode.shape.math == MathType::kFp32);
}

bool covers(const KernelEntry& kernel, const KernelRequest& request) {
  return kernel.shape.decode.shape.head_dim_qk >= request.head_dim_qk &&
         kernel.shape.decode.shape.head_dim_v >= request.head_dim_v;
}

bool is_better(const DecodeShape& a, const DecodeShape& b, std::int64_t packed_rows) {
  if (reads_segments(a) != reads_segments(b)) return reads_segments(b);
  const int area_a = a.head_dim_qk * a.head_dim_v;
  const int area_b = b.head_dim_qk * b.head_dim_v;
  if (area_a != area_b) return area_a < area_b;
  // The shortest tile that takes all rows at once, or else the longest one.
  const bool a_holds = a.rows >= packed_rows;
  const bool b_holds = b.rows >= packed_rows;
  if (a_holds != b_holds) return a_holds;
  if (a.rows != b.rows) return a_holds ? a.rows < b.rows : a.rows > b.rows;
  return chooses_formats(b) || b.k_format == KvFormat::kBytes;  // rather than a kernel of the one pair of formats
}

std::string head_dims_text(std::int64_t qk, std::int64_t v) {
  return qk == v ? std::to_string(qk) : std::to_string(qk) + "/" + std::to_string(v);
}

// Why no kernel takes such queries, whatever the cache is; empty if some do.
std::string query_type_reason(DType q) {
  return dtype_problem("q", q, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
}

// What the request asks of no target; empty if nothing.
std::string limit_reason(const KernelRequest& r) {
  const struct {
    const char* name;
    std::int64_t dim;
    KvFormat format;
  } sides[] = {{"head_dim", r.head_dim_qk, r.k_format}, {"head_dim_v", r.head_dim_v, r.v_format}};
  for (const auto& [side, dim, format] : sides) {
    const std::string name = side;
    if (dim > kMaxHeadDim) return name + " " + std::to_string(dim) + " > " + std::to_string(kMaxHeadDim);
    if (dim < kMinHeadDim) return name + " " + std::to_string(dim) + " < " + std::to_string(kMinHeadDim);
    if (dim % kHeadDimStep != 0) {
      return name + " must be a multiple of " + std::to_string(kHeadDimStep) + ", got " + std::to_string(dim);
    }
    if (r.segment_formats != 0) continue;
    if (std::string problem = block_problem(format, side, dim); !problem.empty()) return problem;
  }
  if (r.group_size < 1 || r.group_size > kMaxGroupSize) {
    return "1 to " + std::to_string(kMaxGroupSize) + " query heads may share a kv head, got " +
           std::to_string(r.group_size);
  }
  if (r.q_len < 1 || r.q_len > kMaxQueryLength) {
    return "q_len must be 1 to " + std::to_string(kMaxQueryLength) + ", got " + std::to_string(r.q_len);
  }
  if (std::string reason = query_type_reason(r.q_dtype); !reason.empty()) return reason;
  for (const auto& [side, dim, format] : sides) {
    if (r.segment_formats != 0 || format != KvFormat::kFp32 || r.q_dtype == DType::kFloat32) continue;
    return std::string("a cache of ") + kv_format_name(format) + " goes with q of the same type, got " +
           dtype_name(r.q_dtype);
  }
  return "";
}

// "kv=q8_0", "k=q8_0 with v=bf16", "kv=int8 and scales beside the cache", or "segments of fp16, q8_0".
std::string formats_text(const KernelRequest& r) {
  if (r.segment_formats == 0) {
    return kv_formats_text(r.k_format, r.v_format) + (r.scales_beside ? " and scales beside the cache" : "");
  }
  std::string text;
  for (int i = 0; i < kKvFormats; ++i) {
    const auto format = static_cast<KvFormat>(i);
    if ((r.segment_formats & format_bit(format)) == 0) continue;
    text += (text.empty() ? "segments of " : ", ") + std::string(kv_format_name(format));
  }
  return text;
}

std::string missing_reason(std::span<const KernelEntry> kernels, std::string_view target, const KernelRequest& r) {
  std::string text = std::string(target) + " has no kernel for ";
  bool has_pair = false;
  bool has_types = false, widens = false;
  std::vector<std::string> formats;
  std::string dims;
  for (const KernelEntry& kernel : kernels) {
    if (kernel.tag != KernelTag::kDecode || chooses_formats(kernel.shape.decode.shape) ||
        reads_factors(kernel.shape.decode.shape)) {
      continue;
    }
    const DecodeShape& shape = kernel.shape.decode.shape;
    const std::string pair = shape.k_format == shape.v_format ? kv_format_name(shape.k_format)
                                                              : kv_formats_text(shape.k_format, shape.v_format);
    bool listed = false;
    for (const std::string& known : formats) listed = listed || known == pair;
    if (!listed) formats.push_back(pair);
    has_pair = has_pair || has_formats(kernel, r);
    widens = widens || widens_formats(kernel, r);
    if (!serves_types(kernel, r)) continue;
    has_types = true;
    const std::string tile = head_dims_text(shape.head_dim_qk, shape.head_dim_v);
    if ((", " + dims + ",").find(", " + tile + ",") == std::string::npos) dims += (dims.empty() ? "" : ", ") + tile;
  }
  if (has_types) {
    return text + "head_dim " + head_dims_text(r.head_dim_qk, r.head_dim_v) + " with " + formats_text(r) +
           "; its tiles are " + dims;
  }
  const bool is_fp32 = r.segment_formats == 0 && !r.scales_beside ? r.k_format == KvFormat::kFp32 : widens;
  if (r.q_dtype == DType::kFloat32 && (has_pair || is_fp32)) {
    return text + "float32 q; use float16 or bfloat16";
  }
  text += formats_text(r) + "; it has ";
  for (std::size_t i = 0; i < formats.size(); ++i) text += (i == 0 ? "" : ", ") + formats[i];
  return text + (formats.empty() ? "none" : "");
}

}  // namespace

const KernelEntry* choose_decode_kernel(std::span<const KernelEntry> kernels, std::string_view target,
                                        const KernelRequest& request, std::string* reason) {
  thread_local LastChoice<KernelRequest> last;
  const KernelEntry* best = last.find(kernels, request);
  if (best != nullptr) return best;
  const std::int64_t packed_rows = request.group_size * request.q_len;
  for (const KernelEntry& kernel : kernels) {
    if (reads_as_stored(kernel, request)) {
      best = &kernel;
      break;
    }
    if (!serves_types(kernel, request) || !covers(kernel, request)) continue;
    if (best == nullptr || is_better(kernel.shape.decode.shape, best->shape.decode.shape, packed_rows)) best = &kernel;
  }
  std::string limit = limit_reason(request);
  if (best != nullptr && limit.empty()) {
    last.keep(kernels, request, best);
    return best;
  }
  if (reason != nullptr) *reason = !limit.empty() ? std::move(limit) : missing_reason(kernels, target, request);
  return nullptr;
}

const KernelEntry* find_twin(std::span<const KernelEntry> kernels, const KernelEntry& kernel, KernelTag tag) {
  return find_twin(kernels, kernel, tag, kernel.shape.decode.shape.rows);
}

const KernelEntry* find_twin(std::span<const KernelEntry> kernels, const KernelEntry& kernel, KernelTag tag, int rows) {
  struct Known {
    const KernelEntry* kernel = nullptr;
    int rows = 0;
    const KernelEntry* twin = nullptr;  // null: there is none
  };
  constexpr int kTwins = static_cast<int>(KernelTag::kDecodeSegmentsLarge) - static_cast<int>(KernelTag::kDecode) + 1;
  thread_local Known known[kTwins];  // what was asked for last of each tag
  Known& last = known[static_cast<int>(tag) - static_cast<int>(KernelTag::kDecode)];
  if (last.kernel == &kernel && last.rows == rows) return last.twin;
  last = {&kernel, rows, nullptr};
  DecodeShape wanted = kernel.shape.decode.shape;
  wanted.rows = rows;
  const auto is_wanted = [&](const KernelEntry& entry) {
    return entry.tag == tag && is_same_tile(entry.shape.decode.shape, wanted);
  };
  auto twin = std::ranges::find_if(kernels, is_wanted);
  if (twin == kernels.end() && tag == KernelTag::kDecodeLarge && is_chosen_format(wanted.k_format) &&
      is_chosen_format(wanted.v_format)) {
    wanted.k_format = wanted.v_format = KvFormat::kBlocks;
    twin = std::ranges::find_if(kernels, is_wanted);
  }
  if (twin != kernels.end()) last.twin = &*twin;
  return last.twin;
}

bool is_same_tile(const DecodeShape& a, const DecodeShape& b) {
  return a.head_dim_qk == b.head_dim_qk && a.head_dim_v == b.head_dim_v && a.rows == b.rows && a.math == b.math &&
         a.k_format == b.k_format && a.v_format == b.v_format;
}

namespace {

// Rows of q or out.
bool are_plain_rows(const StridedRows& rows, const DecodeShape& shape) {
  constexpr std::int64_t kUnit = 16, kValueBytes = 2;
  const DType math = shape.math == MathType::kFp16 ? DType::kFloat16 : DType::kBFloat16;
  const bool is_short = rows.dtype == DType::kFloat16 || rows.dtype == DType::kBFloat16;
  const std::int64_t steps = rows.stride_seq | rows.stride_token | rows.stride_head;
  return (is_of_math_type(shape) ? rows.dtype == math : is_short) && rows.stride_dim == 1 &&
         reinterpret_cast<std::uintptr_t>(rows.data) % kUnit == 0 && steps * kValueBytes % kUnit == 0;
}

}  // namespace

bool reads_plain_rows(const DecodeParams& p, const DecodeShape& shape) {
  const PagedCache& c = p.cache;
  const bool simple_lengths = c.seqlens.data != nullptr && !c.seqlens.is_int64 && c.kv_indptr == nullptr;
  if (!simple_lengths || (c.table != nullptr && c.page_shift < 0)) return false;
  const auto rows_fill = [](const CacheParams& cache, KvFormat format, int dim) {
    const int bytes = kv_row_bytes(format, dim);
    return cache.row_bytes == bytes && cache.copy_unit >= widest_unit(bytes);
  };
  return rows_fill(c.k, shape.k_format, shape.head_dim_qk) && rows_fill(c.v, shape.v_format, shape.head_dim_v) &&
         are_plain_rows(p.q, shape);
}

bool is_plain(const DecodeParams& p, const DecodeShape& shape) {
  const bool has_options = p.cu_seqlens_q != nullptr || p.cap_scale != 0.0f || p.window_left >= 0 ||
                           p.window_right != 0 || p.alibi_slopes != nullptr || p.sinks != nullptr ||
                           p.tree_mask != nullptr || p.num_chunks > 0 || p.lse.data != nullptr;
  return !has_options && !reads_segments(shape) && !chooses_formats(shape) && reads_plain_rows(p, shape) &&
         are_plain_rows(p.out, shape);
}

const KernelEntry* find_decode_kernel(const DecodeQuery& query, std::string& reason) {
  reason = query_type_reason(query.q_dtype);
  if (!reason.empty()) return nullptr;
  const TargetView target = find_target(query.target, reason);
  if (!reason.empty()) return nullptr;
  const KernelEntry* kernel = choose_decode_kernel(target.kernels, target.name, request_of(query), &reason);
  if (kernel == nullptr || !query.appends) return kernel;
  const KernelEntry* appending = find_twin(target.kernels, *kernel, KernelTag::kDecodeAppend);
  return appending != nullptr ? appending : kernel;
}

KernelRequest request_of(const DecodeQuery& query) {
  const KvFormat own = own_format(query.q_dtype).value_or(KvFormat::kFp32);
  KernelRequest request{query.q_dtype,
                        query.k_format.value_or(own),
                        query.v_format.value_or(own),
                        query.head_dim_qk,
                        query.head_dim_v,
                        query.group_size,
                        query.q_len};
  for (const KvFormat format : query.segment_formats) request.segment_formats |= format_bit(format);
  request.scales_beside = query.scales_beside && request.segment_formats == 0;
  if (request.scales_beside && query.scale_group == kFactoredValues) request.factors = Factors::kOfGroups;
  if (request.scales_beside && query.scale_group == query.head_dim_qk) request.factors = Factors::kOfRows;
  return request;
}

Support supports(const DecodeQuery& query) {
  return support_answer([&](std::string& reason) { return find_decode_kernel(query, reason); });
}

std::string which_kernel(const DecodeQuery& query) {
  return kernel_answer([&](std::string& reason) { return find_decode_kernel(query, reason); });
}

}  // namespace flashport
