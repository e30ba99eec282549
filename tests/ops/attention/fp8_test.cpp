// Attention widens every e4m3 number exactly, and NaN stays NaN. With one key a query's output is its value, and lse
// its scaled score, so that each code can be read off.
#include <gtest/gtest.h>

#include <flashport/attention.h>

#include <cmath>

#include "tests/reference/codecs.h"
#include "tests/support/expected_support.h"
#include "tests/support/tensor.h"

namespace flashport_test {
namespace {

using reference::Type;

constexpr std::int64_t kCodes = 256;

double value_of(std::int64_t code) {
  const auto byte = static_cast<unsigned char>(code);
  return reference::read_number(&byte, Type::kE4M3);
}

// 256 queries of 256 dims, zeros, and one key and value.
class OneKeyCall {
 public:
  OneKeyCall(Type q_type, Type type)
      : q(q_type, {1, kCodes, 1, kCodes}),
        k(Type::kE4M3, {1, 1, 1, kCodes}),
        v(Type::kE4M3, {1, 1, 1, kCodes}),
        out(type, {1, kCodes, 1, kCodes}),
        lse(Type::kF32, {1, 1, kCodes}) {
    for (Tensor* tensor : {&q, &k, &v}) tensor->for_each([&](const Shape& at) { tensor->set(at, 0); });
  }
  void run() {
    for (Tensor* tensor : {&q, &k, &v}) tensor->upload();
    flashport::AttentionArgs args;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.out = out.view();
    args.lse = lse.view();
    args.softmax_scale = 1.0;
    flashport::attention(args);
    out.download();
    lse.download();
  }

  Tensor q, k, v, out, lse;
};

flashport::Support support(flashport::DType q_type) {
  return flashport::supports(flashport::AttentionQuery{.target = query_target(),
                                                       .dtype = q_type,
                                                       .head_dim_qk = kCodes,
                                                       .head_dim_v = kCodes,
                                                       .k_format = flashport::KvFormat::kFp8E4M3,
                                                       .v_format = flashport::KvFormat::kFp8E4M3});
}

void expect_number(double got, double wanted, std::int64_t code) {
  if (std::isnan(wanted)) {
    EXPECT_TRUE(std::isnan(got)) << "code " << code << " gave " << got;
  } else {
    EXPECT_NEAR(got, wanted, 1e-6 + 1e-5 * std::fabs(wanted)) << "code " << code;  // numbers lie 2^-9 apart or more
  }
}

class AttentionFp8 : public testing::TestWithParam<Type> {};

TEST_P(AttentionFp8, WidensEveryValue) {
  FLASHPORT_REQUIRE_SUPPORT("attention_bf16_d256_fp8_values", support(dtype_of(GetParam())));
  OneKeyCall call(GetParam(), GetParam());
  for (std::int64_t code = 0; code < kCodes; ++code)
    *call.v.address({0, 0, 0, code}) = static_cast<unsigned char>(code);
  call.run();
  for (std::int64_t code = 0; code < kCodes; ++code) {
    const double got = call.out.get({0, 5, 0, code}), wanted = value_of(code);
    EXPECT_TRUE(std::isnan(wanted) ? std::isnan(got) : got == wanted) << "code " << code << " gave " << got;
  }
}

// Query i takes dim i of the key.
TEST_P(AttentionFp8, WidensEveryKey) {
  FLASHPORT_REQUIRE_SUPPORT("attention_bf16_d256_fp8_keys", support(dtype_of(GetParam())));
  OneKeyCall call(GetParam(), GetParam());
  for (std::int64_t code = 0; code < kCodes; ++code) {
    call.q.set({0, code, 0, code}, 1);
    if (!std::isnan(value_of(code))) *call.k.address({0, 0, 0, code}) = static_cast<unsigned char>(code);
  }
  call.run();
  for (std::int64_t code = 0; code < kCodes; ++code) {
    expect_number(call.lse.get({0, 0, code}), std::isnan(value_of(code)) ? 0 : value_of(code), code);
  }
  for (const unsigned char code : {0x7f, 0xff}) {
    *call.k.address({0, 0, 0, 3}) = code;
    call.run();
    EXPECT_TRUE(std::isnan(call.lse.get({0, 0, 0})));
  }
}

INSTANTIATE_TEST_SUITE_P(Types, AttentionFp8, testing::Values(Type::kBF16, Type::kF16),
                         [](const auto& info) { return std::string(type_name(info.param)); });

TEST(AttentionFp8Queries, WidensEveryQuery) {
  FLASHPORT_REQUIRE_SUPPORT("attention_bf16_d256_fp8_queries", support(flashport::DType::kFp8E4M3));
  OneKeyCall call(Type::kE4M3, Type::kBF16);
  for (std::int64_t code = 0; code < kCodes; ++code) {
    *call.q.address({0, code, 0, code}) = static_cast<unsigned char>(code);
    call.k.set({0, 0, 0, code}, 1);
  }
  call.run();
  for (std::int64_t code = 0; code < kCodes; ++code) {
    expect_number(call.lse.get({0, 0, code}), value_of(code), code);
  }
}

}  // namespace
}  // namespace flashport_test
