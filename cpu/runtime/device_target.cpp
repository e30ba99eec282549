#include "cpu/runtime/device_target.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flashport::cpu_runtime {
namespace {

#if defined(__x86_64__)
// These ask cpuid, and xgetbv whether the operating system saves the wide registers.
bool has_avx2() {
  constexpr unsigned kF16c = 1u << 29;  // leaf 1, ecx; not every compiler can ask for it by name
  unsigned eax, ebx, ecx, edx;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kF16c) != 0;
}

// F16C comes with AVX-512.
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}

bool has_vnni() {
  constexpr unsigned kAvx512Vnni = 1u << 11;  // leaf 7, ecx (Intel SDM volume 2, CPUID)
  unsigned eax, ebx, ecx, edx;
  return has_avx512() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kAvx512Vnni) != 0;
}

// Linux gives a process the tile registers when it asks for them (Documentation/arch/x86/xstate.rst).
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // leaf 7, edx (Intel SDM volume 2, CPUID)
  constexpr unsigned kAvx512Bf16 = 1u << 5;                     // leaf 7.1, eax
  constexpr int kRequestPermission = 0x1023, kTileData = 18;    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0 || (eax & kAvx512Bf16) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

bool runs_here(std::string_view target) {
  if (target == "cpu_generic") return true;
#if defined(__x86_64__)
  if (target == "cpu_avx2") return has_avx2();
  if (target == "cpu_avx512") return has_avx512();
  if (target == "cpu_vnni") return has_vnni();
  if (target == "cpu_amx") return has_vnni() && has_amx();
#endif
  return false;
}

const TargetKernels* choose_target(std::span<const TargetKernels> tables, const char* forced, std::string& error) {
  const std::string_view name = forced == nullptr ? "" : forced;
  const bool is_forced = !name.empty() && name != "cpu";
  const TargetKernels* chosen = nullptr;
  std::string compiled, usable;
  for (const TargetKernels& table : tables) {
    compiled += (compiled.empty() ? "" : ", ") + std::string(table.target);
    if (!runs_here(table.target)) continue;
    if (!is_forced || name == table.target) chosen = &table;
    usable += (usable.empty() ? "" : ", ") + std::string(table.target);
  }
  if (usable.empty()) {
    error = "no compiled CPU target (" + compiled + ") runs on this processor: build with FLASHPORT_TARGETS=cpu";
  } else if (chosen == nullptr) {
    error = "FLASHPORT_CPU_TARGET must be cpu (the best) or a target that is compiled and runs on this processor (" +
            usable + "), got \"" + forced + "\"";
  }
  return chosen;
}

}  // namespace flashport::cpu_runtime
