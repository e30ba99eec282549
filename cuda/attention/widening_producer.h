// Producer warps that bring rows of any formats, widened to the math type: the warps that compute see 16-bit keys. They
// serve what does not come by boxes (stored_boxes.h): small pages, rows that TMA cannot read, shorter heads, formats of
// 16 bits beside others.
//
// A warp has the same rows of every tile. Their bytes come as they are stored, by cp.async into slots that lie apart
// from the tiles, several tiles ahead. When a tile's turn comes, the warp widens its rows
// into the tile, a unit of 16 values a lane. Warps of two warpgroups do this, because one warp of each scheduler cannot
// issue as many instructions as widening takes while a tile is multiplied. Factors beside the rows come to the slots
// with them, and rows are multiplied in the tile (row_factors.h).
#pragma once

#include "common/device/kv/widen.h"
#include "cuda/attention/row_producers.h"

namespace flashport::FLASHPORT_TARGET::attention {

template <AttentionConfig kCfg>
class WideningProducer {
  using Memory = AttentionMemory<kCfg>;
  using Tile = typename Memory::Keys;
  static constexpr int kKeys = kCfg.tuning.keys, kWarps = row_warps(kCfg);
  static constexpr int kKeyStages = kCfg.tuning.stages, kValueStages = value_stages(kCfg.tuning);
  static constexpr int kUnits = kCfg.shape.head_dim_qk / kv::kUnitValues;  // of a row
  static constexpr int kPassRows = kWaveSize / kUnits, kPasses = kKeys / kPassRows;
  static constexpr int kLaneRows = ((kPasses + kWarps - 1) / kWarps * kPassRows + kWaveSize - 1) / kWaveSize;
  static constexpr bool kScales = has(kCfg.shape.sources, KeySources::kScaled);
  static_assert(kCfg.shape.head_dim_qk == kCfg.shape.head_dim_v && kPassRows >= 1);

 public:
  FLASHPORT_DEVICE WideningProducer(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), lane_(block.lane()), warp_(block.wave() - 1), queries_(p, block, memory), memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
    if (copies.tiles == 0) return;
    const int items = 2 * copies.tiles;
    const std::int32_t* pages = kv::page_list(p_.cache, work.seq);
    look_up(work, pages, copies.range.begin);
#pragma unroll 1
    for (int i = 0; i < items; ++i) {
      const int ahead = memory_.stored.slots;
#pragma unroll 1
      for (int next = i == 0 ? 0 : i + ahead - 1; next < items && next < i + ahead; ++next) {
        ask(work, pages, item(next, items), copies.range.begin);
      }
      if (i == 1) queries_.bring_queries(work);
      widen(item(i, items));
    }
    tiles_ += copies.tiles;
  }

 private:
  // The keys of a tile come before the values of the tile before it.
  struct Item {
    int tile;
    bool of_values, is_last;
  };
  FLASHPORT_DEVICE static Item item(int i, int items) {
    if (i == items - 1) return {items / 2 - 1, true, true};
    if (i % 2 == 0 && i > 0) return {i / 2 - 1, true, false};
    return {(i + 1) / 2, false, false};
  }

  // The row of a tile that the lane asks for, one of kLaneRows; kKeys or more: none.
  FLASHPORT_DEVICE int row_of(int i) const {
    const int at = recompute(lane_) + i * kWaveSize;
    return (warp_ + at / kPassRows * kWarps) * kPassRows + at % kPassRows;
  }

  // The page numbers of the lane's rows of a tile.
  FLASHPORT_DEVICE void look_up(const WorkTile& work, const std::int32_t* pages, int tile) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = row_of(i), key = tile * kKeys + row;
      next_page_[i] = work.seq;
      if (pages != nullptr && row < kKeys && key < work.kv_len) {
        next_page_[i] = load_global(pages + kv::page_coord(p_.cache, pages, work.k_begin + key).page);
      }
    }
  }

  FLASHPORT_DEVICE void ask(const WorkTile& work, const std::int32_t* pages, const Item& item, int first_tile) {
    const CacheParams& cache = item.of_values ? p_.cache.v : p_.cache.k;
    const int tile = first_tile + item.tile, head = work.head / p_.group_size;
    std::uint64_t& landed = memory_.stored.landed[warp_][ask_slot_];
    std::uintptr_t from[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = row_of(i), key = tile * kKeys + row;
      if (!item.of_values) {
        last_page_[i] = page_[i];
        page_[i] = next_page_[i];
      }
      const int page = item.of_values && !item.is_last ? last_page_[i] : page_[i];
      const kv::TokenCoord token = {page, kv::page_coord(p_.cache, p_.cache.table, work.k_begin + key).offset};
      const bool there = row < kKeys && key < work.kv_len;
      from[i] = there ? reinterpret_cast<std::uintptr_t>(cache.data) + kv::row_offset(cache, token, head) : 0;
      if (row < kKeys) memory_.stored.shifts[ask_slot_][row] = static_cast<std::uint8_t>(there ? from[i] % 16 : kNone);
      if (kScales && row < kKeys) ask_factors(item.of_values, row, there, token, head);
    }
    copy_rows(from, cache.row_bytes);
    mbarrier_arrive_on_copies(&landed);
    ask_slot_ = ask_slot_ + 1 == memory_.stored.slots ? 0 : ask_slot_ + 1;
    if (!item.of_values) look_up(work, pages, tile + 1);
  }
  FLASHPORT_DEVICE void ask_factors(bool of_values, int row, bool is_there, kv::TokenCoord token, int head) const {
    const KeyScales& scales = of_values ? p_.v_row_scales : p_.k_row_scales;
    if (scales.data == nullptr) return;
    copy_factors(factor_rows(of_values, ask_slot_), row, scales, of_values ? p_.head_dim_v : p_.head_dim_qk, is_there,
                 kv::scale_element(scales, token, head));
  }
  FLASHPORT_DEVICE FactorRows factor_rows(bool of_values, int slot) const {
    auto& stored = memory_.stored;
    return {stored_row(slot, 0) + stored.row_room(of_values ? p_.cache.v : p_.cache.k), stored.factor_begins[slot],
            stored.pitch};
  }
  // Copies the warp's rows, whose addresses its lanes have: as many lanes as a row has units share a row, and copy 16
  // aligned bytes each. Nothing after a row is read.
  FLASHPORT_DEVICE void copy_rows(const std::uintptr_t (&from)[kLaneRows], int row_bytes) const {
    const int lane = recompute(lane_) & (kWaveSize - 1), pitch = memory_.stored.pitch;
    unsigned char* to = stored_row(ask_slot_, warp_ * kPassRows + lane / kUnits) + lane % kUnits * 16;
#pragma unroll
    for (int i = 0; i < (kPasses + kWarps - 1) / kWarps; ++i) {
      const int at = i * kPassRows + lane / kUnits;
      const std::uintptr_t row = __shfl_sync(~0u, from[i * kPassRows / kWaveSize], at % kWaveSize);
      const int end = static_cast<int>(row % 16) + row_bytes;
      const auto* units = reinterpret_cast<const char*>(row - row % 16);
      if (row != 0) {
#pragma unroll 2
        for (int byte = lane % kUnits * 16; byte < end; byte += kUnits * 16) {
          copy_async_first<16>(to + byte - lane % kUnits * 16, units + byte, minimum(end - byte, 16));
        }
      }
      to += kWarps * kPassRows * pitch;
    }
  }
  FLASHPORT_DEVICE unsigned char* stored_row(int slot, int row) const {
    return memory_.stored.bytes + (slot * kKeys + row) * memory_.stored.pitch;
  }

  FLASHPORT_DEVICE void widen(const Item& item) {
    const int copy = tiles_ + item.tile, stages = item.of_values ? kValueStages : kKeyStages, stage = copy % stages;
    Barriers& barriers = item.of_values ? memory_.value_barriers[stage] : memory_.key_barriers[stage];
    mbarrier_wait(&memory_.stored.landed[warp_][slot_], phase_);
    mbarrier_wait(&barriers.empty, static_cast<unsigned>(copy / stages) & 1 ^ 1);
    widen_rows(item.of_values ? memory_.values[stage].x[0] : memory_.keys[stage].x[0],
               item.of_values ? p_.cache.v.copy_unit : p_.cache.k.copy_unit, item.of_values ? p_.v_format : p_.k_format,
               item.of_values ? p_.head_dim_v : p_.head_dim_qk);
    if constexpr (kScales) {
      multiply_by_factors(item.of_values ? memory_.values[stage].x[0] : memory_.keys[stage].x[0], item.of_values);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(&barriers.full);
    if (++slot_ == memory_.stored.slots) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }

  FLASHPORT_DEVICE void multiply_by_factors(unsigned char* tile, bool of_values) const {
    const KeyScales& scales = of_values ? p_.v_row_scales : p_.k_row_scales;
    if (scales.data == nullptr) return;
    __syncwarp();  // lanes have other places of the warp's rows than those that they widened to
    multiply_rows<2 * kUnits, kKeys>(
        tile, factor_rows(of_values, slot_), scales, of_values ? p_.head_dim_v : p_.head_dim_qk,
        recompute(lane_) & (kWaveSize - 1),
        [&](int i) { return (warp_ + i / kPassRows * kWarps) * kPassRows + i % kPassRows; });
  }

  FLASHPORT_DEVICE void widen_rows(unsigned char* to, int copy_unit, KvFormat format, int columns) const {
    const bool is_aligned = copy_unit == 16;
    kv::with_format(format, [&](auto constant) FLASHPORT_INLINE {
      constexpr KvFormat kFormat = constant;
      constexpr bool kIsPlain = kv_format_trait(kFormat).block_values == 1 && kFormat != KvFormat::kInt4;
      // Rows of whole blocks end with a unit.
      if constexpr (kv_format_trait(kFormat).block_values > kv::kUnitValues) columns = (columns + 15) / 16 * 16;
      if constexpr (kIsPlain) {
        constexpr int kBytes = is_narrow(kFormat) ? 1 : 2;
        if (is_aligned) {
          return widen_passes(to, columns,
                              [&](unsigned (&x)[8], const unsigned char* row, int shift, int unit) FLASHPORT_INLINE {
                                AlignedUnit<kBytes> stored(row + unit * kv::kUnitValues * kBytes);
                                if (shift == kNone) stored.clear();
                                kv::widen_unit<kFormat>(x, stored, 0);
                              });
        }
      }
      widen_passes(to, columns, [&](unsigned (&x)[8], const unsigned char* row, int shift, int unit) FLASHPORT_INLINE {
        if (shift == kNone) return;
        const StoredRow stored{row, shift};
        if constexpr (kv::kInBlocks<kFormat>) {
          kv::widen_unit<kFormat>(x, BlockUnit<kFormat>(stored, unit), kFormat == KvFormat::kQ8_0 ? 0 : unit & 1);
        } else {
          kv::widen_unit<kFormat>(x, stored, unit);
        }
      });
    });
  }

  // The warp's rows of a tile. f(a unit's values, its row's bytes, the first of them, number of the unit). The lanes of
  // a quarter of a warp have four units of two neighbouring rows, whose vectors in the tile lie in different banks.
  template <class F>
  FLASHPORT_DEVICE void widen_passes(unsigned char* to, int columns, const F& f) const {
    constexpr int kFours = kUnits / 4;
    const int lane = recompute(lane_) & (kWaveSize - 1);
    const int unit = kPassRows == 1 ? lane : lane % 4 + lane / 8 % kFours * 4;
    int row = warp_ * kPassRows + (kPassRows == 1 ? 0 : lane / 4 % 2 + lane / 8 / kFours * 2);
    const int pitch = memory_.stored.pitch, values = columns - unit * kv::kUnitValues;
    const unsigned char* from = memory_.stored.bytes + (slot_ * kKeys + row) * pitch;
    const std::uint8_t* shifts = memory_.stored.shifts[slot_];
    to += unit / 4 * Tile::kPanelSize;
    int shift = shifts[row];
#pragma unroll 1
    for (; row < kKeys; row += kWarps * kPassRows) {
      const int next_shift = shifts[row + kWarps * kPassRows];  // after the last, anything
      unsigned x[8] = {};
      if (values > 0) f(x, from, shift, unit);
      if (values == 8) x[4] = x[5] = x[6] = x[7] = 0;
      unsigned char* vector = to + row * 128 + (2 * unit % 8 ^ row % 8) * 16;
      *reinterpret_cast<uint4*>(vector) = {x[0], x[1], x[2], x[3]};
      vector = to + row * 128 + (2 * unit % 8 ^ row % 8 ^ 1) * 16;
      *reinterpret_cast<uint4*>(vector) = {x[4], x[5], x[6], x[7]};
      from += kWarps * kPassRows * pitch;
      shift = next_shift;
    }
  }

  // As the routines of formats read them: a row that begins at any byte, or
  // of a format that has half() at an even one,
  struct StoredRow {
    const unsigned char* bytes;
    int shift;
    FLASHPORT_DEVICE unsigned word(int byte) const {
      const int at = shift + byte;
      const auto* words = reinterpret_cast<const unsigned*>(bytes + (at & ~3));
      return __funnelshift_r(words[0], words[1], static_cast<unsigned>(at & 3) * 8);
    }
    FLASHPORT_DEVICE unsigned half(int byte) const {
      return *reinterpret_cast<const std::uint16_t*>(bytes + shift + byte);
    }
  };
  // a unit of a block, of which each byte is read once,
  template <KvFormat kFormat>
  struct BlockUnit {
    static constexpr KvFormatTrait kTrait = kv_format_trait(kFormat);
    static constexpr bool kHasFifthBits = kFormat == KvFormat::kQ5_0 || kFormat == KvFormat::kQ5_1;
    static constexpr int kCodesAt = kTrait.scale_bytes + (kHasFifthBits ? 4 : 0);
    unsigned scales, fifth_bits, codes[4];
    FLASHPORT_DEVICE BlockUnit(const StoredRow& row, int unit) {
      const int block = unit / 2 * kTrait.block_bytes;
      scales = kTrait.scale_bytes == 4 ? row.word(block) : row.half(block);
      if constexpr (kHasFifthBits) fifth_bits = row.word(block + kTrait.scale_bytes);
      const int at = row.shift + block + kCodesAt + (kFormat == KvFormat::kQ8_0 ? unit % 2 * kv::kUnitValues : 0);
      const auto* words = reinterpret_cast<const unsigned*>(row.bytes + (at & ~3));
      unsigned x[5];
#pragma unroll
      for (int i = 0; i < 5; ++i) x[i] = words[i];
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = __funnelshift_r(x[i], x[i + 1], static_cast<unsigned>(at & 3) * 8);
    }
    FLASHPORT_DEVICE unsigned half(int byte) const { return byte == 0 ? scales & 0xffffu : scales >> 16; }
    FLASHPORT_DEVICE unsigned word(int byte) const {
      if (kHasFifthBits && byte == kTrait.scale_bytes) return fifth_bits;
      return codes[(byte - kCodesAt) / 4];
    }
  };
  // and an aligned unit alone.
  template <int kBytes>
  struct AlignedUnit {
    uint4 vectors[kBytes];
    FLASHPORT_DEVICE explicit AlignedUnit(const unsigned char* from) {
#pragma unroll
      for (int i = 0; i < kBytes; ++i) vectors[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    FLASHPORT_DEVICE unsigned word(int byte) const {
      const uint4& x = vectors[byte / 16];
      const int i = byte % 16 / 4;
      return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
    }
    FLASHPORT_DEVICE unsigned half(int) const { return 0; }  // of blocks alone
    FLASHPORT_DEVICE void clear() {
#pragma unroll
      for (uint4& x : vectors) x = {};
    }
  };

  static constexpr int kNone = 255;  // in place of a shift: there is no such row

  const AttentionParams& p_;
  const int lane_, warp_;
  RowProducer<kCfg> queries_;
  Memory& memory_;
  int ask_slot_ = 0, slot_ = 0;
  unsigned phase_ = 0;
  int tiles_ = 0;
  int last_page_[kLaneRows], page_[kLaneRows], next_page_[kLaneRows];
};

}  // namespace flashport::FLASHPORT_TARGET::attention
