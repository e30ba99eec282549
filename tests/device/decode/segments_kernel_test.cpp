// Kernels of sm90a that read segments of blocks and of 16 bits as they are stored (segment_tiles.h), from the public
// call to the output, by their own text on a multiprocessor of the host (machine.h).
#include <gtest/gtest.h>

#include <flashport/backend.h>
#include <flashport/decode.h>

#include "tests/device/machine/model_backend.h"
#include "tests/ops/decode/mixed_call.h"

namespace flashport_test {
namespace {

using flashport::machine::model;
using reference::Type;

using Lengths = std::vector<std::int64_t>;
constexpr char kSmall[] = "decode_segments/fp16/kv=q8_0/hd128/r8/sm90a";
constexpr char kLarge[] = "decode_segments/fp16/kv=q8_0/hd128/r8/large/sm90a";
constexpr char kSmallOfQ4[] = "decode_segments/fp16/kv=q4_0/hd128/r8/sm90a";
constexpr char kLargeOfQ4[] = "decode_segments/fp16/kv=q4_0/hd128/r8/large/sm90a";
constexpr std::int64_t kMuchRoom = 200'000;

// Blocks of q8_0 or q4_0, then `hot` of 16 bits after them.
MixedSpec spec_of(const Lengths& old, const Lengths& hot, std::int64_t kv_heads, Type blocks = Type::kQ8_0,
                  Type wide = Type::kBF16) {
  MixedSpec spec;
  spec.q = wide;
  spec.dk = spec.dv = 128;
  spec.hq = 4 * kv_heads;
  spec.hkv = kv_heads;
  spec.segments = {{blocks, blocks, old, Pages::kBlocks}, {wide, wide, hot, Pages::kTokens}};
  spec.by_segment = true;
  return spec;
}

void expect_right(const MixedSpec& spec, const std::string& kernel) {
  MixedCall call(spec);
  model().launched.clear();
  ASSERT_NO_THROW(call.run()) << "seed " << model().seed - 1;
  ASSERT_FALSE(model().launched.empty());
  EXPECT_EQ(model().launched[0], kernel);
  if (model().launched.size() > 1) {
    EXPECT_EQ(model().launched[1], "decode_segments_combine/sm90a");
  }
  EXPECT_EQ(call.check(), "") << "seed " << model().seed - 1;
}

TEST(KernelsOfSegments, FewTilesAreCombinedByAnotherLaunch) {
  flashport::set_multiprocessor_limit(64);
  MixedCall call(spec_of({9000}, {2000}, 2));
  model().launched.clear();
  ASSERT_NO_THROW(call.run());
  EXPECT_EQ(model().launched, (std::vector<std::string>{kSmall, "decode_segments_combine/sm90a"}));
  EXPECT_EQ(call.check(), "");
}

TEST(KernelsOfSegments, HeadsOfAGroup) {
  flashport::set_multiprocessor_limit(3);
  for (const std::int64_t group : {1, 3, 5, 8}) {
    MixedSpec spec = spec_of({129, 0, 300}, {31, 32, 65}, 2);
    spec.hq = 2 * group;
    expect_right(spec, kSmall);
  }
}

TEST(KernelsOfSegments, Lengths) {
  const std::pair<Lengths, Lengths> kLengths[] = {
      {{0}, {0}}, {{1}, {0}}, {{0}, {1}}, {{63, 64, 65}, {1, 0, 64}}, {{129, 0, 300}, {31, 32, 33}}, {{1500}, {700}}};
  for (const auto& [old, hot] : kLengths) {
    for (const int blocks : {1, 2, 5, 64}) {
      flashport::set_multiprocessor_limit(blocks);
      SCOPED_TRACE(std::to_string(old[0]) + " + " + std::to_string(hot[0]) + ", " + std::to_string(blocks));
      const std::int64_t kv_heads = blocks == 2 ? 4 : 2;
      expect_right(spec_of(old, hot, kv_heads), kSmall);
      expect_right(spec_of(old, hot, kv_heads, Type::kQ4_0, Type::kF16), kSmallOfQ4);
    }
  }
}

// Heads that are no multiple of a block's teams, or do not lie side by side, have a block each.
TEST(KernelsOfSegments, HeadsOfOneTeam) {
  for (const std::int64_t kv_heads : {1, 3}) {
    for (const int blocks : {1, 5}) {
      flashport::set_multiprocessor_limit(blocks);
      expect_right(spec_of({129, 0, 300}, {31, 32, 65}, kv_heads), kSmall);
      expect_right(spec_of({129, 0, 300}, {31, 32, 65}, kv_heads, Type::kQ4_0), kSmallOfQ4);
    }
  }
  MixedSpec spec = spec_of({129, 0, 300}, {31, 32, 65}, 4);
  for (SegmentSpec& s : spec.segments) s.pages = Pages::kHeadsFirst;
  expect_right(spec, kSmall);
}

// Teams of a block copy the heads of a row at once.
TEST(KernelsOfSegments, LargeCaches) {
  for (const std::int64_t kv_heads : {4, 8}) {
    for (const int blocks : {1, 3}) {
      flashport::set_multiprocessor_limit(blocks);
      for (const Type format : {Type::kQ8_0, Type::kQ4_0}) {
        MixedSpec spec = spec_of({700, 1, 300}, {65, 130, 0}, kv_heads, format, blocks == 1 ? Type::kF16 : Type::kBF16);
        spec.segments[0].room = kMuchRoom;
        expect_right(spec, format == Type::kQ8_0 ? kLarge : kLargeOfQ4);
        spec.segments[0].pages = Pages::kTokens;
        expect_right(spec, format == Type::kQ8_0 ? kLarge : kLargeOfQ4);
      }
    }
  }
}

// The first tokens and the newest ones in 16 bits, and two parts of blocks between them.
TEST(KernelsOfSegments, FourSegmentsWithOptions) {
  for (const auto& [room, blocks] :
       {std::pair(std::int64_t{0}, 2), std::pair(kMuchRoom, 2), std::pair(kMuchRoom, 64)}) {
    for (const bool has_mask : {false, true}) {
      flashport::set_multiprocessor_limit(blocks);
      MixedSpec spec = spec_of({200, 0, 65}, {64, 3, 130}, 4);
      spec.segments.insert(spec.segments.begin(), {Type::kBF16, Type::kBF16, {4, 4, 0}});
      spec.segments.insert(spec.segments.begin() + 2, {Type::kQ8_0, Type::kQ8_0, {300, 1, 0}, Pages::kTokens});
      for (const int i : {1, 2}) spec.segments[static_cast<std::size_t>(i)].room = room;
      spec.softcap = 5;
      spec.sinks = spec.out_fp32 = true;
      if (has_mask) spec.mask = room > 0 ? Type::kF16 : Type::kF32;
      spec.mask_slopes = has_mask;
      expect_right(spec, room > 0 && !has_mask ? kLarge : kSmall);
    }
  }
}

// A mask over blocks alone is read by the same kernel.
TEST(KernelsOfSegments, MaskOverOneSegment) {
  flashport::set_multiprocessor_limit(3);
  MixedSpec spec = spec_of({200, 0, 65}, {}, 2);
  spec.segments.pop_back();
  spec.mask = Type::kF16;
  expect_right(spec, kSmall);
}

// Nor on whether teams help each other, as they do where blocks are many.
TEST(KernelsOfSegments, BitsDoNotDependOnTheBatchNorOnTheBlocksNorOnTheCache) {
  for (const Type format : {Type::kQ8_0, Type::kQ4_0}) {
    std::vector<std::vector<unsigned char>> bits;
    for (const std::int64_t room : {std::int64_t{0}, kMuchRoom}) {
      MixedSpec spec = spec_of({300, 1, 1500}, {64, 129, 700}, 4, format);
      spec.segments[0].room = room;
      MixedCall call(spec);
      for (const bool alone : {false, true}) {
        for (const int blocks : {1, 3, 6, 64}) {
          flashport::set_multiprocessor_limit(blocks);
          model().launched.clear();
          alone ? call.run_each_alone() : call.run();
          const bool is_q8 = format == Type::kQ8_0;
          EXPECT_EQ(model().launched[0], room > 0 ? (is_q8 ? kLarge : kLargeOfQ4) : (is_q8 ? kSmall : kSmallOfQ4));
          for (std::int64_t b = 0; b < call.batch(); ++b) {
            if (bits.size() < 3) bits.push_back(call.bits(b));
            EXPECT_TRUE(call.bits(b) == bits[static_cast<std::size_t>(b)])
                << b << ", alone " << alone << ", " << blocks << " blocks, seed " << model().seed - 1;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashport_test
