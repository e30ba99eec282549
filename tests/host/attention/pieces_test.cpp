// Into how many pieces the host expects the keys of attention to be cut, and the room that it makes for partial
// results.
#include <gtest/gtest.h>

#include <flashport/backend.h>

#include "common/host/attention/plan.h"
#include "common/host/attention/problem.h"
#include "common/host/workspace.h"
#include "tests/host/attention/attention_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

class PiecesOfAttention : public ::testing::Test {
 protected:
  void TearDown() override { set_multiprocessor_limit(0); }

  AttentionPlan plan(const AttentionArgs& args) {
    const AttentionProblem problem = validate_attention(args);
    return plan_attention(problem, device_context(Check("attention"), problem.q, "q"));
  }
  AttentionParams params(const AttentionArgs& args) { return plan(args).params; }
  std::string kernel(const AttentionArgs& args) { return plan(args).kernel->key; }

  FakeBackends backends_;
};

// Memory that no call reads, apart from all other.
void* far_away() { return reinterpret_cast<void*>(std::uintptr_t{1} << 40); }

// One sequence of `queries` on `keys`, of 32 heads in work tiles of 128 rows: 4 pieces make 128 work tiles.
AttentionArgs few_queries(std::int64_t queries, std::int64_t keys, std::int64_t batch = 1) {
  AttentionArgs a;
  a.q = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {batch, queries, 32, 128});
  a.out = TensorView(far_away(), DType::kBFloat16, kGpu, {batch, queries, 32, 128});
  a.k = a.v = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {batch, keys, 8, 128});
  return a;
}

TEST_F(PiecesOfAttention, PiecesOfFewQueries) {
  AttentionArgs a = few_queries(128, 65536);
  a.causal = true;
  fake_state().multiprocessors = 132;
  attention(a, 3);
  ASSERT_EQ(fake_state().launches.size(), 2u);
  const Launch &launch = fake_state().launches[0], &merge = fake_state().launches[1];
  EXPECT_EQ(launch.grid, 128);
  EXPECT_EQ(merge.key, "attention_merge/fakegpu");
  EXPECT_EQ(merge.stream, 3u);
  EXPECT_EQ(merge.grid, 132 * 2);
  EXPECT_EQ(launch.params, merge.params);
  const auto p = launch.as<AttentionParams>();
  EXPECT_EQ(p.pieces.rule.count, 0);
  EXPECT_EQ(p.pieces.rule.work_tiles, 4);
  EXPECT_EQ(p.pieces.rule.rows, 128);
  EXPECT_EQ(p.pieces.rule.keys, 64);
  EXPECT_EQ(p.pieces.most, 4);
  EXPECT_EQ(p.pieces.rows, 4 * 128);
  EXPECT_EQ(p.pieces.rows_of_sequence, 4 * 128);
  EXPECT_EQ(p.pieces.rows_of_query, 0);
  EXPECT_EQ(p.pieces.columns, 128);
  const auto* base = reinterpret_cast<const char*>(p.counter);
  EXPECT_EQ(static_cast<const void*>(p.pieces.out), base + kCounterAreaBytes);
  EXPECT_EQ(static_cast<const void*>(p.pieces.lse), base + kCounterAreaBytes + 32 * 512 * 128 * 4);
  EXPECT_EQ(attention_workspace_size(a), kCounterAreaBytes + 32 * 512 * (128 + 1) * 4);
  // However large the batch is: the pieces of a sequence are its own.
  EXPECT_EQ(params(few_queries(128, 65536, 50)).pieces.most, 4);
}

TEST_F(PiecesOfAttention, PiecesFollowFromLengthsAndHeads) {
  const auto most = [&](const AttentionArgs& a) { return params(a).pieces.most; };
  EXPECT_EQ(most(few_queries(1, 65536)), 4);
  EXPECT_EQ(most(few_queries(129, 65536)), 2);
  EXPECT_EQ(most(few_queries(128, 3000)), 2);
  AttentionArgs a = few_queries(128, 65536);
  a.causal = true;
  a.window_left = 2 * 1024 - 128;
  EXPECT_EQ(most(a), 2);  // of the keys that some query sees
  a.window_left = 1000;
  EXPECT_EQ(most(a), 0);
}

// Calls of which no sequence can be cut have the counter alone, and one launch.
TEST_F(PiecesOfAttention, NoPieces) {
  const auto expect_none = [&](const AttentionArgs& a) {
    fake_state().launches.clear();
    attention(a);
    EXPECT_EQ(fake_state().launches.size(), 1u);
    EXPECT_EQ(fake_state().launches[0].as<AttentionParams>().pieces.most, 0);
    EXPECT_EQ(attention_workspace_size(a), 256);
  };
  expect_none(few_queries(257, 65536));
  expect_none(few_queries(4096, 4096));
  expect_none(few_queries(128, 2047));
  AttentionArgs a = few_queries(128, 65536);
  a.num_splits = 1;
  expect_none(a);
  // Packed prompts: one tensor says the offsets of queries and of keys.
  AttentionInputs inputs(kGpu);
  inputs.pack();
  AttentionArgs& packed = inputs.args;
  packed.max_seqlen_k = 300;
  expect_none(packed);
  packed.k = packed.v = TensorView(far_away(), DType::kBFloat16, kGpu, {100000, 2, 128});
  packed.max_seqlen_q = packed.max_seqlen_k = 90000;
  packed.cu_seqlens_k = packed.cu_seqlens_q;
  expect_none(packed);
  packed.seqused_q = inputs.ints(inputs.used);
  EXPECT_GT(plan(packed).params.pieces.most, 1);
}

// Partial results lie where they take the least room.
TEST_F(PiecesOfAttention, RoomOfPartialResults) {
  AttentionInputs inputs(kGpu);
  inputs.pack();
  AttentionArgs& a = inputs.args;  // 3 sequences, 8 heads: a sequence may have 16 work tiles a head
  a.k = a.v = TensorView(far_away(), DType::kBFloat16, kGpu, {100000, 2, 128});
  a.max_seqlen_k = 90000;
  PieceParams p = plan(a).params.pieces;
  EXPECT_EQ(p.most, 16);
  EXPECT_EQ(p.rows, 3 * 16 * 128);  // of each sequence
  EXPECT_EQ(p.rows_of_sequence, 16 * 128);
  EXPECT_EQ(p.rows_of_query, 0);
  EXPECT_EQ(p.rows_of_four_keys, 0);
  a.max_seqlen_q = 20;
  EXPECT_EQ(plan(a).params.pieces.rows, 3 * 16 * 20);
  a.max_seqlen_q = 300;
  a.q = TensorView(a.q.data, DType::kBFloat16, kGpu, {100, 8, 128});
  a.out = TensorView(a.out.data, DType::kBFloat16, kGpu, {100, 8, 128});
  p = plan(a).params.pieces;
  EXPECT_EQ(p.rows, 16 * 100);  // of each query
  EXPECT_EQ(p.rows_of_query, 16);
  EXPECT_EQ(p.rows_of_sequence, 0);
  a.q = TensorView(a.q.data, DType::kBFloat16, kGpu, {600, 8, 128});
  a.out = TensorView(a.out.data, DType::kBFloat16, kGpu, {600, 8, 128});
  a.k = a.v = TensorView(far_away(), DType::kBFloat16, kGpu, {9000, 2, 128});
  a.max_seqlen_k = 8000;
  p = plan(a).params.pieces;
  EXPECT_EQ(p.most, 7);
  EXPECT_EQ(p.rows, 9000 / 4);  // of four keys
  EXPECT_EQ(p.rows_of_four_keys, 1);
  EXPECT_EQ(p.rows_of_query, 0);
  EXPECT_EQ(p.rows_of_sequence, 0);
}

TEST_F(PiecesOfAttention, PiecesByCount) {
  AttentionArgs a = few_queries(300, 1000);
  a.num_splits = 7;
  AttentionPlan p = plan(a);
  EXPECT_EQ(p.params.pieces.most, 6);  // 16 key tiles, three a piece
  EXPECT_EQ(p.params.pieces.rows, 6 * 300);
  EXPECT_EQ(p.work_tiles, 3 * 32 * 6);
  a.seqused_k = TensorView(scratch_at(0), DType::kInt32, kGpu, {1});
  EXPECT_EQ(plan(a).params.pieces.most, 7);
  a.num_splits = 128;
  EXPECT_EQ(plan(a).params.pieces.most, 16);
  a.k = a.v = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {1, 64, 8, 128});
  EXPECT_EQ(plan(a).params.pieces.most, 0);

  // The published heuristic: as flash_decode asks it, with a head of queries for each head of keys.
  a = few_queries(100, 64000);
  a.num_splits = 0;
  EXPECT_EQ(plan(a).params.pieces.rule.count, 0);  // 64 query blocks on 2 x 10 multiprocessors
  set_multiprocessor_limit(132);
  EXPECT_EQ(plan(a).params.pieces.rule.count, num_splits_heuristic(2 * 32, 2 * 132, 64000 / 128, 128));
}

TEST_F(PiecesOfAttention, MorePartialResultsThanOneCallTakes) {
  AttentionArgs a = few_queries(1 << 20, 1 << 20);
  a.num_splits = 128;
  EXPECT_EQ(error_of<NotSupportedError>([&] { (void)plan(a); }),
            "attention: batch 1 with 1048576 queries and 32 heads each in 128 pieces is more than one call takes; cut "
            "the batch");
}

TEST_F(PiecesOfAttention, ExplainedPieces) {
  AttentionScheduleQuery query{.call = {.target = "fakegpu", .causal = true}};
  query.num_q_heads = 32;
  query.num_kv_heads = 8;
  query.q_len = 128;
  query.kv_len = 65536;
  fake_state().multiprocessors = 132;
  const AttentionSchedule s = explain(query);
  EXPECT_EQ(s.pieces, 4);
  EXPECT_EQ(s.work_tiles, 128);
  EXPECT_EQ(s.workspace_bytes, attention_workspace_size(few_queries(128, 65536)));
  EXPECT_EQ(
      s.text,
      "attention/bf16/hd128/plain/fakegpu: 128 blocks of 384 threads and 98304 bytes of shared memory for 128 work "
      "tiles of 128 rows; key tiles of 64 keys, 2 stages, keys in 4 pieces, merged in a second launch; 8585216 "
      "bytes of workspace");
  query.num_splits = 1;
  EXPECT_EQ(explain(query).pieces, 1);
  EXPECT_EQ(explain(query).workspace_bytes, 256);
  query.num_splits = 100;
  EXPECT_EQ(explain(query).pieces, 94);  // of 11 key tiles
}

}  // namespace
}  // namespace flashport::test
