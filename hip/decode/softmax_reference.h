// What is subtracted from scores before exp2: P = exp2(S - r). A wave takes a row's maximum over the keys of the chunk
// that it knows: those of the state, and its own of this leaf. So the largest probability is 1 and rounds to nothing.
//
// Waves that split the keys have different references then, and each takes the P of all of them, in one accumulator:
// for one wave's P after the other, the state moves to a reference that differs from that P's by an integer. It moves
// up to a larger reference, and down by less than 1 before a smaller one; then P is scaled by a power of two, which
// rounds nothing (in fp16: nothing that is not subnormal). Mostly nothing moves, and all factors are 1.
//
// A row's references follow from its own scores alone, so that the rows of a tile do not change each other's bits.
#pragma once

#include "common/device/core/types.h"
#include "hip/arch/words.h"

namespace flashport::FLASHPORT_TARGET::decode {

// No NaN where all scores are -inf.
FLASHPORT_DEVICE float finite(float reference) { return reference == -kInfinity ? 0.0f : reference; }

// From the state's reference to one that is `exponent` (0 to 255) above `reference`, an integer.
struct ReferenceMove {
  float to;
  int exponent;

  FLASHPORT_DEVICE ReferenceMove(float state, float reference) {
    const float above = state - reference;
    if (above < 255.0f) {
      const float whole = maximum(__builtin_floorf(above), 0.0f);
      to = reference + whole;
      exponent = static_cast<int>(whole);
    } else {  // nothing is left of such probabilities, or both are -inf
      to = state;
      exponent = 255;
    }
  }
};

FLASHPORT_DEVICE float power_of_two(int exponent) { return __builtin_ldexpf(1.0f, exponent); }

// Two probabilities in a word of the math type, divided by a power of two.
template <MathType kMath>
class ProbabilityScale {
 public:
  FLASHPORT_DEVICE explicit ProbabilityScale(int exponent) {
    if constexpr (kMath == MathType::kBf16) {
      factor_ = static_cast<unsigned>(exponent) * 0x800080u;
    } else {
      const Half factor = to_half(power_of_two(-exponent));
      factor_ = as_word(Half2{factor, factor});
    }
  }
  // bf16 has no products: the exponents are lowered. What gets too small becomes 0, or less than 2^-126; a NaN becomes
  // a number, but the row's l has it. A maximum and a difference, because not every emulator knows saturation.
  FLASHPORT_DEVICE unsigned operator()(unsigned two) const {
    if constexpr (kMath == MathType::kBf16) {
      using UShort2 = unsigned short __attribute__((ext_vector_type(2)));
      const auto factor = __builtin_bit_cast(UShort2, factor_);
      UShort2 larger = __builtin_elementwise_max(__builtin_bit_cast(UShort2, two), factor);
      asm("" : "+v"(larger));
      return __builtin_bit_cast(unsigned, static_cast<UShort2>(larger - factor));
    } else {
      return as_word(as_half2(two) * as_half2(factor_));
    }
  }

 private:
  unsigned factor_;
};

// Moves a state to other references.
template <class Tiles, class State>
FLASHPORT_DEVICE void move_references(State& state, const typename Tiles::Rows& to) {
  bool moves = false;
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) moves |= to[slot] != state.m[slot];
  if (__ballot(moves) == 0) return;
#pragma unroll
  for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
    const float factor = exp2_approx(state.m[slot] - finite(to[slot]));
    state.m[slot] = to[slot];
    state.l[slot] *= factor;
    Tiles::scale(state.o, slot, factor);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
