// Mixed calls whose segments one kernel reads as they are stored: which calls, and what the kernel is told.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/device/decode/chunks.h"
#include "common/host/decode/stored_segments.h"
#include "tests/host/decode/plan_fixture.h"

namespace flashport::test {
namespace {

constexpr std::int64_t kBatch = 3, kHeads = 16, kKvHeads = 4, kDim = 128, kRow4 = 72;
constexpr char kSmall[] = "decode_segments/fp16/kv=q4_0/hd128/r8/fakegpu";
constexpr char kLarge[] = "decode_segments/fp16/kv=q4_0/hd128/r8/large/fakegpu";
constexpr char kAny[] = "decode/fp16/kv=any/hd128/r16/fakegpu";

class StoredSegments : public PlanDecode {
 protected:
  StoredSegments() {
    args_.q = args_.out = TensorView(scratch(), DType::kFloat16, kGpu, {kBatch, kHeads, kDim});
    args_.out.data = scratch_at(1 << 20);
    DecodeSegment old, hot;
    old.k = old.v = TensorView(scratch_at(2 << 20), DType::kUInt8, kGpu, {kBatch, 200, kKvHeads, kRow4});
    old.k_format = old.v_format = KvFormat::kQ4_0;
    hot.k = hot.v = TensorView(scratch_at(3 << 20), DType::kFloat16, kGpu, {kBatch, 100, kKvHeads, kDim});
    old.seqlens = hot.seqlens = ints(lens_, {kBatch});
    args_.segments = {old, hot};
    args_.by_segment = true;
  }
  DecodePlan plan() {
    const DecodeProblem problem = validate_mixed(args_);
    return plan_decode(problem, device_context(Check("flash_decode_mixed"), problem.q, "q"));
  }

  MixedDecodeArgs args_;
  std::int32_t lens_[kBatch] = {}, starts_[kBatch + 1] = {}, table_[kBatch * 34] = {};
  float numbers_[kHeads] = {};
};

TEST_F(StoredSegments, LeavesAreOfOneSegmentEach) {
  EXPECT_EQ(segment_leaves(0, false), 0);
  EXPECT_EQ(segment_leaves(1, false), 2);
  EXPECT_EQ(segment_leaves(128, false), 2);
  EXPECT_EQ(segment_leaves(129, false), 4);
  EXPECT_EQ(segment_leaves(64, true), 2);
  EXPECT_EQ(segment_leaves(65, true), 4);
  const DecodePlan it = plan();
  ASSERT_STREQ(it.kernel->key, kSmall);
  EXPECT_EQ(it.params.cache.max_len, (4 + 4) * kLeafKeys);  // 200 of blocks, 100 of 16 bits
}

TEST_F(StoredSegments, KernelsLearnTheSegments) {
  args_.sinks = TensorView(numbers_, DType::kFloat32, kGpu, {kHeads});
  flash_decode_mixed(args_);
  ASSERT_FALSE(fake_state().launches.empty());
  const auto& launch = fake_state().launches[0];
  EXPECT_EQ(launch.key, kSmall);
  SegmentsDecodeParams p;
  ASSERT_EQ(launch.params.size(), sizeof(p));
  std::memcpy(&p, launch.params.data(), sizeof(p));
  EXPECT_EQ(p.segment_count, 2);
  EXPECT_EQ(p.MixedDecodeParams::cache.max_len, 300);  // keys
  EXPECT_EQ(p.segments[0].k_format, KvFormat::kQ4_0);
  EXPECT_EQ(p.segments[1].cache.k.data, args_.segments[1].k.data);
  EXPECT_EQ(p.sinks, numbers_);
}

// Teams share the rows of tiles, or help the first one.
TEST_F(StoredSegments, TeamsWalkThroughNeighbouringHeads) {
  fake_state().multiprocessors = 1;
  DecodePlan it = plan();
  EXPECT_TRUE(it.params.heads_side_by_side);
  EXPECT_FALSE(it.params.teams_help);
  for (const LineCut& cut : it.params.cuts) EXPECT_EQ(cut.concurrent.value % 2, 0u);

  for (DecodeSegment& s : args_.segments) {
    s.kv_layout = KvLayout::kHND;
    std::swap(s.k.shape[1], s.k.shape[2]);
    s.k = s.v = TensorView(s.k.data, s.k.dtype, kGpu, {kBatch, kKvHeads, s.k.shape[2], s.k.shape[3]});
  }
  it = plan();
  EXPECT_STREQ(it.kernel->key, kSmall);
  EXPECT_FALSE(it.params.heads_side_by_side);
  EXPECT_TRUE(it.params.teams_help);
}

TEST_F(StoredSegments, LargeCachesHaveAKernelOfTheirOwn) {
  DecodeSegment& old = args_.segments[0];
  old.k = old.v = TensorView(scratch_at(2 << 20), DType::kUInt8, kGpu, {kBatch, 33'000, kKvHeads, kRow4});
  EXPECT_STREQ(plan().kernel->key, kSmall);
  old.k = old.v = TensorView(scratch_at(2 << 20), DType::kUInt8, kGpu, {kBatch, 34'000, kKvHeads, kRow4});
  const DecodePlan it = plan();
  EXPECT_STREQ(it.kernel->key, kLarge);
  for (const LineCut& cut : it.params.cuts) EXPECT_EQ(cut.concurrent.value % 4, 0u);
}

TEST_F(StoredSegments, SizesDoNotDependOnHowMemoryLies) {
  const std::int64_t size = mixed_workspace_size(args_);
  EXPECT_GE(size, plan().workspace_bytes);
  args_.q.data = scratch_at(2);  // half a word
  EXPECT_STREQ(plan().kernel->key, kAny);
  EXPECT_EQ(mixed_workspace_size(args_), size);
}

// Rows that do not begin at whole units ask for the kernel of other caches.
TEST_F(StoredSegments, SizesOfLargeCachesServeBothKernels) {
  DecodeSegment& old = args_.segments[0];
  for (const std::int64_t offset : {0, 8}) {
    old.k = old.v = TensorView(scratch_at((2 << 20) + offset), DType::kUInt8, kGpu, {kBatch, 34'000, kKvHeads, kRow4});
    const DecodePlan it = plan();
    EXPECT_STREQ(it.kernel->key, offset == 0 ? kLarge : kSmall);
    EXPECT_LE(it.workspace_bytes, mixed_workspace_size(args_));
  }
  const std::int64_t size = mixed_workspace_size(args_);
  old.k.data = old.v.data = scratch_at(2 << 20);
  EXPECT_EQ(mixed_workspace_size(args_), size);
}

// How a sequence is read must not depend on the batch.
TEST_F(StoredSegments, AStrideOfTheBatchCountsForOneSequence) {
  TensorView& k = args_.segments[1].k;
  args_.segments[1].k.strides[0] += 4;
  for (TensorView* view :
       {&args_.q, &args_.out, &args_.segments[0].k, &args_.segments[0].v, &k, &args_.segments[1].v}) {
    view->shape[0] = 1;
  }
  for (DecodeSegment& s : args_.segments) s.seqlens.shape[0] = 1;
  EXPECT_STREQ(plan().kernel->key, kAny);
}

// What asks for the kernel of all formats.
TEST_F(StoredSegments, OtherCalls) {
  const MixedDecodeArgs plain = args_;
  const std::pair<const char*, std::function<void(MixedDecodeArgs&)>> changes[] = {
      {"not by segment", [](auto& a) { a.by_segment = false; }},
      {"window", [](auto& a) { a.window_left = 1000; }},
      {"alibi_slopes", [&](auto& a) { a.alibi_slopes = TensorView(numbers_, DType::kFloat32, kGpu, {kHeads}); }},
      {"two queries",
       [](auto& a) {
         a.q = TensorView(scratch(), DType::kFloat16, kGpu, {kBatch, 2, kHeads, kDim});
         a.out = TensorView(scratch_at(1 << 20), DType::kFloat16, kGpu, {kBatch, 2, kHeads, kDim});
       }},
      {"scales",
       [&](auto& a) {
         a.segments[1].k_scale = a.segments[1].v_scale = TensorView(numbers_, DType::kFloat32, kGpu, {1});
       }},
      {"values at an odd address", [](auto& a) { a.segments[1].v.data = scratch_at((3 << 20) + 4); }},
      {"pages of three tokens",
       [&](auto& a) {
         a.segments[1].k = a.segments[1].v =
             TensorView(scratch_at(3 << 20), DType::kFloat16, kGpu, {40, 3, kKvHeads, kDim});
         a.segments[1].block_table = ints(table_, {kBatch, 34});
       }},
      {"csr",
       [&](auto& a) {
         a.segments[1].k = a.segments[1].v =
             TensorView(scratch_at(3 << 20), DType::kFloat16, kGpu, {40, 4, kKvHeads, kDim});
         a.segments[1].kv_indptr = ints(starts_, {kBatch + 1});
         a.segments[1].kv_indices = ints(table_, {40});
       }},
      {"no blocks", [](auto& a) { a.segments[0] = a.segments[1]; }},
      {"values in another format", [](auto& a) { a.segments[0].v = a.segments[1].v, a.segments[0].v_format = {}; }},
      {"another format of blocks", [](auto& a) { a.segments[0].k_format = a.segments[0].v_format = KvFormat::kIq4Nl; }},
  };
  EXPECT_STREQ(plan().kernel->key, kSmall);
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    args_ = plain;
    change(args_);
    if (std::string(name) == "values in another format") args_.segments[0].v.shape[1] = 200;
    EXPECT_STREQ(plan().kernel->key, kAny);
  }
}

TEST_F(StoredSegments, OneSegmentWithAMask) {
  args_.segments.pop_back();
  args_.mask = TensorView(scratch_at(4 << 20), DType::kFloat16, kGpu, {1, 1, 1, 150});
  const DecodePlan it = plan();
  EXPECT_STREQ(it.kernel->key, kSmall);
  EXPECT_EQ(it.params.cache.max_len, 4 * kLeafKeys);  // 150 keys
}

}  // namespace
}  // namespace flashport::test
