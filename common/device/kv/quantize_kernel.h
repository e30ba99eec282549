// Rows of numbers as rows of a cache's format, and back: of ggml's blocks (blocks.h), or with scales beside them
// (scaled_rows.h). A thread takes one unit of 32 values; units of a row are counted fastest, then heads, tokens and
// sequences.
#pragma once

#include "common/device/core/strided_offset.h"
#include "common/device/kv/params.h"
#include "common/device/kv/scaled_rows.h"

namespace flashport::FLASHPORT_TARGET::kv {

// What a thread works on at a time.
struct QuantizeUnit {
  char* stored;         // where it begins
  std::int64_t number;  // element of the row's first number
  std::int64_t scale;   // element of the row's first scale
  int first, count;     // of its values in the row
};

// f(unit) for each that is this thread's.
template <int kThreads, class F>
FLASHPORT_DEVICE void for_each_unit(const QuantizeParams& p, const Block& block, const F& f) {
  const int units = (p.head_dim + kBlockValues - 1) / kBlockValues;
  const std::int64_t work = p.rows * units;
  for (std::int64_t i = block.index() * kThreads + block.thread(); i < work; i += block.count() * kThreads) {
    const std::int64_t row = i / units;
    const int unit = static_cast<int>(i - row * units);
    const std::int64_t head = row % p.heads, token = row / p.heads % p.tokens, seq = row / p.heads / p.tokens;
    const KeyScales& s = p.scales;
    f({static_cast<char*>(p.stored.data) + strided_offset(p.stored, seq, token, head) + unit * p.unit_bytes,
       strided_offset(p.values, seq, token, head), seq * s.stride_page + token * s.stride_token + head * s.stride_head,
       unit * kBlockValues, minimum(kBlockValues, p.head_dim - unit * kBlockValues)});
  }
}

template <int kThreads>
FLASHPORT_DEVICE void quantize_kv(const QuantizeParams& p, const Block& block) {
  for_each_unit<kThreads>(p, block, [&](const QuantizeUnit& unit) {
    if (p.scales.data != nullptr) {
      const NumberRow row{p.values.data, p.values.dtype, unit.number, p.values.stride_dim, p.head_dim};
      return store_scaled_unit(p.format, unit.stored, row, unit.first, unit.count, p.scales, unit.scale);
    }
    float x[kBlockValues];
    std::int64_t from = unit.number + unit.first * p.values.stride_dim;
    FLASHPORT_UNROLL(32)
    for (int i = 0; i < kBlockValues; ++i, from += p.values.stride_dim) {
      x[i] = load_as_float(p.values.data, p.values.dtype, from);
    }
    store_block(p.format, unit.stored, x);
  });
}

template <int kThreads>
FLASHPORT_DEVICE void dequantize_kv(const QuantizeParams& p, const Block& block) {
  for_each_unit<kThreads>(p, block, [&](const QuantizeUnit& unit) {
    const std::int64_t to = unit.number + unit.first * p.values.stride_dim;
    const auto store = [&](int i, float x) {
      store_as(p.values.data, p.values.dtype, to + i * p.values.stride_dim, x);
    };
    if (p.scales.data == nullptr) return for_each_value(p.format, unit.stored, store);
    const int group_dims = p.scales.dims_per_scale == 0 ? p.head_dim : p.scales.dims_per_scale;
    for (int i = 0; i < unit.count; ++i) {
      const std::int64_t group = (unit.first + i) / group_dims;
      const float d = load_as_float(p.scales.data, p.scales.dtype, unit.scale + group * p.scales.stride_group);
      store(i, mul_rn(d, load_any_value(p.format, unit.stored, i)));
    }
  });
}

}  // namespace flashport::FLASHPORT_TARGET::kv
