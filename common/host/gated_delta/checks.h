// What the calls of the gated delta rule check alike: heads and dims, devices and memory of all arguments, pools of
// states, and the contents of indices.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/device/gated_delta/params.h"
#include "common/host/check.h"
#include "common/host/devices.h"
#include "common/host/host_indices.h"

namespace flashport {

// An argument of a call, whose rank has been checked; without a view it was not given.
struct DeltaArgument {
  DeltaArgument(const TensorView& argument, const char* its_name, bool is_written = false)
      : view(&argument), name(its_name), written(is_written), bytes(byte_range(argument)) {}
  DeltaArgument(const std::optional<TensorView>& argument, const char* its_name, bool is_written = false)
      : view(argument ? &*argument : nullptr), name(its_name), written(is_written) {
    if (argument) bytes = byte_range(*argument);
  }

  const TensorView* view;
  const char* name;
  bool written;
  ByteRange bytes{};
};

// All are where the first one is.
void check_devices(const Check& check, std::span<const DeltaArgument> arguments);

void check_inputs_readable(const Check& check, std::span<const DeltaArgument> arguments);

// Whatever is written shares memory with no other argument.
void check_outputs_apart(const Check& check, std::span<const DeltaArgument> arguments);

// Head dims that kernels have, heads of v a multiple of those of q, and extents that 32 bits count. All ranks are 4.
void check_heads(const Check& check, const TensorView& q, const TensorView& v);

// Sequences of a call: rows of q, or with cu_seqlens as many as that delimits.
[[nodiscard]] std::int64_t sequence_count(const Check& check, const TensorView& q,
                                          const std::optional<TensorView>& cu_seqlens);

// `count` elements in any shape.
void check_elements(const Check& check, const TensorView& view, const char* name, const char* product,
                    std::int64_t count);

// A pool whose slots may lie apart, and nothing else.
void check_state_pool(const Check& check, const TensorView& pool, const char* name, bool writes);

// (batch, tokens, heads, dim)
[[nodiscard]] StridedRows token_rows(const TensorView& view);

// The extent of an axis, as params count; more than they can count no call reaches.
[[nodiscard]] std::int32_t extent_of(const TensorView& view, int axis);

// Slots below `slots`; of those that are written no two are the same.
void check_slots(const Check& check, const HostIndices& indices, std::int64_t count, const char* name, const char* pool,
                 std::int64_t slots, bool written);

// Tokens of each sequence.
[[nodiscard]] std::vector<std::int64_t> sequence_lengths(const Check& check, const DeviceContext& device, Stream stream,
                                                         std::int64_t batch, std::int64_t tokens,
                                                         const IndexArray& cu_seqlens);

}  // namespace flashport
