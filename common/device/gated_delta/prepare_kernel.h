// First kernel of the chunked gated delta rule: it computes what a chunk needs without the state. Chunks do not wait
// for each other.
//
// A chunk of c <= 64 tokens of one query and key head has q, k [c, K], and for each value head that reads them log
// gates g [c] and rates beta [c]. With G_i = g_0 + .. + g_i, D_ij = exp(G_i - G_j), and the factors rq and rk [c] by
// which l2norm multiplies queries and keys (rq includes the scale),
//   A = strictly lower part of beta_i rk_i rk_j (k k^T)_ij D_ij [c, c]
//   (I + A)^-1 [c, c];  P = lower part of rq_i rk_j (q k^T)_ij D_ij [c, c]
// are stored in the workspace, rounded to the math type, and the rows' factors in fp32. Queries and keys stay as they
// are: the norms are factors of rows, so nothing is rounded for them.
//
// Stages: the loads of q and k, with the sums of the gates while they are in flight; k k^T and q k^T, once for all
// value heads; then for each value head A and P, and the inverse.
#pragma once

#include "common/device/core/scalar_access.h"
#include "common/device/gated_delta/gate.h"
#include "common/device/gated_delta/sequence.h"
#include "common/device/gated_delta/two_float.h"
#include FLASHPORT_DELTA_TILES_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

// A gate below this leaves less of a state than the smallest float. It is finite, so that differences are numbers.
inline constexpr float kLeastLogGate = -120.0f;
inline constexpr int kSubSumGates = 8;  // gates that one lane adds up
inline constexpr int kGateHeads = 4;    // value heads whose gates are added up at a time

// The gates of one value head's tokens.
struct ChunkGates {
  TwoFloat sums[kChunkTokens];  // G / ln 2
  float beta[kChunkTokens];
};

template <GatedDeltaChunkConfig kCfg>
struct PrepareShared {
  PrepareMemory<kCfg> tiles;
  ChunkGates gates[kGateHeads];
  TwoFloat sub_sums[kGateHeads][kChunkTokens];                 // running sums within each kSubSumGates gates
  float key_factor[kChunkTokens], query_factor[kChunkTokens];  // rk, rq
};

FLASHPORT_DEVICE float log_gate(const GatedDeltaChunkParams& p, float g, int v_head) {
  if (p.a_log == nullptr) return g;
  const float bias = p.dt_bias == nullptr ? 0.0f : load_as_float(p.dt_bias, p.dt_bias_dtype, v_head);
  const float a_log = load_as_float(p.a_log, p.a_log_dtype, v_head);
  return 0.0f - exp_full(a_log) * softplus_full(g + bias, 1.0f, 20.0f);
}

FLASHPORT_DEVICE float learning_rate(const GatedDeltaChunkParams& p, float beta) {
  return p.beta_sigmoid ? p.beta_factor * sigmoid_full(beta) : beta;
}

FLASHPORT_DEVICE int value_head(const GatedDeltaChunkParams& p, int head, int in_group) {
  return p.heads_modulo ? in_group * p.num_heads + head : head * p.group_size + in_group;
}

// Fills the gates of value heads first .. first + kGateHeads - 1 of the group. Tokens that the chunk does not have get
// the last G and a beta of 0.
template <GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void add_up_gates(const GatedDeltaChunkParams& p, const SequenceTokens& chunk, int head, int first,
                                   const Block& block, PrepareShared<kCfg>& shared) {
  const int heads = minimum(kGateHeads, p.group_size - first);
  for (int i = block.thread(); i < heads * kChunkTokens; i += block.threads()) {
    const int token = i % kChunkTokens, v_head = value_head(p, head, first + i / kChunkTokens);
    TwoFloat gate = {};
    float beta = 0.0f;
    if (token < chunk.count) {
      const float g = load_as_float(p.g.data, p.g.dtype, token_offset(p.g, chunk, token, v_head));
      beta = load_as_float(p.beta.data, p.beta.dtype, token_offset(p.beta, chunk, token, v_head));
      const float log = log_gate(p, g, v_head);
      gate = to_base_2(log < kLeastLogGate ? kLeastLogGate : log);  // NaN stays NaN
      beta = learning_rate(p, beta);
    }
    shared.gates[i / kChunkTokens].sums[token] = gate;
    shared.gates[i / kChunkTokens].beta[token] = beta;
  }
  block.sync();
  constexpr int kSubSums = kChunkTokens / kSubSumGates;
  for (int i = block.thread(); i < heads * kSubSums; i += block.threads()) {
    TwoFloat sum = {};
    for (int token = i % kSubSums * kSubSumGates; token < (i % kSubSums + 1) * kSubSumGates; ++token) {
      sum = sum + shared.gates[i / kSubSums].sums[token];
      shared.sub_sums[i / kSubSums][token] = sum;
    }
  }
  block.sync();
  for (int i = block.thread(); i < heads * kChunkTokens; i += block.threads()) {
    const int token = i % kChunkTokens;
    const TwoFloat* sub_sums = shared.sub_sums[i / kChunkTokens];
    const int first_of_sub_sum = token / kSubSumGates * kSubSumGates;
    TwoFloat before = {};
    for (int last = kSubSumGates - 1; last < first_of_sub_sum; last += kSubSumGates) before = before + sub_sums[last];
    shared.gates[i / kChunkTokens].sums[token] = before + sub_sums[token];
  }
  block.sync();
}

template <GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void store_factors(const SequenceTokens& chunk, const Block& block, const ChunkGates& gates,
                                    const PrepareShared<kCfg>& shared, ChunkFactors& factors) {
  const TwoFloat all = gates.sums[kChunkTokens - 1];
  for (int i = block.thread(); i < kChunkTokens; i += block.threads()) {
    const bool live = i < chunk.count;
    const float decay = exp2_approx(gates.sums[i]), key = shared.key_factor[i];
    factors.learn[i] = gates.beta[i];
    factors.recall[i] = live ? gates.beta[i] * decay * key : 0.0f;
    factors.query[i] = live ? decay * shared.query_factor[i] : 0.0f;
    factors.write[i] = live ? exp2_approx(all - gates.sums[i]) * key : 0.0f;
  }
  if (block.thread() == 0) factors.keep = exp2_approx(all);
}

template <GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void prepare_chunk(const GatedDeltaChunkParams& p, const Block& block, SequenceTokens chunk,
                                    std::int64_t chunk_index, int head, PrepareShared<kCfg>& shared) {
  using Tiles = PrepareTiles<kCfg>;
  Tiles tiles(p, block, shared.tiles, chunk.count);
  tiles.begin_load(p.q, token_offset(p.q, chunk, 0, head), p.k, token_offset(p.k, chunk, 0, head));
  add_up_gates(p, chunk, head, 0, block, shared);
  tiles.await_load();
  typename Tiles::Gram keys, queries;
  tiles.multiply(keys, queries, shared.key_factor, shared.query_factor);  // k k^T, q k^T, and the sums of squares
  block.sync();
  for (int i = block.thread(); i < kChunkTokens; i += block.threads()) {
    shared.key_factor[i] = p.l2norm ? 1.0f / sqrt_full(shared.key_factor[i] + 1e-6f) : 1.0f;
    shared.query_factor[i] = p.l2norm ? p.scale / sqrt_full(shared.query_factor[i] + 1e-6f) : p.scale;
  }
  block.sync();
  tiles.scale(keys, shared.key_factor, shared.key_factor);
  tiles.scale(queries, shared.query_factor, shared.key_factor);
  for (int in_group = 0; in_group < p.group_size; ++in_group) {
    if (in_group > 0 && in_group % kGateHeads == 0) add_up_gates(p, chunk, head, in_group, block, shared);
    const ChunkGates& gates = shared.gates[in_group % kGateHeads];
    const std::int64_t index = chunk_index * p.num_v_heads + value_head(p, head, in_group);
    store_factors(chunk, block, gates, shared, p.workspace.factors[index]);
    // Elements above the diagonal are set to 0: a multiplication by 0 would make NaN of an infinite decay.
    struct Token {
      TwoFloat sum;
      float beta;
    };
    tiles.fill_lower(
        keys, queries, [&](int token) { return Token{gates.sums[token], gates.beta[token]}; },
        [&](int row, int column, const Token& to, const Token& from, float kk, float qk, float& a) {
          a = 0.0f;
          if (row >= chunk.count || column > row) return 0.0f;
          if (column == row) return qk;
          const float decay = exp2_approx(difference(to.sum, from.sum));
          a = to.beta * decay * kk;
          return decay * qk;
        });
    block.sync();
    tiles.invert();
    block.sync();
    tiles.store(p.workspace, index);
    block.sync();
  }
}

template <GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void gated_delta_prepare(const GatedDeltaChunkParams& p, const Block& block,
                                          PrepareShared<kCfg>& shared) {
  const std::int64_t index = block.index() / p.num_heads;
  const SequenceTokens chunk = chunk_of_index(p, index);
  if (chunk.count > 0) prepare_chunk(p, block, chunk, index, static_cast<int>(block.index() % p.num_heads), shared);
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
