// The decode kernels of sm90a that kernels_test.cpp and segments_kernel_test.cpp run.
#pragma once

#include <vector>

#include "common/host/kernel_entry.h"

namespace flashport::machine {

void add_native_kernels(std::vector<KernelEntry>& table);
void add_kernels_of_any_formats(std::vector<KernelEntry>& table);
void add_kernels_of_segments(std::vector<KernelEntry>& table);

}  // namespace flashport::machine
