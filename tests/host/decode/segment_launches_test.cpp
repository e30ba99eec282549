// Mixed calls whose segments have kernels of their own: a launch for each, and one that merges.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/host/decode/segment_launches.h"
#include "tests/host/decode/plan_fixture.h"

namespace flashport::test {
namespace {

constexpr std::int64_t kBatch = 3, kHeads = 8, kDim = 128, kRow8 = 136;

class PlanSegments : public PlanDecode {
 protected:
  PlanSegments() {
    args_.q = args_.out = TensorView(scratch(), DType::kBFloat16, kGpu, {kBatch, kHeads, kDim});
    args_.out.data = scratch_at(1 << 20);
    DecodeSegment old, hot;
    old.k = TensorView(scratch_at(2 << 20), DType::kUInt8, kGpu, {kBatch, 200, 2, kRow8});
    old.v = old.k;
    old.k_format = old.v_format = KvFormat::kQ8_0;
    hot.k = TensorView(scratch_at(3 << 20), DType::kBFloat16, kGpu, {kBatch, 100, 2, kDim});
    hot.v = hot.k;
    old.seqlens = hot.seqlens = ints(lens_, {kBatch});
    args_.segments = {old, hot};
    args_.by_segment = true;
  }
  std::optional<SegmentLaunches> plan() {
    const DecodeProblem problem = validate_mixed(args_);
    return plan_segments(problem, device_context(Check("flash_decode_mixed"), problem.q, "q"));
  }

  MixedDecodeArgs args_;
  std::int32_t lens_[kBatch] = {}, starts_[kBatch + 1] = {0, 1, 2, 3};
  float numbers_[kHeads] = {};
};

TEST_F(PlanSegments, EachHasTheKernelOfItsFormats) {
  args_.sinks = TensorView(numbers_, DType::kFloat32, kGpu, {kHeads});
  args_.softcap = 30.0;
  args_.segments[0].k_scale = args_.segments[0].v_scale = TensorView(numbers_, DType::kFloat32, kGpu, {2});
  std::optional<SegmentLaunches> launches = plan();
  ASSERT_TRUE(launches);
  ASSERT_EQ(launches->segments.size(), 2u);
  EXPECT_EQ(launches->workspace_bytes, mixed_workspace_size(args_));
  bind_workspace(*launches, scratch());
  const DecodeParams &old = launches->segments[0].params, &hot = launches->segments[1].params;
  EXPECT_STREQ(launches->segments[0].kernel->key, "decode/fp16/kv=q8_0/hd128/r16/fakegpu");
  EXPECT_STREQ(launches->segments[1].kernel->key, "decode/bf16/kv=bf16/hd128/r16/fakegpu");
  EXPECT_EQ(old.cache.k.data, args_.segments[0].k.data);
  EXPECT_EQ(old.cache.max_len, 200);
  EXPECT_EQ(old.k_scale, numbers_);
  EXPECT_EQ(old.scale_stride, 1);
  EXPECT_EQ(hot.cache.k.data, args_.segments[1].k.data);
  EXPECT_EQ(hot.cache.max_len, 100);
  EXPECT_EQ(hot.k_scale, nullptr);
  EXPECT_EQ(old.sinks, numbers_);  // once
  EXPECT_EQ(hot.sinks, nullptr);
  EXPECT_EQ(old.cap_scale, hot.cap_scale);
  EXPECT_NE(hot.cap_scale, 0.0f);

  const Stage2Params& merge = launches->merge.params;
  EXPECT_STREQ(launches->merge.kernel->key, "decode_stage2/fakegpu");
  EXPECT_EQ(launches->merge.grid, kBatch * kHeads);
  EXPECT_EQ(merge.max_chunks, 2);
  EXPECT_EQ(merge.out.data, args_.out.data);
  EXPECT_EQ(merge.out.dtype, DType::kBFloat16);
  EXPECT_EQ(merge.lse.data, nullptr);
  EXPECT_EQ(merge.mid.stride_seq, kHeads * 2 * kDim);
  EXPECT_EQ(old.out.data, merge.mid.data);
  EXPECT_EQ(hot.out.data, static_cast<float*>(merge.mid.data) + kDim);
  EXPECT_EQ(hot.out.dtype, DType::kFloat32);
  EXPECT_EQ(hot.out.stride_head, 2 * kDim);
  EXPECT_EQ(hot.lse.data, static_cast<float*>(merge.mid_lse.data) + 1);
  EXPECT_EQ(hot.lse.stride_head, 2);
  // Launches share counters and partial results; what is merged lies behind those of the largest.
  EXPECT_EQ(old.counters, hot.counters);
  for (const DecodePlan& plan : launches->segments) EXPECT_LE(plan.workspace_bytes, launches->merge.offset);
  EXPECT_EQ(launches->workspace_bytes, launches->merge.offset + kBatch * kHeads * 2 * (kDim + 1) * 4);
}

TEST_F(PlanSegments, RunsALaunchForEachAndOneThatMerges) {
  flash_decode_mixed(args_);
  std::vector<std::string> keys;
  for (const auto& launch : fake_state().launches) keys.push_back(launch.key);
  EXPECT_EQ(keys, (std::vector<std::string>{"decode/fp16/kv=q8_0/hd128/r16/fakegpu",
                                            "decode/bf16/kv=bf16/hd128/r16/fakegpu", "decode_stage2/fakegpu"}));
}

// What a key is beside the others, or what no kernel of flash_decode takes, keeps segments together.
TEST_F(PlanSegments, StayTogether) {
  const MixedDecodeArgs plain = args_;
  const std::pair<const char*, std::function<void(MixedDecodeArgs&)>> changes[] = {
      {"not asked for", [](auto& a) { a.by_segment = false; }},
      {"window_left", [](auto& a) { a.window_left = 1000; }},
      {"window_right", [](auto& a) { a.window_right = 0; }},
      {"alibi_slopes", [&](auto& a) { a.alibi_slopes = TensorView(numbers_, DType::kFloat32, kGpu, {kHeads}); }},
      {"mask", [](auto& a) { a.mask = TensorView(scratch_at(4 << 20), DType::kFloat16, kGpu, {1, 1, 1, 300}); }},
      {"two queries",
       [](auto& a) {
         a.q.rank = a.out.rank = 4;
         a.q = TensorView(scratch(), DType::kBFloat16, kGpu, {kBatch, 2, kHeads, kDim});
         a.out = TensorView(scratch_at(1 << 20), DType::kBFloat16, kGpu, {kBatch, 2, kHeads, kDim});
       }},
      {"scales of rows",
       [&](auto& a) {
         a.segments[0].k_scale = TensorView(scratch_at(4 << 20), DType::kFloat32, kGpu, {kBatch, 200, 2});
         a.segments[0].v_scale = a.segments[0].k_scale;
       }},
      {"ragged",
       [&](auto& a) {
         a.cu_seqlens_q = ints(starts_, {kBatch + 1});
         a.max_q_len = 1;
       }},
      {"16 bits of another type", [](auto& a) { a.segments[1].k.dtype = a.segments[1].v.dtype = DType::kFloat16; }},
      {"scales of two kinds",
       [&](auto& a) {
         a.segments[0].k_scale = TensorView(numbers_, DType::kFloat32, kGpu, {2});
         a.segments[0].v_scale = TensorView(numbers_, DType::kFloat32, kGpu, {1});
       }},
      {"one format", [](auto& a) { a.segments[0] = a.segments[1]; }},
      {"no kernel for the format",
       [](auto& a) { a.segments[0].k_format = a.segments[0].v_format = KvFormat::kFp8E5M2; }},
      {"one segment", [](auto& a) { a.segments.pop_back(); }},
  };
  EXPECT_TRUE(plan());
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    args_ = plain;
    change(args_);
    if (std::string(name) == "no kernel for the format") {
      for (TensorView* side : {&args_.segments[0].k, &args_.segments[0].v}) {
        *side = TensorView(scratch_at(2 << 20), DType::kFp8E5M2, kGpu, {kBatch, 200, 2, 128});
      }
    }
    EXPECT_FALSE(plan());
  }
}

}  // namespace
}  // namespace flashport::test
