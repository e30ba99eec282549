// TMA, Hopper's copies of boxes of a tensor from device to shared memory by one thread. What a box has outside of the
// tensor becomes zeros.
#pragma once

#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET {

// Arrives, and lets the phase complete only after `bytes` more bytes have landed.
FLASHPORT_DEVICE void mbarrier_expect(std::uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

FLASHPORT_DEVICE void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// The box of a tensor with four axes from (x, y, z, w) on; its bytes are counted at `barrier`.
FLASHPORT_DEVICE void copy_box(void* to, const void* map, int x, int y, int z, int w, std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
      : "memory");
}

// Makes the initialised barriers visible to TMA.
FLASHPORT_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

}  // namespace flashport::FLASHPORT_TARGET
