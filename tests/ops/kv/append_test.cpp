// append_kv into every layout and element type, bit for bit against the reference's encoding; everything that is not
// appended to keeps its bits.
#include <gtest/gtest.h>

#include <flashport/decode.h>
#include <flashport/error.h>

#include <cmath>
#include <iterator>

#include "tests/ops/decode/call.h"
#include "tests/reference/blocks.h"
#include "tests/support/device.h"
#include "tests/support/message_of.h"
#include "tests/support/random.h"
#include "tests/support/tensor.h"

namespace flashport_test {
namespace {

using reference::Type;

struct AppendCase {
  std::string name;
  Type source, cache, v_cache;
  std::string layout;  // nhd, hnd, pool
  std::string strides;
  std::int64_t page, dk, dv;
  std::string scales;  // none, tensor, head
  bool index64;
};

std::ostream& operator<<(std::ostream& out, const AppendCase& c) { return out << c.name; }

class Append : public testing::TestWithParam<AppendCase> {};

TEST_P(Append, WritesTheReferencesBits) {
  const AppendCase& c = GetParam();
  constexpr std::int64_t kTokens = 23, kHeads = 3, kSlots = 48;
  Random random(c.dk + c.page);
  const bool pool = c.layout == "pool", heads_first = c.layout == "hnd";
  const std::int64_t page = pool ? 1 : c.page;
  CacheShape shape{kSlots / page, page, kHeads, row_extent(c.cache, c.dk), heads_first, pool, c.strides};
  Tensor k_cache = make_cache(c.cache, shape), k_wanted = make_cache(c.cache, shape);
  shape.extent = row_extent(c.v_cache, c.dv);
  Tensor v_cache = make_cache(c.v_cache, shape), v_wanted = make_cache(c.v_cache, shape);
  // The source is a strided view, as a projection of all heads leaves it.
  Tensor k(c.source, {kTokens, kHeads, c.dk}, {2 * kHeads * c.dk + 8, c.dk, 1});
  Tensor v(c.source, {kTokens, kHeads, c.dv}, {2 * kHeads * c.dv, 2 * c.dv, 2});
  Tensor positions(c.index64 ? Type::kI64 : Type::kI32, {kTokens});
  std::optional<Tensor> k_scale, v_scale;
  if (c.scales != "none") {
    const std::int64_t count = c.scales == "head" ? kHeads : 1;
    for (std::optional<Tensor>* scale : {&k_scale, &v_scale}) {
      scale->emplace(Type::kF32, Shape{count});
      for (std::int64_t h = 0; h < count; ++h) (*scale)->set({h}, 0.25 + random.uniform());
      (*scale)->upload();
    }
  }

  const std::vector<std::int64_t> order = random.permutation(kSlots);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const std::int64_t slot = t % 7 == 3 ? -1 : order[t];
    positions.set({t}, static_cast<double>(slot));
    for (Tensor* source : {&k, &v}) {
      Tensor& wanted = source == &k ? k_wanted : v_wanted;
      const std::optional<Tensor>& scale = source == &k ? k_scale : v_scale;
      const std::int64_t dim = source->shape()[2];
      for (std::int64_t h = 0; h < kHeads; ++h) {
        // One row of zeros, one far beyond the range of every 8-bit type.
        const double spread = t == 0 ? 0.0 : t == 1 ? 3000.0 : 1.0;
        std::vector<float> row(dim);
        for (std::int64_t d = 0; d < dim; ++d) {
          source->set({t, h, d}, spread * random.normal());
          row[d] = static_cast<float>(source->get({t, h, d}));
          if (scale) row[d] /= static_cast<float>(scale->array().at({scale->shape()[0] == 1 ? 0 : h}));
        }
        if (slot < 0) continue;
        const Shape at = pool          ? Shape{slot, h, 0}
                         : heads_first ? Shape{slot / page, h, slot % page, 0}
                                       : Shape{slot / page, slot % page, h, 0};
        write_row(wanted, at, row);
      }
    }
  }
  for (Tensor* tensor : {&k_cache, &v_cache, &k, &v, &positions}) tensor->upload();
  flashport::AppendKvArgs a;
  a.k = k.view();
  a.v = v.view();
  a.k_cache = k_cache.view();
  a.v_cache = v_cache.view();
  a.k_format = format_of(c.cache);
  a.v_format = format_of(c.v_cache);
  a.positions = positions.view();
  a.kv_layout = heads_first ? flashport::KvLayout::kHND : flashport::KvLayout::kNHD;
  if (k_scale) a.k_scale = k_scale->view();
  if (v_scale) a.v_scale = v_scale->view();
  flashport::append_kv(a);
  for (Tensor* cache : {&k_cache, &v_cache}) {
    cache->download();
    EXPECT_EQ(cache->damage(), "");
    const std::vector<unsigned char> got = cache->element_bytes();
    const std::vector<unsigned char> wanted = (cache == &k_cache ? k_wanted : v_wanted).element_bytes();
    ASSERT_EQ(got.size(), wanted.size());
    const auto differs = std::mismatch(got.begin(), got.end(), wanted.begin());
    EXPECT_TRUE(differs.first == got.end())
        << (cache == &k_cache ? "k" : "v") << ": byte " << differs.first - got.begin() << " of the elements is "
        << int{*differs.first} << ", the reference's is " << int{*differs.second};
  }
}

class AppendValues : public testing::TestWithParam<Type> {};

// A block that holds a NaN or an infinity has the same bits everywhere, and its neighbours theirs.
TEST_P(AppendValues, ThatAreNotFiniteMakeTheirBlockNan) {
  const Type type = GetParam();
  constexpr std::int64_t kDim = 96;
  const float values[] = {NAN, -NAN, INFINITY, -INFINITY, 3.0e38f};
  const std::int64_t tokens = std::size(values);
  Tensor k(Type::kF32, {tokens, 1, kDim}), v(Type::kF32, {tokens, 1, kDim}), positions(Type::kI32, {tokens});
  const Shape rows = {tokens, 1, row_extent(type, kDim)};
  Tensor k_cache(type, rows), v_cache(type, rows), wanted(type, rows);
  Random random(1);
  for (std::int64_t t = 0; t < tokens; ++t) {
    positions.set({t}, static_cast<double>(t));
    std::vector<float> row(kDim);
    for (float& x : row) x = static_cast<float>(random.normal());
    row[32 + 7 * t] = values[t];  // in the second of three blocks
    for (std::int64_t d = 0; d < kDim; ++d) {
      k.set({t, 0, d}, row[d]);
      v.set({t, 0, d}, row[d]);
    }
    write_row(wanted, {t, 0, 0}, row);
  }
  for (Tensor* tensor : {&k, &v, &positions, &k_cache, &v_cache}) tensor->upload();
  flashport::AppendKvArgs a;
  a.k = k.view();
  a.v = v.view();
  a.k_cache = k_cache.view();
  a.v_cache = v_cache.view();
  a.k_format = a.v_format = format_of(type);
  a.positions = positions.view();
  flashport::append_kv(a);
  for (Tensor* cache : {&k_cache, &v_cache}) {
    cache->download();
    EXPECT_TRUE(cache->element_bytes() == wanted.element_bytes());
  }
  for (std::int64_t t = 0; t < 4; ++t) {
    EXPECT_TRUE(std::isnan(reference::read_block_value(type, k_cache.address({t, 0, 0}), 32)));
    EXPECT_TRUE(std::isfinite(reference::read_block_value(type, k_cache.address({t, 0, 0}), 31)));
    EXPECT_TRUE(std::isfinite(reference::read_block_value(type, k_cache.address({t, 0, 0}), 64)));
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, AppendValues, testing::ValuesIn(reference::kBlockTypes),
                         [](const auto& info) { return std::string(type_name(info.param)); });

// Bytes do not say by themselves which format they have; nothing is written where no one does.
TEST(AppendFormats, AreNamed) {
  Tensor k(Type::kF16, {2, 1, 64}), v(Type::kF16, {2, 1, 64}), positions(Type::kI32, {2});
  Tensor k_cache(Type::kQ8_0, {4, 1, row_extent(Type::kQ8_0, 64)}), v_cache(Type::kF16, {4, 1, 64});
  for (Tensor* tensor : {&k, &v, &positions, &k_cache, &v_cache}) tensor->upload();
  const std::vector<unsigned char> before = k_cache.element_bytes();
  flashport::AppendKvArgs a;
  a.k = k.view();
  a.v = v.view();
  a.k_cache = k_cache.view();
  a.v_cache = v_cache.view();
  a.positions = positions.view();
  EXPECT_EQ(message_of<flashport::ValueError>([&] { flashport::append_kv(a); }),
            "append_kv: k_format must say what k_cache of uint8 stores, got none; pass k_format=\"q8_0\", \"q4_0\", "
            "\"q4_1\", \"q5_0\", \"q5_1\" or \"iq4_nl\"");
  a.k_format = flashport::KvFormat::kQ8_0;
  a.v_format = flashport::KvFormat::kQ4_0;
  EXPECT_EQ(message_of<flashport::TypeError>([&] { flashport::append_kv(a); }),
            "append_kv: v_cache must be uint8 for v_format=\"q4_0\", got float16; pass the format that it has, or none "
            "for its element type's own");
  k_cache.download();
  EXPECT_TRUE(k_cache.element_bytes() == before);
  flashport::AppendQuery query{
      .target = query_target(), .k_format = a.k_format, .v_format = flashport::KvFormat::kQ8_0};
  EXPECT_TRUE(flashport::supports(query).supported) << flashport::supports(query).reason;
  EXPECT_TRUE(flashport::which_kernel(query).starts_with("append_kv/"));
  query.v_format = flashport::KvFormat::kQ4_1;
  EXPECT_TRUE(flashport::which_kernel(query).starts_with("append_any/"));
}

std::vector<AppendCase> append_cases() {
  std::vector<AppendCase> cases;
  int number = 0;
  const std::string layouts[] = {"nhd", "hnd", "pool"};
  const std::string strides[] = {"dense", "kv_sliced", "kv_odd"};
  const std::int64_t pages[] = {1, 3, 16, 48};
  const std::string scales[] = {"none", "tensor", "head"};
  const Type caches[] = {Type::kF32,  Type::kF16,  Type::kBF16, Type::kE4M3,  Type::kE4M3Fnuz, Type::kQ8_0, Type::kQ4_0,
                         Type::kQ4_1, Type::kQ5_0, Type::kQ5_1, Type::kIq4Nl, Type::kE5M2,     Type::kI8};
  for (Type cache : caches) {
    for (Type source : {Type::kF16, Type::kBF16, Type::kF32}) {
      for (const std::string& layout : layouts) {
        const bool native = cache == Type::kF32 || cache == Type::kF16 || cache == Type::kBF16;
        AppendCase c;
        c.source = source;
        c.cache = cache;
        c.v_cache = number % 3 == 1 ? caches[static_cast<std::size_t>(number) % std::size(caches)] : cache;
        c.layout = layout;
        c.strides = strides[number / 3 % 3];
        c.page = layout == "pool" ? 1 : pages[number % 4];
        c.dk = number % 2 == 0 ? 64 : 192;
        c.dv = number % 4 < 2 ? c.dk : 128;
        const bool has_blocks = reference::is_blocks(cache) || reference::is_blocks(c.v_cache);
        if (!has_blocks && number % 5 == 0) c.dk = c.dv = 80;
        c.scales = native ? "none" : scales[number % 3];
        c.index64 = number % 2 == 1;
        c.name = std::string(type_name(source)) + "_to_" + type_name(cache) + "_" + type_name(c.v_cache) + "_" +
                 layout + "_p" + std::to_string(c.page) + "_d" + std::to_string(c.dk);
        ++number;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Ops, Append, testing::ValuesIn(append_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace flashport_test
