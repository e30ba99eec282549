// Self-tests of the oracle by second formulations: parts that merge to the whole, layouts that hold the same logical
// cache, options against their closed forms, and the plain implementation against the oracle within its precision.
#include "tests/reference/oracle.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/random.h"

namespace reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

Request random_request(std::int64_t q_len, std::int64_t kv_len, std::int64_t heads, std::int64_t kv_heads,
                       std::int64_t dim, std::uint64_t seed) {
  flashport_test::Random random(seed);
  Request r;
  r.q_len = q_len;
  r.kv_len = kv_len;
  r.num_q_heads = heads;
  r.num_kv_heads = kv_heads;
  r.dim_qk = r.dim_v = dim;
  for (std::int64_t i = 0; i < q_len * heads * dim; ++i) r.q.push_back(round_to(random.normal(), Type::kF16));
  for (std::int64_t i = 0; i < kv_len * kv_heads * dim; ++i) {
    r.k.push_back(round_to(random.normal(), Type::kF16));
    r.v.push_back(round_to(random.normal(), Type::kF16));
  }
  r.k_scale.assign(kv_heads, 1.0);
  r.v_scale.assign(kv_heads, 1.0);
  r.softmax_scale = 1 / std::sqrt(static_cast<double>(dim));
  return r;
}

void expect_close(const RequestResult& a, const RequestResult& b, double tolerance) {
  ASSERT_EQ(a.out.size(), b.out.size());
  for (std::size_t i = 0; i < a.out.size(); ++i) ASSERT_NEAR(a.out[i], b.out[i], tolerance) << i;
  for (std::size_t i = 0; i < a.lse.size(); ++i) {
    if (std::isinf(a.lse[i]) || std::isinf(b.lse[i])) {
      ASSERT_EQ(a.lse[i], b.lse[i]);
    } else {
      ASSERT_NEAR(a.lse[i], b.lse[i], tolerance) << i;
    }
  }
}

TEST(Oracle, PartsMergeToTheWhole) {
  Request r = random_request(3, 130, 6, 2, 32, 1);
  r.sinks = {0.5, -1, 2, 0, 1, -3};
  r.slopes = {0.1, 0.2, 0, 0.4, 0.05, 0.3};
  r.window_left = 90;
  r.softcap = 3;
  const RequestResult whole = attend(r);
  const std::int64_t cuts[] = {0, 1, 64, 100, 100, 130};
  std::vector<RequestResult> parts;
  for (int i = 0; i + 1 < 6; ++i) parts.push_back(attend(r, cuts[i], cuts[i + 1], i == 0));
  RequestResult merged = whole;
  for (std::int64_t row = 0; row < r.q_len * r.num_q_heads; ++row) {
    std::vector<std::vector<double>> o;
    std::vector<double> lse, out(r.dim_v);
    for (const RequestResult& part : parts) {
      o.emplace_back(part.out.begin() + row * r.dim_v, part.out.begin() + (row + 1) * r.dim_v);
      lse.push_back(part.lse[row]);
    }
    merged.lse[row] = merge(o, lse, out);
    std::copy(out.begin(), out.end(), merged.out.begin() + row * r.dim_v);
  }
  expect_close(whole, merged, 1e-13);
}

TEST(Oracle, EqualKeysAverageTheValues) {
  Request r = random_request(1, 5, 2, 1, 8, 2);
  for (std::size_t i = 0; i < r.k.size(); ++i) r.k[i] = r.k[i % r.dim_qk];
  const RequestResult result = attend(r);
  for (std::int64_t d = 0; d < r.dim_v; ++d) {
    double mean = 0;
    for (std::int64_t j = 0; j < r.kv_len; ++j) mean += r.v[j * r.dim_v + d] / 5;
    EXPECT_NEAR(result.out[d], mean, 1e-14);
  }
}

TEST(Oracle, CausalRowsEqualShorterRequests) {
  const Request r = random_request(4, 20, 4, 2, 16, 3);
  const RequestResult whole = attend(r);
  for (std::int64_t i = 0; i < r.q_len; ++i) {
    Request one = r;
    one.q_len = 1;
    one.kv_len = r.kv_len - r.q_len + 1 + i;
    one.q.assign(r.q.begin() + i * 4 * 16, r.q.begin() + (i + 1) * 4 * 16);
    const RequestResult part = attend(one);
    for (std::size_t n = 0; n < part.out.size(); ++n) ASSERT_NEAR(part.out[n], whole.out[i * 4 * 16 + n], 1e-13);
  }
}

TEST(Oracle, ChainTreeIsCausalAndEmptyTreeSeesThePrefix) {
  Request r = random_request(4, 20, 2, 1, 16, 4);
  const RequestResult causal = attend(r);
  r.tree_mask = {1, 3, 7, 15};
  expect_close(causal, attend(r), 1e-14);
  r.tree_mask = {0, 0, 0, 0};
  expect_close(attend(r), attend(r, 0, 16), 1e-14);
}

TEST(Oracle, WindowOfZeroIsTheOwnValue) {
  Request r = random_request(2, 9, 1, 1, 8, 5);
  r.window_left = 0;
  const RequestResult result = attend(r);
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t d = 0; d < 8; ++d) EXPECT_NEAR(result.out[i * 8 + d], r.v[(7 + i) * 8 + d], 1e-14);
  }
}

TEST(Oracle, RowsThatSeeNothing) {
  Request r = random_request(3, 1, 1, 1, 8, 6);  // positions -2, -1, 0
  const RequestResult result = attend(r);
  EXPECT_EQ(result.out[0], 0.0);
  EXPECT_EQ(result.lse[0], -kInf);
  EXPECT_EQ(result.lse[1], -kInf);
  EXPECT_NEAR(result.out[16], r.v[0], 1e-14);
  r.sinks = {0.25};
  EXPECT_EQ(attend(r).lse[0], 0.25);
  EXPECT_EQ(attend(r).out[0], 0.0);
}

TEST(Oracle, SinkAndScalesAndCapHaveTheirClosedForms) {
  Request r = random_request(1, 1, 1, 1, 4, 7);
  const double score = [&] {
    double dot = 0;
    for (int d = 0; d < 4; ++d) dot += r.q[d] * r.k[d];
    return dot * r.softmax_scale;
  }();
  r.sinks = {0.0};
  EXPECT_NEAR(attend(r).out[0], r.v[0] / (1 + std::exp(-score)), 1e-14);
  EXPECT_NEAR(attend(r).lse[0], std::log(1 + std::exp(score)), 1e-14);
  r.sinks.clear();
  r.softcap = 2;
  EXPECT_NEAR(attend(r).lse[0], 2 * std::tanh(score / 2), 1e-14);
  r.k_scale = {3};
  r.v_scale = {5};
  EXPECT_NEAR(attend(r).lse[0], 2 * std::tanh(3 * score / 2), 1e-14);
  EXPECT_NEAR(attend(r).out[0], 5 * r.v[0], 1e-13);
}

TEST(Oracle, PlainIsCloseToTheOracleAndExactInNoOther) {
  const Request r = random_request(2, 200, 8, 2, 64, 8);
  expect_close(attend(r), attend_plain(r, Type::kF32, Type::kF32), 2e-6);
  expect_close(attend(r), attend_plain(r, Type::kF16, Type::kF32), 1e-3);
  expect_close(attend(r), attend_plain(r, Type::kBF16, Type::kF32), 2e-2);
}

// One logical cache of two requests in every layout gathers to the same requests.
TEST(Oracle, LayoutsOfOneCacheAgree) {
  constexpr std::int64_t kDim = 4, kHeads = 2, kLengths[] = {5, 3};
  const auto logical = [](std::int64_t b, std::int64_t j, std::int64_t h, std::int64_t d) {
    return static_cast<float>(1000 * b + 100 * j + 10 * h + d);
  };
  std::vector<float> q(2 * kHeads * kDim, 1.0f);
  std::vector<std::int32_t> lengths{5, 3};
  const auto check = [&](const DecodeInputs& in, const char* what) {
    const std::vector<Request> requests = gather(in);
    ASSERT_EQ(requests.size(), 2u) << what;
    for (std::int64_t b = 0; b < 2; ++b) {
      ASSERT_EQ(requests[b].kv_len, kLengths[b]) << what;
      std::size_t i = 0;
      for (std::int64_t j = 0; j < kLengths[b]; ++j) {
        for (std::int64_t h = 0; h < kHeads; ++h) {
          for (std::int64_t d = 0; d < kDim; ++d) ASSERT_EQ(requests[b].k[i++], logical(b, j, h, d)) << what;
        }
      }
    }
  };
  for (bool heads_first : {false, true}) {
    // Pages of 2 in a shuffled pool of 6; contiguous is the same with pages of 8.
    for (std::int64_t page : {std::int64_t{2}, std::int64_t{8}}) {
      const std::int64_t pages = page == 8 ? 2 : 6;
      std::vector<float> cache(pages * page * kHeads * kDim, NAN);
      const std::vector<std::int32_t> table{4, 0, 5, 2, 1, 1 << 30};
      const std::vector<std::int32_t> indptr{0, 3, 5}, indices{4, 0, 5, 2, 1}, last{1, 1};
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t j = 0; j < kLengths[b]; ++j) {
          const std::int64_t where = page == 8 ? b : table[b * 3 + j / page];
          for (std::int64_t h = 0; h < kHeads; ++h) {
            for (std::int64_t d = 0; d < kDim; ++d) {
              const std::int64_t row =
                  heads_first ? (where * kHeads + h) * page + j % page : (where * page + j % page) * kHeads + h;
              cache[row * kDim + d] = logical(b, j, h, d);
            }
          }
        }
      }
      DecodeInputs in;
      in.q = {q.data(), Type::kF32, {2, kHeads, kDim}, {kHeads * kDim, kDim, 1}};
      in.head_dim_qk = in.head_dim_v = kDim;
      in.heads_first = heads_first;
      in.k_cache = {cache.data(),
                    Type::kF32,
                    heads_first ? std::vector<std::int64_t>{pages, kHeads, page, kDim}
                                : std::vector<std::int64_t>{pages, page, kHeads, kDim},
                    {page * kHeads * kDim, heads_first ? page * kDim : kHeads * kDim, kDim, 1}};
      in.v_cache = in.k_cache;
      in.seqlens = Array{lengths.data(), Type::kI32, {2}, {1}};
      if (page == 8) {
        check(in, "contiguous");
        continue;
      }
      in.block_table = Array{table.data(), Type::kI32, {2, 3}, {3, 1}};
      check(in, "block table");
      in.block_table.reset();
      in.seqlens.reset();
      in.kv_indptr = Array{indptr.data(), Type::kI32, {3}, {1}};
      in.kv_indices = Array{indices.data(), Type::kI32, {5}, {1}};
      in.kv_last_page_len = Array{last.data(), Type::kI32, {2}, {1}};
      check(in, "csr");
    }
  }
  // The token pool: row 2 of the table is request 0, row 0 is request 1.
  std::vector<float> pool(9 * kHeads * kDim, NAN);
  std::vector<std::int32_t> table(3 * 5, 1 << 30);
  const std::vector<std::int64_t> rows{2, 0};
  std::int32_t slot = 8;
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t j = 0; j < kLengths[b]; ++j, --slot) {
      table[rows[b] * 5 + j] = slot;
      for (std::int64_t i = 0; i < kHeads * kDim; ++i) {
        pool[slot * kHeads * kDim + i] = logical(b, j, i / kDim, i % kDim);
      }
    }
  }
  DecodeInputs in;
  in.q = {q.data(), Type::kF32, {2, kHeads, kDim}, {kHeads * kDim, kDim, 1}};
  in.head_dim_qk = in.head_dim_v = kDim;
  in.k_cache = in.v_cache = {pool.data(), Type::kF32, {9, kHeads, kDim}, {kHeads * kDim, kDim, 1}};
  in.seqlens = Array{lengths.data(), Type::kI32, {2}, {1}};
  in.token_table = Array{table.data(), Type::kI32, {3, 5}, {5, 1}};
  in.request_index = Array{rows.data(), Type::kI64, {2}, {1}};
  check(in, "token table");
}

TEST(Oracle, MergeOfTwoEmptyStatesIsEmpty) {
  std::vector<double> out(2, NAN);
  EXPECT_EQ(merge({{NAN, NAN}, {NAN, NAN}}, {-kInf, -kInf}, out), -kInf);
  EXPECT_EQ(out[0], 0.0);
  EXPECT_NEAR(merge({{1, 2}, {NAN, NAN}}, {0.5, -kInf}, out), 0.5, 1e-15);
  EXPECT_EQ(out[1], 2.0);
  EXPECT_EQ(merge_plain({{1, 2}, {3, 4}}, {0, 0}, Type::kF32, out), std::log(2.0f));
  EXPECT_EQ(out[0], 2.0);
}

}  // namespace
}  // namespace reference
