// Two blocks of a cluster, which reach each other's shared memory: what is there has the address of the block's own,
// with the other's rank in it.
#pragma once

#include "cuda/arch/tma.h"

namespace flashport::FLASHPORT_TARGET {

// 0 or 1.
FLASHPORT_DEVICE int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of both blocks. What they have written before, to shared memory of either, is seen after it.
FLASHPORT_DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}
FLASHPORT_DEVICE unsigned address_in_block(const void* own, int rank) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
}

// The arrival has the scope of a block, and mbarrier_wait() too. This is enough, because it only lets the other block's
// copies overwrite what products have read, and publishes no stores; copies and words bring an order of their own. With
// the scope of a cluster an arrival first waits for all stores of the thread, and each wait empties L1.
FLASHPORT_DEVICE void mbarrier_arrive_in_block(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// What one thread writes to the other block's shared memory, whose bytes are counted at that block's `barrier`: a copy
// from this block's, by the asynchronous proxy, or a word.
FLASHPORT_DEVICE void copy_to_block(unsigned to, const void* from, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(shared_address(from)), "r"(bytes), "r"(barrier)
               : "memory");
}
FLASHPORT_DEVICE unsigned load_shared(const unsigned& word) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared_address(&word)) : "memory");
  return x;
}
FLASHPORT_DEVICE void store_to_block(unsigned to, unsigned word, unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(word),
               "r"(barrier)
               : "memory");
}

}  // namespace flashport::FLASHPORT_TARGET
