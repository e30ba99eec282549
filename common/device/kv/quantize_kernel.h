// Rows of numbers as rows of ggml's blocks (blocks.h), and back. A thread takes one block; blocks of a row are counted
// fastest, then heads, tokens and sequences.
#pragma once

#include "common/device/core/strided_offset.h"
#include "common/device/kv/blocks.h"
#include "common/device/kv/params.h"

namespace flashport::FLASHPORT_TARGET::kv {

// f(its first byte, element of its first value) for each block that is this thread's.
template <int kThreads, class F>
FLASHPORT_DEVICE void for_each_block(const QuantizeParams& p, const Block& block, const F& f) {
  const std::int64_t work = p.rows * p.units;
  for (std::int64_t i = block.index() * kThreads + block.thread(); i < work; i += block.count() * kThreads) {
    const std::int64_t row = i / p.units, unit = i - row * p.units;
    const std::int64_t head = row % p.heads, token = row / p.heads % p.tokens, seq = row / p.heads / p.tokens;
    f(static_cast<char*>(p.blocks.data) + strided_offset(p.blocks, seq, token, head) + unit * p.unit_bytes,
      strided_offset(p.values, seq, token, head) + unit * kBlockValues * p.values.stride_dim);
  }
}

template <int kThreads>
FLASHPORT_DEVICE void quantize_kv(const QuantizeParams& p, const Block& block) {
  for_each_block<kThreads>(p, block, [&](char* to, std::int64_t from) {
    float x[kBlockValues];
    FLASHPORT_UNROLL(32)
    for (int i = 0; i < kBlockValues; ++i, from += p.values.stride_dim) {
      x[i] = load_as_float(p.values.data, p.values.dtype, from);
    }
    store_block(p.format, to, x);
  });
}

template <int kThreads>
FLASHPORT_DEVICE void dequantize_kv(const QuantizeParams& p, const Block& block) {
  for_each_block<kThreads>(p, block, [&](const char* from, std::int64_t to) {
    for_each_value(p.format, from,
                   [&](int i, float x) { store_as(p.values.data, p.values.dtype, to + i * p.values.stride_dim, x); });
  });
}

}  // namespace flashport::FLASHPORT_TARGET::kv
