// The probe kernels of the HIP target that FLASHPORT_TARGET names: one code object, which probe_hip.cpp embeds.
#include "tests/platform/probe_kernels.h"

namespace flashport::FLASHPORT_TARGET {

extern "C" __global__ void __launch_bounds__(kProbeThreads) probe_visit_kernel(ProbeParams params) {
  probe_visit(params, Block(nullptr));
}
extern "C" __global__ void __launch_bounds__(kProbeThreads) probe_arrive_kernel(ProbeParams params) {
  __shared__ unsigned flag;
  probe_arrive(params, Block(&flag));
}
extern "C" __global__ void __launch_bounds__(kProbeThreads) probe_wave_kernel(ProbeParams params) {
  probe_wave(params, Block(nullptr));
}

}  // namespace flashport::FLASHPORT_TARGET
