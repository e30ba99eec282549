// The element type of K and V as a loader policy: how stored rows in shared memory become the A operands of mma.sync,
// 16 keys x 16 dims of K and, transposed, 16 columns x 16 keys of V. All come by ldmatrix: 16-bit caches as they are,
// byte caches (fp8, q8_0) in the order of lane_maps.h and widened to fp16 in registers.
//
// A q8_0 value widens to (int8 + 128) * 2^-24, the fp16 number whose bits are that byte: nothing but a move. What is
// too much is taken off by products with kMinus128, and scales are not applied here (tiles.h).
#pragma once

#include "cuda/arch/fp8.h"
#include "cuda/decode/kv_pipeline.h"
#include "cuda/decode/lane_maps.h"

namespace flashport::FLASHPORT_TARGET::decode {

constexpr float kInt8Unit = 0x1p24f;         // what widened values are to be multiplied by
constexpr unsigned kMinus128 = 0x80808080u;  // two of them, widened

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

template <DecodeConfig kCfg>
struct KeyOperand {
  static constexpr KvFormat kFormat = kCfg.shape.k_format;
  using Layout = typename KvTiles<kCfg>::Keys;

  // For the wave whose keys begin with `first_key`, a multiple of 16.
  FLASHPORT_DEVICE KeyOperand(int lane, int first_key, const HeadPlace& head)
      : places_(first_key + lane % 16, 16 * (kFormat == KvFormat::kQ8_0 ? q8_0_lane_unit(lane) : lane / 16),
                kFormat == KvFormat::kQ8_0 ? first_unit_byte(head, 0) : 0),
        scales_(Layout::offset(first_key + lane / 4, head.byte)) {
    for (int block = 0; block < kSelectors; ++block) {
      selectors_[block] = q8_0_selector(head.block + block, lane % 4);
      asm volatile("" : "+r"(selectors_[block]));  // once, not for each leaf
    }
  }

  // The wave's keys key .. key + 15, 16 dims of `group` of 32 in each of two steps. Groups come one after the other: a
  // q8_0 block ends in the unit where the next begins, and `unit` keeps it.
  FLASHPORT_DEVICE void load(unsigned (&a)[2][4], unsigned (&unit)[2], const char* tile, int key, int group) const {
    if constexpr (!is_byte_format(kFormat)) {
      for (int step = 0; step < 2; ++step) ldmatrix_x4(a[step], places_.at(tile, key, 64 * group + 32 * step));
    } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
      unsigned raw[4];
      ldmatrix_x4(raw, places_.at(tile, key, 32 * group));
      for (int i = 0; i < 4; ++i) widen_fp8(a[i / 2][i % 2], a[i / 2][i % 2 + 2], raw[i]);
    } else {
      const int first = 16 * q8_0_unit(group);
      if (group % 8 == 0) ldmatrix_x2(unit, places_.at(tile, key, first - 32));
      unsigned next[4];
      ldmatrix_x4(next, places_.at(tile, key, first));
      for (int half = 0; half < 2; ++half) {
        widen(a[0][half], a[0][half + 2], __byte_perm(unit[half], next[half], selectors_[group % kSelectors]));
        widen(a[1][half], a[1][half + 2], next[half + 2]);
        unit[half] = next[half];
      }
    }
  }

  // The scale of a q8_0 block of the wave's key `key` + lane / 4, where `key` is a multiple of 8.
  FLASHPORT_DEVICE float scale(const char* tile, int key, int block) const {
    return to_float(*reinterpret_cast<const Half*>(tile + scales_ + (Layout::row_offset(key) + block * 34)));
  }

 private:
  FLASHPORT_DEVICE static void widen(unsigned& low, unsigned& high, unsigned four) {
    const unsigned biased = four ^ 0x80808080u;
    low = __byte_perm(biased, 0, 0x4140);
    high = __byte_perm(biased, 0, 0x4342);
  }

  static constexpr int kBlocks = kCfg.shape.head_dim_qk / 32;
  static constexpr int kSelectors = kFormat != KvFormat::kQ8_0 ? 0 : kBlocks < 8 ? kBlocks : 8;
  LanePlaces<Layout, Layout::kHeadBytes> places_;
  unsigned scales_;
  unsigned selectors_[kSelectors + 1];  // one more, because none is no array
};

// Tiles of 16 columns that are loaded together: a group.
constexpr int value_tiles(KvFormat format) { return is_byte_format(format) ? 2 : 1; }

// kGroups: those of a wave, a power of two.
template <DecodeConfig kCfg, int kGroups>
struct ValueOperand {
  static constexpr KvFormat kFormat = kCfg.shape.v_format;
  using Layout = typename KvTiles<kCfg>::Values;
  static constexpr int kTiles = value_tiles(kFormat);
  static constexpr int kGroupBytes = 32;  // 16 columns of 2 bytes, or 32 of one
  static_assert((kGroups & (kGroups - 1)) == 0);

  // For the wave whose columns begin with group `first_group`, a multiple of kGroups.
  FLASHPORT_DEVICE ValueOperand(int lane, int first_group, const HeadPlace& head)
      : lane_(lane),
        behind_scale_(lane / 4 - (head.block + first_group) % 8),
        places_(is_byte_format(kFormat) ? lane % 16 : lane / 16 * 8 + lane % 8,
                16 * (kFormat == KvFormat::kQ8_0 ? q8_0_lane_unit(lane)
                      : is_byte_format(kFormat)  ? lane / 16
                                                 : lane / 8 % 2),
                kFormat == KvFormat::kQ8_0 ? first_unit_byte(head, first_group) : kGroupBytes * first_group) {}

  // The first block of the head, from what the loop keeps.
  FLASHPORT_DEVICE int first_block(int first_group) const { return (lane_ / 4 - behind_scale_ - first_group) & 7; }

  // Keys key .. key + 15, columns of the wave's `group` of kTiles tiles. For q8_0, `scale` has the scales of keys 2 c,
  // 2 c + 1 and 2 c + 8, 2 c + 9, and groups come one after the other, as for keys; the wave's first has nothing in
  // `unit` yet.
  FLASHPORT_DEVICE void load(unsigned (&a)[kTiles][4], unsigned (&scale)[2], unsigned (&unit)[2], const char* tile,
                             int key, int group) const {
    if constexpr (!is_byte_format(kFormat)) {
      ldmatrix_x4_trans(a[0], places_.at(tile, key, kGroupBytes * group));
    } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
      unsigned raw[4];
      ldmatrix_x4_trans(raw, places_.at(tile, key, kGroupBytes * group));
      for (int i = 0; i < 4; ++i) {
        unsigned* pairs = &a[i / 2][i % 2 * 2];
        widen_fp8(pairs[0], pairs[1], __byte_perm(raw[i], 0, 0x3120));
      }
    } else {
      const int first = 16 * q8_0_unit(group);
      if (group == 0) ldmatrix_x2_trans(unit, places_.at(tile, key, first - 32));
      unsigned next[4];
      ldmatrix_x4_trans(next, places_.at(tile, key, first));
      const int behind_scale = behind_scale_ - group;
      for (int half = 0; half < 2; ++half) {
        scale[half] = __shfl_sync(~0u, unit[half], lane_ - 4 * behind_scale);
        widen(a[0][2 * half], a[0][2 * half + 1], behind_scale > 0 ? unit[half] : next[half]);
        widen(a[1][2 * half], a[1][2 * half + 1], next[half + 2]);
        unit[half] = next[half];
      }
    }
  }

 private:
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
