// A compile-time value as an argument, by which a lambda is compiled once for each value.
#pragma once

namespace flashport {

template <auto kValue>
struct Constant {
  constexpr operator decltype(kValue)() const { return kValue; }
};

}  // namespace flashport
