// The params of the two kernels of the chunked gated delta rule: plain structs with strides that count elements, as in
// params.h.
#pragma once

#include "common/device/gated_delta/config.h"
#include "common/device/gated_delta/params.h"

namespace flashport {

inline constexpr int kChunkTokens = 64;  // counted from a sequence's first token; its last chunk may be shorter

// Per-token factors of one chunk and value head, all 0 for tokens that the chunk does not have. G is the sum of the log
// gates up to and with a token; rq and rk are the factors that normalise its query and key.
struct ChunkFactors {
  float learn[kChunkTokens];   // beta
  float recall[kChunkTokens];  // beta e^G rk
  float query[kChunkTokens];   // e^G rq scale
  float write[kChunkTokens];   // e^(G of the last token - G) rk
  float keep, padding[3];      // e^(G of the last token)
};

// What the prepare kernel leaves for the chain, for each chunk index (sequence.h) and value head: two matrices [64, 64]
// of the math type, of which the sub-blocks of 16 x 16 above the diagonal are neither written nor read, and the
// factors.
struct ChunkWorkspace {
  void* inverses;  // (I + A)^-1
  void* scores;    // P
  ChunkFactors* factors;
  // Where the chain runs concurrently with the prepare kernel: a word for each chunk and value head, which is not 0
  // once the chunk is complete. Null: the chain runs after the prepare kernel.
  unsigned* signals;
  std::int64_t chunks;  // chunk indices that the workspace has room for
};

struct GatedDeltaChunkParams {
  std::int32_t batch, tokens;  // sequences; tokens of each, or of all with cu_seqlens
  std::int32_t num_heads, num_v_heads, group_size;
  std::int32_t head_dim_k, head_dim_v;
  std::int32_t heads_modulo;  // the head of value head hv is hv % num_heads, else hv / group_size
  std::int32_t key_major;     // states are [K, V], else [V, K]
  std::int32_t l2norm, beta_sigmoid, update_state;
  StridedRows q, k, v, g, beta, out;
  const void* a_log;    // null: g is the logarithm of the gate itself
  const void* dt_bias;  // null: none
  DType a_log_dtype, dt_bias_dtype;
  IndexArray cu_seqlens;           // null data: every sequence has `tokens` tokens
  StateSlots state, final_states;  // initial states, and with update_state the last ones; a copy of the last ones
  StateSlots chunk_states;         // the state that enters each chunk: a slot for each row of the batch, a step a chunk
  std::int32_t chunk_states_count;  // chunks of a row that it has room for
  float scale, beta_factor;
  ChunkWorkspace workspace;
};

}  // namespace flashport
