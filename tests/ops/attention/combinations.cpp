#include "tests/ops/attention/combinations.h"

#include <algorithm>
#include <array>
#include <string>

#include "tests/support/random.h"

namespace flashport_test {
namespace {

using reference::Type;

enum Option {
  kCausal,
  kWindow,
  kSoftcap,
  kSlopes,
  kSinks,
  kBias,
  kDropout,
  kUsedQ,
  kUsedK,
  kLeftpad,
  kScale,
  kLayout,
  kNoLse,
  kPages,
  kFp8,
  kSplits,
  kOptions
};
using OptionSet = std::vector<Option>;

bool has(const OptionSet& options, Option option) { return std::ranges::find(options, option) != options.end(); }

// A bias is of dense sequences.
bool goes_together(const OptionSet& options, bool packed) {
  if (has(options, kPages) && (has(options, kBias) || has(options, kUsedK))) return false;
  if (!has(options, kBias)) return true;
  return !packed && !has(options, kLeftpad);
}

template <class T, std::size_t kCount>
T one_of(Random& random, const std::array<T, kCount>& values) {
  return values[static_cast<std::size_t>(random.below(kCount))];
}

// Around the edges of tiles of 32, 64, 128 and 192 rows and keys.
constexpr std::array<std::int64_t, 20> kLengths = {0,   1,   2,   31, 33,  63,  64,  65,  100, 113,
                                                   127, 128, 129, 17, 191, 192, 193, 203, 5,   257};

void choose_shape(AttentionCase& c, Random& random) {
  constexpr std::array<std::int64_t, 10> kDims = {16, 40, 64, 64, 72, 96, 128, 128, 192, 256};
  constexpr std::array<std::array<std::int64_t, 2>, 5> kHeads = {{{1, 1}, {2, 2}, {4, 2}, {6, 2}, {5, 1}}};
  c.type = one_of(random, std::array{Type::kBF16, Type::kBF16, Type::kF16, Type::kF32});
  c.dim_qk = c.dim_v = one_of(random, kDims);
  if (random.below(5) == 0) c.dim_v = one_of(random, kDims);
  if (random.below(20) == 0) c.dim_qk = c.dim_v = random.below(2) == 0 ? 320 : 512;
  const std::array<std::int64_t, 2> heads = one_of(random, kHeads);
  c.q_heads = heads[0];
  c.kv_heads = heads[1];
}

void choose_lengths(AttentionCase& c, Random& random) {
  const std::int64_t batch = 1 + random.below(c.packed ? 4 : 2);
  const bool equal_q = !c.packed && !c.used_q, equal_k = !c.packed && !c.used_k && !c.leftpad;
  c.q_lens.clear();
  c.kv_lens.clear();
  for (std::int64_t b = 0; b < batch; ++b) {
    c.q_lens.push_back(equal_q && b > 0 ? c.q_lens[0] : one_of(random, kLengths));
    c.kv_lens.push_back(equal_k && b > 0 ? c.kv_lens[0] : one_of(random, kLengths));
  }
}

void set(AttentionCase& c, Option option, Random& random) {
  switch (option) {
    case kCausal: c.causal = true; return;
    case kWindow:
      c.window_left = random.below(3) == 0 ? -1 : one_of(random, kLengths);
      c.window_right = c.window_left >= 0 && random.below(3) == 0 ? -1 : one_of(random, kLengths);
      return;
    case kSoftcap: c.softcap = 0.5 + 20 * random.uniform(); return;
    case kSlopes: c.slopes = random.below(2) == 0 ? Slopes::kOfHeads : Slopes::kOfSequences; return;
    case kSinks: c.sinks = true; return;
    case kBias: c.bias = static_cast<Bias>(1 + random.below(4)); return;
    case kDropout: c.dropout = one_of(random, std::array{0.1, 0.5, 0.9}); return;
    case kUsedQ: c.used_q = true; return;
    case kUsedK: c.used_k = true; return;
    case kLeftpad: c.leftpad = true; return;
    case kScale: c.scale = one_of(random, std::array{0.3, -0.2, 0.0}); return;
    case kLayout: c.layout = static_cast<Layout>(1 + random.below(4)); return;
    case kNoLse: c.lse = false; return;
    case kPages:
      c.pages = static_cast<Pages>(1 + random.below(4));
      c.page_size = one_of(random, std::array<std::int64_t, 6>{1, 5, 16, 64, 128, 300});
      return;
    case kFp8:
      c.kv_type = Type::kE4M3;
      c.q_fp8 = c.type != Type::kF32 && random.below(2) == 0;
      c.scales = random.below(3) > 0;
      return;
    case kSplits: c.splits = one_of(random, std::array{2, 3, 7}); return;
    case kOptions: return;
  }
}

// Every set of `count` options from `first` on, after those of `before`.
void add_sets(std::vector<OptionSet>& sets, OptionSet before, int first, int count) {
  if (count == 0) {
    sets.push_back(before);
    return;
  }
  for (int option = first; option < kOptions; ++option) {
    OptionSet with = before;
    with.push_back(static_cast<Option>(option));
    add_sets(sets, with, option + 1, count - 1);
  }
}

}  // namespace

std::vector<AttentionCase> attention_combinations(int most, int rounds, std::uint64_t seed) {
  std::vector<OptionSet> sets;
  for (int count = 0; count <= most; ++count) add_sets(sets, {}, 0, count);
  std::vector<AttentionCase> cases;
  Random random(seed);
  const auto add = [&](const OptionSet& options, bool packed) {
    AttentionCase c;
    c.seed = random.next() % 1000000;
    c.name = "combination";
    c.packed = packed;
    choose_shape(c, random);
    for (const Option option : options) set(c, option, random);
    if (c.kv_type) c.name += "_fp8";  // which targets decline
    choose_lengths(c, random);
    if (c.layout == Layout::kProjection) c.dim_v = c.dim_qk;
    if (c.kv_type && c.layout == Layout::kOdd) c.layout = Layout::kGaps;  // rows of bytes begin at even addresses
    cases.push_back(c);
  };
  const auto is_late = [](const OptionSet& options) {  // the others are as they were before these could go together
    return has(options, kBias) && (has(options, kUsedQ) || has(options, kUsedK));
  };
  for (const bool late : {false, true}) {
    for (int round = 0; round < rounds; ++round) {
      for (const OptionSet& options : sets) {
        for (const bool packed : {false, true}) {
          if (is_late(options) == late && goes_together(options, packed)) add(options, packed);
        }
      }
    }
  }
  return cases;
}

}  // namespace flashport_test
