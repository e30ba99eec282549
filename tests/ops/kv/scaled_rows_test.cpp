// append_kv into caches whose rows, or groups of their values, have scales that it writes beside the cache: codes and
// scales bit for bit against the reference, and everything else as it was.
#include <gtest/gtest.h>

#include <flashport/decode.h>
#include <flashport/error.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/ops/decode/call.h"
#include "tests/reference/blocks.h"
#include "tests/reference/scaled_rows.h"
#include "tests/support/device.h"
#include "tests/support/message_of.h"
#include "tests/support/random.h"
#include "tests/support/tensor.h"

namespace flashport_test {
namespace {

using reference::Type;

struct ScaledCase {
  Type source, cache, scale;
  std::string layout;       // nhd, hnd, pool
  std::int64_t dim, group;  // 0: a row has one scale
};

class AppendScaled : public testing::TestWithParam<ScaledCase> {};

TEST_P(AppendScaled, WritesTheReferencesBitsAndScales) {
  const ScaledCase& c = GetParam();
  constexpr std::int64_t kTokens = 9, kHeads = 3, kSlots = 12;
  const bool pool = c.layout == "pool", heads_first = c.layout == "hnd";
  const std::int64_t page = pool ? 1 : 4, pages = kSlots / page;
  const auto shape = [&](std::int64_t last) {
    Shape axes = pool ? Shape{pages, kHeads} : heads_first ? Shape{pages, kHeads, page} : Shape{pages, page, kHeads};
    if (last > 0) axes.push_back(last);
    return axes;
  };
  const std::int64_t groups = c.group == 0 ? 1 : c.dim / c.group, count = c.dim / groups;
  Shape scale_strides = dense_strides(shape(c.group == 0 ? 0 : groups));
  for (std::int64_t& stride : scale_strides) stride *= 2;  // with gaps
  Tensor cache(c.cache, shape(reference::stored_extent(c.cache, c.dim)));
  Tensor wanted(c.cache, shape(reference::stored_extent(c.cache, c.dim)));
  Tensor scales(c.scale, shape(c.group == 0 ? 0 : groups), scale_strides);
  Tensor wanted_scales(c.scale, shape(c.group == 0 ? 0 : groups), scale_strides);
  Tensor x(c.source, {kTokens, kHeads, c.dim}, {2 * kHeads * c.dim, 2 * c.dim, 2}), positions(Type::kI64, {kTokens});
  // V has a format and scales for all heads of its own.
  Tensor v_cache(Type::kF16, shape(c.dim));

  Random random(c.dim + c.group);
  const std::vector<std::int64_t> order = random.permutation(kSlots);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const std::int64_t slot = t == 3 ? -1 : order[t];
    positions.set({t}, static_cast<double>(slot));
    for (std::int64_t h = 0; h < kHeads; ++h) {
      // Zeros, subnormal scales and scales beyond fp16, a NaN, an infinity; the rest spreads over magnitudes.
      const double spread = t == 0 ? 0.0 : t == 1 ? 3e-6 : t == 2 ? 3e30 : std::pow(10.0, random.uniform() * 4 - 2);
      std::vector<float> row(c.dim);
      for (std::int64_t d = 0; d < c.dim; ++d) {
        const bool is_odd = d == 21 && h == 1 && (t == 5 || t == 6);
        x.set({t, h, d},
              is_odd ? (t == 5 ? std::numeric_limits<double>::quiet_NaN() : -1.0 / 0.0) : spread * random.normal());
        row[d] = static_cast<float>(x.get({t, h, d}));
      }
      if (slot < 0) continue;
      Shape at = pool          ? Shape{slot, h}
                 : heads_first ? Shape{slot / page, h, slot % page}
                               : Shape{slot / page, slot % page, h};
      Shape first = at;
      first.push_back(0);
      for (std::int64_t g = 0; g < groups; ++g) {
        const double scale = reference::write_scaled_group(c.cache, c.scale, wanted.address(first), g * count,
                                                           row.data() + g * count, count);
        Shape place = at;
        if (c.group != 0) place.push_back(g);
        wanted_scales.set(place, scale);
      }
    }
  }
  for (Tensor* tensor : {&cache, &scales, &x, &positions, &v_cache}) tensor->upload();
  flashport::AppendKvArgs a;
  a.k = a.v = x.view();
  a.k_cache = cache.view();
  a.v_cache = v_cache.view();
  a.k_format = format_of(c.cache);
  a.positions = positions.view();
  a.kv_layout = heads_first ? flashport::KvLayout::kHND : flashport::KvLayout::kNHD;
  a.k_scale = scales.view();
  flashport::append_kv(a);
  for (auto [got, expected] : {std::pair{&cache, &wanted}, {&scales, &wanted_scales}}) {
    got->download();
    EXPECT_EQ(got->damage(), "");
    EXPECT_TRUE(got->element_bytes() == expected->element_bytes()) << (got == &cache ? "codes" : "scales");
  }

  // The other side takes the same.
  Tensor v_scales(c.scale, shape(c.group == 0 ? 0 : groups), scale_strides), k_cache(Type::kF16, shape(c.dim)),
      v_scaled(c.cache, shape(reference::stored_extent(c.cache, c.dim)));
  for (Tensor* tensor : {&v_scales, &k_cache, &v_scaled}) tensor->upload();
  std::swap(a.k_format, a.v_format);
  a.k_cache = k_cache.view();
  a.v_cache = v_scaled.view();
  a.k_scale.reset();
  a.v_scale = v_scales.view();
  flashport::append_kv(a);
  v_scaled.download();
  v_scales.download();
  EXPECT_TRUE(v_scaled.element_bytes() == wanted.element_bytes());
  EXPECT_TRUE(v_scales.element_bytes() == wanted_scales.element_bytes());
  const flashport::AppendQuery query{.target = query_target(), .scales_beside = true};
  EXPECT_TRUE(flashport::which_kernel(query).starts_with("append_any/"));
}

std::vector<ScaledCase> scaled_cases() {
  std::vector<ScaledCase> cases;
  const std::string layouts[] = {"nhd", "hnd", "pool"};
  const Type sources[] = {Type::kF32, Type::kF16, Type::kBF16};
  int number = 0;
  for (const Type cache : {Type::kI8, Type::kI4, Type::kE4M3, Type::kE4M3Fnuz, Type::kE5M2}) {
    for (const Type scale : {Type::kF32, Type::kF16}) {
      for (const auto& [dim, group] : {std::pair{64, 0}, {64, 8}, {96, 16}, {128, 128}, {192, 48}, {100, 0}}) {
        if (cache == Type::kI4 && dim == 100) continue;
        cases.push_back({sources[number % 3], cache, scale, layouts[number / 2 % 3], dim, group});
        ++number;
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Ops, AppendScaled, testing::ValuesIn(scaled_cases()), [](const auto& info) {
  const ScaledCase& c = info.param;
  return std::string(type_name(c.source)) + "_to_" + type_name(c.cache) + "_by_" + type_name(c.scale) + "_" + c.layout +
         "_d" + std::to_string(c.dim) + "_g" + std::to_string(c.group);
});

}  // namespace
}  // namespace flashport_test
