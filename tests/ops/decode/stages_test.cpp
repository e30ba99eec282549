// LightLLM's pair: stage 1 against attention over each block of keys, stage 2 against the merge of given states, and
// both in a row against attention over all keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/ops/decode/call.h"
#include "tests/support/compare.h"
#include "tests/support/expected_support.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

using reference::Type;

struct StageCase {
  std::string name;
  Type q, kv;
  std::int64_t dim, hq, hkv, block_seq;
  std::vector<std::int64_t> lens;
};

std::ostream& operator<<(std::ostream& out, const StageCase& c) { return out << c.name; }

// The decode case that has this case's tensors: a token pool whose K and V are slices of one buffer.
DecodeCase as_decode_case(const StageCase& s) {
  DecodeCase c{};
  c.name = s.name;
  c.q = s.q;
  c.k_format = c.v_format = s.kv;
  c.dk = c.dv = s.dim;
  c.hq = s.hq;
  c.hkv = s.hkv;
  c.q_len = 1;
  c.q_form = "token";
  c.layout = "token";
  c.lens = s.lens;
  c.window_left = c.window_right = -1;
  c.alibi = c.scales = "none";
  c.index64 = s.block_seq % 100 == 0;
  c.strides = "kv_sliced";
  c.splits = flashport::kInvariantSplits;
  return c;
}

std::vector<StageCase> stage_cases(const std::string& size, const std::vector<std::int64_t>& lens) {
  std::vector<StageCase> cases;
  const auto add = [&](Type q, Type kv, std::int64_t dim, std::int64_t hq, std::int64_t hkv) {
    for (std::int64_t block_seq : {16, 64, 128, 256, 100}) {
      const std::string name = "stage_" + size + "_" + type_name(q) + "_" + type_name(kv) + "_d" + std::to_string(dim) +
                               "_b" + std::to_string(block_seq);
      cases.push_back({name, q, kv, dim, hq, hkv, block_seq, lens});
    }
  };
  add(Type::kF16, Type::kF16, 64, 4, 4);
  add(Type::kBF16, Type::kBF16, 128, 8, 2);
  add(Type::kF32, Type::kF32, 128, 4, 1);
  add(Type::kF16, Type::kF16, 16, 3, 1);
  add(Type::kBF16, Type::kQ8_0, 256, 4, 1);
  add(Type::kF16, Type::kQ4_0, 128, 12, 3);
  add(Type::kF16, Type::kE4M3, 96, 17, 1);
  return cases;
}

class Stages : public testing::TestWithParam<StageCase> {};

struct Mid {
  Tensor out, lse;
};

// Blocks have one more than the longest request needs, and strides that are not dense.
Mid make_mid(const StageCase& s) {
  const auto batch = static_cast<std::int64_t>(s.lens.size());
  const std::int64_t longest = *std::max_element(s.lens.begin(), s.lens.end());
  const std::int64_t blocks = (longest + s.block_seq - 1) / s.block_seq + 1;
  const Shape padded = dense_strides({batch, s.hq, blocks + 1, 2 * s.dim});
  return {Tensor(Type::kF32, {batch, s.hq, blocks, s.dim}, {padded[0], padded[1], padded[2], 2}),
          Tensor(Type::kF32, {batch, s.hq, blocks}, {2 * s.hq * blocks, 2 * blocks, 2})};
}

flashport::DecodeStage1Args stage1_args(const DecodeCall& call, const StageCase& s, Mid& mid) {
  const flashport::DecodeArgs decode = call.args();
  flashport::DecodeStage1Args a;
  a.q = decode.q;
  a.k = decode.k_cache;
  a.v = decode.v_cache;
  a.k_format = decode.k_format;
  a.v_format = decode.v_format;
  a.req_to_tokens = *decode.token_table;
  a.b_req_idx = *decode.request_index;
  a.b_seqlen = decode.seqlens;
  a.max_len_in_batch = *std::max_element(s.lens.begin(), s.lens.end());
  a.mid_out = mid.out.view();
  a.mid_out_logsumexp = mid.lse.view();
  a.block_seq = s.block_seq;
  a.softmax_scale = decode.softmax_scale;
  return a;
}

TEST_P(Stages, MatchTheOracle) {
  const StageCase& s = GetParam();
  const DecodeCase c = as_decode_case(s);
  FLASHPORT_REQUIRE_SUPPORT(s.name, flashport::supports(c.query()));
  const Type math = math_of_key(flashport::which_kernel(c.query()));
  DecodeCall call(c);
  call.upload();
  Mid mid = make_mid(s);
  mid.out.upload();
  mid.lse.upload();
  flashport::flash_decode_stage1(stage1_args(call, s, mid));
  mid.out.download();
  mid.lse.download();
  EXPECT_EQ(mid.out.damage(), "");
  EXPECT_EQ(mid.lse.damage(), "");

  const std::vector<reference::Request> requests = reference::gather(call.inputs());
  std::vector<double> got, got_lse, exact, exact_lse, plain, plain_lse;
  for (std::size_t b = 0; b < requests.size(); ++b) {
    const auto seq = static_cast<std::int64_t>(b);
    for (std::int64_t block = 0; block < mid.out.shape()[2]; ++block) {
      const std::int64_t first = block * s.block_seq, last = std::min(first + s.block_seq, s.lens[b]);
      for (std::int64_t h = 0; h < s.hq; ++h) {
        for (std::int64_t d = 0; d < s.dim; ++d) {
          const double value = mid.out.get({seq, h, block, d});
          if (first < last) {
            got.push_back(value);
          } else {
            ASSERT_TRUE(std::isnan(value)) << "block " << block << " of length " << s.lens[b] << " was written";
          }
        }
        const double lse = mid.lse.get({seq, h, block});
        if (first < last) {
          got_lse.push_back(lse);
        } else {
          ASSERT_TRUE(std::isnan(lse));
        }
      }
      if (first >= last) continue;
      const reference::RequestResult e = reference::attend(requests[b], first, last);
      const reference::RequestResult p = reference::attend_plain(requests[b], math, Type::kF32, first, last);
      exact.insert(exact.end(), e.out.begin(), e.out.end());
      exact_lse.insert(exact_lse.end(), e.lse.begin(), e.lse.end());
      plain.insert(plain.end(), p.out.begin(), p.out.end());
      plain_lse.insert(plain_lse.end(), p.lse.begin(), p.lse.end());
    }
  }
  EXPECT_EQ(compare(got, exact, plain, fp32_floor(exact)).failure, "");
  EXPECT_EQ(compare(got_lse, exact_lse, plain_lse, lse_floor(exact_lse)).failure, "");

  // Stage 2 on what stage 1 left, rows that it did not write still NaN.
  call.out().poison();
  flashport::DecodeStage2Args second;
  second.mid_out = mid.out.view();
  second.mid_out_logexpsum = mid.lse.view();
  second.b_seqlen = call.args().seqlens;
  second.out = call.out().view();
  second.block_seq = s.block_seq;
  flashport::flash_decode_stage2(second);
  call.out().download();
  EXPECT_EQ(call.check(math), "");
}

// The emulator tier leaves Full out.
INSTANTIATE_TEST_SUITE_P(Ops, Stages, testing::ValuesIn(stage_cases("small", {0, 1, 65, 130})),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(FullOps, Stages, testing::ValuesIn(stage_cases("large", {1023, 0, 1024, 1, 1025, 63, 64, 65})),
                         [](const auto& info) { return info.param.name; });

struct Stage2Case {
  std::string name;
  Type out;
  std::int64_t dim, heads, block_seq;
  bool dense, lse;
};

std::ostream& operator<<(std::ostream& out, const Stage2Case& c) { return out << c.name; }

class Stage2 : public testing::TestWithParam<Stage2Case> {};

TEST_P(Stage2, MergesGivenBlocks) {
  const Stage2Case& c = GetParam();
  Random random(c.block_seq + c.dim);
  const std::vector<std::int64_t> lens = {0, 1, c.block_seq, c.block_seq + 1, 3 * c.block_seq, 7 * c.block_seq};
  const std::int64_t batch = 6, blocks = 7;
  const Shape shape{batch, c.heads, blocks, c.dim};
  const std::int64_t inner = c.dense ? 1 : 2;
  Shape strides = dense_strides({batch, c.heads + inner - 1, blocks, c.dim});
  for (std::int64_t& stride : strides) stride *= inner;
  Tensor mid(Type::kF32, shape, strides), mid_lse(Type::kF32, {batch, c.heads, blocks});
  Tensor seqlens(c.dense ? Type::kI32 : Type::kI64, {batch});
  Tensor out(c.out, {batch, c.heads, c.dim}, {inner * c.heads * c.dim, inner * c.dim, inner});
  Tensor lse(Type::kF32, {batch, c.heads}, {2 * c.heads, 2});
  std::vector<double> exact, exact_lse, plain, plain_lse;
  for (std::int64_t b = 0; b < batch; ++b) {
    seqlens.set({b}, static_cast<double>(lens[b]));
    const std::int64_t used = (lens[b] + c.block_seq - 1) / c.block_seq;
    for (std::int64_t h = 0; h < c.heads; ++h) {
      std::vector<std::vector<double>> parts;
      std::vector<double> weights;
      for (std::int64_t block = 0; block < used; ++block) {
        // A block that saw nothing has -inf, and its row may hold anything.
        const bool empty = h == 1 && block == 2;
        mid_lse.set({b, h, block}, empty ? -INFINITY : 3 * random.normal());
        weights.push_back(mid_lse.get({b, h, block}));
        parts.emplace_back();
        for (std::int64_t d = 0; d < c.dim; ++d) {
          if (!empty) mid.set({b, h, block, d}, random.normal());
          parts.back().push_back(mid.get({b, h, block, d}));
        }
      }
      std::vector<double> row(c.dim, 0.0);
      exact_lse.push_back(used == 0 ? -INFINITY : reference::merge(parts, weights, row));
      exact.insert(exact.end(), row.begin(), row.end());
      plain_lse.push_back(used == 0 ? -INFINITY : reference::merge_plain(parts, weights, c.out, row));
      plain.insert(plain.end(), row.begin(), row.end());
    }
  }
  for (Tensor* tensor : {&mid, &mid_lse, &seqlens, &out, &lse}) tensor->upload();
  flashport::DecodeStage2Args a;
  a.mid_out = mid.view();
  a.mid_out_logexpsum = mid_lse.view();
  a.b_seqlen = seqlens.view();
  a.out = out.view();
  if (c.lse) a.lse = lse.view();
  a.block_seq = c.block_seq;
  flashport::flash_decode_stage2(a);
  out.download();
  EXPECT_EQ(out.damage(), "");
  EXPECT_EQ(compare(out.values(), exact, plain, fp32_floor(exact)).failure, "");
  if (!c.lse) return;
  lse.download();
  EXPECT_EQ(lse.damage(), "");
  EXPECT_EQ(compare(lse.values(), exact_lse, plain_lse, lse_floor(exact_lse)).failure, "");
}

std::vector<Stage2Case> stage2_cases() {
  std::vector<Stage2Case> cases;
  for (Type out : {Type::kF16, Type::kBF16, Type::kF32}) {
    for (std::int64_t dim : {16, 80, 128, 512}) {
      for (std::int64_t block_seq : {1, 16, 100}) {
        const bool dense = (dim + block_seq) % 3 != 0;
        cases.push_back({std::string(type_name(out)) + "_d" + std::to_string(dim) + "_b" + std::to_string(block_seq),
                         out, dim, dim == 128 ? 32 : 3, block_seq, dense, block_seq != 16});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Ops, Stage2, testing::ValuesIn(stage2_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace flashport_test
