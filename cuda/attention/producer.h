// The producer warps: one takes work tiles, the others bring their queries, keys and values to shared memory.
//
// TMA brings whole boxes: a tile of a tensor, or of a page what falls into a tile, which is eight rows or more
// (box_producers.h). Keys and values of fewer bits come the same way as they are stored, where a kernel has memory for
// that, and are widened by warps of their own (stored_boxes.h). All else comes by rows, of which each of the warps
// copies its share (row_producers.h): keys and values on smaller pages, or not aligned to 16 bytes. So do the last
// values of a sequence, with zeros after them, where the tensor has other rows there: TMA would bring those, and 0
// times NaN is NaN. Rows of keys and queries that are not the sequence's own do no harm: their scores are hidden, their
// outputs not stored.
//
// With two stages the time from an empty stage to the next copy into it is part of the loop's, and an instruction of a
// lone warp takes some five clocks: so a warp brings boxes in a loop that has nothing to decide, of pages one warp
// those of keys and another those of values, and of biases one of their own. Biases that TMA cannot read come by rows,
// which another warp shares where boxes bring keys and values. Warps that produce have few registers, because those
// that consume have many: so each of them has one task, but for that one.
#pragma once

#include "common/device/attention/tile_scheduler.h"
#include "cuda/attention/bias_producers.h"
#include "cuda/attention/box_producers.h"
#include "cuda/attention/shared_tiles.h"
#include "cuda/attention/stored_boxes.h"
#include "cuda/attention/widening_producer.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The warp that takes work tiles and tells the other warps.
template <AttentionConfig kCfg>
FLASHPORT_DEVICE void send_work_tiles(const AttentionParams& p, const Block& block, AttentionMemory<kCfg>& memory) {
  TileScheduler<kCfg.tuning.rows, kCfg.tuning.keys> scheduler(p, block);
  const int count = scheduler.count();
  PipelineState<kWorkStages> pipe;
  // fill(the work tile, which all lanes write alike)
  const auto send = [&](const auto& fill) {
    Barriers& barriers = memory.work_barriers[pipe.stage];
    mbarrier_wait(&barriers.empty, pipe.phase ^ 1);
    fill(memory.work[pipe.stage]);
    __syncwarp();
    if (block.lane() == 0) mbarrier_arrive(&barriers.full);
    pipe.next();
  };
  const Cluster cluster(shares_tiles<kCfg>(p));
  WorkCounter<kCfg> counter(p, cluster, memory.cluster, count / cluster.blocks);
  int index = static_cast<int>(blockIdx.x);  // a pair has those of two neighbouring heads
  while (index < count) {
    send([&](WorkTile& work) { scheduler.tile(index, work); });
    int taken = 0;
    if (block.lane() == 0) taken = counter.take();
    index = static_cast<int>(gridDim.x) + __shfl_sync(~0u, taken, 0) * cluster.blocks + cluster.rank;
  }
  send([](WorkTile& work) { work.seq = -1; });
}

// What each of the producer warps does.
template <AttentionConfig kCfg>
FLASHPORT_DEVICE void produce(const AttentionParams& p, const Block& block, AttentionMemory<kCfg>& memory) {
  const auto for_each_work_tile = [&](auto& producer, bool works) FLASHPORT_INLINE {
    WorkTiles<kCfg> tiles(memory);
    while (true) {
      const WorkTile& work = tiles.receive();
      if (work.seq < 0) break;
      if constexpr (requires { producer.bring(work); }) {
        if (works) producer.bring(work);
      }
      tiles.release();
    }
  };
  const bool is_aligned = p.cache.k.copy_unit == 16 && p.cache.v.copy_unit == 16;
  if (block.wave() == 0) {
    send_work_tiles<kCfg>(p, block, memory);
  } else if (stored_bytes(kCfg) > 0 && p.k_box.row_bytes != 0) {
    if constexpr (stored_bytes(kCfg) > 0) {
      if (block.wave() >= cuda_attention::kWideningWarps) {
        RowWidener<kCfg> widener(p, block, memory);
        for_each_work_tile(widener, true);
      } else if (block.wave() == 1) {
        StoredBoxProducer<kCfg> boxes(p, block, memory);
        for_each_work_tile(boxes, true);
      } else {
        QueryProducer<kCfg> queries(p, block, memory, 2);
        for_each_work_tile(queries, true);
      }
    }
  } else if (stored_bytes(kCfg) > 0 && p.has_kv_maps == 0) {
    if constexpr (stored_bytes(kCfg) > 0) {
      WideningProducer<kCfg> rows(p, block, memory);
      for_each_work_tile(rows, true);
    }
  } else if (copies_aligned_rows(kCfg) && p.has_kv_maps == 0 && is_aligned) {
    if constexpr (copies_aligned_rows(kCfg)) {
      AlignedRowProducer<kCfg> rows(p, block, memory);
      for_each_work_tile(rows, true);
    }
  } else if (block.wave() > 3) {  // three warps are enough for boxes
    for_each_work_tile(block, false);
  } else if (brings_bias(kCfg) && p.bias.has_map != 0 && block.wave() == 3) {
    if constexpr (brings_bias(kCfg)) {
      BiasBoxProducer<kCfg> biases(p, memory);
      for_each_work_tile(biases, block.lane() == 0);
    }
  } else if (brings_bias(kCfg) && (p.has_kv_maps == 0 || block.wave() > 1)) {
    if constexpr (brings_bias(kCfg)) {
      BiasAndRowProducer<kCfg> rows(p, block, memory);
      for_each_work_tile(rows, true);
    }
  } else if (block.wave() == 2 || p.has_kv_maps == 0 || (block.wave() == 3 && p.cache.table == nullptr)) {
    RowProducer<kCfg> rows(p, block, memory);
    for_each_work_tile(rows, true);
  } else if (has(kCfg.shape.sources, KeySources::kPages) && block.wave() == 3) {
    PageProducer<kCfg, true> values(p, block, memory);
    for_each_work_tile(values, true);
  } else if (has(kCfg.shape.sources, KeySources::kPages) && p.cache.table != nullptr) {
    PageProducer<kCfg, false> keys(p, block, memory);
    for_each_work_tile(keys, true);
  } else {
    BoxProducer<kCfg> boxes(p, memory);
    for_each_work_tile(boxes, block.lane() == 0);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
