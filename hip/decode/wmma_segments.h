// Leaves of segments for the waves of a WMMA target: widened rows (segment_rows.h), read as the units that a 16-bit
// cache gives (wmma_kv.h). Where the tile has half of the keys' dims or of the values, the block widens the other half
// when it comes to it.
#pragma once

#include "hip/decode/segment_rows.h"
#include "hip/decode/wmma_kv.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
class SegmentPipeline {
  using Share = WaveShare<kCfg>;
  using Tile = WideTile<kCfg>;
  static constexpr KvFormat kFormat = product_format(kCfg.shape, KvFormat::kAny);

 public:
  using Key = KeyUnit<kFormat>;
  using Value = ValueUnit<kFormat, Share::kLaneCols>;
  static constexpr int kKeyUnits = kCfg.shape.head_dim_qk / Key::kDims;
  static constexpr int kValueUnits = kLeafKeys / Value::kKeys * Share::kGroups;
  static constexpr int kKeyDepth = 1;
  static constexpr int kValueDepth = 2;

  template <class Shared>
  FLASHPORT_DEVICE SegmentPipeline(const MixedDecodeParams& p, const Block& block, Shared& shared, LeafCursor& ahead)
      : block_(block), tile_(shared.rows), rows_(p, block, tile_), lane_(block.lane()) {
    rows_.look_up(ahead);
  }

  FLASHPORT_DEVICE SegmentPipeline& keys() {
    rows_.begin_leaf();
    rows_.widen_keys(0);
#pragma unroll
    for (int unit = 0; unit < kKeyDepth; ++unit) read_key(unit);
    return *this;
  }
  FLASHPORT_DEVICE void refill_behind_keys(const MixedDecodeParams& p, LeafCursor& ahead) {
    ahead.next(reread(p));
    rows_.look_up(ahead);
  }
  FLASHPORT_DEVICE void refill_behind_scores(const MixedDecodeParams&, const LeafCursor&) {}
  FLASHPORT_DEVICE void await_values(const MixedDecodeParams&, const LeafCursor&) {
    sync_shared();
    rows_.widen_values(0);
#pragma unroll
    for (int unit = 0; unit < kValueDepth; ++unit) read_value(unit);
    if constexpr (kTileValueUnits == kValueUnits) rows_.touch();
  }
  FLASHPORT_DEVICE SegmentPipeline& values() { return *this; }
  FLASHPORT_DEVICE void refill_behind_values(const MixedDecodeParams&, const LeafCursor&) {}

  FLASHPORT_DEVICE const Key& key(int unit, int tile) const { return keys_[unit % kKeyDepth][tile]; }
  FLASHPORT_DEVICE void load_key(int unit) {
    if (unit % kTileKeyUnits == 0) {
      sync_shared();
      rows_.widen_keys(unit * Key::kDims);
    }
    read_key(unit);
  }
  // Unit: 16 keys, then the groups of columns.
  FLASHPORT_DEVICE const Value& value(int unit) const { return values_[unit % kValueDepth]; }
  FLASHPORT_DEVICE void load_value(int unit) {
    if (unit % kTileValueUnits == 0) {
      sync_shared();
      rows_.widen_values(unit / Share::kGroups * Value::kKeys);
      rows_.touch();
    }
    read_value(unit);
  }

 private:
  static constexpr int kTileKeyUnits = Tile::kKeyDims / Key::kDims;
  static constexpr int kTileValueUnits = Tile::kValues / Value::kKeys * Share::kGroups;
  static_assert(kKeyDepth <= kTileKeyUnits && kValueDepth <= kTileValueUnits);

  FLASHPORT_DEVICE int col_wave() const { return recompute_scalar(block_.wave()) % Share::kColWaves; }

  FLASHPORT_DEVICE void read_key(int unit) {
#pragma unroll
    for (int tile = 0; tile < Share::kKeyTiles; ++tile) {
      const int row = key_at((col_wave() * Share::kKeyTiles + tile) * 16 + wmma_line_in_order(lane_ % 16));
      const auto* from = reinterpret_cast<const Words4*>(&tile_.keys[row][unit % kTileKeyUnits * Key::kDims]);
#pragma unroll
      for (int i = 0; i < Key::kWords; ++i) keys_[unit % kKeyDepth][tile].words[i] = from[i / 4][i % 4];
    }
  }

  FLASHPORT_DEVICE void read_value(int unit) {
    using Words = unsigned __attribute__((ext_vector_type(Value::kWords)));
    const int step = unit % kTileValueUnits / Share::kGroups;
    const int col = col_wave() * Share::kCols + (unit % Share::kGroups * 16 + lane_ % 16) * Share::kLaneCols;
#pragma unroll
    for (int pair = 0; pair < Value::kPairs; ++pair) {
      const int row = step / 2 * 32 + lane_ / 16 * 16 + step % 2 * Value::kPairs + pair;
      const Words words = *reinterpret_cast<const Words*>(&tile_.values[row][col]);
#pragma unroll
      for (int i = 0; i < Value::kWords; ++i) values_[unit % kValueDepth].words[pair][i] = words[i];
    }
  }

  const Block& block_;
  Tile& tile_;
  SegmentRows<kCfg> rows_;
  int lane_;
  Key keys_[kKeyDepth][Share::kKeyTiles];
  Value values_[kValueDepth];
};

}  // namespace flashport::FLASHPORT_TARGET::decode
