#include "tests/ops/written.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/compare.h"

namespace flashport_test {

void Written::expect(const Shape& at, double exact, double plain) {
  std::int64_t index = 0;
  for (std::size_t axis = 0; axis < at.size(); ++axis) index = index * tensor_.shape()[axis] + at[axis];
  written_[static_cast<std::size_t>(index)] = true;
  indices_.push_back(at);
  exact_.push_back(exact);
  plain_.push_back(plain);
}

void Written::expect_state(const Shape& outer, bool key_major, std::int64_t heads, std::int64_t dim_k,
                           std::int64_t dim_v, const std::vector<double>& exact, const std::vector<double>& plain) {
  std::size_t i = 0;
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t key = 0; key < dim_k; ++key) {
      for (std::int64_t column = 0; column < dim_v; ++column, ++i) {
        Shape at = outer;
        at.insert(at.end(), {head, key_major ? key : column, key_major ? column : key});
        expect(at, exact[i], plain[i]);
      }
    }
  }
}

void Written::judge(const std::string& what) {
  EXPECT_EQ(tensor_.damage(), "") << what;
  std::vector<double> got;
  for (const Shape& at : indices_) got.push_back(tensor_.get(at));
  EXPECT_EQ(compare(got, exact_, plain_, fp32_floor(exact_)).failure, "") << what;
  const std::vector<unsigned char> now = tensor_.element_bytes();
  const std::size_t bytes = now.empty() ? 1 : now.size() / written_.size();
  for (std::size_t i = 0; i < written_.size(); ++i) {
    if (written_[i]) continue;
    ASSERT_TRUE(std::equal(now.begin() + i * bytes, now.begin() + (i + 1) * bytes, before_.begin() + i * bytes))
        << what << ": element " << i << " was written";
  }
}

}  // namespace flashport_test
