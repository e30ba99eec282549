// The gated delta rule with gates in log space, as the chunked call has it: the recurrence in fp64, and the
// plain WY form over chunks of 64 tokens, whose operands are rounded to a type and whose sums are fp32. Shares no code
// with the library.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tests/reference/oracle.h"

namespace reference {

struct GatedDeltaChunkInputs {
  Array q, k, v;                              // (B, T, H, K), (B, T, H, K), (B, T, HV, V)
  Array g, beta;                              // (B, T, HV)
  std::optional<Array> a_log, dt_bias;        // (HV)
  std::optional<Array> state, state_indices;  // (slots, HV, V, K) or (slots, HV, K, V)
  std::optional<Array> cu_seqlens;            // (N + 1)
  bool key_major = false, l2norm = false, modulo = false, beta_sigmoid = false;
  double scale = 1, beta_factor = 1;
};

// One sequence. States are [HV][K][V], whatever the layout of the pool.
struct GatedDeltaChunkSequence {
  std::int64_t row = 0, first = 0, count = 0;  // its tokens: row of the batch, first token, how many
  std::vector<double> out;                     // [count][HV][V]
  std::vector<double> state;                   // after the last token
  std::vector<std::vector<double>> entering;   // [ceil(count / 64)] before each chunk
};

[[nodiscard]] std::vector<GatedDeltaChunkSequence> gated_delta_chunk(const GatedDeltaChunkInputs& inputs);
// `operand` is the type of q; out and entering states are rounded to it.
[[nodiscard]] std::vector<GatedDeltaChunkSequence> gated_delta_chunk_plain(const GatedDeltaChunkInputs& inputs,
                                                                           Type operand);

}  // namespace reference
