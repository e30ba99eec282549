// How the threads of a group of waves share the rows of a tile, a vector of eight values at a time. Plain C++, so that
// any host can check it.
//
// A load is a vector of every thread: kSide neighbouring vectors of kLoadRows rows, where kSide is the largest power of
// two that divides a row's kVectors. A row has kParts of them, so that kParts loads bring kLoadRows rows.
#pragma once

namespace flashport {

template <int kVectors, int kRows, int kThreads>
struct RowSplit {
  static constexpr int kSide = kVectors & -kVectors, kParts = kVectors / kSide;
  static constexpr int kLoadRows = kThreads / kSide, kRowLoads = kRows / kLoadRows;
  static_assert(kLoadRows * kSide == kThreads && kRowLoads * kLoadRows == kRows);

  static constexpr int row(int thread) { return thread / kSide; }
  static constexpr int vector(int thread) { return thread % kSide; }
};

// The rows of such a tile that a wave of kWaveSize threads has some of.
template <class Split, int kWaveSize>
struct WaveRows {
  static constexpr int kOfLoad = kWaveSize > Split::kSide ? kWaveSize / Split::kSide : 1;
  static constexpr int kOfTile = Split::kRowLoads * kOfLoad;
  static_assert(kOfTile <= kWaveSize);

  // Row number `i` (below kOfTile) of wave `wave` of the group.
  static constexpr int row(int wave, int i) {
    return Split::row(wave * kWaveSize) + i / kOfLoad * Split::kLoadRows + i % kOfLoad;
  }
  // The number of the row that a lane has of load `load` of a part.
  static constexpr unsigned number(unsigned lane, unsigned load) { return lane / Split::kSide + load * kOfLoad; }
};

}  // namespace flashport
