// Random combinations of attention's options: every option alone and every pair and triple, dense and packed.
#pragma once

#include <vector>

#include "tests/ops/attention/call.h"

namespace flashport_test {

// `most` options at a time, each set of them `rounds` times with other shapes, types and lengths.
[[nodiscard]] std::vector<AttentionCase> attention_combinations(int most, int rounds, std::uint64_t seed);

}  // namespace flashport_test
