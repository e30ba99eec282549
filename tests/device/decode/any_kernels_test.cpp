// Kernels of any formats and those that read factors, by their own text on a multiprocessor of the host, as
// kernels_test.cpp has those of one pair of formats.
#include <gtest/gtest.h>

#include <flashport/decode.h>

#include "tests/device/decode/lengths.h"
#include "tests/device/machine/model_backend.h"
#include "tests/ops/decode/mixed_call.h"
#include "tests/reference/blocks.h"

namespace flashport_test {
namespace {

using flashport::machine::model;
using reference::Type;

void expect_right(const MixedSpec& spec, const std::string& kernel) {
  MixedCall call(spec);
  model().launched.clear();
  ASSERT_NO_THROW(call.run()) << "seed " << model().seed - 1;
  ASSERT_FALSE(model().launched.empty());
  EXPECT_EQ(model().launched.front(), "decode/" + kernel + "/sm90a");  // before one that combines
  EXPECT_EQ(call.check(), "") << "seed " << model().seed - 1;
}

constexpr Type kFormats[] = {Type::kF16,  Type::kE4M3, Type::kE4M3Fnuz, Type::kQ8_0, Type::kQ4_0,
                             Type::kQ4_1, Type::kQ5_0, Type::kQ5_1,     Type::kIq4Nl};

MixedSpec spec_of(std::int64_t dim, std::int64_t kv_heads) {
  MixedSpec spec;
  spec.dk = spec.dv = dim;
  spec.hq = 4 * kv_heads;
  spec.hkv = kv_heads;
  return spec;
}

TEST(KernelsOfAnyFormats, OneSegmentOfEachFormat) {
  for (const Type format : kFormats) {
    SCOPED_TRACE(type_name(format));
    for (const int blocks : {1, 2}) {
      set_blocks(blocks);
      MixedSpec spec = spec_of(128, 2);
      spec.segments = {{format, format, {65, 0, 300}, Pages::kBlocks}};
      // Else a kernel of the very format, of blocks or of bytes reads it.
      spec.segments[0].scales = reference::is_of_bytes(format) ? Scales::kGroup : Scales::kRow;
      expect_right(spec, "fp16/kv=any/hd128/r8");
    }
  }
}

TEST(KernelsOfAnyFormats, FactorsOfRowsAndGroups) {
  set_blocks(2);
  for (const Type format : {Type::kI8, Type::kI4, Type::kE4M3, Type::kE5M2}) {
    SCOPED_TRACE(type_name(format));
    for (const Scales scales : {Scales::kRow, Scales::kGroup}) {
      MixedSpec spec = spec_of(128, 2);
      spec.segments = {{format, format, {65, 1, 300}, Pages::kBlocks, 16, scales}};
      const bool has_own = scales == Scales::kRow && format != Type::kI4;
      expect_right(spec, has_own ? "fp16/kv=bytes/hd128/r8" : "fp16/kv=any/hd128/r8");
    }
  }
}

// Kernels of int8 and int4 with factors of eight values, and of bytes with a factor of each row or without, on small
// and on large caches: heads that are copied together and others, chunks, and more blocks than chunks.
struct Factored {
  Type k, v;
  Scales scales;
  const char* formats;
};
class KernelsOfFactors : public testing::TestWithParam<Factored> {};

TEST_P(KernelsOfFactors, LengthsHeadsAndBlocks) {
  const auto& [k, v, scales, formats] = GetParam();
  const std::string kernel = "fp16/kv=" + std::string(formats) + "/hd128/r8";
  for (const std::int64_t room : {0, 110'000}) {
    for (const Lengths& lens : {Lengths{0, 1, 63}, Lengths{64, 65, 127}, Lengths{129, 1, 1000}, Lengths{2100}}) {
      for (const int blocks : {1, 3, 40}) {
        set_blocks(blocks);
        MixedSpec spec = spec_of(128, blocks == 3 ? 8 : 4);
        spec.segments = {{k, v, lens, Pages::kBlocks, 16, scales, room}};
        expect_right(spec, kernel + (room > 0 ? "/large" : ""));
      }
    }
  }
  set_blocks(2);
  for (const Pages pages : {Pages::kRows, Pages::kHeadsFirst, Pages::kTokens}) {
    MixedSpec spec = spec_of(128, pages == Pages::kRows ? 3 : 2);
    spec.segments = {{k, v, {65, 200}, pages, 16, scales}};
    expect_right(spec, kernel);
  }
  // Factors of fp16 of one token and an odd number of heads begin within a word.
  for (const std::int64_t heads : {2, 3}) {
    for (const std::int64_t page_size : {1, 2, 7, 16}) {
      MixedSpec spec = spec_of(128, heads);
      spec.segments = {{k, v, {65, 200}, Pages::kBlocks, page_size, scales}};
      const bool is_odd = has_half_rows(scales) && heads * page_size % 2 != 0;
      expect_right(spec, is_odd ? "fp16/kv=any/hd128/r8" : kernel);
    }
  }
  MixedSpec spec = spec_of(128, 2);
  spec.q_len = 3;
  spec.ragged = true;
  spec.segments = {{k, v, {65, 1, 300}, Pages::kBlocks, 16, scales}};
  expect_right(spec, kernel);
  for (const std::int64_t dim : {64, 96, 120}) {
    if (are_of_groups(scales)) continue;
    MixedSpec narrow = spec_of(dim, 2);
    narrow.segments = {{k, v, {65, 200}, Pages::kBlocks, 16, scales}};
    expect_right(narrow, kernel);
  }
}

INSTANTIATE_TEST_SUITE_P(Model, KernelsOfFactors,
                         testing::Values(Factored{Type::kI8, Type::kI8, Scales::kHalfGroup, "int8"},
                                         Factored{Type::kI4, Type::kI4, Scales::kHalfGroup, "int4"},
                                         Factored{Type::kI8, Type::kI8, Scales::kRow, "bytes"},
                                         Factored{Type::kE4M3, Type::kI8, Scales::kRow, "bytes"},
                                         Factored{Type::kE4M3, Type::kE4M3, Scales::kTurnedRow, "bytes"},
                                         Factored{Type::kE5M2, Type::kE4M3Fnuz, Scales::kTurnedRow, "bytes"},
                                         Factored{Type::kI8, Type::kI8, Scales::kHead, "bytes"},
                                         Factored{Type::kE4M3Fnuz, Type::kE5M2, Scales::kOne, "bytes"},
                                         Factored{Type::kE5M2, Type::kE5M2, Scales::kNone, "bytes"}),
                         [](const auto& info) {
                           return std::string(info.param.formats) + "_" + type_name(info.param.k) + "_" +
                                  type_name(info.param.v) + "_" + scales_name(info.param.scales);
                         });

TEST(KernelsOfAnyFormats, LengthsOfOneSegment) {
  for (const Lengths& lens : kShort) {
    for (const int blocks : {1, 3}) {
      set_blocks(blocks);
      MixedSpec spec = spec_of(128, blocks == 1 ? 1 : 2);
      spec.segments = {{Type::kQ5_1, Type::kE4M3Fnuz, lens, Pages::kBlocks}};
      expect_right(spec, "fp16/kv=any/hd128/r8");
    }
  }
  for (const Lengths& lens : kLong) {
    for (const int blocks : {1, 2, 5}) {
      set_blocks(blocks);
      MixedSpec spec = spec_of(128, 2);
      spec.segments = {{Type::kE4M3, Type::kQ5_0, lens, Pages::kBlocks}};
      expect_right(spec, "fp16/kv=any/hd128/r8");
    }
  }
}

// Borders between segments inside a turn and inside the 32 rows of a wave, in layouts of their own, some with factors.
std::vector<SegmentSpec> some_segments(const Lengths& lens, Type wide, Scales scales) {
  Lengths second, third;
  for (const std::int64_t length : lens) {
    second.push_back(length * 7 % 131);
    third.push_back(length % 3 == 0 ? 65 : length % 5);
  }
  return {{Type::kQ4_1, Type::kE4M3, lens, Pages::kBlocks, 16},
          {Type::kE4M3, Type::kE4M3, second, Pages::kTokens, 16, scales},
          {Type::kQ8_0, Type::kQ5_0, third, Pages::kHeadsFirst},
          {wide, wide, second, Pages::kBlocks, 7}};
}

TEST(KernelsOfAnyFormats, SeveralSegments) {
  for (const Scales scales : {Scales::kHead, Scales::kRow, Scales::kGroup}) {
    for (const Lengths& lens : {Lengths{0, 1, 63}, Lengths{64, 65, 127}, Lengths{128, 129, 1000}}) {
      for (const int blocks : {1, 3}) {
        set_blocks(blocks);
        MixedSpec spec = spec_of(128, 2);
        spec.segments = some_segments(lens, Type::kF16, scales);
        expect_right(spec, "fp16/kv=any/hd128/r8");
      }
    }
  }
}

TEST(KernelsOfAnyFormats, ManyShortTilesOfABlock) {
  set_blocks(1);
  MixedSpec spec = spec_of(128, 8);
  spec.segments = {{Type::kQ4_0, Type::kQ4_0, {1, 64, 3}, Pages::kBlocks}, {Type::kF16, Type::kF16, {5, 1, 0}}};
  expect_right(spec, "fp16/kv=any/hd128/r8");
}

TEST(KernelsOfAnyFormats, OfBf16) {
  for (const Lengths& lens : {Lengths{0, 1, 63}, Lengths{64, 65, 127}, Lengths{128, 129, 1000}}) {
    for (const int blocks : {1, 3}) {
      set_blocks(blocks);
      MixedSpec spec = spec_of(128, 2);
      spec.q = Type::kBF16;
      spec.segments = some_segments(lens, Type::kBF16, Scales::kRow);
      expect_right(spec, "bf16/kv=any/hd128/r8");
    }
  }
}

TEST(KernelsOfAnyFormats, SixteenRowsAndWiderHeads) {
  for (const std::int64_t dim : {128, 256, 512}) {
    for (const Lengths& lens : {Lengths{0, 1, 63}, Lengths{128, 129, 600}}) {
      for (const int blocks : {1, 3}) {
        set_blocks(blocks);
        MixedSpec spec = spec_of(dim, 2);
        spec.q_len = 3;
        spec.ragged = true;
        spec.segments = some_segments(lens, Type::kF16, Scales::kRow);
        expect_right(spec, "fp16/kv=any/hd" + std::to_string(dim) + "/r16");
      }
    }
  }
}

TEST(KernelsOfAnyFormats, Options) {
  set_blocks(2);
  MixedSpec spec = spec_of(96, 2);
  spec.q_len = 2;
  spec.segments = some_segments({128, 129, 300}, Type::kF16, Scales::kRow);
  {
    MixedSpec its = spec;
    its.window_left = 70;
    its.sinks = its.alibi = true;
    its.softcap = 5;
    expect_right(its, "fp16/kv=any/hd128/r8");
  }
  spec.mask = Type::kF16;
  expect_right(spec, "fp16/kv=any/hd128/r8");
}

TEST(KernelsOfAnyFormats, BitsDoNotDependOnTheBlocksNorOnTheirOrder) {
  MixedSpec spec = spec_of(128, 2);
  spec.segments = some_segments({300, 1, 700}, Type::kF16, Scales::kRow);
  MixedCall call(spec);
  set_blocks(1);
  call.run();
  std::vector<std::vector<unsigned char>> bits;
  for (int b = 0; b < 3; ++b) bits.push_back(call.bits(b));
  for (const int blocks : {1, 2, 3, 6}) {
    set_blocks(blocks);
    call.run();
    for (int b = 0; b < 3; ++b) {
      EXPECT_TRUE(call.bits(b) == bits[b])
          << "sequence " << b << ", " << blocks << " blocks, seed " << model().seed - 1;
    }
  }
}

}  // namespace
}  // namespace flashport_test
