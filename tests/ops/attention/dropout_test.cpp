// Dropout: the mask is the oracle's bit for bit on every target, drops its share, and is the one that attention
// applies.
#include <gtest/gtest.h>

#include <cmath>

#include <flashport/attention.h>

#include "tests/ops/attention/call.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

using reference::Type;

// A mask of bytes, whose elements lie `step` apart.
class Mask {
 public:
  Mask(Shape shape, std::int64_t step) : shape_(std::move(shape)), step_(step), bytes_(count() * step), state_(16) {}

  void draw(double p, std::int64_t seed, std::int64_t offset) {
    const std::int64_t state[] = {seed, offset};
    state_.write(state);
    flashport::DropoutMaskArgs args;
    args.mask = {bytes_.data(), flashport::DType::kUInt8, device(), {shape_[0], shape_[1], shape_[2], shape_[3]}};
    for (int axis = 0; axis < 4; ++axis) args.mask.strides[axis] *= step_;
    args.rng_state = {state_.data(), flashport::DType::kInt64, device(), {2}};
    args.dropout_p = p;
    flashport::dropout_mask(args);
    host_.resize(bytes_.size());
    bytes_.read(host_.data());
  }
  [[nodiscard]] int at(std::int64_t i) const { return host_[static_cast<std::size_t>(i * step_)]; }
  // Between the elements.
  [[nodiscard]] bool gaps_intact() const {
    for (std::size_t i = 0; i < host_.size(); ++i) {
      if (i % static_cast<std::size_t>(step_) != 0 && host_[i] != 0xa5) return false;
    }
    return bytes_.guards_intact();
  }
  [[nodiscard]] std::size_t count() const {
    return static_cast<std::size_t>(shape_[0] * shape_[1] * shape_[2] * shape_[3]);
  }

 private:
  Shape shape_;
  std::int64_t step_;
  DeviceBuffer bytes_, state_;
  std::vector<unsigned char> host_;
};

TEST(AttentionDropout, MaskIsTheOracles) {
  const std::int64_t seeds[] = {0, 17, -3, std::int64_t{0x123456789abcdef}};
  const std::int64_t offsets[] = {0, 4, std::int64_t{1} << 40, -1};
  for (const std::int64_t step : {1, 3}) {
    Mask mask({2, 3, 5, 203}, step);
    for (int i = 0; i < 4; ++i) {
      const reference::Dropout expected{0.37, seeds[i], offsets[i]};
      mask.draw(expected.p, expected.seed, expected.offset);
      std::int64_t wrong = 0;
      for (std::int64_t at = 0; at < static_cast<std::int64_t>(mask.count()); ++at) {
        const std::int64_t key = at % 203, row = at / 203 % 5, head = at / 203 / 5;
        wrong += mask.at(at) != (expected.keeps(head, row, key) ? 1 : 0);
      }
      EXPECT_EQ(wrong, 0) << "seed " << seeds[i];
      EXPECT_TRUE(mask.gaps_intact());
    }
  }
}

TEST(AttentionDropout, DropsItsShare) {
  for (const double p : {0.0, 0.1, 0.5, 0.999}) {
    Mask mask({1, 2, 64, 500}, 1);
    mask.draw(p, 42, 1);
    double kept = 0;
    for (std::int64_t at = 0; at < static_cast<std::int64_t>(mask.count()); ++at) kept += mask.at(at);
    const double weights = static_cast<double>(mask.count());
    const double share = reference::Dropout{p, 42, 1}.share();
    EXPECT_NEAR(kept / weights, 1 - share, 5 * std::sqrt(share * (1 - share) / weights)) << p;
  }
}

// Where all weights are equal and values are 1, an output is the share of the kept.
TEST(AttentionDropout, IsWhatTheMaskSays) {
  const AttentionCase c = {.name = "mask", .q_lens = {70}, .kv_lens = {203}, .dropout = 0.25};
  FLASHPORT_REQUIRE_SUPPORT("attention_bf16_d64_dropout", flashport::supports(c.query()));
  Tensor q(Type::kBF16, {1, 70, 4, 64}), k(Type::kBF16, {1, 203, 2, 64}), v(Type::kBF16, {1, 203, 2, 64});
  Tensor out(Type::kBF16, {1, 70, 4, 64}), state(Type::kI64, {2});
  for (Tensor* tensor : {&q, &k, &v}) {
    tensor->for_each([&](const Shape& at) { tensor->set(at, tensor == &k ? 0 : 1); });
    tensor->upload();
  }
  state.set({0}, 99);
  state.set({1}, 7);
  state.upload();
  flashport::AttentionArgs args;
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  args.out = out.view();
  args.dropout_p = 0.25;
  args.rng_state = state.view();
  flashport::attention(args);
  out.download();
  Mask mask({1, 4, 70, 203}, 1);
  mask.draw(0.25, 99, 7);
  for (std::int64_t head = 0; head < 4; ++head) {
    for (std::int64_t row = 0; row < 70; ++row) {
      double kept = 0;
      for (std::int64_t key = 0; key < 203; ++key) kept += mask.at((head * 70 + row) * 203 + key);
      EXPECT_NEAR(out.get({0, row, head, 5}), kept / 203 / 0.75, 0x1p-8) << head << " " << row;
    }
  }
}

TEST(AttentionDropout, RepeatsForASeedAndAnOffset) {
  const AttentionCase c = {.name = "repeat", .packed = true, .causal = true, .dropout = 0.5};
  FLASHPORT_REQUIRE_SUPPORT("attention_bf16_d64_dropout", flashport::supports(c.query()));
  AttentionCall call(c);
  call.run();
  const std::vector<unsigned char> first = call.bits();
  call.run();
  EXPECT_TRUE(call.bits() == first);
  flashport::AttentionArgs other = call.args();
  Tensor state(Type::kI64, {2});
  state.set({0}, 1);
  state.set({1}, 2);
  state.upload();
  other.rng_state = state.view();
  flashport::attention(other);
  call.fetch();
  EXPECT_FALSE(call.bits() == first);
}

}  // namespace
}  // namespace flashport_test
