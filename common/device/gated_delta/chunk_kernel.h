// Second kernel of the chunked gated delta rule: the chain over the chunks of a sequence and value head, with the state
// S [K, V] in accumulators from the first chunk to the last.
//
// Per chunk of c <= 64 tokens, with q, k [c, K], v [c, V] as the caller has them, T = (I + A)^-1 and P [c, c], and the
// rows' factors (ChunkFactors) from the prepare kernel:
//   rhs        = learn v - recall (k S) [c, V]
//   new_values = T rhs [c, V]
//   out        = query (q S) + P new_values [c, V]
//   S          = keep S + k^T (write new_values) [K, V]
// The accumulators of one product are, rounded to the math type, the operand of the next; they are summed in fp32.
//
// Several products may be in flight: settle<n>(x) waits for x, where n products were begun after it. A target may
// split the work between waves that have the state and waves that have the outputs; all of them run this text, and a
// verb on what other waves have does nothing.
//
// A block owns a slice of V columns of one head and all of K: slices need nothing of each other, and bits depend on
// nothing but the sequence. The last chunk may be short; rows past it are zeros, or do not exist.
#pragma once

#include "common/device/gated_delta/sequence.h"
#include FLASHPORT_DELTA_TILES_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

// The number of chunks that the sequences before `seq` have, which precede its own in chunk_states.
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
  const std::int64_t earlier_chunks = stores_chunks ? block.uniform(chunks_before(p, block, chain.seq)) : 0;

  tiles.begin(chain);
  typename Tiles::State state;
  if (slot >= 0) {
    tiles.load_state(state, p.state.data, p.state.dtype, slot * p.state.slot_stride + head_states);
  } else {
    tiles.zero(state);
  }
  for (int chunk = 0; chunk < chain.chunks; ++chunk) {
    const ChunkCoord coord = chunk_coord(p, chain, chunk);
    if (stores_chunks && earlier_chunks + chunk < p.chunk_states_count) {
      const std::int64_t at = chain.tokens.row * p.chunk_states.slot_stride +
                              (earlier_chunks + chunk) * p.chunk_states.step_stride + head_states;
      tiles.store_state(state, p.chunk_states.data, p.chunk_states.dtype, at);
    }
    const auto& state_operand = tiles.to_operand(state);
    tiles.fetch(coord);
    const ChunkFactors& factors = tiles.factors();
    typename Tiles::Rows rows, new_values;  // rows: v, then rhs, then write new_values
    typename Tiles::Out out;
    tiles.multiply(new_values, tiles.keys(), state_operand);  // k S, for now
    tiles.load_rows(rows, coord.v);
    tiles.for_each(rows, [&](int row, auto& v) { v = factors.learn[row] * v; });
    tiles.multiply(out, tiles.queries(), state_operand);
    tiles.template settle<1>(new_values);
    tiles.for_each(rows, new_values, [&](int row, auto& rhs, auto& recalled) {
      rhs = Tiles::multiply_add(0.0f - factors.recall[row], recalled, rhs);
    });
    tiles.multiply_lower(new_values, tiles.inverse(), tiles.to_operand(rows));
    tiles.scale(state, factors.keep);
    tiles.template settle<1>(out);
    tiles.for_each(out, [&](int row, auto& x) { x = factors.query[row] * x; });
    tiles.template settle<0>(new_values);
    const auto& new_operand = tiles.to_operand(new_values);
    tiles.for_each(new_values, rows, [&](int row, auto& x, auto& written) { written = factors.write[row] * x; });
    tiles.add_product_transposed(state, tiles.keys(), tiles.to_operand(rows));
    tiles.add_product_lower(out, tiles.scores(), new_operand);
    tiles.template settle<1>(state);
    tiles.template settle<0>(out);
    tiles.store_rows(out, p.out, token_offset(p.out, coord.tokens, 0, chain.v_head));
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
