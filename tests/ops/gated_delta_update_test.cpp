// gated_delta_update against the fp64 recurrence, option by option; what no sequence names keeps its bits.
#include <gtest/gtest.h>

#include <flashport/backend.h>
#include <flashport/decode.h>
#include <flashport/error.h>

#include <cstring>

#include "tests/ops/gated_delta_call.h"
#include "tests/support/content_checks.h"
#include "tests/support/expected_support.h"
#include "tests/support/graphs.h"
#include "tests/support/message_of.h"
#include "tests/support/sparse_memory.h"

namespace flashport_test {
namespace {

using reference::Type;

flashport::Support update_support() { return flashport::supports_gated_delta({query_target()}); }

class GatedDelta : public testing::TestWithParam<GatedDeltaCase> {};

TEST_P(GatedDelta, MatchesTheOracle) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_" + GetParam().name, update_support());
  GatedDeltaCall(GetParam()).check();
}

std::vector<GatedDeltaCase> named_cases() {
  return {
      {.name = "decode", .slots = {5, 2}},
      {.name = "decode_kv", .key_major = true, .slots = {5, 2}},
      {.name = "prefill", .lens = {65, 65}, .slots = {0, 6}},
      {.name = "prefill_kv", .lens = {65, 65}, .key_major = true, .slots = {0, 6}},
      {.name = "no_pool", .lens = {3, 3}},
      {.name = "identity", .lens = {3, 3}, .slots = {0, 1}, .identity = true},
      {.name = "negative_slot", .lens = {3, 3, 3}, .slots = {-1, 4, -7}},
      {.name = "read_only_pool", .lens = {3, 3}, .slots = {4, 4}, .update = false},
      {.name = "bf16_state", .lens = {5, 5}, .state = Type::kBF16, .slots = {3, 1}},
      {.name = "bf16_state_kv", .lens = {5, 5}, .state = Type::kBF16, .key_major = true, .slots = {3, 1}},
      {.name = "fp16", .lens = {9, 9}, .type = Type::kF16, .gates = Type::kF16, .slots = {3, 1}},
      {.name = "fp32", .lens = {9, 9}, .type = Type::kF32, .slots = {3, 1}},
      {.name = "fp32_kv", .lens = {9, 9}, .type = Type::kF32, .key_major = true, .slots = {3, 1}},
      {.name = "no_l2norm", .lens = {9, 9}, .type = Type::kF32, .l2norm = false, .slots = {3, 1}, .scale = 0.7},
      {.name = "modulo", .lens = {4, 4}, .v_heads = 8, .modulo = true, .slots = {3, 1}},
      {.name = "eight_heads_a_head", .lens = {4, 4}, .heads = 1, .v_heads = 8, .slots = {3, 1}},
      {.name = "four_heads_a_head", .lens = {4, 4}, .heads = 2, .v_heads = 8, .slots = {3, 1}},
      {.name = "one_head_a_head", .lens = {4, 4}, .heads = 3, .v_heads = 3, .slots = {3, 1}},
      {.name = "softplus", .lens = {7, 7}, .slots = {3, 1}, .softplus_beta = 2.0, .softplus_threshold = 1.0},
      {.name = "softplus_kda",
       .lens = {7, 7},
       .kda = 1,
       .slots = {3, 1},
       .softplus_beta = 0.5,
       .softplus_threshold = 1.0},
      {.name = "kda", .lens = {7, 7}, .kda = 1, .slots = {3, 1}},
      {.name = "kda_kv_joined", .lens = {7, 7}, .key_major = true, .kda = 2, .slots = {3, 1}},
      {.name = "kda_rows_joined", .lens = {7, 7}, .kda = 2, .joined_rows = true, .packed = true, .slots = {3, 1}},
      {.name = "kda_lower_bound", .lens = {7, 7}, .kda = 1, .slots = {3, 1}, .lower_bound = -5.0},
      {.name = "lower_bound", .lens = {7, 7}, .slots = {3, 1}, .lower_bound = -5.0},
      {.name = "rows_joined", .lens = {7, 7}, .gates = Type::kBF16, .joined_rows = true, .slots = {3, 1}},
      {.name = "packed", .lens = {7, 7}, .gates = Type::kBF16, .packed = true, .slots = {3, 1}, .index64 = true},
      {.name = "packed_kv", .lens = {7, 7}, .dim_k = 64, .key_major = true, .packed = true, .slots = {3, 1}},
      {.name = "packed_fp32",
       .lens = {2, 2},
       .dim_k = 40,
       .dim_v = 24,
       .type = Type::kF32,
       .packed = true,
       .slots = {3, 1}},
      {.name = "varlen", .lens = {0, 1, 5, 0, 17}, .varlen = true, .slots = {0, 6, 2, 3, -1}},
      {.name = "varlen_kv",
       .lens = {2, 0, 4, 0},
       .varlen = true,
       .key_major = true,
       .slots = {0, 6, 2, 3},
       .index64 = true},
      {.name = "varlen_decode", .lens = {1, 1, 1, 1}, .varlen = true, .slots = {4, -1, 0, 6}},
      {.name = "steps", .lens = {4, 4, 4}, .slots = {0, 3, -1}, .steps = {5, -1, 2}},
      {.name = "steps_bf16_kv",
       .lens = {4, 4},
       .steps_type = Type::kBF16,
       .key_major = true,
       .packed = true,
       .slots = {0, 3},
       .steps = {1, 2},
       .update = false},
      {.name = "steps_varlen",
       .lens = {0, 3, 1},
       .varlen = true,
       .slots = {0, 3, 1},
       .steps = {5, 0, 2},
       .index64 = true},
      {.name = "tree",
       .lens = {6, 6, 6},
       .slots = {0, 3, -1},
       .steps = {5, -1, 2},
       .parents = {0, 0, 0, 1, 1, 3},
       .update = false},
      {.name = "tree_bf16",
       .lens = {6, 6},
       .type = Type::kF32,
       .state = Type::kBF16,
       .steps_type = Type::kBF16,
       .slots = {0, 3},
       .steps = {5, 1},
       .parents = {0, 0, 0, 1, 1, 3},
       .index64 = true},
      {.name = "tree_varlen_kv",
       .lens = {2, 0, 5},
       .varlen = true,
       .key_major = true,
       .slots = {0, 3, 2},
       .steps = {5, 1, 0},
       .parents = {0, 0, 0, 2, 1}},
      {.name = "extreme", .lens = {40, 40}, .type = Type::kF32, .slots = {3, 1}, .gating = Gating::kExtreme},
      {.name = "extreme_kda",
       .lens = {40, 40},
       .type = Type::kF32,
       .key_major = true,
       .kda = 1,
       .slots = {3, 1},
       .gating = Gating::kExtreme},
      {.name = "extreme_lower_bound",
       .lens = {20, 20},
       .type = Type::kF32,
       .slots = {3, 1},
       .gating = Gating::kExtreme,
       .lower_bound = -5.0},
      {.name = "slow_gates", .lens = {40, 40}, .type = Type::kF32, .slots = {3, 1}, .gating = Gating::kSlow},
      {.name = "slow_gates_kda",
       .lens = {40, 40},
       .type = Type::kF32,
       .kda = 1,
       .slots = {3, 1},
       .gating = Gating::kSlow},
      {.name = "small_keys", .lens = {9, 9}, .type = Type::kF32, .slots = {3, 1}, .size = 1e-3},
      {.name = "zero_keys", .lens = {9, 9}, .type = Type::kF32, .slots = {3, 1}, .size = 0},
      {.name = "drift",
       .lens = {4096},
       .varlen = true,
       .heads = 1,
       .v_heads = 1,
       .dim_k = 64,
       .dim_v = 64,
       .slots = {3}},
      {.name = "drift_kv",
       .lens = {4096},
       .heads = 1,
       .v_heads = 1,
       .dim_k = 64,
       .dim_v = 64,
       .key_major = true,
       .slots = {3}},
  };
}

// A bf16 state that is stored and read again after every token, as a decode loop does.
TEST(GatedDeltaDrift, OfABf16StateIsThatOfThePlainRecurrence) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_others", update_support());
  GatedDeltaCase c{.name = "drift", .lens = {400}, .heads = 1, .v_heads = 1, .dim_k = 32, .dim_v = 32};
  c.state = c.steps_type = Type::kBF16;
  c.slots = {3};
  c.steps = {2};
  for (std::int64_t t = 0; t < 400; ++t) c.parents.push_back(t - 1);
  GatedDeltaCall(c).check();
}

// Every pair of head dimensions, with the other options in turn.
std::vector<GatedDeltaCase> dimension_cases() {
  std::vector<GatedDeltaCase> cases;
  const Type types[] = {Type::kBF16, Type::kF32, Type::kF16};
  int number = 0;
  for (std::int64_t dim_k : {16, 24, 64, 96, 128, 192, 256}) {
    for (std::int64_t dim_v : {16, 24, 64, 96, 128, 192, 256}) {
      GatedDeltaCase c;
      c.lens = {2, 2};
      c.heads = 1;
      c.v_heads = 2;
      c.dim_k = dim_k;
      c.dim_v = dim_v;
      c.type = types[number % 3];
      c.key_major = number / 4 % 2 == 1;
      c.state = number % 5 < 2 ? Type::kBF16 : Type::kF32;
      c.kda = number % 4 == 3 ? 1 : 0;
      c.packed = number / 3 % 2 == 1;
      c.column_gates = number % 7 == 2;
      c.slots = {6, 1};
      c.name = "k" + std::to_string(dim_k) + "_v" + std::to_string(dim_v);
      cases.push_back(c);
      ++number;
    }
  }
  return cases;
}

// Gates and rates in other forms than made ones, and final states.
std::vector<GatedDeltaCase> gate_cases() {
  using enum GateInput;
  using enum RateInput;
  std::vector<GatedDeltaCase> cases = {
      {.name = "log", .gate = kLogarithm, .rate = kRate},
      {.name = "log_kv", .key_major = true, .gate = kLogarithm, .rate = kRate},
      {.name = "keys", .gate = kNoGate, .rate = kRate, .key_gates = true},
      {.name = "keys_kv", .key_major = true, .gate = kNoGate, .rate = kRate, .key_gates = true},
      {.name = "columns", .gate = kNoGate, .rate = kRate, .column_gates = true},
      {.name = "columns_kv", .key_major = true, .gate = kNoGate, .rate = kRate, .column_gates = true},
      {.name = "all", .gate = kLogarithm, .rate = kColumnRates, .key_gates = true, .column_gates = true},
      {.name = "all_kv",
       .key_major = true,
       .gate = kLogarithm,
       .rate = kColumnRates,
       .key_gates = true,
       .column_gates = true},
      {.name = "none", .gate = kNoGate, .rate = kNoRate},
      {.name = "none_column_rates_kv", .key_major = true, .gate = kNoGate, .rate = kColumnRates},
      {.name = "made", .final_states = Type::kF32},
      {.name = "made_kda", .kda = 1, .final_states = Type::kF32},
      {.name = "made_softplus", .final_states = Type::kF32, .softplus_beta = 2.0, .softplus_threshold = 1.0},
      {.name = "made_flat_kda_and_columns", .kda = 2, .joined_rows = true, .column_gates = true},
      {.name = "made_lower_bound", .kda = 1, .final_states = Type::kF32, .lower_bound = -5.0},
      {.name = "without_bias", .gate = kWithoutBias, .rate = kTwice},
      {.name = "made_and_keys", .gate = kWithoutBias, .rate = kColumnLogits, .key_gates = true, .column_gates = true},
      {.name = "joined", .joined_rows = true, .gate = kLogarithm, .rate = kRate},
      {.name = "packed",
       .dim_k = 64,
       .gates = Type::kBF16,
       .packed = true,
       .gate = kLogarithm,
       .rate = kColumnRates,
       .key_gates = true,
       .column_gates = true},
      {.name = "packed_kv",
       .dim_k = 64,
       .gates = Type::kF16,
       .key_major = true,
       .packed = true,
       .gate = kLogarithm,
       .rate = kColumnLogits,
       .key_gates = true,
       .column_gates = true},
      {.name = "extreme",
       .type = Type::kF32,
       .gating = Gating::kExtreme,
       .gate = kLogarithm,
       .rate = kRate,
       .key_gates = true,
       .column_gates = true},
      {.name = "slow",
       .type = Type::kF32,
       .gating = Gating::kSlow,
       .gate = kLogarithm,
       .rate = kRate,
       .key_gates = true,
       .column_gates = true},
  };
  for (GatedDeltaCase& c : cases) {
    c.name = "gates_" + c.name;
    c.lens = {7, 7};
    c.slots = {3, 1};
    if (!c.final_states && c.name.size() % 2 == 0) c.final_states = Type::kF32;
  }
  GatedDeltaCase c{.name = "gates_finals_varlen", .lens = {0, 3, 0, 9, 2}, .varlen = true, .slots = {2, -1, -1, 5, 0}};
  c.gate = kLogarithm;
  c.rate = kRate;
  c.column_gates = true;
  c.final_states = Type::kF32;
  cases.push_back(c);
  c.name = "gates_finals_varlen_kv_read_only";
  c.key_major = c.index64 = true;
  c.update = false;
  c.final_states = Type::kBF16;
  cases.push_back(c);
  c.name = "gates_finals_bf16_pool";
  c.state = Type::kBF16;
  c.update = true;
  cases.push_back(c);
  c.name = "gates_finals_of_nothing";
  c.lens = {0, 0};
  c.slots = {2, -1};
  c.varlen = false;
  cases.push_back(c);
  c.name = "gates_finals_without_pool";
  c.lens = {2, 2};
  c.slots = {};
  cases.push_back(c);
  c.name = "gates_steps_and_tree";
  c.lens = {6, 6, 6};
  c.slots = {0, 3, -1};
  c.steps = {5, -1, 2};
  c.parents = {0, 0, 0, 1, 1, 3};
  cases.push_back(c);
  return cases;
}

// Every row of cmake/gated_delta_instances.txt, three tokens each, in the middle of which the state is stored.
std::vector<GatedDeltaCase> kernel_cases() {
  std::vector<GatedDeltaCase> cases;
  for (std::int64_t dim_k : {64, 128, 256}) {
    for (int options = 0; options < 8; ++options) {
      GatedDeltaCase c;
      c.lens = {3, 3};
      c.heads = 1;
      c.v_heads = 2;
      c.dim_k = dim_k;
      c.dim_v = 72;
      c.state = (options & 1) != 0 ? Type::kBF16 : Type::kF32;
      c.steps_type = (options & 1) != 0 ? Type::kF32 : Type::kBF16;
      c.key_major = (options & 2) != 0;
      c.kda = (options & 4) != 0 ? 1 : 0;
      c.slots = {6, 1};
      c.steps = {4, 2};
      c.name = "kernel_k" + std::to_string(dim_k) + ((options & 1) != 0 ? "_bf16" : "_fp32") +
               (c.key_major ? "_kv" : "_vk") + (c.kda != 0 ? "_key" : "_head");
      cases.push_back(c);
      if (c.kda == 0) continue;
      c.name.replace(c.name.rfind("_key"), 4, "_any");
      c.kda = 0;
      c.gate = GateInput::kLogarithm;
      c.rate = RateInput::kColumnRates;
      c.key_gates = c.column_gates = true;
      c.final_states = c.steps_type;
      cases.push_back(c);
    }
  }
  return cases;
}

const auto kName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Ops, GatedDelta, testing::ValuesIn(named_cases()), kName);
INSTANTIATE_TEST_SUITE_P(OpsGates, GatedDelta, testing::ValuesIn(gate_cases()), kName);
INSTANTIATE_TEST_SUITE_P(OpsKernels, GatedDelta, testing::ValuesIn(kernel_cases()), kName);
INSTANTIATE_TEST_SUITE_P(OpsDims, GatedDelta, testing::ValuesIn(dimension_cases()), kName);

std::vector<unsigned char> part(std::vector<unsigned char> all, std::size_t part, std::size_t parts) {
  const std::size_t size = all.size() / parts;
  return {all.begin() + part * size, all.begin() + (part + 1) * size};
}

// A sequence gives the same bits again, alone and in a batch, and in one call and token by token.
TEST(GatedDeltaBits, DoNotDependOnTheBatchOrTheCall) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_others", update_support());
  for (const int options : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}) {
    SCOPED_TRACE(options);
    GatedDeltaCase c{.name = "bits", .lens = {4, 4, 4}, .slots = {5, 2, 0}, .steps = {3, 1, 0}};
    c.key_major = options % 2 == 1;
    c.kda = options / 2 % 2;
    c.dim_k = std::int64_t{64} << options / 4;
    GatedDeltaCall together(c), again(c), apart(c);
    together.run();
    again.run();
    EXPECT_EQ(again.out().element_bytes(), together.out().element_bytes());
    EXPECT_EQ(again.state()->element_bytes(), together.state()->element_bytes());
    for (std::int64_t n = 2; n >= 0; --n) {
      for (std::int64_t t = 0; t < 4; ++t) {
        flashport::GatedDeltaUpdateArgs a = apart.args();
        const auto one = [&](flashport::TensorView& view) {
          view.data = static_cast<char*>(view.data) +
                      (n * view.strides[0] + t * view.strides[1]) * flashport::element_size(view.dtype);
          view.shape[0] = view.shape[1] = 1;
        };
        for (flashport::TensorView* view : {&a.q, &a.k, &a.v, &*a.a, &*a.b, &a.out}) one(*view);
        a.state_indices->data = static_cast<char*>(a.state_indices->data) + 4 * n;
        a.state_indices->shape[0] = 1;
        a.intermediate_states.reset();
        a.intermediate_indices.reset();
        apart.run(a);
        // The state after token t is what the call of all tokens has stored of it.
        const std::size_t steps = 6, slot = c.slots[n], step_slot = c.steps[n];
        const std::vector<unsigned char> stored =
            part(part(together.steps()->element_bytes(), step_slot, 6), static_cast<std::size_t>(t), steps);
        EXPECT_EQ(part(apart.state()->element_bytes(), slot, 7), stored) << n << " " << t;
      }
    }
    EXPECT_EQ(apart.out().element_bytes(), together.out().element_bytes());
    EXPECT_EQ(apart.state()->element_bytes(), together.state()->element_bytes());
  }
}

// A tree whose parents are the tokens before is a chain, and each path of a tree is that path alone.
TEST(GatedDeltaBits, OfATreeAreThoseOfItsPaths) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_others", update_support());
  GatedDeltaCase c{.name = "chain", .lens = {5}, .slots = {5}, .steps = {3}};
  GatedDeltaCall chain(c);
  chain.run();
  c.parents = {0, 0, 1, 2, 3};
  GatedDeltaCall tree(c);
  tree.run();
  EXPECT_EQ(tree.out().element_bytes(), chain.out().element_bytes());
  EXPECT_EQ(tree.state()->element_bytes(), chain.state()->element_bytes());
  EXPECT_EQ(tree.steps()->element_bytes(), chain.steps()->element_bytes());
}

// Of a table with fewer columns than a sequence has tokens, which only a GPU does not refuse, the last column goes on.
TEST(GatedDeltaTrees, ReadNothingBehindATableThatIsTooShort) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_others", update_support());
  GatedDeltaCase c{
      .name = "short", .lens = {5}, .varlen = true, .slots = {5}, .steps = {3}, .parents = {0, 0, 0, 0, 0}};
  GatedDeltaCall whole(c);
  c.parents = {0, 0, 1, 2, 1};
  GatedDeltaCall cut(c);
  flashport::GatedDeltaUpdateArgs args = cut.args();
  args.parent_tokens->shape[1] = 2;
  if (args.q.device.kind == flashport::DeviceKind::kCpu) GTEST_SKIP() << "a CPU refuses it";
  whole.run();
  cut.run(args);
  EXPECT_EQ(cut.out().element_bytes(), whole.out().element_bytes());
}

// A graph that is replayed goes on from the state that the replay before has left, as calls do.
TEST(GatedDeltaGraphs, ReplaysGoOn) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_others", update_support());
  if (!has_graphs()) GTEST_SKIP() << "a CPU has no graphs";
  const GatedDeltaCase c{.name = "replays", .lens = {1, 1, 1, 1}, .varlen = true, .slots = {4, -1, 0, 6}};
  GatedDeltaCall eager(c), captured(c);
  const DeviceStream stream;
  const DeviceGraph graph(stream, [&] { flashport::gated_delta_update(captured.args(), stream.handle()); });
  for (int replay = 0; replay < 3; ++replay) {
    graph.launch(stream);
    eager.run();
  }
  stream.synchronize();
  captured.out().download();
  captured.state()->download();
  EXPECT_EQ(captured.out().element_bytes(), eager.out().element_bytes());
  EXPECT_EQ(captured.state()->element_bytes(), eager.state()->element_bytes());
}

// A kernel may look at its slots while the one before still writes them: numbers that are none, or another slot's, do
// nothing. append_kv writes them here, as the halves of a row.
TEST(GatedDeltaSlots, AreThoseThatTheKernelBeforeWrites) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_others", update_support());
  for (const std::int64_t stale : {std::int64_t{0x7fffffff}, std::int64_t{-2}, std::int64_t{5}}) {
    for (const bool index64 : {false, true}) {
      const GatedDeltaCase c{.name = "slots", .lens = {1, 1, 1, 1}, .slots = {4, 2, 0, 6}, .index64 = index64};
      GatedDeltaCall wanted(c), call(c);
      wanted.run();
      Tensor row(Type::kF16, {1, 1, 64}), cache(Type::kF16, {1, 1, 1, 64}), v_cache(Type::kF16, {1, 1, 1, 64});
      Tensor positions(Type::kI32, {1});
      const std::size_t bytes = index64 ? 8 : 4;
      std::memset(row.address({0, 0, 0}), 0, 128);
      for (std::size_t i = 0; i < c.slots.size(); ++i) {
        std::memcpy(row.address({0, 0, 0}) + i * bytes, &c.slots[i], bytes);
        std::memcpy(cache.address({0, 0, 0, 0}) + i * bytes, &stale, bytes);
      }
      positions.set({0}, 0);
      for (Tensor* tensor : {&row, &cache, &v_cache, &positions}) tensor->upload();
      flashport::GatedDeltaUpdateArgs args = call.args();
      args.state_indices->data = cache.view().data;
      call.upload();
      flashport::AppendKvArgs append;
      append.k = append.v = row.view();
      append.k_cache = cache.view();
      append.v_cache = v_cache.view();
      append.positions = positions.view();
      flashport::append_kv(append);
      flashport::gated_delta_update(args);
      call.out().download();
      call.state()->download();
      EXPECT_EQ(call.out().element_bytes(), wanted.out().element_bytes()) << stale;
      EXPECT_EQ(call.state()->element_bytes(), wanted.state()->element_bytes()) << stale;
    }
  }
}

// Slots whose distance alone is more than 32 bits of elements can say.
TEST(GatedDeltaOffsets, SlotStridesPastTwoToThe31Elements) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_others", update_support());
  GatedDeltaCase c{.name = "far", .lens = {2, 2}, .heads = 1, .v_heads = 1, .dim_k = 32, .dim_v = 32, .slots = {6, 0}};
  GatedDeltaCall near(c), far(c);
  near.run();
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) / 5;
  constexpr std::size_t kBytes = 32 * 32 * 4;
  const SparseMemory memory(6 * kStride * 4 + kBytes);
  ASSERT_NE(memory.data(), nullptr) << "no room for the sparse pool";
  flashport::GatedDeltaUpdateArgs args = far.args();
  args.state->data = memory.data();
  args.state->strides[0] = kStride;
  for (std::int64_t slot : c.slots) {
    char* to = memory.data() + slot * kStride * 4;
    ASSERT_EQ(backend().copy(device().index, 0, to, far.state()->address({slot, 0, 0, 0}), kBytes), nullptr);
  }
  synchronize();
  far.run(args);
  EXPECT_EQ(far.out().element_bytes(), near.out().element_bytes());
  for (std::int64_t slot : c.slots) {
    std::vector<unsigned char> state(kBytes);
    const char* from = memory.data() + slot * kStride * 4;
    ASSERT_EQ(backend().copy(device().index, 0, state.data(), from, kBytes), nullptr);
    synchronize();
    EXPECT_EQ(state, part(near.state()->element_bytes(), static_cast<std::size_t>(slot), 7));
  }
}

// Wrong contents, which a GPU's call looks at when it is asked to: the text, and outputs that keep their bits.
TEST(GatedDeltaErrors, NameThePlaceAndLeaveOutputsAlone) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_others", update_support());
  const ContentChecks checks;
  const auto refuses = [](const GatedDeltaCase& c, const std::string& text) {
    GatedDeltaCall call(c);
    const std::vector<unsigned char> out = call.out().element_bytes(), state = call.state()->element_bytes();
    const std::string said = message_of<flashport::ValueError>([&] { call.run(); });
    EXPECT_EQ(said, "gated_delta_update: " + text);
    call.out().download();
    call.state()->download();
    EXPECT_TRUE(call.out().element_bytes() == out && call.state()->element_bytes() == state) << said;
  };
  refuses({.name = "", .lens = {2, 2, 2}, .slots = {4, 0, 4}},
          "state_indices[0] and state_indices[2] must not be the same slot of state, got 4 for both; give each "
          "sequence its own, or -1");
  refuses({.name = "", .slots = {4, 7}},
          "state_indices[1] = 7 must be below 7 (the slots of state); an index below 0 takes no slot");
  refuses({.name = "", .slots = {4, 6}, .steps = {3, 3}},
          "intermediate_indices[0] and intermediate_indices[1] must not be the same slot of intermediate_states, got 3 "
          "for both; give each sequence its own, or -1");
  refuses({.name = "", .lens = {3}, .slots = {4}, .steps = {3}, .parents = {0, 0, 2}},
          "parent_tokens[0, 2] = 2 must lie in [0, 1] (a token before it)");
  refuses({.name = "", .lens = {3, -1, 2}, .varlen = true, .slots = {4, 1, 2}},
          "cu_seqlens must rise within the 5 tokens of q, got 3 and 2 for sequence 1");
}

}  // namespace
}  // namespace flashport_test
