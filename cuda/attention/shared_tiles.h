// Two blocks of a cluster that have the same keys: those of two neighbouring query heads of one kv head, whose work
// tiles have the same queries. Each widens half of the rows of every tile, and copies them to the other.
//
//   ClusterMemory::free_keys, free_values   the other block's consumers have read its stage: copies may come there
//   Barriers::full of a stage               also counts the bytes of the rows that the other block copies
#pragma once

#include "cuda/arch/cluster.h"
#include "cuda/attention/memory.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The blocks that share tiles, of which this one is number `rank`: two, or one alone.
class Cluster {
 public:
  FLASHPORT_DEVICE explicit Cluster(bool shares) : blocks(shares ? 2 : 1), rank(shares ? cluster_rank() : 0) {}
  FLASHPORT_DEVICE bool shares() const { return blocks == 2; }
  FLASHPORT_DEVICE int other() const { return rank ^ 1; }

  const int blocks, rank;
};

// The rows of a tile that a block widens, in so many slots of each of its warps.
struct TilePart {
  FLASHPORT_DEVICE explicit TilePart(const Cluster& cluster)
      : slots(cuda_attention::kSlotsOfTile / cluster.blocks),
        rows(cuda_attention::kWarpsOfTile * slots * cuda_attention::kStoredRows),
        first_row(cluster.rank * rows) {}
  // The warp of row `row` of the part, and which of its slots of the tile.
  FLASHPORT_DEVICE int warp_of(int row) const {
    constexpr int kRows = cuda_attention::kStoredRows;
    return slots == 1 ? row / kRows : row / (kRows * cuda_attention::kSlotsOfTile);
  }
  FLASHPORT_DEVICE int slot_of(int row) const {
    return slots == 1 ? 0 : row / cuda_attention::kStoredRows % cuda_attention::kSlotsOfTile;
  }

  const int slots, rows, first_row;
};

// Takes work tiles, for both blocks of a pair together: the first one's lane counts, and tells the other's.
template <AttentionConfig kCfg>
class WorkCounter {
 public:
  // `count`: work tiles, or pairs of them.
  FLASHPORT_DEVICE WorkCounter(const AttentionParams& p, const Cluster& cluster, ClusterMemory<kCfg>& shared, int count)
      : p_(p), cluster_(cluster), shared_(shared), count_(static_cast<unsigned>(count)) {}

  // How many were taken before, by one lane.
  FLASHPORT_DEVICE int take() {
    unsigned taken = 0;
    if (cluster_.rank == 0) {
      taken = atomicAdd(p_.counter, 1u);
      // All blocks together add `count` times: the last of them clears the counter for the next launch.
      if (taken == count_ - 1) atomicExch(p_.counter, 0u);
      if (cluster_.shares()) tell(taken);
    } else {
      taken = hear();
    }
    phase_ ^= 1;
    return static_cast<int>(taken);
  }

 private:
  FLASHPORT_DEVICE void tell([[maybe_unused]] unsigned taken) const {
    if constexpr (may_share_tiles(kCfg)) {
      mbarrier_wait(&shared_.told.empty, phase_ ^ 1);
      store_to_block(address_in_block(&shared_.taken, cluster_.other()), taken,
                     address_in_block(&shared_.told.full, cluster_.other()));
    }
  }
  FLASHPORT_DEVICE unsigned hear() const {
    if constexpr (may_share_tiles(kCfg)) {
      mbarrier_expect(&shared_.told.full, sizeof shared_.taken);
      mbarrier_wait(&shared_.told.full, phase_);
      const unsigned taken = load_shared(shared_.taken);
      mbarrier_arrive_in_block(address_in_block(&shared_.told.empty, cluster_.other()));
      return taken;
    }
    return 0;
  }

  const AttentionParams& p_;
  const Cluster& cluster_;
  ClusterMemory<kCfg>& shared_;
  const unsigned count_;
  unsigned phase_ = 0;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
