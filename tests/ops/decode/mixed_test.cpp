// flash_decode_mixed against the oracle on what the segments' formats hold, and bit for bit against itself and against
// flash_decode where both see the same values.
#include <gtest/gtest.h>

#include <flashport/backend.h>
#include <flashport/decode.h>

#include <array>
#include <set>

#include "tests/ops/decode/mixed_call.h"
#include "tests/support/device.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

using reference::Type;

constexpr std::array kFormats = {Type::kF16,  Type::kBF16, Type::kE4M3, Type::kE4M3Fnuz, Type::kQ8_0,
                                 Type::kQ4_0, Type::kQ4_1, Type::kQ5_0, Type::kQ5_1,     Type::kIq4Nl};

void expect_right(const std::string& name, const MixedSpec& spec) {
  MixedCall call(spec);
  FLASHPORT_REQUIRE_SUPPORT(name, flashport::supports(call.query()));
  call.run();
  EXPECT_EQ(call.check(), "");
}

class MixedFormats : public testing::TestWithParam<Type> {};

// Every format of keys with every one of values, before a hot part of fp16.
TEST_P(MixedFormats, OfKeysWithEachOfValues) {
  for (const Type v : kFormats) {
    SCOPED_TRACE(type_name(v));
    MixedSpec spec;
    spec.segments = {{GetParam(), v, {70, 0, 64}}, {Type::kF16, Type::kF16, {30, 5, 65}}};
    if (options().emulator) spec.segments = {{GetParam(), v, {70}}, {Type::kF16, Type::kF16, {3}}};
    expect_right("mixed_formats_" + std::string(type_name(GetParam())) + "_" + type_name(v), spec);
  }
}
INSTANTIATE_TEST_SUITE_P(Ops, MixedFormats, testing::ValuesIn(kFormats),
                         [](const auto& info) { return std::string(type_name(info.param)); });

// Lengths at the borders of leaves: every combination of two segments, and some of three and four; in one launch, and
// each segment by its own kernel where it has one.
TEST(Mixed, LengthsAtTheBordersOfLeaves) {
  constexpr std::array<std::int64_t, 5> kLengths = {0, 1, 63, 64, 65};
  Random random(5);
  for (const int count : {2, 3, 4}) {
    MixedSpec spec;
    constexpr std::array kOf = {Type::kQ4_0, Type::kF16, Type::kQ8_0, Type::kE4M3};
    for (int i = 0; i < count; ++i) spec.segments.push_back({kOf[i], kOf[i], {}});
    const int sequences = options().emulator ? 6 : count == 2 ? 25 : 60;
    for (int n = 0; n < sequences; ++n) {
      for (int i = 0; i < count; ++i) {
        const std::int64_t place = count == 2 && !options().emulator ? (i == 0 ? n / 5 : n % 5) : random.below(5);
        spec.segments[i].lens.push_back(kLengths[place]);
      }
    }
    for (const bool by_segment : {false, true}) {
      SCOPED_TRACE(std::to_string(count) + " segments, by segment: " + std::to_string(by_segment));
      spec.by_segment = by_segment;
      expect_right("mixed_borders", spec);
    }
  }
}

TEST(Mixed, LayoutsAndPageSizesOfTheirOwn) {
  MixedSpec spec;
  spec.segments = {{Type::kQ8_0, Type::kQ5_1, {200, 3, 65}, Pages::kBlocks, 16},
                   {Type::kF16, Type::kE4M3, {70, 1, 0}, Pages::kTokens},
                   {Type::kQ4_0, Type::kIq4Nl, {33, 64, 7}, Pages::kHeadsFirst},
                   {Type::kF16, Type::kF16, {130, 128, 5}, Pages::kBlocks, 7}};
  expect_right("mixed_layouts", spec);
}

TEST(Mixed, Scales) {
  for (const Scales kind : {Scales::kOne, Scales::kHead, Scales::kRow, Scales::kGroup}) {
    for (const Pages pages : {Pages::kRows, Pages::kHeadsFirst, Pages::kTokens, Pages::kBlocks}) {
      SCOPED_TRACE(static_cast<int>(kind) * 10 + static_cast<int>(pages));
      MixedSpec spec;
      spec.segments = {{Type::kE4M3, Type::kE4M3, {70, 65}, pages, 16, kind}, {Type::kF16, Type::kF16, {30, 0}}};
      expect_right("mixed_scales", spec);
      if (options().emulator) break;
    }
  }
}

// A segment alone, too, where its scales are none of flash_decode's.
TEST(Mixed, OneSegmentWithAFactorForEachRow) {
  MixedSpec spec;
  spec.segments = {{Type::kE4M3, Type::kQ8_0, {130, 1}, Pages::kRows, 16, Scales::kRow}};
  expect_right("mixed_one_row_scales", spec);
}

struct Options {
  std::string name;
  MixedSpec spec;
};
std::vector<Options> option_cases() {
  const std::vector<SegmentSpec> two = {{Type::kQ8_0, Type::kQ4_0, {100, 64, 0, 3}},
                                        {Type::kF16, Type::kF16, {30, 1, 70, 5}, Pages::kBlocks, 16}};
  const std::vector<SegmentSpec> brain = {{Type::kQ4_1, Type::kE4M3, {100, 64, 0, 3}},
                                          {Type::kBF16, Type::kBF16, {30, 1, 70, 5}}};
  std::vector<Options> cases;
  const auto add = [&](const std::string& name, const std::vector<SegmentSpec>& segments) -> MixedSpec& {
    cases.push_back({name, {}});
    cases.back().spec.segments = segments;
    return cases.back().spec;
  };
  add("window", two).window_left = 40;
  add("window_inside_hot", two).window_left = 4;
  add("sinks", two).sinks = true;
  add("softcap", two).softcap = 5;
  add("alibi", two).alibi = true;
  {
    MixedSpec& s = add("tokens", two);
    s.q_len = 3;
    s.hq = 16;
    s.window_left = 33;
    s.sinks = true;
  }
  {
    MixedSpec& s = add("ragged", brain);
    s.q_len = 2;
    s.q = Type::kBF16;
    s.ragged = true;
    s.out_fp32 = true;
  }
  add("mask_fp16", two).mask = Type::kF16;
  {
    MixedSpec& s = add("mask_fp32_tokens", two);
    s.mask = Type::kF32;
    s.q_len = 4;
    s.mask_slopes = true;
    s.softcap = 8;
  }
  {
    MixedSpec& s = add("mask_broadcast_ragged", brain);
    s.mask = Type::kF16;
    s.q = Type::kBF16;
    s.mask_broadcasts = true;
    s.q_len = 3;
    s.ragged = true;
    s.sinks = true;
  }
  {
    MixedSpec& s = add("mask_window", two);
    s.mask = Type::kF32;
    s.window_left = 50;
  }
  for (const std::int64_t right : {0, 1}) {
    MixedSpec& s = add("mask_window_right_" + std::to_string(right), two);
    s.mask = Type::kF16;
    s.q_len = 4;
    s.window_right = right;
  }
  // Segments that kernels of flash_decode read.
  const std::vector<SegmentSpec> apart = {
      {Type::kQ8_0, Type::kQ8_0, {300, 0, 64, 0, 1000}, Pages::kBlocks, 16, Scales::kHead},
      {Type::kF16, Type::kF16, {64, 1, 0, 0, 65}, Pages::kTokens}};
  for (const bool by_segment : {false, true}) {
    const std::string name = by_segment ? "by_segment" : "in_one_launch";
    add(name, apart).by_segment = by_segment;
    MixedSpec& s = add(name + "_softcap_sinks", apart);
    s.by_segment = by_segment;
    s.softcap = 5;
    s.sinks = true;
  }
  {
    MixedSpec& s =
        add("by_segment_of_bytes", {{Type::kI8, Type::kE5M2, {300, 0, 65}, Pages::kBlocks, 16, Scales::kHead},
                                    {Type::kF16, Type::kF16, {64, 1, 5}, Pages::kTokens}});
    s.dk = s.dv = 128;
    s.by_segment = true;
  }
  {
    MixedSpec& s = add("by_segment_of_three", {{Type::kBF16, Type::kBF16, {4, 4, 1, 0}},
                                               {Type::kQ4_0, Type::kQ4_0, {300, 0, 65, 3}, Pages::kHeadsFirst},
                                               {Type::kBF16, Type::kBF16, {30, 1, 128, 0}, Pages::kBlocks, 16}});
    s.q = Type::kBF16;
    s.dk = s.dv = 128;
    s.hq = 16;
    s.out_fp32 = s.sinks = s.by_segment = true;
  }
  // On sm90a one kernel reads those without scales as they are stored, and another one on large caches.
  for (const std::int64_t room : {0, 100'000}) {
    for (const auto& [hot, blocks] : {std::pair(Type::kF16, Type::kQ8_0), std::pair(Type::kBF16, Type::kQ8_0),
                                      std::pair(Type::kBF16, Type::kQ4_0)}) {
      for (const Scales scales : {Scales::kNone, Scales::kHead}) {
        MixedSpec& s =
            add("by_segment_in_turn_" + std::string(type_name(hot)) + (blocks == Type::kQ4_0 ? "_q4_0" : "") +
                    (scales == Scales::kHead ? "_scaled" : "") + (room > 0 ? "_large" : ""),
                {{hot, hot, {4, 4, 1, 0}},
                 {blocks, blocks, {300, 0, 65, 3000}, Pages::kBlocks, 16, scales, room},
                 {hot, hot, {30, 1, 128, 700}, Pages::kBlocks, 16}});
        s.q = hot;
        s.dk = s.dv = 128;
        s.hq = 16;
        s.hkv = 4;
        s.softcap = 5;
        s.sinks = s.by_segment = true;
      }
    }
  }
  // With llama.cpp's mask, also over one segment; heads that are copied alone and rows that are no tile of eight.
  for (const Type blocks : {Type::kQ8_0, Type::kQ4_0}) {
    for (const std::int64_t kv_heads : {1, 2, 3}) {
      MixedSpec& s = add("by_segment_mask_" + std::string(type_name(blocks)) + "_" + std::to_string(kv_heads),
                         {{blocks, blocks, {300, 0, 65, 2000}, kv_heads == 2 ? Pages::kHeadsFirst : Pages::kRows},
                          {Type::kF16, Type::kF16, {33, 1, 0, 200}, Pages::kTokens}});
      s.dk = s.dv = 128;
      s.hkv = kv_heads;
      s.hq = 7 * kv_heads;
      s.mask = kv_heads == 3 ? Type::kF32 : Type::kF16;
      s.mask_slopes = s.by_segment = true;
      s.mask_broadcasts = kv_heads == 2;
      if (kv_heads == 1) s.segments.pop_back();
    }
  }
  for (const auto& [name, dk, dv] :
       {std::tuple("d128", 128, 128), std::tuple("d192x128", 192, 128), std::tuple("d96", 96, 96),
        std::tuple("d256", 256, 256), std::tuple("d512", 512, 512)}) {
    MixedSpec& s = add(name, two);
    s.dk = dk;
    s.dv = dv;
  }
  {
    MixedSpec& s = add("d72", {{Type::kE4M3, Type::kF16, {100, 64}}, {Type::kF16, Type::kF16, {30, 1}}});
    s.dk = s.dv = 72;
  }
  {
    MixedSpec& s = add("q_fp32", {{Type::kF16, Type::kQ8_0, {100, 64}}, {Type::kBF16, Type::kF32, {30, 1}}});
    s.q = Type::kF32;
  }
  return cases;
}

class MixedOptions : public testing::TestWithParam<Options> {};
TEST_P(MixedOptions, AgainstTheOracle) { expect_right("mixed_" + GetParam().name, GetParam().spec); }
INSTANTIATE_TEST_SUITE_P(Ops, MixedOptions, testing::ValuesIn(option_cases()),
                         [](const auto& info) { return info.param.name; });

// A call for each kernel: with bf16 or without, of each tile's head dims, with few query rows and with many.
TEST(MixedKernels, MatchTheOracle) {
  std::set<std::string> reached;
  for (const Type hot : {Type::kF16, Type::kBF16}) {
    for (const auto& [dk, dv] :
         {std::pair(64, 64), std::pair(128, 128), std::pair(192, 128), std::pair(256, 256), std::pair(512, 512)}) {
      for (const std::int64_t group : {4, 16}) {
        SCOPED_TRACE(std::string(type_name(hot)) + " " + std::to_string(dk) + " group " + std::to_string(group));
        MixedSpec spec;
        spec.q = hot;
        spec.hkv = 1;
        spec.hq = group;
        spec.dk = dk;
        spec.dv = dv;
        spec.segments = {{Type::kQ4_1, Type::kQ8_0, {130, 0, 64}}, {hot, hot, {63, 1, 70}}};
        if (options().emulator) spec.segments = {{Type::kQ4_1, Type::kQ8_0, {70}}, {hot, hot, {3}}};
        MixedCall call(spec);
        reached.insert(flashport::which_kernel(call.query()));
        call.run();
        EXPECT_EQ(call.check(), "");
      }
    }
  }
  for (const std::string& key : flashport::kernel_keys(query_target())) {
    if (key.starts_with("decode/") && key.find("/kv=any/") != std::string::npos) {
      EXPECT_TRUE(reached.contains(key)) << "no case runs " << key;
    }
  }
}

MixedSpec many_lengths(Type k, Type v) {
  MixedSpec spec;
  spec.segments = {{k, v, {300, 0, 64, 1000, 3, 129}, Pages::kBlocks, 16},
                   {Type::kF16, Type::kF16, {64, 1, 65, 200, 128, 0}}};
  if (options().emulator) {
    spec.segments[0].lens = {130, 0, 64};
    spec.segments[1].lens = {64, 1, 65};
  }
  spec.dk = spec.dv = 128;
  spec.by_segment = true;  // where no mask is
  return spec;
}

MixedSpec masked_lengths() {
  MixedSpec spec = many_lengths(Type::kQ4_0, Type::kQ8_0);
  spec.mask = Type::kF16;
  return spec;
}

// In one launch, and each segment by its own kernel.
TEST(Mixed, BitsDoNotDependOnTheBatch) {
  for (const MixedSpec& spec : {masked_lengths(), many_lengths(Type::kQ8_0, Type::kQ8_0)}) {
    MixedCall call(spec);
    FLASHPORT_REQUIRE_SUPPORT("mixed_batch", flashport::supports(call.query()));
    call.run();
    std::vector<std::vector<unsigned char>> together;
    for (std::int64_t b = 0; b < call.batch(); ++b) together.push_back(call.bits(b));
    for (const int limit : {1, 3, 0}) {
      flashport::set_multiprocessor_limit(limit);
      MixedCall again(spec);
      again.run();
      for (std::int64_t b = 0; b < call.batch(); ++b) EXPECT_TRUE(again.bits(b) == together[b]) << limit << " " << b;
    }
    flashport::set_multiprocessor_limit(0);
    MixedCall alone(spec);
    alone.run_each_alone();
    for (std::int64_t b = 0; b < call.batch(); ++b) EXPECT_TRUE(alone.bits(b) == together[b]) << b;
  }
}

// A segment that no sequence has keys in changes no bit of a call by segments.
TEST(Mixed, EmptySegmentsChangeNoBits) {
  for (const Type type : {Type::kQ8_0, Type::kQ4_0}) {
    SCOPED_TRACE(type_name(type));
    MixedSpec spec = many_lengths(type, type);
    spec.segments.push_back({type, type, std::vector<std::int64_t>(spec.segments[0].lens.size(), 0)});
    MixedCall call(spec), shorter(spec);
    FLASHPORT_REQUIRE_SUPPORT("mixed_empty_segment", flashport::supports(call.query()));
    if (call.kernels().size() != 2) GTEST_SKIP() << query_target() << " has no kernel for one of the formats";
    call.run();
    flashport::MixedDecodeArgs args = shorter.args();
    const std::int64_t bytes = flashport::mixed_workspace_size(args);
    args.by_segment = false;
    EXPECT_NE(flashport::mixed_workspace_size(args), bytes) << "one launch has other results to keep";
    args.by_segment = true;
    args.segments.pop_back();
    shorter.run(args);
    for (std::int64_t b = 0; b < call.batch(); ++b) EXPECT_TRUE(call.bits(b) == shorter.bits(b)) << b;
  }
}

// Where two segments hold what one cache would, nothing says where the border is; and on the CPU not that there is one,
// while on a GPU one segment alone has the kernel of its format.
TEST(Mixed, TwoSegmentsOfOneFormatAreOneCache) {
  constexpr std::int64_t kLength = 200, kBatch = 3;
  for (const Type type : {Type::kF16, Type::kBF16}) {
    MixedSpec spec;
    spec.q = type;
    spec.segments = {{type, type, std::vector<std::int64_t>(kBatch, kLength)}};
    MixedCall whole(spec);
    flashport::DecodeQuery query = whole.query();
    FLASHPORT_REQUIRE_SUPPORT("mixed_cut", flashport::supports(query));
    whole.run();
    const bool is_cpu = query.target.starts_with("cpu");
    std::vector<std::vector<unsigned char>> expected;
    for (std::int64_t b = 0; is_cpu && b < kBatch; ++b) expected.push_back(whole.bits(b));
    for (const std::int64_t cut : {0, 1, 63, 64, 65, 128, 199, 200}) {
      MixedCall parts(spec);
      Tensor first(Type::kI32, {kBatch}), second(Type::kI32, {kBatch});
      for (std::int64_t b = 0; b < kBatch; ++b) first.set({b}, cut), second.set({b}, kLength - cut);
      first.upload();
      second.upload();
      flashport::MixedDecodeArgs args = parts.args();
      args.segments.push_back(args.segments[0]);
      args.segments[0].seqlens = first.view();
      args.segments[1].seqlens = second.view();
      for (flashport::TensorView* view : {&args.segments[1].k, &args.segments[1].v}) {
        view->data = static_cast<char*>(view->data) + cut * view->strides[1] * 2;
        view->shape[1] -= cut;
      }
      parts.run(args);
      if (expected.empty()) {
        for (std::int64_t b = 0; b < kBatch; ++b) expected.push_back(parts.bits(b));
      }
      for (std::int64_t b = 0; b < kBatch; ++b) EXPECT_TRUE(parts.bits(b) == expected[b]) << cut << " " << b;
    }
  }
}

// A segment alone is a call of flash_decode.
TEST(Mixed, OneSegmentIsFlashDecode) {
  for (const auto& [k, v] :
       {std::pair(Type::kF16, Type::kF16), std::pair(Type::kQ8_0, Type::kQ8_0), std::pair(Type::kQ4_0, Type::kF16),
        std::pair(Type::kBF16, Type::kF16), std::pair(Type::kQ4_0, Type::kBF16)}) {
    MixedSpec spec;
    spec.segments = {{k, v, {200, 1, 65}, Pages::kRows, 16, Scales::kHead}};
    MixedCall call(spec), other(spec);
    const flashport::DecodeQuery query = as_flash_decode(call.query(), spec.segments[0]);
    FLASHPORT_REQUIRE_SUPPORT(std::string("segment_alone_") + type_name(k) + "_" + type_name(v),
                              flashport::supports(query));
    call.run();
    const flashport::DecodeArgs args = as_flash_decode(other.args());
    other.run([&] { flashport::flash_decode(args); });
    for (std::int64_t b = 0; b < call.batch(); ++b) EXPECT_TRUE(call.bits(b) == other.bits(b)) << b;
  }
}

TEST(Mixed, CallersWorkspace) {
  for (const MixedSpec& spec : {masked_lengths(), many_lengths(Type::kQ8_0, Type::kQ8_0)}) {
    MixedCall call(spec), other(spec);
    FLASHPORT_REQUIRE_SUPPORT("mixed_workspace", flashport::supports(call.query()));
    call.run();
    flashport::MixedDecodeArgs args = other.args();
    const std::int64_t bytes = flashport::mixed_workspace_size(args);
    ASSERT_GT(bytes, 0);
    Tensor workspace(Type::kQ8_0, {bytes});
    std::fill_n(workspace.address({0}), bytes, static_cast<unsigned char>(0));
    workspace.upload();
    args.workspace = workspace.view();
    for (int repeat = 0; repeat < 2; ++repeat) {
      other.run(args);
      for (std::int64_t b = 0; b < call.batch(); ++b) EXPECT_TRUE(call.bits(b) == other.bits(b)) << b;
    }
    workspace.download();
    EXPECT_EQ(workspace.damage(), "");
  }
}

}  // namespace
}  // namespace flashport_test
