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

FLASHPORT_DEVICE void store_as(void* data, DType dtype, std::int64_t offset, float value) {
  switch (dtype) {
    case DType::kFloat16: static_cast<Half*>(data)[offset] = to_half(value); break;
    case DType::kBFloat16: static_cast<BFloat16*>(data)[offset] = to_bfloat16(value); break;
    default: static_cast<float*>(data)[offset] = value;
  }
}

// Rows that see nothing give out 0 and lse -inf (a sink alone: out 0, lse the sink).
template <class Tiles>
FLASHPORT_DEVICE void write_output(const Tiles& tiles, const DecodeParams& p, const Segment& s, const Block& block,
                                   const SoftmaxState<Tiles>& state) {
  const std::int64_t chunk = p.num_chunks > 0 ? block.index() % p.num_chunks : 0;
  const float v_scale = head_scale(p.v_scale, p.scale_stride, s.kv_head);
  typename Tiles::Rows inverse;
  std::int64_t offsets[Tiles::kRowSlots];  // of a row's first element; -1: no such row
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    const QueryRow row = query_row(p, s, Tiles::kRows, tiles.row_of(slot));
    offsets[slot] = -1;
    inverse[slot] = 0.0f;
    if (row.token >= s.q_len || tiles.row_of(slot) >= tiles.live_rows()) continue;
    float m = state.m[slot];
    float l = state.l[slot];
    if (p.sinks != nullptr && chunk == 0) {  // of partial results that will be merged, one alone gets it
      const float sink = p.sinks[row.head] * kLog2e;
      const MergeWeights w = merge_weights(m, sink);
      inverse[slot] = w.a;
      l = merge_value(l, w.a, sink == -kInfinity ? 0.0f : 1.0f, w.b);
      m = w.m;
    } else {
      inverse[slot] = 1.0f;
    }
    const float scale = l == 0.0f ? 0.0f : v_scale / l;
    inverse[slot] *= scale;
    const std::int64_t seq = p.cu_seqlens_q == nullptr ? s.seq : 0;
    const std::int64_t token = s.q_begin + row.token;
    offsets[slot] = seq * p.out.stride_seq + token * p.out.stride_token + row.head * p.out.stride_head +
                    chunk * p.out_stride_chunk;
    if (p.lse != nullptr && tiles.owns_row(slot)) {
      p.lse[seq * p.lse_stride_seq + token * p.lse_stride_token + row.head * p.lse_stride_head +
            chunk * p.lse_stride_chunk] = l == 0.0f ? -kInfinity : (m + log2_full(l)) * kLn2;
    }
  }
  tiles.for_each_out(state.o, [&](float x, int slot, int col) {
    if (offsets[slot] < 0 || col >= p.head_dim_v) return;
    // A row without weight is 0 even where its accumulator is not a number.
    const float value = inverse[slot] == 0.0f ? 0.0f : x * inverse[slot];
    store_as(p.out.data, p.out.dtype, offsets[slot] + col * p.out.stride_dim, value);
  });
}

}  // namespace flashport::FLASHPORT_TARGET
