// Calls of attention with new keys: which launches make them, in one or after the other, and what which_kernel() and
// explain() say of it.
#include <gtest/gtest.h>

#include <functional>

#include <flashport/backend.h>

#include "common/device/decode/params.h"
#include "tests/host/attention/attention_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

// One query and one new key for each of three sequences, on up to 500 keys.
struct AppendInputs : AttentionInputs {
  std::vector<std::int32_t> before = {5, 0, 160}, offsets_new = {0, 2, 2, 3};

  explicit AppendInputs(std::int64_t head_dim = 128) : AttentionInputs(kGpu) {
    set_head_dims(head_dim, head_dim);
    args.q = TensorView(args.q.data, DType::kBFloat16, kGpu, {3, 1, 8, head_dim});
    args.out = TensorView(args.out.data, DType::kBFloat16, kGpu, {3, 1, 8, head_dim});
    args.seqused_k = ints(before);
    args.k_new = TensorView(scratch_at(1 << 20), DType::kBFloat16, kGpu, {3, 1, 2, head_dim});
    args.v_new = TensorView(scratch_at(2 << 20), DType::kBFloat16, kGpu, {3, 1, 2, head_dim});
    args.rotary_cos = TensorView(scratch_at(3 << 20), DType::kBFloat16, kGpu, {500, head_dim / 2});
    args.rotary_sin = TensorView(scratch_at(4 << 20), DType::kBFloat16, kGpu, {500, head_dim / 2});
    args.causal = true;
  }
};

class AppendAttention : public ::testing::Test {
 protected:
  void TearDown() override { set_multiprocessor_limit(0); }

  // The keys of the launches of a call.
  std::vector<std::string> launches(const AttentionArgs& args) {
    fake_state().launches.clear();
    attention(args);
    std::vector<std::string> keys;
    for (const Launch& launch : fake_state().launches) keys.push_back(launch.key);
    return keys;
  }

  FakeBackends backends_;
};

const std::vector<std::string> kOneLaunch = {"decode_append/bf16/kv=bf16/hd128/r16/plain/fakegpu"};
const std::vector<std::string> kOneLaunchForAllCalls = {"decode_append/bf16/kv=bf16/hd128/r16/fakegpu"};
const std::vector<std::string> kTwoLaunches = {"append_rotary/fakegpu", "decode/bf16/kv=bf16/hd128/r16/fakegpu"};

TEST_F(AppendAttention, FewNewKeysAreWrittenByTheLaunchThatDecodes) {
  AppendInputs inputs;
  ASSERT_EQ(launches(inputs.args), kOneLaunch);
  const auto p = fake_state().launches[0].as<AppendDecodeParams>();
  EXPECT_EQ(p.q.data, inputs.args.q.data);
  EXPECT_EQ(p.cache.seqlens.data, inputs.before.data());
  EXPECT_EQ(p.cache.max_len, 500);
  EXPECT_EQ(p.append.new_len, 1);
  EXPECT_EQ(p.append.total_new, 3);
  EXPECT_EQ(p.append.pages, 3);
  EXPECT_EQ(p.append.sides[1].rows.data, inputs.args.k_new->data);
  EXPECT_EQ(p.append.sides[2].rows.data, inputs.args.v_new->data);
  EXPECT_EQ(p.append.rotary.cos, inputs.args.rotary_cos->data);
  EXPECT_EQ(p.append.rotary.queries_advance, 1);
}

TEST_F(AppendAttention, OptionsTakeTheKernelForAllCalls) {
  AppendInputs inputs;
  inputs.args.softcap = 5.0f;
  EXPECT_EQ(launches(inputs.args), kOneLaunchForAllCalls);
  inputs.args.softcap = 0.0f;
  inputs.args.window_left = 100;
  EXPECT_EQ(launches(inputs.args), kOneLaunchForAllCalls);
  inputs.args.window_left = -1;
  EXPECT_EQ(launches(inputs.args), kOneLaunch);
}

TEST_F(AppendAttention, OneWorkspaceServesOneLaunchAndTwo) {
  AppendInputs inputs;
  const std::int64_t bytes = attention_workspace_size(inputs.args);
  inputs.args.workspace = TensorView(scratch_at(44 << 20), DType::kUInt8, kGpu, {bytes});
  EXPECT_EQ(launches(inputs.args), kOneLaunch);
  inputs.args.k_new->data = scratch_at((1 << 20) + 2);
  EXPECT_EQ(attention_workspace_size(inputs.args), bytes);
  EXPECT_EQ(launches(inputs.args), kTwoLaunches);
  inputs.args.workspace->shape[0] = bytes - 1;
  for (const int shift : {0, 2}) {
    inputs.args.k_new->data = scratch_at((1 << 20) + shift);
    EXPECT_EQ(error_of<ValueError>([&] { attention(inputs.args); }), "attention: workspace must have at least " +
                                                                         std::to_string(bytes) + " bytes, got " +
                                                                         std::to_string(bytes - 1));
  }
}

// Several queries that see later keys take the kernel for all calls, with and without new keys.
TEST_F(AppendAttention, FewQueriesThatAreNotCausal) {
  AppendInputs inputs;
  AttentionArgs& args = inputs.args;
  for (TensorView* view : {&args.q, &args.out}) *view = TensorView(view->data, DType::kBFloat16, kGpu, {3, 2, 8, 128});
  EXPECT_EQ(launches(args), kOneLaunch);
  EXPECT_EQ(fake_state().launches[0].as<AppendDecodeParams>().window_right, 0);
  args.causal = false;
  const struct {
    std::int64_t asked;
    std::int32_t right, clear;
  } kWindows[] = {{-1, -1, 2}, {0, 0, 1}, {1, 1, 2}, {300, 300, 2}};
  for (const auto& [asked, right, clear] : kWindows) {
    args.window_right = asked;
    EXPECT_EQ(launches(args), asked == 0 ? kOneLaunch : kOneLaunchForAllCalls);
    const auto p = fake_state().launches[0].as<AppendDecodeParams>();
    EXPECT_EQ(p.window_right, right);
    EXPECT_EQ(p.clear_right, clear);
  }
  args.window_right = -1;
  args.k_new = args.v_new = args.rotary_cos = args.rotary_sin = std::nullopt;
  EXPECT_EQ(launches(args), std::vector<std::string>{"decode/bf16/kv=bf16/hd128/r16/fakegpu"});
}

// The second launch that combines few tiles counts the new keys, too.
TEST_F(AppendAttention, AndASecondLaunchCombines) {
  AppendInputs inputs(256);
  fake_state().multiprocessors = 200;
  const std::vector<std::string> wanted = {"decode_append/bf16/kv=bf16/hd256/r16/fakegpu",
                                           "decode_append_combine/fakegpu"};
  inputs.args.k = TensorView(inputs.args.k.data, DType::kBFloat16, kGpu, {1, 5000, 2, 256});
  inputs.args.v = TensorView(inputs.args.v.data, DType::kBFloat16, kGpu, {1, 5000, 2, 256});
  for (TensorView* view : {&inputs.args.q, &inputs.args.out, &*inputs.args.k_new, &*inputs.args.v_new}) {
    view->shape[0] = 1;
  }
  inputs.args.seqused_k->shape[0] = 1;
  EXPECT_EQ(launches(inputs.args), wanted);
  EXPECT_EQ(fake_state().launches[1].as<AppendDecodeParams>().append.total_new, 1);
}

TEST_F(AppendAttention, WhatCopiesCannotBringIsWrittenBefore) {
  const std::pair<const char*, std::function<void(AppendInputs&)>> changes[] = {
      {"values at odd addresses", [](AppendInputs& i) { i.args.v_new->data = scratch_at((2 << 20) + 2); }},
      {"rows at odd addresses", [](AppendInputs& i) { i.args.k_new->strides[2] = 129; }},
      {"values apart", [](AppendInputs& i) { i.args.k_new->strides[3] = 2; }},
      {"angles at odd addresses", [](AppendInputs& i) { i.args.rotary_sin->data = scratch_at((4 << 20) + 2); }},
      {"angles in odd rows", [](AppendInputs& i) { i.args.rotary_cos->strides[0] = 65; }},
      {"another type",
       [](AppendInputs& i) {
         i.args.rotary_cos = i.args.rotary_sin = {};
         i.args.k_new->dtype = i.args.v_new->dtype = DType::kFloat32;
       }},
      {"many new keys",
       [](AppendInputs& i) {
         for (auto* view : {&i.args.k_new, &i.args.v_new}) {
           *view = TensorView((*view)->data, DType::kBFloat16, kGpu, {3, 17, 2, 128});
         }
       }},
      {"a window to the right of new keys",
       [](AppendInputs& i) {
         for (auto* view : {&i.args.k_new, &i.args.v_new}) {
           *view = TensorView((*view)->data, DType::kBFloat16, kGpu, {3, 7, 2, 128});
         }
         i.args.window_left = 5;
       }},
      {"scales", [](AppendInputs& i) { i.args.k_scale = i.floats({1}); }},
  };
  for (const auto& [name, change] : changes) {
    AppendInputs inputs;
    change(inputs);
    EXPECT_EQ(launches(inputs.args), kTwoLaunches) << name;
  }
  AppendInputs inputs;  // a head_dim whose kernel has none beside it that appends
  inputs.set_head_dims(64, 64);
  AppendInputs other(64);
  EXPECT_EQ(launches(other.args),
            (std::vector<std::string>{"append_rotary/fakegpu", "decode_plain/bf16/kv=bf16/hd64/r16/fakegpu"}));
}

// One block appends for six query tiles at most, those of three sequences of two kv heads.
TEST_F(AppendAttention, ManyQueryTilesOfABlock) {
  AppendInputs inputs;
  fake_state().occupancy = 1;
  set_multiprocessor_limit(1);
  EXPECT_EQ(launches(inputs.args), kOneLaunch);
  std::vector<std::int32_t> before(4, 5);
  inputs.args.seqused_k = inputs.ints(before);
  for (auto* view :
       {&inputs.args.q, &inputs.args.out, &inputs.args.k, &inputs.args.v, &*inputs.args.k_new, &*inputs.args.v_new}) {
    view->shape[0] = 4;
  }
  EXPECT_EQ(launches(inputs.args), kTwoLaunches);
  set_multiprocessor_limit(2);
  EXPECT_EQ(launches(inputs.args), kOneLaunch);
}

TEST_F(AppendAttention, PackedNewKeys) {
  AppendInputs inputs;
  for (auto* view : {&inputs.args.k_new, &inputs.args.v_new}) {
    *view = TensorView((*view)->data, DType::kBFloat16, kGpu, {3, 2, 128});
  }
  inputs.args.cu_seqlens_k_new = inputs.ints(inputs.offsets_new);
  EXPECT_EQ(launches(inputs.args), kOneLaunch);
  inputs.args.window_left = 2;  // one sequence may have all three
  EXPECT_EQ(launches(inputs.args), kOneLaunchForAllCalls);
  inputs.args.window_left = 1;
  EXPECT_EQ(launches(inputs.args), kTwoLaunches);
}

TEST_F(AppendAttention, QueriesSayWhichKernelAppends) {
  AttentionQuery query{
      .target = "fakegpu", .causal = true, .seqused_k = true, .appends = true, .q_len = 1, .group_size = 4};
  EXPECT_EQ(which_kernel(query), kOneLaunchForAllCalls[0]);
  AttentionScheduleQuery call{.call = query, .batch = 3, .num_q_heads = 8, .num_kv_heads = 2, .kv_len = 500};
  EXPECT_EQ(explain(call).text.find("flash_decode's " + kOneLaunch[0] + ": "), 0u);
  call.q_len = call.call.q_len = 8;  // 32 rows, for which there are tiles of 64
  EXPECT_EQ(
      explain(call).text.find("append_rotary/fakegpu, then flash_decode's decode_plain/bf16/kv=bf16/hd128/r64/fakegpu"),
      0u);
  EXPECT_EQ(which_kernel(call.call), "decode/bf16/kv=bf16/hd128/r64/fakegpu");
  call.q_len = call.call.q_len = 100;
  EXPECT_EQ(explain(call).text.find("append_rotary/fakegpu, then attention/bf16/hd128/plain/fakegpu: "), 0u);
  query.appends = false;
  EXPECT_EQ(which_kernel(query), "decode/bf16/kv=bf16/hd128/r16/fakegpu");
}

}  // namespace
}  // namespace flashport::test
