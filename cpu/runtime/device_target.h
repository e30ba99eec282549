// Which of the compiled CPU targets this machine runs.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "common/host/kernel_table.h"

namespace flashport::cpu_runtime {

// True if the processor and the operating system offer every instruction set that `target` is compiled with
// (cmake/targets.cmake).
[[nodiscard]] bool runs_here(std::string_view target);

// The last of `tables` that runs here: cmake/targets.cmake lists the widest last. A name in `forced` (the value of
// FLASHPORT_CPU_TARGET; null, empty or "cpu": none) is taken instead. Null, and `error` set, if the forced one is
// unknown or does not run here.
[[nodiscard]] const TargetKernels* choose_target(std::span<const TargetKernels> tables, const char* forced,
                                                 std::string& error);

}  // namespace flashport::cpu_runtime
