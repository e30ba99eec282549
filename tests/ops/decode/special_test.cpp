// What the case list has no column for: NaN and infinity in what is used, rows of a ragged q that belong to no
// sequence, element offsets past 2^31, the caller's own workspace, empty batches, and the split-count heuristic's
// schedule against the invariant one.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "tests/ops/decode/call.h"
#include "tests/reference/blocks.h"
#include "tests/support/expected_support.h"
#include "tests/support/random.h"
#include "tests/support/sparse_memory.h"

namespace flashport_test {
namespace {

using reference::Type;

DecodeCase plain_case(const std::string& name, std::vector<std::int64_t> lens) {
  DecodeCase c{};
  c.name = name;
  c.q = c.k_format = c.v_format = Type::kF16;
  c.dk = c.dv = 64;
  c.hq = 8;
  c.hkv = 2;
  c.q_len = 1;
  c.q_form = "token";
  c.layout = "block_nhd";
  c.page = 16;
  c.lens = std::move(lens);
  c.window_left = c.window_right = -1;
  c.alibi = c.scales = "none";
  c.lse = true;
  c.strides = "dense";
  c.splits = flashport::kInvariantSplits;
  return c;
}

Type math_of(const DecodeCase& c) { return math_of_key(flashport::which_kernel(c.query())); }

TEST(Special, NanAndInfinityStayInTheirRowsAndColumns) {
  const DecodeCase c = plain_case("special_nan", {70, 65, 3});
  DecodeCall call(c);
  call.q().set({0, 3, 5}, NAN);
  // The last key of request 1, wherever its page is.
  const reference::DecodeInputs in = call.inputs();
  const std::int64_t where = in.block_table->integer({1, 64 / 16});
  call.v().set({where, 64 % 16, 0, 7}, INFINITY);
  call.upload();
  call.run();
  EXPECT_EQ(call.check(math_of(c)), "");
  EXPECT_TRUE(std::isnan(call.out().get({0, 3, 0})));
  EXPECT_FALSE(std::isnan(call.out().get({0, 2, 0})));
  EXPECT_TRUE(std::isinf(call.out().get({1, 0, 7})));
  EXPECT_TRUE(std::isfinite(call.out().get({1, 0, 6})));
}

// Caches of blocks. One request with a key, one with a value of which a block's scale is NaN, one with a query of
// NaN, and one with none of them.
// A format, the bytes of its blocks, and where in them the scale or the minimum is that is no number.
struct NoNumber {
  const char* format;
  std::int64_t block_bytes, byte;
};
class BlocksThatAreNotFinite : public testing::TestWithParam<NoNumber> {
 protected:
  static constexpr std::int64_t kDim = 64;
  static void set_nan(Tensor& cache, DecodeCall& call, std::int64_t request, std::int64_t token) {
    const std::uint16_t nan = 0x7e00;
    const std::int64_t page = call.inputs().block_table->integer({request, token / 16});
    std::memcpy(cache.address({page, token % 16, 1, 0}) + GetParam().block_bytes + GetParam().byte, &nan, sizeof nan);
  }
};

TEST_P(BlocksThatAreNotFinite, StayInTheirRowsAndColumns) {
  DecodeCase c = plain_case("special_blocks", {70, 130, 65, 100});
  c.k_format = c.v_format = type_named(GetParam().format);
  if (!flashport::supports(c.query()).supported) GTEST_SKIP() << flashport::supports(c.query()).reason;
  DecodeCall clean(c), call(c);
  set_nan(call.k(), call, 0, 66);
  set_nan(call.v(), call, 1, 65);
  call.q().set({2, 6, 5}, NAN);
  for (DecodeCall* each : {&clean, &call}) {
    each->upload();
    each->run();
    EXPECT_EQ(each->check(math_of(c)), "");
  }
  std::int64_t finite = 0;
  call.out().for_each([&](const Shape& at) {
    const bool is_hit = at[1] >= 4 && (at[0] == 0 || (at[0] == 1 && at[2] >= 32) || (at[0] == 2 && at[1] == 6));
    EXPECT_EQ(std::isfinite(call.out().get(at)), !is_hit) << at[0] << " " << at[1] << " " << at[2];
    if (is_hit) return;
    ++finite;
    EXPECT_EQ(call.out().get(at), clean.out().get(at)) << at[0] << " " << at[1] << " " << at[2];
  });
  EXPECT_EQ(finite, (4 * 8 - 4 - 1) * kDim - 4 * kDim / 2);
}

INSTANTIATE_TEST_SUITE_P(Special, BlocksThatAreNotFinite,
                         testing::Values(NoNumber{"q8_0", 34, 0}, NoNumber{"q4_0", 18, 0}, NoNumber{"iq4_nl", 18, 0},
                                         NoNumber{"q4_1", 20, 0}, NoNumber{"q4_1", 20, 2}, NoNumber{"q5_0", 22, 0},
                                         NoNumber{"q5_1", 24, 0}, NoNumber{"q5_1", 24, 2}),
                         [](const auto& info) {
                           return std::string(info.param.format) + (info.param.byte == 0 ? "" : "_minimum");
                         });

// Formats of one byte: codes that are NaN, in a key of one request and in values of another. In a third one, codes that
// differ from FNUZ's NaN by one behind a zero, and those that are NaN in e4m3 alone.
class CodesThatAreNan : public testing::TestWithParam<const char*> {
 protected:
  static Shape place(DecodeCall& call, std::int64_t request, std::int64_t token, std::int64_t dim) {
    return {call.inputs().block_table->integer({request, token / 16}), token % 16, 1, dim};
  }
};

TEST_P(CodesThatAreNan, StayInTheirRowsAndColumns) {
  const std::set<std::int64_t> dims = {5, 38, 63};
  DecodeCase c = plain_case("special_codes", {70, 130, 100});
  c.k_format = c.v_format = type_named(GetParam());
  for (const std::int64_t dim : {64, 128}) {
    SCOPED_TRACE(dim);
    c.dk = c.dv = dim;
    if (!flashport::supports(c.query()).supported) GTEST_SKIP() << flashport::supports(c.query()).reason;
    DecodeCall clean(c), call(c);
    for (DecodeCall* each : {&clean, &call}) {
      for (Tensor* cache : {&each->k(), &each->v()}) {
        for (std::int64_t at = 0; at < dim; at += 2) {
          std::memcpy(cache->address(place(*each, 2, 17, at)), "\x00\x81", 2);
          if (c.k_format == Type::kE4M3Fnuz) std::memcpy(cache->address(place(*each, 2, 18, at)), "\x7f\xff", 2);
        }
      }
    }
    call.k().set(place(call, 0, 66, 6), NAN);
    for (const std::int64_t at : dims) call.v().set(place(call, 1, 65 + at, at), NAN);
    for (DecodeCall* each : {&clean, &call}) {
      each->upload();
      each->run();
      EXPECT_EQ(each->check(math_of(c)), "");
    }
    call.out().for_each([&](const Shape& at) {
      const bool is_hit = at[1] >= 4 && (at[0] == 0 || (at[0] == 1 && dims.contains(at[2])));
      EXPECT_EQ(std::isfinite(call.out().get(at)), !is_hit) << at[0] << " " << at[1] << " " << at[2];
      if (is_hit) return;
      EXPECT_EQ(call.out().get(at), clean.out().get(at)) << at[0] << " " << at[1] << " " << at[2];
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Special, CodesThatAreNan, testing::Values("fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2"),
                         [](const auto& info) { return std::string(info.param); });

// Values that fill the range of fp16 stay finite, also in kernels that multiply probabilities by scales.
TEST(Special, BlocksAsLargeAsTheyMayBe) {
  const struct {
    const char* format;
    std::int64_t block_bytes;
    std::uint16_t header[2];  // 8728 and -65472, up to 65448; 4224 and -65472, up to 65472
  } kBlocks[] = {{"q4_1", 20, {0x7043, 0xfbfe}}, {"q5_1", 24, {0x6c20, 0xfbfe}}};
  for (const auto& block : kBlocks) {
    SCOPED_TRACE(block.format);
    DecodeCase c = plain_case("special_large_blocks", {70, 1});
    c.k_format = c.v_format = type_named(block.format);
    if (!flashport::supports(c.query()).supported) continue;
    DecodeCall call(c);
    const std::int64_t page = call.inputs().block_table->integer({1, 0});
    std::memcpy(call.v().address({page, 0, 1, 0}) + block.block_bytes, block.header, sizeof block.header);
    call.upload();
    call.run();
    EXPECT_EQ(call.check(math_of(c)), "");
    EXPECT_GT(std::abs(call.out().get({1, 4, 32})) + std::abs(call.out().get({1, 4, 33})), 1.0);
  }
}

// Keys and values with a mean, whose minima do not vanish from the middle of the codes on.
TEST(Special, BlocksWithAMean) {
  for (const char* format : {"q4_1", "q5_1"}) {
    for (const std::int64_t dim : {64, 128}) {
      SCOPED_TRACE(std::string(format) + ", " + std::to_string(dim));
      DecodeCase c = plain_case("special_mean", {70, 130, 1});
      c.k_format = c.v_format = type_named(format);
      c.dk = c.dv = dim;
      if (!flashport::supports(c.query()).supported) continue;
      DecodeCall call(c);
      Random random(7);
      std::vector<float> row(static_cast<std::size_t>(dim));
      for (Tensor* cache : {&call.k(), &call.v()}) {
        const Shape& shape = cache->shape();  // pages, tokens, heads, bytes
        for (std::int64_t i = 0; i < shape[0] * shape[1] * shape[2]; ++i) {
          const float mean = static_cast<float>(4.0 * random.normal());
          for (float& x : row) x = mean + 0.25f * static_cast<float>(random.normal());
          const Shape at = {i / shape[2] / shape[1], i / shape[2] % shape[1], i % shape[2], 0};
          reference::write_blocks(c.k_format, cache->address(at), row.data(), dim);
        }
      }
      call.upload();
      call.run();
      EXPECT_EQ(call.check(math_of(c)), "");
    }
  }
}

// Four draft tokens, of which the last alone sees itself. What its key and its value hold.
class NanInADraft : public testing::Test {
 protected:
  static constexpr std::int64_t kLen = 70, kLast = kLen - 1, kQLen = 4, kHeads = 8, kGroup = 4;

  static DecodeCase draft_case() {
    DecodeCase c = plain_case("special_draft_nan", {kLen, 2});
    c.q_len = kQLen;
    c.q_form = "uniform";
    return c;
  }
  // Where token `token` of request `b` lies in kv head 1.
  static Shape index_of(DecodeCall& call, std::int64_t b, std::int64_t token, std::int64_t dim) {
    return {call.inputs().block_table->integer({b, token / 16}), token % 16, 1, dim};
  }
  // How many elements of outputs other than those that `may_differ(request, token, head, dim)` have other bits.
  template <class MayDiffer>
  static std::int64_t differences(DecodeCall& got, DecodeCall& wanted, const MayDiffer& may_differ) {
    std::int64_t count = 0;
    got.out().for_each([&](const Shape& at) {
      const double a = got.out().get(at), b = wanted.out().get(at);
      if (a != b && !may_differ(at[0], at[1], at[2], at[3])) ++count;
    });
    return count;
  }
};

TEST_F(NanInADraft, OfAKeyReachesOnlyRowsThatSeeIt) {
  DecodeCall call(draft_case()), clean(draft_case());
  call.k().set(index_of(call, 0, kLast, 5), NAN);
  for (DecodeCall* one : {&call, &clean}) {
    one->upload();
    one->run();
  }
  EXPECT_TRUE(std::isnan(call.out().get({0, kQLen - 1, kGroup, 0})));
  EXPECT_TRUE(std::isnan(call.lse()->get({0, kQLen - 1, kGroup})));
  const auto sees = [](std::int64_t request, std::int64_t token, std::int64_t head, std::int64_t) {
    return request == 0 && token == kQLen - 1 && head >= kGroup;
  };
  EXPECT_EQ(differences(call, clean, sees), 0);
}

TEST_F(NanInADraft, OfAValueStaysInItsColumnHeadAndRequest) {
  for (double value : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    DecodeCall call(draft_case()), clean(draft_case());
    call.v().set(index_of(call, 0, kLast, 7), value);
    // The two first tokens of request 1 stand before its beginning and see nothing.
    call.v().set(index_of(call, 1, 0, 7), value);
    for (DecodeCall* one : {&call, &clean}) {
      one->upload();
      one->run();
    }
    EXPECT_FALSE(std::isfinite(call.out().get({0, kQLen - 1, kGroup, 7})));
    EXPECT_TRUE(call.lse()->element_bytes() == clean.lse()->element_bytes());
    // Earlier tokens of its request may be NaN in that column: they multiply it with 0.
    const auto may_be_nan = [](std::int64_t request, std::int64_t token, std::int64_t head, std::int64_t dim) {
      return dim == 7 && head >= kGroup && (request == 0 || token >= 2);
    };
    EXPECT_EQ(differences(call, clean, may_be_nan), 0);
    EXPECT_EQ(call.out().get({1, 0, kGroup, 7}), 0.0);
    EXPECT_EQ(call.out().get({1, 1, kGroup, 7}), 0.0);
  }
}

// Rows of a ragged q past the last offset belong to no sequence: whatever the schedule, their out and lse stay as they
// are.
TEST(Special, RaggedRowsThatNobodyOwnsAreNotWritten) {
  DecodeCase c = plain_case("special_ragged", {300, 20, 150});
  c.q_len = 3;
  c.q_form = "ragged";
  DecodeCall call(c);
  call.upload();
  call.run();
  const std::int64_t owned = call.q_lens()[0] + call.q_lens()[1], rows = call.q().shape()[0];
  ASSERT_LT(owned, rows);
  const auto before = call.bits();
  for (int splits : {flashport::kInvariantSplits, 1, 3}) {
    flashport::DecodeArgs args = call.args();
    args.num_splits = splits;
    args.cu_seqlens_q->shape[0] = 3;
    args.seqlens.shape[0] = args.block_table->shape[0] = 2;
    call.out().poison();
    call.lse()->poison();
    flashport::flash_decode(args);
    call.out().download();
    call.lse()->download();
    call.out().for_each([&](const Shape& at) {
      EXPECT_EQ(std::isnan(call.out().get(at)), at[0] >= owned) << "splits " << splits << ", row " << at[0];
    });
    call.lse()->for_each([&](const Shape& at) {
      EXPECT_EQ(std::isnan(call.lse()->get(at)), at[0] >= owned) << "splits " << splits << ", row " << at[0];
    });
    if (splits != flashport::kInvariantSplits) continue;
    const auto bits = call.bits();
    EXPECT_TRUE(bits[0] == before[0] && bits[1] == before[1]);
  }
}

TEST(Special, LargeScoresDoNotOverflow) {
  const DecodeCase c = plain_case("special_large", {130, 64, 1});
  DecodeCall call(c);
  call.q().for_each([&](const Shape& index) { call.q().set(index, 1000 * call.q().get(index)); });
  call.upload();
  call.run();
  EXPECT_EQ(call.check(math_of(c)), "");
}

TEST(Special, CallersWorkspaceServesRepeatedCalls) {
  DecodeCase c = plain_case("special_workspace", options().emulator ? std::vector<std::int64_t>{200, 65}
                                                                    : std::vector<std::int64_t>{3000, 65, 1025});
  DecodeCall call(c);
  call.upload();
  call.run();
  const auto expected = call.bits();
  for (int splits : {flashport::kInvariantSplits, 0, 3}) {
    flashport::DecodeArgs args = call.args();
    args.num_splits = splits;
    const std::int64_t bytes = flashport::decode_workspace_size(args);
    Tensor workspace(Type::kQ8_0, {bytes});
    if (bytes > 0) std::memset(workspace.address({0}), 0, static_cast<std::size_t>(bytes));
    workspace.upload();
    args.workspace = workspace.view();
    for (int repeat = 0; repeat < 2; ++repeat) {
      call.out().poison();
      call.lse()->poison();
      flashport::flash_decode(args);
      call.out().download();
      call.lse()->download();
      EXPECT_EQ(call.check(math_of(c)), "") << "splits " << splits;
      EXPECT_TRUE(splits != flashport::kInvariantSplits || call.bits() == expected);
    }
    workspace.download();
    EXPECT_EQ(workspace.damage(), "");
  }
}

TEST(Special, NothingToDoIsNoError) {
  DecodeCall call(plain_case("special_empty", {5}));
  call.upload();
  call.out().poison();
  flashport::DecodeArgs args = call.args();
  args.q.shape[0] = args.out.shape[0] = args.lse->shape[0] = args.seqlens.shape[0] = args.block_table->shape[0] = 0;
  EXPECT_NO_THROW(flashport::flash_decode(args));
  call.out().download();
  EXPECT_TRUE(std::isnan(call.out().get({0, 0, 0})));
}

// The small cache of a call spread over sparse memory: its page p, of `page_bytes`, lies at p * spread elements.
void run_spread(const DecodeCase& c, std::int64_t spread_pages) {
  DecodeCall call(c);
  call.upload();
  Tensor& k = call.k();
  const std::int64_t pages = k.shape()[0], page_elements = k.strides()[0];
  const std::int64_t spread = page_elements * spread_pages;
  const SparseMemory memory(static_cast<std::size_t>(((pages - 1) * spread + 2 * page_elements) * 2));
  ASSERT_NE(memory.data(), nullptr) << "no room for the sparse cache";
  ASSERT_GT((pages - 1) * spread, std::int64_t{1} << 31);
  flashport::DecodeArgs args = call.args();
  for (std::int64_t page = 0; page < pages; ++page) {
    for (Tensor* cache : {&call.k(), &call.v()}) {
      char* to = memory.data() + (page * spread + (cache == &call.k() ? 0 : page_elements)) * 2;
      Shape first(cache->shape().size(), 0);
      first[0] = page;
      ASSERT_EQ(backend().copy(device().index, 0, to, cache->address(first), page_elements * 2), nullptr);
      synchronize();
    }
  }
  args.k_cache.data = memory.data();
  args.v_cache.data = memory.data() + page_elements * 2;
  args.k_cache.strides[0] = args.v_cache.strides[0] = spread;
  call.out().poison();
  call.lse()->poison();
  flashport::flash_decode(args);
  call.out().download();
  call.lse()->download();
  EXPECT_EQ(call.check(math_of(c)), "");
}

TEST(FullOffsets, PageStridesPastTwoToThe31Elements) {
  // 9 + 3 pages of 2048 elements.
  run_spread(plain_case("special_far_pages", {70, 60}), (std::int64_t{1} << 31) / (2048 * 10));
}

TEST(FullOffsets, SlotNumbersTimesStridesPastTwoToThe31) {
  DecodeCase c = plain_case("special_far_slots", {70, 60});
  c.layout = "token";
  c.page = 0;
  run_spread(c, (std::int64_t{1} << 31) / (128 * 120));
}

}  // namespace
}  // namespace flashport_test
