// Checks that the calls of the gated delta rule have in common: heads and dims, pools of states, and the contents of
// indices.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "common/device/gated_delta/params.h"
#include "common/host/arguments.h"
#include "common/host/check.h"
#include "common/host/devices.h"
#include "common/host/gated_delta/kernel_choice.h"
#include "common/host/host_indices.h"

namespace flashport {

// The most sequences, tokens or heads: 32 bits count the columns of all heads of a token.
inline constexpr std::int64_t kMostDeltaExtent = std::numeric_limits<std::int32_t>::max() / kMostDeltaHeadDim;

// Head dims that kernels have, heads of v a multiple of those of q, and extents that 32 bits count. All ranks are 4.
void check_heads(const Check& check, const TensorView& q, const TensorView& v);

// The number of sequences of a call: rows of q, or with cu_seqlens those that it delimits.
[[nodiscard]] std::int64_t sequence_count(const Check& check, const TensorView& q,
                                          const std::optional<TensorView>& cu_seqlens);

// `count` elements in any shape.
void check_elements(const Check& check, const TensorView& view, const char* name, const char* product,
                    std::int64_t count);

// (batch, tokens, heads, dim)
[[nodiscard]] StridedRows token_rows(const TensorView& view);

// The extent of an axis as 32 bits; no call gets so far with more.
[[nodiscard]] std::int32_t extent_of(const TensorView& view, int axis);

// Slots must be below `slots`, and no two slots that are written may be the same.
void check_slots(const Check& check, const HostIndices& indices, std::int64_t count, const char* name, const char* pool,
                 std::int64_t slots, bool written);

// Tokens of each sequence.
[[nodiscard]] std::vector<std::int64_t> sequence_lengths(const Check& check, const DeviceContext& device, Stream stream,
                                                         std::int64_t batch, std::int64_t tokens,
                                                         const IndexArray& cu_seqlens);

}  // namespace flashport
