// Where the tokens and the chunks of a sequence lie, and which a block works on, for the kernels of the chunked gated
// delta rule.
//
// Chunk i of sequence n has the slot floor(first token / 64) + n + i of the workspace, so that slots follow from shapes
// without a sum over the sequences: a sequence of L tokens has ceil(L / 64) <= floor(end / 64) - floor(begin / 64) + 1
// of them, which fit before the first of the next sequence. Some slots are nobody's.
#pragma once

#include "common/device/core/index_array.h"
#include "common/device/gated_delta/chunk_params.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

// The tokens of one sequence: `count` of them from `first` on, in row `row` of the inputs.
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

// Those of its chunk number `chunk`; none if it has fewer.
FLASHPORT_DEVICE SequenceTokens tokens_of_chunk(SequenceTokens tokens, std::int64_t chunk) {
  const std::int64_t before = chunk * kChunkTokens;
  if (before < 0 || before >= tokens.count) return {0, 0, 0};
  return {tokens.row, tokens.first + before, minimum(tokens.count - static_cast<int>(before), kChunkTokens)};
}

FLASHPORT_DEVICE int chunks_of(int tokens) { return (tokens + kChunkTokens - 1) / kChunkTokens; }

FLASHPORT_DEVICE std::int64_t first_chunk_slot(const GatedDeltaChunkParams& p, std::int64_t seq,
                                               const SequenceTokens& tokens) {
  if (p.cu_seqlens.data == nullptr) return seq * chunks_of(p.tokens);
  return tokens.first / kChunkTokens + seq;
}

// The tokens of the chunk that has a slot; none: the slot is nobody's.
FLASHPORT_DEVICE SequenceTokens chunk_of_slot(const GatedDeltaChunkParams& p, std::int64_t slot) {
  std::int64_t seq = 0;
  if (p.cu_seqlens.data == nullptr) {
    seq = slot / chunks_of(p.tokens);
  } else {
    std::int64_t behind = p.batch;  // the last sequence whose first slot is not past this one
    while (behind - seq > 1) {
      const std::int64_t middle = (seq + behind) / 2;
      if (first_chunk_slot(p, middle, sequence_tokens(p, middle)) <= slot) {
        seq = middle;
      } else {
        behind = middle;
      }
    }
  }
  const SequenceTokens tokens = sequence_tokens(p, seq);
  return tokens_of_chunk(tokens, slot - first_chunk_slot(p, seq, tokens));
}

// The element that a token's row of a head begins with.
FLASHPORT_DEVICE std::int64_t token_offset(const StridedRows& rows, const SequenceTokens& tokens, std::int64_t token,
                                           std::int64_t head) {
  return tokens.row * rows.stride_seq + (tokens.first + token) * rows.stride_token + head * rows.stride_head;
}

// The slot of a sequence's state; -1: none.
FLASHPORT_DEVICE std::int64_t state_slot(const StateSlots& slots, std::int64_t seq) {
  if (slots.data == nullptr) return -1;
  return slots.indices.data == nullptr ? seq : index_at(slots.indices, seq);
}

// The chunks of a sequence, for a value head and a slice of V that begins at `column`.
struct Chain {
  SequenceTokens tokens;
  std::int64_t seq, first_slot;
  int v_head, head, column, chunks;
};

// One chunk of a head in the inputs and in the workspace.
struct ChunkPlace {
  SequenceTokens tokens;
  std::int64_t q, k, v;    // elements that the head's rows begin with
  std::int64_t workspace;  // number of its matrices and factors
};

FLASHPORT_DEVICE ChunkPlace place_of(const GatedDeltaChunkParams& p, const Chain& chain, int chunk) {
  ChunkPlace place{chain.tokens, 0, 0, 0, (chain.first_slot + chunk) * p.num_v_heads + chain.v_head};
  place.tokens.first += chunk * std::int64_t{kChunkTokens};
  place.tokens.count = minimum(chain.tokens.count - chunk * kChunkTokens, kChunkTokens);
  place.q = token_offset(p.q, place.tokens, 0, chain.head);
  place.k = token_offset(p.k, place.tokens, 0, chain.head);
  place.v = token_offset(p.v, place.tokens, 0, chain.v_head);
  return place;
}

// f(chain) for a block's chains. Slices fastest, then value heads, then sequences: neighbours read the same queries and
// keys.
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
    chain.first_slot = first_chunk_slot(p, chain.seq, chain.tokens);
    chain.chunks = chunks_of(chain.tokens.count);
    f(block.uniform(chain));
  }
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
