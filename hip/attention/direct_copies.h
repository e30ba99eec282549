// Copies of keys and values to LDS for attention on CDNA4, without a stop in registers: buffer_load_dwordx4 ... lds,
// which the waves of one group, the block's last, issue and wait for two intervals later. The compiler does not know
// these loads: else it would wait for them before every read of LDS.
//
// A wave's load fills 64 neighbouring vectors, so that the lanes choose the vectors whose places those are. A group's
// loads fill kParts times 256 vectors that are whole rows, then the rows after those in the same way. A tile that
// has other keys after the last one, which must be zeros, comes through registers, and so do tensors whose rows are not
// aligned to 16 bytes or lie too far apart for 32-bit offsets.
#pragma once

#include "hip/attention/row_copies.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The copies of tiles of keys or of values: rows of kVectors vectors. kPlace(row, place) is the vector that has a
// place.
template <int kVectors, int kRows, auto kPlace>
class TileCopies {
  static constexpr int kParts = RowSplit<kVectors, kRows, kGroupThreads>::kParts;
  static constexpr int kLoadRows = kGroupThreads * kParts / kVectors, kLoads = kRows / kLoadRows * kParts;
  static_assert(kLoadRows % 8 == 0 && kLoads * kGroupThreads == kRows * kVectors);

 public:
  // `from`: the first row's; `count`: rows that there are.
  FLASHPORT_DEVICE void begin(GlobalBytes from, std::int64_t stride, int count, int columns, int thread) {
    from_ = (const void*)from;
    stride_ = stride;
    left_ = count;
    to_ = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int vector = vector_at(thread + part * kGroupThreads);
      is_live_[part] = vector * 8 < columns;
      offset_[part] = row_at(thread + part * kGroupThreads) * static_cast<int>(stride_) + vector * kVectorBytes;
    }
    is_direct_ = (reinterpret_cast<std::uintptr_t>(from_) | static_cast<std::uint64_t>(stride_)) % 16 == 0 &&
                 stride_ >= 0 && stride_ * kRows < std::int64_t{1} << 31;
  }
  // The next tile, to one of the two buffers in turn, which are `next_tile` bytes apart.
  FLASHPORT_DEVICE void next(const Block& block, unsigned char* to, int columns, int next_tile) {
    if (left_ <= 0) return;
    if (__builtin_expect(is_direct_ && left_ >= kRows, 1)) {
      load_direct(to + to_, block.wave() % kGroupWaves);
    } else {
      load_through_registers(to + to_, columns, block.thread() % kGroupThreads);
    }
    from_ = static_cast<const char*>(from_) + kRows * stride_;
    left_ -= kRows;
    to_ ^= next_tile;
  }

 private:
  FLASHPORT_DEVICE void load_direct(unsigned char* to, int wave) const {
    using Resource = unsigned __attribute__((ext_vector_type(4)));
    const auto base = reinterpret_cast<std::uint64_t>(from_);
    const Resource resource = {static_cast<unsigned>(base), static_cast<unsigned>(base >> 32) & 0xffffu, ~0u, 0x20000u};
    const auto shared =
        static_cast<unsigned>(reinterpret_cast<std::uintptr_t>((unsigned char __attribute__((address_space(3)))*)to));
    const unsigned step = kLoadRows * static_cast<unsigned>(stride_);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!is_live_[part]) continue;
#pragma unroll
      for (int i = part; i < kLoads; i += kParts) {
        asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\tbuffer_load_dwordx4 %1, %2, %3 offen lds" ::"s"(
                         shared + (wave + i * kGroupWaves) * kWaveSize * kVectorBytes),
                     "v"(offset_[part]), "s"(resource), "s"(i / kParts * step)
                     : "memory");
      }
    }
  }
  FLASHPORT_DEVICE void load_through_registers(unsigned char* to, int columns, int thread) const {
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      const int place = thread + part * kGroupThreads, vector = vector_at(place);
      GlobalBytes from = (GlobalBytes)from_ + row_at(place) * stride_ + vector * kVectorBytes;
      const int rows = vector * 8 < columns ? left_ : 0;
#pragma unroll 1
      for (int row = row_at(place); row < kRows; row += kLoadRows) {
        const Words4 words = load_words<4>(row < rows ? from : zero_row());
        *reinterpret_cast<Words4*>(to + (row * kVectors + place % kVectors) * kVectorBytes) = words;
        from += kLoadRows * stride_;
      }
    }
  }
  // What has a place of a tile.
  FLASHPORT_DEVICE static int row_at(int place) { return place / kVectors; }
  FLASHPORT_DEVICE static int vector_at(int place) { return kPlace(place / kVectors, place % kVectors); }

  const void* from_;      // the next tile's first row
  std::int64_t stride_;   // bytes from row to row
  int left_;              // rows from the next tile's first on
  int to_;                // byte offset of the buffer
  int offset_[kParts];    // of the thread's first vectors from the tile's first row
  bool is_live_[kParts];  // whether the head has them
  bool is_direct_;        // whether offsets of a tile are aligned and have 32 bits
};

template <AttentionConfig kCfg>
class KvCopies {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys;
  static constexpr int kKeyVectors = kCfg.shape.head_dim_qk / 8, kValueVectors = kCfg.shape.head_dim_v / 8;

 public:
  static constexpr bool kInFlight = true;  // after next(), until await() and a barrier

  // Dims after those of a head, which no load brings, are zeros.
  FLASHPORT_DEVICE KvCopies(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), block_(block), memory_(memory) {
    if (p.head_dim_qk == kCfg.shape.head_dim_qk) return;
    for (int i = block.thread(); i < static_cast<int>(sizeof(memory.keys)) / kVectorBytes; i += block.threads()) {
      reinterpret_cast<Words4*>(memory.keys)[i] = Words4{};
    }
    sync_shared();
  }

  FLASHPORT_DEVICE void begin(const WorkTile& work, int tile, int end) {
    if (!copies_here()) return;
    const int head = work.head / p_.group_size, thread = block_.thread() % kGroupThreads;
    const std::int64_t first = work.k_begin + std::int64_t{tile} * kKeys;
    const CacheParams &keys = p_.cache.k, &values = p_.cache.v;
    keys_.begin(first_row(keys, work, first, head), keys.token_stride, end - tile * kKeys, p_.head_dim_qk, thread);
    values_.begin(first_row(values, work, first, head), values.token_stride, end - tile * kKeys, p_.head_dim_v, thread);
    keys_.next(block_, memory_.keys, p_.head_dim_qk, Memory::kNextKeys);
    await();
  }
  FLASHPORT_DEVICE void start() { next(); }
  FLASHPORT_DEVICE void next() {
    if (!copies_here()) return;
    keys_.next(block_, memory_.keys, p_.head_dim_qk, Memory::kNextKeys);
    values_.next(block_, memory_.values, p_.head_dim_v, Memory::kNextValues);
  }
  FLASHPORT_DEVICE void await() const {
    if (copies_here()) await_stores();  // and loads
  }

 private:
  FLASHPORT_DEVICE bool copies_here() const {
    constexpr int kGroups = groups_of(kCfg);
    return kGroups == 1 || block_.wave() >= (kGroups - 1) * kGroupWaves;
  }

  const AttentionParams& p_;
  const Block& block_;
  Memory& memory_;
  TileCopies<kKeyVectors, kKeys, key_place<kKeyVectors, Memory::kKeyPlaces>> keys_;
  TileCopies<kValueVectors, kKeys, value_place<kValueVectors>> values_;
};

// Copies of values that may lie on pages.
template <AttentionConfig kCfg>
using PagedValueCopies = RowCopies<kCfg, ValueRows<kCfg.shape.head_dim_v / 8>>;

// Reads the left operand V^T [32, 16] from values [keys, DV].
template <AttentionConfig kCfg>
struct ValueReads {
  static constexpr int kVectors = kCfg.shape.head_dim_v / 8;

  // Byte offset of what the lane reads first of 32 columns of block `block`, a multiple of four or 0.
  FLASHPORT_DEVICE static int first(int lane, int block) {
    return value_read_step<kVectors>(value_read_offset<kVectors>(lane), block, 0, 0);
  }
  FLASHPORT_DEVICE static Words4 read(const unsigned char* values, int first, int pair, int block) {
    const Words2 low = read_transposed(values + value_read_step<kVectors>(first, block, pair, 0));
    const Words2 high = read_transposed(values + value_read_step<kVectors>(first, block, pair, 1));
    return {low[0], low[1], high[0], high[1]};
  }

 private:
  FLASHPORT_DEVICE static Words2 read_transposed(const unsigned char* from) {
    using Four = short __attribute__((ext_vector_type(4)));
    return __builtin_bit_cast(Words2,
                              __builtin_amdgcn_ds_read_tr16_b64_v4i16((Four __attribute__((address_space(3)))*)from));
  }
};

}  // namespace flashport::FLASHPORT_TARGET::attention
