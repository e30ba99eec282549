// The matrix products that a warp has in flight, as the PTX manual has those of wgmma ("Asynchronous warpgroup level
// matrix instructions": wgmma.mma_async, .fence, .commit_group, .wait_group). From its start until it is waited for the
// registers of a product's sums are poison, and at some time in between it reads its operands in shared memory.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace flashport::machine {

inline constexpr int kLanes = 32;

// As tensor cores sum: 16 products and what was there before, each cut off below the 24 bits of the largest.
[[nodiscard]] float sum_of_products(const double* a, const double* b, float before);

// Makes the sums of all lanes what they are after the product. Those of lane i begin at sums + i * count.
using Multiply = std::function<void(float* sums)>;

// Where the sums of each lane begin. No memory of its own: a lane that fails leaves what it has.
using LaneRegisters = std::array<float*, kLanes>;

class Products {
 public:
  // Registers that lanes have written may be read by products from here on.
  void fence() { fenced_ = true; }
  // One more product, in the open group; its operands in registers are `multiply`'s own. Lane i has `count` sums from
  // registers[i] on. Null, or which rule is broken.
  const char* start(const LaneRegisters& registers, int count, Multiply multiply);
  void commit() { ++groups_; }
  // Ends the products of all groups but the last `later`. Null, or which rule is broken.
  const char* await(int later);

  [[nodiscard]] bool are_multiplied() const { return multiplied_ == products_.size(); }
  void multiply_oldest();
  [[nodiscard]] bool empty() const { return products_.empty(); }

 private:
  struct Sums {
    LaneRegisters registers;
    int count;
    std::vector<float> values;
    int products = 0;  // in flight
    [[nodiscard]] bool are_poison() const;
  };
  struct Product {
    std::shared_ptr<Sums> sums;
    Multiply multiply;
    int group;
  };

  std::deque<Product> products_;  // oldest first
  std::size_t multiplied_ = 0;    // of them
  int groups_ = 0;                // committed ones
  bool fenced_ = false;           // since the last wait, after which lanes may write registers
};

}  // namespace flashport::machine
