// The weights that dropout keeps, as a mask [B, Hq, Sq, Sk] of bytes.
#pragma once

#include "common/device/attention/philox.h"

namespace flashport::FLASHPORT_TARGET::attention {

// A block takes rows of the mask, and a thread groups of eight keys.
FLASHPORT_DEVICE void write_dropout_mask(const DropoutMaskParams& p, const Block& block) {
  const DropoutKey key = dropout_key(p.dropout.rng_state);
  const std::int64_t rows = std::int64_t{p.batch} * p.num_heads * p.q_len;
  const int groups = (p.kv_len + kPhiloxKeys - 1) / kPhiloxKeys * 4;
  for (std::int64_t i = block.index(); i < rows; i += block.count()) {
    const int row = static_cast<int>(i % p.q_len);
    const std::int64_t head = i / p.q_len;
    std::uint8_t* to =
        p.mask + head / p.num_heads * p.strides[0] + head % p.num_heads * p.strides[1] + row * p.strides[2];
    for (int group = block.thread(); group < groups; group += block.threads()) {
      const int first_key = group / 4 * kPhiloxKeys + group % 4 * 2;
      const Philox random = dropout_bits(key, static_cast<std::uint32_t>(head), row, first_key);
      for (int e = 0; e < 8; ++e) {
        const int at = first_key + e / 2 * 8 + e % 2;
        if (at < p.kv_len) to[at * p.strides[3]] = random.drops(e, p.dropout.drop_below << 16) ? 0 : 1;
      }
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
