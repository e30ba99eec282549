// The kernels of the gated delta rule that serve a request, or the sentence that says what is missing, for launches and
// for queries before a call. The target's table of kernels is the only place that knows which kernels exist.
#pragma once

#include <cstdint>
#include <string>

#include <flashport/gated_delta.h>

#include "common/host/backend_abi.h"
#include "common/host/check.h"
#include "common/host/devices.h"

namespace flashport {

inline constexpr std::int64_t kMostDeltaHeadDim = 256;
inline constexpr DTypes kDeltaTypes = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
inline constexpr DTypes kStateTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Empty, or why no kernel has such a head dim; `name` begins the sentence.
[[nodiscard]] std::string head_dim_problem(const char* name, std::int64_t dim);

struct GatedDeltaRequest {
  DType q, state;  // for gated_delta_update: fp16 where any of its states are fp16
  std::int64_t head_dim_k, head_dim_v;
  StateLayout layout;
  GateForm gate;
  friend bool operator==(const GatedDeltaRequest&, const GatedDeltaRequest&) = default;
};

template <class Query>
GatedDeltaRequest request_of(const Query& query) {
  return {query.q_dtype, query.state_dtype, query.head_dim_k, query.head_dim_v, query.state_layout, query.gate};
}

// The kernel with the smallest tile that covers the key dimension, for the request's states, layout and gates. Null:
// `reason` says why.
[[nodiscard]] const KernelEntry* choose_gated_delta_update(const TargetView& target, const GatedDeltaRequest& request,
                                                           std::string& reason);

// The prepare kernel, and the chain over the chunks. Both null: `reason` says why.
struct ChunkKernels {
  const KernelEntry* prepare = nullptr;
  const KernelEntry* chain = nullptr;
};
// The kernels with the smallest tiles that cover the key dimension, in the math type that the target has for the
// request's q.
[[nodiscard]] ChunkKernels choose_gated_delta_chunk(const TargetView& target, const GatedDeltaRequest& request,
                                                    std::string& reason);

}  // namespace flashport
