// Plain calls, which ask for nothing beside the output (PlainDecodeParams): the kernels that a target has for them
// agree with the oracle and have the bits of the kernels for all calls.
#include <gtest/gtest.h>

#include <flashport/backend.h>

#include <algorithm>
#include <set>
#include <utility>

#include "tests/ops/decode/call.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

using reference::Type;

struct PlainShape {
  Type q, cache;
  std::int64_t dim, hq, hkv, q_len;
  std::int64_t room = 0;  // of a large cache
  Type values = cache;
  [[nodiscard]] std::string name() const {
    const std::string formats = type_name(cache) + (values == cache ? "" : "_" + std::string(type_name(values)));
    return std::string("plain_") + type_name(q) + "_" + formats + "_d" + std::to_string(dim) + "_g" +
           std::to_string(hq / hkv) + "_q" + std::to_string(q_len) + (room > 0 ? "_large" : "");
  }
};
std::ostream& operator<<(std::ostream& out, const PlainShape& shape) { return out << shape.name(); }

// Tiles of 8, 16, 64 and 128 rows.
std::vector<PlainShape> shapes() {
  std::vector<PlainShape> all;
  for (const Type type : {Type::kBF16, Type::kF16}) {
    all.push_back({type, type, 64, 32, 8, 1, 200'000});
    for (const std::int64_t dim : {64, 128, 256}) {
      all.push_back({type, type, dim, 14, 2, 1});
      all.push_back({type, type, dim, 8, 2, 3});
      all.push_back({type, type, dim, 64, 1, 1});
      if (dim <= 128) all.push_back({type, type, dim, 71, 1, 1});
    }
  }
  all.push_back({Type::kBF16, Type::kE4M3, 128, 8, 1, 1});
  all.push_back({Type::kF16, Type::kE4M3, 128, 16, 1, 1});
  all.push_back({Type::kBF16, Type::kQ8_0, 128, 16, 4, 1});
  all.push_back({Type::kF16, Type::kQ4_0, 128, 16, 4, 1});
  all.push_back({Type::kBF16, Type::kQ8_0, 128, 16, 4, 1, 0, Type::kQ4_0});
  all.push_back({Type::kF16, Type::kQ8_0, 128, 32, 8, 1, 60'000});
  all.push_back({Type::kBF16, Type::kQ4_0, 128, 8, 4, 1, 120'000});
  all.push_back({Type::kF16, Type::kQ8_0, 128, 16, 4, 1, 120'000, Type::kQ4_0});
  // Of these plain calls take the kernels for all calls.
  all.push_back({Type::kBF16, Type::kQ4_0, 128, 16, 4, 1, 120'000, Type::kQ8_0});
  all.push_back({Type::kF16, Type::kIq4Nl, 128, 32, 8, 1, 60'000});
  all.push_back({Type::kBF16, Type::kQ8_0, 128, 64, 4, 1, 120'000});
  all.push_back({Type::kF16, Type::kQ4_0, 128, 128, 8, 1, 60'000});
  all.push_back({Type::kF16, Type::kIq4Nl, 128, 16, 4, 1, 120'000, Type::kQ8_0});
  all.push_back({Type::kBF16, Type::kQ8_0, 128, 32, 8, 1, 60'000, Type::kIq4Nl});
  all.push_back({Type::kBF16, Type::kQ4_1, 128, 16, 4, 1, 120'000});
  all.push_back({Type::kF16, Type::kQ5_0, 128, 32, 8, 1, 60'000, Type::kQ5_1});
  return all;
}

DecodeCase make(const PlainShape& shape, const std::vector<std::int64_t>& lens, const char* layout) {
  DecodeCase c{};
  c.name = shape.name();
  c.q = shape.q;
  c.k_format = shape.cache;
  c.v_format = shape.values;
  c.dk = c.dv = shape.dim;
  c.hq = shape.hq;
  c.hkv = shape.hkv;
  c.q_len = shape.q_len;
  c.q_form = shape.q_len == 1 ? "token" : "uniform";
  c.layout = layout;
  c.page = c.layout.starts_with("block") ? 16 : 0;
  c.lens = lens;
  c.room = shape.room;
  c.window_left = c.window_right = -1;
  c.alibi = c.scales = "none";
  c.strides = "dense";
  c.splits = flashport::kInvariantSplits;
  return c;
}

std::string kernel_of(const DecodeCase& c) {
  const std::int64_t room = std::max<std::int64_t>(c.room, 64);
  return flashport::explain({.call = c.query(), .batch = 1, .num_kv_heads = c.hkv, .max_kv_len = room}).kernel;
}

std::vector<std::vector<std::int64_t>> batches() {
  if (options().emulator) return {{0, 65, 130}};
  return {{0}, {1}, {127, 128, 129}, {3000, 1, 0, 700}, {20000, 64, 65}};
}

class Plain : public testing::TestWithParam<PlainShape> {};

TEST_P(Plain, AgreesWithTheOracleAndWithKernelsForAllCalls) {
  if (!has_plain_kernels()) GTEST_SKIP() << query_target() << " has no kernels of their own";
  const bool large = GetParam().room > 0;
  using Kinds = std::vector<std::pair<const char*, const char*>>;
  const Kinds kinds =
      large
          ? Kinds{{"block_nhd", "none"}, {"token", "head"}}  // tables have room without memory
          : Kinds{{"block_nhd", "none"}, {"block_hnd", "head"}, {"nhd", "none"}, {"hnd", "tensor"}, {"token", "none"}};
  for (const auto& [layout, scales] : kinds) {
    for (const auto& lens : batches()) {
      DecodeCase c = make(GetParam(), lens, layout);
      c.scales = scales;
      FLASHPORT_REQUIRE_SUPPORT(c.name, flashport::supports(c.query()));
      SCOPED_TRACE(c.layout + ", first length " + std::to_string(lens[0]));
      // Or the kernels for all calls would be held against themselves, unless there are no others.
      const std::string kernel = kernel_of(c);
      const auto keys = flashport::kernel_keys(query_target());
      const bool has_none = std::ranges::count(keys, "decode_plain" + kernel.substr(kernel.find('/'))) == 0;
      EXPECT_TRUE(kernel.starts_with("decode_plain/") || has_none) << kernel;
      EXPECT_EQ(kernel_of(c).find("/large/") != std::string::npos, large) << kernel_of(c);
      DecodeCall plain(c, 5);
      plain.upload();
      plain.run();
      EXPECT_EQ(plain.check(math_of_key(flashport::which_kernel(c.query()))), "");
      c.lse = true;
      DecodeCall with_lse(c, 5);
      with_lse.upload();
      with_lse.run();
      EXPECT_EQ(plain.out().element_bytes(), with_lse.out().element_bytes());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Plain, testing::ValuesIn(shapes()),
                         [](const auto& info) { return info.param.name(); });

TEST(PlainInstances, ShapesReachEveryKernel) {
  if (!has_plain_kernels()) GTEST_SKIP() << query_target() << " has no kernels of their own";
  std::set<std::string> reached;
  for (const PlainShape& shape : shapes()) reached.insert(kernel_of(make(shape, {64}, "token")));
  for (const std::string& key : flashport::kernel_keys(query_target())) {
    const bool is_plain = key.starts_with("decode_plain/");
    if (!is_plain && (!key.starts_with("decode/") || key.find("/large/") == std::string::npos)) continue;
    if (reads_scales_beside(key)) continue;  // mixed_test.cpp
    // Calls with an lse run the kernel beside that of plain ones.
    const std::string its = is_plain ? key : "decode_plain" + key.substr(key.find('/'));
    EXPECT_TRUE(reached.contains(its) || reached.contains(key)) << "no shape runs " << key;
  }
}

}  // namespace
}  // namespace flashport_test
