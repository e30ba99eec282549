// The end of a query tile: from its finished state (m, l, o) to out and lse, with the sink in the denominator.
#pragma once

#include <type_traits>

#include "common/device/core/scalar_access.h"
#include "common/device/decode/mask.h"
#include "common/device/decode/partial_state.h"

namespace flashport::FLASHPORT_TARGET::decode {

// What a raw dot product is multiplied by before the softcap or, without one, to become a base-2 logit.
template <class Params>
FLASHPORT_DEVICE float score_scale(const Params& p, const Segment& s) {
  return p.score_scale * kv::head_scale(p.k_scale, p.scale_stride, s.kv_head);
}

// The destination of a row of a query tile, and what of its result is known before the row is done.
struct OutputRow {
  std::int64_t offset;  // of the row's first element; -1: padding, not written
  float* lse;           // null: not wanted, or another thread writes it
  float scale;          // of the values
  float sink;           // base 2; -inf: none
};

// `leads`: this thread writes lse.
template <class Params>
FLASHPORT_DEVICE OutputRow output_row(const Params& p, const Segment& s, const Block& block, QueryRow row, bool leads) {
  if (row.token >= s.q_len) return {-1, nullptr, 0.0f, 0.0f};
  const int chunk = p.num_chunks > 0 ? static_cast<int>(block.index()) % p.num_chunks : 0;
  OutputRow to;
  to.offset = query_offset(p, s, p.out, row);
  if (chunk > 0) to.offset += chunk * p.out_stride_chunk;
  to.lse = nullptr;
  if (!Params::kPlain && leads && p.lse.data != nullptr) {
    to.lse = static_cast<float*>(p.lse.data) + query_offset(p, s, p.lse, row);
    if (chunk > 0) to.lse += chunk * p.lse_stride_chunk;
  }
  to.scale = kv::head_scale(p.v_scale, p.scale_stride, s.kv_head);
  // Only the first of the partial results that will be merged has the sink.
  to.sink = p.sinks != nullptr && chunk == 0 ? p.sinks[row.head] * kLog2e : -kInfinity;
  return to;
}

// Writes lse and returns the factor of the row's accumulator. A row that sees no key has the factor 0, and then out is
// 0 even if its accumulator is NaN; its lse is -inf, or the sink where there is one.
FLASHPORT_DEVICE float finish_row(const OutputRow& row, float m, float l) {
  float factor = row.scale;
  if (row.sink != -kInfinity) {
    const merge::MergeWeights w = merge::merge_weights(m, row.sink);
    l = merge::merge_value(l, w.a, 1.0f, w.b);
    m = w.m;
    factor *= w.a;
  }
  if (row.lse != nullptr) *row.lse = l == 0.0f ? -kInfinity : (m + log2_full(l)) * kLn2;
  return l == 0.0f ? 0.0f : factor / l;
}

FLASHPORT_DEVICE float output_value(float x, float factor) { return factor == 0.0f ? 0.0f : x * factor; }
template <class Params, class T>
FLASHPORT_DEVICE void write_element(const Params& p, T* out, std::int64_t row, int column, float x, float factor) {
  if (row < 0 || column >= p.head_dim_v) return;
  store_as(out + row + column * p.out.stride_dim, output_value(x, factor));
}

// f(out): as the type that it has.
template <class Params, class F>
FLASHPORT_DEVICE void with_output(const Params& p, F&& f) {
  if constexpr (Params::kPlain) {
    DType type = p.out.dtype;
    if constexpr (requires { Params::kType16; }) type = Params::kType16;
    if (type == DType::kFloat16) {
      f(static_cast<Half*>(p.out.data));
    } else {
      f(static_cast<BFloat16*>(p.out.data));
    }
  } else {
    with_type(p.out.data, p.out.dtype, f);
  }
}

// A few columns of one row of a tile's output, as one store where they are contiguous and aligned.
template <int kCount, class Params, class T>
FLASHPORT_DEVICE void write_columns(const Params& p, T* out, std::int64_t row, int column, const float (&x)[kCount],
                                    float factor) {
  struct alignas(sizeof(T) * kCount) Columns {
    T at[kCount];
  };
  T* to = out + row + column;
  const bool aligned = reinterpret_cast<std::uintptr_t>(to) % sizeof(Columns) == 0;
  const bool whole = Params::kPlain || (p.out.stride_dim == 1 && column + kCount <= p.head_dim_v);
  if (aligned && row >= 0 && whole) {
    Columns columns;
    for (int i = 0; i < kCount; ++i) store_as(columns.at + i, output_value(x[i], factor));
    *reinterpret_cast<Columns*>(to) = columns;
    return;
  }
  for (int i = 0; i < kCount; ++i) write_element(p, out, row, column + i, x[i], factor);
}

// A tile's output from registers, where each lane finishes one row.
template <class Tiles, class Params>
FLASHPORT_DEVICE void write_own_rows(const Tiles& tiles, const Params& p, const Segment& s, const Block& block,
                                     const merge::SoftmaxState<Tiles>& state) {
  const int last = tiles.live_rows() - 1;
  const bool live = tiles.own_row() <= last;
  const QueryRow row = query_row(p, s, Tiles::kRows, minimum(tiles.own_row(), last));
  const OutputRow own = output_row(p, s, block, row, live && tiles.writes_own_row());
  const float own_factor = finish_row(own, tiles.of_own_row(state.m), tiles.of_own_row(state.l));
  tiles.for_each_own_row(state.o, live ? own.offset : -1, own_factor,
                         [&](std::int64_t offset, float factor, int column, const float (&x)[kVectorFloats]) {
                           with_output(p, [&](auto* out) { write_columns(p, out, offset, column, x, factor); });
                         });
}

// The same, where lanes that have parts of a row each finish it.
template <class Tiles, class Params>
FLASHPORT_DEVICE void write_rows(const Tiles& tiles, const Params& p, const Segment& s, const Block& block,
                                 const merge::SoftmaxState<Tiles>& state) {
  std::int64_t offsets[Tiles::kRowSlots];
  float factors[Tiles::kRowSlots];
  FLASHPORT_UNROLL(4)  // rows side by side
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    const int last = tiles.live_rows() - 1;
    const int row = tiles.row_of(slot);
    const QueryRow at = query_row(p, s, Tiles::kRows, minimum(row, last));
    const OutputRow to = output_row(p, s, block, at, row <= last && tiles.owns_row(slot));
    offsets[slot] = row <= last ? to.offset : -1;
    factors[slot] = finish_row(to, state.m[slot], state.l[slot]);
  }
  with_output(p, [&](auto* out) {
    if (Params::kPlain || (p.out.stride_dim == 1 && p.head_dim_v == Tiles::kColumns)) {
      tiles.for_each_out(state.o, [&](float x, int slot, int column) {
        if (offsets[slot] >= 0) store_as(out + offsets[slot] + column, output_value(x, factors[slot]));
      });
    } else {
      tiles.for_each_out(state.o, [&](float x, int slot, int column) {
        write_element(p, out, offsets[slot], column, x, factors[slot]);
      });
    }
  });
}

template <class Tiles, class Params>
FLASHPORT_DEVICE void write_output(const Tiles& tiles, const Params& p, const Segment& s, const Block& block,
                                   const merge::SoftmaxState<Tiles>& state) {
  if constexpr (requires { tiles.own_row(); }) {
    write_own_rows(tiles, p, s, block, state);
  } else {
    write_rows(tiles, p, s, block, state);
  }
}

// The same of plain calls, whose rows are aligned, in one of two types of 16 bits: both conversions are less code than
// two stores.
template <int kCount>
FLASHPORT_DEVICE void write_plain_columns(const PlainDecodeParams& p, std::int64_t row, int column,
                                          const float (&x)[kCount], float factor) {
  if (row < 0) return;
  struct alignas(2 * kCount) Columns {
    std::uint16_t at[kCount];
  } columns;
  for (int i = 0; i < kCount; ++i) {
    const float value = output_value(x[i], factor);
    Half half;
    BFloat16 bfloat;
    store_as(&half, value);
    store_as(&bfloat, value);
    columns.at[i] = p.out.dtype == DType::kFloat16 ? __builtin_bit_cast(std::uint16_t, half)
                                                   : __builtin_bit_cast(std::uint16_t, bfloat);
  }
  *reinterpret_cast<Columns*>(static_cast<std::uint16_t*>(p.out.data) + row + column) = columns;
}

template <class Params>
FLASHPORT_DEVICE void write_output_piece(const Params& p, const OutputRow& to, int column, const StatePiece& piece) {
  const float factor = finish_row(to, piece.m, piece.l);
  if constexpr (std::is_same_v<Params, PlainDecodeParams>) {
    write_plain_columns(p, to.offset, column, piece.o, factor);
  } else {
    with_output(p, [&](auto* out) { write_columns(p, out, to.offset, column, piece.o, factor); });
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
