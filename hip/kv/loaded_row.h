// Rows of a cache as neighbouring lanes load them. A lane takes kCount values (8 or 4) of a row from a multiple of
// kCount on, by one load of 2 kCount bytes, which values of 16 bits fill. Values of fewer bits need fewer bytes: a load
// has more than the lane's own, and begins early enough to end with the row or with the block. Nothing outside a row is
// read.
//
// Formats of blocks have a head: a scale and, in some, a minimum and fifth bits. It lies in the loads of some of the
// lanes of a block, and the others take it from there (lane_of):
//
//   format          kCount  a lane's load                                     head           codes
//   q8_0            8       the first lane's: the block's first 16 bytes      first of four  its own
//   q8_0            4       the first lane's: the block's first 8 bytes       first of eight its own
//   of 4, 5 bits    8       even lanes': the block's first 16 bytes; odd      even           its own
//                           lanes': its last 16
//   of 4, 5 bits    4       low four lanes': their codes; high four lanes',   high four      low four
//                           whose codes are the same bytes: the first 8
//
// Nothing here is of the device, so tests run it on a host. `Lanes`: words of this lane's load and of others'.
#pragma once

#include "common/device/kv/widen.h"

namespace flashport::FLASHPORT_TARGET::kv {

// A lane of those with the same block, in whose load a word is.
enum class LaneOf { kFirstOfFour, kFirstOfEight, kEven, kLowFour, kHighFour };

constexpr unsigned lane_of(LaneOf which, unsigned lane) {
  switch (which) {
    case LaneOf::kFirstOfFour: return lane & ~3u;
    case LaneOf::kFirstOfEight: return lane & ~7u;
    case LaneOf::kEven: return lane & ~1u;
    case LaneOf::kLowFour: return lane & ~4u;
    default: return (lane & 4u) != 0 ? lane : lane ^ 7u;
  }
}

// The values of a lane as the routines of formats read a row (common/device/kv/widen.h): from value kBase(first) on.
template <KvFormat kFormat, int kCount>
class LoadedRow {
  static constexpr KvFormatTrait kTrait = kv_format_trait(kFormat);
  static constexpr unsigned kBlock = kTrait.block_values, kBlockBytes = kTrait.block_bytes;
  static constexpr unsigned kLoad = 2 * kCount;
  static constexpr bool kIsWide = kFormat == KvFormat::kFp16 || kFormat == KvFormat::kBf16;
  static constexpr bool kIsShort = kInBlocks<kFormat> && kFormat != KvFormat::kQ8_0;
  static constexpr bool kHasFifthBits = kFormat == KvFormat::kQ5_0 || kFormat == KvFormat::kQ5_1;
  static constexpr unsigned kCodesAt = kTrait.scale_bytes + (kHasFifthBits ? 4 : 0);  // of a block
  static constexpr unsigned kShare = kIsShort ? kBlock / 2 : kBlock;  // values of a block whose codes lie side by side
  static_assert(kCount == 8 || kCount == 4);

 public:
  // The byte of a row of `dims` values where the load of those from `first` on begins.
  FLASHPORT_DEVICE static unsigned begin(unsigned first, unsigned dims) {
    const unsigned block = first / kBlock * kBlockBytes, at = first % kBlock;
    if constexpr (kIsWide) {
      return 2 * first;
    } else if constexpr (kFormat == KvFormat::kInt4) {
      return first / 2 / kLoad * kLoad;
    } else if constexpr (!kInBlocks<kFormat>) {
      return first > dims - kLoad ? dims - kLoad : first;
    } else if constexpr (kIsShort && kCount == 8) {
      return block + (at % kShare == 0 ? 0 : kBlockBytes - kLoad);
    } else {
      constexpr unsigned kLast = kBlockBytes - kLoad;
      const unsigned codes = kCodesAt + at < kLast ? kCodesAt + at : kLast;
      return block + ((kIsShort ? at >= kShare : at == 0) ? 0 : codes);
    }
  }

  // kBase: a value whose place in its block's codes is that of `first`, as far as its routine asks.
  FLASHPORT_DEVICE static unsigned base(unsigned first) { return kIsShort ? first & kShare : 0; }

  template <class Lanes>
  FLASHPORT_DEVICE LoadedRow(const Lanes& lanes, unsigned first, unsigned dims) {
    const unsigned at = first % kBlock;
    if constexpr (kIsWide) {
      FLASHPORT_UNROLL(4)
      for (int i = 0; i < kCount / 2; ++i) codes_[i] = lanes.word(i);
    } else if constexpr (kFormat == KvFormat::kInt4) {
      const unsigned place = first / 8 % (kLoad / 4);
      const unsigned low = place % 2 == 0 ? lanes.word(0) : lanes.word(1);
      if constexpr (kCount == 8) {
        codes_[0] = place < 2 ? low : place % 2 == 0 ? lanes.word(2) : lanes.word(3);
      } else {
        codes_[0] = low >> (first % 8 * 4);
      }
    } else if constexpr (kIsShort && kCount == 4) {
      head_ = lanes.template take<LaneOf::kHighFour>([](const auto& own, unsigned)
                                                         FLASHPORT_INLINE { return own.word(0); });
      codes_[0] = lanes.template take<LaneOf::kLowFour>([](const auto& own, unsigned of) FLASHPORT_INLINE {
        return of % kShare > kShare - kLoad ? own.word(1) : own.word(0);
      });
      if constexpr (kHasFifthBits) {
        take_fifth_bits(lanes.template take<LaneOf::kHighFour>([](const auto& own, unsigned)
                                                                   FLASHPORT_INLINE { return own.word(1); }),
                        at);
      }
    } else {
      constexpr LaneOf kHead = kIsShort ? LaneOf::kEven : kCount == 8 ? LaneOf::kFirstOfFour : LaneOf::kFirstOfEight;
      const unsigned end = kInBlocks<kFormat> ? kShare : dims, place = kInBlocks<kFormat> ? at % kShare : first;
      FLASHPORT_UNROLL(2)
      for (int i = 0; i < kCount / 4; ++i) {
        codes_[i] = place > end - kLoad ? lanes.word(kCount / 4 + i) : lanes.word(i);
        if constexpr (kInBlocks<kFormat>) {
          const unsigned early = word_at(lanes, kCodesAt + 4 * i);
          codes_[i] = place == 0 ? early : codes_[i];
        }
      }
      if constexpr (kInBlocks<kFormat>) {
        head_ = lanes.template take<kHead>([](const auto& own, unsigned) FLASHPORT_INLINE { return own.word(0); });
      }
      if constexpr (kHasFifthBits) {
        take_fifth_bits(
            lanes.template take<kHead>([](const auto& own, unsigned) FLASHPORT_INLINE { return own.word(1); }), at);
      }
    }
  }

  FLASHPORT_DEVICE unsigned half(int byte) const {
    if constexpr (kInBlocks<kFormat>) return byte == 0 ? head_ & 0xffffu : head_ >> 16;
    return codes_[byte / 4] >> byte % 4 * 8 & 0xffffu;
  }
  FLASHPORT_DEVICE unsigned word(int byte) const {
    if (kHasFifthBits && byte == kTrait.scale_bytes) return fifth_bits_;
    return codes_[(byte - (kInBlocks<kFormat> ? static_cast<int>(kCodesAt) : 0)) / 4];
  }

 private:
  // From an even byte of the load on.
  template <class Lanes>
  FLASHPORT_DEVICE static unsigned word_at(const Lanes& lanes, int byte) {
    if (byte % 4 == 0) return lanes.word(byte / 4);
    return pick_bytes<0x05040302>(lanes.word(byte / 4 + 1), lanes.word(byte / 4));
  }
  // `second`: of the block's words.
  FLASHPORT_DEVICE void take_fifth_bits(unsigned second, unsigned at) {
    fifth_bits_ = (kTrait.scale_bytes == 4 ? second : pick_bytes<0x05040302>(second, head_)) >> at % kShare;
  }

  unsigned codes_[kIsWide ? kCount / 2 : kCount / 4];
  unsigned head_ = 0, fifth_bits_ = 0;  // fifth bits from the lane's first value on, as `base` counts
};

// The byte where a load begins, of a format that is known at run time.
template <int kCount>
FLASHPORT_DEVICE unsigned load_begin(KvFormat format, unsigned first, unsigned dims) {
  unsigned begin = 0;
  with_format(format, [&](auto constant) FLASHPORT_INLINE {
    constexpr KvFormat kFormat = constant;
    begin = LoadedRow<kFormat, kCount>::begin(first, dims);
  });
  return begin;
}

}  // namespace flashport::FLASHPORT_TARGET::kv
