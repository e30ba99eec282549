// What is subtracted from scores before exp2: P = exp2(S - r). It need not be the maximum of a row, since any r near it
// gives the same quotient o / l. So a row's reference is
//   an integer: states and probabilities move from one reference to another by a power of two, which rounds nothing,
//     and waves that do not yet know each other's scores may each have a reference of their own;
//   lazy: it stays while scores exceed it by kHeadroom at most, so that o is rescaled in the first leaf of a chunk and
//     rarely after that.
// It follows from the row's own scores alone, so that the rows of a tile do not change each other's bits.
#pragma once

#include "common/device/core/types.h"
#include "hip/arch/words.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Probabilities are at most 2^8, far below the end of fp16.
inline constexpr float kHeadroom = 8.0f;

FLASHPORT_DEVICE float raised_reference(float reference, float row_max) {
  return row_max > reference + kHeadroom ? __builtin_ceilf(row_max) : reference;
}
// No NaN where all scores are -inf.
FLASHPORT_DEVICE float finite(float reference) { return reference == -kInfinity ? 0.0f : reference; }

// The exponent of the power of two that takes values from `reference` to `to`, which is not less. At -255 no float is
// left of a probability.
FLASHPORT_DEVICE int rescale_exponent(float reference, float to) {
  return static_cast<int>(maximum(reference - finite(to), -255.0f));
}
FLASHPORT_DEVICE float power_of_two(int exponent) { return __builtin_ldexpf(1.0f, exponent); }

// Two probabilities in a word of the math type, times a power of two of an exponent from -255 to 0.
template <MathType kMath>
class ProbabilityScale {
 public:
  ProbabilityScale() = default;
  FLASHPORT_DEVICE explicit ProbabilityScale(int exponent) {
    if constexpr (kMath == MathType::kBf16) {
      factor_ = static_cast<unsigned>(-exponent) * 0x800080u;
    } else {
      const Half factor = to_half(power_of_two(exponent));
      factor_ = as_word(Half2{factor, factor});
    }
  }
  // bf16: the exponents are lowered, as there is no such product. A probability that gets too small becomes 0, or less
  // than 2^-126; a NaN becomes a number, and is in the row's l.
  FLASHPORT_DEVICE unsigned operator()(unsigned two) const {
    if constexpr (kMath == MathType::kBf16) {
      using UShort2 = unsigned short __attribute__((ext_vector_type(2)));
      return __builtin_bit_cast(unsigned, __builtin_elementwise_sub_sat(__builtin_bit_cast(UShort2, two),
                                                                        __builtin_bit_cast(UShort2, factor_)));
    } else {
      return as_word(as_half2(two) * as_half2(factor_));
    }
  }

 private:
  unsigned factor_;
};

// Moves the references of a state up to m.
template <class Tiles, class State>
FLASHPORT_DEVICE void raise_references(State& state, const typename Tiles::Rows& m) {
  bool raised = false;
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) raised |= m[slot] != state.m[slot];
  if (__ballot(raised) == 0) return;
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
    const float factor = power_of_two(rescale_exponent(state.m[slot], m[slot]));
    state.m[slot] = m[slot];
    state.l[slot] *= factor;
    Tiles::scale(state.o, slot, factor);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
