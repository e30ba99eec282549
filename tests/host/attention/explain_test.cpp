// explain() of calls of attention with windows, lengths, offsets and new keys: what the plan of such a call is.
#include <gtest/gtest.h>

#include <functional>

#include "common/host/attention/plan.h"
#include "common/host/attention/problem.h"
#include "tests/host/attention/attention_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

struct ExplainedAttention : ::testing::Test {
  FakeBackends backends_;
};

// The schedule of a call, checked against what explain() says of its shapes.
AttentionSchedule expect_explained(const AttentionArgs& args, const AttentionScheduleQuery& query) {
  const AttentionProblem problem = validate_attention(args);
  const AttentionPlan plan = plan_attention(problem, device_context(Check("attention"), problem.q, "q"));
  const AttentionSchedule wanted = schedule_of(plan), s = explain(query);
  EXPECT_EQ(s.text, wanted.text);
  EXPECT_EQ(s.pieces, wanted.pieces);
  EXPECT_EQ(s.work_tiles, wanted.work_tiles);
  EXPECT_EQ(s.blocks, wanted.blocks);
  EXPECT_EQ(s.workspace_bytes, attention_workspace_size(args));
  return s;
}

// Queries of 32 heads on 65536 keys.
AttentionArgs few_queries(std::int64_t queries = 128) {
  AttentionArgs a;
  a.q = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {2, queries, 32, 128});
  a.out = TensorView(scratch_at(32 << 20), DType::kBFloat16, kGpu, {2, queries, 32, 128});
  a.k = a.v = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {2, 65536, 8, 128});
  a.k.data = a.v.data = reinterpret_cast<void*>(std::uintptr_t{1} << 40);
  return a;
}
AttentionScheduleQuery few_queries_asked() {
  return {
      .call = {.target = "fakegpu"}, .batch = 2, .num_q_heads = 32, .num_kv_heads = 8, .q_len = 128, .kv_len = 65536};
}

TEST_F(ExplainedAttention, Windows) {
  AttentionArgs a = few_queries();
  AttentionScheduleQuery query = few_queries_asked();
  EXPECT_EQ(expect_explained(a, query).pieces, 4);
  a.window_left = query.window_left = 2 * 1024 - 128;
  EXPECT_EQ(expect_explained(a, query).pieces, 2);  // of the keys that some query sees
  a.window_left = query.window_left = 1000;
  EXPECT_EQ(expect_explained(a, query).pieces, 1);
  a.window_left = query.window_left = 100000;  // hides none
  a.window_right = query.window_right = 3;
  EXPECT_EQ(expect_explained(a, query).pieces, 4);
}

// Lengths on the device may be shorter than shapes say, and few queries are cut more often.
TEST_F(ExplainedAttention, Lengths) {
  AttentionArgs a = few_queries(129);
  AttentionScheduleQuery query = few_queries_asked();
  query.q_len = 129;
  std::int32_t lengths[2] = {};
  const TensorView given(lengths, DType::kInt32, kGpu, {2});
  EXPECT_EQ(expect_explained(a, query).pieces, 2);
  a.seqused_q = given;
  query.seqused_q = true;
  EXPECT_EQ(expect_explained(a, query).pieces, 4);
  a.seqused_q.reset();
  query.seqused_q = false;
  a.num_splits = query.num_splits = 100;
  EXPECT_EQ(expect_explained(a, query).pieces, 94);  // of 11 key tiles
  a.seqused_k = given;
  query.call.seqused_k = true;
  EXPECT_EQ(expect_explained(a, query).pieces, 100);
  a.seqused_k.reset();
  query.call.seqused_k = false;
  a.leftpad_k = given;
  query.leftpad_k = true;
  EXPECT_EQ(expect_explained(a, query).pieces, 100);
}

// Packed sequences: by the tokens of all of them, and none is cut that has as many queries as keys.
TEST_F(ExplainedAttention, Offsets) {
  AttentionInputs inputs(kGpu);
  inputs.pack();
  AttentionArgs& a = inputs.args;
  AttentionScheduleQuery query{.call = {.target = "fakegpu"}, .batch = 3, .num_q_heads = 8, .num_kv_heads = 2};
  query.q_len = 300;
  query.kv_len = 500;
  query.total_q = 600;
  query.total_k = 1200;
  EXPECT_EQ(expect_explained(a, query).work_tiles, 8 * (600 / 128 + 3));
  a.k = a.v = TensorView(reinterpret_cast<void*>(std::uintptr_t{1} << 40), DType::kBFloat16, kGpu, {100000, 2, 128});
  query.total_k = 100000;
  a.max_seqlen_k = query.kv_len = 90000;
  EXPECT_EQ(expect_explained(a, query).pieces, 16);
  a.cu_seqlens_k = a.cu_seqlens_q;
  query.same_offsets = true;
  EXPECT_EQ(expect_explained(a, query).pieces, 1);
  query.total_q = 0;
  EXPECT_EQ(error_of<ValueError>([&] { (void)explain(query); }),
            "explain: total_k must come with total_q and without paged, as cu_seqlens_k with cu_seqlens_q");
  query.total_k = 0;
  EXPECT_EQ(error_of<ValueError>([&] { (void)explain(query); }),
            "explain: same_offsets must come with total_q and total_k, got 0 and 0");
  query.same_offsets = false;
  query.window_left = -2;
  EXPECT_EQ(error_of<ValueError>([&] { (void)explain(query); }),
            "explain: window must be two numbers from -1 (infinite) on, got (-2, -1)");
}

// What flash_decode's kernels serve has their tiles, unless the call has what they do not.
TEST_F(ExplainedAttention, FewQueries) {
  AttentionScheduleQuery query{.call = {.target = "fakegpu", .causal = true, .seqused_k = true},
                               .batch = 3,
                               .num_q_heads = 8,
                               .num_kv_heads = 2,
                               .q_len = 2,
                               .kv_len = 500};
  const AttentionSchedule s = explain(query);
  EXPECT_EQ(s.kernel, "decode/bf16/kv=bf16/hd128/r16/fakegpu");
  EXPECT_EQ(s.rows, 16);
  EXPECT_EQ(s.keys, 64);
  EXPECT_EQ(s.stages, 3);
  EXPECT_EQ(s.threads, 128);
  EXPECT_EQ(s.shared_bytes, 65536);
  EXPECT_EQ(s.work_tiles, 6);
  const auto kernel = [&](const std::function<void(AttentionScheduleQuery&)>& bend) {
    AttentionScheduleQuery bent = query;
    bend(bent);
    return explain(bent).kernel;
  };
  const std::string own = "attention/bf16/hd128/plain/fakegpu";
  EXPECT_EQ(kernel([](auto& q) { q.window_left = 99; }), s.kernel);
  EXPECT_EQ(kernel([](auto& q) { q.call.causal = false; }), s.kernel);
  EXPECT_EQ(kernel([](auto& q) { q.total_q = 6; }), own);
  EXPECT_EQ(kernel([](auto& q) { q.seqused_q = true; }), own);
  EXPECT_EQ(kernel([](auto& q) { q.leftpad_k = true; }), own);
  EXPECT_EQ(kernel([](auto& q) { q.num_splits = 1; }), own);
  EXPECT_EQ(kernel([](auto& q) { q.q_len = 17; }), own);
}

// The workspace of new keys lies behind that of the launches after it.
TEST_F(ExplainedAttention, NewKeys) {
  AttentionInputs inputs(kGpu);
  AttentionArgs& a = inputs.args;
  AttentionScheduleQuery query{.call = {.target = "fakegpu", .causal = true, .seqused_k = true, .appends = true},
                               .batch = 3,
                               .num_q_heads = 8,
                               .num_kv_heads = 2,
                               .q_len = 300,
                               .kv_len = 500};
  a.causal = true;
  a.seqused_k = inputs.ints(inputs.pads);
  a.k_new = a.v_new = TensorView(scratch_at(41 << 20), DType::kBFloat16, kGpu, {3, 2, 2, 128});
  EXPECT_EQ(explain(query).workspace_bytes, attention_workspace_size(a));
  a.rotary_cos = a.rotary_sin = TensorView(scratch_at(42 << 20), DType::kBFloat16, kGpu, {600, 32});
  query.rotary = true;
  EXPECT_EQ(explain(query).workspace_bytes, attention_workspace_size(a));
  EXPECT_EQ(explain(query).text.find("append_rotary/fakegpu, then attention/"), 0u);
  a.q = a.out = TensorView(scratch_at(0), DType::kBFloat16, kGpu, {3, 1, 8, 128});
  a.out.data = scratch_at(32 << 20);
  query.q_len = 1;
  EXPECT_EQ(explain(query).workspace_bytes, attention_workspace_size(a));
  EXPECT_EQ(explain(query).kernel, "decode_append/bf16/kv=bf16/hd128/r16/plain/fakegpu");
  EXPECT_NE(explain(query).text.find(" bytes with that of new keys"), std::string::npos) << explain(query).text;
}

}  // namespace
}  // namespace flashport::test
