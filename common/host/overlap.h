// Whether two strided views share memory, exactly: views that interleave in one buffer without a byte in common do not.
#pragma once

#include <cstdint>

#include <flashport/types.h>

namespace flashport {

// Addresses of the bytes that the elements of a view lie between; of a view without elements none.
struct ByteRange {
  std::uintptr_t begin, end;

  [[nodiscard]] bool meets(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};
[[nodiscard]] inline ByteRange byte_range(const TensorView& view) {
  // Unsigned, so that strides of no real memory wrap around instead of being undefined.
  std::uint64_t low = 0, high = 0;
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] == 0) return {};
    const auto steps = static_cast<std::uint64_t>(view.shape[axis] - 1);
    (view.strides[axis] < 0 ? low : high) += steps * static_cast<std::uint64_t>(view.strides[axis]);
  }
  const auto base = reinterpret_cast<std::uintptr_t>(view.data);
  const auto size = static_cast<std::uint64_t>(element_size(view.dtype));
  return {base + low * size, base + (high + 1) * size};
}

// kUndecided: the search took `most_steps` steps and was not at its end.
enum class Overlap { kNone, kShared, kUndecided };

// Some 2 ms. Slices of one array take none.
inline constexpr std::int64_t kMostOverlapSteps = 1 << 16;

// For views whose byte ranges meet; where they do not, ByteRange::meets says so in a nanosecond.
[[nodiscard]] Overlap find_overlap(const TensorView& a, const TensorView& b,
                                   std::int64_t most_steps = kMostOverlapSteps);

}  // namespace flashport
