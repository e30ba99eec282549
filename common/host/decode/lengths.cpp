#include "common/host/decode/lengths.h"

#include <string>
#include <vector>

#include "common/host/contents.h"
#include "common/host/host_indices.h"

namespace flashport {
namespace {

void check_query_offsets(const Check& check, const HostIndices& offsets, const DecodeProblem& problem) {
  const DecodeParams& p = problem.params;
  if (offsets[0] != 0) check.value_error("cu_seqlens_q must begin with 0, got " + std::to_string(offsets[0]));
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t q_len = offsets[b + 1] - offsets[b];
    if (q_len < 0 || q_len > p.max_q_len) {
      check.value_error("cu_seqlens_q must rise by 0 to max_q_len = " + std::to_string(p.max_q_len) +
                        " a request, got " + std::to_string(q_len) + " for request " + std::to_string(b));
    }
  }
  if (offsets[p.batch] > problem.total_q) {
    check.value_error("cu_seqlens_q must end within the " + std::to_string(problem.total_q) + " rows of q, got " +
                      std::to_string(offsets[p.batch]));
  }
}

// Scales of a whole cache; those of its rows may hold anything where no row is.
void check_cache_scales(const Check& check, const DeviceContext& device, Stream stream, const KeyScales& scales,
                        std::int64_t num_kv_heads, const char* name) {
  if (scales.dtype != DType::kFloat32 || scales.stride_page != 0 || scales.stride_token != 0) return;
  if (scales.dims_per_scale != 0 || scales.stride_head > 1) return;
  check_scales(check, device, stream, static_cast<const float*>(scales.data),
               scales.stride_head == 0 ? 1 : num_kv_heads, name);
}

void check_segments(const Check& check, const DeviceContext& device, Stream stream, const DecodeParams& p,
                    const MixedProblem& mixed) {
  std::vector<std::int64_t> totals(static_cast<std::size_t>(p.batch), 0);
  for (int i = 0; i < mixed.segment_count; ++i) {
    const CacheSegment& segment = mixed.segments[i];
    const std::string name = std::string(check.function()) + ": segments[" + std::to_string(i) + "]";
    const Check its_check(name.c_str());
    check_cache_scales(its_check, device, stream, segment.k_scale, p.num_kv_heads, "k_scale");
    check_cache_scales(its_check, device, stream, segment.v_scale, p.num_kv_heads, "v_scale");
    check_pages(its_check, device, stream, segment.cache, p.batch, mixed.bounds[i]);
    const HostIndices lengths(its_check, device, stream, segment.cache.seqlens, p.batch);
    for (std::int64_t b = 0; b < p.batch; ++b) {
      totals[static_cast<std::size_t>(b)] += segment.cache.seqlens.data == nullptr ? segment.cache.max_len : lengths[b];
    }
  }
  for (std::size_t b = 0; b < totals.size(); ++b) {
    const std::string text = "request " + std::to_string(b) + " has " + counted(totals[b], "key");
    if (mixed.bias.data != nullptr && totals[b] > mixed.mask_keys) {
      check.value_error("mask must have an entry for each key: " + text + ", got " + std::to_string(mixed.mask_keys));
    }
    if (totals[b] > kMaxSequence) {
      check.value_error("segments must have at most " + std::to_string(kMaxSequence) + " keys together, got " + text);
    }
  }
}

}  // namespace

void check_decode_contents(const Check& check, const DeviceContext& device, Stream stream,
                           const DecodeProblem& problem) {
  const DecodeParams& p = problem.params;
  if (p.cu_seqlens_q != nullptr) {
    const HostIndices offsets(check, device, stream, {p.cu_seqlens_q, 0}, p.batch + 1);
    check_query_offsets(check, offsets, problem);
  }
  if (problem.mixed != nullptr && problem.mixed->formats != 0) {
    return check_segments(check, device, stream, p, *problem.mixed);
  }
  if (problem.mixed != nullptr) {
    check_cache_scales(check, device, stream, problem.mixed->segments[0].k_scale, p.num_kv_heads, "k_scale");
    check_cache_scales(check, device, stream, problem.mixed->segments[0].v_scale, p.num_kv_heads, "v_scale");
  }
  const std::int64_t scales = p.scale_stride == 0 ? 1 : p.num_kv_heads;
  check_scales(check, device, stream, p.k_scale, scales, "k_scale");
  check_scales(check, device, stream, p.v_scale, scales, "v_scale");
  check_pages(check, device, stream, p.cache, p.batch, problem.bounds);
}

}  // namespace flashport
