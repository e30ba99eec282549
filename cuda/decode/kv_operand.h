// The element type of K and V as a loader policy: how stored rows in shared memory become the A operands of mma.sync,
// 16 keys x 16 dims of K and, transposed, 16 columns x 16 keys of V. All come by ldmatrix: 16-bit caches as they are,
// narrow ones (bytes and blocks) in the order of lane_maps.h and widened to fp16 in registers. long_header_operand.h
// has the blocks of q4_1, q5_0 and q5_1.
//
// Values of blocks widen to fp16 by moves and masks alone: their bits become those of a subnormal number, which has too
// much and is of a unit of its own (BlockWidening). What is too much is taken off by products with constants, and
// scales are not applied here (tiles.h).
#pragma once

#include "cuda/arch/words.h"
#include "cuda/decode/block_widening.h"
#include "cuda/decode/kv_pipeline.h"
#include "cuda/decode/lane_maps.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The factors of an operand's blocks: of keys g and g + 8, or of the pairs of keys 2 c, 2 c + 1 and 2 c + 8, 2 c + 9
// for values. A minimum is for the products with what is too much: -(d + m / middle), where that is `middle` for each
// code.
struct KeyFactors {
  float scale[2], minimum[2];
};
struct ValueFactors {
  unsigned scale[2], minimum[2];
};

// Codes in the low or the high halves of bytes 0 and 2 of a word.
inline constexpr unsigned kLowCodes = 0x000f000f, kHighCodes = 0x00f000f0;

// Values of q4_0 and q4_1, two neighbouring bytes of codes of two keys: the first tile whole bytes, the second high
// codes.
FLASHPORT_DEVICE void whole_bytes_and_high_codes(unsigned (&a)[2][4], int half, unsigned two) {
  a[0][2 * half] = two & 0x00ff00ffu;
  a[0][2 * half + 1] = __byte_perm(two, 0, 0x4341);
  for (int i = 2 * half; i < 2 * half + 2; ++i) a[1][i] = a[0][i] & kHighCodes;
}

// halves[0] and halves[1]: the numbers, plus 128, that the low nibbles of bytes 0 and 1 and of bytes 2 and 3 stand for
// in iq4_nl. halves[2] and halves[3]: those of the high nibbles.
FLASHPORT_DEVICE void iq4_nl_numbers(unsigned (&halves)[4], unsigned codes) {
  const unsigned places = codes & 0x77777777u;                                // among eight numbers
  const unsigned which = mask_and_set<0x44444444u, 0x32103210u>(codes >> 1);  // of the first eight or the last
  for (int i = 0; i < 2; ++i) {
    const unsigned first = pick_nibbles(0x766a5d4fu, 0x3f2d1801u, places >> 16 * i);
    const unsigned last = pick_nibbles(0xf1d9c5b5u, 0xa6998d81u, places >> 16 * i);
    const unsigned four = pick_nibbles(last, first, which >> 16 * i);  // a byte each
    halves[i] = __byte_perm(four, 0, 0x4240);
    halves[2 + i] = __byte_perm(four, 0, 0x4341);
  }
}

// Bytes `kFirst` and `kSecond` of four codes of int8 + 128, as numbers of fp16: of 1024 + the byte less 1152.
template <unsigned kFirst, unsigned kSecond>
FLASHPORT_DEVICE unsigned int8_numbers(unsigned biased) {
  return add_halves(__byte_perm(biased, 0x64646464u, 0x4040u | kSecond << 8 | kFirst), 0xe480e480u);
}
// What operands of bytes are in units of: FNUZ is not multiplied where it is widened.
constexpr float operand_unit(KvFormat format) { return format == KvFormat::kFp8E4M3Fnuz ? 128.0f : 1.0f; }

// Four bytes of a row as pairs of neighbours or, transposed, two of each of two rows as pairs of these. FNUZ's NaN is
// -0.
template <KvFormat kFormat, bool kTransposed>
FLASHPORT_DEVICE void widen_bytes(unsigned& first, unsigned& second, unsigned four) {
  constexpr unsigned kSecond = kTransposed ? 2 : 1, kThird = kTransposed ? 1 : 2;
  if constexpr (kFormat == KvFormat::kInt8) {
    const unsigned biased = four ^ 0x80808080u;
    first = int8_numbers<0, kSecond>(biased);
    second = int8_numbers<kThird, 3>(biased);
  } else if constexpr (kFormat == KvFormat::kFp8E5M2) {  // high bytes of fp16
    first = __byte_perm(four, 0, 0x0404u | kSecond << 12);
    second = __byte_perm(four, 0, 0x3404u | kThird << 4);
  } else {
    constexpr bool kIsFnuz = kFormat == KvFormat::kFp8E4M3Fnuz;  // takes bytes 0 and 2, then 1 and 3
    const unsigned in_order = kTransposed != kIsFnuz ? __byte_perm(four, 0, 0x3120) : four;
    const Words2 two = kIsFnuz ? shift_e4m3fnuz(in_order) : widen_e4m3(in_order);
    first = two.x;
    second = two.y;
  }
}
// The words of an operand from four that ldmatrix brought. first(i), second(i): those that word i becomes.
template <KvFormat kFormat, bool kTransposed, class First, class Second>
FLASHPORT_DEVICE void widen_operand(const unsigned (&raw)[4], const First& first, const Second& second) {
#pragma unroll
  for (int i = 0; i < 4; ++i) widen_bytes<kFormat, kTransposed>(first(i), second(i), raw[i]);
  if constexpr (kFormat == KvFormat::kFp8E4M3Fnuz) {
    if (!may_have_e4m3fnuz_nan(raw)) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Words2 nans = e4m3fnuz_nans(kTransposed ? raw[i] : __byte_perm(raw[i], 0, 0x3120));
      first(i) |= nans.x;
      second(i) |= nans.y;
    }
  }
}

// Units of 16 rows that an operand has brought: of each, rows g and g + 8, or 2 c, 2 c + 1 and 2 c + 8, 2 c + 9. q8_0:
// the last one of the block before. Nibbles: two at a time, because ldmatrix.x4 brings two of 16 rows.
constexpr int kept_words(KvFormat format) { return has_nibbles(format) || format == KvFormat::kInt4 ? 4 : 2; }

// Sees to it that the two units of nibbles' block `group` of kGroups are there, one group after the other.
// load(words, byte): ldmatrix from `byte` of the first block's unit on, of two units or, of the last, one.
template <int kGroups, class Load>
FLASHPORT_DEVICE void two_units(unsigned (&first)[2], unsigned (&last)[2], unsigned (&kept)[4], int group,
                                const Load& load) {
  if (group == 0) load(kept, 0);
  for (int half = 0; half < 2; ++half) first[half] = kept[group % 2 * 2 + half];
  if (group % 2 == 1) {
    const int byte = 16 * (group + 1);
    if (group + 1 < kGroups) {
      load(kept, byte);
    } else {
      unsigned one[2];
      load(one, byte);
      for (int half = 0; half < 2; ++half) kept[half] = one[half];
    }
  }
  for (int half = 0; half < 2; ++half) last[half] = kept[(group + 1) % 2 * 2 + half];
}

// Where a lane's 16-byte unit of a row lies, and with it those of all that begin 32 bytes on, up to kBytes, and of rows
// a multiple of 16 on: units are exchanged inside 128 bytes at most, so these few offsets serve all, plus a constant.
template <class Layout, int kBytes>
class LanePlaces {
 public:
  // `first`: bytes of the row before; whole kBytes where places are several.
  FLASHPORT_DEVICE LanePlaces(int row, int unit, int first) {
    if constexpr (kSeveral) {
      const int base = Layout::row_offset(row) + first / 128 * 128;
      const int exchanged = first % 128 ^ Layout::swizzle(row);
      for (int i = 0; i < kPlaces; ++i) places_[i] = recompute(base + (unit ^ exchanged ^ 32 * i));
    } else {
      places_[0] = recompute(Layout::offset(row, first + unit));
    }
  }
  // `byte`: whole 32 bytes where units are exchanged.
  FLASHPORT_DEVICE const char* at(const char* tile, int row, int byte) const {
    const int beyond = kSeveral ? byte / 128 * 128 : byte;
    return tile + places_[kSeveral ? byte % 128 / 32 : 0] + (Layout::row_offset(row) + beyond);
  }

 private:
  static constexpr bool kSeveral = Layout::kExchanged == 128;
  static constexpr int kPlaces = !kSeveral ? 1 : kBytes < 128 ? kBytes / 32 : 4;
  unsigned places_[kPlaces];
};

template <DecodeConfig kCfg, KvFormat kFormat>
struct KeyOperand {
  static constexpr bool kHasBlocks = is_block_cache(kFormat);
  using Layout = typename KvTiles<kCfg>::template KeysOf<kFormat>;

  // For the wave whose keys begin with `first_key`, a multiple of 16.
  FLASHPORT_DEVICE KeyOperand(int lane, int first_key, const HeadPlace& head)
      : places_(first_key + lane % 16, 16 * lane_unit(kFormat, lane),
                kHasBlocks ? first_unit_byte(kFormat, head, 0) : head.byte) {
    for (int i = 0; i < kScalePlaces; ++i) {
      scales_[i] = Layout::offset(first_key + lane / 4, head.byte + i * kBlockBytes);
    }
    for (int block = 0; block < kSelectors; ++block) {
      selectors_[block] = block_selector(kFormat, head.block + block, lane % 4);
      asm volatile("" : "+r"(selectors_[block]));  // once, not for each leaf
    }
  }

  // The wave's keys key .. key + 15, 16 dims of `group` of 32 in each of two steps. Groups come one after the other: a
  // block ends in the unit where the next begins, and `kept` keeps it.
  FLASHPORT_DEVICE void load(unsigned (&a)[2][4], KeyFactors& factors, unsigned (&kept)[kept_words(kFormat)],
                             const char* tile, int key, int group) const {
    if constexpr (!is_narrow_cache(kFormat)) {
      for (int step = 0; step < 2; ++step) ldmatrix_x4(a[step], places_.at(tile, key, 64 * group + 32 * step));
    } else if constexpr (is_format_of_bytes(kFormat)) {
      unsigned raw[4];
      ldmatrix_x4(raw, places_.at(tile, key, 32 * group));
      widen_operand<kFormat, false>(
          raw, [&](int i) -> unsigned& { return a[i / 2][i % 2]; },
          [&](int i) -> unsigned& { return a[i / 2][i % 2 + 2]; });
    } else if constexpr (kFormat == KvFormat::kQ8_0) {
      const int first = 16 * block_unit(kFormat, group);
      if (group % 8 == 0) ldmatrix_x2(kept, places_.at(tile, key, first - 32));
      unsigned next[4];
      ldmatrix_x4(next, places_.at(tile, key, first));
      for (int half = 0; half < 2; ++half) {
        widen(a[0][half], a[0][half + 2], __byte_perm(kept[half], next[half], selectors_[group % kSelectors]));
        widen(a[1][half], a[1][half + 2], next[half + 2]);
        kept[half] = next[half];
      }
    } else {
      unsigned first[2], last[2];
      two_units<kBlocks>(first, last, kept, group, [&](auto& words, int byte) {
        if constexpr (sizeof(words) == 16) {
          ldmatrix_x4(words, places_.at(tile, key, byte));
        } else {
          ldmatrix_x2(words, places_.at(tile, key, byte));
        }
      });
      for (int half = 0; half < 2; ++half) {
        const unsigned four = __byte_perm(first[half], last[half], selectors_[group]);
        if constexpr (kFormat == KvFormat::kIq4Nl) {
          unsigned numbers[4];
          iq4_nl_numbers(numbers, four);
          for (int i = 0; i < 4; ++i) a[i / 2][half + i % 2 * 2] = numbers[i];
        } else {
          for (int i = 0; i < 2; ++i) {
            a[0][half + 2 * i] = four >> 8 * i & kLowCodes;
            a[1][half + 2 * i] = four >> 8 * i & kHighCodes;
          }
        }
      }
    }
    if constexpr (kHasBlocks) {
      for (int half = 0; half < 2; ++half) factors.scale[half] = scale(tile, key + 8 * half, group);
    }
  }

 private:
  // The scale of a block of the wave's key `key` + lane / 4, where `key` is a multiple of 8.
  FLASHPORT_DEVICE float scale(const char* tile, int key, int block) const {
    const int before = block / kScalePlaces * kScalePlaces * kBlockBytes;
    return to_float(
        *reinterpret_cast<const Half*>(tile + scales_[block % kScalePlaces] + (Layout::row_offset(key) + before)));
  }

  FLASHPORT_DEVICE static void widen(unsigned& low, unsigned& high, unsigned four) {
    const unsigned biased = four ^ 0x80808080u;
    low = __byte_perm(biased, 0, 0x4140);
    high = __byte_perm(biased, 0, 0x4342);
  }

  static constexpr int kBlockBytes = kv_format_trait(kFormat).block_bytes;
  static constexpr int kBlocks = kCfg.shape.head_dim_qk / 32;
  static constexpr int kSelectors = !kHasBlocks ? 0 : kBlocks < 8 ? kBlocks : 8;
  static constexpr int kScalePlaces = Layout::kScalePlaces;
  static_assert(!has_nibbles(kFormat) || kBlocks <= 8, "nine units are an odd number");
  LanePlaces<Layout, Layout::kHeadBytes> places_;
  unsigned scales_[2];                  // kScalePlaces of them
  unsigned selectors_[kSelectors + 1];  // one more, because none is no array
};

// Tiles of 16 columns that are loaded together: a group.
constexpr int value_tiles(KvFormat format) { return is_narrow_cache(format) ? 2 : 1; }

// kGroups: those of a wave, a power of two.
template <DecodeConfig kCfg, KvFormat kFormat, int kGroups>
struct ValueOperand {
  static constexpr bool kHasBlocks = is_block_cache(kFormat);
  using Layout = typename KvTiles<kCfg>::template ValuesOf<kFormat>;
  static constexpr int kTiles = value_tiles(kFormat);
  static constexpr int kGroupBytes = 32;  // 16 columns of 2 bytes, or 32 of one
  static_assert((kGroups & (kGroups - 1)) == 0);

  // For the wave whose columns begin with group `first_group`, a multiple of kGroups.
  FLASHPORT_DEVICE ValueOperand(int lane, int first_group, const HeadPlace& head)
      : lane_(lane),
        behind_scale_(lane / 4 - (head.block + first_group) % 8),
        places_(is_narrow_cache(kFormat) ? lane % 16 : lane / 16 * 8 + lane % 8,
                16 * (is_narrow_cache(kFormat) ? lane_unit(kFormat, lane) : lane / 8 % 2),
                kHasBlocks ? first_unit_byte(kFormat, head, first_group) : head.byte + kGroupBytes * first_group) {}

  // The first block of the head, from what the loop keeps.
  FLASHPORT_DEVICE int first_block(int first_group) const { return (lane_ / 4 - behind_scale_ - first_group) & 7; }

  // Keys key .. key + 15, columns of the wave's `group` of kTiles tiles. In formats of blocks groups come
  // one after the other, as for keys; the wave's first has nothing in `kept` yet.
  FLASHPORT_DEVICE void load(unsigned (&a)[kTiles][4], ValueFactors& factors, unsigned (&kept)[kept_words(kFormat)],
                             const char* tile, int key, int group) const {
    if constexpr (!is_narrow_cache(kFormat)) {
      ldmatrix_x4_trans(a[0], places_.at(tile, key, kGroupBytes * group));
    } else if constexpr (is_format_of_bytes(kFormat)) {
      unsigned raw[4];
      ldmatrix_x4_trans(raw, places_.at(tile, key, kGroupBytes * group));
      widen_operand<kFormat, true>(
          raw, [&](int i) -> unsigned& { return a[i / 2][i % 2 * 2]; },
          [&](int i) -> unsigned& { return a[i / 2][i % 2 * 2 + 1]; });
    } else if constexpr (kFormat == KvFormat::kQ8_0) {
      const int first = 16 * block_unit(kFormat, group);
      if (group == 0) ldmatrix_x2_trans(kept, places_.at(tile, key, first - 32));
      unsigned next[4];
      ldmatrix_x4_trans(next, places_.at(tile, key, first));
      for (int half = 0; half < 2; ++half) {
        factors.scale[half] = scale_of(kept[half], group);
        widen(a[0][2 * half], a[0][2 * half + 1], split_unit(kept[half], next[half], group));
        widen(a[1][2 * half], a[1][2 * half + 1], next[half + 2]);
        kept[half] = next[half];
      }
    } else {
      unsigned first[2], last[2];
      two_units<kGroups>(first, last, kept, group, [&](auto& words, int byte) {
        if constexpr (sizeof(words) == 16) {
          ldmatrix_x4_trans(words, places_.at(tile, key, byte));
        } else {
          ldmatrix_x2_trans(words, places_.at(tile, key, byte));
        }
      });
      for (int half = 0; half < 2; ++half) {
        factors.scale[half] = scale_of(first[half], group);
        const unsigned four = split_unit(first[half], last[half], group);
        if constexpr (kFormat == KvFormat::kQ4_0) {
          whole_bytes_and_high_codes(a, half, four);
        } else {
          unsigned numbers[4];
          iq4_nl_numbers(numbers, __byte_perm(four, 0, 0x3120));
          for (int i = 0; i < 4; ++i) a[i / 2][2 * half + i % 2] = numbers[i];
        }
      }
    }
  }

 private:
  // From the unit in which the block begins, and its last.
  FLASHPORT_DEVICE unsigned scale_of(unsigned first, int group) const {
    return __shfl_sync(~0u, first, lane_ - 4 * (behind_scale_ - group));
  }
  FLASHPORT_DEVICE unsigned split_unit(unsigned first, unsigned last, int group) const {
    return behind_scale_ - group > 0 ? first : last;
  }
  FLASHPORT_DEVICE static void widen(unsigned& low, unsigned& high, unsigned four) {
    const unsigned biased = four ^ 0x80808080u;
    low = __byte_perm(biased, 0, 0x4240);
    high = __byte_perm(biased, 0, 0x4341);
  }

  int lane_;
  int behind_scale_;  // of lanes 4 g + c: g less that of the lanes that the wave's first scales come to
  LanePlaces<Layout, kGroups * kGroupBytes> places_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
