#include "common/host/attention/kernel_choice.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "common/host/attention/few_queries.h"
#include "common/host/check.h"
#include "common/host/devices.h"
#include "common/host/kv/cache_layout.h"
#include "common/host/last_choice.h"
#include "common/host/query.h"

namespace flashport {
namespace {

constexpr std::int64_t kMinHeadDim = 16, kMaxHeadDim = 512, kHeadDimStep = 8;

constexpr MathType own_math(DType type) {
  switch (type) {
    case DType::kFloat16: return MathType::kFp16;
    case DType::kBFloat16: return MathType::kBf16;
    default: return MathType::kFp32;
  }
}

// In fp32 every type can be computed.
bool serves_type(const AttentionShape& shape, DType type) {
  return shape.math == MathType::kFp32 || shape.math == own_math(type);
}

bool serves_scores(const AttentionShape& shape, const ScoreNeeds& needs) {
  if (shape.form == ScoreForm::kAny) return true;
  return shape.form == needs.options && needs.positive_scale &&
         (shape.form != ScoreForm::kBias || needs.bias_in_rows) && (!has_unshifted_weights(shape) || needs.small_cap);
}

// The formats of KeySources::kBytes.
bool is_among_bytes(KvFormat format) {
  return is_sixteen_bit(format) || format == KvFormat::kFp8E4M3 || format == KvFormat::kFp8E4M3Fnuz ||
         format == KvFormat::kQ8_0;
}

KeySources sources_of(const AttentionRequest& r) {
  int sources = static_cast<int>(r.paged ? KeySources::kPages : KeySources::kRows);
  const auto need = [&](KvFormat format) {
    if (format == KvFormat::kFp8E4M3)
      sources |= static_cast<int>(KeySources::kFp8);
    else if (format != own_format(r.dtype))
      sources |= static_cast<int>(is_among_bytes(format) ? KeySources::kBytes : KeySources::kAll);
  };
  need(r.k_format);
  need(r.v_format);
  if (r.q_dtype != r.dtype) sources |= static_cast<int>(KeySources::kFp8);
  if (r.scales_beside) sources |= static_cast<int>(KeySources::kScaled);
  return static_cast<KeySources>(sources);
}

// Whether the products and the sources of a kernel are those that a request needs.
bool serves_sources(const AttentionShape& shape, const AttentionRequest& r) {
  const KeySources needed = sources_of(r);
  if (!has(shape.sources, needed)) return false;
  if (serves_type(shape, r.dtype)) return true;
  return r.dtype == DType::kBFloat16 && shape.math == MathType::kFp16 && has(shape.sources, KeySources::kBytes) &&
         has(needed, KeySources::kFp8);
}

bool serves(const AttentionShape& shape, const AttentionRequest& r) {
  return serves_sources(shape, r) && shape.head_dim_qk >= r.head_dim_qk && shape.head_dim_v >= r.head_dim_v &&
         serves_scores(shape, r.needs);
}

int count_options(ScoreForm form) { return std::popcount(static_cast<unsigned>(form)); }

bool is_better(const AttentionShape& a, const AttentionShape& b, DType type) {
  const bool a_is_own = a.math == own_math(type), b_is_own = b.math == own_math(type);
  if (a_is_own != b_is_own) return a_is_own;
  const int area_a = a.head_dim_qk * a.head_dim_v, area_b = b.head_dim_qk * b.head_dim_v;
  if (area_a != area_b) return area_a < area_b;
  if (a.form != b.form) return count_options(a.form) < count_options(b.form);
  return static_cast<int>(a.sources) < static_cast<int>(b.sources);
}

std::string head_dims_text(std::int64_t qk, std::int64_t v) {
  return qk == v ? std::to_string(qk) : std::to_string(qk) + "/" + std::to_string(v);
}

constexpr const char* kScalesBeside = "scales of rows or groups of values";

// What the request asks of no target; empty if nothing.
std::string limit_reason(const AttentionRequest& r) {
  if (r.scales_beside && r.appends) {
    return std::string("k_new does not come with ") + kScalesBeside + ", which append_kv writes; append the keys first";
  }
  if (r.appends && (r.k_format == KvFormat::kInt4 || r.v_format == KvFormat::kInt4)) {
    return "k_new does not come with int4, which append_kv writes with its scales; append the keys first";
  }
  if (std::string problem =
          dtype_problem("q", r.q_dtype, {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFp8E4M3});
      !problem.empty()) {
    return problem;
  }
  const struct {
    const char* name;
    std::int64_t dim;
  } sides[] = {{"head_dim", r.head_dim_qk}, {"head_dim_v", r.head_dim_v}};
  for (const auto& [name, dim] : sides) {
    if (dim >= kMinHeadDim && dim <= kMaxHeadDim && dim % kHeadDimStep == 0) continue;
    return std::string(name) + " must be a multiple of " + std::to_string(kHeadDimStep) + " from " +
           std::to_string(kMinHeadDim) + " to " + std::to_string(kMaxHeadDim) + ", got " + std::to_string(dim);
  }
  const struct {
    const char *name, *dim_name;
    KvFormat format;
    std::int64_t dim;
  } caches[] = {{"k", "head_dim", r.k_format, r.head_dim_qk}, {"v", "head_dim_v", r.v_format, r.head_dim_v}};
  for (const auto& [name, dim_name, format, dim] : caches) {
    if (std::string problem = block_problem(format, dim_name, dim); !problem.empty()) return problem;
    if (own_format(r.q_dtype) == format || (is_quantised(format) && r.q_dtype != DType::kFp8E4M3)) continue;
    if (is_sixteen_bit(format) && (r.q_dtype == DType::kFloat16 || r.q_dtype == DType::kBFloat16)) continue;
    return std::string(name) + " of " + kv_format_name(format) + " goes with q of the same type, got " +
           dtype_name(r.q_dtype);
  }
  return "";
}

// " with softcap, bias and a scale that is not positive"
std::string needs_text(const AttentionRequest& r) {
  const ScoreNeeds& needs = r.needs;
  const struct {
    bool needed;
    const char* name;
  } all[] = {
      {has(needs.options, ScoreForm::kSoftcap), "softcap"},    {has(needs.options, ScoreForm::kAlibi), "ALiBi"},
      {has(needs.options, ScoreForm::kBias), "bias"},          {has(needs.options, ScoreForm::kDropout), "dropout"},
      {!needs.positive_scale, "a scale that is not positive"}, {r.scales_beside, kScalesBeside},
  };
  std::string text;
  auto left = std::count_if(std::begin(all), std::end(all), [](const auto& each) { return each.needed; });
  for (const auto& [needed, name] : all) {
    if (!needed) continue;
    text += (text.empty() ? " with " : left == 1 ? " and " : ", ") + std::string(name);
    --left;
  }
  return text;
}

std::string missing_reason(std::span<const KernelEntry> kernels, std::string_view target, const AttentionRequest& r) {
  const std::string text = std::string(target) + " has no attention kernel";
  bool has_any = false, has_type = false, has_sources = false;
  std::string tiles;
  for (const KernelEntry& kernel : kernels) {
    if (kernel.tag != KernelTag::kAttention) continue;
    has_any = true;
    const AttentionShape& shape = kernel.shape.attention.shape;
    has_type = has_type || serves_type(shape, r.dtype);
    if (!serves_sources(shape, r)) continue;
    has_sources = true;
    if (!serves_scores(shape, r.needs)) continue;
    const std::string tile = head_dims_text(shape.head_dim_qk, shape.head_dim_v);
    if ((", " + tiles + ",").find(", " + tile + ",") == std::string::npos) tiles += (tiles.empty() ? "" : ", ") + tile;
  }
  if (!has_any) return text;
  if (!has_type) {
    return text + " for " + dtype_name(r.dtype) +
           (r.dtype == DType::kFloat32 ? "; use float16 or bfloat16" : "; use another type");
  }
  if (!has_sources) {
    const std::optional<KvFormat> own = own_format(r.dtype);
    const bool is_other = own != r.k_format || own != r.v_format;
    return text + " for keys and values" + (r.paged ? " on pages" : "") +
           (is_other ? " of " + kv_formats_text(r.k_format, r.v_format) : "") +
           (r.scales_beside ? std::string(" with ") + kScalesBeside : "");
  }
  const std::string what = needs_text(r);
  if (tiles.empty()) return text + what;
  return text + " for head_dim " + head_dims_text(r.head_dim_qk, r.head_dim_v) + what + "; its tiles are " + tiles;
}

}  // namespace

const KernelEntry* choose_attention_kernel(std::span<const KernelEntry> kernels, std::string_view target,
                                           const AttentionRequest& request, std::string* reason) {
  thread_local LastChoice<AttentionRequest> last;
  const KernelEntry* best = last.find(kernels, request);
  if (best != nullptr) return best;
  for (const KernelEntry& kernel : kernels) {
    if (kernel.tag != KernelTag::kAttention || !serves(kernel.shape.attention.shape, request)) continue;
    if (best == nullptr || is_better(kernel.shape.attention.shape, best->shape.attention.shape, request.dtype)) {
      best = &kernel;
    }
  }
  std::string limit = limit_reason(request);
  if (best != nullptr && limit.empty()) {
    last.keep(kernels, request, best);
    return best;
  }
  if (reason != nullptr) *reason = !limit.empty() ? std::move(limit) : missing_reason(kernels, target, request);
  return nullptr;
}

ScoreNeeds score_needs(bool softcap, bool alibi, bool bias, bool dropout, bool positive_scale) {
  int options = 0;
  const auto need = [&options](bool needed, ScoreForm option) { options |= needed ? static_cast<int>(option) : 0; };
  need(softcap, ScoreForm::kSoftcap);
  need(alibi, ScoreForm::kAlibi);
  need(bias, ScoreForm::kBias);
  need(dropout, ScoreForm::kDropout);
  return {static_cast<ScoreForm>(options), positive_scale};
}

AttentionRequest request_of(const AttentionQuery& query) {
  const KvFormat own = own_format(query.dtype).value_or(KvFormat::kBf16);  // other types are refused
  return {query.dtype,
          query.dtype == DType::kFp8E4M3 ? DType::kBFloat16 : query.dtype,
          query.k_format.value_or(own),
          query.v_format.value_or(own),
          query.paged,
          query.head_dim_qk,
          query.head_dim_v,
          score_needs(query.softcap, query.alibi, query.bias, query.dropout, true),
          query.scales_beside,
          query.appends};
}

const KernelEntry* find_attention_kernel(const AttentionQuery& query, std::string& reason) {
  const TargetView target = find_target(query.target, reason);
  if (!reason.empty()) return nullptr;
  return choose_attention_kernel(target.kernels, target.name, request_of(query), &reason);
}

Support supports(const AttentionQuery& query) {
  if (as_decode(query)) return {true, ""};
  return support_answer([&](std::string& reason) { return find_attention_kernel(query, reason); });
}

std::string which_kernel(const AttentionQuery& query) {
  if (const std::optional<DecodeQuery> decode = as_decode(query)) return which_kernel(*decode);
  return kernel_answer([&](std::string& reason) { return find_attention_kernel(query, reason); });
}

}  // namespace flashport
