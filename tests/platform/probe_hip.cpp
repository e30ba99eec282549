// The probe kernels of probe_hip.hip, in the table of a HIP backend of their own. FLASHPORT_PROBE_CODE_OBJECT is the
// path of their code object, FLASHPORT_TARGET its target.
#include "hip/runtime/code_object.h"
#include "hip/runtime/kernel_table.h"
#include "tests/platform/probe.h"
#include "tests/platform/probe_backend.h"

asm(".pushsection .rodata\n"
    ".balign 4096\n"
    "flashport_probe_begin: .incbin \"" FLASHPORT_PROBE_CODE_OBJECT
    "\"\n"
    "flashport_probe_end:\n"
    ".popsection\n");
extern "C" const unsigned char flashport_probe_begin[];
extern "C" const unsigned char flashport_probe_end[];

namespace flashport {
namespace hip_runtime {

#define FLASHPORT_TEXT_OF(name) #name
#define FLASHPORT_TEXT(name) FLASHPORT_TEXT_OF(name)

std::span<const TargetKernels> kernel_tables() {
  static const CodeObject object = {flashport_probe_begin, flashport_probe_end};
  static const KernelSymbol visit = {"probe_visit_kernel", &object};
  static const KernelSymbol arrive = {"probe_arrive_kernel", &object};
  static const KernelSymbol wave = {"probe_wave_kernel", &object};
  static const KernelEntry entries[] = {
      {"probe_visit/" FLASHPORT_TEXT(FLASHPORT_TARGET), KernelTag::kProbe, kProbeThreads, 0, &visit},
      {"probe_arrive/" FLASHPORT_TEXT(FLASHPORT_TARGET), KernelTag::kProbe, kProbeThreads, 0, &arrive},
      {"probe_wave/" FLASHPORT_TEXT(FLASHPORT_TARGET), KernelTag::kProbe, kProbeThreads, 0, &wave},
  };
  static const TargetKernels tables[] = {{FLASHPORT_TEXT(FLASHPORT_TARGET), entries, std::size(entries)}};
  return tables;
}

}  // namespace hip_runtime
}  // namespace flashport

extern "C" const flashport::BackendAbi* flashport_backend();

const flashport::BackendAbi* flashport::probe_backend() { return flashport_backend(); }
