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
// Products may be on their way while others are worked on: settle<n>(x) waits for x, behind which n were begun. A
// target may part the work between waves with the state and waves with the outputs, which then all run this text: what
// is not theirs does nothing.
//
// A block owns a slice of V columns of one head and all of K: slices do not meet, and bits depend on nothing but the
// sequence. The last chunk may be short; rows past it are zeros, or not there at all.
#pragma once

#include "common/device/gated_delta/sequence.h"
#include FLASHPORT_DELTA_TILES_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

// Chunks of all sequences before `seq` in its row of chunk_states.
FLASHPORT_DEVICE std::int64_t chunks_before(const GatedDeltaChunkParams& p, const Block& block, std::int64_t seq) {
  if (p.cu_seqlens.data == nullptr) return 0;
  std::int64_t mine = 0, all = 0;
  for (std::int64_t i = block.lane(); i < seq; i += kWaveSize) mine += chunks_of(sequence_tokens(p, i).count);
  block.wave_exclusive_scan(mine, all);
  return all;
}

template <class Tiles>
FLASHPORT_DEVICE void chain_chunks(const GatedDeltaChunkParams& p, const Block& block, Tiles& tiles,
                                   const Chain& chain) {
  const std::int64_t head_states = static_cast<std::int64_t>(chain.v_head) * p.head_dim_k * p.head_dim_v;
  const std::int64_t slot = block.uniform(state_slot(p.state, chain.seq));
  const bool stores_chunks = p.chunk_states.data != nullptr;
  const std::int64_t first_chunk = stores_chunks ? block.uniform(chunks_before(p, block, chain.seq)) : 0;

  tiles.begin(chain);
  typename Tiles::State state;
  if (slot >= 0) {
    tiles.load_state(state, p.state.data, p.state.dtype, slot * p.state.slot_stride + head_states);
  } else {
    tiles.zero(state);
  }
  for (int chunk = 0; chunk < chain.chunks; ++chunk) {
    const ChunkPlace place = place_of(p, chain, chunk);
    if (stores_chunks && first_chunk + chunk < p.chunk_states_count) {
      const std::int64_t at = chain.tokens.row * p.chunk_states.slot_stride +
                              (first_chunk + chunk) * p.chunk_states.step_stride + head_states;
      tiles.store_state(state, p.chunk_states.data, p.chunk_states.dtype, at);
    }
    const auto& entering = tiles.to_operand(state);
    tiles.fetch(place);
    const ChunkFactors& factors = tiles.factors();
    typename Tiles::Rows values, fresh;
    typename Tiles::Out out;
    tiles.multiply(fresh, tiles.keys(), entering);
    tiles.load_rows(values, place.v);
    tiles.for_each(values, [&](int row, auto& value) { value = factors.learn[row] * value; });
    tiles.multiply(out, tiles.queries(), entering);
    tiles.template settle<1>(fresh);
    tiles.for_each(values, fresh, [&](int row, auto& value, auto& recalled) {
      value = Tiles::multiply_add(0.0f - factors.recall[row], recalled, value);
    });
    tiles.multiply_lower(fresh, tiles.transform(), tiles.to_operand(values));
    tiles.scale(state, factors.keep);
    tiles.template settle<1>(out);
    tiles.for_each(out, [&](int row, auto& x) { x = factors.query[row] * x; });
    tiles.template settle<0>(fresh);
    const auto& learned = tiles.to_operand(fresh);
    tiles.for_each(fresh, values, [&](int row, auto& x, auto& written) { written = factors.write[row] * x; });
    tiles.add_product_transposed(state, tiles.keys(), tiles.to_operand(values));
    tiles.add_product_lower(out, tiles.scores(), learned);
    tiles.template settle<1>(state);
    tiles.template settle<0>(out);
    tiles.store_rows(out, p.out, token_offset(p.out, place.tokens, 0, chain.v_head));
  }
  tiles.finish();
  if (slot >= 0 && p.update_state && chain.chunks > 0) {
    tiles.store_state(state, p.state.data, p.state.dtype, slot * p.state.slot_stride + head_states);
  }
  if (p.final_states.data != nullptr) {
    const std::int64_t at = chain.seq * p.final_states.slot_stride + head_states;
    tiles.store_state(state, p.final_states.data, p.final_states.dtype, at);
  }
}

template <class Tiles, GatedDeltaChunkConfig kCfg>
FLASHPORT_DEVICE void gated_delta_chunk(const GatedDeltaChunkParams& p, const Block& block, ChainMemory<kCfg>& memory) {
  Tiles tiles(p, block, memory);
  for_each_chain(p, block, kCfg.columns, [&](const Chain& chain) { chain_chunks(p, block, tiles, chain); });
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
