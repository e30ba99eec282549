// Calls of gated_delta_update among others: the same bits however a sequence is called, graphs, indices and offsets
// that are not what they should be, and refusals.
#include <gtest/gtest.h>

#include <flashport/decode.h>
#include <flashport/error.h>

#include <cstring>

#include "tests/ops/gated_delta/call.h"
#include "tests/support/content_checks.h"
#include "tests/support/expected_support.h"
#include "tests/support/graphs.h"
#include "tests/support/message_of.h"
#include "tests/support/sparse_memory.h"

namespace flashport_test {
namespace {

using reference::Type;

std::vector<unsigned char> part(std::vector<unsigned char> all, std::size_t part, std::size_t parts) {
  const std::size_t size = all.size() / parts;
  return {all.begin() + part * size, all.begin() + (part + 1) * size};
}

// The call of sequence n alone, without intermediate states.
flashport::GatedDeltaUpdateArgs sequence_of(flashport::GatedDeltaUpdateArgs a, std::int64_t n) {
  const auto one = [&](flashport::TensorView& view) {
    view.data = static_cast<char*>(view.data) + n * view.strides[0] * flashport::element_size(view.dtype);
    view.shape[0] = 1;
  };
  for (flashport::TensorView* view : {&a.q, &a.k, &a.v, &a.out, &*a.state_indices}) one(*view);
  for (std::optional<flashport::TensorView>* view : {&a.a, &a.b, &a.g, &a.gk, &a.gv, &a.beta}) {
    if (*view) one(**view);
  }
  a.intermediate_states.reset();
  a.intermediate_indices.reset();
  return a;
}

// A sequence gives the same bits again, alone and in a batch, and, of states that are stored as they are computed, in
// one call and token by token.
TEST(GatedDeltaBits, DoNotDependOnTheBatchOrTheCall) {
  FLASHPORT_REQUIRE_SUPPORT("gated_delta_others", update_support());
  for (int options = 0; options < 36; ++options) {
    SCOPED_TRACE(options);
    GatedDeltaCase c{.name = "bits", .lens = {4, 4, 4}, .heads = 1, .v_heads = 2, .dim_v = 72};
    c.slots = {5, 2, 0};
    c.steps = {3, 1, 0};
    c.key_major = options % 2 == 1;
    c.state = options / 2 % 2 == 1 ? Type::kBF16 : Type::kF32;
    c.kda = options / 4 % 3 == 1;
    if (options / 4 % 3 == 2) {
      c.gate = GateInput::kLogarithm;
      c.rate = RateInput::kColumnRates;
      c.key_gates = c.column_gates = true;
    }
    c.dim_k = std::int64_t{64} << options / 12;
    const std::int64_t at_once = c.state == Type::kF32 ? 1 : 4;
    GatedDeltaCall together(c), again(c), apart(c);
    together.run();
    again.run();
    EXPECT_EQ(again.out().element_bytes(), together.out().element_bytes());
    EXPECT_EQ(again.state()->element_bytes(), together.state()->element_bytes());
    for (std::int64_t n = 2; n >= 0; --n) {
      for (std::int64_t t = 0; t < 4; t += at_once) {
        apart.run(sequence_of(part_of(apart.args(), t, at_once), n));
        if (at_once > 1) continue;
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

// A table of parents with fewer columns than a sequence has tokens, which only a GPU does not refuse: the last column
// serves all later tokens.
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
