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
extern "C" __global__ void __launch_bounds__(kProbeThreads) probe_scan_kernel(ProbeParams params) {
  __shared__ ScanScratch<kProbeThreads> scratch;
  probe_scan(params, Block(nullptr), scratch);
}

}  // namespace flashport::FLASHPORT_TARGET
