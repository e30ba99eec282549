// gated_delta_update against the fp64 recurrence, option by option; what no sequence names keeps its bits.
#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "tests/ops/gated_delta/call.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

using reference::Type;

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
      {.name = "fp16_state", .lens = {5, 5}, .state = Type::kF16, .slots = {3, 1}},
      {.name = "fp16_state_kv_packed",
       .lens = {5, 5},
       .type = Type::kF16,
       .state = Type::kF16,
       .key_major = true,
       .packed = true,
       .slots = {3, 1}},
      {.name = "fp16_state_kda", .lens = {5, 5}, .state = Type::kF16, .kda = 1, .slots = {3, 1}},
      {.name = "bf16_rate_of_decay", .lens = {5, 5}, .a_log = Type::kBF16, .slots = {3, 1}},
      {.name = "fp16_rate_of_decay_kda", .lens = {5, 5}, .a_log = Type::kF16, .kda = 1, .slots = {3, 1}},
      {.name = "zero_padding", .lens = {3, 3, 3}, .slots = {-1, 4, -7}, .zero_padding = true},
      {.name = "zero_padding_kv",
       .lens = {1, 1, 1},
       .dim_v = 72,
       .state = Type::kBF16,
       .key_major = true,
       .packed = true,
       .slots = {4, -1, -2},
       .index64 = true,
       .zero_padding = true},
      {.name = "zero_padding_kda_varlen",
       .lens = {0, 2, 5},
       .varlen = true,
       .kda = 1,
       .slots = {-1, 4, -1},
       .zero_padding = true},
      {.name = "zero_padding_fp16_state", .lens = {2, 2}, .state = Type::kF16, .slots = {-1, 2}, .zero_padding = true},
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
      {.name = "kda_tokens_joined", .lens = {7, 7}, .kda = 1, .joined_rows = true, .packed = true, .slots = {3, 1}},
      {.name = "kda_rows_joined", .lens = {7, 7}, .kda = 2, .joined_rows = true, .packed = true, .slots = {3, 1}},
      {.name = "kda_lower_bound", .lens = {7, 7}, .kda = 1, .slots = {3, 1}, .lower_bound = -5.0},
      {.name = "lower_bound", .lens = {7, 7}, .slots = {3, 1}, .lower_bound = -5.0},
      {.name = "rows_joined", .lens = {7, 7}, .gates = Type::kBF16, .joined_rows = true, .slots = {3, 1}},
      {.name = "packed", .lens = {7, 7}, .gates = Type::kBF16, .packed = true, .slots = {3, 1}, .index64 = true},
      {.name = "slots_far_below_zero",
       .lens = {2, 2, 2},
       .slots = {-(std::int64_t{1} << 32), 3, -(std::int64_t{1} << 33) + 1},
       .steps = {5, -(std::int64_t{1} << 32) + 2, std::numeric_limits<std::int64_t>::min()},
       .index64 = true},
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
      {.name = "steps_fp16", .lens = {4, 4}, .steps_type = Type::kF16, .slots = {0, 3}, .steps = {1, 2}},
      {.name = "tree_fp16_kv",
       .lens = {6, 6},
       .state = Type::kF16,
       .steps_type = Type::kF16,
       .key_major = true,
       .slots = {0, 3},
       .steps = {5, 1},
       .parents = {0, 0, 0, 1, 1, 3},
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
std::vector<GatedDeltaCase> bf16_decode_cases() {
  std::vector<GatedDeltaCase> cases;
  for (const auto& [name, tokens] : {std::pair{"decode_loop_bf16", 400}, std::pair{"drift_bf16", 4096}}) {
    GatedDeltaCase c{.name = name, .lens = {tokens}, .heads = 1, .v_heads = 1, .dim_k = 32, .dim_v = 32};
    c.state = c.steps_type = Type::kBF16;
    c.slots = {3};
    c.steps = {2};
    for (std::int64_t t = 0; t < tokens; ++t) c.parents.push_back(t - 1);
    cases.push_back(c);
  }
  return cases;
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
  c.name = "gates_finals_fp16_pool";
  c.state = Type::kF16;
  c.final_states = Type::kF32;
  cases.push_back(c);
  c.name = "gates_finals_fp16";
  c.state = Type::kF32;
  c.final_states = Type::kF16;
  c.key_major = false;
  cases.push_back(c);
  c.state = c.final_states.emplace(Type::kBF16);
  c.key_major = true;
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
      if (c.state != Type::kF32) continue;
      c.name.replace(c.name.rfind("_fp32"), 5, "_fp16");
      c.state = Type::kF16;
      c.steps_type = Type::kF32;
      c.final_states = Type::kF16;
      cases.push_back(c);
    }
  }
  return cases;
}

const auto kName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Ops, GatedDelta, testing::ValuesIn(named_cases()), kName);
INSTANTIATE_TEST_SUITE_P(OpsBf16, GatedDelta, testing::ValuesIn(bf16_decode_cases()), kName);
INSTANTIATE_TEST_SUITE_P(OpsGates, GatedDelta, testing::ValuesIn(gate_cases()), kName);
INSTANTIATE_TEST_SUITE_P(OpsKernels, GatedDelta, testing::ValuesIn(kernel_cases()), kName);
INSTANTIATE_TEST_SUITE_P(OpsDims, GatedDelta, testing::ValuesIn(dimension_cases()), kName);

}  // namespace
}  // namespace flashport_test
