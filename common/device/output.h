// The end of a query tile: from its finished state (m, l, o) to out and lse, with the sink in the denominator.
#pragma once

#include "common/device/mask.h"
#include "common/device/online_softmax.h"

namespace flashport::FLASHPORT_TARGET {

FLASHPORT_DEVICE float head_scale(const float* scale, int stride, int kv_head) {
  return scale == nullptr ? 1.0f : scale[kv_head * stride];
}

// What a raw dot product is multiplied by before the softcap or, without one, to become a base-2 logit.
FLASHPORT_DEVICE float score_scale(const DecodeParams& p, const Segment& s) {
  return p.score_scale * head_scale(p.k_scale, p.scale_stride, s.kv_head);
}

FLASHPORT_DEVICE void store_as(Half* to, float value) { *to = to_half(value); }
FLASHPORT_DEVICE void store_as(BFloat16* to, float value) { *to = to_bfloat16(value); }
FLASHPORT_DEVICE void store_as(float* to, float value) { *to = value; }

// f(data as its type)
template <class F>
FLASHPORT_DEVICE void with_type(void* data, DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: f(static_cast<Half*>(data)); break;
    case DType::kBFloat16: f(static_cast<BFloat16*>(data)); break;
    default: f(static_cast<float*>(data));
  }
}
FLASHPORT_DEVICE void store_as(void* data, DType dtype, std::int64_t offset, float value) {
  with_type(data, dtype, [&](auto* to) { store_as(to + offset, value); });
}

// Where a row of a query tile goes, and what its accumulator is multiplied by.
struct OutputRow {
  std::int64_t offset;  // of the row's first element; -1: padding, not written
  float factor;         // 0: nothing was seen, the row is 0 even where its accumulator is not a number
};

// Rows that see nothing give out 0 and lse -inf (a sink alone: out 0, lse the sink). `leads`: this thread writes lse.
FLASHPORT_DEVICE OutputRow finish_row(const DecodeParams& p, const Segment& s, const Block& block, QueryRow row,
                                      float m, float l, bool leads) {
  if (row.token >= s.q_len) return {-1, 0.0f};
  float factor = head_scale(p.v_scale, p.scale_stride, s.kv_head);
  const int chunk = p.num_chunks > 0 ? static_cast<int>(block.index()) % p.num_chunks : 0;
  if (p.sinks != nullptr && chunk == 0) {  // of partial results that will be merged, one alone gets it
    const float sink = p.sinks[row.head] * kLog2e;
    const MergeWeights w = merge_weights(m, sink);
    l = merge_value(l, w.a, sink == -kInfinity ? 0.0f : 1.0f, w.b);
    m = w.m;
    factor *= w.a;
  }
  const std::int64_t seq = p.cu_seqlens_q == nullptr ? s.seq : 0;
  const std::int64_t token = s.q_begin + row.token;
  if (leads && p.lse != nullptr) {
    p.lse[seq * p.lse_stride_seq + token * p.lse_stride_token + row.head * p.lse_stride_head +
          chunk * p.lse_stride_chunk] = l == 0.0f ? -kInfinity : (m + log2_full(l)) * kLn2;
  }
  return {
      seq * p.out.stride_seq + token * p.out.stride_token + row.head * p.out.stride_head + chunk * p.out_stride_chunk,
      l == 0.0f ? 0.0f : factor / l};
}

template <class T>
FLASHPORT_DEVICE void write_element(const DecodeParams& p, T* out, const OutputRow& row, int column, float x) {
  if (row.offset < 0 || column >= p.head_dim_v) return;
  store_as(out + row.offset + column * p.out.stride_dim, row.factor == 0.0f ? 0.0f : x * row.factor);
}

// A tile's output from registers.
template <class Tiles>
FLASHPORT_DEVICE void write_output(const Tiles& tiles, const DecodeParams& p, const Segment& s, const Block& block,
                                   const SoftmaxState<Tiles>& state) {
  OutputRow rows[Tiles::kRowSlots];
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    const int row = tiles.row_of(slot);
    rows[slot] = {-1, 0.0f};
    if (row >= tiles.live_rows()) continue;
    rows[slot] =
        finish_row(p, s, block, query_row(p, s, Tiles::kRows, row), state.m[slot], state.l[slot], tiles.owns_row(slot));
  }
  with_type(p.out.data, p.out.dtype, [&](auto* out) {
    tiles.for_each_out(state.o, [&](float x, int slot, int column) { write_element(p, out, rows[slot], column, x); });
  });
}

// A few columns of one row of a tile's output.
template <int kTileRows>
FLASHPORT_DEVICE void write_output_piece(const DecodeParams& p, const Segment& s, const Block& block, int row,
                                         int column, const StatePiece& piece) {
  const OutputRow to = finish_row(p, s, block, query_row(p, s, kTileRows, row), piece.m, piece.l, column == 0);
  with_type(p.out.data, p.out.dtype, [&](auto* out) {
    for (int i = 0; i < kVectorFloats; ++i) write_element(p, out, to, column + i, piece.o[i]);
  });
}

}  // namespace flashport::FLASHPORT_TARGET
