// Whether two strided views share memory, exactly: views that interleave in one buffer without a byte in common do not.
#pragma once

#include <cstdint>

#include <flashport/types.h>

namespace flashport {

// Addresses of the bytes that the elements of a view lie between; of a view without elements none.
struct ByteRange {
  std::uintptr_t begin = 0, end = 0;

  [[nodiscard]] bool meets(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};
[[nodiscard]] ByteRange byte_range(const TensorView& view);

// kUndecided: the search took `most_steps` steps and was not at its end.
enum class Overlap { kNone, kShared, kUndecided };

// Some 2 ms. Slices of one array take none.
inline constexpr std::int64_t kMostOverlapSteps = 1 << 16;

// For views whose byte ranges meet; where they do not, ByteRange::meets says so in a nanosecond.
[[nodiscard]] Overlap find_overlap(const TensorView& a, const TensorView& b,
                                   std::int64_t most_steps = kMostOverlapSteps);

}  // namespace flashport
