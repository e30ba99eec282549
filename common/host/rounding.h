// Division and multiples of counts and sizes, none of which is negative.
#pragma once

#include <cstdint>

namespace flashport {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t align_up(std::int64_t value, std::int64_t to) { return ceil_div(value, to) * to; }

}  // namespace flashport
