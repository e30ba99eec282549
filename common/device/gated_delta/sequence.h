// Indices and offsets of the tokens and chunks of a sequence, and the chains that a block computes, for the kernels of
// the chunked gated delta rule.
//
// Chunk i of sequence n has the index floor(first token / 64) + n + i in the workspace, so that indices need no sum
// over the sequences: a sequence of L tokens has ceil(L / 64) <= floor(end / 64) - floor(begin / 64) + 1 chunks, whose
// indices all precede that of the next sequence's first chunk. Some indices belong to no chunk.
#pragma once

#include "common/device/core/index_array.h"
#include "common/device/gated_delta/chunk_params.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

// The tokens of one sequence or chunk: `count` tokens from `first` on, in row `row` of the inputs.
struct SequenceTokens {
  std::int64_t row, first;
  int count;
};

FLASHPORT_DEVICE SequenceTokens sequence_tokens(const GatedDeltaChunkParams& p, std::int64_t seq) {
  if (p.cu_seqlens.data == nullptr) return {seq, 0, p.tokens};
  const std::int64_t most = p.tokens;
  const std::int64_t first = minimum(maximum(index_at(p.cu_seqlens, seq), std::int64_t{0}), most);
  const std::int64_t end = minimum(maximum(index_at(p.cu_seqlens, seq + 1), first), most);
  return {0, first, static_cast<int>(end - first)};
}

// The tokens of a sequence's chunk number `chunk`; none if it has fewer chunks.
FLASHPORT_DEVICE SequenceTokens tokens_of_chunk(SequenceTokens tokens, std::int64_t chunk) {
  const std::int64_t before = chunk * kChunkTokens;
  if (before < 0 || before >= tokens.count) return {0, 0, 0};
  return {tokens.row, tokens.first + before, minimum(tokens.count - static_cast<int>(before), kChunkTokens)};
}

FLASHPORT_DEVICE int chunks_of(int tokens) { return (tokens + kChunkTokens - 1) / kChunkTokens; }

FLASHPORT_DEVICE std::int64_t first_chunk_index(const GatedDeltaChunkParams& p, std::int64_t seq,
                                                const SequenceTokens& tokens) {
  if (p.cu_seqlens.data == nullptr) return seq * chunks_of(p.tokens);
  return tokens.first / kChunkTokens + seq;
}

// The tokens of the chunk that has an index; none if no chunk has it.
FLASHPORT_DEVICE SequenceTokens chunk_of_index(const GatedDeltaChunkParams& p, std::int64_t index) {
  std::int64_t seq = 0;
  if (p.cu_seqlens.data == nullptr) {
    seq = index / chunks_of(p.tokens);
  } else {
    std::int64_t end = p.batch;  // `seq` becomes the last sequence whose first chunk's index is at most `index`
    while (end - seq > 1) {
      const std::int64_t middle = (seq + end) / 2;
      if (first_chunk_index(p, middle, sequence_tokens(p, middle)) <= index) {
        seq = middle;
      } else {
        end = middle;
      }
    }
  }
  const SequenceTokens tokens = sequence_tokens(p, seq);
  return tokens_of_chunk(tokens, index - first_chunk_index(p, seq, tokens));
}

// The offset of a token's row of a head, in elements.
FLASHPORT_DEVICE std::int64_t token_offset(const StridedRows& rows, const SequenceTokens& tokens, std::int64_t token,
                                           std::int64_t head) {
  return tokens.row * rows.stride_seq + (tokens.first + token) * rows.stride_token + head * rows.stride_head;
}

// The slot of a sequence's state; below 0: none.
FLASHPORT_DEVICE std::int64_t state_slot(const StateSlots& slots, std::int64_t seq) {
  if (slots.data == nullptr) return -1;
  return slots.indices.data == nullptr ? seq : index_at(slots.indices, seq);
}

// The chunks of a sequence, for a value head and a slice of V that begins at `column`. first_chunk is the index of the
// first of them.
struct Chain {
  SequenceTokens tokens;
  std::int64_t seq, first_chunk;
  int v_head, head, column, chunks;
};

// The coordinates of one chunk of a value head in the inputs and in the workspace.
struct ChunkCoord {
  SequenceTokens tokens;
  std::int64_t q, k, v;  // offsets of the head's rows, in elements
  std::int64_t index;    // of its matrices, factors and signal in the workspace
};

FLASHPORT_DEVICE ChunkCoord chunk_coord(const GatedDeltaChunkParams& p, const Chain& chain, int chunk) {
  ChunkCoord coord{chain.tokens, 0, 0, 0, (chain.first_chunk + chunk) * p.num_v_heads + chain.v_head};
  coord.tokens.first += chunk * std::int64_t{kChunkTokens};
  coord.tokens.count = minimum(chain.tokens.count - chunk * kChunkTokens, kChunkTokens);
  coord.q = token_offset(p.q, coord.tokens, 0, chain.head);
  coord.k = token_offset(p.k, coord.tokens, 0, chain.head);
  coord.v = token_offset(p.v, coord.tokens, 0, chain.v_head);
  return coord;
}

// f(chain) for a block's chains. Slices are counted fastest, then value heads, then sequences, so that neighbours read
// the same queries and keys.
template <class F>
FLASHPORT_DEVICE void for_each_chain(const GatedDeltaChunkParams& p, const Block& block, int columns, const F& f) {
  const int slices = (p.head_dim_v + columns - 1) / columns;
  const std::int64_t work = static_cast<std::int64_t>(p.batch) * p.num_v_heads * slices;
  for (std::int64_t i = block.index(); i < work; i += block.count()) {
    Chain chain;
    chain.seq = i / slices / p.num_v_heads;
    chain.v_head = static_cast<int>(i / slices % p.num_v_heads);
    chain.head = p.heads_modulo ? chain.v_head % p.num_heads : chain.v_head / p.group_size;
    chain.column = static_cast<int>(i % slices) * columns;
    chain.tokens = sequence_tokens(p, chain.seq);
    chain.first_chunk = first_chunk_index(p, chain.seq, chain.tokens);
    chain.chunks = chunks_of(chain.tokens.count);
    f(block.uniform(chain));
  }
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
