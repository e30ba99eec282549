// In place of CUDA's own.
#pragma once

#include "cuda/arch/tma.h"

namespace flashport::FLASHPORT_TARGET {

inline int cluster_rank() { return machine::cluster_rank(); }
inline void cluster_sync() { machine::cluster_barrier(); }
inline unsigned address_in_block(const void* own, int rank) {
  return machine::address_in_block(shared_address(own), rank);
}
inline void mbarrier_arrive_in_block(unsigned barrier) { machine::arrive_in_block(barrier); }
inline void copy_to_block(unsigned to, const void* from, int bytes, unsigned barrier) {
  if ((to | shared_address(from) | static_cast<unsigned>(bytes)) % 16 != 0) machine::fail("a copy that is not aligned");
  machine::bring_to_block(to, bytes, [=](char* place) { std::memcpy(place, from, bytes); }, barrier, true);
}
inline void store_to_block(unsigned to, unsigned word, unsigned barrier) {
  machine::bring_to_block(
      to, sizeof word, [=](char* place) { std::memcpy(place, &word, sizeof word); }, barrier, false);
}
inline unsigned load_shared(const unsigned& word) { return word; }

}  // namespace flashport::FLASHPORT_TARGET
