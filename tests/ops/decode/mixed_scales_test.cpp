// Caches whose scales lie beside them, one for each row, each group of values, each head or all keys, by
// flash_decode_segments and by flash_decode: against the oracle, and with the bits of other launches.
#include <gtest/gtest.h>

#include <flashport/backend.h>
#include <flashport/decode.h>

#include <algorithm>
#include <array>

#include "tests/ops/decode/call.h"
#include "tests/ops/decode/mixed_call.h"
#include "tests/support/device.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

using reference::Type;

// Scales that lie beside its cache take a call of flash_decode to the kernel of segments, where none reads them
// natively, and to its bits.
TEST(Mixed, FlashDecodeReadsScalesBesideItsCache) {
  constexpr std::array kTypes = {Type::kI8, Type::kI4, Type::kE4M3, Type::kE5M2};
  int number = 0;
  for (const Type type : kTypes) {
    for (const Pages pages : {Pages::kRows, Pages::kHeadsFirst, Pages::kTokens, Pages::kBlocks}) {
      MixedSpec spec;
      spec.segments = {{type, type, {200, 1, 65}, pages, 16, number++ % 2 == 0 ? Scales::kGroup : Scales::kRow}};
      MixedCall call(spec), other(spec);
      SCOPED_TRACE(std::string(type_name(type)) + " " + std::to_string(static_cast<int>(pages)));
      const flashport::DecodeQuery query = as_flash_decode(call.query(), spec.segments[0]);
      FLASHPORT_REQUIRE_SUPPORT("decode_scales_beside", flashport::supports(query));
      const std::string kernel = flashport::which_kernel(query);
      if (!reads_scales_beside(kernel)) {
        EXPECT_EQ(kernel, flashport::which_kernel(call.query()));
      }
      flashport::DecodeArgs args = as_flash_decode(call.args());
      call.run([&] { flashport::flash_decode(args); });
      EXPECT_EQ(call.check(), "");
      other.run();
      for (std::int64_t b = 0; b < call.batch(); ++b) EXPECT_TRUE(call.bits(b) == other.bits(b)) << b;
      args.num_splits = 3;
      call.run([&] { flashport::flash_decode(args); });
      EXPECT_EQ(call.check(), "");
      if (options().emulator) break;
    }
  }
}

// One scale of all keys, beside one for each group of values of V.
TEST(Mixed, FlashDecodeReadsScalesOfTwoKinds) {
  MixedSpec spec;
  spec.segments = {{Type::kI8, Type::kI8, {130, 7}, Pages::kTokens, 16, Scales::kGroup}};
  MixedCall call(spec);
  FLASHPORT_REQUIRE_SUPPORT("decode_scales_beside",
                            flashport::supports(as_flash_decode(call.query(), spec.segments[0])));
  Tensor one(Type::kF32, {1});
  one.set({0}, 0.5);
  one.upload();
  flashport::DecodeArgs args = as_flash_decode(call.args());
  args.k_scale = one.view();
  call.run([&] { flashport::flash_decode(args); });
  const std::vector<unsigned char> got = call.bits(0);
  flashport::MixedDecodeArgs mixed = call.args();
  mixed.segments[0].k_scale = one.view();
  call.run(mixed);
  EXPECT_TRUE(call.bits(0) == got);
}

// One group of a whole row is a scale of the row.
TEST(Mixed, ScalesOfRowsMayHaveAnAxisOfOne) {
  MixedSpec spec;
  spec.dk = spec.dv = 128;
  spec.segments = {{Type::kI8, Type::kI8, {130, 7}, Pages::kTokens, 16, Scales::kRow}};
  MixedCall call(spec);
  FLASHPORT_REQUIRE_SUPPORT("mixed_factors", flashport::supports(call.query()));
  call.run();
  EXPECT_EQ(call.check(), "");
  const std::vector<unsigned char> got = call.bits(0);
  flashport::MixedDecodeArgs args = call.args();
  for (std::optional<flashport::TensorView>* scale : {&args.segments[0].k_scale, &args.segments[0].v_scale}) {
    flashport::TensorView& view = **scale;
    view.shape[view.rank] = view.strides[view.rank] = 1;
    ++view.rank;
  }
  call.run(args);
  EXPECT_TRUE(call.bits(0) == got);
}

// Caches as LightLLM has them, with a factor of fp16 for each eight values, and of bytes with a factor for each row,
// for each head, for all or without: some targets read some of them natively. Heads that are copied together and heads
// that are not, chunks, splits, options, and several tiles of rows.
struct Factored {
  Type k, v;
  Scales scales;
};
class MixedFactors : public testing::TestWithParam<Factored> {};

// Whether the target has a kernel whose key has `part`.
bool has_kernel(const std::string& part) {
  return std::ranges::any_of(flashport::kernel_keys(query_target()),
                             [&](const std::string& key) { return key.find(part) != std::string::npos; });
}

TEST_P(MixedFactors, HeadsLengthsAndOptions) {
  struct Shape {
    std::int64_t hq, hkv, q_len;
    std::vector<std::int64_t> lens;
    Pages pages;
    bool options = false;
  };
  const std::vector<Shape> kAll = {
      {16, 4, 1, {300, 1, 65, 0}, Pages::kBlocks},     {32, 8, 1, {130, 64, 63}, Pages::kRows},
      {12, 3, 1, {129, 300}, Pages::kTokens, true},    {8, 2, 1, {70, 128}, Pages::kHeadsFirst},
      {4, 4, 1, {200, 200, 200, 130}, Pages::kTokens}, {16, 1, 1, {1100}, Pages::kBlocks},
      {8, 2, 4, {200, 67, 4}, Pages::kBlocks, true},   {16, 1, 4, {130, 67, 4}, Pages::kRows}};
  const std::vector<Shape> kFew = {{16, 4, 1, {300, 1, 65, 0}, Pages::kBlocks},
                                   {6, 3, 1, {129, 65}, Pages::kTokens, true},
                                   {16, 1, 2, {67, 2}, Pages::kHeadsFirst}};
  for (const Shape& s : options().emulator ? kFew : kAll) {
    SCOPED_TRACE(std::to_string(s.hkv) + " heads");
    MixedSpec spec;
    spec.q = s.hkv % 3 == 0 ? Type::kBF16 : Type::kF16;
    spec.dk = spec.dv = 128;
    spec.hq = s.hq;
    spec.hkv = s.hkv;
    spec.q_len = s.q_len;
    if (s.options) spec.softcap = 20, spec.window_left = 90, spec.sinks = spec.alibi = true;
    spec.segments = {{GetParam().k, GetParam().v, s.lens, s.pages, 16, GetParam().scales}};
    MixedCall call(spec), one_by_one(spec);
    FLASHPORT_REQUIRE_SUPPORT("mixed_factors", flashport::supports(call.query()));
    call.run();
    EXPECT_EQ(call.check(), "");
    if (are_of_groups(GetParam().scales)) {  // natively where the target does, in tiles of many rows for many
      const std::string native = std::string("/kv=") + (GetParam().k == Type::kI8 ? "int8" : "int4") + "/hd128/";
      const std::string wide = s.hq / s.hkv * s.q_len > 16 ? native + "r64/" : native;
      const std::string kernel = flashport::which_kernel(as_flash_decode(call.query(), spec.segments[0]));
      EXPECT_TRUE(!has_kernel(native) || kernel.find(has_kernel(wide) ? wide : native) != std::string::npos) << kernel;
    }
    one_by_one.run_each_alone();
    for (std::int64_t b = 0; b < call.batch(); ++b) EXPECT_TRUE(one_by_one.bits(b) == call.bits(b)) << b;
    if (s.q_len == 1) {
      flashport::DecodeArgs args = as_flash_decode(call.args());
      if (!s.options) {
        args.num_splits = 3;
        call.run([&] { flashport::flash_decode(args); });
        EXPECT_EQ(call.check(), "");
      }
    }
  }
}

// A cache with room for many keys has the bits of others.
TEST_P(MixedFactors, LargeCachesHaveTheBitsOfOthers) {
  MixedSpec spec;
  spec.dk = spec.dv = 128;
  spec.hq = 32;
  spec.hkv = 8;
  const std::vector<std::int64_t> few = {130, 1}, lens = {300, 1, 700, 0, 5100};
  spec.segments = {
      {GetParam().k, GetParam().v, options().emulator ? few : lens, Pages::kBlocks, 16, GetParam().scales}};
  MixedCall small(spec);
  FLASHPORT_REQUIRE_SUPPORT("mixed_factors", flashport::supports(small.query()));
  small.run();
  spec.segments[0].room = 70'000;
  MixedCall large(spec);
  large.run();
  EXPECT_EQ(large.check(), "");
  for (std::int64_t b = 0; b < small.batch(); ++b) EXPECT_TRUE(small.bits(b) == large.bits(b)) << b;
}

INSTANTIATE_TEST_SUITE_P(Codes, MixedFactors,
                         testing::Values(Factored{Type::kI8, Type::kI8, Scales::kHalfGroup},
                                         Factored{Type::kI4, Type::kI4, Scales::kHalfGroup},
                                         Factored{Type::kI8, Type::kI8, Scales::kRow},
                                         Factored{Type::kI8, Type::kE4M3, Scales::kRow},
                                         Factored{Type::kE4M3, Type::kE4M3, Scales::kTurnedRow},
                                         Factored{Type::kE5M2, Type::kE4M3Fnuz, Scales::kTurnedRow},
                                         Factored{Type::kI8, Type::kI8, Scales::kHead},
                                         Factored{Type::kI8, Type::kE5M2, Scales::kOne},
                                         Factored{Type::kE4M3Fnuz, Type::kE4M3, Scales::kNone}),
                         [](const auto& info) {
                           return std::string(type_name(info.param.k)) + "_" + type_name(info.param.v) + "_" +
                                  scales_name(info.param.scales);
                         });

}  // namespace
}  // namespace flashport_test
