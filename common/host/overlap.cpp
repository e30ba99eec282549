// Two views share a byte where one address is a byte of an element of both. With strides s, t in bytes and the axes of
// negative strides walked from their other end, so that all strides are positive, a byte of `a` and one of `b` are
//   a_begin + sum s_i x_i + p        b_end - 1 - (sum t_j y_j + q)        p, q: bytes of an element
// (`b` counted from its end, which turns the difference of the two into a sum). They are the same byte where
//   sum s_i x_i + sum t_j y_j + p + q = b_end - 1 - a_begin               each unknown from 0 to a limit
// and whether this equation has a solution is all that is asked.
#include "common/host/overlap.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

namespace flashport {
namespace {

__extension__ typedef unsigned __int128 Wide;

// step * x, with x from 0 to `most`.
struct Term {
  std::int64_t step, most;
};

constexpr int kMostTerms = 2 * kMaxRank + 1;

struct Terms {
  Term at[kMostTerms];
  int count = 0;
  bool overflow = false;  // the sum does not fit 64 bits: these are no strides of real memory
  std::int64_t reach = 0;

  void add(std::int64_t step, std::int64_t most) {
    std::int64_t length = 0;
    if (__builtin_mul_overflow(step, most, &length) || __builtin_add_overflow(reach, length, &reach)) overflow = true;
    if (step > 0 && most > 0) at[count++] = {step, most};
  }

  void add_axes(const TensorView& view) {
    const std::int64_t size = element_size(view.dtype);
    for (int axis = 0; axis < view.rank; ++axis) {
      std::int64_t step = 0;
      if (view.shape[axis] == 1) continue;
      if (__builtin_mul_overflow(view.strides[axis], view.strides[axis] < 0 ? -size : size, &step)) overflow = true;
      add(step, view.shape[axis] - 1);
    }
  }

  // Joins terms whose sums have no gaps: of step c up to u and of step k c, k <= u + 1, every multiple of c up to the
  // end is reached. The axes of a tensor without gaps become one term.
  void join() {
    std::sort(at, at + count, [](const Term& a, const Term& b) { return a.step < b.step; });
    for (int i = 0; i < count; ++i) {
      int kept = i + 1;
      for (int j = i + 1; j < count; ++j) {
        const std::int64_t ratio = at[j].step / at[i].step;
        if (at[j].step % at[i].step == 0 && ratio - 1 <= at[i].most) {
          at[i].most += ratio * at[j].most;
        } else {
          at[kept++] = at[j];
        }
      }
      count = kept;
    }
  }
};

// Where each step is longer than all smaller ones reach together, terms are digits: the largest step goes into the
// target as often as it fits, or there is no solution. So it is with slices of one array, whatever their axes.
std::optional<Overlap> solve_digits(const Terms& terms, std::int64_t target) {
  std::int64_t rest = 0;
  for (int i = 0; i < terms.count; ++i) {
    if (terms.at[i].step <= rest) return std::nullopt;
    rest += terms.at[i].step * terms.at[i].most;
  }
  for (int i = terms.count - 1; i >= 0; --i) {
    target -= terms.at[i].step * std::min(terms.at[i].most, target / terms.at[i].step);
  }
  return target == 0 ? Overlap::kShared : Overlap::kNone;
}

// x with a * x = 1 (mod modulus), for a without a factor in common with it.
std::int64_t inverse_of(std::int64_t a, std::int64_t modulus) {
  std::int64_t r = modulus, next_r = a % modulus, x = 0, next_x = 1;
  while (next_r != 0) {
    const std::int64_t quotient = r / next_r;
    r = std::exchange(next_r, r - quotient * next_r);
    x = std::exchange(next_x, x - quotient * next_x);
  }
  return x < 0 ? x + modulus : x;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

// The unknowns one after the other. The rest of the sum gives each a range, because it has a length, and a residue,
// because it is a multiple of the greatest common divisor of its steps. The unknown with the fewest such values goes
// first. With one term left in the rest, each value is a solution: range and residue are all that a single term asks.
class Search {
 public:
  Search(Terms& terms, std::int64_t most_steps) : count_(terms.count), steps_left_(most_steps) {
    for (int level = 0; level < count_; ++level) levels_[level] = take_narrowest(terms);
  }

  Overlap solve(std::int64_t target, int at = 0) {
    if (at == count_) return target == 0 ? Overlap::kShared : Overlap::kNone;
    const Level& level = levels_[at];
    if (target % level.divisor != 0) return Overlap::kNone;
    const std::int64_t low = std::max<std::int64_t>(0, ceil_div(target - level.rest, level.step));
    const std::int64_t high = std::min(level.most, target / level.step);
    if (low > high) return Overlap::kNone;
    const auto modulus = static_cast<Wide>(level.modulus);
    const Wide residue = static_cast<Wide>(target / level.divisor) % modulus * static_cast<Wide>(level.inverse);
    const auto first = static_cast<std::int64_t>((residue + modulus - static_cast<Wide>(low) % modulus) % modulus);
    if (first > high - low) return Overlap::kNone;
    if (count_ - at <= 2) return Overlap::kShared;
    for (std::int64_t x = low + first;; x += level.modulus) {
      if (--steps_left_ < 0) return Overlap::kUndecided;
      const Overlap found = solve(target - level.step * x, at + 1);
      if (found != Overlap::kNone) return found;
      if (high - x < level.modulus) return Overlap::kNone;
    }
  }

 private:
  struct Level {
    std::int64_t step, most;
    std::int64_t rest;              // what the terms after it reach
    std::int64_t divisor;           // of this step and of all after it
    std::int64_t modulus, inverse;  // x = target / divisor * inverse (mod modulus)

    // Values that are left of x, at the most.
    [[nodiscard]] std::int64_t values() const { return std::min(most, rest / step) / modulus; }
  };

  static Level level_of(const Terms& terms, int which) {
    std::int64_t rest = 0, rest_divisor = 0;
    for (int i = 0; i < terms.count; ++i) {
      if (i == which) continue;
      rest += terms.at[i].step * terms.at[i].most;
      rest_divisor = std::gcd(rest_divisor, terms.at[i].step);
    }
    const std::int64_t step = terms.at[which].step;
    const std::int64_t divisor = std::gcd(step, rest_divisor);
    const std::int64_t modulus = rest_divisor == 0 ? 1 : rest_divisor / divisor;
    return {step, terms.at[which].most, rest, divisor, modulus, inverse_of(step / divisor, modulus)};
  }

  static Level take_narrowest(Terms& terms) {
    int best = 0;
    Level narrowest = level_of(terms, 0);
    for (int i = 1; i < terms.count; ++i) {
      const Level level = level_of(terms, i);
      if (level.values() < narrowest.values()) narrowest = level, best = i;
    }
    std::copy(terms.at + best + 1, terms.at + terms.count, terms.at + best);
    --terms.count;
    return narrowest;
  }

  Level levels_[kMostTerms];
  int count_;
  std::int64_t steps_left_;
};

}  // namespace

ByteRange byte_range(const TensorView& view) {
  // Unsigned, so that strides of no real memory wrap around instead of being undefined.
  std::uint64_t low = 0, high = 0;
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.shape[axis] == 0) return {};
    const auto steps = static_cast<std::uint64_t>(view.shape[axis] - 1);
    (view.strides[axis] < 0 ? low : high) += steps * static_cast<std::uint64_t>(view.strides[axis]);
  }
  const auto base = reinterpret_cast<std::uintptr_t>(view.data);
  const auto size = static_cast<std::uint64_t>(element_size(view.dtype));
  return {base + low * size, base + (high + 1) * size};
}

Overlap find_overlap(const TensorView& a, const TensorView& b, std::int64_t most_steps) {
  const ByteRange range = byte_range(a), other = byte_range(b);
  if (!range.meets(other)) return Overlap::kNone;
  Terms terms;
  terms.add(1, element_size(a.dtype) + element_size(b.dtype) - 2);
  terms.add_axes(a);
  terms.add_axes(b);
  if (terms.overflow) return Overlap::kUndecided;
  terms.join();
  const auto target = static_cast<std::int64_t>(other.end - 1 - range.begin);
  if (const std::optional<Overlap> found = solve_digits(terms, target)) return *found;
  return Search(terms, most_steps).solve(target);
}

}  // namespace flashport
