// Self-tests of attention's oracle: published vectors of the random numbers, closed forms of each option, equal results
// of forms that mean the same, and decode's oracle, which was written apart.
#include "tests/reference/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "tests/support/random.h"

namespace reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// An array with storage of its own.
struct Owned {
  std::vector<float> numbers;
  std::vector<std::int32_t> integers;
  Array array;

  Owned(std::vector<std::int64_t> shape, const std::function<double()>& next) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    for (std::int64_t i = 0; i < count; ++i) numbers.push_back(static_cast<float>(next()));
    set(std::move(shape), Type::kF32, numbers.data());
  }
  explicit Owned(const std::vector<std::int32_t>& values) : integers(values) {
    set({static_cast<std::int64_t>(values.size())}, Type::kI32, integers.data());
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

 private:
  void set(std::vector<std::int64_t> shape, Type type, const void* data) {
    array.data = data;
    array.type = type;
    array.strides.assign(shape.size(), 1);
    for (std::size_t axis = shape.size(); axis-- > 1;) array.strides[axis - 1] = array.strides[axis] * shape[axis];
    array.shape = std::move(shape);
  }
};

void expect_close(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;  // infinities
    ASSERT_NEAR(a[i], b[i], tolerance) << i;
  }
}

// Random123's own known answers (kat_vectors, "philox4x32 10").
TEST(Philox, KnownAnswers) {
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

struct AttentionOracle : testing::Test {
  flashport_test::Random random{7};
  std::function<double()> normal = [this] { return random.normal(); };
  Owned q{{2, 5, 4, 16}, normal}, k{{2, 9, 2, 16}, normal}, v{{2, 9, 2, 24}, normal};
  AttentionInputs in{.q = q.array, .k = k.array, .v = v.array, .softmax_scale = 0.25};
};

TEST_F(AttentionOracle, AgreesWithThatOfDecode) {
  const Owned slopes({4}, [] { return 0.2; }), sinks({4}, normal);
  in.softcap = 2;
  in.window_left = 4;
  in.window_right = 1;
  in.causal = true;
  in.alibi_slopes = slopes.array;
  in.sinks = sinks.array;
  const std::vector<AttentionSequence> found = attention(in);
  ASSERT_EQ(found.size(), 2u);
  for (std::int64_t b = 0; b < 2; ++b) {
    Request r;
    r.q_len = 5;
    r.kv_len = 9;
    r.num_q_heads = 4;
    r.num_kv_heads = 2;
    r.dim_qk = 16;
    r.dim_v = 24;
    r.q.assign(q.numbers.begin() + b * 5 * 4 * 16, q.numbers.begin() + (b + 1) * 5 * 4 * 16);
    r.k.assign(k.numbers.begin() + b * 9 * 2 * 16, k.numbers.begin() + (b + 1) * 9 * 2 * 16);
    r.v.assign(v.numbers.begin() + b * 9 * 2 * 24, v.numbers.begin() + (b + 1) * 9 * 2 * 24);
    r.k_scale = r.v_scale = {1, 1};
    r.softmax_scale = 0.25;
    r.softcap = 2;
    r.window_left = 4;
    r.window_right = 0;
    r.slopes.assign(4, static_cast<double>(0.2f));
    r.sinks.assign(sinks.numbers.begin(), sinks.numbers.end());
    const RequestResult expected = attend(r);
    expect_close(found[b].out, expected.out, 1e-12);
    expect_close(found[b].lse, expected.lse, 1e-12);
  }
}

TEST_F(AttentionOracle, PackedSequencesAreDenseOnes) {
  const Owned offsets_q({0, 5, 10}), offsets_k({0, 9, 18});
  const std::vector<AttentionSequence> dense = attention(in);
  in.q.shape = {10, 4, 16};
  in.k.shape = {18, 2, 16};
  in.v.shape = {18, 2, 24};
  for (Array* array : {&in.q, &in.k, &in.v}) array->strides.erase(array->strides.begin());
  in.cu_seqlens_q = offsets_q.array;
  in.cu_seqlens_k = offsets_k.array;
  const std::vector<AttentionSequence> packed = attention(in);
  for (std::size_t b = 0; b < 2; ++b) {
    EXPECT_EQ(packed[b].first_row, static_cast<std::int64_t>(b) * 5);
    expect_close(packed[b].out, dense[b].out, 0);
    expect_close(packed[b].lse, dense[b].lse, 0);
  }
}

// Padding on both sides of the keys is a shorter sequence, and so is a bias of -inf there.
TEST_F(AttentionOracle, KeysThatDoNotExist) {
  const Owned used({7, 9}), pad({2, 0}), queries({3, 5});
  in.seqused_k = used.array;
  in.leftpad_k = pad.array;
  in.seqused_q = queries.array;
  const std::vector<AttentionSequence> padded = attention(in);
  EXPECT_EQ(padded[0].q_len, 3);
  EXPECT_EQ(padded[0].kv_len, 5);
  in.seqused_k = in.leftpad_k = in.seqused_q = std::nullopt;
  int i = 0;
  const Owned bias({1, 1, 5, 9}, [&] {
    const int key = i++ % 9;
    return key < 2 || key >= 7 ? -kInf : 0.0;
  });
  in.bias = bias.array;
  const std::vector<AttentionSequence> hidden = attention(in);
  const std::vector<double> first_rows(hidden[0].out.begin(), hidden[0].out.begin() + 3 * 4 * 24);
  expect_close(padded[0].out, first_rows, 1e-12);
}

TEST_F(AttentionOracle, RowsThatSeeNoKey) {
  in.causal = true;
  in.k.shape[1] = in.v.shape[1] = 2;  // of 5 queries the last two stand at keys
  const std::vector<AttentionSequence> found = attention(in);
  for (int row = 0; row < 5; ++row) {
    EXPECT_EQ(std::isinf(found[1].lse[static_cast<std::size_t>(row * 4)]), row < 3);
    EXPECT_EQ(found[1].out[static_cast<std::size_t>(row * 4 * 24)] == 0, row < 3);
  }
  const Owned sinks({4}, [] { return 0.5; });
  in.sinks = sinks.array;
  EXPECT_EQ(attention(in)[0].lse[0], 0.5);
}

// Equal keys have equal weights: the output is the mean of what is kept, grown.
TEST_F(AttentionOracle, DropoutKeepsAndGrows) {
  const Owned equal({2, 9, 2, 16}, [] { return 0.0; });
  in.k = equal.array;
  in.dropout = {0.25, 11, 12};
  const std::vector<AttentionSequence> found = attention(in);
  for (std::int64_t head = 0; head < 4; ++head) {
    double sum = 0;
    for (std::int64_t key = 0; key < 9; ++key) {
      const std::size_t of_key = static_cast<std::size_t>(((9 + key) * 2 + head / 2) * 24);
      if (in.dropout.keeps(4 + head, 3, key)) sum += double{v.numbers[of_key]} / 9 / 0.75;
    }
    EXPECT_NEAR(found[1].out[static_cast<std::size_t>((3 * 4 + head) * 24)], sum, 1e-12);
    EXPECT_NEAR(found[1].lse[static_cast<std::size_t>(3 * 4 + head)], std::log(9), 1e-12);
  }
}

TEST(DropoutOracle, DropsItsShare) {
  const Dropout dropout{0.3, -5, std::int64_t{1} << 40};
  int kept = 0;
  for (std::int64_t row = 0; row < 200; ++row) {
    for (std::int64_t key = 0; key < 500; ++key) kept += dropout.keeps(3, row, key) ? 1 : 0;
  }
  EXPECT_EQ(dropout.share(), 77.0 / 256);
  EXPECT_NEAR(kept / 1e5, 1 - dropout.share(), 0.007);  // five standard deviations
}

TEST_F(AttentionOracle, ThePlainOneIsClose) {
  const std::vector<AttentionSequence> exact = attention(in), plain = attention_plain(in, Type::kF32, Type::kF32);
  for (std::size_t b = 0; b < 2; ++b) {
    expect_close(plain[b].out, exact[b].out, 1e-5);
    expect_close(plain[b].lse, exact[b].lse, 1e-5);
  }
}

}  // namespace
}  // namespace reference
