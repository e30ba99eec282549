#include <algorithm>
#include <cstring>

#include "tests/device/machine/state.h"

namespace flashport::machine {
namespace {

Block& block_of_rank(int rank) {
  const std::int64_t index = me().block->index - rank_of(*me().block) + rank;
  const auto found = std::find_if(g_machine.blocks.begin(), g_machine.blocks.end(),
                                  [&](const auto& block) { return block->index == index && block->alive > 0; });
  if (rank >= cluster_blocks() || found == g_machine.blocks.end()) fail("a block of the cluster that is not there");
  return **found;
}
Block& block_of(unsigned address) { return block_of_rank(static_cast<int>(address >> kRankShift)); }

char* pointer_of(Block& block, unsigned address, int bytes) {
  const unsigned offset = (address & ((1u << kRankShift) - 1)) - kSharedWindow;
  if (offset + bytes > block.shared_bytes) fail("an address outside of shared memory");
  return block.shared + offset;
}

}  // namespace

int cluster_rank() { return rank_of(*me().block); }

void cluster_barrier() {
  Block& first = block_of_rank(0);
  if (++first.at_cluster < cluster_blocks() * g_machine.launch->threads) return wait(State::kAtCluster, &first);
  first.at_cluster = 0;
  for (int rank = 0; rank < cluster_blocks(); ++rank) {
    for (Lane& lane : block_of_rank(rank).lanes) {
      if (lane.state == State::kAtCluster) wake(lane);
    }
  }
}

unsigned address_in_block(unsigned own, int rank) {
  return (own & ((1u << kRankShift) - 1)) | static_cast<unsigned>(rank) << kRankShift;
}

void arrive_in_block(unsigned barrier) {
  Block& block = block_of(barrier);
  count_at(block, reinterpret_cast<std::uint64_t*>(pointer_of(block, barrier, sizeof(std::uint64_t))), 1, 0);
}

void bring_to_block(unsigned to, int bytes, std::function<void(char*)> read, unsigned barrier, bool reads_shared) {
  Block& block = block_of(to);
  if (&block != &block_of(barrier)) fail("a copy that another block's barrier counts");
  char* const place = pointer_of(block, to, bytes);
  std::memset(place, kPoison, bytes);
  g_machine.boxes.push_back({&block, place, bytes, std::move(read),
                             reinterpret_cast<std::uint64_t*>(pointer_of(block, barrier, sizeof(std::uint64_t))),
                             reads_shared ? me().block : nullptr});
}

}  // namespace flashport::machine
