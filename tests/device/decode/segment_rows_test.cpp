// Leaves of segments as the tile of AMD's kernels has them, against the reference's codecs: segments of random formats,
// lengths, pages and factors, rows of random bytes, and zeros where a leaf has no row and a row no dim.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#define FLASHPORT_TARGET host_words
#define FLASHPORT_TARGET_HEADER "tests/device/decode/rows_target.h"
#define FLASHPORT_WORDS_HEADER "tests/device/kv/word_verbs.h"
#include "hip/decode/segment_rows.h"
#include "tests/device/decode/random_segments.h"

namespace flashport::host_words::decode {
namespace {

double read_tile(std::uint16_t bits, MathType math) {
  return math == MathType::kBf16 ? to_float(BFloat16{bits}) : to_float(std::bit_cast<Half>(bits));
}

// Rounded once.
::testing::AssertionResult is_near(double x, double exact, MathType math) {
  const double bound = 1e-6 + std::fabs(exact) * (math == MathType::kBf16 ? 0x1.02p-8 : 0x1.02p-11);
  if (std::fabs(x - exact) <= bound) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << x << " in place of " << exact;
}

template <int kDims, MathType kMath, int kWaves>
void check_leaves(Call& call, int dims) {
  constexpr DecodeConfig kCfg{{kDims, kDims, 16, kMath, KvFormat::kAny, KvFormat::kAny}, {kWaves, 1, 1}};
  using Tile = WideTile<kCfg>;
  const auto tile = std::make_unique<Tile>();
  std::vector<Block> blocks;
  for (int i = 0; i < kWaves * kWaveSize; ++i) blocks.push_back({i, kWaves * kWaveSize});
  std::vector<SegmentRows<kCfg>> threads;
  for (const Block& block : blocks) threads.emplace_back(call.params(), block, *tile);
  const auto check = [&](const LeafCursor& at, std::uint16_t bits, int key, bool is_key, int dim) {
    const Segment& s = at.segment;
    const bool exists = key >= s.key_low && key < s.key_high && dim < dims;
    const double exact = exists ? call.value(s.seq, key, s.kv_head, is_key, dim) : 0.0;
    if (std::isnan(exact) || std::fabs(exact) > 65000) return;  // of e5m2, and where its products overflow
    ASSERT_TRUE(is_near(read_tile(bits, kMath), exact, kMath)) << key << " " << is_key << " " << dim;
  };
  for (int seq = 0; seq < kBatch; ++seq) {
    LeafCursor at(Range{});
    Segment& s = at.segment;
    s = {};
    s.seq = seq;
    s.kv_head = seq % kHeads;
    s.key_high = call.keys(seq);
    s.key_low = std::min(s.key_high, call.below(2) * call.below(40));
    s.last = s.leaves = leaf_count(0, s.key_high);
    for (at.leaf = 0; at.leaf < s.last; ++at.leaf) {
      for (auto& thread : threads) thread.look_up(at);
      for (auto& thread : threads) thread.touch();
      for (auto& thread : threads) thread.begin_leaf();
      for (int first = 0; first < kDims; first += Tile::kKeyDims) {
        std::memset(&tile->keys, 0xff, sizeof tile->keys);
        for (auto& thread : threads) thread.widen_keys(first);
        for (int key = 0; key < kLeafKeys; ++key) {
          for (int i = 0; i < Tile::kKeyDims; ++i) check(at, tile->keys[key][i], at.key() + key, true, first + i);
        }
      }
      for (int first = 0; first < kLeafKeys; first += Tile::kValues) {
        std::memset(&tile->values, 0xff, sizeof tile->values);
        for (auto& thread : threads) thread.widen_values(first);
        for (int key = 0; key < Tile::kValues; ++key) {
          for (int i = 0; i < kDims; ++i) check(at, tile->values[key][i], at.key() + first + key, false, i);
        }
      }
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

template <int kDims, MathType kMath, int kWaves>
void check_dims(int dims) {
  std::mt19937 random(static_cast<unsigned>(dims));
  for (int repeat = 0; repeat < 8; ++repeat) {
    SCOPED_TRACE(repeat);
    Call call(dims, random);
    check_leaves<kDims, kMath, kWaves>(call, dims);
  }
}

TEST(SegmentRows, AreTheReferencesInTheMathType) {
  for (const int dims : {16, 24, 72, 96, 104, 128}) check_dims<128, MathType::kFp16, 2>(dims);
  for (const int dims : {96, 120, 128}) check_dims<128, MathType::kBf16, 2>(dims);
}

TEST(SegmentRows, OfManyDimsComeInHalves) {
  check_dims<256, MathType::kFp16, 4>(192);
  for (const int dims : {256, 264, 512}) check_dims<512, MathType::kFp16, 4>(dims);
}

}  // namespace
}  // namespace flashport::host_words::decode
