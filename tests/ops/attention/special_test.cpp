// Attention over memory of an unusual kind: views of one projection, offsets past 2^31 elements, a workspace of the
// caller, and tensors without sequences, queries or keys.
#include <gtest/gtest.h>

#include <flashport/attention.h>

#include <cmath>
#include <limits>

#include "tests/ops/attention/call.h"
#include "tests/support/expected_support.h"
#include "tests/support/random.h"
#include "tests/support/sparse_memory.h"

namespace flashport_test {
namespace {

using flashport::DType;
using flashport::TensorView;
using reference::Type;

flashport::Support bf16_support(std::int64_t dim = 64) {
  return flashport::supports(
      flashport::AttentionQuery{.target = query_target(), .head_dim_qk = dim, .head_dim_v = dim, .causal = true});
}

// q, k and v as views of one projection give the bits of tensors of their own.
TEST(AttentionSpecial, ViewsOfOneProjection) {
  FLASHPORT_REQUIRE_SUPPORT("attention_bf16_d64_projection", bf16_support());
  constexpr std::int64_t kTokens = 130, kHeads = 3, kDim = 64;
  Tensor all(Type::kBF16, {1, kTokens, 3, kHeads, kDim});
  Random random(5);
  all.for_each([&](const Shape& at) { all.set(at, random.normal()); });
  all.upload();
  std::vector<Tensor> apart;
  flashport::AttentionArgs args, of_views;
  args.causal = of_views.causal = true;
  for (std::int64_t i = 0; i < 3; ++i) {
    Tensor& one = apart.emplace_back(Type::kBF16, Shape{1, kTokens, kHeads, kDim});
    one.for_each([&](const Shape& at) { one.set(at, all.get({0, at[1], i, at[2], at[3]})); });
    one.upload();
  }
  args.q = apart[0].view();
  args.k = apart[1].view();
  args.v = apart[2].view();
  TensorView* const views[] = {&of_views.q, &of_views.k, &of_views.v};
  for (std::int64_t i = 0; i < 3; ++i) {
    const TensorView whole = all.view();
    *views[i] = TensorView(static_cast<char*>(whole.data) + i * kHeads * kDim * 2, DType::kBFloat16, device(),
                           {1, kTokens, kHeads, kDim});
    views[i]->strides[1] = whole.strides[1];
    views[i]->strides[0] = whole.strides[0];
  }
  Tensor out(Type::kBF16, {1, kTokens, kHeads, kDim}), from_views(Type::kBF16, {1, kTokens, kHeads, kDim});
  args.out = out.view();
  of_views.out = from_views.view();
  flashport::attention(args);
  flashport::attention(of_views);
  out.download();
  from_views.download();
  EXPECT_TRUE(out.element_bytes() == from_views.element_bytes());
}

// Tokens of k, v and q, and rows of out, more than 2^31 elements apart. Keys are equal, so that a query sees the mean.
TEST(AttentionSpecial, OffsetsPastTwoToTheThirtyFirst) {
  if (options().emulator) GTEST_SKIP() << "takes gigabytes";
  FLASHPORT_REQUIRE_SUPPORT("attention_bf16_d64_far_apart", bf16_support());
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 64, kDim = 64;
  const SparseMemory memory(static_cast<std::size_t>(kStride + 8 * kDim) * 2);
  if (memory.data() == nullptr) GTEST_SKIP() << "no memory of four gigabytes";
  const auto tensor = [&](std::int64_t at) {
    TensorView view(memory.data() + at * kDim * 2, DType::kBFloat16, device(), {1, 2, 1, kDim});
    view.strides[1] = kStride;
    return view;
  };
  flashport::AttentionArgs args;
  args.q = tensor(0);
  args.k = tensor(1);
  args.v = tensor(2);
  args.out = tensor(3);
  const auto write = [&](const TensorView& view, std::int64_t token, double value) {
    Tensor row(Type::kBF16, {kDim});
    row.for_each([&](const Shape& at) { row.set(at, value); });
    const std::vector<unsigned char> bytes = row.element_bytes();
    ASSERT_EQ(backend().copy(device().index, 0, static_cast<char*>(view.data) + token * kStride * 2, bytes.data(),
                             bytes.size()),
              nullptr);
  };
  for (std::int64_t token = 0; token < 2; ++token) {
    write(args.q, token, 1);
    write(args.k, token, 0.5);
    write(args.v, token, token == 0 ? 1 : 4);
  }
  args.causal = true;
  flashport::attention(args);
  synchronize();
  for (std::int64_t token = 0; token < 2; ++token) {
    std::uint16_t found[kDim];
    ASSERT_EQ(
        backend().copy(device().index, 0, found, static_cast<char*>(args.out.data) + token * kStride * 2, sizeof found),
        nullptr);
    synchronize();
    for (const std::uint16_t bits : found) {
      EXPECT_EQ(reference::decode(bits, reference::kBrain), token == 0 ? 1 : 2.5);
    }
  }
}

// Counters of a caller's workspace are zero after a call, as they were before it.
TEST(AttentionSpecial, WorkspaceOfTheCaller) {
  AttentionCase c = {.name = "workspace", .causal = true};
  FLASHPORT_REQUIRE_SUPPORT("attention_bf16_d64_workspace", flashport::supports(c.query()));
  AttentionCall call(c);
  call.run();
  const std::vector<unsigned char> expected = call.bits();
  flashport::AttentionArgs args = call.args();
  const std::int64_t bytes = flashport::attention_workspace_size(args);
  const DeviceBuffer workspace(static_cast<std::size_t>(bytes));
  std::vector<unsigned char> zeros(static_cast<std::size_t>(bytes)), after(zeros.size(), 1);
  workspace.write(zeros.data());
  args.workspace = TensorView(workspace.data(), DType::kUInt8, device(), {bytes});
  for (int repeat = 0; repeat < 3; ++repeat) {
    call.poison_outputs();
    flashport::attention(args);
    call.fetch();
    EXPECT_TRUE(call.bits() == expected) << repeat;
    workspace.read(after.data());
    EXPECT_TRUE(after == zeros) << repeat;
  }
}

TEST(AttentionSpecial, NothingToCompute) {
  FLASHPORT_REQUIRE_SUPPORT("attention_bf16_d64_empty", bf16_support());
  for (const bool packed : {false, true}) {
    AttentionCase c = {.name = "empty", .q_lens = {0, 0}, .kv_lens = {5, 5}, .packed = packed, .used_k = true};
    AttentionCall none(c);
    none.run();
    EXPECT_EQ(none.check(), "");
  }
  flashport::AttentionArgs args;
  args.q = args.k = args.v = args.out = TensorView(nullptr, DType::kBFloat16, device(), {0, 10, 4, 64});
  EXPECT_NO_THROW(flashport::attention(args));  // batch 0
}

// Queries of which none sees a key: output 0, lse -inf.
TEST(AttentionSpecial, QueriesThatSeeNoKey) {
  AttentionCase c = {.name = "blind", .q_lens = {200, 200}, .kv_lens = {3, 3}, .causal = true};
  FLASHPORT_REQUIRE_SUPPORT("attention_bf16_d64_blind", flashport::supports(c.query()));
  AttentionCall call(c);
  call.run();
  EXPECT_EQ(call.check(), "");
  for (std::int64_t row = 0; row < 197; ++row) {
    EXPECT_EQ(call.out().get({1, row, 3, 63}), 0) << row;
    EXPECT_EQ(call.lse()->get({1, 3, row}), -std::numeric_limits<double>::infinity()) << row;
  }
}

}  // namespace
}  // namespace flashport_test
