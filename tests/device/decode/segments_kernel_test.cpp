// Kernels of sm90a that read segments one after the other (segments_kernel.h), from the public call to the output, by
// their own text on a multiprocessor of the host (machine.h).
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
constexpr char kSmall[] = "decode_segments/bf16/kv=q8_0/hd128/r8/sm90a";
constexpr char kLarge[] = "decode_segments/bf16/kv=q8_0/hd128/r8/large/sm90a";
constexpr char kSmallOfQ4[] = "decode_segments/bf16/kv=q4_0/hd128/r8/sm90a";
constexpr char kLargeOfQ4[] = "decode_segments/bf16/kv=q4_0/hd128/r8/large/sm90a";
constexpr std::int64_t kMuchRoom = 200'000;

// Blocks of q8_0 or q4_0, then `hot` of bf16 behind them.
MixedSpec spec_of(const Lengths& old, const Lengths& hot, std::int64_t kv_heads, Type blocks = Type::kQ8_0) {
  MixedSpec spec;
  spec.q = Type::kBF16;
  spec.dk = spec.dv = 128;
  spec.hq = 4 * kv_heads;
  spec.hkv = kv_heads;
  spec.segments = {{blocks, blocks, old, Pages::kBlocks}, {Type::kBF16, Type::kBF16, hot, Pages::kTokens}};
  spec.by_segment = true;
  return spec;
}

void expect_right(const MixedSpec& spec, const char* kernel) {
  MixedCall call(spec);
  model().launched.clear();
  ASSERT_NO_THROW(call.run()) << "seed " << model().seed - 1;
  EXPECT_EQ(model().launched, (std::vector<std::string>{kernel, "decode_segments_combine/sm90a"}));
  EXPECT_EQ(call.check(), "") << "seed " << model().seed - 1;
}

TEST(KernelsOfSegments, Lengths) {
  const std::pair<Lengths, Lengths> kLengths[] = {
      {{0}, {0}},     {{1}, {0}}, {{0}, {1}}, {{63, 64, 65}, {1, 0, 64}}, {{129, 0, 300}, {127, 128, 129}},
      {{1500}, {700}}};
  for (const auto& [old, hot] : kLengths) {
    for (const int blocks : {1, 2, 5, 64}) {
      flashport::set_multiprocessor_limit(blocks);
      SCOPED_TRACE(std::to_string(old[0]) + " + " + std::to_string(hot[0]) + ", " + std::to_string(blocks));
      expect_right(spec_of(old, hot, blocks == 2 ? 4 : 2), kSmall);
      expect_right(spec_of(old, hot, blocks == 2 ? 4 : 2, Type::kQ4_0), kSmallOfQ4);
    }
  }
}

// Teams of a block copy the heads of a row at once, or each its own.
TEST(KernelsOfSegments, LargeCaches) {
  for (const std::int64_t kv_heads : {4, 8}) {
    for (const int blocks : {1, 3}) {
      flashport::set_multiprocessor_limit(blocks);
      for (const Type format : {Type::kQ8_0, Type::kQ4_0}) {
        MixedSpec spec = spec_of({700, 1, 300}, {65, 130, 0}, kv_heads, format);
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
    flashport::set_multiprocessor_limit(blocks);
    MixedSpec spec = spec_of({200, 0, 65}, {64, 3, 130}, 4);
    spec.segments.insert(spec.segments.begin(), {Type::kBF16, Type::kBF16, {4, 4, 0}});
    spec.segments.insert(spec.segments.begin() + 2, {Type::kQ8_0, Type::kQ8_0, {300, 1, 0}, Pages::kTokens});
    for (const int i : {1, 2}) spec.segments[static_cast<std::size_t>(i)].room = room;
    spec.segments[1].scales = spec.segments[2].scales = Scales::kHead;
    spec.softcap = 5;
    spec.sinks = spec.out_fp32 = true;
    expect_right(spec, room > 0 ? kLarge : kSmall);
  }
}

// Nor on whether teams help each other, as they do where blocks are many.
TEST(KernelsOfSegments, BitsDoNotDependOnTheBatchNorOnTheBlocksNorOnTheCache) {
  std::vector<std::vector<unsigned char>> bits;
  for (const std::int64_t room : {std::int64_t{0}, kMuchRoom}) {
    MixedSpec spec = spec_of({300, 1, 1500}, {64, 129, 700}, 4);
    spec.segments[0].room = room;
    MixedCall call(spec);
    for (const bool alone : {false, true}) {
      for (const int blocks : {1, 3, 6, 64}) {
        flashport::set_multiprocessor_limit(blocks);
        model().launched.clear();
        alone ? call.run_each_alone() : call.run();
        EXPECT_TRUE(model().launched[0] == kSmall || model().launched[0] == kLarge) << model().launched[0];
        for (std::int64_t b = 0; b < call.batch(); ++b) {
          if (bits.size() < 3) bits.push_back(call.bits(b));
          EXPECT_TRUE(call.bits(b) == bits[static_cast<std::size_t>(b)])
              << b << ", alone " << alone << ", " << blocks << " blocks, seed " << model().seed - 1;
        }
      }
    }
  }
}

// One with room for many keys in a batch and one without have one kernel.
TEST(KernelsOfSegments, SegmentsOfDifferentRoom) {
  for (const int blocks : {3, 64}) {  // of as many, a tile's blocks of the second launch have idle threads
    flashport::set_multiprocessor_limit(blocks);
    MixedSpec spec = spec_of({300, 1, 65}, {64, 129, 0}, 4);
    spec.segments.push_back({Type::kQ8_0, Type::kQ8_0, {65, 0, 130}, Pages::kBlocks, 16, Scales::kNone, kMuchRoom});
    expect_right(spec, kSmall);
  }
}

}  // namespace
}  // namespace flashport_test
