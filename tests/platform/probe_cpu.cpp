// The probe kernels of the CPU target that FLASHPORT_TARGET names, in the table of a CPU backend of their own.
#include "cpu/runtime/kernel_table.h"
#include "tests/platform/probe_backend.h"
#include "tests/platform/probe_kernels.h"

namespace flashport {
namespace FLASHPORT_TARGET {
namespace {

void visit(const void* params, std::int64_t block, std::int64_t grid, void*) {
  probe_visit(*static_cast<const ProbeParams*>(params), Block(block, grid));
}
void arrive(const void* params, std::int64_t block, std::int64_t grid, void*) {
  probe_arrive(*static_cast<const ProbeParams*>(params), Block(block, grid));
}
void wave(const void* params, std::int64_t block, std::int64_t grid, void*) {
  probe_wave(*static_cast<const ProbeParams*>(params), Block(block, grid));
}

}  // namespace
}  // namespace FLASHPORT_TARGET

namespace cpu_runtime {

#define FLASHPORT_TEXT_OF(name) #name
#define FLASHPORT_TEXT(name) FLASHPORT_TEXT_OF(name)

// It runs on processors that cannot run the target: under ASan GCC writes the entries there, by vectors.
#ifdef __x86_64__
[[gnu::target("no-avx")]]
#endif
std::span<const TargetKernels> kernel_tables() {
  using namespace FLASHPORT_TARGET;
  static const KernelEntry entries[] = {
      {"probe_visit/" FLASHPORT_TEXT(FLASHPORT_TARGET), KernelTag::kProbe, 1, 0, reinterpret_cast<const void*>(visit)},
      {"probe_arrive/" FLASHPORT_TEXT(FLASHPORT_TARGET), KernelTag::kProbe, 1, 0,
       reinterpret_cast<const void*>(arrive)},
      {"probe_wave/" FLASHPORT_TEXT(FLASHPORT_TARGET), KernelTag::kProbe, 1, 0, reinterpret_cast<const void*>(wave)},
  };
  static const TargetKernels tables[] = {{FLASHPORT_TEXT(FLASHPORT_TARGET), entries, std::size(entries)}};
  return tables;
}

}  // namespace cpu_runtime

const BackendAbi* probe_backend() { return cpu_backend(); }

}  // namespace flashport
