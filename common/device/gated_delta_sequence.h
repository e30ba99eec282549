// Where the tokens and the chunks of a sequence lie, for the kernels of the chunked gated delta rule.
//
// Chunk i of sequence n has the slot floor(first token / 64) + n + i of the workspace, so that slots follow from shapes
// without a sum over the sequences: a sequence of L tokens has ceil(L / 64) <= floor(end / 64) - floor(begin / 64) + 1
// of them, which fit before the first of the next sequence. Some slots are nobody's.
#pragma once

#include "common/device/gated_delta_chunk_params.h"
#include "common/device/paged_kv.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

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
  SequenceTokens tokens = sequence_tokens(p, seq);
  const std::int64_t before = (slot - first_chunk_slot(p, seq, tokens)) * kChunkTokens;
  if (before < 0 || before >= tokens.count) return {0, 0, 0};
  tokens.first += before;
  tokens.count = minimum(tokens.count - static_cast<int>(before), kChunkTokens);
  return tokens;
}

// The element that a token's row of a head begins with.
FLASHPORT_DEVICE std::int64_t token_offset(const TokenRows& rows, const SequenceTokens& tokens, std::int64_t token,
                                           std::int64_t head) {
  return tokens.row * rows.stride_seq + (tokens.first + token) * rows.stride_token + head * rows.stride_head;
}

// The slot of a sequence's state; -1: none.
FLASHPORT_DEVICE std::int64_t state_slot(const StateSlots& slots, std::int64_t seq) {
  if (slots.data == nullptr) return -1;
  return slots.indices.data == nullptr ? seq : index_at(slots.indices, seq);
}

}  // namespace flashport::FLASHPORT_TARGET
