// quantize_kv and dequantize_kv of every format of blocks, bit for bit against the reference.
#include <gtest/gtest.h>

#include <flashport/decode.h>
#include <flashport/error.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/reference/blocks.h"
#include "tests/support/device.h"
#include "tests/support/message_of.h"
#include "tests/support/random.h"
#include "tests/support/tensor.h"

namespace flashport_test {
namespace {

using reference::Type;

constexpr std::int64_t kDim = 96;

// Rows of three blocks: random ones of many magnitudes, and what rounding and scales find hard.
std::vector<std::vector<float>> rows_of_values() {
  Random random(11);
  std::vector<std::vector<float>> rows;
  for (const double spread : {1.0, 1e-3, 300.0, 1e-6, 1e-9, 1e5, 1e8, 1e-20, 1e-36, 1e-38, 1e-41, 1e30}) {
    rows.emplace_back(kDim);
    for (float& x : rows.back()) x = static_cast<float>(spread * random.normal());
  }
  const auto filled = [&](float x) { rows.emplace_back(kDim, x); };
  for (const float x : {0.0f, -0.0f, 1.0f, -1.0f, 65504.0f, 1e-45f, -3e38f}) filled(x);
  // Halves between codes, for scales of 1 and of a power of two, from either side; two values of the largest magnitude.
  for (const float scale : {1.0f, 0x1p-9f}) {
    for (const float sign : {1.0f, -1.0f}) {
      rows.emplace_back(kDim);
      for (int i = 0; i < kDim; ++i) {
        const float half = 0.5f * static_cast<float>(i % 32 - 16);
        rows.back()[i] = scale * (i % 32 == 5 ? -16 * sign : i % 32 == 9 ? 16 * sign : i % 32 == 7 ? 15 : half);
      }
    }
  }
  // A range of 15 and of 31 in halves, and midpoints between the values of iq4_nl.
  for (const float top : {15.0f, 31.0f}) {
    rows.emplace_back(kDim);
    for (int i = 0; i < kDim; ++i) rows.back()[i] = std::min(0.5f * static_cast<float>(i), top) - 3;
  }
  rows.emplace_back(kDim, -127.0f);
  for (int i = 1; i < 31; ++i) {
    const int code = i / 2, next = std::min(code + 1, 15);
    rows.back()[i] = 0.5f * static_cast<float>(reference::kIq4NlValues[code] + reference::kIq4NlValues[next]);
  }
  // What is no number, in the second block alone.
  for (const float x : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    rows.emplace_back(rows[0]);
    rows.back()[40] = x;
  }
  return rows;
}

struct QuantizeCase {
  Type source, blocks;
};

class Quantize : public testing::TestWithParam<QuantizeCase> {};

TEST_P(Quantize, WritesTheReferencesBitsAndReadsThem) {
  const auto [source, blocks] = GetParam();
  const std::vector<std::vector<float>> values = rows_of_values();
  const auto rows = static_cast<std::int64_t>(values.size());
  const std::int64_t bytes = reference::stored_extent(blocks, kDim);
  // Every second element of rows in reverse order of axes; blocks have a gap after each row.
  Tensor x(source, {2, rows, kDim}, {2 * kDim, 4 * kDim, 2}, 1);
  Tensor out(blocks, {2, rows, bytes}, {rows * (bytes + 2), bytes + 2, 1}, 2);
  Tensor wanted(blocks, {2, rows, bytes}, {rows * (bytes + 2), bytes + 2, 1}, 2);
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t r = 0; r < rows; ++r) {
      std::vector<float> row(kDim);
      for (std::int64_t d = 0; d < kDim; ++d) {
        x.set({i, r, d}, values[r][(d + 7 * i) % kDim]);
        row[d] = static_cast<float>(x.get({i, r, d}));
      }
      reference::write_blocks(blocks, wanted.address({i, r, 0}), row.data(), kDim);
    }
  }
  for (Tensor* tensor : {&x, &out}) tensor->upload();
  flashport::quantize_kv({x.view(), out.view(), format_of(blocks)});
  out.download();
  EXPECT_EQ(out.damage(), "");
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const unsigned char *got = out.address({i, r, 0}), *expected = wanted.address({i, r, 0});
      const auto differs = std::mismatch(got, got + bytes, expected);
      EXPECT_TRUE(differs.first == got + bytes)
          << "row " << i << " " << r << ": byte " << differs.first - got << " is " << int{*differs.first}
          << ", the reference's is " << int{*differs.second};
    }
  }

  Tensor back(source, {2, rows, kDim}, {3 * kDim, 6 * kDim, 3});
  back.upload();
  flashport::dequantize_kv({out.view(), back.view(), format_of(blocks)});
  back.download();
  EXPECT_EQ(back.damage(), "");
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t d = 0; d < kDim; ++d) {
        const double exact = reference::read_block_value(blocks, out.address({i, r, 0}), d);
        const double expected = reference::round_to(static_cast<float>(exact), source), got = back.get({i, r, d});
        EXPECT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)))
            << "row " << i << " " << r << " value " << d << " is " << got << ", the reference's is " << expected;
      }
    }
  }
}

std::vector<QuantizeCase> all_cases() {
  std::vector<QuantizeCase> cases;
  for (const Type blocks : reference::kBlockTypes) {
    for (const Type source : {Type::kF32, Type::kF16, Type::kBF16}) cases.push_back({source, blocks});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Ops, Quantize, testing::ValuesIn(all_cases()), [](const auto& info) {
  return std::string(type_name(info.param.source)) + "_" + type_name(info.param.blocks);
});

// Axes that do not collapse to three are refused, and no rows are nothing to do.
TEST(QuantizeRows, LieOnUpToThreeAxes) {
  Tensor x(Type::kF32, {2, 2, 2, 2, 32}, {512, 256, 128, 64, 1});
  Tensor out(Type::kQ4_0, {2, 2, 2, 2, 18}, {18, 36, 72, 144, 1});
  for (Tensor* tensor : {&x, &out}) tensor->upload();
  EXPECT_EQ(message_of<flashport::ValueError>(
                [&] { flashport::quantize_kv({x.view(), out.view(), flashport::KvFormat::kQ4_0}); }),
            "quantize_kv: x and out must be strided so that the axes before the last collapse to 3; pass contiguous "
            "copies");
  out.download();
  EXPECT_EQ(out.damage(), "");
  flashport::TensorView none = x.view(), no_blocks = out.view();
  none.shape[0] = no_blocks.shape[0] = 0;
  flashport::quantize_kv({none, no_blocks, flashport::KvFormat::kQ4_0});
}

}  // namespace
}  // namespace flashport_test
