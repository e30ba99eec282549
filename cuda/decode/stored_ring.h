// Rows as they are stored, on their way from the waves that copy them to those that widen them (segment_producer.h): a
// ring of slots. A slot has the rows of a tile, of keys and of values in turn, each row with its factors behind it.
//
// Slots and rows are alike for a whole launch, as long as the longest row of any segment asks for: so copying and
// widening waves agree on where a row lies without telling each other. Rows that are what products read, 16-bit and
// aligned, are copied to their place in the ring of widened tiles, and take no room in a slot.
#pragma once

#include "common/device/decode/segments.h"
#include "common/device/kv/widen.h"
#include "cuda/arch/mma.h"
#include "cuda/decode/kv_pipeline.h"

namespace flashport::FLASHPORT_TARGET::decode {

inline constexpr int kUnitBytes = 16;  // of a copy

// Copies are of whole units of device memory: a row begins so many bytes into its first one.
FLASHPORT_DEVICE int shift_of(const char* data) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(data) % kUnitBytes);
}

FLASHPORT_DEVICE int factor_bytes(const KeyScales& scales) { return scales.dtype == DType::kFloat16 ? 2 : 4; }
FLASHPORT_DEVICE int factors_of_row(const KeyScales& scales, int dims) {
  return scales.dims_per_scale == 0 ? 1 : dims / scales.dims_per_scale;
}
// Whether the factors of a row lie apart.
FLASHPORT_DEVICE bool has_separate_factors(const KeyScales& scales) {
  return scales.dims_per_scale > 0 && scales.stride_group != 1;
}

// How rows lie in the slots of a launch.
struct StoredLayout {
  int pitch;  // bytes from row to row: an odd number of units, so that neighbouring rows begin in different banks
  int slots;  // of the ring
  bool has_factors;
  unsigned direct;  // rows that need no widening: bit 2 i for keys of segment i, and the next one for its values

  FLASHPORT_DEVICE bool is_direct(int segment, bool is_key) const {
    return (direct >> (2 * segment + (is_key ? 0 : 1)) & 1) != 0;
  }
};

template <DecodeConfig kCfg>
struct StoredRing {
  static constexpr int kRows = turn_keys(kCfg);
  static constexpr int kCopierRows = kRows / kSegmentCopiers;
  static constexpr int kMostSlots = 8;
  // Two places of the ring of widened tiles are too few for copies to be in flight there.
  static constexpr bool kHasDirectRows = KvRing<kCfg>::kTiles >= 4;
  static constexpr int kLongestRow = (2 * kCfg.shape.head_dim_qk + 16) + 32;  // of a 16-bit type, with its factor
  // What the ring of widened tiles leaves: two slots of 16-bit rows, but at head_dim 512, which has one.
  static constexpr int kBytes = kCfg.shape.head_dim_qk > 256   ? kRows * kLongestRow
                                : kCfg.shape.head_dim_qk > 128 ? 68 * 1024
                                : kCfg.shape.rows > 8          ? 128 * 1024
                                                               : 72 * 1024;
  static_assert(side_wideners(kCfg) * kWaveSize == kRows && kBytes >= kRows * kLongestRow);

  // A row's segment, -1 if there is no such key, and where it and its factors begin, in bytes from its place on.
  struct Row {
    std::int8_t segment;
    std::uint8_t begin;
    std::uint16_t factors;
  };
  alignas(16) char bytes[kBytes + kUnitBytes];  // what follows the last row may be read
  // The first units of rows, which a copying wave's lanes tell each other.
  struct alignas(16) FourUnits {
    const char* its[4];
  };
  FourUnits key_units[kRows / 4], value_units[kRows / 4];
  Row rows[kMostSlots][kRows];
  alignas(8) std::uint64_t ready[kMostSlots];
  std::uint64_t free[kMostSlots];

  FLASHPORT_DEVICE void init(int thread) {
    if (thread >= kMostSlots) return;
    // The copies of each lane, and what the wave has stored.
    mbarrier_init(&ready[thread], kSegmentCopiers * (kWaveSize + 1));
    mbarrier_init(&free[thread], 2 * side_wideners(kCfg));
  }
};

// The most units of a row that begins at multiples of `bits`' lowest bit.
FLASHPORT_DEVICE int most_units(std::uint64_t bits, int bytes) {
  const int lowest = static_cast<int>((bits | kUnitBytes) & -(bits | kUnitBytes));
  return (kUnitBytes - lowest + bytes + kUnitBytes - 1) / kUnitBytes;
}
template <DecodeConfig kCfg>
FLASHPORT_DEVICE StoredLayout stored_layout(const MixedDecodeParams& p) {
  using Ring = StoredRing<kCfg>;
  StoredLayout layout{};
  int most = 0;
  const auto include = [&](const CacheParams& cache, KvFormat format, const KeyScales& scales, int dims,
                           int bit) FLASHPORT_INLINE {
    if (Ring::kHasDirectRows && format == product_format(kCfg.shape, kCfg.shape.k_format) && scales.data == nullptr &&
        cache.copy_unit == kUnitBytes) {
      layout.direct |= 1u << bit;
      return;
    }
    const auto strides = static_cast<std::uint64_t>(cache.page_stride | cache.token_stride | cache.head_stride);
    int units = most_units(reinterpret_cast<std::uintptr_t>(cache.data) | strides, cache.row_bytes);
    if (scales.data != nullptr) {
      const int size = factor_bytes(scales);
      const auto elements = static_cast<std::uint64_t>(scales.stride_page | scales.stride_token | scales.stride_head);
      units += most_units(reinterpret_cast<std::uintptr_t>(scales.data) | elements * size,
                          factors_of_row(scales, dims) * size);
      layout.has_factors = true;
    }
    most = maximum(most, units);
  };
#pragma unroll 1
  for (int i = 0; i < p.segment_count; ++i) {
    const CacheSegment& s = p.segments[i];
    include(s.cache.k, s.k_format, s.k_scale, p.head_dim_qk, 2 * i);
    include(s.cache.v, s.v_format, s.v_scale, p.head_dim_v, 2 * i + 1);
  }
  layout.pitch = kUnitBytes * (most | 1);
  layout.slots = minimum(Ring::kBytes / (Ring::kRows * layout.pitch), Ring::kMostSlots);
  // A wave that copies to a place of the other ring waits for it, and must not be two phases ahead of its barrier: the
  // tile one round before has then been widened.
  if (layout.direct != 0) layout.slots = minimum(layout.slots, KvRing<kCfg>::kTiles);
  return layout;
}

// The slot that a wave comes to next, and the phase of its barriers.
struct SlotState {
  int slot = 0;
  unsigned phase = 0;
  FLASHPORT_DEVICE void next(int slots) {
    if (++slot < slots) return;
    slot = 0;
    phase ^= 1;
  }
};

// The rows of a slot, as widening waves read them.
template <DecodeConfig kCfg>
class StoredRows {
  using Ring = StoredRing<kCfg>;

 public:
  FLASHPORT_DEVICE StoredRows(const Ring& ring, const StoredLayout& layout, int slot)
      : ring_(ring), layout_(layout), slot_(slot), begin_(slot * (Ring::kRows * layout.pitch)) {}

  FLASHPORT_DEVICE int segment_of(int row) const { return ring_.rows[slot_][row].segment; }

  // The bytes of 32 values of a row, which begin at an even one. Words are asked for at multiples of 4 from byte
  // kAnchor on, so that all come from one address; one made of integers would no longer be known as one of shared
  // memory.
  template <int kAnchor>
  struct Block {
    const char *bytes, *words;  // words: a multiple of 4
    unsigned shift;             // in bits, of byte kAnchor there
    FLASHPORT_DEVICE unsigned half(int byte) const { return *reinterpret_cast<const std::uint16_t*>(bytes + byte); }
    FLASHPORT_DEVICE unsigned word(int byte) const {
      const auto* at = reinterpret_cast<const unsigned*>(words + (byte - kAnchor));
      return __funnelshift_r(at[0], at[1], shift);
    }
    // The word with its two middle bytes exchanged.
    FLASHPORT_DEVICE unsigned crossed_word(int byte) const {
      const auto* at = reinterpret_cast<const unsigned*>(words + (byte - kAnchor));
      return __byte_perm(at[0], at[1], shift == 0 ? 0x3120 : 0x5342);
    }
  };
  // From value `dim` on, a multiple of 32.
  template <KvFormat kFormat>
  FLASHPORT_DEVICE auto block(int row, int dim) const {
    constexpr KvFormatTrait kTrait = kv_format_trait(kFormat);
    constexpr int kAnchor = kTrait.scale_bytes % 4, kBytes = 32 / kTrait.block_values * kTrait.block_bytes;
    const int first = begin_ + row * layout_.pitch + ring_.rows[slot_][row].begin + dim / 32 * kBytes;
    return Block<kAnchor>{ring_.bytes + first, ring_.bytes + ((first + kAnchor) & ~3),
                          static_cast<unsigned>(first + kAnchor) * 8 & 16};
  }
  FLASHPORT_DEVICE float factor(int row, const KeyScales& scales, int dim) const {
    const int group = scales.dims_per_scale == 0 ? 0 : dim / scales.dims_per_scale;
    const char* factors = ring_.bytes + (begin_ + row * layout_.pitch + ring_.rows[slot_][row].factors);
    return scales.dtype == DType::kFloat16 ? to_float(reinterpret_cast<const Half*>(factors)[group])
                                           : reinterpret_cast<const float*>(factors)[group];
  }

 private:
  const Ring& ring_;
  const StoredLayout& layout_;
  int slot_, begin_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
