// Random numbers that are the same on every platform and with every standard library.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace flashport_test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567) {}

  std::uint64_t next() {  // splitmix64
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  // In [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  // In [0, bound).
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
  }
  // A sum of twelve uniforms: mean 0, variance 1, and no libm whose last bit differs.
  double normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  // 0 .. count-1 in random order.
  std::vector<std::int64_t> permutation(std::int64_t count) {
    std::vector<std::int64_t> order(count);
    for (std::int64_t i = 0; i < count; ++i) order[i] = i;
    for (std::int64_t i = count - 1; i > 0; --i) std::swap(order[i], order[below(i + 1)]);
    return order;
  }

 private:
  std::uint64_t state_;
};

}  // namespace flashport_test
