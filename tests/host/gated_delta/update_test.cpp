// gated_delta_update on fake devices: the params of a call, and what is refused with which text.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include <flashport/gated_delta.h>

#include "common/device/gated_delta/params.h"
#include "tests/host/decode/decode_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

struct GatedDeltaHost : ::testing::Test {
  FakeBackends backends_;
};

// Two rows of three tokens, 2 / 4 heads, K 32, V 64.
struct Inputs {
  std::int64_t slots[2] = {4, -1}, step_slots[2] = {1, 0};
  std::int32_t offsets[3] = {0, 1, 3};
  std::int32_t parents[2 * 3] = {9, 0, 1, 9, 0, 0};
  GatedDeltaUpdateArgs args;

  explicit Inputs(Device device = {}) {
    args.q = TensorView(scratch_at(0), DType::kBFloat16, device, {2, 3, 2, 32});
    args.k = TensorView(scratch_at(1 << 16), DType::kBFloat16, device, {2, 3, 2, 32});
    args.v = TensorView(scratch_at(2 << 16), DType::kBFloat16, device, {2, 3, 4, 64});
    args.a = TensorView(scratch_at(3 << 16), DType::kFloat32, device, {2, 3, 4});
    args.b = TensorView(scratch_at(4 << 16), DType::kBFloat16, device, {6, 4});
    args.a_log = TensorView(scratch_at(5 << 16), DType::kFloat32, device, {1, 1, 4, 1});
    args.dt_bias = TensorView(scratch_at(6 << 16), DType::kBFloat16, device, {4});
    args.state = TensorView(scratch_at(16 << 20), DType::kFloat32, device, {5, 4, 64, 32});
    args.state_indices = TensorView(slots, DType::kInt64, device, {2});
    args.out = TensorView(scratch_at(7 << 16), DType::kBFloat16, device, {2, 3, 4, 64});
  }
  void give_steps() {
    args.intermediate_states = TensorView(scratch_at(32 << 20), DType::kBFloat16, Device{}, {2, 3, 4, 64, 32});
    args.intermediate_indices = TensorView(step_slots, DType::kInt64, Device{}, {2});
    args.parent_tokens = TensorView(parents, DType::kInt32, Device{}, {2, 3});
  }
  void join_rows() {
    args.cu_seqlens = TensorView(offsets, DType::kInt32, Device{}, {3});
    for (TensorView* view : {&args.q, &args.k, &args.v, &*args.a, &args.out}) view->shape[0] = 1;
    args.b->shape[0] = 3;
  }
};

TEST_F(GatedDeltaHost, FillsTheParams) {
  Inputs inputs;
  inputs.give_steps();
  inputs.args.state->strides[0] = 10000;
  gated_delta_update(inputs.args);
  ASSERT_EQ(fake_state().launches.size(), 1u);
  const Launch& launch = fake_state().launches[0];
  EXPECT_EQ(launch.key, "gated_delta_update/state=fp32/vk/k64/fakecpu");
  EXPECT_EQ(launch.grid, 2 * 4 * (64 / 16));
  const auto p = launch.as<GatedDeltaUpdateParams>();
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.tokens, 3);
  EXPECT_EQ(p.by_v_heads.value, 4u);
  EXPECT_EQ(p.by_heads.value, 2u);
  EXPECT_EQ(p.by_head_slices.value, 4u);
  EXPECT_EQ(p.a.stride_seq, 12);
  EXPECT_EQ(p.a.stride_head, 1);
  EXPECT_EQ(p.a.stride_dim, 0);
  EXPECT_EQ(p.b.stride_seq, 12);
  EXPECT_EQ(p.b.stride_token, 4);
  EXPECT_EQ(p.state.slot_stride, 10000);
  EXPECT_EQ(p.state.indices.is_int64, 1);
  EXPECT_EQ(p.steps.slot_stride, 3 * 4 * 64 * 32);
  EXPECT_EQ(p.steps.step_stride, 4 * 64 * 32);
  EXPECT_EQ(p.num_steps, 3);
  EXPECT_EQ(p.num_slots, inputs.args.state->shape[0]);
  EXPECT_EQ(p.num_parents, 3);
  EXPECT_EQ(p.parents_stride_seq, 3);
  EXPECT_FLOAT_EQ(p.scale, 1.0f / std::sqrt(32.0f));
  EXPECT_EQ(p.has_lower_bound, 0);
}

TEST_F(GatedDeltaHost, ReadsGatesPerKeyInEachForm) {
  Inputs inputs;
  inputs.args.is_kda = true;
  inputs.args.dt_bias->shape[0] = 4 * 32;
  const auto stride = [&](std::initializer_list<std::int64_t> shape) {
    inputs.args.a = TensorView(scratch_at(3 << 16), DType::kFloat32, Device{}, shape);
    gated_delta_update(inputs.args);
    const StridedRows a = fake_state().launches.back().as<GatedDeltaUpdateParams>().a;
    return std::vector<std::int64_t>{a.stride_seq, a.stride_token, a.stride_head, a.stride_dim};
  };
  const std::vector<std::int64_t> dense = {3 * 128, 128, 32, 1};
  EXPECT_EQ(stride({2, 3, 4, 32}), dense);
  EXPECT_EQ(stride({2, 3, 4 * 32}), dense);
  EXPECT_EQ(stride({2 * 3, 4 * 32}), dense);
  EXPECT_EQ(stride({2 * 3, 4, 32}), dense);
}

// Gates as they are given, rates of columns, final states: a kernel that takes any of them.
TEST_F(GatedDeltaHost, FillsTheParamsOfOtherGates) {
  Inputs inputs;
  GatedDeltaUpdateArgs& args = inputs.args;
  args.g = args.a;
  args.a.reset();
  args.a_log.reset();
  args.dt_bias.reset();
  args.beta = TensorView(scratch_at(4 << 16), DType::kFloat16, Device{}, {2, 3, 4, 64});
  args.b.reset();
  args.gv = TensorView(scratch_at(5 << 16), DType::kBFloat16, Device{}, {2, 3, 4, 64});
  args.final_states = TensorView(scratch_at(24 << 20), DType::kBFloat16, Device{}, {2, 4, 64, 32});
  args.final_states->strides[0] = 9000;
  args.state->dtype = DType::kBFloat16;
  gated_delta_update(args);
  ASSERT_EQ(fake_state().launches.size(), 1u);
  EXPECT_EQ(fake_state().launches[0].key, "gated_delta_update/any/fakecpu");
  auto p = fake_state().launches[0].as<GatedDeltaUpdateParams>();
  EXPECT_EQ(p.a.data, args.g->data);
  EXPECT_EQ(p.a.stride_seq, 12);
  EXPECT_EQ(p.a.stride_dim, 0);
  EXPECT_EQ(p.a_log, nullptr);
  EXPECT_EQ(p.dt_bias, nullptr);
  EXPECT_EQ(p.b.data, args.beta->data);
  EXPECT_EQ(p.b.stride_head, 64);
  EXPECT_EQ(p.b.stride_dim, 1);
  EXPECT_EQ(p.beta_per_column, 1);
  EXPECT_EQ(p.beta_sigmoid, 0);
  EXPECT_EQ(p.gk.data, nullptr);
  EXPECT_EQ(p.gv.data, args.gv->data);
  EXPECT_EQ(p.gv.stride_token, 4 * 64);
  EXPECT_EQ(p.decay_per_key, 0);
  EXPECT_EQ(p.state.dtype, DType::kBFloat16);
  EXPECT_EQ(p.final_states.dtype, DType::kBFloat16);
  EXPECT_EQ(p.final_states.slot_stride, 9000);
  EXPECT_EQ(p.final_states.indices.data, nullptr);

  args.gk = TensorView(scratch_at(6 << 16), DType::kFloat32, Device{}, {2, 3, 4, 32});
  args.b = args.beta;
  args.beta.reset();
  args.allow_neg_eigval = true;
  gated_delta_update(args);
  p = fake_state().launches.back().as<GatedDeltaUpdateParams>();
  EXPECT_EQ(p.gk.stride_head, 32);
  EXPECT_EQ(p.gk.stride_dim, 1);
  EXPECT_EQ(p.decay_per_key, 1);
  EXPECT_EQ(p.beta_sigmoid, 1);
  EXPECT_EQ(p.beta_factor, 2.0f);
}

// Whatever a kernel of made gates cannot do is done by the one of any.
TEST_F(GatedDeltaHost, ChoosesTheKernelByTheGates) {
  const auto key = [](const auto& bend) {
    Inputs inputs;
    bend(inputs.args);
    gated_delta_update(inputs.args);
    return std::string(fake_state().launches.back().key);
  };
  using Args = GatedDeltaUpdateArgs;
  const std::string any = "gated_delta_update/any/fakecpu";
  EXPECT_EQ(key([](Args&) {}), "gated_delta_update/state=fp32/vk/k64/fakecpu");
  EXPECT_EQ(key([](Args& a) { a.dt_bias.reset(); }), any);
  EXPECT_EQ(key([](Args& a) { a.b.reset(); }), any);
  EXPECT_EQ(key([](Args& a) { a.a_log->dtype = DType::kBFloat16; }), any);
  EXPECT_EQ(key([](Args& a) { a.allow_neg_eigval = true; }), any);
  EXPECT_EQ(key([](Args& a) {
              a.a.reset();
              a.a_log.reset();
              a.dt_bias.reset();
            }),
            any);
  const auto columns = [] { return TensorView(scratch_at(24 << 20), DType::kFloat32, Device{}, {2, 3, 4, 64}); };
  EXPECT_EQ(key([&](Args& a) { a.b = columns(); }), any);
  EXPECT_EQ(key([&](Args& a) { a.gv = columns(); }), any);
  EXPECT_EQ(key([](Args& a) { a.gk = TensorView(scratch_at(24 << 20), DType::kFloat32, Device{}, {2, 3, 4, 32}); }),
            any);
  EXPECT_EQ(key([](Args& a) {
              a.final_states = TensorView(scratch_at(24 << 20), DType::kFloat32, Device{}, {2, 4, 64, 32});
            }),
            any);
}

// Kernels of fp16 states take all gates, and fp32 states too.
TEST_F(GatedDeltaHost, ChoosesTheKernelByTheStates) {
  Inputs inputs;
  GatedDeltaUpdateArgs& args = inputs.args;
  const std::string half = "gated_delta_update/fp16/fakecpu";
  args.state->dtype = DType::kFloat16;
  gated_delta_update(args);
  EXPECT_EQ(fake_state().launches.back().key, half);
  EXPECT_EQ(fake_state().launches.back().as<GatedDeltaUpdateParams>().state.dtype, DType::kFloat16);
  args.state->dtype = DType::kFloat32;
  args.final_states = TensorView(scratch_at(24 << 20), DType::kFloat16, Device{}, {2, 4, 64, 32});
  gated_delta_update(args);
  EXPECT_EQ(fake_state().launches.back().key, half);
  args.final_states.reset();
  inputs.give_steps();
  args.intermediate_states->dtype = DType::kFloat16;
  gated_delta_update(args);
  EXPECT_EQ(fake_state().launches.back().key, half);
  args.state->dtype = DType::kBFloat16;
  EXPECT_EQ(error_of<NotSupportedError>([&] { gated_delta_update(args); }),
            "gated_delta_update: state, final_states and intermediate_states must not be float16 and bfloat16 in one "
            "call");
  EXPECT_EQ(fake_state().launches.size(), 3u);
  EXPECT_EQ(which_kernel(GatedDeltaQuery{.state_dtype = DType::kFloat16, .head_dim_k = 32}), half);
}

TEST_F(GatedDeltaHost, PassesPaddingOn) {
  Inputs inputs;
  gated_delta_update(inputs.args);
  EXPECT_EQ(fake_state().launches.back().as<GatedDeltaUpdateParams>().zero_padding, 0);
  inputs.args.zero_padding = true;
  gated_delta_update(inputs.args);
  EXPECT_EQ(fake_state().launches.back().as<GatedDeltaUpdateParams>().zero_padding, 1);
  EXPECT_EQ(error_of<ValueError>([] {
              Inputs with_steps;
              with_steps.give_steps();
              with_steps.args.zero_padding = true;
              gated_delta_update(with_steps.args);
            }),
            "gated_delta_update: zero_padding needs state_indices, and neither final_states nor intermediate_states");
}

// But for final states, which are those that sequences start with.
TEST_F(GatedDeltaHost, RunsNothingWithoutTokens) {
  Inputs inputs;
  for (TensorView* view : {&inputs.args.q, &inputs.args.k, &inputs.args.v, &*inputs.args.a, &inputs.args.out}) {
    view->shape[1] = 0;
  }
  inputs.args.b->shape[0] = 0;
  gated_delta_update(inputs.args);
  EXPECT_TRUE(fake_state().launches.empty());
  inputs.args.final_states = TensorView(scratch_at(24 << 20), DType::kFloat32, Device{}, {2, 4, 64, 32});
  gated_delta_update(inputs.args);
  EXPECT_EQ(fake_state().launches.size(), 1u);
}

TEST_F(GatedDeltaHost, SaysWhereTheKernelIsMissing) {
  Inputs inputs(kGpu);
  EXPECT_EQ(error_of<NotSupportedError>([&] { gated_delta_update(inputs.args); }),
            "gated_delta_update: fakegpu has no kernel gated_delta_update");
  gated_delta_update(Inputs().args);
  EXPECT_EQ(error_of<NotSupportedError>([&] { gated_delta_update(inputs.args); }),
            "gated_delta_update: fakegpu has no kernel gated_delta_update");
  Inputs half;
  half.args.state->dtype = DType::kBFloat16;
  EXPECT_EQ(error_of<NotSupportedError>([&] { gated_delta_update(half.args); }),
            "gated_delta_update: cpu has no kernel gated_delta_update for head_dim_k 32, states "
            "bfloat16 [V, K]");
}

// What is asked beforehand is answered with the kernel that a call runs, or with the text that it would give.
TEST_F(GatedDeltaHost, AnswersAsCallsDo) {
  const auto refusal = [](const GatedDeltaQuery& query) {
    const Support support = supports(query);
    EXPECT_FALSE(support.supported);
    EXPECT_EQ(error_of<NotSupportedError>([&] { (void)which_kernel(query); }), "which_kernel: " + support.reason);
    return support.reason;
  };
  GatedDeltaQuery query{.head_dim_k = 32, .head_dim_v = 64};
  Inputs inputs;
  gated_delta_update(inputs.args);
  EXPECT_TRUE(supports(query).supported);
  EXPECT_EQ(supports(query).reason, "");
  EXPECT_EQ(which_kernel(query), fake_state().launches.back().key);
  query.head_dim_k = 72;
  EXPECT_EQ(which_kernel(query), "gated_delta_update/state=fp32/vk/k256/fakecpu");
  query.gate = GateForm::kKey;
  EXPECT_EQ(which_kernel(query), "gated_delta_update/kda/fakecpu");
  query.state_layout = StateLayout::kKV;
  EXPECT_EQ(refusal(query),
            "cpu has no kernel gated_delta_update for head_dim_k 72, states float32 [K, V], a gate for each key");
  query = {.state_dtype = DType::kBFloat16, .head_dim_k = 32};
  Inputs half;
  half.args.state->dtype = DType::kBFloat16;
  EXPECT_EQ("gated_delta_update: " + refusal(query),
            error_of<NotSupportedError>([&] { gated_delta_update(half.args); }));
  query.gate = GateForm::kAny;  // takes pools of either type
  EXPECT_EQ(which_kernel(query), "gated_delta_update/any/fakecpu");
  query.state_layout = StateLayout::kKV;
  EXPECT_EQ(refusal(query),
            "cpu has no kernel gated_delta_update for head_dim_k 32, states bfloat16 [K, V], gates of any form");

  EXPECT_EQ(refusal({.head_dim_k = 20}), "head_dim_k must be a multiple of 8 from 16 to 256, got 20");
  EXPECT_EQ(refusal({.head_dim_v = 264}), "head_dim_v must be a multiple of 8 from 16 to 256, got 264");
  EXPECT_EQ(refusal({.q_dtype = DType::kInt32}), "q must be float16, bfloat16 or float32, got int32");
  EXPECT_EQ(refusal({.state_dtype = DType::kInt32}), "state must be float32, bfloat16 or float16, got int32");
  EXPECT_EQ(refusal({.target = "cuda"}), "fakegpu has no kernel gated_delta_update");
  EXPECT_EQ(refusal({.target = "gfx1"}).find("no target \"gfx1\" is compiled into this installation"), 0u);
}

template <class E = ValueError, class Bend>
std::string text(const Bend& bend) {
  Inputs inputs;
  bend(inputs);
  const std::string said = error_of<E>([&] { gated_delta_update(inputs.args); });
  EXPECT_TRUE(fake_state().launches.empty()) << said;
  return said.starts_with("gated_delta_update: ") ? said.substr(20) : said;
}

TEST_F(GatedDeltaHost, RefusesShapes) {
  EXPECT_EQ(text([](Inputs& i) { i.args.q.rank = 3; }),
            "q must have 4 dimensions (batch, tokens, num_heads, head_dim_k), got 3: (2, 3, 2)");
  EXPECT_EQ(text([](Inputs& i) { i.args.a->rank = 4; }).find("a must have 3 dimensions (batch, tokens, num_v_heads)"),
            0u);
  EXPECT_EQ(text([](Inputs& i) { i.args.k.shape[3] = 64; }),
            "k must have shape (batch, tokens, num_heads, head_dim_k) = (2, 3, 2, 32), got (2, 3, 2, 64)");
  EXPECT_EQ(text([](Inputs& i) { i.args.q.shape[2] = i.args.k.shape[2] = 3; }),
            "num_v_heads must be a multiple of num_heads, got v of shape (2, 3, 4, 64) and q of shape (2, 3, 3, 32)");
  EXPECT_EQ(text<NotSupportedError>([](Inputs& i) { i.args.q.shape[3] = i.args.k.shape[3] = 20; }),
            "head_dim_k must be a multiple of 8 from 16 to 256, got 20");
  EXPECT_EQ(text<NotSupportedError>([](Inputs& i) { i.args.v.shape[3] = 264; }),
            "head_dim_v must be a multiple of 8 from 16 to 256, got 264");
  EXPECT_EQ(text([](Inputs& i) { i.args.b->shape[0] = 5; }),
            "b must have shape (batch * tokens, ...) = (6, 4), got (5, 4)");
  EXPECT_EQ(text([](Inputs& i) { i.args.a_log->shape[2] = 5; }),
            "A_log must have num_v_heads = 4 elements, got (1, 1, 5, 1)");
  EXPECT_EQ(
      text([](Inputs& i) { i.args.state_layout = StateLayout::kKV; }),
      "state must have shape (slots, num_v_heads, head_dim_k, head_dim_v) = (any, 4, 32, 64), got (5, 4, 64, 32)");
  EXPECT_EQ(text([](Inputs& i) { i.args.state_indices->shape[0] = 1; }),
            "state_indices must have shape (sequences) = (2,), got (1,)");
  EXPECT_EQ(text([](Inputs& i) { i.args.cu_seqlens = TensorView(i.offsets, DType::kInt32, Device{}, {3}); }),
            "q must have batch 1 with cu_seqlens, got (2, 3, 2, 32); join the rows along the tokens");
}

TEST_F(GatedDeltaHost, RefusesHalfAnOption) {
  EXPECT_EQ(text([](Inputs& i) { i.args.state.reset(); }), "state_indices needs state; pass the pool, or neither");
  EXPECT_EQ(text([](Inputs& i) {
              i.args.state_indices.reset();
              i.args.state->shape[0] = 1;
            }),
            "state must have a slot for each of the 2 sequences without state_indices, got (1, 4, 64, 32)");
  EXPECT_EQ(text([](Inputs& i) {
              i.give_steps();
              i.args.intermediate_indices.reset();
            }),
            "intermediate_states and intermediate_indices must be given together; pass both or neither");
  EXPECT_EQ(text([](Inputs& i) { i.args.parent_tokens = TensorView(i.parents, DType::kInt32, Device{}, {2, 3}); }),
            "parent_tokens needs intermediate_states, where the parents' states are stored");
  EXPECT_EQ(text([](Inputs& i) {
              i.give_steps();
              i.args.intermediate_states->shape[1] = 2;
            }),
            "intermediate_states must have at least 3 steps, got shape (2, 2, 4, 64, 32)");
}

TEST_F(GatedDeltaHost, RefusesGatesThatDoNotFit) {
  const auto view = [](std::initializer_list<std::int64_t> shape) {
    return TensorView(scratch_at(24 << 20), DType::kFloat32, Device{}, shape);
  };
  EXPECT_EQ(text([&](Inputs& i) { i.args.g = view({2, 3, 4}); }),
            "a and g must not both be given; a is what g is made of with A_log");
  for (int missing : {0, 1}) {
    EXPECT_EQ(text([&](Inputs& i) { (missing == 0 ? i.args.a : i.args.a_log).reset(); }),
              "a and A_log must be given together; pass both, or g, which is a logarithm already");
  }
  const auto without_a = [&](const auto& bend) {
    return text([&](Inputs& i) {
      i.args.a.reset();
      i.args.a_log.reset();
      i.args.dt_bias.reset();
      bend(i.args);
    });
  };
  const std::string needs = " needs a, of which a gate is made; g, gk and gv are taken as they are";
  using Args = GatedDeltaUpdateArgs;
  EXPECT_EQ(without_a([&](Args& a) { a.dt_bias = view({4}); }), "dt_bias" + needs);
  EXPECT_EQ(without_a([](Args& a) { a.is_kda = true; }), "is_kda" + needs);
  EXPECT_EQ(without_a([](Args& a) { a.lower_bound = -1.0; }), "lower_bound" + needs);
  EXPECT_EQ(text([&](Inputs& i) { i.args.beta = view({2, 3, 4}); }),
            "b and beta must not both be given; beta is the sigmoid of b");
  EXPECT_EQ(text([](Inputs& i) {
              i.args.b.reset();
              i.args.allow_neg_eigval = true;
            }),
            "allow_neg_eigval needs b, whose sigmoid it doubles");
  EXPECT_EQ(text([&](Inputs& i) { i.args.gk = view({2, 3, 4}); }),
            "gk must have 4 dimensions (batch, tokens, num_v_heads, head_dim_k), got 3: (2, 3, 4)");
  EXPECT_EQ(text([&](Inputs& i) { i.args.gv = view({2, 3, 4, 32}); }),
            "gv must have shape (batch, tokens, num_v_heads, head_dim_v) = (2, 3, 4, 64), got (2, 3, 4, 32)");
  EXPECT_EQ(text([&](Inputs& i) { i.args.b = view({2, 3, 4, 1}); }),
            "b must have shape (batch, tokens, num_v_heads, head_dim_v) = (2, 3, 4, 64), got (2, 3, 4, 1)");
  EXPECT_EQ(
      text([&](Inputs& i) { i.args.final_states = view({5, 4, 64, 32}); }),
      "final_states must have shape (sequences, num_v_heads, head_dim_v, head_dim_k) = (2, 4, 64, 32), got (5, 4, "
      "64, 32)");
  EXPECT_EQ(text<TypeError>([&](Inputs& i) {
              i.args.gv = view({2, 3, 4, 64});
              i.args.gv->dtype = DType::kInt32;
            }),
            "gv must be float16, bfloat16 or float32, got int32");
  EXPECT_EQ(text([&](Inputs& i) {
              i.args.final_states = view({2, 4, 64, 32});
              i.args.final_states->data = i.args.state->data;
            }),
            "final_states must not share memory with state; pass another tensor");
  EXPECT_EQ(text([&](Inputs& i) {
              i.args.gv = view({2, 3, 4, 64});
              i.args.out.data = i.args.gv->data;
            }),
            "out must not share memory with gv; pass another tensor");
}

TEST_F(GatedDeltaHost, RefusesNumbersThatFp32DoesNotHave) {
  EXPECT_EQ(text([](Inputs& i) { i.args.scale = 1e300; }),
            "scale must be positive and finite in fp32 (1.17549e-38 to 3.40282e+38), got 1e+300");
  EXPECT_EQ(text([](Inputs& i) { i.args.scale = 1e-50; }),
            "scale must be positive and finite in fp32 (1.17549e-38 to 3.40282e+38), got 1e-50");
  EXPECT_EQ(text([](Inputs& i) { i.args.softplus_beta = 1e39; }),
            "softplus_beta must be positive and finite in fp32 (1.17549e-38 to 3.40282e+38), got 1e+39");
  EXPECT_EQ(text([](Inputs& i) { i.args.softplus_threshold = 1e300; }),
            "softplus_threshold must be finite in fp32 (at most 3.40282e+38 in magnitude), got 1e+300");
  EXPECT_EQ(text([](Inputs& i) { i.args.lower_bound = -1e39; }),
            "lower_bound must be negative and finite in fp32 (-3.40282e+38 to -1.17549e-38), got -1e+39");
}

TEST_F(GatedDeltaHost, RefusesNumbersTypesAndMemory) {
  EXPECT_EQ(text([](Inputs& i) { i.args.scale = 0.0; }),
            "scale must be positive and finite in fp32 (1.17549e-38 to 3.40282e+38), got 0");
  EXPECT_EQ(text([](Inputs& i) { i.args.softplus_beta = -1; }),
            "softplus_beta must be positive and finite in fp32 (1.17549e-38 to 3.40282e+38), got -1");
  EXPECT_EQ(text([](Inputs& i) { i.args.softplus_threshold = std::numeric_limits<double>::quiet_NaN(); }),
            "softplus_threshold must be finite in fp32 (at most 3.40282e+38 in magnitude), got nan");
  EXPECT_EQ(text([](Inputs& i) { i.args.lower_bound = 1.0; }),
            "lower_bound must be negative and finite in fp32 (-3.40282e+38 to -1.17549e-38), got 1");
  EXPECT_EQ(text<TypeError>([](Inputs& i) { i.args.v.dtype = DType::kFloat16; }), "v must be bfloat16, got float16");
  EXPECT_EQ(text<TypeError>([](Inputs& i) { i.args.state->dtype = DType::kInt32; }),
            "state must be float32, bfloat16 or float16, got int32");
  EXPECT_EQ(text([](Inputs& i) { i.args.b->device = kGpu; }), "b must be on cpu as q is, got cuda:0");
  EXPECT_EQ(
      text([](Inputs& i) { i.args.q.strides[3] = 2; }).find("q must have stride 1 along its last axis, got strides"),
      0u);
  EXPECT_EQ(text([](Inputs& i) {
              i.args.state->strides[0] = 2 * (i.args.state->strides[1] = 4096) * 4;
            }).find("state must be contiguous within a slot, got shape (5, 4, 64, 32) with strides"),
            0u);
  EXPECT_EQ(text([](Inputs& i) { i.args.state->read_only = true; }),
            "state is written and must not be read-only; pass a copy");
  EXPECT_EQ(text([](Inputs& i) { i.args.out.data = i.args.v.data; }),
            "out must not share memory with v; pass another tensor");
  Inputs inputs;
  inputs.args.state->read_only = true;
  inputs.args.update_state = false;
  gated_delta_update(inputs.args);
  EXPECT_EQ(fake_state().launches.size(), 1u);
}

TEST_F(GatedDeltaHost, RefusesContents) {
  EXPECT_EQ(text([](Inputs& i) { i.slots[1] = 4; }),
            "state_indices[0] and state_indices[1] must not be the same slot of state, got 4 for both; give each "
            "sequence its own, or -1");
  EXPECT_EQ(text([](Inputs& i) { i.slots[0] = 5; }),
            "state_indices[0] = 5 must be below 5 (the slots of state); an index below 0 takes no slot");
  EXPECT_EQ(text([](Inputs& i) {
              i.give_steps();
              i.step_slots[1] = 1;
            }),
            "intermediate_indices[0] and intermediate_indices[1] must not be the same slot of intermediate_states, got "
            "1 for both; give each sequence its own, or -1");
  EXPECT_EQ(text([](Inputs& i) {
              i.give_steps();
              i.parents[5] = 2;
            }),
            "parent_tokens[1, 2] = 2 must lie in [0, 1] (a token before it)");
  EXPECT_EQ(text([](Inputs& i) {
              i.join_rows();
              i.offsets[0] = 1;
            }),
            "cu_seqlens must begin with 0, got 1");
  EXPECT_EQ(text([](Inputs& i) {
              i.join_rows();
              i.offsets[2] = 4;
            }),
            "cu_seqlens must rise within the 3 tokens of q, got 1 and 4 for sequence 1");
  EXPECT_EQ(text([](Inputs& i) {
              i.join_rows();
              i.give_steps();
              i.args.intermediate_states->shape[1] = 1;
            }),
            "intermediate_states must have a step for each of the 2 tokens of sequence 1, got 1");
  EXPECT_EQ(text([](Inputs& i) {
              i.join_rows();
              i.give_steps();
              i.args.parent_tokens->shape[1] = 1;
            }),
            "parent_tokens must have a step for each of the 2 tokens of sequence 1, got 1");
}

}  // namespace
}  // namespace flashport::test
