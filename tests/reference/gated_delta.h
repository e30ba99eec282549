// The gated delta rule in fp64, written from the specification and sharing no code with the library; and the
// plain implementation, the same recurrence in fp32 with sums in index order and results rounded as they are stored.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tests/reference/oracle.h"

namespace reference {

struct GatedDeltaInputs {
  Array q, k, v;                              // (B, T, H, K), (B, T, H, K), (B, T, HV, V)
  std::optional<Array> a, a_log, dt_bias;     // a (B, T, HV, 1 or K), (HV), dt_bias (HV, 1 or K)
  std::optional<Array> g, gk, gv;             // logarithms: (B, T, HV, 1), (B, T, HV, K), (B, T, HV, V)
  std::optional<Array> b, beta;               // (B, T, HV, 1 or V)
  std::optional<Array> state, state_indices;  // (slots, HV, V, K) or (slots, HV, K, V)
  std::optional<Array> steps, step_indices;   // (slots, steps, ...)
  std::optional<Array> cu_seqlens, parents;   // (N + 1), (N, steps)
  bool key_major = false, l2norm = false, modulo = false, allow_neg_eigval = false;
  double scale = 1, softplus_beta = 1, softplus_threshold = 20;
  std::optional<double> lower_bound;
};

// One sequence. States are [HV][K][V], whatever the layout of the pool.
struct GatedDeltaSequence {
  std::int64_t row = 0, first = 0, count = 0;  // its tokens: row of the batch, first token, how many
  std::vector<double> out;                     // [count][HV][V]
  std::vector<double> state;                   // after the last token, as the pool has it
  std::vector<double> final_state;             // the same, as a copy has it
  std::vector<std::vector<double>> steps;      // [count] after each token
};

[[nodiscard]] std::vector<GatedDeltaSequence> gated_delta(const GatedDeltaInputs& inputs);
// `out`, `state` and `final_state` are rounded to these types.
[[nodiscard]] std::vector<GatedDeltaSequence> gated_delta_plain(const GatedDeltaInputs& inputs, Type out, Type state,
                                                                Type final_state);

}  // namespace reference
