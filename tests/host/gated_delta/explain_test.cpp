// explain() of the gated delta rule: each schedule is that of the launches that such a call makes.
#include <gtest/gtest.h>

#include <flashport/backend.h>
#include <flashport/gated_delta.h>

#include "tests/host/decode/decode_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

struct ExplainedGatedDelta : ::testing::Test {
  void TearDown() override { set_multiprocessor_limit(0); }

  template <class Query>
  static std::string refusal(const Query& query) {
    return error_of<Error>([&] { (void)explain(query); });
  }

  FakeBackends backends_;
};

TEST_F(ExplainedGatedDelta, Update) {
  GatedDeltaScheduleQuery query{
      .call = {.target = "cpu", .head_dim_k = 32, .head_dim_v = 72}, .batch = 2, .num_v_heads = 4};
  const GatedDeltaSchedule s = explain(query);
  EXPECT_EQ(s.kernel, which_kernel(query.call));
  EXPECT_EQ(s.columns, 16);
  EXPECT_EQ(s.slices, 5);
  EXPECT_EQ(s.blocks, 2 * 4 * 5);
  EXPECT_EQ(s.threads, 1);
  EXPECT_EQ(s.teams, 1);
  EXPECT_EQ(s.shared_bytes, 2048);
  EXPECT_EQ(s.workspace_bytes, 0);
  EXPECT_EQ(s.text,
            "gated_delta_update/state=fp32/vk/k64/fakecpu: 40 blocks of 1 thread and 2048 bytes of shared memory, each "
            "for 16 columns of a state");
  EXPECT_TRUE(fake_state().launches.empty());

  GatedDeltaUpdateArgs args;
  args.q = args.k = TensorView(scratch_at(0), DType::kBFloat16, Device{}, {2, 3, 2, 32});
  args.v = TensorView(scratch_at(2 << 16), DType::kBFloat16, Device{}, {2, 3, 4, 72});
  args.a = TensorView(scratch_at(3 << 16), DType::kFloat32, Device{}, {2, 3, 4});
  args.b = TensorView(scratch_at(4 << 16), DType::kBFloat16, Device{}, {6, 4});
  args.a_log = TensorView(scratch_at(5 << 16), DType::kFloat32, Device{}, {4});
  args.dt_bias = TensorView(scratch_at(6 << 16), DType::kBFloat16, Device{}, {4});
  args.out = TensorView(scratch_at(7 << 16), DType::kBFloat16, Device{}, {2, 3, 4, 72});
  gated_delta_update(args);
  ASSERT_EQ(fake_state().launches.size(), 1u);
  EXPECT_EQ(fake_state().launches[0].key, s.kernel);
  EXPECT_EQ(fake_state().launches[0].grid, s.blocks);

  query.batch = 0;
  EXPECT_EQ(refusal(query), "explain: batch must be from 1 to 8388607, got 0");
  query.batch = query.num_v_heads = 1 << 15;
  EXPECT_EQ(refusal(query),
            "explain: the call has 1073741824 states of 5 slices, more than 2147483647 together; cut the batch");
  query.num_v_heads = 0;
  EXPECT_EQ(refusal(query), "explain: num_v_heads must be from 1 to 8388607, got 0");
  query.num_v_heads = 1;
  query.call.head_dim_k = 17;
  EXPECT_EQ(refusal(query), "explain: head_dim_k must be a multiple of 8 from 16 to 256, got 17");
  query.call.target = "nowhere";
  EXPECT_EQ(refusal(query).find("explain: no target \"nowhere\""), 0u);
}

// 16 chains of two slices, and 80 chunks of 64 tokens for blocks of four teams that stride over them.
TEST_F(ExplainedGatedDelta, Chunks) {
  GatedDeltaChunkScheduleQuery query{.call = {.target = "fakegpu", .head_dim_k = 32, .head_dim_v = 80},
                                     .batch = 2,
                                     .num_heads = 2,
                                     .num_v_heads = 4,
                                     .tokens = 1280};
  GatedDeltaChunkArgs args;
  args.q = args.k = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {2, 1280, 2, 32});
  args.v = TensorView(scratch_at(2 << 20), DType::kBFloat16, kGpu, {2, 1280, 4, 80});
  args.g = TensorView(scratch_at(4 << 20), DType::kFloat32, kGpu, {2, 1280, 4});
  args.beta = TensorView(scratch_at(5 << 20), DType::kBFloat16, kGpu, {2, 1280, 4});
  args.out = TensorView(scratch_at(6 << 20), DType::kBFloat16, kGpu, {2, 1280, 4, 80});
  const auto expect_launched = [&] {
    const GatedDeltaChunkSchedule s = explain(query);
    fake_state().launches.clear();
    gated_delta_chunk(args);
    ASSERT_EQ(fake_state().launches.size(), 2u);
    EXPECT_EQ(fake_state().launches[0].key, s.prepare_kernel);
    EXPECT_EQ(fake_state().launches[0].grid, s.prepare_blocks);
    EXPECT_EQ(fake_state().launches[1].key, s.kernel);
    EXPECT_EQ(fake_state().launches[1].grid, s.blocks);
    EXPECT_EQ(gated_delta_chunk_workspace_size(args), s.workspace_bytes);
  };
  set_multiprocessor_limit(32);
  GatedDeltaChunkSchedule s = explain(query);
  EXPECT_EQ(s.kernel, which_kernel(query.call));
  EXPECT_EQ(s.columns, 64);
  EXPECT_EQ(s.threads, 128);
  EXPECT_EQ(s.blocks, 2 * 4 * 2);
  EXPECT_EQ(s.prepare_kernel, "gated_delta_prepare/bf16/k64/fakegpu");
  EXPECT_EQ(s.prepare_threads, 512);
  EXPECT_EQ(s.prepare_teams, 4);
  EXPECT_EQ(s.prepare_blocks, 64);
  EXPECT_EQ(s.chunk_tokens, 64);
  EXPECT_EQ(s.chunks, 40);
  EXPECT_TRUE(s.concurrent);
  EXPECT_EQ(
      s.text,
      "gated_delta_prepare/bf16/k64/fakegpu: 64 blocks in teams of 4 of 512 threads for 40 chunks of 64 tokens, and "
      "beside it gated_delta_chunk/bf16/k64/fakegpu: 16 blocks of 128 threads for 64 columns of a state each; " +
          std::to_string(s.workspace_bytes) + " bytes of workspace");
  expect_launched();
  set_multiprocessor_limit(31);
  s = explain(query);
  EXPECT_FALSE(s.concurrent);
  EXPECT_NE(s.text.find(" tokens, then gated_delta_chunk/"), std::string::npos) << s.text;
  expect_launched();

  // Each packed sequence may end in a chunk of its own.
  query.packed = true;
  query.batch = 3;
  std::int32_t offsets[] = {0, 1, 1, 1280};
  args.cu_seqlens = TensorView(offsets, DType::kInt32, kGpu, {4});
  for (TensorView* view : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.out}) view->shape[0] = 1;
  EXPECT_EQ(explain(query).chunks, 1280 / 64 + 3);
  expect_launched();
}

TEST_F(ExplainedGatedDelta, ChunksOnlyWhereTheyRun) {
  GatedDeltaChunkScheduleQuery query{.call = {.target = "fakegpu"}, .num_heads = 2, .num_v_heads = 3};
  EXPECT_EQ(refusal(query), "explain: num_v_heads must be a multiple of num_heads, got 3 and 2");
  query.num_v_heads = 4;
  EXPECT_EQ(refusal(query), "");
  query.tokens = 0;
  EXPECT_EQ(refusal(query), "explain: tokens must be from 1 to 8388607, got 0");
  query.tokens = 1;
  query.num_heads = 0;
  EXPECT_EQ(refusal(query), "explain: num_heads must be from 1 to 8388607, got 0");
  query.num_heads = 1;
  query.call.gate = GateForm::kKey;
  EXPECT_EQ(refusal(query), "explain: gated_delta_chunk takes one gate for each head; gated_delta_update takes others");
  query.call.gate = GateForm::kHead;
  query.call.target = "fakecpu";
  EXPECT_EQ(refusal(query), "explain: no device of target fakecpu is here");
}

}  // namespace
}  // namespace flashport::test
