// Which query a row of a query tile is, where it lies in q, out and lse, and its values as operands.
#pragma once

#include "common/device/core/strided_offset.h"
#include "common/device/decode/schedule.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Rows pack (token, head of the group), heads fastest.
struct QueryRow {
  int token;  // of the sequence's q_len; >= q_len: padding
  int head;   // query head
};

FLASHPORT_DEVICE QueryRow query_row(const DecodeParams& p, const Segment& s, int tile_rows, int row) {
  const int packed = s.row_tile * tile_rows + row;
  const int token = divide(packed, p.by_group_size);
  return {token, s.kv_head * p.group_size + packed - token * p.group_size};
}

// The first element of the row in `rows`: q, out or lse. Ragged ones have the tokens of all sequences on one axis.
template <class Params>
FLASHPORT_DEVICE std::int64_t query_offset(const Params& p, const Segment& s, const StridedRows& rows, QueryRow row) {
  const std::int64_t seq = p.cu_seqlens_q == nullptr ? s.seq : 0;
  return strided_offset(rows, seq, s.q_begin + row.token, row.head);
}

// Eight neighbouring values of an fp16 or bf16 row that products cannot read as they are, because their type is not the
// math type or their stride is not 1. pack(x, y) makes a word of two.
template <class Pack>
FLASHPORT_DEVICE void convert_query(unsigned (&words)[4], const DecodeParams& p, std::int64_t offset,
                                    const Pack& pack) {
  float x[8];
  FLASHPORT_UNROLL(8)
  for (int i = 0; i < 8; ++i) {
    const std::int64_t element = offset + i * p.q.stride_dim;
    x[i] = p.q.dtype == DType::kBFloat16 ? to_float(static_cast<const BFloat16*>(p.q.data)[element])
                                         : to_float(static_cast<const Half*>(p.q.data)[element]);
  }
  FLASHPORT_UNROLL(4)
  for (int i = 0; i < 4; ++i) words[i] = pack(x[2 * i], x[2 * i + 1]);
}

}  // namespace flashport::FLASHPORT_TARGET::decode
