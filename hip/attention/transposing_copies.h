// Copies of keys and values to LDS for attention on CDNA3 and RDNA3, through registers: next() stores what it loaded a
// step ago and loads the next. Each group of waves copies its part of the keys. Values are transposed on the way. Where
// keys and values have one place in turn, so do their copies: next_keys() and next_values().
//
// Keys after the last one, and columns after those of a head, become zeros: nothing but a head's own values may meet a
// weight of 0.
#pragma once

#include "hip/attention/row_copies.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The values that a thread transposes.
template <AttentionConfig kCfg, class Base = FourSplit<kCfg.tuning.keys / copying_groups(kCfg), kCfg.shape.head_dim_v,
                                                       kWaveSize, kGroupThreads>>
struct ValueSplit : Base {
  static constexpr int kVectors = kCfg.tuning.keys / 8;
  using Base::kBlocks;

  // The first four keys, of the tile's.
  FLASHPORT_DEVICE static int four(const Block& block, int lane) {
    constexpr int kOwnFours = kCfg.tuning.keys / copying_groups(kCfg) / 4;
    return copying_group<kCfg>(block) * kOwnFours + Base::four(block.wave() % kGroupWaves, lane);
  }

  // `to`: the offset of the first column and four.
  FLASHPORT_DEVICE static void store(const Words2 (&values)[kBlocks][4], unsigned char* tiles, int to) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const Words2(&row)[4] = values[i];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const unsigned two[4] = {row[0][c / 2], row[1][c / 2], row[2][c / 2], row[3][c / 2]};
        const Words2 four = c % 2 == 0 ? Words2{low_halves(two[0], two[1]), low_halves(two[2], two[3])}
                                       : Words2{high_halves(two[0], two[1]), high_halves(two[2], two[3])};
        const int first = next_column_offset<kVectors>(to, c);
        const int at = further_four_offset<kVectors>(first, Base::column_step(i), Base::key_step(i));
        *reinterpret_cast<Words2*>(tiles + at) = four;
      }
    }
  }
};

template <AttentionConfig kCfg>
class KvCopies {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys;
  static constexpr int kOwnKeys = kKeys / copying_groups(kCfg);  // of a tile, that a group copies
  static constexpr int kKeyVectors = kCfg.shape.head_dim_qk / 8;
  using KeySplit = RowSplit<kKeyVectors, kOwnKeys, kGroupThreads>;
  using KeyLayout = KeyRows<kKeyVectors, Memory::kKeyPlaces>;
  static constexpr int kKeyParts = KeySplit::kParts, kKeyLoads = KeySplit::kRowLoads;
  using Split = ValueSplit<kCfg>;
  static constexpr int kBlocks = Split::kBlocks;

 public:
  static constexpr bool kInFlight = false;  // no copy is in flight to LDS when next() returns

  FLASHPORT_DEVICE KvCopies(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), block_(block), memory_(memory) {}

  // From key tile `tile` of a work tile on; keys from `end` on are zeros. Stores the first tile of keys.
  FLASHPORT_DEVICE void begin(const WorkTile& work, int tile, int end) {
    const int thread = block_.thread() % kGroupThreads, lane = thread % kWaveSize;
    const int group = copying_group<kCfg>(block_), wave = block_.wave() % kGroupWaves;
    const int head = work.head / p_.group_size;
    const std::int64_t first = work.k_begin + std::int64_t{tile} * kKeys;
    keys_left_ = values_left_ = end - tile * kKeys;

    const int vector = KeySplit::vector(thread);
    const int key = group * kOwnKeys + KeySplit::row(thread);
    next_keys_ = first_row(p_.cache.k, work, first + key, head) + vector * kVectorBytes;
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
      key_[part] = (vector + part * KeySplit::kSide) * 8 < p_.head_dim_qk ? key : kNever;
    }
    keys_to_ = KeyLayout::offset(key, vector);

    const int column = Split::column(wave, lane), four = Split::four(block_, lane);
    const int value_key = first_key_of_four(four);
    next_values_ = first_row(p_.cache.v, work, first + value_key, head) + 2 * column;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const bool live = column + Split::column_step(i) < p_.head_dim_v && !Split::is_idle(wave);
      value_key_[i] = live ? value_key + Split::key_step(i) : kNever;
    }
    values_to_ = four_offset<Split::kVectors>(column, four);

    load_keys();
    store_keys();
  }
  // After the barrier that follows.
  FLASHPORT_DEVICE void start() {
    load_keys();
    if constexpr (!Memory::kInTurn) load_values();
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
  }
  FLASHPORT_DEVICE void next_values() {
    store_values();
    start();
  }
  FLASHPORT_DEVICE static void await() {}

 private:
  static constexpr int kNever = 1 << 30;  // a key that no tile has

  FLASHPORT_DEVICE void load_keys() {
    if (!copies_keys<kCfg>(block_)) return;
    GlobalBytes from = next_keys_;
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) {
#pragma unroll
      for (int part = 0; part < kKeyParts; ++part) {
        const bool live = key_[part] + i * KeySplit::kLoadRows < keys_left_;
        keys_[i][part] = load_words<4>(live ? from + part * KeySplit::kSide * kVectorBytes : zero_row());
      }
      from += KeySplit::kLoadRows * p_.cache.k.token_stride;
    }
    next_keys_ += kKeys * p_.cache.k.token_stride;
    keys_left_ -= kKeys;
  }
  FLASHPORT_DEVICE void load_values() {
    if (!copies_values<kCfg>(block_)) return;
    GlobalBytes row = next_values_;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const bool live = value_key_[i] + j < values_left_;
        const std::int64_t step = 2 * Split::column_step(i) + Split::key_step(i) * p_.cache.v.token_stride;
        values_[i][j] = load_words<2>(live ? row + step : zero_row());
      }
      row += p_.cache.v.token_stride;
    }
    next_values_ += kKeys * p_.cache.v.token_stride;
    values_left_ -= kKeys;
  }

  FLASHPORT_DEVICE void store_keys() {
    if (!copies_keys<kCfg>(block_)) return;
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) {
#pragma unroll
      for (int part = 0; part < kKeyParts; ++part) {
        const int at = KeyLayout::further(keys_to_, i * KeySplit::kLoadRows, part * KeySplit::kSide);
        *reinterpret_cast<Words4*>(memory_.keys + at) = keys_[i][part];
      }
    }
    keys_to_ ^= Memory::kNextKeys;
  }
  FLASHPORT_DEVICE void store_values() {
    if (!copies_values<kCfg>(block_) || Split::is_idle(block_.wave() % kGroupWaves)) return;
    Split::store(values_, memory_.values, values_to_);
    values_to_ ^= Memory::kNextValues;
  }

  const AttentionParams& p_;
  const Block& block_;
  Memory& memory_;
  int keys_left_, values_left_;  // from the next tile's first one on
  GlobalBytes next_keys_, next_values_;
  int key_[kKeyParts], value_key_[kBlocks];  // of a tile, the thread's first
  int keys_to_, values_to_;                  // byte offsets
  Words4 keys_[kKeyLoads][kKeyParts];
  Words2 values_[kBlocks][4];
};

// Copies of values that may lie on pages, transposed on the way.
template <AttentionConfig kCfg>
class PagedValueCopies {
  using Split = ValueSplit<kCfg>;
  static constexpr int kBlocks = Split::kBlocks;
  using Values = StoredValues<kCfg.shape, 4>;
  static_assert(Split::kWaveKeys <= kWaveSize);

 public:
  FLASHPORT_DEVICE void begin(const KvSide& side, const std::int32_t* pages, const WorkTile& work, const Block& block,
                              int head, int tile, int end) {
    places_.begin(side, pages, work, head, tile, end);
    const int lane = block.thread() % kWaveSize;
    to_ = four_offset<Split::kVectors>(Split::column(wave_of(block), lane), Split::four(block, lane));
  }
  FLASHPORT_DEVICE void look_up(const PagedCache& cache, const std::int32_t* pages, const Block& block) {
    const int own = static_cast<unsigned>(block.thread()) % Split::kWaveKeys;
    places_.look_up(cache, pages, first_key_of_four(Split::four(block, 0)) + own);
  }
  FLASHPORT_DEVICE void load(const KvSide& side, const Block& block) {
    if (Split::is_idle(wave_of(block))) return;
    const RowOffsets offsets = places_.offsets(side.cache), factors = places_.factor_offsets(side.scales);
    const unsigned own = first_key_of_four(static_cast<unsigned>(block.thread()) % kWaveSize / 8);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const unsigned first = column(block, i), byte = Values::byte(first, side.format, side.columns);
      const bool is_live = first < static_cast<unsigned>(side.columns);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values_[i][j] = load_words<2>(offsets.address(own + Split::key_step(i) + j, byte, is_live));
      }
      factors_[i].load(factors, side.scales, first, is_live, [&](int j) { return own + Split::key_step(i) + j; });
    }
  }
  FLASHPORT_DEVICE void store(unsigned char* tiles, const Block& block, const KvSide& side, int next_tile) {
    if (Split::is_idle(wave_of(block))) return;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      Values::widen(values_[i], factors_[i], column(block, i), side.format, side.scales, side.columns);
    }
    Split::store(values_, tiles, to_);
    to_ ^= next_tile;
  }

 private:
  FLASHPORT_DEVICE static int wave_of(const Block& block) { return block.wave() % kGroupWaves; }
  // The thread's first one of block i.
  FLASHPORT_DEVICE static unsigned column(const Block& block, int i) {
    return Split::column(wave_of(block), static_cast<unsigned>(block.thread()) % kWaveSize) + Split::column_step(i);
  }
  RowPlaces<kCfg.tuning.keys, Values::kHasFactors> places_;
  int to_;  // byte offset in LDS
  Words2 values_[kBlocks][4];
  RowFactors<Values::kHasFactors, 4> factors_[kBlocks];
};

// Reads the left operand V^T [32, 16] of MFMA from transposed values.
template <AttentionConfig kCfg>
struct ValueReads {
  static constexpr int kVectors = kCfg.tuning.keys / 8;

  // Byte offset of what the lane reads of the 32 columns of block `block`, keys 0 to 15.
  FLASHPORT_DEVICE static int first(int lane, int block) {
    return value_offset<kVectors>(lane % 32, lane / 32) + block * 32 * kVectors * kVectorBytes;
  }
  FLASHPORT_DEVICE static Words4 read(const unsigned char* values, int first, int pair, int block) {
    const int offset = pair_offset(first, pair) + block * 32 * kVectors * kVectorBytes;
    return *reinterpret_cast<const Words4*>(values + offset);
  }
};

}  // namespace flashport::FLASHPORT_TARGET::attention
