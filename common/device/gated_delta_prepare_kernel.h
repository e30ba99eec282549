// First kernel of the chunked gated delta rule: what of a chunk does not need the state. Chunks do not wait for each
// other.
//
// For a chunk of c <= 64 tokens of one query and key head, with q, k [c, K], and of each value head that reads it log
// gates g [c] and rates beta [c]; G_i = g_0 + .. + g_i, D_ij = exp(G_i - G_j), rq and rk [c] the factors that l2norm
// puts on queries and keys (the scale is one of rq's):
//   A = strictly lower part of beta_i rk_i rk_j (k k^T)_ij D_ij [c, c]
//   (I + A)^-1 [c, c];  P = lower part of rq_i rk_j (q k^T)_ij D_ij [c, c]
// go to the workspace rounded to the math type, and the rows' factors in fp32. Queries and keys stay as they came: the
// norms are factors of rows, so nothing is rounded for them.
//
// Stages: load q and k; k k^T and q k^T, once for all value heads; then for each of them: gates, A and P, inverse.
#pragma once

#include "common/device/gated_delta_gate.h"
#include "common/device/gated_delta_sequence.h"
#include "common/device/scalar_access.h"
#include "common/device/triangular.h"
#include "common/device/two_float.h"
#include FLASHPORT_DELTA_TILES_HEADER

namespace flashport::FLASHPORT_TARGET {

// What a gate below this leaves of a state is less than the smallest float; finite, so that differences are numbers.
inline constexpr float kLeastLogGate = -120.0f;
inline constexpr int kGateRun = 8;  // gates that one lane adds up

template <GatedDeltaChunkConfig kCfg>
struct PrepareShared {
  PrepareMemory<kCfg> tiles;
  alignas(64) float a[kChunkTokens * kTrianglePitch];
  alignas(64) float inverse[kChunkTokens * kTrianglePitch];
  TwoFloat runs[kChunkTokens];   // sums within runs of kGateRun gates
  TwoFloat gates[kChunkTokens];  // G
  float beta[kChunkTokens];
  float key_factor[kChunkTokens], query_factor[kChunkTokens];  // rk, rq
};

FLASHPORT_DEVICE float log_gate(const GatedDeltaChunkParams& p, float g, int v_head) {
  if (p.a_log == nullptr) return g;
  const float bias = p.dt_bias == nullptr ? 0.0f : load_as_float(p.dt_bias, p.dt_bias_dtype, v_head);
  return 0.0f - exp_full(p.a_log[v_head]) * softplus_full(g + bias, 1.0f, 20.0f);
}

// Fills gates and beta; tokens that the chunk does not have keep the last G, and their beta is 0.
template <GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void add_up_gates(const GatedDeltaChunkParams& p, const SequenceTokens& chunk, int v_head,
                                   const Block& block, PrepareShared<kCfg>& shared) {
  for (int run = block.thread(); run < kChunkTokens / kGateRun; run += block.threads()) {
    TwoFloat sum = {};
    for (int i = run * kGateRun; i < (run + 1) * kGateRun; ++i) {
      float beta = 0.0f;
      if (i < chunk.count) {
        const float g = load_as_float(p.g.data, p.g.dtype, token_offset(p.g, chunk, i, v_head));
        sum = sum + TwoFloat{maximum(log_gate(p, g, v_head), kLeastLogGate), 0.0f};
        beta = load_as_float(p.beta.data, p.beta.dtype, token_offset(p.beta, chunk, i, v_head));
        if (p.beta_sigmoid) beta = p.beta_factor * sigmoid_full(beta);
      }
      shared.runs[i] = sum;
      shared.beta[i] = beta;
    }
  }
  block.sync();
  for (int i = block.thread(); i < kChunkTokens; i += block.threads()) {
    TwoFloat before = {};
    for (int last = kGateRun - 1; last < i / kGateRun * kGateRun; last += kGateRun) before = before + shared.runs[last];
    shared.gates[i] = before + shared.runs[i];
  }
  block.sync();
}

template <GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void store_factors(const SequenceTokens& chunk, const Block& block, const PrepareShared<kCfg>& shared,
                                    ChunkFactors& factors) {
  const TwoFloat all = shared.gates[kChunkTokens - 1];
  for (int i = block.thread(); i < kChunkTokens; i += block.threads()) {
    const bool live = i < chunk.count;
    const float decay = exp_full(shared.gates[i]), key = shared.key_factor[i];
    factors.learn[i] = shared.beta[i];
    factors.recall[i] = live ? shared.beta[i] * decay * key : 0.0f;
    factors.query[i] = live ? decay * shared.query_factor[i] : 0.0f;
    factors.write[i] = live ? exp_full(all - shared.gates[i]) * key : 0.0f;
  }
  if (block.thread() == 0) factors.keep = exp_full(all);
}

template <GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void gated_delta_prepare(const GatedDeltaChunkParams& p, const Block& block,
                                          PrepareShared<kCfg>& shared) {
  const int head = static_cast<int>(block.index() % p.num_heads);
  const std::int64_t slot = block.index() / p.num_heads;
  const SequenceTokens chunk = chunk_of_slot(p, slot);
  if (chunk.count == 0) return;

  using Tiles = PrepareTiles<kCfg>;
  Tiles tiles(p, block, shared.tiles, chunk.count);
  tiles.load(p.q, token_offset(p.q, chunk, 0, head), p.k, token_offset(p.k, chunk, 0, head));
  tiles.square_sums(shared.query_factor, shared.key_factor);
  typename Tiles::Gram keys, queries;
  tiles.multiply(keys, queries);  // k k^T, q k^T
  block.sync();
  for (int i = block.thread(); i < kChunkTokens; i += block.threads()) {
    shared.key_factor[i] = p.l2norm ? 1.0f / sqrt_full(shared.key_factor[i] + 1e-6f) : 1.0f;
    shared.query_factor[i] = p.l2norm ? p.scale / sqrt_full(shared.query_factor[i] + 1e-6f) : p.scale;
  }
  for (int of_group = 0; of_group < p.group_size; ++of_group) {
    const int v_head = p.heads_modulo ? of_group * p.num_heads + head : head * p.group_size + of_group;
    const std::int64_t place = slot * p.num_v_heads + v_head;
    add_up_gates(p, chunk, v_head, block, shared);
    store_factors(chunk, block, shared, p.workspace.factors[place]);
    // Above the diagonal nothing is multiplied by 0, which infinities would survive.
    tiles.store_lower(
        p.workspace.scores, place, keys, queries,
        [&](int row, int column, float kk, float qk, float& a) {
          a = 0.0f;
          if (row >= chunk.count || column > row) return 0.0f;
          const float key = shared.key_factor[column];
          if (column == row) return shared.query_factor[row] * key * qk;
          const float decay = exp_full(difference(shared.gates[row], shared.gates[column]));
          a = shared.beta[row] * decay * (shared.key_factor[row] * key * kk);
          return decay * (shared.query_factor[row] * key * qk);
        },
        shared.a);
    block.sync();
    invert_unit_lower(block, shared.a, shared.inverse);
    block.sync();
    tiles.store_transform(p.workspace.transforms, place, shared.inverse);
  }
}

}  // namespace flashport::FLASHPORT_TARGET
