// Calls of attention with few queries, which flash_decode's kernels serve faster: they cut keys into parts and read
// them once for all heads of a group. Whether they do follows from a call's shapes and options, never from its batch.
#pragma once

#include <optional>

#include <flashport/attention.h>

#include "common/host/attention/append.h"
#include "common/host/attention/problem.h"
#include "common/host/devices.h"

namespace flashport {

// The call of flash_decode that does what a validated call of attention asks for; none where attention's own kernels
// do. Its q and seqlens are those that the call was given; attend_after() replaces them where there are new keys.
[[nodiscard]] std::optional<DecodeArgs> as_decode(const AttentionArgs& args, const AttentionProblem& problem,
                                                  const DeviceContext& device);

// Whether a kernel of decode that appends may write the call's new keys itself: they are few and lie as rows of the
// cache may, so that copies bring them as they bring those.
[[nodiscard]] bool may_append_in_launch(const AttentionProblem& problem);

// Lets the call attend to new keys, too.
void attend_after(const AppendedCall& appended, DecodeArgs& decode);
[[nodiscard]] TensorView workspace_view(void* data, std::int64_t bytes, Device device);

// What flash_decode would be asked in place of a query about attention. None where attention's own kernels serve it.
[[nodiscard]] std::optional<DecodeQuery> as_decode(const AttentionQuery& query);

}  // namespace flashport
