#include "cpu/runtime/device_target.h"

namespace flashport::cpu_runtime {

bool runs_here(std::string_view target) {
  if (target == "cpu_generic") return true;
#if defined(__x86_64__)
  // These ask cpuid, and xgetbv whether the operating system saves the wide registers. F16C, which not every compiler
  // can ask for by name, comes with AVX-512.
  if (target == "cpu_avx512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
  }
#endif
  return false;
}

const TargetKernels* choose_target(std::span<const TargetKernels> tables, const char* forced, std::string& error) {
  const std::string_view name = forced == nullptr ? "" : forced;
  const bool is_forced = !name.empty() && name != "cpu";
  const TargetKernels* chosen = nullptr;
  std::string usable;
  for (const TargetKernels& table : tables) {
    if (!runs_here(table.target)) continue;
    if (!is_forced || name == table.target) chosen = &table;
    usable += (usable.empty() ? "" : ", ") + std::string(table.target);
  }
  if (chosen == nullptr) {
    error = is_forced ? "FLASHPORT_CPU_TARGET must be cpu (the best) or a target that is compiled and runs on this "
                        "processor (" +
                            usable + "), got \"" + forced + "\""
                      : "no compiled CPU target runs on this processor";
  }
  return chosen;
}

}  // namespace flashport::cpu_runtime
