// Sequences over many calls, and of many tokens: a prompt's state is what decoding goes on from, and it does not drift.
#include <gtest/gtest.h>

#include <flashport/backend.h>
#include <flashport/decode.h>

#include "tests/ops/gated_delta/call.h"
#include "tests/ops/gated_delta/chunk_call.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

using reference::Type;

// The update's call of the same tokens; with a_log their gates' inputs and the logits of their rates.
flashport::GatedDeltaUpdateArgs update_of(const flashport::GatedDeltaChunkArgs& a) {
  flashport::GatedDeltaUpdateArgs u;
  u.q = a.q;
  u.k = a.k;
  u.v = a.v;
  (a.a_log ? u.a : u.g) = a.g;
  (a.beta_sigmoid ? u.b : u.beta) = a.beta;
  u.a_log = a.a_log;
  u.dt_bias = a.dt_bias;
  u.state = a.state;
  u.state_indices = a.state_indices;
  u.state_layout = a.state_layout;
  u.use_qk_l2norm = a.use_qk_l2norm;
  u.out = a.out;
  return u;
}

// The first tokens by chunks and the others one by one, and all of them one by one, each by the chunked call's
// tolerance.
void check_prompt(const DeltaChunkCase& c) {
  for (std::int64_t prompt : {std::int64_t{70}, std::int64_t{0}}) {
    SCOPED_TRACE(prompt);
    DeltaChunkCall call(c);
    const flashport::GatedDeltaChunkArgs args = call.args();
    call.check([&] {
      if (prompt > 0) flashport::gated_delta_chunk(part_of(args, 0, prompt));
      for (std::int64_t t = prompt; t < c.lens[0]; ++t) {
        flashport::gated_delta_update(part_of(update_of(args), t, 1));
      }
    });
  }
}

class GatedDeltaPrompt : public testing::TestWithParam<DeltaChunkCase> {};

TEST_P(GatedDeltaPrompt, ByChunksAndThenTokenByTokenIsTokenByToken) {
  const DeltaChunkCase& c = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(
      "delta_chunk_prompt_" + c.name,
      flashport::supports(flashport::GatedDeltaChunkQuery{
          .target = query_target(), .q_dtype = dtype_of(c.type), .head_dim_k = c.dim_k, .head_dim_v = c.dim_v}));
  check_prompt(c);
}

INSTANTIATE_TEST_SUITE_P(
    Ops, GatedDeltaPrompt,
    testing::ValuesIn(std::vector<DeltaChunkCase>{
        {.name = "bf16", .lens = {80, 80}, .slots = {5, 2}, .a_log = true, .dt_bias = true, .sigmoid = true},
        {.name = "bf16_kv_log_gates", .lens = {80, 80}, .dim_k = 128, .key_major = true, .slots = {5, 2}},
        {.name = "fp32",
         .lens = {80, 80},
         .type = Type::kF32,
         .slots = {5, 2},
         .a_log = true,
         .dt_bias = true,
         .sigmoid = true},
    }),
    [](const auto& info) { return info.param.name; });

TEST(FullGatedDeltaSteps, OfALongSequence) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_others", update_support());
  GatedDeltaCall({.name = "long", .lens = {16384}, .heads = 1, .v_heads = 1, .dim_k = 32, .dim_v = 16, .slots = {3}})
      .check();
}

// Each step is a call, which stores the state in fp32 for the next.
TEST(FullGatedDeltaSteps, ThousandsDoNotDrift) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_others", update_support());
  for (const int options : {0, 1, 2, 3}) {
    SCOPED_TRACE(options);
    GatedDeltaCase c{.name = "steps", .lens = {4096, 4096}, .heads = 1, .v_heads = 1, .dim_k = 32, .dim_v = 24};
    c.key_major = options % 2 == 1;
    c.kda = options / 2;
    c.slots = {3, 0};
    GatedDeltaCall call(c);
    call.check([&] {
      for (std::int64_t t = 0; t < c.lens[0]; ++t) flashport::gated_delta_update(part_of(call.args(), t, 1));
    });
  }
}

}  // namespace
}  // namespace flashport_test
