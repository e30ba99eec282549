// explain() of operations whose blocks never meet: each schedule is that of the launch that such a call makes.
#include <gtest/gtest.h>

#include <limits>

#include "tests/host/decode/decode_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

struct Explained : ::testing::Test {
  FakeBackends backends_;

  // The only launch so far is the one that was explained.
  static void expect_launched(const LaunchSchedule& s) {
    ASSERT_EQ(fake_state().launches.size(), 1u);
    EXPECT_EQ(fake_state().launches[0].key, s.kernel);
    EXPECT_EQ(fake_state().launches[0].grid, s.blocks);
  }
  template <class Query>
  static std::string refusal(const Query& query) {
    return error_of<Error>([&] { (void)explain(query); });
  }
};

TEST_F(Explained, DecodeStage2) {
  const DecodeStage2ScheduleQuery query{.call = {.target = "fakegpu"}, .batch = 3, .num_q_heads = 8};
  const LaunchSchedule s = explain(query);
  EXPECT_EQ(s.kernel, which_kernel(query.call));
  EXPECT_EQ(s.threads, 128);
  EXPECT_EQ(s.blocks, 24);
  EXPECT_EQ(s.work, 24);
  EXPECT_EQ(s.shared_bytes, 0);
  EXPECT_EQ(s.workspace_bytes, 0);
  EXPECT_EQ(s.text, "decode_stage2/fakegpu: 24 blocks of 128 threads for 24 rows");
  EXPECT_TRUE(fake_state().launches.empty());

  std::int32_t lengths[3] = {5, 0, 7};
  DecodeStage2Args args;
  args.mid_out = TensorView(scratch_at(0), DType::kFloat32, kGpu, {3, 8, 4, 64});
  args.mid_out_logexpsum = TensorView(scratch_at(1 << 20), DType::kFloat32, kGpu, {3, 8, 4});
  args.b_seqlen = TensorView(lengths, DType::kInt32, kGpu, {3});
  args.out = TensorView(scratch_at(2 << 20), DType::kBFloat16, kGpu, {3, 8, 64});
  args.block_seq = 16;
  flash_decode_stage2(args);
  expect_launched(s);

  EXPECT_EQ(refusal(DecodeStage2ScheduleQuery{.call = {.target = "fakegpu"}, .batch = 0}),
            "explain: batch must be from 1 to 2147483647, got 0");
  EXPECT_EQ(refusal(DecodeStage2ScheduleQuery{.call = {.target = "fakegpu"}, .num_q_heads = -1}),
            "explain: num_q_heads must be from 1 to 2147483647, got -1");
  EXPECT_EQ(refusal(DecodeStage2ScheduleQuery{.call = {.target = "fakegpu", .out_dtype = DType::kInt32}}),
            "explain: Out must be float16, bfloat16 or float32, got int32");
  EXPECT_EQ(refusal(DecodeStage2ScheduleQuery{.call = {.target = "fakecpu"}}),
            "explain: no device of target fakecpu is here");
}

TEST_F(Explained, Merge) {
  const MergeScheduleQuery query{.call = {.target = "fakegpu"}, .rows = 15};
  const LaunchSchedule s = explain(query);
  EXPECT_EQ(s.kernel, which_kernel(query.call));
  EXPECT_EQ(s.blocks, 15);
  EXPECT_EQ(s.text, "merge_states/fakegpu: 15 blocks of 128 threads for 15 rows");
  MergeStatesArgs args;
  args.o = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {4, 5, 3, 128});
  args.lse = TensorView(scratch_at(1 << 20), DType::kFloat32, kGpu, {4, 5, 3});
  args.out = TensorView(scratch_at(2 << 20), DType::kBFloat16, kGpu, {5, 3, 128});
  args.out_lse = TensorView(scratch_at(3 << 20), DType::kFloat32, kGpu, {5, 3});
  merge_states(args);
  expect_launched(s);
  EXPECT_EQ(refusal(MergeScheduleQuery{.call = {.target = "fakegpu"}, .rows = 0}),
            "explain: rows must be from 1 to 68719476736, got 0");
  EXPECT_EQ(refusal(MergeScheduleQuery{.call = {.target = "fakegpu", .head_dim = 0}}),
            "explain: head_dim must be 1 or more and below 2^31, got 0");
}

// A thread takes 32 values: those of a longer row are several's.
TEST_F(Explained, Append) {
  AppendScheduleQuery query{.call = {.target = "fakegpu", .head_dim_v = 100}, .tokens = 50, .num_kv_heads = 2};
  const LaunchSchedule s = explain(query);
  EXPECT_EQ(s.kernel, which_kernel(query.call));
  EXPECT_EQ(s.work, 50 * 2 * 4);
  EXPECT_EQ(s.threads, 128);
  EXPECT_EQ(s.blocks, 4);
  EXPECT_EQ(s.text, "append_kv/fakegpu: 4 blocks of 128 threads for 400 units of 32 values");
  std::int32_t positions[50] = {};
  AppendKvArgs args;
  args.k = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {50, 2, 128});
  args.v = TensorView(scratch_at(1 << 20), DType::kBFloat16, kGpu, {50, 2, 100});
  args.k_cache = TensorView(scratch_at(2 << 20), DType::kBFloat16, kGpu, {100, 2, 128});
  args.v_cache = TensorView(scratch_at(3 << 20), DType::kBFloat16, kGpu, {100, 2, 100});
  args.positions = TensorView(positions, DType::kInt32, kGpu, {50});
  append_kv(args);
  expect_launched(s);
  query.call.scales_beside = true;
  EXPECT_EQ(explain(query).kernel, "append_any/fakegpu");
  query.call.target = "cpu";  // a block is one thread
  EXPECT_EQ(explain(query).blocks, 400);
  EXPECT_EQ(explain(query).threads, 1);
  query.call.target = "fakegpu";
  query.tokens = 1 << 30;  // more than there are blocks for
  EXPECT_EQ(explain(query).blocks, 1 << 20);
  EXPECT_EQ(explain(query).work, std::int64_t{8} << 30);
  query.tokens = 0;
  EXPECT_EQ(refusal(query), "explain: tokens must be from 1 to 34359738368, got 0");
  query.num_kv_heads = 0;
  EXPECT_EQ(refusal(query), "explain: num_kv_heads must be from 1 to 2147483647, got 0");
}

TEST_F(Explained, QuantizeAndDequantize) {
  QuantizeScheduleQuery query{.call = {.target = "fakegpu", .head_dim = 96}, .rows = 100};
  const LaunchSchedule s = explain(query);
  EXPECT_EQ(s.kernel, which_kernel(query.call));
  EXPECT_EQ(s.work, 300);
  EXPECT_EQ(s.text, "quantize_kv/fakegpu: 3 blocks of 128 threads for 300 units of 32 values");
  QuantizeKvArgs args;
  args.x = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {4, 25, 96});
  args.out = TensorView(scratch_at(1 << 20), DType::kUInt8, kGpu, {4, 25, 3 * 34});
  quantize_kv(args);
  expect_launched(s);
  query.call.dequantize = true;
  const LaunchSchedule back = explain(query);
  EXPECT_EQ(back.text, "dequantize_kv/fakegpu: 3 blocks of 128 threads for 300 units of 32 values");
  fake_state().launches.clear();
  dequantize_kv({.x = args.out, .out = args.x, .format = KvFormat::kQ8_0});
  expect_launched(back);
  query.rows = 0;
  EXPECT_EQ(refusal(query), "explain: rows must be from 1 to 68719476736, got 0");
  query.call.head_dim = 80;
  query.rows = 1;
  EXPECT_EQ(refusal(query), "explain: q8_0 needs a head_dim that is a multiple of 32, got 80");
}

}  // namespace
}  // namespace flashport::test
