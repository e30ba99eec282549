// The attention kernels of sm90a that kernels_test.cpp runs.
#pragma once

#include <vector>

#include "common/host/kernel_entry.h"

namespace flashport::machine {

void add_plain_kernels(std::vector<KernelEntry>& table);
void add_kernels_with_options(std::vector<KernelEntry>& table);
void add_kernels_that_widen(std::vector<KernelEntry>& table);

}  // namespace flashport::machine
