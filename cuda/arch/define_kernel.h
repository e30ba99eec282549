// The KernelEntry `<symbol>_entry` of a kernel of a CUDA target, for the kernels.h of each operation, whose macros
// define the __global__ function `symbol`. What follows `bytes` are more members of the entry.
#pragma once

#include "common/host/kernel_entry.h"

#define FLASHPORT_DEFINE_ENTRY(symbol, name, its_tag, block_threads, bytes, ...)       \
  extern "C" const KernelEntry symbol##_entry;                                         \
  const KernelEntry symbol##_entry = {.key = name,                                     \
                                      .tag = its_tag,                                  \
                                      .threads = block_threads,                        \
                                      .shared_bytes = bytes,                           \
                                      .handle = reinterpret_cast<const void*>(symbol), \
                                      __VA_ARGS__};
