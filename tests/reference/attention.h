// The oracle of attention: fp64, written from the specification and sharing no code with the library. It reads the same
// memory as the call under test. And the plain implementation: the same sums in fp32 with operands and probabilities
// rounded to the math type, in the simplest order. Its error against the oracle is the yardstick of every tolerance.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "tests/reference/codecs.h"
#include "tests/reference/oracle.h"

namespace reference {

// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
[[nodiscard]] std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                      std::array<std::uint32_t, 2> key);

// Dropout with probability p: whether the weight of a key for a query is kept. `head` counts the heads of all
// sequences.
struct Dropout {
  double p = 0;
  std::int64_t seed = 0, offset = 0;

  [[nodiscard]] double share() const;  // of weights that are dropped: p in steps of 1/256
  [[nodiscard]] bool keeps(std::int64_t head, std::int64_t row, std::int64_t key) const;
};

// Arguments of attention, in the order and with the meaning of the specification.
struct AttentionInputs {
  // (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, DV), or packed without B. k and v of blocks: the last axis counts
  // bytes
  Array q, k, v;
  std::optional<Array> cu_seqlens_q = {}, cu_seqlens_k = {}, seqused_q = {}, seqused_k = {}, leftpad_k = {};
  double softmax_scale = 1;
  bool causal = false;
  std::int64_t window_left = -1, window_right = -1;
  double softcap = 0;
  std::optional<Array> alibi_slopes = {}, sinks = {}, bias = {};
  std::optional<Array> q_scale = {}, k_scale = {}, v_scale = {};  // (B, Hkv): factors of stored numbers
  // Factors too: on the axes of k or v without the last, or with groups of its values in their place.
  std::optional<Array> k_row_scale = {}, v_row_scale = {};
  Dropout dropout = {};
};

// What a call writes for one sequence.
struct AttentionSequence {
  std::int64_t first_row = 0;  // of the sequence on the token axis
  std::int64_t q_len = 0, kv_len = 0;
  std::vector<double> out;  // [q_len][Hq][DV]
  std::vector<double> lse;  // [q_len][Hq], natural log
};

// In batch order.
[[nodiscard]] std::vector<AttentionSequence> attention(const AttentionInputs& inputs);
// Operands and probabilities rounded to `math`, fp32 sums, output rounded to `out`.
[[nodiscard]] std::vector<AttentionSequence> attention_plain(const AttentionInputs& inputs, Type math, Type out);

}  // namespace reference
