#include "common/host/gated_delta/checks.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "common/host/gated_delta/kernel_choice.h"

namespace flashport {
namespace {

void check_head_dim(const Check& check, const char* name, std::int64_t dim) {
  if (const std::string problem = head_dim_problem(name, dim); !problem.empty()) check.not_supported(problem);
}

std::string at_text(const char* name, std::int64_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; }

}  // namespace

void check_heads(const Check& check, const TensorView& q, const TensorView& v) {
  const std::int64_t heads = q.shape[2], v_heads = v.shape[2];
  if (heads < 1 || v_heads < 1 || v_heads % heads != 0) {
    check.value_error("num_v_heads must be a multiple of num_heads, got v of shape " + shape_text(v) +
                      " and q of shape " + shape_text(q));
  }
  check_head_dim(check, "head_dim_k", q.shape[3]);
  check_head_dim(check, "head_dim_v", v.shape[3]);
  if (v.shape[0] > kMostDeltaExtent || v.shape[1] > kMostDeltaExtent || v_heads > kMostDeltaExtent) {
    check.value_error("v must have extents of at most " + std::to_string(kMostDeltaExtent) + ", got " + shape_text(v));
  }
}

std::int64_t sequence_count(const Check& check, const TensorView& q, const std::optional<TensorView>& cu_seqlens) {
  if (!cu_seqlens) return q.shape[0];
  if (q.shape[0] != 1) {
    check.value_error("q must have batch 1 with cu_seqlens, got " + shape_text(q) + "; join the rows along the tokens");
  }
  if (cu_seqlens->shape[0] < 1 || cu_seqlens->shape[0] > kMostDeltaExtent) {
    check.value_error("cu_seqlens must have 1 to " + std::to_string(kMostDeltaExtent) +
                      " elements (sequences + 1), got " + shape_text(*cu_seqlens));
  }
  return cu_seqlens->shape[0] - 1;
}

void check_elements(const Check& check, const TensorView& view, const char* name, const char* product,
                    std::int64_t count) {
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] < 0) check.value_error(std::string(name) + " has a negative extent: " + shape_text(view));
  }
  if (view.numel() == count) return;
  check.value_error(std::string(name) + " must have " + product + " = " + std::to_string(count) + " elements, got " +
                    shape_text(view));
}

StridedRows token_rows(const TensorView& view) {
  return {view.data, view.dtype, view.strides[0], view.strides[1], view.strides[2], 1};
}

std::int32_t extent_of(const TensorView& view, int axis) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(view.shape[axis], std::numeric_limits<std::int32_t>::max()));
}

void check_slots(const Check& check, const HostIndices& indices, std::int64_t count, const char* name, const char* pool,
                 std::int64_t slots, bool written) {
  std::vector<std::pair<std::int64_t, std::int64_t>> taken;  // slot, sequence
  for (std::int64_t n = 0; n < count; ++n) {
    if (indices[n] >= slots) {
      check.value_error(at_text(name, n) + " = " + std::to_string(indices[n]) + " must be below " +
                        std::to_string(slots) + " (the slots of " + pool + "); an index below 0 takes no slot");
    }
    if (written && indices[n] >= 0) taken.emplace_back(indices[n], n);
  }
  std::sort(taken.begin(), taken.end());
  const auto same = std::adjacent_find(taken.begin(), taken.end(),
                                       [](const auto& one, const auto& next) { return one.first == next.first; });
  if (same == taken.end()) return;
  check.value_error(at_text(name, same->second) + " and " + at_text(name, (same + 1)->second) +
                    " must not be the same slot of " + pool + ", got " + std::to_string(same->first) +
                    " for both; give each sequence its own, or -1");
}

std::vector<std::int64_t> sequence_lengths(const Check& check, const DeviceContext& device, Stream stream,
                                           std::int64_t batch, std::int64_t tokens, const IndexArray& cu_seqlens) {
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(batch), tokens);
  if (cu_seqlens.data == nullptr) return lengths;
  const HostIndices offsets(check, device, stream, cu_seqlens, batch + 1);
  if (offsets[0] != 0) check.value_error("cu_seqlens must begin with 0, got " + std::to_string(offsets[0]));
  for (std::int64_t n = 0; n < batch; ++n) {
    if (offsets[n + 1] < offsets[n] || offsets[n + 1] > tokens) {
      check.value_error("cu_seqlens must rise within the " + std::to_string(tokens) + " tokens of q, got " +
                        std::to_string(offsets[n]) + " and " + std::to_string(offsets[n + 1]) + " for sequence " +
                        std::to_string(n));
    }
    lengths[static_cast<std::size_t>(n)] = offsets[n + 1] - offsets[n];
  }
  return lengths;
}

}  // namespace flashport
