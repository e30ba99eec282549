// Leaves of segments for the waves of an MFMA target: widened rows (segment_rows.h), read as the fragments that a
// 16-bit cache gives (mfma_pipeline.h).
#pragma once

#include "hip/decode/mfma_pipeline.h"
#include "hip/decode/segment_rows.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg, class Shared>
class SegmentPipeline {
  using Split = WaveSplit<kCfg>;
  using Tile = WideTile<kCfg>;

 public:
  FLASHPORT_DEVICE SegmentPipeline(const MixedDecodeParams& p, const Block& block, Shared& shared, LeafCursor& ahead)
      : tile_(shared.rows),
        rows_(p, block, tile_),
        col_wave_(block.wave() % Split::kColWaves),
        n_(block.lane() % 16),
        g_(block.lane() / 16) {
    rows_.look_up(ahead);
  }

  FLASHPORT_DEVICE KeyFragments<kCfg> keys() {
    constexpr int kUnits = Tile::kKeyDims / (4 * Split::kUnitDims);  // of a lane in a row of the tile
    rows_.begin_leaf();
    KeyFragments<kCfg> keys;
#pragma unroll
    for (int first = 0; first < Split::kUnits; first += kUnits) {
      if (first > 0) sync_shared();
      rows_.widen_keys(first * 4 * Split::kUnitDims);
#pragma unroll
      for (int tile = 0; tile < Split::kKeyTiles; ++tile) {
        const auto& row = tile_.keys[(col_wave_ * Split::kKeyTiles + tile) * 16 + n_];
#pragma unroll
        for (int c = 0; c < kUnits; ++c) read(keys.words[tile][first + c], &row[(4 * c + g_) * Split::kUnitDims]);
      }
    }
    return keys;
  }
  FLASHPORT_DEVICE void refill_behind_keys(const MixedDecodeParams& p, LeafCursor& ahead) {
    ahead.next(reread(p));
    rows_.look_up(ahead);
  }
  FLASHPORT_DEVICE void refill_behind_scores(const MixedDecodeParams&, const LeafCursor&) {}

  FLASHPORT_DEVICE void await_values(const MixedDecodeParams&, const LeafCursor&) const {}
  FLASHPORT_DEVICE ValueFragments<kCfg> values() {
    ValueFragments<kCfg> values;
#pragma unroll
    for (int first = 0; first < kLeafKeys; first += Tile::kValues) {
      sync_shared();
      rows_.widen_values(first);
#pragma unroll
      for (int step = 0; step < Tile::kValues / 16; ++step) {
#pragma unroll
        for (int key = 0; key < 4; ++key) {
          const auto& row = tile_.values[16 * step + 4 * g_ + key];
          read(values.words[first / 16 + step][key], &row[col_wave_ * Split::kWaveCols + n_ * Split::kLaneCols]);
        }
      }
    }
    rows_.touch();
    return values;
  }
  FLASHPORT_DEVICE void refill_behind_values(const MixedDecodeParams&, const LeafCursor&) {}

 private:
  template <int kWords>
  FLASHPORT_DEVICE static void read(unsigned (&to)[kWords], const std::uint16_t* from) {
    using Words = unsigned __attribute__((ext_vector_type(kWords)));
    const Words words = *reinterpret_cast<const Words*>(from);
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[i] = words[i];
  }

  Tile& tile_;
  SegmentRows<kCfg> rows_;
  int col_wave_, n_, g_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
