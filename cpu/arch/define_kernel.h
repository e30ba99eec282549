// Makes a kernel of a CPU target out of the algorithm in common/device, for the kernels.h of each operation. A macro
// defines the function `symbol`, a cpu_runtime::Kernel, and its KernelEntry `<symbol>_entry` for the generated kernel
// table: data and no code, as the table is read on processors that cannot run the target.
#pragma once

#include "common/host/kernel_entry.h"

// What follows `call` is the kernel's shape, if it has one.
#define FLASHPORT_DEFINE_KERNEL(symbol, name, its_tag, Params, Shared, call, ...)                   \
  extern "C" void symbol(const void* data, std::int64_t index, std::int64_t count, void* scratch) { \
    const auto& params = *static_cast<const Params*>(data);                                         \
    const Block block(index, count);                                                                \
    [[maybe_unused]] auto& shared = *static_cast<Shared*>(scratch);                                 \
    call;                                                                                           \
  }                                                                                                 \
  extern "C" const KernelEntry symbol##_entry;                                                      \
  const KernelEntry symbol##_entry = {.key = name,                                                  \
                                      .tag = its_tag,                                               \
                                      .threads = 1,                                                 \
                                      .shared_bytes = static_cast<int>(sizeof(Shared)),             \
                                      .handle = reinterpret_cast<const void*>(&symbol),             \
                                      __VA_OPT__(.shape = {__VA_ARGS__})};
