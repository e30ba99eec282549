#include "common/host/decode/lengths.h"

#include <string>

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

}  // namespace

void check_decode_contents(const Check& check, const DeviceContext& device, Stream stream,
                           const DecodeProblem& problem) {
  const DecodeParams& p = problem.params;
  if (p.cu_seqlens_q != nullptr) {
    const HostIndices offsets(check, device, stream, {p.cu_seqlens_q, 0}, p.batch + 1);
    check_query_offsets(check, offsets, problem);
  }
  const std::int64_t scales = p.scale_stride == 0 ? 1 : p.num_kv_heads;
  check_scales(check, device, stream, p.k_scale, scales, "k_scale");
  check_scales(check, device, stream, p.v_scale, scales, "v_scale");
  check_pages(check, device, stream, p.cache, p.batch, problem.bounds);
}

}  // namespace flashport
