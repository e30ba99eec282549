// gated_delta_chunk against the fp64 recurrence, option by option; what no sequence names keeps its bits.
#include <gtest/gtest.h>

#include <flashport/backend.h>
#include <flashport/decode.h>
#include <flashport/error.h>

#include <cmath>
#include <limits>

#include "tests/ops/gated_delta/chunk_call.h"
#include "tests/support/compare.h"
#include "tests/support/content_checks.h"
#include "tests/support/expected_support.h"
#include "tests/support/graphs.h"
#include "tests/support/message_of.h"

namespace flashport_test {
namespace {

using reference::Type;

flashport::Support chunk_support(Type type = Type::kBF16, std::int64_t dim_k = 128, std::int64_t dim_v = 128) {
  return flashport::supports(flashport::GatedDeltaChunkQuery{
      .target = query_target(), .q_dtype = dtype_of(type), .head_dim_k = dim_k, .head_dim_v = dim_v});
}

class GatedDeltaChunk : public testing::TestWithParam<DeltaChunkCase> {};

TEST_P(GatedDeltaChunk, MatchesTheOracle) {
  FLASHPORT_REQUIRE_SUPPORT("delta_chunk_" + GetParam().name,
                            chunk_support(GetParam().type, GetParam().dim_k, GetParam().dim_v));
  DeltaChunkCall(GetParam()).check();
}

std::vector<DeltaChunkCase> named_cases() {
  return {
      {.name = "plain", .slots = {5, 2}},
      {.name = "plain_kv", .key_major = true, .slots = {5, 2}},
      {.name = "no_pool", .finals = true, .chunks = true},
      {.name = "identity", .slots = {0, 1}, .identity = true},
      {.name = "read_only_pool", .slots = {4, 4}, .update = false, .finals = true},
      {.name = "bf16_state", .state = Type::kBF16, .final_type = Type::kBF16, .slots = {3, 1}, .finals = true},
      {.name = "fp16_state", .state = Type::kF16, .final_type = Type::kF16, .slots = {3, 1}, .finals = true},
      {.name = "fp16_state_kv", .state = Type::kF16, .key_major = true, .packed = true, .slots = {3, 1}},
      {.name = "bf16_state_kv", .state = Type::kBF16, .key_major = true, .slots = {3, 1}, .finals = true},
      {.name = "fp16", .type = Type::kF16, .gates = Type::kF16, .beta = Type::kF16, .slots = {3, 1}, .chunks = true},
      {.name = "fp32", .type = Type::kF32, .slots = {3, 1}, .chunks = true},
      {.name = "fp32_kv", .type = Type::kF32, .key_major = true, .slots = {3, 1}, .finals = true, .chunks = true},
      {.name = "bf16_gates", .gates = Type::kBF16, .beta = Type::kBF16, .slots = {3, 1}},
      {.name = "no_l2norm_fp32", .type = Type::kF32, .l2norm = false, .slots = {3, 1}, .scale = 0.7},
      {.name = "no_l2norm_bf16", .l2norm = false, .slots = {3, 1}},
      {.name = "modulo", .heads = 2, .v_heads = 8, .modulo = true, .slots = {3, 1}},
      {.name = "eight_heads_a_head", .v_heads = 8, .slots = {3, 1}},
      {.name = "four_heads_a_head", .heads = 2, .v_heads = 8, .slots = {3, 1}},
      {.name = "one_head_a_head", .heads = 3, .v_heads = 3, .slots = {3, 1}},
      {.name = "packed", .gates = Type::kBF16, .beta = Type::kBF16, .packed = true, .slots = {3, 1}, .index64 = true},
      {.name = "slots_far_below_zero",
       .lens = {70, 70},
       .slots = {-(std::int64_t{1} << 32), 3},
       .index64 = true,
       .finals = true},
      {.name = "packed_kv", .dim_k = 96, .key_major = true, .packed = true, .slots = {3, 1}, .chunks = true},
      {.name = "packed_fp32",
       .heads = 2,
       .v_heads = 4,
       .dim_k = 128,
       .type = Type::kF32,
       .packed = true,
       .slots = {3, 1},
       .finals = true,
       .chunks = true},
      {.name = "gate_of_the_call_fp32", .type = Type::kF32, .slots = {3, 1}, .a_log = true, .dt_bias = true},
      {.name = "bf16_rate_of_decay", .slots = {3, 1}, .a_log = true, .a_log_type = Type::kBF16},
      {.name = "gate_without_bias", .slots = {3, 1}, .a_log = true},
      {.name = "sigmoid", .slots = {3, 1}, .sigmoid = true},
      {.name = "sigmoid_fp32", .type = Type::kF32, .slots = {3, 1}, .sigmoid = true},
      {.name = "twice_sigmoid", .lens = {200, 200}, .slots = {3, 1}, .sigmoid = true, .neg_eigval = true},
      {.name = "varlen",
       .lens = {0, 1, 64, 0, 65, 700, 0},
       .varlen = true,
       .slots = {5, 2, 0, 6, -1, 3, 4},
       .finals = true,
       .chunks = true},
      {.name = "varlen_fp32",
       .lens = {63, 128, 0, 127, 2},
       .varlen = true,
       .type = Type::kF32,
       .slots = {5, -3, 0, 6, 1},
       .index64 = true,
       .finals = true,
       .chunks = true},
      {.name = "varlen_ones", .lens = {1, 1, 1, 1, 1, 1, 1}, .varlen = true, .slots = {5, 2, 0, 6, 1, 3, 4}},
      {.name = "varlen_first_empty", .lens = {0, 0, 3}, .varlen = true, .slots = {1, 2, 3}, .finals = true},
      {.name = "varlen_all_empty", .lens = {0, 0, 0}, .varlen = true, .slots = {1, -2, 3}, .finals = true},
      {.name = "varlen_one", .lens = {130}, .varlen = true, .slots = {1}, .chunks = true},
      {.name = "no_tokens", .lens = {0, 0}, .slots = {1, 2}, .finals = true, .chunks = true},
      {.name = "negative_slot", .lens = {70, 70, 70}, .slots = {-1, 4, -7}, .finals = true, .chunks = true},
      {.name = "extreme_gates_fp32",
       .lens = {200, 200},
       .type = Type::kF32,
       .slots = {3, 1},
       .gating = LogGates::kExtreme},
      {.name = "extreme_gates_bf16", .lens = {200, 200}, .slots = {3, 1}, .gating = LogGates::kExtreme},
      {.name = "extreme_gate_inputs_fp32",
       .lens = {130, 130},
       .v_heads = 4,
       .type = Type::kF32,
       .slots = {3, 1},
       .gating = LogGates::kExtreme,
       .a_log = true},
      {.name = "extreme_gate_inputs_bf16",
       .lens = {130, 130},
       .v_heads = 4,
       .slots = {3, 1},
       .finals = true,
       .gating = LogGates::kExtreme,
       .a_log = true,
       .dt_bias = true},
      {.name = "extreme_rates_fp32",
       .lens = {130, 130},
       .type = Type::kF32,
       .slots = {3, 1},
       .gating = LogGates::kExtreme,
       .sigmoid = true},
      {.name = "extreme_gate_inputs_and_rates_bf16",
       .lens = {130, 130},
       .v_heads = 4,
       .slots = {3, 1},
       .gating = LogGates::kExtreme,
       .a_log = true,
       .sigmoid = true},
      {.name = "infinite_gates_bf16", .lens = {200, 200}, .slots = {3, 1}, .gating = LogGates::kInfinite},
      {.name = "infinite_gates_fp32",
       .lens = {200, 200},
       .type = Type::kF32,
       .slots = {3, 1},
       .gating = LogGates::kInfinite},
      {.name = "slow_gates_bf16", .lens = {200, 200}, .slots = {3, 1}, .gating = LogGates::kSlow},
      {.name = "slow_gates_fp32", .lens = {200, 200}, .type = Type::kF32, .slots = {3, 1}, .gating = LogGates::kSlow},
      {.name = "growing_gates_bf16", .lens = {200, 200}, .slots = {3, 1}, .gating = LogGates::kGrowing},
      {.name = "growing_gates_fp32",
       .lens = {200, 200},
       .type = Type::kF32,
       .slots = {3, 1},
       .gating = LogGates::kGrowing},
      {.name = "small_keys_bf16", .slots = {3, 1}, .size = 1e-3},
      {.name = "zero_keys_bf16", .slots = {3, 1}, .size = 0},
      {.name = "small_keys_fp32", .type = Type::kF32, .slots = {3, 1}, .size = 1e-3},
      {.name = "zero_keys_fp32", .type = Type::kF32, .slots = {3, 1}, .size = 0},
      {.name = "long", .lens = {16384}, .v_heads = 1, .slots = {3}, .finals = true},
      {.name = "long_k128", .lens = {4096}, .dim_k = 128, .dim_v = 128, .slots = {3}, .finals = true},
      {.name = "long_k256_fp16", .lens = {700}, .dim_k = 256, .dim_v = 256, .type = Type::kF16, .slots = {3}},
      {.name = "long_k128_varlen",
       .lens = {300, 0, 500, 65},
       .varlen = true,
       .dim_k = 128,
       .dim_v = 128,
       .key_major = true,
       .slots = {3, 1, 5, 0},
       .chunks = true},
      {.name = "long_fp32_kv", .lens = {4096}, .v_heads = 1, .type = Type::kF32, .key_major = true, .slots = {3}},
  };
}

// Tokens around the ends of chunks.
std::vector<DeltaChunkCase> length_cases() {
  std::vector<DeltaChunkCase> cases;
  for (std::int64_t tokens : {1, 2, 4, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 128, 129, 1000}) {
    for (Type type : {Type::kBF16, Type::kF32}) {
      DeltaChunkCase c;
      c.name = "t" + std::to_string(tokens) + (type == Type::kF32 ? "_fp32" : "");
      c.lens = {tokens, tokens};
      c.type = type;
      c.slots = {6, 1};
      c.finals = c.chunks = true;
      cases.push_back(c);
    }
  }
  return cases;
}

// Every pair of head dimensions, with the other options in turn.
std::vector<DeltaChunkCase> dimension_cases() {
  std::vector<DeltaChunkCase> cases;
  int number = 0;
  for (std::int64_t dim_k : {16, 24, 64, 96, 128, 192, 256}) {
    for (std::int64_t dim_v : {16, 24, 64, 96, 128, 192, 256}) {
      DeltaChunkCase c;
      c.lens = {70, 70};
      c.dim_k = dim_k;
      c.dim_v = dim_v;
      c.type = number % 3 == 2 ? Type::kF16 : Type::kBF16;
      c.key_major = number % 2 == 1;
      c.state = number % 5 < 2 ? Type::kBF16 : Type::kF32;
      c.chunks = number % 4 == 3;
      c.packed = number / 3 % 2 == 1;
      c.slots = {6, 1};
      c.name = "k" + std::to_string(dim_k) + "_v" + std::to_string(dim_v);
      cases.push_back(c);
      if (number++ % 3 != 1) continue;
      c.type = Type::kF32;
      c.name += "_fp32";
      cases.push_back(c);
    }
  }
  return cases;
}

const auto kName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Ops, GatedDeltaChunk, testing::ValuesIn(named_cases()), kName);
INSTANTIATE_TEST_SUITE_P(OpsLengths, GatedDeltaChunk, testing::ValuesIn(length_cases()), kName);
INSTANTIATE_TEST_SUITE_P(OpsDims, GatedDeltaChunk, testing::ValuesIn(dimension_cases()), kName);

// Several chunks, none, and few tokens, in slices of 64 columns and less.
std::vector<DeltaChunkCase> bits_cases() {
  DeltaChunkCase c{.name = "k64_v80", .lens = {70, 3, 0, 200, 64}, .varlen = true, .slots = {5, 2, 1, 0, 6}};
  c.v_heads = 4;
  c.dim_v = 80;
  std::vector<DeltaChunkCase> cases = {c};
  const auto add = [&](const std::string& name, std::int64_t dim_k, std::int64_t dim_v, bool key_major) {
    c.name = name;
    c.dim_k = dim_k;
    c.dim_v = dim_v;
    c.key_major = key_major;
    cases.push_back(c);
  };
  add("k64_v80_kv", 64, 80, true);
  c.v_heads = 2;
  add("k128_v136", 128, 136, false);
  add("k128_v64_kv", 128, 64, true);
  add("k256_v64", 256, 64, false);
  add("k256_v80_kv", 256, 80, true);
  return cases;
}

class GatedDeltaChunkBitsOf : public testing::TestWithParam<DeltaChunkCase> {
 protected:
  void SetUp() override {
    const DeltaChunkCase& c = GetParam();
    FLASHPORT_REQUIRE_SUPPORT("delta_chunk_bits_" + c.name, chunk_support(c.type, c.dim_k, c.dim_v));
  }
  void TearDown() override { flashport::set_multiprocessor_limit(options().emulator ? 3 : 0); }
};

TEST_P(GatedDeltaChunkBitsOf, ACallAreThoseOfItsRepeats) {
  DeltaChunkCall first(GetParam());
  first.run();
  for (int repeat = 0; repeat < (options().emulator ? 2 : 20); ++repeat) {
    DeltaChunkCall again(GetParam());
    again.run();
    ASSERT_EQ(again.out().element_bytes(), first.out().element_bytes()) << repeat;
    ASSERT_EQ(again.state().element_bytes(), first.state().element_bytes()) << repeat;
  }
}

TEST_P(GatedDeltaChunkBitsOf, ASequenceDoNotDependOnTheBatch) {
  const DeltaChunkCase& c = GetParam();
  DeltaChunkCall together(c), alone(c);
  together.run();
  std::int64_t first = 0;
  for (std::size_t n = 0; n < c.lens.size(); ++n) {
    flashport::GatedDeltaChunkArgs a = part_of(alone.args(), first, c.lens[n]);
    a.cu_seqlens.reset();
    a.state_indices->data = static_cast<char*>(a.state_indices->data) + 4 * n;
    a.state_indices->shape[0] = 1;
    alone.run(a);
    first += c.lens[n];
  }
  EXPECT_EQ(alone.out().element_bytes(), together.out().element_bytes());
  EXPECT_EQ(alone.state().element_bytes(), together.state().element_bytes());
}

// One block for all chains, one after the other, and few blocks for many, against a block for each.
TEST_P(GatedDeltaChunkBitsOf, AChainDoNotDependOnItsBlock) {
  DeltaChunkCase c = GetParam();
  c.finals = c.chunks = true;
  flashport::set_multiprocessor_limit(1 << 20);
  DeltaChunkCall own(c);
  own.run();
  for (int limit : {1, 3}) {
    flashport::set_multiprocessor_limit(limit);
    DeltaChunkCall shared(c);
    shared.run();
    EXPECT_EQ(shared.out().element_bytes(), own.out().element_bytes()) << limit;
    EXPECT_EQ(shared.state().element_bytes(), own.state().element_bytes()) << limit;
    EXPECT_EQ(shared.final_states().element_bytes(), own.final_states().element_bytes()) << limit;
    EXPECT_EQ(shared.chunk_states().element_bytes(), own.chunk_states().element_bytes()) << limit;
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, GatedDeltaChunkBitsOf, testing::ValuesIn(bits_cases()), kName);

struct GatedDeltaChunkBeside : testing::Test {
  void TearDown() override { flashport::set_multiprocessor_limit(options().emulator ? 3 : 0); }
};

// Some multiprocessors prepare the chunks while chains on others wait for them, and one kernel runs after the other.
TEST_F(GatedDeltaChunkBeside, MatchesTheOracleWithTheBitsOfOneBehindTheOther) {
  FLASHPORT_REQUIRE_SUPPORT("delta_chunk_beside", chunk_support());
  for (const std::int64_t dim : {64, 128, 256}) {
    const std::int64_t most = (options().emulator ? 900 : 4500) * 64 / dim;
    for (const std::vector<std::int64_t>& lens :
         {std::vector<std::int64_t>{most}, {most / 9, most / 3, 64, 0, most / 7}, {3, 65, most}}) {
      SCOPED_TRACE(dim);
      DeltaChunkCase c{.name = "concurrent", .lens = lens, .varlen = lens.size() > 1, .heads = 2, .v_heads = 4};
      c.dim_k = c.dim_v = dim;
      c.finals = true;
      flashport::set_multiprocessor_limit(1);
      DeltaChunkCall in_turn(c), concurrent(c);
      in_turn.run();
      const std::int64_t chains = static_cast<std::int64_t>(lens.size()) * c.v_heads * (dim / 64);
      flashport::set_multiprocessor_limit(static_cast<int>(2 * chains));
      concurrent.check();
      EXPECT_EQ(concurrent.out().element_bytes(), in_turn.out().element_bytes());
      EXPECT_EQ(concurrent.final_states().element_bytes(), in_turn.final_states().element_bytes());
    }
  }
}

// Offsets that fall, which only a GPU does not refuse: chains get their chunks' signals, and later calls are right.
TEST_F(GatedDeltaChunkBeside, EndsWhateverTheOffsets) {
  FLASHPORT_REQUIRE_SUPPORT("delta_chunk_offsets", chunk_support());
  DeltaChunkCase c{.name = "offsets", .lens = {640, 0, 0, 0}, .varlen = true, .slots = {0, 1, 2, 3}};
  c.v_heads = 1;
  DeltaChunkCall call(c), alone(c);
  alone.run();
  flashport::set_multiprocessor_limit(8);
  for (const std::vector<double>& offsets :
       {std::vector<double>{0, 640, 0, 0, 0}, {0, 640, 0, 640, 0}, {5000, -3, 200, 100, 640}}) {
    Tensor wrong(Type::kI32, {5});
    for (std::size_t i = 0; i < offsets.size(); ++i) wrong.set({static_cast<std::int64_t>(i)}, offsets[i]);
    wrong.upload();
    flashport::GatedDeltaChunkArgs args = call.args();
    args.cu_seqlens = wrong.view();
    if (args.q.device.kind == flashport::DeviceKind::kCpu) GTEST_SKIP() << "a CPU refuses them";
    call.run(args);
    DeltaChunkCall after(c);
    after.run();
    EXPECT_EQ(after.out().element_bytes(), alone.out().element_bytes());
  }
}

// Two calls of one graph, which share a workspace.
TEST(GatedDeltaChunkGraphs, ReplaysGoOn) {
  FLASHPORT_REQUIRE_SUPPORT("delta_chunk_graphs", chunk_support());
  if (!has_graphs()) GTEST_SKIP() << "a CPU has no graphs";
  const DeltaChunkCase one{.name = "one", .lens = {200}, .slots = {3}};
  const DeltaChunkCase two{.name = "two", .lens = {70, 70}, .slots = {1, 4}};
  DeltaChunkCall eager_one(one), eager_two(two), captured_one(one), captured_two(two);
  eager_one.run();  // a capture finds a workspace that eager calls have prepared
  eager_two.run();
  const DeviceStream stream;
  const DeviceGraph graph(stream, [&] {
    flashport::gated_delta_chunk(captured_one.args(), stream.handle());
    flashport::gated_delta_chunk(captured_two.args(), stream.handle());
  });
  for (int replay = 0; replay < 3; ++replay) {
    graph.launch(stream);
    if (replay == 0) continue;
    eager_one.run();
    eager_two.run();
  }
  stream.synchronize();
  for (DeltaChunkCall* call : {&captured_one, &captured_two}) {
    call->out().download();
    call->state().download();
  }
  EXPECT_EQ(captured_one.out().element_bytes(), eager_one.out().element_bytes());
  EXPECT_EQ(captured_one.state().element_bytes(), eager_one.state().element_bytes());
  EXPECT_EQ(captured_two.out().element_bytes(), eager_two.out().element_bytes());
  EXPECT_EQ(captured_two.state().element_bytes(), eager_two.state().element_bytes());
}

// One call, and two that meet at a multiple of 64 tokens, with the state in an fp32 pool in between.
void check_cuts(Type type) {
  DeltaChunkCase c{.name = "cut", .lens = {333}, .type = type, .slots = {5}};
  DeltaChunkCall whole(c);
  whole.run();
  for (std::int64_t at : {64, 192, 320}) {
    DeltaChunkCall parts(c);
    parts.run(part_of(parts.args(), 0, at));
    parts.run(part_of(parts.args(), at, 333 - at));
    EXPECT_EQ(parts.out().element_bytes(), whole.out().element_bytes()) << at;
    EXPECT_EQ(parts.state().element_bytes(), whole.state().element_bytes()) << at;
  }
}
TEST(GatedDeltaChunkBits, DoNotDependOnWhereAPromptIsCut) {
  FLASHPORT_REQUIRE_SUPPORT("delta_chunk_cut", chunk_support());
  check_cuts(Type::kBF16);
}
TEST(GatedDeltaChunkBits, DoNotDependOnWhereAPromptOfFp32IsCut) {
  FLASHPORT_REQUIRE_SUPPORT("delta_chunk_cut_fp32", chunk_support(Type::kF32));
  check_cuts(Type::kF32);
}

// The state that enters a chunk is the one that a call of the tokens before it ends with.
TEST(GatedDeltaChunkBits, OfEnteringStatesAreThoseOfFinalOnes) {
  FLASHPORT_REQUIRE_SUPPORT("delta_chunk_entering_fp32", chunk_support(Type::kF32));
  DeltaChunkCase c{.name = "entering", .lens = {200}, .type = Type::kF32, .slots = {5}, .chunks = true};
  DeltaChunkCall whole(c);
  whole.run();
  const std::vector<unsigned char> chunks = whole.chunk_states().element_bytes();
  const std::size_t one = chunks.size() / 4;
  for (std::int64_t chunk = 1; chunk < 4; ++chunk) {
    DeltaChunkCall part(c);
    flashport::GatedDeltaChunkArgs a = part_of(part.args(), 0, 64 * chunk);
    a.chunk_states.reset();
    part.run(a);
    EXPECT_EQ(part.state_of(5),
              std::vector<unsigned char>(chunks.begin() + chunk * one, chunks.begin() + (chunk + 1) * one));
  }
}

// A NaN gate is not taken for one below -120: from its token on, all that its head says is NaN. Tokens before it in its
// chunk may be NaN too; other chunks before, other heads and other sequences keep their bits.
TEST(GatedDeltaChunkNaN, OfAGateStaysInItsSequence) {
  FLASHPORT_REQUIRE_SUPPORT("delta_chunk_nan_gate", chunk_support());
  constexpr std::int64_t kToken = 70, kHead = 1;
  for (bool a_log : {false, true}) {
    const DeltaChunkCase c{.name = "nan", .lens = {140, 66}, .varlen = true, .slots = {5, 2}, .a_log = a_log};
    DeltaChunkCall usual(c), poisoned(c);
    usual.run();
    poisoned.gates().set({0, kToken, kHead, 0}, std::numeric_limits<double>::quiet_NaN());
    poisoned.gates().upload();
    poisoned.run();
    EXPECT_EQ(poisoned.out().damage() + poisoned.state().damage(), "");
    EXPECT_EQ(poisoned.out_of(1), usual.out_of(1));
    EXPECT_EQ(poisoned.state_of(2), usual.state_of(2));
    const auto expect = [](Tensor& got, Tensor& wanted, const Shape& at, bool nan) {
      const double value = got.get(at);
      if (nan) {
        EXPECT_TRUE(std::isnan(value)) << testing::PrintToString(at) << " is " << value;
      } else {
        EXPECT_EQ(value, wanted.get(at)) << testing::PrintToString(at);
      }
    };
    for (std::int64_t head = 0; head < 2; ++head) {
      for (std::int64_t column = 0; column < c.dim_v; ++column) {
        for (std::int64_t t = 0; t < c.lens[0]; ++t) {
          if (head == kHead && t >= 64 && t < kToken) continue;
          expect(poisoned.out(), usual.out(), {0, t, head, column}, head == kHead && t >= kToken);
        }
        for (std::int64_t key = 0; key < c.dim_k; ++key) {
          expect(poisoned.state(), usual.state(), {5, head, column, key}, head == kHead);
        }
      }
    }
  }
}

// A workspace of the caller's, of exactly the bytes asked for, poisoned; and one that is too small.
TEST(GatedDeltaChunkWorkspace, MayBeTheCallers) {
  FLASHPORT_REQUIRE_SUPPORT("delta_chunk_workspace", chunk_support());
  DeltaChunkCase c{.name = "workspace", .lens = {70, 3, 0, 200}, .varlen = true, .slots = {5, 2, 1, 0}};
  DeltaChunkCall kept(c), own(c);
  kept.run();
  flashport::GatedDeltaChunkArgs a = own.args();
  const std::int64_t bytes = flashport::gated_delta_chunk_workspace_size(a);
  Tensor workspace(Type::kF32, {bytes / 4});
  workspace.upload();
  a.workspace = workspace.view();
  a.workspace->dtype = flashport::DType::kUInt8;
  a.workspace->shape[0] = bytes - 1;
  EXPECT_EQ(message_of<flashport::ValueError>([&] { own.run(a); }), "gated_delta_chunk: workspace must have at least " +
                                                                        std::to_string(bytes) + " bytes, got " +
                                                                        std::to_string(bytes - 1));
  a.workspace->shape[0] = bytes;
  own.run(a);
  workspace.download();
  EXPECT_EQ(workspace.damage(), "");
  EXPECT_EQ(own.out().element_bytes(), kept.out().element_bytes());
  EXPECT_EQ(own.state().element_bytes(), kept.state().element_bytes());
}

// Wrong contents, which a GPU's call looks at when it is asked to: the text, and outputs that keep their bits.
TEST(GatedDeltaChunkErrors, NameThePlaceAndLeaveOutputsAlone) {
  FLASHPORT_REQUIRE_SUPPORT("delta_chunk_errors", chunk_support());
  const ContentChecks checks;
  const auto refuses = [](const DeltaChunkCase& c, const std::string& text) {
    DeltaChunkCall call(c);
    const std::vector<unsigned char> out = call.out().element_bytes(), state = call.state().element_bytes();
    const std::string said = message_of<flashport::ValueError>([&] { call.run(); });
    EXPECT_EQ(said, "gated_delta_chunk: " + text);
    call.out().download();
    call.state().download();
    EXPECT_TRUE(call.out().element_bytes() == out && call.state().element_bytes() == state) << said;
  };
  refuses({.name = "", .lens = {2, 2, 2}, .slots = {4, 0, 4}},
          "state_indices[0] and state_indices[2] must not be the same slot of state, got 4 for both; give each "
          "sequence its own, or -1");
  refuses({.name = "", .slots = {4, 7}},
          "state_indices[1] = 7 must be below 7 (the slots of state); an index below 0 takes no slot");
  refuses({.name = "", .lens = {3, -1, 2}, .varlen = true, .slots = {4, 1, 2}},
          "cu_seqlens must rise within the 5 tokens of q, got 3 and 2 for sequence 1");
}

}  // namespace
}  // namespace flashport_test
