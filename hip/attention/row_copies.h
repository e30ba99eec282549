// Copies of a tile's rows of keys or values as they are, through registers, where they may lie on pages. Each group of
// waves copies its part. Where rows are of another format, they are widened on the way.
#pragma once

#include "hip/attention/paged_rows.h"
#include "hip/attention/row_split.h"

namespace flashport::FLASHPORT_TARGET::attention {

// Layout: where a vector of a row lies in LDS, and how to come to another one from there.
template <AttentionConfig kCfg, class Layout>
class RowCopies {
  using Values = StoredValues<kCfg.shape, 8>;
  static constexpr int kOwnRows = kCfg.tuning.keys / copying_groups(kCfg);
  using Split = RowSplit<Layout::kVectors, kOwnRows, kGroupThreads>;
  using Wave = WaveRows<Split, kWaveSize>;
  static constexpr int kParts = Split::kParts, kLoads = Split::kRowLoads;

 public:
  FLASHPORT_DEVICE void begin(const KvSide& side, const std::int32_t* pages, const WorkTile& work, const Block& block,
                              int head, int tile, int end) {
    places_.begin(side, pages, work, head, tile, end);
    const int thread = block.thread() % kGroupThreads;
    to_ = Layout::offset(first_row_of_group(block) + Split::row(thread), Split::vector(thread));
  }
  FLASHPORT_DEVICE void look_up(const PagedCache& cache, const std::int32_t* pages, const Block& block) {
    const int own = static_cast<unsigned>(block.thread()) % Wave::kOfTile;
    places_.look_up(cache, pages, first_row_of_group(block) + Wave::row(block.wave() % kGroupWaves, own));
  }
  FLASHPORT_DEVICE void load(const KvSide& side, const Block& block) {
    const RowOffsets offsets = places_.offsets(side.cache), factors = places_.factor_offsets(side.scales);
    const unsigned lane = static_cast<unsigned>(block.thread()) % kWaveSize;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const unsigned first = first_column(block, part);
      const unsigned byte = Values::byte(first, side.format, side.columns);
      const bool is_live = first < static_cast<unsigned>(side.columns);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        rows_[part][i] = load_words<4>(offsets.address(Wave::number(lane, i), byte, is_live));
      }
      factors_[part].load(factors, side.scales, first, is_live, [&](int i) { return Wave::number(lane, i); });
    }
  }
  FLASHPORT_DEVICE void store(unsigned char* tiles, const Block& block, const KvSide& side, int next_tile) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Values::widen(rows_[part], factors_[part], first_column(block, part), side.format, side.scales, side.columns);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = Layout::further(to_, i * Split::kLoadRows, part * Split::kSide);
        *reinterpret_cast<Words4*>(tiles + at) = rows_[part][i];
      }
    }
    to_ ^= next_tile;
  }

 private:
  FLASHPORT_DEVICE static int first_row_of_group(const Block& block) { return copying_group<kCfg>(block) * kOwnRows; }
  FLASHPORT_DEVICE static unsigned first_column(const Block& block, int part) {
    return (static_cast<unsigned>(block.thread()) % Split::kSide + part * Split::kSide) * 8;
  }

  RowPlaces<kCfg.tuning.keys, Values::kHasFactors> places_;
  int to_;  // byte offset in LDS of the thread's first vector
  Words4 rows_[kParts][kLoads];
  [[no_unique_address]] RowFactors<Values::kHasFactors, kLoads> factors_[kParts];
};

}  // namespace flashport::FLASHPORT_TARGET::attention
