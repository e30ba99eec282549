// The producer warps that bring boxes by TMA: of tensors, or of pages.
#pragma once

#include "cuda/attention/copies.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The lane that brings boxes of tensors.
template <AttentionConfig kCfg>
class BoxProducer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys;

 public:
  FLASHPORT_DEVICE BoxProducer(const AttentionParams& p, Memory& memory) : p_(p), memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
    if (copies.tiles == 0) return;
    const int kv_seq = p_.cu_seqlens_k == nullptr ? work.seq : 0, kv_head = work.head / p_.group_size;
    const int first_key = work.k_begin + copies.range.begin * kKeys;
    const auto keys = [&](int i) {
      bring_box(memory_.keys, memory_.key_barriers, tiles_ + i, p_.k_map, first_key + i * kKeys, kv_head, kv_seq);
    };
    keys(0);
    if (p_.has_q_map != 0) bring_query_box<kCfg>(p_, memory_, work, queries_);
    queries_ += 1;
#pragma unroll 1
    for (int i = 0; i < copies.tiles; ++i) {
      if (i + 1 < copies.tiles) keys(i + 1);
      if (i + 1 == copies.tiles && copies.last_by_rows) {
        hand_over_values<kCfg>(memory_, tiles_ + i, row_phase_);
      } else {
        bring_box(memory_.values, memory_.value_barriers, tiles_ + i, p_.v_map, first_key + i * kKeys, kv_head, kv_seq);
      }
    }
    tiles_ += copies.tiles;
  }

 private:
  const AttentionParams& p_;
  Memory& memory_;
  int queries_ = 0, tiles_ = 0;  // work tiles and key tiles that were brought so far
  unsigned row_phase_ = 0;
};

// A warp that brings boxes of pages, of keys and queries or of values. Lane b brings those of box_keys keys from key
// b * box_keys of a tile on, and leaves out those after the sequence's last key. A copy waits for its stage with all
// that boxes are told of in registers: page numbers are looked up a tile ahead.
template <AttentionConfig kCfg, bool kOfValues>
class PageProducer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys;

 public:
  FLASHPORT_DEVICE PageProducer(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), lane_(block.lane()), row_(block.lane() * p.box_keys), memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
    if (copies.tiles == 0) return;
    const bool hands_over = kOfValues && copies.last_by_rows;
    const int boxed = copies.tiles - (hands_over ? 1 : 0), kv_head = work.head / p_.group_size;
    const std::int32_t* pages = kv::page_list(p_.cache, work.seq);
    int key = copies.range.begin * kKeys + row_;  // the lane's first of a tile
    Box box = look_up(pages, key, work.kv_len);
#pragma unroll 1
    for (int i = 0; i < boxed; ++i) {
      const Box next = look_up(pages, key + kKeys, work.kv_len);
      const int boxes = __popc(__ballot_sync(~0u, has_box(key, work.kv_len)));
      if constexpr (kOfValues) {
        bring_boxes(memory_.values, memory_.value_barriers, tiles_ + i, p_.v_map, kv_head, box, boxes);
      } else {
        bring_boxes(memory_.keys, memory_.key_barriers, tiles_ + i, p_.k_map, kv_head, box, boxes);
        if (i == 0 && lane_ == 0) bring_query_box<kCfg>(p_, memory_, work, queries_);
      }
      box = next;
      key += kKeys;
    }
    if (hands_over && lane_ == 0) hand_over_values<kCfg>(memory_, tiles_ + boxed, row_phase_);
    __syncwarp();
    queries_ += 1;
    tiles_ += copies.tiles;
  }

 private:
  struct Box {
    int page, first;  // its first row in the page
  };
  FLASHPORT_DEVICE bool has_box(int key, int kv_len) const { return row_ < kKeys && key < kv_len; }
  FLASHPORT_DEVICE Box look_up(const std::int32_t* pages, int key, int kv_len) const {
    if (!has_box(key, kv_len)) return {0, 0};
    const kv::PageCoord at = kv::page_coord(p_.cache, pages, key);
    return {load_global(pages + at.page), at.offset};
  }

  // Copy number `copy` of its kind.
  template <int kPanels, int kCount>
  FLASHPORT_DEVICE void bring_boxes(RowPanels<kPanels, kKeys> (&stages)[kCount], Barriers (&barriers)[kCount], int copy,
                                    const TensorMap& map, int kv_head, const Box& box, int boxes) const {
    const int stage = copy % kCount;
    const int bytes = boxes * p_.box_keys * 128 * kPanels;
    unsigned char* to = stages[stage].x[0] + row_ * 128;
    await_empty(barriers, copy);
    if (lane_ == 0) mbarrier_expect(&barriers[stage].full, bytes);
    __syncwarp();
    if (lane_ >= boxes) return;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      copy_box(to + panel * RowPanels<kPanels, kKeys>::kPanelSize, &map, panel * kPanelColumns, box.first, kv_head,
               box.page, &barriers[stage].full);
    }
  }

  const AttentionParams& p_;
  const int lane_, row_;  // the lane's first row of a tile
  Memory& memory_;
  int queries_ = 0, tiles_ = 0;  // work tiles and key tiles that were brought so far
  unsigned row_phase_ = 0;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
