// What a call of attention with new keys does before it: writes the new keys and values into the cache at the positions
// after those that are there, counts the keys that are there then, and with rotary position embedding turns the new
// keys and copies of the queries. In fp32, with angle a_i of pair i at the row's position:
//   (x, y) -> (x cos a_i - y sin a_i, x sin a_i + y cos a_i)
//
// A wave takes one row after another: those of the queries, then those of the new keys and values. Where rows are few,
// a block does. To find where a row comes from and goes to takes half of the instructions of a block's wave. A thread
// takes eight values of a head at a time, or a block of 32.
#pragma once

#include "common/device/kv/append_kernel.h"
#include "common/device/kv/new_rows.h"

namespace flashport::FLASHPORT_TARGET::kv {

inline constexpr int kOctet = 8;
struct alignas(16) OctetBits {
  std::uint32_t words[4];
};

FLASHPORT_DEVICE void to_floats(float (&x)[kOctet], const OctetBits& bits, DType dtype) {
  const auto half = [&](int i) { return static_cast<std::uint16_t>(bits.words[i / 2] >> i % 2 * 16); };
  if (dtype == DType::kFloat16) {
    for (int i = 0; i < kOctet; ++i) x[i] = to_float(__builtin_bit_cast(Half, half(i)));
  } else {
    for (int i = 0; i < kOctet; ++i) x[i] = to_float(__builtin_bit_cast(BFloat16, half(i)));
  }
}

// Eight values of type `dtype` from element `at` on, `stride` apart.
FLASHPORT_DEVICE void load_octet(float (&x)[kOctet], const void* data, DType dtype, std::int64_t at,
                                 std::int64_t stride) {
  const auto* from = static_cast<const std::uint16_t*>(data) + at;
  if (dtype == DType::kFloat32 || stride != 1 || reinterpret_cast<std::uintptr_t>(from) % sizeof(OctetBits) != 0)
      [[unlikely]] {
    for (int i = 0; i < kOctet; ++i) x[i] = load_as_float(data, dtype, at + i * stride);
    return;
  }
  to_floats(x, *reinterpret_cast<const OctetBits*>(from), dtype);
}

// The same into a row of a cache from value `first` on.
FLASHPORT_DEVICE void store_octet(KvFormat format, char* row, int first, const float (&x)[kOctet]) {
  auto* to = reinterpret_cast<std::uint16_t*>(row) + first;
  const bool is_half = format == KvFormat::kFp16;
  if ((!is_half && format != KvFormat::kBf16) || reinterpret_cast<std::uintptr_t>(to) % sizeof(OctetBits) != 0)
      [[unlikely]] {
    for (int i = 0; i < kOctet; ++i) store_any_value(format, row, first + i, x[i]);
    return;
  }
  OctetBits bits = {};
  for (int i = 0; i < kOctet; ++i) {
    const std::uint16_t half = is_half ? __builtin_bit_cast(std::uint16_t, to_half(x[i]))
                                       : __builtin_bit_cast(std::uint16_t, to_bfloat16(x[i]));
    bits.words[i / 2] |= static_cast<std::uint32_t>(half) << i % 2 * 16;
  }
  *reinterpret_cast<OctetBits*>(to) = bits;
}

// Values `first` to `first` + 7 of the row of one head that begins at element `from`, turned to `position`.
FLASHPORT_DEVICE void load_turned(float (&x)[kOctet], const StridedRows& rows, std::int64_t from, int first,
                                  const RotaryParams& p, int position) {
  const auto load = [&](float (&to)[kOctet], int dim) {
    load_octet(to, rows.data, rows.dtype, from + dim * rows.stride_dim, rows.stride_dim);
  };
  load(x, first);
  if (p.cos == nullptr || first >= 2 * p.half ||
      static_cast<unsigned>(position) >= static_cast<unsigned>(p.positions)) {
    return;
  }
  const std::int64_t cos_row = position * p.cos_stride, sin_row = position * p.sin_stride;
  if (p.is_interleaved != 0) {
    for (int i = 0; i < kOctet; i += 2) {
      const float c = load_as_float(p.cos, p.dtype, cos_row + (first + i) / 2);
      const float s = load_as_float(p.sin, p.dtype, sin_row + (first + i) / 2);
      const float even = x[i], odd = x[i + 1];
      x[i] = fma_rn(even, c, -(odd * s));
      x[i + 1] = fma_rn(odd, c, even * s);
    }
    return;
  }
  const bool is_first = first < p.half;
  const int pair = is_first ? first : first - p.half;
  float other[kOctet], c[kOctet], s[kOctet];
  load(other, is_first ? first + p.half : pair);
  load_octet(c, p.cos, p.dtype, cos_row + pair, 1);
  load_octet(s, p.sin, p.dtype, sin_row + pair, 1);
  for (int i = 0; i < kOctet; ++i) x[i] = fma_rn(x[i], c[i], other[i] * (is_first ? -s[i] : s[i]));
}

// Which row of which sequence a row of all sequences is.
struct SequenceRow {
  int seq;  // -1: no sequence's
  int index;
};
FLASHPORT_DEVICE SequenceRow sequence_row(const std::int32_t* cu_seqlens, int batch, int len, std::int64_t row) {
  if (cu_seqlens == nullptr) return {static_cast<int>(row / len), static_cast<int>(row % len)};
  if (row < cu_seqlens[0] || row >= cu_seqlens[batch]) return {-1, 0};
  int low = 0, high = batch;  // cu_seqlens[low] <= row < cu_seqlens[high]
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (cu_seqlens[middle] <= row ? low : high) = middle;
  }
  if (cu_seqlens[low] < 0) return {-1, 0};
  return {low, static_cast<int>(row - cu_seqlens[low])};
}

FLASHPORT_DEVICE float head_scale(const HeadScales& scales, int seq, int head) {
  return scales.data == nullptr ? 1.0f : scales.data[seq * scales.stride_seq + head * scales.stride_head];
}

// Where a row comes from and goes to.
struct RowPlace {
  int seq;  // -1: no sequence's, or there is no room
  int position;
  std::int64_t token;  // on the token axis that it comes from
  TokenCoord to;
};

inline constexpr RowPlace kNowhere = {-1, 0, 0, {0, -1}};

FLASHPORT_DEVICE RowPlace query_place(const AppendRotaryParams& p, std::int64_t row) {
  const SequenceRow at = sequence_row(p.cu_seqlens_q, p.batch, p.q_len, row);
  if (at.seq < 0 || (p.seqused_q != nullptr && at.index >= p.seqused_q[at.seq])) return kNowhere;
  const unsigned first = sequence_length(p.cache, at.seq);
  const auto position = static_cast<int>(first + (p.rotary.queries_advance != 0 ? at.index : 0));
  return {at.seq, position, p.cu_seqlens_q == nullptr ? at.index : row, {static_cast<int>(row), 0}};
}

// No page but those of the cache is written, whatever a table says.
FLASHPORT_DEVICE RowPlace new_place(const AppendRotaryParams& p, std::int64_t row) {
  const SequenceRow at = sequence_row(p.cu_seqlens_k_new, p.batch, p.new_len, row);
  if (at.seq < 0) return kNowhere;
  const int before = sequence_length(p.cache, at.seq);
  if (at.index >= sequence_room(p.cache, at.seq) - before) return kNowhere;
  const int position = before + at.index;
  const TokenCoord to = token_coord(p.cache, page_list(p.cache, at.seq), at.seq, position, true);
  if (to.page < 0 || to.page >= p.pages) return kNowhere;
  return {at.seq, position, p.cu_seqlens_k_new == nullptr ? at.index : row, to};
}

// Whether all rows are octets of a 16-bit type, as a thread loads them.
FLASHPORT_DEVICE bool are_octets(const StridedRows& rows) {
  const auto elements = static_cast<std::uint64_t>(rows.stride_seq | rows.stride_token | rows.stride_head);
  return rows.dtype != DType::kFloat32 && rows.stride_dim == 1 &&
         (reinterpret_cast<std::uintptr_t>(rows.data) | 2 * elements) % sizeof(OctetBits) == 0;
}

// The threads that have a row.
struct RowThreads {
  int thread, threads;
};

// Whether threads can have the same angles for all heads of a row: pairs are the halves of a head, and all are turned.
FLASHPORT_DEVICE bool shares_angles(const AppendRotarySide& side, const RotaryParams& rotary, int threads,
                                    int position) {
  return side.is_turned != 0 && rotary.cos != nullptr && rotary.is_interleaved == 0 &&
         2 * rotary.half == side.head_dim && threads % (rotary.half / kOctet) == 0 && side.scale.data == nullptr &&
         !is_block_format(side.format) && are_octets(side.rows) &&
         static_cast<unsigned>(position) < static_cast<unsigned>(rotary.positions);
}

// move_row() of such a row: a thread takes the same sixteen values of a few heads at once, and asks for all of them
// before it waits for any.
FLASHPORT_DEVICE void turn_row(const AppendRotarySide& side, const RotaryParams& rotary, const RowThreads& its,
                               const RowPlace& place) {
  constexpr int kAtOnce = 2;
  const int pairs = rotary.half / kOctet, heads = its.threads / pairs;  // side by side
  const int dim = its.thread % pairs * kOctet;
  const auto* rows = static_cast<const std::uint16_t*>(side.rows.data) + dim;
  float c[kOctet], s[kOctet];
  load_octet(c, rotary.cos, rotary.dtype, place.position * rotary.cos_stride + dim, 1);
  load_octet(s, rotary.sin, rotary.dtype, place.position * rotary.sin_stride + dim, 1);
  for (int first = its.thread / pairs; first < side.heads; first += kAtOnce * heads) {
    OctetBits x_bits[kAtOnce], y_bits[kAtOnce];
    FLASHPORT_UNROLL(2)
    for (int i = 0; i < kAtOnce; ++i) {
      const int head = first + i * heads;
      if (head >= side.heads) break;
      const auto* from = rows + strided_offset(side.rows, place.seq, place.token, head);
      x_bits[i] = *reinterpret_cast<const OctetBits*>(from);
      y_bits[i] = *reinterpret_cast<const OctetBits*>(from + rotary.half);
    }
    FLASHPORT_UNROLL(2)
    for (int i = 0; i < kAtOnce; ++i) {
      const int head = first + i * heads;
      if (head >= side.heads) break;
      float x[kOctet], y[kOctet], turned[kOctet];
      to_floats(x, x_bits[i], side.rows.dtype);
      to_floats(y, y_bits[i], side.rows.dtype);
      char* to = static_cast<char*>(side.cache.data) + row_offset(side.cache, place.to, head);
      for (int j = 0; j < kOctet; ++j) turned[j] = fma_rn(x[j], c[j], y[j] * -s[j]);
      store_octet(side.format, to, dim, turned);
      for (int j = 0; j < kOctet; ++j) turned[j] = fma_rn(y[j], c[j], x[j] * s[j]);
      store_octet(side.format, to, dim + rotary.half, turned);
    }
  }
}

// Moves all heads of a row, turned and in the format of its side, which is none whose scales lie beside it.
FLASHPORT_DEVICE void move_row(const AppendRotarySide& side, const RotaryParams& rotary, const RowThreads& its,
                               const RowPlace& place) {
  const bool is_block = is_block_format(side.format);
  const int unit = is_block ? kAppendUnit : kOctet;
  const int units = side.head_dim / unit;
  const int position = side.is_turned != 0 ? place.position : rotary.positions;
  for (int i = its.thread; i < side.heads * units; i += its.threads) {
    const int head = i / units, first = i % units * unit;
    const std::int64_t from = strided_offset(side.rows, place.seq, place.token, head);
    char* to = static_cast<char*>(side.cache.data) + row_offset(side.cache, place.to, head);
    const float scale = head_scale(side.scale, place.seq, head);
    float block_values[kAppendUnit];
    for (int octet = 0; octet < unit; octet += kOctet) {
      float x[kOctet];
      load_turned(x, side.rows, from, first + octet, rotary, position);
      if (side.scale.data != nullptr) {
        for (int j = 0; j < kOctet; ++j) x[j] = x[j] / scale;
      }
      if (is_block) {
        for (int j = 0; j < kOctet; ++j) block_values[octet + j] = x[j];
      } else {
        store_octet(side.format, to, first, x);
      }
    }
    if (is_block) [[unlikely]] {
      store_block(side.format, to + first / kAppendUnit * side.unit_bytes, block_values);
    }
  }
}

template <int kThreads>
FLASHPORT_DEVICE void append_rotary(const AppendRotaryParams& p, const Block& block) {
  for (std::int64_t i = block.index() * kThreads + block.thread(); i < p.batch; i += block.count() * kThreads) {
    const int seq = static_cast<int>(i), before = sequence_length(p.cache, seq);
    const int room = maximum(sequence_room(p.cache, seq) - before, 0);
    p.seqlens_out[seq] = before + minimum(sequence_new_rows(p, seq), room);
  }
  const std::int64_t q_rows = p.rotary.cos != nullptr ? p.total_q : 0, rows = q_rows + p.total_new;
  constexpr int kWaves = kThreads > kWaveSize ? kThreads / kWaveSize : 1;
  const bool few = kWaves == 1 || block.count() >= rows;
  const RowThreads its = few ? RowThreads{block.thread(), kThreads} : RowThreads{block.lane(), kWaveSize};
  const int rows_at_once = few ? 1 : kWaves;
  for (std::int64_t row = block.index() * rows_at_once + (few ? 0 : block.wave()); row < rows;
       row += block.count() * rows_at_once) {
    const bool is_query = row < q_rows;
    const RowPlace place = is_query ? query_place(p, row) : new_place(p, row - q_rows);
    if (place.seq < 0) continue;
    for (int side = is_query ? 0 : 1; side < (is_query ? 1 : 3); ++side) {
      if (shares_angles(p.sides[side], p.rotary, its.threads, place.position)) {
        turn_row(p.sides[side], p.rotary, its, place);
      } else {
        move_row(p.sides[side], p.rotary, its, place);
      }
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
