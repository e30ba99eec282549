// Global memory named as such: a generic pointer would make flat loads. And zeros to read where there is nothing: a
// mask for what was read would have to wait for it.
#pragma once

#include "hip/target/block.h"

namespace flashport::FLASHPORT_TARGET {

using GlobalBytes = const char __attribute__((address_space(1)))*;

inline constexpr int kZeroBytes = 1024;  // the longest row
__device__ const unsigned g_zero_row[kZeroBytes / 4] = {};
FLASHPORT_DEVICE GlobalBytes zero_row() { return (GlobalBytes)(g_zero_row); }

// The same address, but in scalar registers: else that of each row would take two of every lane.
template <class T>
FLASHPORT_DEVICE T* scalar_address(T* address) {
  asm volatile("" : "+s"(address));
  return address;
}

}  // namespace flashport::FLASHPORT_TARGET
