// The weights that dropout keeps, as a mask [B, Hq, Sq, Sk] of bytes.
#pragma once

#include "common/device/attention/philox.h"

namespace flashport::FLASHPORT_TARGET::attention {

// A block takes rows of the mask, and a thread groups of 16 keys.
FLASHPORT_DEVICE void write_dropout_mask(const DropoutMaskParams& p, const Block& block) {
  const DropoutKey key = dropout_key(p.dropout.rng_state);
  const DropLimit limit = drop_limit(p.dropout.drop_below);
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
      for (int word = 0; word < 4; ++word) {
        const std::uint32_t kept = kept_weights(random.words[word], limit);
        for (int e = 0; e < 4; ++e) {
          const int at = first_key + word * 16 + e / 2 * 8 + e % 2;
          if (at < p.kv_len) to[at * p.strides[3]] = kept >> (8 * e + 7) & 1;
        }
      }
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
