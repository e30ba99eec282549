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

// The same for values that are transposed on their way: a thread has four keys x four columns at a time, a wave a block
// of kWaveFours times four keys x 32 columns. The key blocks of a wave are neighbours, its column blocks are those of
// all waves apart.
template <int kKeys, int kColumns, int kWaveSize, int kThreads>
struct FourSplit {
  static constexpr int kWaves = kThreads / kWaveSize, kWaveFours = kWaveSize / 8;
  static constexpr int kColumnBlocks = kColumns / 32, kKeyBlocks = kKeys / (4 * kWaveFours);
  static constexpr bool kSomeIdle = kColumnBlocks * kKeyBlocks < kWaves;                // waves have no values to copy
  static constexpr int kWaveColumns = kColumnBlocks < kWaves ? kColumnBlocks : kWaves;  // waves side by side
  static constexpr int kOwnColumnBlocks = kColumnBlocks / kWaveColumns;
  static constexpr int kOwnKeyBlocks = kSomeIdle ? 1 : kKeyBlocks * kWaveColumns / kWaves;
  static constexpr int kBlocks = kOwnColumnBlocks * kOwnKeyBlocks;  // of a wave
  static constexpr int kWaveKeys = kOwnKeyBlocks * 4 * kWaveFours;
  static_assert(kSomeIdle || kBlocks * kWaves == kColumnBlocks * kKeyBlocks);

  static constexpr bool is_idle(int wave) { return kSomeIdle && wave >= kColumnBlocks * kKeyBlocks; }
  // The first column, and the first four keys, of a lane's first block.
  static constexpr int column(int wave, int lane) { return wave % kWaveColumns * 32 + lane % 8 * 4; }
  static constexpr int four(int wave, int lane) { return wave / kWaveColumns * kOwnKeyBlocks * kWaveFours + lane / 8; }
  // From there to block i.
  static constexpr int column_step(int i) { return i % kOwnColumnBlocks * 32 * kWaveColumns; }
  static constexpr int key_step(int i) { return i / kOwnColumnBlocks * 4 * kWaveFours; }
};

}  // namespace flashport
