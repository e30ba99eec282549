// A backend of CUDA whose device is machine.h, with the kernels that a test gives it: public calls run whole kernels.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/host/backend_abi.h"

namespace flashport::machine {

using ModelKernel = void (*)(const void* params, void* shared);

// What a test says of launches, and learns.
struct ModelState {
  std::vector<KernelEntry> kernels;
  int resident = 2;                   // blocks of a launch that take turns
  std::uint64_t seed = 1;             // of the lots of the next launch
  std::vector<std::string> launched;  // keys
  // What the kernel before a launch does last: a thread that waits for that kernel calls it first, where it is set.
  std::function<void()> kernel_before;
};
ModelState& model();

// In place of the CUDA backend, for the target sm90a.
void install_model();

}  // namespace flashport::machine
