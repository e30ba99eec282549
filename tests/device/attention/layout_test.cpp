// Where keys and values of attention lie in LDS on AMD: every vector has a place of its own, the steps that kernels
// take from vector to vector are those of the maps, and lanes that LDS serves together are in banks of their own.
//
// LDS serves 128 bytes a clock, of 32 banks of four bytes. The lanes that go together are those of CK Tile's pages on
// bank conflicts (ROCm documentation, "Understanding AMD GPU LDS and bank conflicts", and the ROCm blog on them): eight
// neighbours of a write of 16 bytes, sixteen of 8 bytes; of a read of 16 bytes by a wave of 64 lanes 0 to 3 with 20 to
// 23, 4 to 7 with 16 to 19, 8 to 11 with 28 to 31, 12 to 15 with 24 to 27, and so on from lane 32. CDNA4 reads 256
// bytes of 64 banks a clock: lanes 0 to 3 with 12 to 15 and 20 to 27, and the others (HipKittens, arXiv 2511.08083).
#include "hip/attention/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "hip/arch/lane_maps.h"
#include "hip/attention/row_split.h"

namespace flashport {
namespace {

// Times that the fullest bank of `banks` is needed for accesses of `bytes` at these offsets.
int passes(const std::vector<int>& offsets, int bytes, int banks = 32) {
  std::vector<std::set<int>> words(banks);
  for (const int offset : offsets) {
    for (int word = offset / 4; word < (offset + bytes) / 4; ++word) words[word % banks].insert(word);
  }
  std::size_t most = 0;
  for (const std::set<int>& bank : words) most = std::max(most, bank.size());
  return static_cast<int>(most);
}

// The lanes of group `group` (0 to 7) of a read of 16 bytes by a wave of 64.
std::vector<int> read_group(int group) {
  const int first = group % 4 * 4, far = 16 + (group % 4 ^ 1) * 4, half = group / 4 * 32;
  std::vector<int> lanes;
  for (int i = 0; i < 4; ++i) lanes.push_back(half + first + i);
  for (int i = 0; i < 4; ++i) lanes.push_back(half + far + i);
  return lanes;
}

template <class Offset>
void expect_places(int rows, int vectors, const Offset& offset) {
  std::set<int> seen;
  for (int row = 0; row < rows; ++row) {
    for (int vector = 0; vector < vectors; ++vector) seen.insert(offset(row, vector));
  }
  EXPECT_EQ(static_cast<int>(seen.size()), rows * vectors);
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), (rows * vectors - 1) * kVectorBytes);
}

// Reads of MFMA (row n, vector 2 pair + h of lane 32 h + n) and WMMA (line n % 16, both vectors).
template <class Offset, class Pair>
void expect_reads(int vectors, const Offset& offset, const Pair& pair_offset) {
  for (int pair = 0; pair < vectors / 2; ++pair) {
    for (int group = 0; group < 8; ++group) {
      std::vector<int> offsets;
      for (const int lane : read_group(group)) {
        const int first = offset(lane % 32, lane / 32);
        offsets.push_back(pair_offset(first, pair));
        EXPECT_EQ(pair_offset(first, pair), offset(lane % 32, 2 * pair + lane / 32));
        EXPECT_EQ(pair_offset(first, pair) + 32 * vectors * kVectorBytes, offset(32 + lane % 32, 2 * pair + lane / 32));
      }
      EXPECT_EQ(passes(offsets, 16), 1);
    }
    for (int first_lane = 0; first_lane < 16; first_lane += 8) {
      std::vector<int> offsets;
      for (int n = first_lane; n < first_lane + 8; ++n) {
        const int first = offset(wmma_line_in_fours(n), 0);
        offsets.push_back(pair_offset(first, pair));
        EXPECT_EQ(pair_offset(first ^ kVectorBytes, pair), offsets.back() ^ kVectorBytes);
        EXPECT_EQ(offsets.back() ^ kVectorBytes, offset(wmma_line_in_fours(n), 2 * pair + 1));
      }
      EXPECT_EQ(passes(offsets, 16), 1);
    }
  }
}

template <int kVectors, int kPlaces = 8>
void expect_keys() {
  const auto offset = [](int key, int vector) { return key_offset<kVectors, kPlaces>(key, vector); };
  const auto pair = [](int first, int i) { return key_pair_offset<kVectors, kPlaces>(first, i); };
  expect_places(64, kVectors, offset);
  expect_reads(kVectors, offset, pair);
  for (int vector = 0; vector < kVectors; vector += 8) {  // eight lanes write neighbours in a row
    std::vector<int> offsets;
    for (int i = 0; i < 8; ++i) offsets.push_back(offset(5, vector + i));
    EXPECT_EQ(passes(offsets, 16), 1);
  }
  if (kPlaces < 16) return;
  for (const std::vector<int>& lanes : {std::vector<int>{0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27},
                                        std::vector<int>{4, 5, 6, 7, 8, 9, 10, 11, 16, 17, 18, 19, 28, 29, 30, 31}}) {
    std::vector<int> offsets;
    for (const int lane : lanes) offsets.push_back(offset(lane, 6));
    EXPECT_EQ(passes(offsets, 16, 64), 1);
  }
}

TEST(AttentionLayout, Keys) {
  expect_keys<8>();
  expect_keys<16>();
  expect_keys<24>();
  expect_keys<32>();
  expect_keys<64>();
  expect_keys<16, 16>();
}

// The loads of a group's threads cover a tile once, they come to the places of the map, and each lane finds the row of
// its load among those that its wave looks up.
template <class Layout, int kRows>
void expect_split() {
  constexpr int kThreads = 256;
  using Split = RowSplit<Layout::kVectors, kRows, kThreads>;
  std::set<int> seen;
  for (int thread = 0; thread < kThreads; ++thread) {
    const int first = Layout::offset(Split::row(thread), Split::vector(thread));
    for (int part = 0; part < Split::kParts; ++part) {
      for (int load = 0; load < Split::kRowLoads; ++load) {
        const int rows = load * Split::kLoadRows, vectors = part * Split::kSide;
        const int at = Layout::further(first, rows, vectors);
        EXPECT_EQ(at, Layout::offset(Split::row(thread) + rows, Split::vector(thread) + vectors));
        seen.insert(at);
      }
    }
  }
  EXPECT_EQ(static_cast<int>(seen.size()), kRows * Layout::kVectors);
  const auto expect_wave = [&]<int kWaveSize>() {
    using Wave = WaveRows<Split, kWaveSize>;
    for (int thread = 0; thread < kThreads; ++thread) {
      for (int load = 0; load < Split::kRowLoads; ++load) {
        const auto number = static_cast<int>(Wave::number(thread % kWaveSize, load));
        EXPECT_LT(number, Wave::kOfTile);
        EXPECT_EQ(Wave::row(thread / kWaveSize, number), Split::row(thread) + load * Split::kLoadRows);
      }
    }
  };
  expect_wave.template operator()<32>();
  expect_wave.template operator()<64>();
}

TEST(AttentionLayout, RowsAreSplitAmongThreads) {
  expect_split<KeyRows<8, 8>, 128>();
  expect_split<KeyRows<16, 8>, 32>();
  expect_split<KeyRows<16, 16>, 64>();
  expect_split<KeyRows<24, 8>, 32>();
  expect_split<KeyRows<24, 8>, 64>();
  expect_split<KeyRows<32, 8>, 64>();
  expect_split<KeyRows<64, 8>, 32>();
  expect_split<ValueRows<16>, 32>();
  expect_split<ValueRows<32>, 64>();
  expect_split<ValueRows<64>, 32>();
}

template <int kVectors>
void expect_transposed_values() {
  const auto offset = [](int column, int vector) { return value_offset<kVectors>(column, vector); };
  expect_places(64, kVectors, offset);
  expect_reads(kVectors, offset, pair_offset);
  for (int column = 0; column < 64; column += 4) {
    for (int vector = 0; vector < kVectors; ++vector) {
      for (int j = 0; j < 4; ++j) {
        EXPECT_EQ(next_column_offset<kVectors>(offset(column, vector), j), offset(column + j, vector));
      }
    }
  }
  // WMMA reads 16 columns at a time: the odd ones of those blocks have the other pair in a place.
  for (int n = 0; n < 16; ++n) {
    for (int pair = 0; pair < kVectors / 2; ++pair) {
      const int row = 16 * kVectors * kVectorBytes;
      EXPECT_EQ(pair_offset(offset(n, 0), pair ^ 1) + row, offset(16 + n, 2 * pair));
    }
  }
  // Sixteen lanes write fours of a column of eight fours of columns, two fours of keys each.
  for (int four = 0; four < 2 * kVectors; four += 2) {
    for (int j = 0; j < 4; ++j) {
      std::vector<int> offsets;
      for (int lane = 0; lane < 16; ++lane) {
        const int at = four + lane / 8;
        offsets.push_back(offset(lane % 8 * 4 + j, at / 2) + at % 2 * 8);
      }
      EXPECT_EQ(passes(offsets, 8), 1);
    }
  }
}

TEST(AttentionLayout, TransposedValues) {
  expect_transposed_values<4>();
  expect_transposed_values<8>();
  expect_transposed_values<16>();
}

// The threads of a group have each four of keys of each four columns once, its columns come to the places of the map,
// and each lane finds its rows among those that its wave looks up.
template <int kKeys, int kOwnKeys, int kColumns, int kWaveSize>
void expect_fours() {
  constexpr int kVectors = kKeys / 8;
  using Split = FourSplit<kOwnKeys, kColumns, kWaveSize, 256>;
  std::set<int> seen;
  for (int thread = 0; thread < 256; ++thread) {
    const int wave = thread / kWaveSize, lane = thread % kWaveSize;
    if (Split::is_idle(wave)) continue;
    const int column = Split::column(wave, lane), four = Split::four(wave, lane);
    for (int block = 0; block < Split::kBlocks; ++block) {
      const int columns = Split::column_step(block), keys = Split::key_step(block);
      const int own = first_key_of_four(lane / 8) + keys;
      EXPECT_LT(own + 3, Split::kWaveKeys);
      EXPECT_EQ(first_key_of_four(Split::four(wave, 0)) + own, first_key_of_four(four + keys / 4));
      for (int c = 0; c < 4; ++c) {
        const int first = next_column_offset<kVectors>(four_offset<kVectors>(column, four), c);
        const int at = further_four_offset<kVectors>(first, columns, keys);
        EXPECT_EQ(at, four_offset<kVectors>(column + columns + c, four + keys / 4));
        seen.insert(at);
      }
    }
  }
  EXPECT_EQ(static_cast<int>(seen.size()), kOwnKeys / 4 * kColumns);
}

TEST(AttentionLayout, ValuesAreSplitAmongThreads) {
  expect_fours<128, 64, 64, 64>();
  expect_fours<64, 64, 64, 64>();
  expect_fours<64, 32, 128, 64>();
  expect_fours<32, 32, 128, 64>();
  expect_fours<32, 32, 256, 64>();
  expect_fours<32, 32, 512, 64>();
  expect_fours<64, 64, 64, 32>();
  expect_fours<32, 32, 64, 32>();
  expect_fours<32, 32, 128, 32>();
  expect_fours<32, 32, 256, 32>();
  expect_fours<32, 32, 512, 32>();
}

// What a lane multiplies of 16 keys is what it has of their scores: element i of its eight and vector 2 t + h agree.
TEST(AttentionLayout, KeysOfAVectorAreThoseOfALane) {
  for (int t = 0; t < 4; ++t) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 8; ++i) {
        const int four = 2 * (2 * t + half) + i / 4;
        EXPECT_EQ(first_key_of_four(four) + i % 4, column_row(8 * t + i, half));
      }
    }
  }
}

// ds_read_b64_tr_b16: element j of lane l comes from lane 4 j + l / 4 % 4 of its sixteen, 16-bit value l % 4
// (ROCm/rocm-systems pull request 10175).
template <int kVectors>
void expect_rows_of_values() {
  for (int key = 0; key < 8; ++key) {
    for (int vector = 0; vector < kVectors; ++vector) {
      EXPECT_EQ(value_place<kVectors>(key, value_place<kVectors>(key, vector)), vector);
      EXPECT_LT(value_place<kVectors>(key, vector), kVectors);
    }
  }
  const auto byte_of = [](int key, int column) {
    return (key * kVectors + value_place<kVectors>(key, column / 8)) * kVectorBytes + column % 8 * 2;
  };
  for (int pair = 0; pair < 2; ++pair) {
    for (int block = 0; block < kVectors / 4; ++block) {
      for (int part = 0; part < 2; ++part) {
        std::vector<int> offsets(64);
        for (int lane = 0; lane < 64; ++lane) {
          offsets[lane] = value_read_step<kVectors>(value_read_offset<kVectors>(lane), block, pair, part);
        }
        for (int lane = 0; lane < 64; ++lane) {
          for (int j = 0; j < 4; ++j) {
            const int from = lane / 16 * 16 + 4 * j + lane / 4 % 4;
            const int key = column_row(8 * pair + 4 * part + j, lane / 32), column = 32 * block + lane % 32;
            EXPECT_EQ(offsets[from] + lane % 4 * 2, byte_of(key, column));
          }
        }
        for (int lane = 0; lane < 64; lane += 16) {
          EXPECT_EQ(passes({offsets.begin() + lane, offsets.begin() + lane + 16}, 8), 1);
        }
        // If LDS serves 256 bytes of 64 banks a clock.
        for (int lane = 0; lane < 64; lane += 32) {
          EXPECT_EQ(passes({offsets.begin() + lane, offsets.begin() + lane + 32}, 8, 64), 1);
        }
      }
    }
  }
}

TEST(AttentionLayout, RowsOfValues) {
  expect_rows_of_values<8>();
  expect_rows_of_values<16>();
  expect_rows_of_values<32>();
  expect_rows_of_values<64>();
}

}  // namespace
}  // namespace flashport
