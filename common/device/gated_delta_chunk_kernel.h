// Second kernel of the chunked gated delta rule: the chain over the chunks of a sequence and value head, with the state
// S [K, V] in accumulators all the way.
//
// Per chunk of c <= 64 tokens, with q, k [c, K], v [c, V] as they came, T = (I + A)^-1 and P [c, c], and the rows'
// factors (ChunkFactors) from the prepare kernel:
//   rhs = learn v - recall (k S) [c, V]
//   new = T rhs [c, V]
//   out = query (q S) + P new [c, V]
//   S   = keep S + k^T (write new) [K, V]
// The accumulators of one product are, rounded to the math type, the operand of the next; they are summed in fp32.
//
// A block owns a slice of V columns of one head and all of K: slices do not meet, and bits depend on nothing but the
// sequence. The last chunk may be short; rows past it are zeros, or not there at all.
#pragma once

#include "common/device/gated_delta_sequence.h"
#include FLASHPORT_DELTA_TILES_HEADER

namespace flashport::FLASHPORT_TARGET {

// One chunk of a head in the inputs and in the workspace.
struct ChunkPlace {
  SequenceTokens tokens;
  std::int64_t q, k;       // elements that the head's rows begin with
  std::int64_t workspace;  // number of its matrices and factors
};

// Chunks of all sequences before `seq` in its row of chunk_states.
FLASHPORT_DEVICE std::int64_t chunks_before(const GatedDeltaChunkParams& p, const Block& block, std::int64_t seq) {
  if (p.cu_seqlens.data == nullptr) return 0;
  std::int64_t mine = 0, all = 0;
  for (std::int64_t i = block.lane(); i < seq; i += kWaveSize) mine += chunks_of(sequence_tokens(p, i).count);
  block.wave_exclusive_scan(mine, all);
  return all;
}

template <GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void chain_chunks(const GatedDeltaChunkParams& p, const Block& block, ChainMemory<kCfg>& memory,
                                   std::int64_t seq, int v_head, int column) {
  using Tiles = DeltaTiles<kCfg>;
  constexpr int kAhead = Tiles::kStages - 1;
  const SequenceTokens tokens = sequence_tokens(p, seq);
  const int head = p.heads_modulo ? v_head % p.num_heads : v_head / p.group_size;
  const std::int64_t first_slot = first_chunk_slot(p, seq, tokens);
  const int chunks = chunks_of(tokens.count);
  const auto place_of = [&](int chunk) {
    ChunkPlace place{tokens, 0, 0, (first_slot + chunk) * p.num_v_heads + v_head};
    place.tokens.first += chunk * std::int64_t{kChunkTokens};
    place.tokens.count = minimum(tokens.count - chunk * kChunkTokens, kChunkTokens);
    place.q = token_offset(p.q, place.tokens, 0, head);
    place.k = token_offset(p.k, place.tokens, 0, head);
    return place;
  };
  const std::int64_t head_states = static_cast<std::int64_t>(v_head) * p.head_dim_k * p.head_dim_v;
  const std::int64_t slot = state_slot(p.state, seq);
  const bool stores_chunks = p.chunk_states.data != nullptr;
  const std::int64_t first_chunk = stores_chunks ? chunks_before(p, block, seq) : 0;

  Tiles tiles(p, block, memory, column);
  typename Tiles::State state;
  for (int chunk = 0; chunk < kAhead && chunk < chunks; ++chunk) tiles.fetch(place_of(chunk));
  if (slot >= 0) {
    tiles.load_state(state, p.state.data, p.state.dtype, slot * p.state.slot_stride + head_states);
  } else {
    tiles.zero(state);
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + kAhead < chunks) tiles.fetch(place_of(chunk + kAhead));
    const ChunkPlace place = place_of(chunk);
    const int count = place.tokens.count;
    typename Tiles::Rows values, out, fresh;
    tiles.load_rows(values, p.v, token_offset(p.v, place.tokens, 0, v_head), count);
    tiles.await();
    const ChunkFactors& factors = tiles.factors();
    if (stores_chunks && first_chunk + chunk < p.chunk_states_count) {
      const std::int64_t at =
          tokens.row * p.chunk_states.slot_stride + (first_chunk + chunk) * p.chunk_states.step_stride + head_states;
      tiles.store_state(state, p.chunk_states.data, p.chunk_states.dtype, at);
    }
    {
      const auto& operand = tiles.to_operand(state);
      tiles.zero(out);
      tiles.mma(out, tiles.queries(), operand);
      tiles.zero(fresh);
      tiles.mma(fresh, tiles.keys(), operand);
    }
    tiles.for_each(fresh, values, [&](int row, auto& recalled, auto& value) {
      value = Tiles::multiply_add(0.0f - factors.recall[row], recalled, factors.learn[row] * value);
    });
    tiles.zero(fresh);
    tiles.mma_lower(fresh, tiles.transform(), tiles.to_operand(values));
    tiles.for_each(out, [&](int row, auto& x) { x = factors.query[row] * x; });
    tiles.mma_lower(out, tiles.scores(), tiles.to_operand(fresh));
    tiles.store_rows(out, p.out, token_offset(p.out, place.tokens, 0, v_head), count);
    tiles.scale(state, factors.keep);
    tiles.for_each(fresh, [&](int row, auto& x) { x = factors.write[row] * x; });
    tiles.mma_transposed(state, tiles.keys(), tiles.to_operand(fresh));
    tiles.release();
  }
  if (slot >= 0 && p.update_state && chunks > 0) {
    tiles.store_state(state, p.state.data, p.state.dtype, slot * p.state.slot_stride + head_states);
  }
  if (p.final_states.data != nullptr) {
    const std::int64_t at = seq * p.final_states.slot_stride + head_states;
    tiles.store_state(state, p.final_states.data, p.final_states.dtype, at);
  }
}

// Slices fastest, then value heads, then sequences: neighbours read the same queries and keys.
template <GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void gated_delta_chunk(const GatedDeltaChunkParams& p, const Block& block, ChainMemory<kCfg>& memory) {
  const int slices = (p.head_dim_v + kCfg.columns - 1) / kCfg.columns;
  const std::int64_t work = static_cast<std::int64_t>(p.batch) * p.num_v_heads * slices;
  for (std::int64_t i = block.index(); i < work; i += block.count()) {
    const int column = static_cast<int>(i % slices) * kCfg.columns;
    chain_chunks<kCfg>(p, block, memory, i / slices / p.num_v_heads, static_cast<int>(i / slices % p.num_v_heads),
                       column);
  }
}

}  // namespace flashport::FLASHPORT_TARGET
