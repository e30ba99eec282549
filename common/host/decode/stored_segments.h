// Calls of flash_decode_mixed whose segments of blocks and of 16 bits one kernel reads as they are stored
// (SegmentsDecodeParams), in one launch.
#pragma once

#include "common/host/decode/problem.h"

namespace flashport {

// Whether options and formats are those that such kernels take: one query a sequence, to which the place of a key is
// nothing but for a mask, and segments of one format each, without scales. Which formats is the kernel's to say.
[[nodiscard]] bool may_be_read_as_stored(const DecodeProblem& problem);

// Whether memory is as they take it.
[[nodiscard]] bool lies_as_stored_segments(const DecodeProblem& problem);

// Whether kv heads of all segments are a multiple of `count` and lie side by side, so that blocks may copy the rows of
// so many at once.
[[nodiscard]] bool has_heads_side_by_side(const MixedProblem& mixed, int num_kv_heads, int count);

// For plans of calls that will not be made: as if all segments began at an address.
void place_segments(MixedProblem& mixed, std::uintptr_t address);

// The keys of all leaves that a sequence may have: segments begin with leaves of their own, which have fewer keys of 16
// bits. max_len: the most keys of all segments together.
[[nodiscard]] std::int64_t room_in_leaves(const MixedProblem& mixed, std::int64_t max_len);

}  // namespace flashport
