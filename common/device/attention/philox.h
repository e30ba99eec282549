// Dropout by position: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the
// weight's position as its counter, so that every tile shape, target and pass drops the same weights.
//
// One call serves eight weights of a query, 16 random bits each: of 32 keys, those whose number mod 8 is 2 c or
// 2 c + 1. The lanes of matrix fragments have such keys together.
#pragma once

#include <cstdint>

#include "common/device/attention/params.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

inline constexpr int kPhiloxKeys = 32;  // that four calls serve

struct Philox {
  std::uint32_t words[4];  // eight halves, the low half of word 0 first

  // Whether weight `i` (0 to 7) of the call is dropped: its bits are below `limit`, of which the high half counts.
  FLASHPORT_DEVICE bool drops(int i, std::uint32_t limit) const {
    return (i % 2 == 0 ? words[i / 2] << 16 : words[i / 2]) < limit;
  }
};

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

// The random bits of eight weights: keys first_key + 8 * (i / 2) + i % 2 for i 0 to 7, where first_key mod 32 is 2 c
// with c 0 to 3. `head` counts the heads of all sequences.
FLASHPORT_DEVICE Philox dropout_bits(const DropoutKey& key, std::uint32_t head, int row, int first_key) {
  const auto group = static_cast<std::uint32_t>(first_key / kPhiloxKeys * 4 + first_key % 8 / 2);
  const std::uint32_t counter[4] = {group, static_cast<std::uint32_t>(row), head,
                                    static_cast<std::uint32_t>(key.offset)};
  return philox(counter, key.seed ^ (key.offset & 0xffffffff00000000u));
}

}  // namespace flashport::FLASHPORT_TARGET::attention
