// Pointers and loads of the global address space; a generic pointer would make flat loads. The loads take any address,
// because the hardware reads unaligned vectors. zero_row() is what a lane reads where there is no row: a mask on the
// result would have to wait for the load.
#pragma once

#include "hip/arch/block.h"

namespace flashport::FLASHPORT_TARGET {

using GlobalBytes = const char __attribute__((address_space(1)))*;

inline constexpr int kZeroBytes = 1024;  // the longest row
__device__ const unsigned g_zero_row[kZeroBytes / 4] = {};
FLASHPORT_DEVICE GlobalBytes zero_row() { return (GlobalBytes)(g_zero_row); }

template <int kWords>
struct __attribute__((packed)) UnalignedWords {
  unsigned __attribute__((ext_vector_type(kWords))) words;
};
template <int kWords>
FLASHPORT_DEVICE auto load_words(GlobalBytes from) {
  return reinterpret_cast<const UnalignedWords<kWords> __attribute__((address_space(1)))*>(from)->words;
}
template <int kWords>
FLASHPORT_DEVICE void load_words(unsigned (&to)[kWords], GlobalBytes from) {
  const auto words = load_words<kWords>(from);
#pragma unroll
  for (int i = 0; i < kWords; ++i) to[i] = words[i];
}
FLASHPORT_DEVICE std::uint16_t load_half_word(GlobalBytes from) {
  using Anywhere = std::uint16_t __attribute__((aligned(1)));
  return *reinterpret_cast<const Anywhere __attribute__((address_space(1)))*>(from);
}

// Waits for a word that nothing else uses.
FLASHPORT_DEVICE void await_word(unsigned word) { asm volatile("" ::"v"(word)); }

// The same address, but in scalar registers: otherwise each row's address would take two vector registers.
template <class T>
FLASHPORT_DEVICE T* scalar_address(T* address) {
  asm volatile("" : "+s"(address));
  return address;
}

}  // namespace flashport::FLASHPORT_TARGET
