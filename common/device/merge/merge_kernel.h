// Merging normalised partial results of one softmax: LightLLM's stage 2, split decode, merge_state, merge_states.
//
// Row r has n parts (o_c [D], lse_c). With m = max lse_c and w_c = exp(lse_c - m):
//   out = sum w_c o_c / sum w_c   [D],   lse = m + log sum w_c.
// A part whose weight is 0 is never read, and no part at all gives out 0 and lse -inf. A block takes one row. The
// lanes of a wave take the columns, and wave i of n takes parts i, i + n, i + 2 n, ...; the waves' sums are added in a
// fixed order.
#pragma once

#include "common/device/core/index_array.h"
#include "common/device/core/scalar_access.h"
#include "common/device/core/strided_offset.h"
#include "common/device/merge/online_softmax.h"
#include "common/device/merge/params.h"

namespace flashport::FLASHPORT_TARGET::merge {

template <int kThreads>
struct MergeShared {
  static constexpr int kWaves = kThreads > kWaveSize ? kThreads / kWaveSize : 1;
  static constexpr int kLanes = kThreads / kWaves;
  static constexpr int kColumns = kLanes * kVectorFloats;
  alignas(16) float o[kWaves][kColumns];
  float weight[kWaves];
  float most[kWaves];
};

// parts.log2_sum(c): base-2 lse of part c;  parts.load(x, c, column, count): columns of its o;
// store(column, value);  store_lse(base-2 lse)
template <int kThreads, class Parts, class Store, class StoreLse>
FLASHPORT_DEVICE void merge_row(const Block& block, MergeShared<kThreads>& shared, int parts, int head_dim,
                                const Parts& part, const Store& store, const StoreLse& store_lse) {
  using Shared = MergeShared<kThreads>;
  const int wave = block.thread() / Shared::kLanes;
  const int lane = block.thread() % Shared::kLanes;

  const auto largest = [&] {
    float most = -kInfinity;
    for (int c = block.thread(); c < parts; c += kThreads) most = maximum(most, part.log2_sum(c));
    most = wave_max(most);
    if (lane == 0) shared.most[wave] = most;
    block.sync();
    for (int w = 0; w < Shared::kWaves; ++w) most = maximum(most, shared.most[w]);
    return most;
  };
  float most = 0.0f;
  float reference = 0.0f;

  for (int column = 0; column < head_dim; column += Shared::kColumns) {
    const int mine = column + lane * kVectorFloats;
    const int count = minimum(kVectorFloats, head_dim - mine);
    float acc[kVectorFloats] = {};
    float weight = 0.0f;
    for (int first = wave; first == wave || first < parts; first += Shared::kWaves * kMergeUnroll) {
      // All loads of a batch come before their first use. A part without weight may hold anything and is not read.
      float log2_sum[kMergeUnroll];
      float x[kMergeUnroll][kVectorFloats] = {};
      FLASHPORT_UNROLL(kMergeUnroll)
      for (int i = 0; i < kMergeUnroll; ++i) {
        const int c = first + i * Shared::kWaves;
        log2_sum[i] = c < parts ? part.log2_sum(c) : -kInfinity;
      }
      FLASHPORT_UNROLL(kMergeUnroll)
      for (int i = 0; i < kMergeUnroll; ++i) {
        if (log2_sum[i] != -kInfinity && count > 0) part.load(x[i], first + i * Shared::kWaves, mine, count);
      }
      if (column == 0 && first == wave) {  // computed while the loads of the first parts are in flight
        most = largest();
        reference = most == -kInfinity ? 0.0f : most;
      }
      FLASHPORT_UNROLL(kMergeUnroll)
      for (int i = 0; i < kMergeUnroll; ++i) {
        const float w = exp2_approx(log2_sum[i] - reference);
        if (w == 0.0f) continue;
        weight += w;
        for (int j = 0; j < kVectorFloats; ++j) acc[j] = fma_rn(w, x[i][j], acc[j]);
      }
    }
    if constexpr (Shared::kWaves > 1) {
      block.sync();
      for (int i = 0; i < kVectorFloats; ++i) shared.o[wave][lane * kVectorFloats + i] = acc[i];
      if (lane == 0) shared.weight[wave] = weight;
      block.sync();
      weight = 0.0f;
      for (int w = 0; w < Shared::kWaves; ++w) weight += shared.weight[w];
      for (int at = block.thread(); at < Shared::kColumns && column + at < head_dim; at += kThreads) {
        float sum = 0.0f;
        for (int w = 0; w < Shared::kWaves; ++w) sum += shared.o[w][at];
        store(column + at, weight == 0.0f ? 0.0f : sum / weight);
      }
    } else {
      const float inverse = weight == 0.0f ? 0.0f : 1.0f / weight;
      for (int i = 0; i < count; ++i) store(mine + i, acc[i] * inverse);
    }
    if (column == 0 && block.thread() == 0) store_lse(weight == 0.0f ? -kInfinity : most + log2_full(weight));
  }
}

// Row r of `out` = sequence, token, head, heads fastest.
template <int kThreads>
FLASHPORT_DEVICE void decode_stage2(const Stage2Params& p, const Block& block, MergeShared<kThreads>& shared) {
  const auto row = static_cast<unsigned>(block.index());  // 32 bits: a 64-bit division would take longer than all else
  const unsigned sequence_token = row / static_cast<unsigned>(p.num_heads);
  const std::int64_t head = row - sequence_token * static_cast<unsigned>(p.num_heads);
  const std::int64_t seq = sequence_token / static_cast<unsigned>(p.tokens);
  if (p.end != nullptr && seq >= *p.end) return;
  const std::int64_t token = sequence_token - static_cast<unsigned>(seq) * static_cast<unsigned>(p.tokens);
  int parts = p.max_chunks;
  if (p.chunk_keys > 0) {
    constexpr std::int64_t kMost = 0x7fffffff;
    const auto keys = static_cast<unsigned>(minimum(maximum(index_at(p.seqlens, seq), std::int64_t{0}), kMost));
    const auto chunk = static_cast<unsigned>(minimum(p.chunk_keys, kMost));
    parts = static_cast<int>(minimum((keys + chunk - 1) / chunk, static_cast<unsigned>(p.max_chunks)));
  }
  struct Parts {
    const float* o;
    const float* lse;
    std::int64_t o_stride, lse_stride, dim_stride;
    FLASHPORT_DEVICE float log2_sum(int c) const { return lse[c * lse_stride] * kLog2e; }
    FLASHPORT_DEVICE void load(float (&x)[kVectorFloats], int c, int column, int count) const {
      load_vector(x, o + c * o_stride + column * dim_stride, dim_stride, count);
    }
  };
  const Parts part{static_cast<const float*>(p.mid.data) + strided_offset(p.mid, seq, token, head),
                   static_cast<const float*>(p.mid_lse.data) + strided_offset(p.mid_lse, seq, token, head),
                   p.mid_stride_chunk, p.mid_lse_stride_chunk, p.mid.stride_dim};
  const std::int64_t out = strided_offset(p.out, seq, token, head);
  merge_row<kThreads>(
      block, shared, parts, p.head_dim, part,
      [&](int column, float value) { store_as(p.out.data, p.out.dtype, out + column * p.out.stride_dim, value); },
      [&](float log2_sum) {
        if (p.lse.data == nullptr) return;
        static_cast<float*>(p.lse.data)[strided_offset(p.lse, seq, token, head)] = log2_sum * kLn2;
      });
}

template <int kThreads>
FLASHPORT_DEVICE void merge_states(const MergeStatesParams& p, const Block& block, MergeShared<kThreads>& shared) {
  const std::int64_t outer = block.index() / p.inner_rows;
  const std::int64_t inner = block.index() % p.inner_rows;
  struct Parts {
    const MergeStatesParams& p;
    std::int64_t outer, inner;
    FLASHPORT_DEVICE float log2_sum(int c) const {
      const int t = p.two_tensors ? c : 0;
      const std::int64_t state = p.two_tensors ? 0 : c;
      const float lse =
          p.lse[t][state * p.lse_stride_state + outer * p.lse_stride_outer[t] + inner * p.lse_stride_inner[t]];
      return p.lse_base_2 ? lse : lse * kLog2e;
    }
    FLASHPORT_DEVICE void load(float (&x)[kVectorFloats], int c, int column, int count) const {
      const int t = p.two_tensors ? c : 0;
      const std::int64_t state = p.two_tensors ? 0 : c;
      const std::int64_t at = state * p.o_stride_state + outer * p.o_stride_outer[t] + inner * p.o_stride_inner[t] +
                              column * p.o_stride_dim[t];
      if (p.dtype == DType::kFloat32) {
        load_vector(x, static_cast<const float*>(p.o[t]) + at, p.o_stride_dim[t], count);
      } else if (p.dtype == DType::kBFloat16) {
        load_vector(x, static_cast<const BFloat16*>(p.o[t]) + at, p.o_stride_dim[t], count);
      } else {
        load_vector(x, static_cast<const Half*>(p.o[t]) + at, p.o_stride_dim[t], count);
      }
    }
  };
  merge_row<kThreads>(
      block, shared, p.states, p.head_dim, Parts{p, outer, inner},
      [&](int column, float value) {
        store_as(p.out, p.dtype, outer * p.out_stride_outer + inner * p.out_stride_inner + column * p.out_stride_dim,
                 value);
      },
      [&](float log2_sum) {
        p.out_lse[outer * p.out_lse_stride_outer + inner * p.out_lse_stride_inner] =
            p.lse_base_2 ? log2_sum : log2_sum * kLn2;
      });
}

}  // namespace flashport::FLASHPORT_TARGET::merge
