// The random numbers of dropout: published known answers, and which of them a weight has.
#define FLASHPORT_TARGET wave
#define FLASHPORT_TARGET_HEADER "tests/device/attention/wave_target.h"
#include "common/device/attention/philox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

#include "tests/reference/attention.h"

namespace flashport::wave::attention {
namespace {

// Random123's own (kat_vectors, "philox4x32 10").
TEST(DevicePhilox, KnownAnswers) {
  const struct {
    std::uint32_t counter[4];
    std::uint64_t key;
    std::uint32_t words[4];
  } rows[] = {
      {{0, 0, 0, 0}, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       0xffffffffffffffff,
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       0x299f31d0a4093822,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const auto& row : rows) {
    const Philox found = philox(row.counter, row.key);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(found.words[i], row.words[i]);
  }
}

// Every key of a row has one byte of one call, and that is the oracle's.
TEST(DevicePhilox, EveryKeyHasBitsOfItsOwn) {
  const reference::Dropout oracle{0.5, -17, (std::int64_t{9} << 32) + 5};
  const std::int64_t state[] = {oracle.seed, oracle.offset};
  const DropoutKey key = dropout_key(state);
  std::set<int> keys;
  for (int first = 0; first < 192; first += 64) {
    for (int call = 0; call < 4; ++call) {
      const Philox random = dropout_bits(key, 3, 70, first + 2 * call);
      for (int i = 0; i < 16; ++i) {
        const int at = first + 2 * call + 8 * (i / 2) + i % 2;
        EXPECT_TRUE(keys.insert(at).second) << at;
        const std::uint32_t kept = kept_weights(random.words[i / 4], drop_limit(128));
        EXPECT_EQ((kept >> (8 * (i % 4) + 7) & 1) != 0, oracle.keeps(3, 70, at)) << at;
      }
      // The second half of 64 keys has the bits of the same call.
      const Philox same = dropout_bits(key, 3, 70, first + 32 + 2 * call);
      EXPECT_TRUE(std::equal(random.words, random.words + 4, same.words));
    }
  }
  EXPECT_EQ(keys.size(), 192u);
}

// All bytes and limits, whatever the neighbours are.
TEST(DevicePhilox, KeepsWhatReachesTheLimit) {
  for (unsigned below = 0; below < 256; ++below) {
    const DropLimit limit = drop_limit(below);
    for (unsigned byte = 0; byte < 256; ++byte) {
      const unsigned bytes[] = {byte, byte ^ 0xff, 0x80 ^ byte, 0xff};
      std::uint32_t word = 0;
      for (int i = 0; i < 4; ++i) word |= bytes[i] << 8 * i;
      const std::uint32_t kept = kept_weights(word, limit);
      for (int i = 0; i < 4; ++i)
        ASSERT_EQ(kept >> (8 * i + 7) & 1, bytes[i] >= below ? 1u : 0u) << below << " " << byte;
    }
  }
}

}  // namespace
}  // namespace flashport::wave::attention
