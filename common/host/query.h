// Answers to supports() and which_kernel(), of what finds the kernel that serves a query: find(reason) gives null, and
// the reason, where there is none.
#pragma once

#include <string>

#include <flashport/error.h>
#include <flashport/types.h>

#include "common/host/devices.h"

namespace flashport {

template <class Find>
Support support_answer(const Find& find) {
  Support support;
  support.supported = find(support.reason) != nullptr;
  return support;
}

template <class Find>
std::string kernel_answer(const Find& find) {
  std::string reason;
  const KernelEntry* kernel = find(reason);
  if (kernel == nullptr) throw NotSupportedError("which_kernel: " + reason);
  return kernel->key;
}

}  // namespace flashport
