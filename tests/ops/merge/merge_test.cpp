// merge_states and merge_state against the oracle's merge: element types, both bases of the lse, states that saw
// nothing, strides.
#include <gtest/gtest.h>

#include <flashport/decode.h>

#include <cmath>

#include "tests/reference/oracle.h"
#include "tests/support/compare.h"
#include "tests/support/random.h"
#include "tests/support/tensor.h"

namespace flashport_test {
namespace {

using reference::Type;

struct MergeCase {
  std::string name;
  Type type;
  std::int64_t states, dim;
  bool base_2, dense;
};

std::ostream& operator<<(std::ostream& out, const MergeCase& c) { return out << c.name; }

// o [n][rows][dim], lse [n][rows]; every row of seven lacks a state or all of them.
struct States {
  static constexpr std::int64_t kOuter = 7, kInner = 5;
  Tensor o, lse, out, out_lse;
  std::vector<double> exact, exact_lse, plain, plain_lse;

  explicit States(const MergeCase& c)
      : o(c.type, {c.states, kOuter, kInner, c.dim}, strides(c, c.states)),
        lse(Type::kF32, {c.states, kOuter, kInner}),
        out(c.type, {kOuter, kInner, c.dim}, outer_strides(c)),
        out_lse(Type::kF32, {kOuter, kInner}) {
    Random random(c.states * 1000 + c.dim);
    const double base = c.base_2 ? std::log(2.0) : 1.0;
    for (std::int64_t i = 0; i < kOuter; ++i) {
      for (std::int64_t j = 0; j < kInner; ++j) {
        std::vector<std::vector<double>> parts;
        std::vector<double> weights;
        for (std::int64_t n = 0; n < c.states; ++n) {
          const bool empty = i == 2 || (i == 3 && n == j % c.states);
          lse.set({n, i, j}, empty ? -INFINITY : 4 * random.normal());
          weights.push_back(lse.get({n, i, j}) * base);
          parts.emplace_back();
          for (std::int64_t d = 0; d < c.dim; ++d) {
            if (!empty) o.set({n, i, j, d}, random.normal());  // else the poison stays: NaN that must not matter
            parts.back().push_back(o.get({n, i, j, d}));
          }
        }
        std::vector<double> row(c.dim);
        exact_lse.push_back(reference::merge(parts, weights, row) / base);
        exact.insert(exact.end(), row.begin(), row.end());
        plain_lse.push_back(reference::merge_plain(parts, weights, c.type, row) / base);
        plain.insert(plain.end(), row.begin(), row.end());
      }
    }
    for (Tensor* tensor : {&o, &lse, &out, &out_lse}) tensor->upload();
  }

  static Shape outer_strides(const MergeCase& c) {
    const std::int64_t inner = c.dense ? 1 : 2;
    return {kInner * c.dim * inner + 3 * (inner - 1), c.dim * inner, inner};
  }
  static Shape strides(const MergeCase& c, std::int64_t) {
    Shape rows = outer_strides(c);
    rows.insert(rows.begin(), kOuter * rows[0] + 4 * (c.dense ? 0 : 1));
    return rows;
  }

  void check() {
    out.download();
    out_lse.download();
    EXPECT_EQ(out.damage(), "");
    EXPECT_EQ(out_lse.damage(), "");
    EXPECT_EQ(compare(out.values(), exact, plain, fp32_floor(exact)).failure, "");
    EXPECT_EQ(compare(out_lse.values(), exact_lse, plain_lse, lse_floor(exact_lse)).failure, "");
  }
};

// State `n` of a tensor whose first axis is the states.
flashport::TensorView state(const Tensor& tensor, std::int64_t n) {
  flashport::TensorView view = tensor.view();
  view.data = static_cast<char*>(view.data) + n * view.strides[0] * flashport::element_size(view.dtype);
  --view.rank;
  for (int axis = 0; axis < view.rank; ++axis) {
    view.shape[axis] = view.shape[axis + 1];
    view.strides[axis] = view.strides[axis + 1];
  }
  return view;
}

class Merge : public testing::TestWithParam<MergeCase> {};

TEST_P(Merge, MatchesTheOracle) {
  const MergeCase& c = GetParam();
  States states(c);
  flashport::MergeStatesArgs a;
  a.o = states.o.view();
  a.lse = states.lse.view();
  a.out = states.out.view();
  a.out_lse = states.out_lse.view();
  a.lse_base_2 = c.base_2;
  flashport::merge_states(a);
  states.check();
  if (c.states != 2) return;

  for (Tensor* tensor : {&states.out, &states.out_lse}) tensor->poison();
  flashport::MergeStateArgs two;
  two.o_a = state(states.o, 0);
  two.lse_a = state(states.lse, 0);
  two.o_b = state(states.o, 1);
  two.lse_b = state(states.lse, 1);
  two.out = states.out.view();
  two.out_lse = states.out_lse.view();
  two.lse_base_2 = c.base_2;
  flashport::merge_state(two);
  states.check();
}

std::vector<MergeCase> merge_cases() {
  std::vector<MergeCase> cases;
  int number = 0;
  for (Type type : {Type::kF16, Type::kBF16, Type::kF32}) {
    for (std::int64_t dim : {8, 64, 80, 512}) {
      for (std::int64_t count : {1, 2, 3, 9}) {
        const bool base_2 = number % 2 == 1, dense = number % 3 != 0;
        ++number;
        cases.push_back({std::string(type_name(type)) + "_d" + std::to_string(dim) + "_n" + std::to_string(count), type,
                         count, dim, base_2, dense});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Ops, Merge, testing::ValuesIn(merge_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace flashport_test
