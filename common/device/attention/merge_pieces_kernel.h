// Merges the partial results of the sequences whose keys are cut into pieces (pieces.h). With those of piece c of a
// row, o_c [DV] and lse_c, it computes what merge_kernel.h says, pieces in ascending order; a sink is one more part,
// whose o is 0. Rows of other sequences, and rows that no sequence has, are not written.
//
// The rows are numbered over the sequences that are cut, heads fastest. A block takes rows in ascending order, a block
// count apart, and so looks through the sequences once, a wave at a time.
#pragma once

#include "common/device/attention/work.h"
#include "common/device/merge/merge_kernel.h"

namespace flashport::FLASHPORT_TARGET::attention {

// A sequence's row `row` of a head: its partial results, and a sink.
struct PartialRow {
  const float* out;
  const float* lse;
  std::int64_t out_stride, lse_stride;  // from a piece to the next
  int pieces;
  float sink;  // base 2

  FLASHPORT_DEVICE float log2_sum(int c) const { return c < pieces ? lse[c * lse_stride] : sink; }
  FLASHPORT_DEVICE void load(float (&x)[kVectorFloats], int c, int column, int count) const {
    if (c < pieces) load_vector(x, out + c * out_stride + column, 1, count);
  }
};

template <int kThreads>
FLASHPORT_DEVICE void merge_row_of(const AttentionParams& p, const Block& block, merge::MergeShared<kThreads>& shared,
                                   int seq, int row, int head) {
  const Tokens queries = query_tokens(p, seq), keys = key_tokens(p, seq);
  const int pieces = sequence_pieces(p, p.pieces.rule, queries.count, keys.count).cut.count;
  const std::int64_t first = head * p.pieces.rows + partial_row(p, seq, queries, keys) + row;
  const bool has_sink = p.sinks != nullptr;
  const PartialRow parts{p.pieces.out + first * p.pieces.columns,
                         p.pieces.lse + first,
                         std::int64_t{queries.count} * p.pieces.columns,
                         queries.count,
                         pieces,
                         has_sink ? p.sinks[head] * kLog2e : -kInfinity};
  const std::int64_t token = queries.begin + row;
  const std::int64_t out = strided_offset(p.out, seq, token, head);
  merge::merge_row<kThreads>(
      block, shared, pieces + (has_sink ? 1 : 0), p.head_dim_v, parts,
      [&](int column, float value) { store_as(p.out.data, p.out.dtype, out + column * p.out.stride_dim, value); },
      [&](float log2_sum) {
        if (p.lse == nullptr) return;
        p.lse[seq * p.lse_stride_seq + head * p.lse_stride_head + token * p.lse_stride_token] = log2_sum * kLn2;
      });
}

template <int kThreads>
FLASHPORT_DEVICE void merge_pieces(const AttentionParams& p, const Block& block, merge::MergeShared<kThreads>& shared) {
  const auto rows_of = [&](int seq) {
    if (seq >= p.batch) return 0;
    const int q_len = query_tokens(p, seq).count;
    return sequence_pieces(p, p.pieces.rule, q_len, key_tokens(p, seq).count).cut.count > 1 ? q_len : 0;
  };
  const auto heads = static_cast<unsigned>(p.num_q_heads);
  int first_seq = -kWaveSize, start = 0;  // the sequences that are looked at, and the rows of those before them
  int mine = 0, before = 0, all = 0;  // rows of the lane's sequence, of those before it, and of all that are looked at
  for (std::int64_t i = block.index();; i += block.count()) {
    const auto row = static_cast<int>(static_cast<unsigned>(i) / heads);
    while (row >= start + all) {
      start += all;
      first_seq += kWaveSize;
      if (first_seq >= p.batch) return;
      mine = rows_of(first_seq + block.lane());
      before = block.wave_exclusive_scan(mine, all);
    }
    const int place = row - start - before;
    const int lane = block.wave_find(place >= 0 && place < mine);
    const auto head = static_cast<int>(static_cast<unsigned>(i) - static_cast<unsigned>(row) * heads);
    merge_row_of(p, block, shared, first_seq + lane, block.wave_broadcast(place, lane), head);
    block.sync();
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
