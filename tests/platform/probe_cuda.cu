// The probe kernels of the CUDA target that FLASHPORT_TARGET names, in the table of a CUDA backend of their own.
#include "cuda/runtime/kernel_table.h"
#include "tests/platform/probe_backend.h"
#include "tests/platform/probe_kernels.h"

namespace flashport {
namespace FLASHPORT_TARGET {
namespace {

__global__ void __launch_bounds__(kProbeThreads) visit(const __grid_constant__ ProbeParams params) {
  begin_kernel();
  probe_visit(params, Block(nullptr));
}
__global__ void __launch_bounds__(kProbeThreads) arrive(const __grid_constant__ ProbeParams params) {
  __shared__ unsigned flag;
  begin_kernel();
  probe_arrive(params, Block(&flag));
}
// More dynamic shared memory than a kernel gets without asking.
constexpr int kSharedBytes = 100 * 1024;
__global__ void __launch_bounds__(kProbeThreads) wave(const __grid_constant__ ProbeParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  begin_kernel();
  static_cast<volatile unsigned char&>(memory[kSharedBytes - 1]) = 1;
  probe_wave(params, Block(nullptr));
}

}  // namespace
}  // namespace FLASHPORT_TARGET

namespace cuda_runtime {

#define FLASHPORT_TEXT_OF(name) #name
#define FLASHPORT_TEXT(name) FLASHPORT_TEXT_OF(name)

std::span<const TargetKernels> kernel_tables() {
  using namespace FLASHPORT_TARGET;
  static const KernelEntry entries[] = {
      {"probe_visit/" FLASHPORT_TEXT(FLASHPORT_TARGET), KernelTag::kProbe, kProbeThreads, 0,
       reinterpret_cast<const void*>(visit)},
      {"probe_arrive/" FLASHPORT_TEXT(FLASHPORT_TARGET), KernelTag::kProbe, kProbeThreads, 0,
       reinterpret_cast<const void*>(arrive)},
      {"probe_wave/" FLASHPORT_TEXT(FLASHPORT_TARGET), KernelTag::kProbe, kProbeThreads, kSharedBytes,
       reinterpret_cast<const void*>(wave)},
  };
  static const TargetKernels tables[] = {{FLASHPORT_TEXT(FLASHPORT_TARGET), entries, std::size(entries)}};
  return tables;
}

}  // namespace cuda_runtime
}  // namespace flashport

extern "C" const flashport::BackendAbi* flashport_backend();

const flashport::BackendAbi* flashport::probe_backend() { return flashport_backend(); }
