// Copies of keys and values to LDS for attention where they may lie on pages, or be of any format: through registers on
// every target. next() stores what it loaded a step ago, loads the next, whose pages were asked for a step ago, and
// asks for the pages after that. Each group of waves copies its part. Where keys and values have one place in turn, so
// do their copies: next_keys() and next_values().
//
// Keys after the last one, and columns after those of a head, become zeros, and nothing is read where they would lie.
#pragma once

#include <type_traits>

#include FLASHPORT_ATTENTION_COPIES_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

template <AttentionConfig kCfg>
class PagedKvCopies {
  using Memory = AttentionMemory<kCfg>;

 public:
  static constexpr bool kInFlight = false;  // no copy is in flight to LDS when next() returns

  FLASHPORT_DEVICE PagedKvCopies(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), block_(block), memory_(memory) {}

  // From key tile `tile` of a work tile on; keys from `end` on are zeros. Stores the first tile of keys.
  FLASHPORT_DEVICE void begin(const WorkTile& work, int tile, int end) {
    const int head = work.head / p_.group_size;
    pages_ = block_.uniform(kv::page_list(p_.cache, work.seq));
    keys_.begin(keys_of(p_), pages_, work, block_, head, tile, end);
    values_.begin(values_of(p_), pages_, work, block_, head, tile, end);
    look_up_keys();
    load_keys();
    look_up_keys();
    look_up_values();
    store_keys();
  }
  // After the barrier that follows.
  FLASHPORT_DEVICE void start() {
    load_keys();
    if constexpr (!Memory::kInTurn) load_values();
    look_up_keys();
    if constexpr (!Memory::kInTurn) look_up_values();
  }
  // The next tile of keys, and the tile of values before it.
  FLASHPORT_DEVICE void next() {
    store_keys();
    store_values();
    start();
  }
  // The same, each after a barrier of its own.
  FLASHPORT_DEVICE void next_keys() {
    store_keys();
    load_values();
    look_up_values();
  }
  FLASHPORT_DEVICE void next_values() {
    store_values();
    start();
  }
  FLASHPORT_DEVICE static void await() {}

 private:
  FLASHPORT_DEVICE void look_up_keys() {
    if (copies_keys<kCfg>(block_)) keys_.look_up(p_.cache, pages_, block_);
  }
  FLASHPORT_DEVICE void look_up_values() {
    if (copies_values<kCfg>(block_)) values_.look_up(p_.cache, pages_, block_);
  }
  FLASHPORT_DEVICE void load_keys() {
    if (copies_keys<kCfg>(block_)) keys_.load(keys_of(p_), block_);
  }
  FLASHPORT_DEVICE void load_values() {
    if (copies_values<kCfg>(block_)) values_.load(values_of(p_), block_);
  }
  FLASHPORT_DEVICE void store_keys() {
    if (!copies_keys<kCfg>(block_)) return;
    keys_.store(memory_.keys, block_, keys_of(p_), Memory::kNextKeys);
  }
  FLASHPORT_DEVICE void store_values() {
    if (!copies_values<kCfg>(block_)) return;
    values_.store(memory_.values, block_, values_of(p_), Memory::kNextValues);
  }

  const AttentionParams& p_;
  const Block& block_;
  Memory& memory_;
  const std::int32_t* pages_;
  RowCopies<kCfg, KeyRows<kCfg.shape.head_dim_qk / 8, Memory::kKeyPlaces>> keys_;
  PagedValueCopies<kCfg> values_;
};

template <AttentionConfig kCfg>
using Copies = std::conditional_t<kCfg.shape.sources == KeySources::kRows, KvCopies<kCfg>, PagedKvCopies<kCfg>>;

}  // namespace flashport::FLASHPORT_TARGET::attention
