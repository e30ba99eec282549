// The texts of refused arguments.
#include "common/host/check.h"

#include <gtest/gtest.h>

#include <limits>

#include "common/host/kv/cache_layout.h"
#include "tests/host/decode/decode_inputs.h"

namespace flashport {
namespace {

using test::error_of;
using test::scratch;
using test::scratch_at;

constexpr Check kCheck("f");

TensorView floats(std::initializer_list<std::int64_t> shape) {
  return TensorView(scratch(), DType::kFloat32, Device{}, shape);
}

TEST(Check, SpellsShapesAsPythonDoes) {
  EXPECT_EQ(shape_text(floats({})), "()");
  EXPECT_EQ(shape_text(floats({5})), "(5,)");
  EXPECT_EQ(shape_text(floats({2, 3})), "(2, 3)");
}

TEST(Check, NamesWhatWasExpectedAndWhatCame) {
  EXPECT_EQ(error_of<ValueError>([] { kCheck.rank(floats({2, 3}), "x", 1, "(batch)"); }),
            "f: x must have 1 dimension (batch), got 2: (2, 3)");
  EXPECT_EQ(error_of<ValueError>([] { kCheck.rank(floats({2}), "x", 3, "(a, b, c)", 4, "(a, b, c, d)"); }),
            "f: x must have 3 dimensions (a, b, c) or 4 (a, b, c, d), got 1: (2,)");
  EXPECT_EQ(error_of<ValueError>([] { kCheck.shape(floats({2, 3}), "x", "(a, b)", {2, 4}); }),
            "f: x must have shape (a, b) = (2, 4), got (2, 3)");
  EXPECT_EQ(error_of<ValueError>([] { kCheck.shape(floats({2, 3}), "x", "(a, b)", {kAnyExtent, 4}); }),
            "f: x must have shape (a, b) = (any, 4), got (2, 3)");
  EXPECT_EQ(
      error_of<TypeError>([] { kCheck.dtype(floats({2}), "x", {DType::kFloat16, DType::kBFloat16, DType::kInt32}); }),
      "f: x must be float16, bfloat16 or int32, got float32");
  TensorView there = floats({2});
  there.device = {DeviceKind::kHip, 1};
  EXPECT_EQ(error_of<ValueError>([&] { kCheck.device(there, "x", floats({2}), "q"); }),
            "f: x must be on cpu as q is, got hip:1");
}

TEST(Check, RefusesNegativeExtents) {
  EXPECT_EQ(error_of<ValueError>([] { kCheck.rank(floats({2, -1}), "x", 2, "(a, b)"); }),
            "f: x has a negative extent: (2, -1)");
}

TEST(Check, RefusesNullDataOnlyWithElements) {
  TensorView x = floats({2});
  x.data = nullptr;
  EXPECT_NE(error_of<ValueError>([&] { kCheck.readable(x, "x"); }), "");
  x.shape[0] = 0;
  EXPECT_NO_THROW(kCheck.readable(x, "x"));
}

TEST(Check, AsksNothingOfStridesWithoutElements) {
  TensorView x = floats({2, 3});
  x.strides[1] = 2;
  EXPECT_NE(error_of<ValueError>([&] { kCheck.inner_contiguous(x, "x"); }), "");
  EXPECT_NE(error_of<ValueError>([&] { kCheck.contiguous(x, "x"); }), "");
  x.shape[0] = 0;
  EXPECT_NO_THROW(kCheck.inner_contiguous(x, "x"));
  EXPECT_NO_THROW(kCheck.contiguous(x, "x"));
}

TEST(Check, RefusesMisalignedData) {
  TensorView x(scratch_at(2), DType::kFloat32, Device{}, {2});
  EXPECT_NE(error_of<ValueError>([&] { kCheck.readable(x, "x"); }), "");
}

TEST(Check, RefusesOutputsThatCannotBeWritten) {
  TensorView x = floats({2, 3});
  EXPECT_NO_THROW(kCheck.writable(x, "x"));
  x.read_only = true;
  EXPECT_NE(error_of<ValueError>([&] { kCheck.writable(x, "x"); }).find("read-only"), std::string::npos);
  x.read_only = false;
  x.strides[0] = 0;
  EXPECT_NE(error_of<ValueError>([&] { kCheck.writable(x, "x"); }).find("broadcast"), std::string::npos);
  x.strides[0] = 2;  // rows of 3 every 2 elements
  EXPECT_NE(error_of<ValueError>([&] { kCheck.writable(x, "x"); }).find("overlap"), std::string::npos);
}

TEST(Check, AcceptsStridedOutputs) {
  TensorView x = floats({2, 3});
  x.strides[0] = 1;  // transposed
  x.strides[1] = 2;
  EXPECT_NO_THROW(kCheck.writable(x, "x"));
  x.strides[0] = -3;  // reversed rows
  x.strides[1] = 1;
  EXPECT_NO_THROW(kCheck.writable(x, "x"));
  x.shape[0] = 1;  // the stride of an axis of extent 1 means nothing
  x.strides[0] = 0;
  EXPECT_NO_THROW(kCheck.writable(x, "x"));
}

TEST(Check, RefusesNumbersThatFp32DoesNotHave) {
  EXPECT_EQ(error_of<ValueError>([] { kCheck.finite(1e39, "x"); }),
            "f: x must be finite in fp32 (at most 3.40282e+38 in magnitude), got 1e+39");
  EXPECT_EQ(error_of<ValueError>([] { kCheck.positive(1e-50, "x"); }),
            "f: x must be positive and finite in fp32 (1.17549e-38 to 3.40282e+38), got 1e-50");
  EXPECT_EQ(error_of<ValueError>([] { kCheck.negative(-1e300, "x"); }),
            "f: x must be negative and finite in fp32 (-3.40282e+38 to -1.17549e-38), got -1e+300");
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(error_of<ValueError>([] { kCheck.finite(kNan, "x"); }), "");
  EXPECT_NE(error_of<ValueError>([] { kCheck.positive(kNan, "x"); }), "");
  EXPECT_NE(error_of<ValueError>([] { kCheck.negative(kNan, "x"); }), "");
  const double largest = std::numeric_limits<float>::max(), smallest = std::numeric_limits<float>::min();
  EXPECT_NO_THROW(kCheck.finite(-largest, "x"));
  EXPECT_NO_THROW(kCheck.positive(largest, "x"));
  EXPECT_NO_THROW(kCheck.positive(smallest, "x"));
  EXPECT_NO_THROW(kCheck.negative(-smallest, "x"));
}

TEST(CacheParams, TakesTheWidestCopyThatAllRowsAllow) {
  const CacheAxes axes = cache_axes(4, KvLayout::kNHD);
  TensorView cache(scratch(), DType::kFloat16, Device{}, {4, 16, 2, 64});
  EXPECT_EQ(cache_params(kCheck, cache, "c", axes, KvFormat::kFp16, 64).copy_unit, 16);
  cache.data = scratch_at(8);
  EXPECT_EQ(cache_params(kCheck, cache, "c", axes, KvFormat::kFp16, 64).copy_unit, 8);
  cache.data = scratch();
  cache.strides[1] = 130;
  EXPECT_EQ(cache_params(kCheck, cache, "c", axes, KvFormat::kFp16, 64).copy_unit, 4);
  cache.shape[1] = 1;  // no step goes along that axis
  EXPECT_EQ(cache_params(kCheck, cache, "c", axes, KvFormat::kFp16, 64).copy_unit, 16);
  const TensorView q8_0(scratch(), DType::kUInt8, Device{}, {4, 16, 2, 2 * 34});
  EXPECT_EQ(cache_params(kCheck, q8_0, "c", axes, KvFormat::kQ8_0, 64).copy_unit, 4);
  const TensorView odd(scratch(), DType::kUInt8, Device{}, {4, 16, 2, 34});
  EXPECT_EQ(cache_params(kCheck, odd, "c", axes, KvFormat::kQ8_0, 32).copy_unit, 2);
  const TensorView fp8(scratch_at(1), DType::kFp8E4M3, Device{}, {4, 16, 2, 64});
  EXPECT_NE(error_of<ValueError>([&] { (void)cache_params(kCheck, fp8, "c", axes, KvFormat::kFp8E4M3, 64); }), "");
}

TEST(CacheParams, GivesByteStridesOfBothOrders) {
  const TensorView nhd(scratch(), DType::kFloat16, Device{}, {4, 16, 2, 64});
  const CacheParams a = cache_params(kCheck, nhd, "c", cache_axes(4, KvLayout::kNHD), KvFormat::kFp16, 64);
  EXPECT_EQ(a.page_stride, 16 * 2 * 64 * 2);
  EXPECT_EQ(a.token_stride, 2 * 64 * 2);
  EXPECT_EQ(a.head_stride, 64 * 2);
  EXPECT_EQ(a.row_bytes, 128);
  const TensorView hnd(scratch(), DType::kFloat16, Device{}, {4, 2, 16, 64});
  const CacheParams b = cache_params(kCheck, hnd, "c", cache_axes(4, KvLayout::kHND), KvFormat::kFp16, 64);
  EXPECT_EQ(b.token_stride, 64 * 2);
  EXPECT_EQ(b.head_stride, 16 * 64 * 2);
  TensorView spread = nhd;
  spread.strides[3] = 2;
  EXPECT_NE(error_of<ValueError>(
                [&] { (void)cache_params(kCheck, spread, "c", cache_axes(4, KvLayout::kNHD), KvFormat::kFp16, 64); }),
            "");
}

}  // namespace
}  // namespace flashport
