// gated_delta_chunk on fake devices: the params, grids and workspace of a call, and what is refused with which text.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include <flashport/backend.h>
#include <flashport/gated_delta.h>

#include "common/device/gated_delta/chunk_params.h"
#include "tests/host/decode/decode_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

struct GatedDeltaChunkHost : ::testing::Test {
  FakeBackends backends_;
};

// Two rows of tokens, 2 / 4 heads, K 32, V 80.
struct Inputs {
  std::int64_t slots[2] = {4, -1};
  std::int32_t offsets[4] = {0, 1, 1, 70};
  GatedDeltaChunkArgs args;

  explicit Inputs(Device device = {}, std::int64_t tokens = 70) {
    args.q = TensorView(scratch_at(0), DType::kBFloat16, device, {2, tokens, 2, 32});
    args.k = TensorView(scratch_at(1 << 20), DType::kBFloat16, device, {2, tokens, 2, 32});
    args.v = TensorView(scratch_at(2 << 20), DType::kBFloat16, device, {2, tokens, 4, 80});
    args.g = TensorView(scratch_at(4 << 20), DType::kFloat32, device, {2, tokens, 4});
    args.beta = TensorView(scratch_at(5 << 20), DType::kBFloat16, device, {2, tokens, 4});
    args.state = TensorView(scratch_at(16 << 20), DType::kFloat32, device, {5, 4, 80, 32});
    args.state_indices = TensorView(slots, DType::kInt64, device, {2});
    args.out = TensorView(scratch_at(6 << 20), DType::kBFloat16, device, {2, tokens, 4, 80});
  }
  void give_states() {
    args.final_states = TensorView(scratch_at(20 << 20), DType::kFloat32, Device{}, {2, 4, 80, 32});
    args.chunk_states = TensorView(scratch_at(24 << 20), DType::kBFloat16, Device{}, {2, 2, 4, 80, 32});
  }
  void give_gate() {
    args.a_log = TensorView(scratch_at(8 << 16), DType::kFloat32, Device{}, {4});
    args.dt_bias = TensorView(scratch_at(9 << 16), DType::kBFloat16, Device{}, {4});
  }
  // Three sequences in one row.
  void join_rows() {
    args.cu_seqlens = TensorView(offsets, DType::kInt32, Device{}, {4});
    for (TensorView* view : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.out}) view->shape[0] = 1;
    args.state.reset();
    args.state_indices.reset();
  }
};

TEST_F(GatedDeltaChunkHost, LaunchesTwoKernelsWithTheSameParams) {
  Inputs inputs;
  inputs.give_states();
  inputs.give_gate();
  inputs.args.state->strides[0] = 20000;
  inputs.args.beta_sigmoid = inputs.args.allow_neg_eigval = true;
  gated_delta_chunk(inputs.args);
  ASSERT_EQ(fake_state().launches.size(), 2u);
  EXPECT_EQ(fake_state().launches[0].key, "gated_delta_prepare/fp32/k256/fakecpu");
  EXPECT_EQ(fake_state().launches[0].grid, 2 * 2 * 2);  // rows, chunks, heads
  const Launch& launch = fake_state().launches[1];
  EXPECT_EQ(launch.key, "gated_delta_chunk/fp32/k256/fakecpu");
  EXPECT_EQ(launch.grid, 2 * 4 * 2);  // sequences, value heads, slices of V
  EXPECT_EQ(launch.params, fake_state().launches[0].params);
  const auto p = launch.as<GatedDeltaChunkParams>();
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.tokens, 70);
  EXPECT_EQ(p.group_size, 2);
  EXPECT_EQ(p.head_dim_k, 32);
  EXPECT_EQ(p.head_dim_v, 80);
  EXPECT_EQ(p.g.stride_seq, 280);
  EXPECT_EQ(p.g.stride_token, 4);
  EXPECT_EQ(p.g.stride_head, 1);
  EXPECT_EQ(p.state.slot_stride, 20000);
  EXPECT_EQ(p.state.indices.is_int64, 1);
  EXPECT_EQ(p.final_states.slot_stride, 4 * 80 * 32);
  EXPECT_EQ(p.chunk_states.slot_stride, 2 * 4 * 80 * 32);
  EXPECT_EQ(p.chunk_states.step_stride, 4 * 80 * 32);
  EXPECT_EQ(p.chunk_states_count, 2);
  EXPECT_EQ(p.dt_bias_dtype, DType::kBFloat16);
  EXPECT_EQ(p.beta_sigmoid, 1);
  EXPECT_FLOAT_EQ(p.beta_factor, 2.0f);
  EXPECT_FLOAT_EQ(p.scale, 1.0f / std::sqrt(32.0f));
  const auto* scores = static_cast<const char*>(p.workspace.scores);
  EXPECT_EQ(scores - static_cast<const char*>(p.workspace.inverses), 4 * 4 * 64 * 64 * 4);
  EXPECT_EQ(reinterpret_cast<const char*>(p.workspace.factors) - scores, 4 * 4 * 64 * 64 * 4);
}

// Slots for chunks follow from shapes: tokens / 64 and one for each sequence.
TEST_F(GatedDeltaChunkHost, CutsPackedSequencesWithoutTheirLengths) {
  Inputs inputs;
  inputs.join_rows();
  gated_delta_chunk(inputs.args);
  ASSERT_EQ(fake_state().launches.size(), 2u);
  EXPECT_EQ(fake_state().launches[0].grid, (70 / 64 + 3) * 2);
  EXPECT_EQ(fake_state().launches[1].grid, 3 * 4 * 2);
  const std::int64_t head_chunk_bytes =
      2 * 64 * 64 * 4 + static_cast<std::int64_t>(sizeof(ChunkFactors) + sizeof(unsigned));
  EXPECT_EQ(gated_delta_chunk_workspace_size(inputs.args), (70 / 64 + 3) * 4 * head_chunk_bytes);
}

// 16 chains, and 80 chunks for blocks of four teams that stride over them.
TEST_F(GatedDeltaChunkHost, RunsTheChainBesideTheChunksWhereHalfOfTheDeviceIsLeft) {
  const Device device{DeviceKind::kCuda, 0};
  Inputs inputs(device, 1280);
  GatedDeltaChunkArgs& a = inputs.args;
  struct Expected {
    int multiprocessors, prepare_blocks, chain_blocks;
    bool concurrent;
  };
  for (const Expected& e :
       {Expected{32, 64, 16, true}, {31, 124, 16, false}, {3, 12, 3, false}, {120, 320, 16, true}}) {
    SCOPED_TRACE(e.multiprocessors);
    set_multiprocessor_limit(e.multiprocessors);
    fake_state().launches.clear();
    gated_delta_chunk(a);
    ASSERT_EQ(fake_state().launches.size(), 2u);
    EXPECT_EQ(fake_state().launches[0].grid, e.prepare_blocks);
    EXPECT_EQ(fake_state().launches[1].grid, e.chain_blocks);
    for (const Launch& launch : fake_state().launches) {
      const auto p = launch.as<GatedDeltaChunkParams>();
      EXPECT_EQ(p.workspace.signals != nullptr, e.concurrent) << launch.key;
      EXPECT_EQ(p.workspace.chunks, 40);
    }
  }
  set_multiprocessor_limit(32);
  const std::int32_t offsets[] = {0, 1000, 1280};
  for (TensorView* view : {&a.q, &a.k, &a.v, &a.g, &a.beta, &a.out}) view->shape[0] = 1;
  for (const int sequences : {2, 1}) {  // packed ones
    a.cu_seqlens = TensorView(const_cast<std::int32_t*>(offsets), DType::kInt32, device, {sequences + 1});
    a.state_indices->shape[0] = sequences;
    gated_delta_chunk(a);
    const auto p = fake_state().launches.back().as<GatedDeltaChunkParams>();
    EXPECT_NE(p.workspace.signals, nullptr);
  }
  set_multiprocessor_limit(0);
}

TEST_F(GatedDeltaChunkHost, HasFewBlocksForItsChainsOnlyWhereTestsLimitThem) {
  Inputs inputs;
  for (int limit : {3, 100, 0}) {
    set_multiprocessor_limit(limit);
    gated_delta_chunk(inputs.args);
  }
  ASSERT_EQ(fake_state().launches.size(), 6u);
  EXPECT_EQ(fake_state().launches[0].grid, 2 * 2 * 2);  // those of the chunks are as many as ever
  EXPECT_EQ(fake_state().launches[1].grid, 3);
  EXPECT_EQ(fake_state().launches[3].grid, 2 * 4 * 2);
  EXPECT_EQ(fake_state().launches[5].grid, 2 * 4 * 2);
}

TEST_F(GatedDeltaChunkHost, TakesTheCallersWorkspace) {
  Inputs inputs;
  const std::int64_t bytes = gated_delta_chunk_workspace_size(inputs.args);
  inputs.args.workspace = TensorView(scratch_at(28 << 20), DType::kUInt8, Device{}, {bytes});
  const int allocations = fake_state().allocations;
  gated_delta_chunk(inputs.args);
  EXPECT_EQ(fake_state().allocations, allocations);
  ASSERT_EQ(fake_state().launches.size(), 2u);
  EXPECT_EQ(fake_state().launches[0].as<GatedDeltaChunkParams>().workspace.inverses, scratch_at(28 << 20));
}

// Without tokens there is nothing to do but to copy states to final_states.
TEST_F(GatedDeltaChunkHost, RunsNothingWithoutTokens) {
  Inputs inputs;
  for (TensorView* view :
       {&inputs.args.q, &inputs.args.k, &inputs.args.v, &inputs.args.g, &inputs.args.beta, &inputs.args.out}) {
    view->shape[1] = 0;
  }
  gated_delta_chunk(inputs.args);
  EXPECT_TRUE(fake_state().launches.empty());
  inputs.give_states();
  inputs.args.chunk_states->shape[1] = 0;
  gated_delta_chunk(inputs.args);
  ASSERT_EQ(fake_state().launches.size(), 1u);
  EXPECT_EQ(fake_state().launches[0].key, "gated_delta_chunk/fp32/k256/fakecpu");
}

TEST_F(GatedDeltaChunkHost, SaysWhereTheKernelIsMissing) {
  Inputs inputs(kGpu);
  for (TensorView* view : {&inputs.args.q, &inputs.args.k, &inputs.args.v, &inputs.args.out}) {
    view->dtype = DType::kFloat32;
  }
  const std::string text = "fakegpu has no kernel gated_delta_chunk for float32 q and head_dim_k 32";
  EXPECT_EQ(error_of<NotSupportedError>([&] { gated_delta_chunk(inputs.args); }), "gated_delta_chunk: " + text);
  EXPECT_EQ(error_of<NotSupportedError>([&] { (void)gated_delta_chunk_workspace_size(inputs.args); }),
            "gated_delta_chunk_workspace_size: " + text);
  EXPECT_TRUE(fake_state().launches.empty());
}

// What is asked beforehand is answered with the kernel of the chain, or with the text that a call would give.
TEST_F(GatedDeltaChunkHost, AnswersAsCallsDo) {
  GatedDeltaChunkQuery query{.head_dim_k = 32};
  Inputs on_cpu, on_gpu(kGpu);
  gated_delta_chunk(on_cpu.args);
  EXPECT_EQ(which_kernel(query), fake_state().launches.back().key);
  query.target = "fakegpu";
  gated_delta_chunk(on_gpu.args);
  EXPECT_EQ(fake_state().launches.end()[-2].key, "gated_delta_prepare/bf16/k64/fakegpu");
  EXPECT_EQ(which_kernel(query), fake_state().launches.back().key);
  // Neither the type of the pool nor its layout matters.
  query.state_dtype = DType::kBFloat16;
  query.state_layout = StateLayout::kKV;
  query.head_dim_k = 72;
  EXPECT_EQ(which_kernel(query), "gated_delta_chunk/bf16/k128/fakegpu");
  query.head_dim_k = 136;
  EXPECT_EQ(supports(query).reason, "fakegpu has no kernel gated_delta_chunk for bfloat16 q and head_dim_k 136");
  query.head_dim_k = 32;
  query.gate = GateForm::kKey;
  EXPECT_EQ(supports(query).reason, "gated_delta_chunk takes one gate for each head; gated_delta_update takes others");
  query.gate = GateForm::kHead;
  query.q_dtype = DType::kFloat32;
  EXPECT_EQ(supports(query).reason, "fakegpu has no kernel gated_delta_chunk for float32 q and head_dim_k 32");
  query.q_dtype = DType::kFloat16;
  EXPECT_EQ(supports(query).reason,  // one of the pair is missing
            "fakegpu has no kernel gated_delta_prepare for float16 q and head_dim_k 32");
  query.target = "cpu";
  EXPECT_EQ(which_kernel(query), "gated_delta_chunk/fp32/k256/fakecpu");
}

// The size of a workspace follows from the call's arguments, also without an output, whose memory nobody looks at.
TEST_F(GatedDeltaChunkHost, SizesNeedNoOutput) {
  Inputs inputs;
  const std::int64_t bytes = gated_delta_chunk_workspace_size(inputs.args);
  EXPECT_GT(bytes, 0);
  inputs.args.out.data = nullptr;
  EXPECT_EQ(gated_delta_chunk_workspace_size(inputs.args), bytes);
  EXPECT_NE(error_of<ValueError>([&] { gated_delta_chunk(inputs.args); }).find("out must have data"),
            std::string::npos);
  inputs.args.out.shape[3] = 8;
  EXPECT_NE(error_of<ValueError>([&] { (void)gated_delta_chunk_workspace_size(inputs.args); }).find("out must have"),
            std::string::npos);
  inputs.args.out = {};
  EXPECT_EQ(gated_delta_chunk_workspace_size(inputs.args), bytes);
  inputs.args.v.rank = 3;
  EXPECT_NE(error_of<ValueError>([&] {
              (void)gated_delta_chunk_workspace_size(inputs.args);
            }).find("gated_delta_chunk_workspace_size: v must have 4 dimensions"),
            std::string::npos);
  EXPECT_TRUE(fake_state().launches.empty());
}

template <class E = ValueError, class Bend>
std::string text(const Bend& bend) {
  Inputs inputs;
  bend(inputs);
  const std::string said = error_of<E>([&] { gated_delta_chunk(inputs.args); });
  EXPECT_TRUE(fake_state().launches.empty()) << said;
  return said.starts_with("gated_delta_chunk: ") ? said.substr(19) : said;
}

TEST_F(GatedDeltaChunkHost, RefusesShapes) {
  EXPECT_EQ(text([](Inputs& i) { i.args.q.rank = 3; }),
            "q must have 4 dimensions (batch, tokens, num_heads, head_dim_k), got 3: (2, 70, 2)");
  EXPECT_EQ(
      text([](Inputs& i) { i.args.beta.rank = 4; }).find("beta must have 3 dimensions (batch, tokens, num_v_heads)"),
      0u);
  EXPECT_EQ(text([](Inputs& i) { i.args.k.shape[3] = 64; }),
            "k must have shape (batch, tokens, num_heads, head_dim_k) = (2, 70, 2, 32), got (2, 70, 2, 64)");
  EXPECT_EQ(text([](Inputs& i) { i.args.q.shape[2] = i.args.k.shape[2] = 3; }),
            "num_v_heads must be a multiple of num_heads, got v of shape (2, 70, 4, 80) and q of shape (2, 70, 3, 32)");
  EXPECT_EQ(text<NotSupportedError>([](Inputs& i) { i.args.q.shape[3] = i.args.k.shape[3] = 20; }),
            "head_dim_k must be a multiple of 8 from 16 to 256, got 20");
  EXPECT_EQ(text([](Inputs& i) { i.args.g.shape[1] = 69; }),
            "g must have shape (batch, tokens, num_v_heads) = (2, 70, 4), got (2, 69, 4)");
  EXPECT_EQ(text([](Inputs& i) {
              i.give_gate();
              i.args.a_log->shape[0] = 5;
            }),
            "A_log must have num_v_heads = 4 elements, got (5,)");
  EXPECT_EQ(
      text([](Inputs& i) { i.args.state_layout = StateLayout::kKV; }),
      "state must have shape (slots, num_v_heads, head_dim_k, head_dim_v) = (any, 4, 32, 80), got (5, 4, 80, 32)");
  EXPECT_EQ(
      text([](Inputs& i) {
        i.give_states();
        i.args.final_states->shape[0] = 3;
      }),
      "final_states must have shape (sequences, num_v_heads, head_dim_v, head_dim_k) = (2, 4, 80, 32), got (3, 4, "
      "80, 32)");
  EXPECT_EQ(
      text([](Inputs& i) {
        i.give_states();
        i.args.chunk_states->shape[1] = 1;
      }),
      "chunk_states must have shape (batch, chunks, num_v_heads, head_dim_v, head_dim_k) = (2, 2, 4, 80, 32), got "
      "(2, 1, 4, 80, 32)");
  EXPECT_EQ(text([](Inputs& i) { i.args.cu_seqlens = TensorView(i.offsets, DType::kInt32, Device{}, {4}); }),
            "q must have batch 1 with cu_seqlens, got (2, 70, 2, 32); join the rows along the tokens");
}

TEST_F(GatedDeltaChunkHost, RefusesHalfAnOption) {
  EXPECT_EQ(text([](Inputs& i) { i.args.state.reset(); }), "state_indices needs state; pass the pool, or neither");
  EXPECT_EQ(text([](Inputs& i) {
              i.args.state_indices.reset();
              i.args.state->shape[0] = 1;
            }),
            "state must have a slot for each of the 2 sequences without state_indices, got (1, 4, 80, 32)");
  EXPECT_EQ(text([](Inputs& i) {
              i.give_gate();
              i.args.a_log.reset();
            }),
            "dt_bias needs A_log, without which g is the gate's logarithm itself");
  EXPECT_EQ(text([](Inputs& i) { i.args.allow_neg_eigval = true; }),
            "allow_neg_eigval needs beta_sigmoid, whose result it doubles");
}

TEST_F(GatedDeltaChunkHost, RefusesNumbersTypesAndMemory) {
  EXPECT_EQ(text([](Inputs& i) { i.args.scale = -1.0; }),
            "scale must be positive and finite in fp32 (1.17549e-38 to 3.40282e+38), got -1");
  EXPECT_EQ(text([](Inputs& i) { i.args.scale = 1e300; }),
            "scale must be positive and finite in fp32 (1.17549e-38 to 3.40282e+38), got 1e+300");
  EXPECT_EQ(text<TypeError>([](Inputs& i) { i.args.v.dtype = DType::kFloat16; }), "v must be bfloat16, got float16");
  EXPECT_EQ(text<TypeError>([](Inputs& i) { i.args.state->dtype = DType::kInt32; }),
            "state must be float32, bfloat16 or float16, got int32");
  EXPECT_EQ(text<TypeError>([](Inputs& i) {
              i.give_states();
              i.args.chunk_states->dtype = DType::kFloat32;
            }),
            "chunk_states must be bfloat16, got float32");
  EXPECT_EQ(text([](Inputs& i) { i.args.beta.device = kGpu; }), "beta must be on cpu as q is, got cuda:0");
  EXPECT_EQ(text([](Inputs& i) {
              i.give_states();
              i.args.final_states->device = kGpu;
            }),
            "final_states must be on cpu as q is, got cuda:0");
  EXPECT_EQ(
      text([](Inputs& i) { i.args.q.strides[3] = 2; }).find("q must have stride 1 along its last axis, got strides"),
      0u);
  EXPECT_EQ(text([](Inputs& i) { i.args.state->read_only = true; }),
            "state is written and must not be read-only; pass a copy");
  EXPECT_EQ(text([](Inputs& i) { i.args.out.data = i.args.v.data; }),
            "out must not share memory with v; pass another tensor");
  EXPECT_EQ(text([](Inputs& i) {
              i.give_states();
              i.args.final_states->data = i.args.state->data;
            }),
            "final_states must not share memory with state; pass another tensor");
  EXPECT_EQ(text([](Inputs& i) {
              i.args.workspace = TensorView(scratch_at(28 << 20), DType::kUInt8, Device{}, {64});
            }).find("workspace must have at least "),
            0u);
  Inputs inputs;
  inputs.args.state->read_only = true;
  inputs.args.update_state = false;
  gated_delta_chunk(inputs.args);
  EXPECT_EQ(fake_state().launches.size(), 2u);
}

TEST_F(GatedDeltaChunkHost, RefusesContents) {
  EXPECT_EQ(text([](Inputs& i) { i.slots[1] = 4; }),
            "state_indices[0] and state_indices[1] must not be the same slot of state, got 4 for both; give each "
            "sequence its own, or -1");
  EXPECT_EQ(text([](Inputs& i) { i.slots[0] = 5; }),
            "state_indices[0] = 5 must be below 5 (the slots of state); an index below 0 takes no slot");
  EXPECT_EQ(text([](Inputs& i) {
              i.join_rows();
              i.offsets[0] = 1;
            }),
            "cu_seqlens must begin with 0, got 1");
  EXPECT_EQ(text([](Inputs& i) {
              i.join_rows();
              i.offsets[3] = 71;
            }),
            "cu_seqlens must rise within the 70 tokens of q, got 1 and 71 for sequence 2");
  EXPECT_EQ(text([](Inputs& i) {
              i.join_rows();
              i.args.chunk_states = TensorView(scratch_at(24 << 20), DType::kBFloat16, Device{}, {1, 2, 4, 80, 32});
            }),
            "chunk_states must have a chunk for each 64 tokens of every sequence, 3 together, got shape (1, 2, 4, 80, "
            "32)");
}

}  // namespace
}  // namespace flashport::test
