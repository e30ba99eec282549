// Dropout by position: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the
// weight's position as its counter, so that every tile shape, target and pass drops the same weights.
//
// One call serves 16 weights of a query, 8 random bits each: of 64 keys, those whose number mod 8 is 2 c or 2 c + 1.
// The lanes of matrix fragments have such keys together.
#pragma once

#include <cstdint>

#include "common/device/attention/params.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

inline constexpr int kPhiloxKeys = 64;  // that four calls serve

struct Philox {
  std::uint32_t words[4];  // 16 bytes, the low byte of word 0 first
};

// What bytes are held against, four at a time.
struct DropLimit {
  std::uint32_t of_low_bits, of_high_bits;
};
// The limit of weights that are dropped where their byte is below `drop_below`, 0 to 255.
FLASHPORT_DEVICE DropLimit drop_limit(std::uint32_t drop_below) {
  return {(0x80 - (drop_below & 0x7f)) * 0x01010101u, drop_below < 0x80 ? 0xffffffffu : 0u};
}
// Bit 7 of each byte says whether the weight of that byte of `word` is kept.
FLASHPORT_DEVICE std::uint32_t kept_weights(std::uint32_t word, const DropLimit& limit) {
  const std::uint32_t low = (word & 0x7f7f7f7fu) + limit.of_low_bits;  // bit 7: the low seven bits reach the limit's
  return (word & low) | ((word | low) & limit.of_high_bits);           // the most of three: no byte is carried into
}

FLASHPORT_DEVICE Philox philox(const std::uint32_t (&counter)[4], std::uint64_t key) {
  std::uint32_t x[4] = {counter[0], counter[1], counter[2], counter[3]};
  std::uint32_t low = static_cast<std::uint32_t>(key), high = static_cast<std::uint32_t>(key >> 32);
  FLASHPORT_UNROLL(10)
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = multiply_wide(0xd2511f53u, x[0]), b = multiply_wide(0xcd9e8d57u, x[2]);
    const std::uint32_t next[4] = {static_cast<std::uint32_t>(b >> 32) ^ x[1] ^ low, static_cast<std::uint32_t>(b),
                                   static_cast<std::uint32_t>(a >> 32) ^ x[3] ^ high, static_cast<std::uint32_t>(a)};
    for (int i = 0; i < 4; ++i) x[i] = next[i];
    low += 0x9e3779b9u;
    high += 0xbb67ae85u;
  }
  return {{x[0], x[1], x[2], x[3]}};
}

// The seed and offset of a call.
struct DropoutKey {
  std::uint64_t seed, offset;
};
FLASHPORT_DEVICE DropoutKey dropout_key(const std::int64_t* rng_state) {
  return {static_cast<std::uint64_t>(rng_state[0]), static_cast<std::uint64_t>(rng_state[1])};
}

// The random bits of 16 weights, a byte each: of keys first_key + 8 * (i / 2) + i % 2 for i 0 to 15, where first_key
// mod 64 is 2 c with c 0 to 3; with other first keys those of the keys of the same 64. `head` counts the heads of all
// sequences.
FLASHPORT_DEVICE Philox dropout_bits(const DropoutKey& key, std::uint32_t head, int row, int first_key) {
  const auto group = static_cast<std::uint32_t>(first_key / kPhiloxKeys * 4 + first_key % 8 / 2);
  const std::uint32_t counter[4] = {group, static_cast<std::uint32_t>(row), head,
                                    static_cast<std::uint32_t>(key.offset)};
  return philox(counter, key.seed ^ (key.offset & 0xffffffff00000000u));
}

}  // namespace flashport::FLASHPORT_TARGET::attention
