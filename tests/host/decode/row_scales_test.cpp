// Calls of flash_decode whose cache has scales beside it: they reach a kernel of segments.
#include <gtest/gtest.h>

#include <string>

#include "tests/host/decode/plan_fixture.h"

namespace flashport::test {
namespace {

TEST_F(PlanDecode, ScalesBesideTheCache) {
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  a.k_cache = a.v_cache = TensorView(scratch(), DType::kInt8, kGpu, {64, 16, 2, 128});
  a.k_scale = TensorView(scratch_at(1 << 20), DType::kFloat16, kGpu, {64, 16, 2, 16});
  float scales[2] = {1.0f, 2.0f};
  a.v_scale = TensorView(scales, DType::kFloat32, kGpu, {2});
  const DecodeProblem problem = validate_flash_decode(a);
  ASSERT_NE(problem.mixed, nullptr);
  const DecodePlan p = plan(a);
  EXPECT_STREQ(p.kernel->key, "decode/fp16/kv=any/hd128/r16/fakegpu");
  const MixedDecodeParams params = mixed_params(problem, p);
  EXPECT_EQ(params.k_scale, nullptr);
  EXPECT_EQ(params.v_scale, nullptr);
  EXPECT_EQ(params.segment_count, 1);
  const CacheSegment& only = params.segments[0];
  EXPECT_EQ(only.cache.table, params.cache.table);
  EXPECT_EQ(only.k_format, KvFormat::kInt8);
  EXPECT_EQ(only.k_scale.dtype, DType::kFloat16);
  EXPECT_EQ(only.k_scale.dims_per_scale, 8);
  EXPECT_EQ(only.k_scale.stride_page, 16 * 2 * 16);
  EXPECT_EQ(only.v_scale.dims_per_scale, 0);
  EXPECT_EQ(only.v_scale.stride_head, 1);
  EXPECT_EQ(only.v_scale.stride_token, 0);

  DecodeQuery query{.target = "fakegpu", .k_format = KvFormat::kInt8, .v_format = KvFormat::kInt8};
  query.scales_beside = true;
  EXPECT_EQ(which_kernel(query), p.kernel->key);
  EXPECT_EQ(explain(DecodeScheduleQuery{.call = query, .max_kv_len = 100}).kernel, p.kernel->key);
  query.k_format = query.v_format = KvFormat::kQ8_0;
  EXPECT_NE(supports(query).reason.find("fakegpu has no kernel for kv=q8_0 and scales beside the cache; it has"),
            std::string::npos);
}

}  // namespace
}  // namespace flashport::test
