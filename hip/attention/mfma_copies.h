// Copies of keys and values to LDS for attention on CDNA3, by the waves of a group, in two steps: load_*() brings a
// group's part of a tile to registers, and store_*(), later, to LDS. Values are transposed on the way.
//
// LDS has two tiles of keys and two of values, which stores fill in turn. Keys after the last one, and columns after
// those of a head, become zeros: nothing else than a head's own values may meet a weight of 0.
#pragma once

#include "common/device/attention/work.h"
#include "hip/arch/mfma.h"
#include "hip/attention/mfma_layout.h"

namespace flashport::FLASHPORT_TARGET::attention {

inline constexpr int kGroupWaves = 4;  // one a SIMD
inline constexpr int kWaveRows = 32;

constexpr int groups_of(const AttentionConfig& config) { return config.tuning.rows / (kGroupWaves * kWaveRows); }

template <AttentionConfig kCfg>
struct AttentionMemory {
  static constexpr int kKeyBytes = kCfg.tuning.keys * kCfg.shape.head_dim_qk * 2;  // of a tile
  static constexpr int kValueBytes = kCfg.tuning.keys * kCfg.shape.head_dim_v * 2;
  alignas(kLineBytes) unsigned char keys[2 * kKeyBytes];
  alignas(kLineBytes) unsigned char values[2 * kValueBytes];
};

template <AttentionConfig kCfg>
class KvCopies {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kThreads = kGroupWaves * kWaveSize;
  static constexpr int kKeys = kCfg.tuning.keys;
  static constexpr int kOwnKeys = kKeys / groups_of(kCfg);  // of a tile, that a group copies
  static constexpr int kKeyVectors = kCfg.shape.head_dim_qk / 8, kValueVectors = kKeys / 8;
  static constexpr int kLoadKeys = kThreads / kKeyVectors, kKeyLoads = kOwnKeys / kLoadKeys;
  // A thread transposes 4 keys x 4 columns of values, a wave 32 x 32 at a time.
  static constexpr int kColumnBlocks = kCfg.shape.head_dim_v / 32, kKeyBlocks = kOwnKeys / 32;
  static constexpr int kBlocks = kColumnBlocks * kKeyBlocks / kGroupWaves;  // that a wave transposes
  static constexpr int kBlockStep = 32 * kGroupWaves;                       // columns from one to the next
  static_assert(kLoadKeys % 8 == 0 && kKeyLoads * kLoadKeys == kOwnKeys);
  static_assert(kBlocks * kGroupWaves == kColumnBlocks * kKeyBlocks && (kBlocks == 1 || kKeyBlocks == 1));

 public:
  FLASHPORT_DEVICE KvCopies(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), block_(block), memory_(memory) {}

  // From key tile `tile` of a work tile on; keys from `end` on are zeros.
  FLASHPORT_DEVICE void begin(const WorkTile& work, int tile, int end) {
    const int thread = block_.thread() % kThreads, lane = thread % kWaveSize;
    const int group = block_.wave() / kGroupWaves, wave = block_.wave() % kGroupWaves;
    const int head = work.head / p_.group_size;
    const std::int64_t first = work.k_begin + std::int64_t{tile} * kKeys;
    keys_left_ = values_left_ = end - tile * kKeys;

    const int vector = thread % kKeyVectors;
    const int key = group * kOwnKeys + thread / kKeyVectors;
    next_keys_ = (GlobalBytes)p_.k.data + 2 * (work.seq * p_.k.stride_seq + (first + key) * p_.k.stride_token +
                                               head * p_.k.stride_head + vector * 8);
    key_ = vector * 8 < p_.head_dim_qk ? key : kNever;
    keys_to_ = key_offset<kKeyVectors>(key, vector);

    const int column = wave % kColumnBlocks * 32 + lane % 8 * 4;
    const int four = (group * kKeyBlocks + wave / kColumnBlocks) * 8 + lane / 8;
    const int value_key = first_key_of_four(four);
    next_values_ = (GlobalBytes)p_.v.data + 2 * (work.seq * p_.v.stride_seq + (first + value_key) * p_.v.stride_token +
                                                 head * p_.v.stride_head + column);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) value_key_[i] = column + i * kBlockStep < p_.head_dim_v ? value_key : kNever;
    values_to_ = value_offset<kValueVectors>(column, four / 2) + four % 2 * 8;
  }

  FLASHPORT_DEVICE void load_keys() {
    GlobalBytes from = next_keys_;
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) {
      keys_[i] = load_words<4>(key_ + i * kLoadKeys < keys_left_ ? from : zero_row());
      from += 2 * kLoadKeys * p_.k.stride_token;
    }
    next_keys_ += 2 * kKeys * p_.k.stride_token;
    keys_left_ -= kKeys;
  }
  FLASHPORT_DEVICE void load_values() {
    GlobalBytes row = next_values_;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const bool live = value_key_[i] + j < values_left_;
        values_[i][j] = load_words<2>(live ? row + 2 * i * kBlockStep : zero_row());
      }
      row += 2 * p_.v.stride_token;
    }
    next_values_ += 2 * kKeys * p_.v.stride_token;
    values_left_ -= kKeys;
  }

  FLASHPORT_DEVICE void store_keys() {
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) {
      *reinterpret_cast<Words4*>(memory_.keys + keys_to_ + i * kLoadKeys * kKeyVectors * kVectorBytes) = keys_[i];
    }
    keys_to_ ^= Memory::kKeyBytes;
  }
  FLASHPORT_DEVICE void store_values() {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const Words2(&row)[4] = values_[i];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int word = c / 2;
        const Words2 four =
            c % 2 == 0 ? Words2{low_halves(row[0][word], row[1][word]), low_halves(row[2][word], row[3][word])}
                       : Words2{high_halves(row[0][word], row[1][word]), high_halves(row[2][word], row[3][word])};
        const int to = next_column_offset<kValueVectors>(values_to_, c);
        *reinterpret_cast<Words2*>(memory_.values + to + i * kBlockStep * kValueVectors * kVectorBytes) = four;
      }
    }
    values_to_ ^= Memory::kValueBytes;
  }

 private:
  static constexpr int kNever = 1 << 30;  // a key that no tile has

  const AttentionParams& p_;
  const Block& block_;
  Memory& memory_;
  int keys_left_, values_left_;  // from the next tile's first one on
  GlobalBytes next_keys_, next_values_;
  int key_, value_key_[kBlocks];  // of a tile, the thread's first
  int keys_to_, values_to_;       // byte offsets
  Words4 keys_[kKeyLoads];
  Words2 values_[kBlocks][4];
};

}  // namespace flashport::FLASHPORT_TARGET::attention
