#include "tests/device/machine/products.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace flashport::machine {
namespace {

constexpr unsigned char kPoison = 0xff;  // NaN
constexpr const char* kWritten = "registers of sums were written while a product that has them was in flight";

}  // namespace

float sum_of_products(const double* a, const double* b, float before) {
  // Two sides of a sum that never meet are two at a time to the compiler.
  double terms[16], most[2] = {std::fabs(double{before}), 0}, sums[2] = {before, 0};
  for (int k = 0; k < 16; ++k) {
    terms[k] = a[k] * b[k];
    most[k % 2] = std::max(most[k % 2], std::fabs(terms[k]));
    sums[k % 2] += terms[k];
  }
  most[0] = std::max(most[0], most[1]);
  sums[0] += sums[1];
  if (!std::isfinite(sums[0]) || most[0] == 0) return static_cast<float>(sums[0]);
  const std::uint64_t exponent = std::bit_cast<std::uint64_t>(most[0]) >> 52;
  if (exponent < 64) return static_cast<float>(sums[0]);
  const auto unit = std::bit_cast<double>((exponent - 23) << 52);
  const auto inverse = std::bit_cast<double>((2046 + 23 - exponent) << 52);
  auto units = static_cast<std::int32_t>(before * inverse);
  for (const double term : terms) units += static_cast<std::int32_t>(term * inverse);
  // Cut off to a float, too.
  const double exact = units * unit;
  if (exponent > 1023 - 100) {  // no subnormal number
    return static_cast<float>(std::bit_cast<double>(std::bit_cast<std::uint64_t>(exact) & ~0x1fffffffull));
  }
  const auto nearest = static_cast<float>(exact);
  return std::fabs(double{nearest}) > std::fabs(exact) ? std::nextafter(nearest, 0.0f) : nearest;
}

bool Products::Sums::are_poison() const {
  return std::ranges::all_of(registers, [&](const float* lane) {
    return std::all_of(lane, lane + count, [](const float& x) {
      std::uint32_t bits;
      std::memcpy(&bits, &x, sizeof bits);
      return bits == 0xffffffff;
    });
  });
}

const char* Products::start(const LaneRegisters& registers, int count, Multiply multiply) {
  const auto before = std::find_if(products_.rbegin(), products_.rend(), [&](const Product& each) {
    return each.sums->registers.front() == registers.front();
  });
  std::shared_ptr<Sums> sums;
  if (before != products_.rend()) {  // products with the same sums and of one shape are in order
    sums = before->sums;
    if (sums->registers != registers || sums->count != count) return "products of two shapes share sums";
    if (!sums->are_poison()) return kWritten;
  } else {
    if (!fenced_) return "a product of registers that may have been written since the last wgmma.fence";
    sums = std::make_shared<Sums>(Sums{registers, count, {}});
    for (float* lane : registers) {
      sums->values.insert(sums->values.end(), lane, lane + count);
      std::memset(lane, kPoison, count * sizeof(float));
    }
  }
  ++sums->products;
  products_.push_back({std::move(sums), std::move(multiply), groups_});
  return nullptr;
}

void Products::multiply_oldest() {
  Product& product = products_[multiplied_++];
  product.multiply(product.sums->values.data());
}

const char* Products::await(int later) {
  fenced_ = false;
  while (!products_.empty() && products_.front().group < groups_ - later) {
    if (multiplied_ == 0) multiply_oldest();
    const std::shared_ptr<Sums> sums = std::move(products_.front().sums);
    products_.pop_front();
    --multiplied_;
    if (--sums->products > 0) continue;
    if (!sums->are_poison()) return kWritten;
    for (std::size_t lane = 0; lane < sums->registers.size(); ++lane) {
      std::copy_n(sums->values.data() + lane * sums->count, sums->count, sums->registers[lane]);
    }
  }
  return nullptr;
}

}  // namespace flashport::machine
