// Tiles of q8_0, q4_0 and 16 bits in shared memory: copied unit by unit, read by ldmatrix (the PTX manual's) and put
// together as cuda/decode/kv_operand.h does it, with a number for each byte of each head and row. Every byte must come
// to the lane and register where the other operand of mma.sync has its key and dim.
#include "cuda/decode/row_layout.h"

#include <gtest/gtest.h>

#include <array>
#include <set>
#include <vector>

#include "cuda/decode/lane_maps.h"

namespace flashport {
namespace {

constexpr int kWave = 32;
constexpr int kNothing = -1;
using Bytes = std::array<int, 4>;           // of a register
using Register = std::array<Bytes, kWave>;  // of a wave
constexpr int block_bytes(KvFormat format) { return format == KvFormat::kQ8_0 ? 34 : 18; }

// What byte `byte` of the row of `head` at `key` is called.
constexpr int name_of(int key, int head, int byte) { return (key << 16) + (head << 12) + byte; }
// The byte that has `dim`: of q4_0 in its low or its high bits.
constexpr int name_of_value(KvFormat format, int key, int head, int dim) {
  const int values = format == KvFormat::kQ8_0 ? 32 : 16;
  return name_of(key, head, dim / 32 * block_bytes(format) + 2 + dim % values);
}

// A tile as a block of kHeads teams has it in shared memory, the rings of different teams apart.
template <KvFormat kTheFormat, int kDim, int kHeads, int kTheKeys = kLeafKeys>
class Tile {
 public:
  static constexpr KvFormat kFormat = kTheFormat;
  static constexpr int kKeys = kTheKeys;  // of a turn
  static constexpr int kTeams = kHeads;
  static constexpr int kDims = kDim;
  using Layout = RowLayout<kFormat, kDim, kHeads, kKeys>;
  static constexpr int kRingBytes = (Layout::kRows * Layout::kPitch + 127) / 128 * 128 + 384;
  static constexpr int kBlocks = kDim / 32;

  static int row_offset(int row) { return Layout::row_offset(row, kRingBytes); }
  static int offset(int row, int byte) { return row_offset(row) + (byte ^ Layout::swizzle(row)); }
  Tile() : bytes_(kHeads * kRingBytes, kNothing) {}

  // As a team's producer copies the head that it works on, or all heads of a row as one stretch.
  void copy_head(int team, int head, int unit) {
    const int first = Layout::head_offset(team, head, false);
    for (int row = 0; row < kKeys; ++row) copy(row, first, Layout::kHeadBytes, head, unit);
  }
  void copy_rows(int unit) {
    for (int team = 0; team < kHeads; ++team)
      EXPECT_EQ(Layout::head_offset(team, team, true), team * Layout::kHeadBytes);
    for (int row = 0; row < kKeys; ++row) copy(row, 0, Layout::kBytes, 0, unit);
  }
  // One head, with what its first and its last unit of 16 bytes have of others: in the team's column alone.
  void copy_head_in_units(int team, int head) {
    const int first = team * Layout::kColumn;
    const int before = Layout::head_offset(team, head, false) - first;
    EXPECT_EQ(before, head * Layout::kHeadBytes % 16);
    for (int row = 0; row < kKeys; ++row) copy(row, first, Layout::kColumn, head, 16, before);
  }
  const std::vector<int>& bytes() const { return bytes_; }

  // `places`: of each lane. Matrices are read eight lanes at a time, and then no two may meet in a bank.
  std::vector<Register> ldmatrix(int count, bool transposed, const std::array<int, kWave>& places) const {
    std::vector<Register> r(count);
    for (int matrix = 0; matrix < count; ++matrix) {
      std::set<int> banks;
      for (int i = 0; i < 8; ++i) {
        EXPECT_EQ(places[8 * matrix + i] % 16, 0);
        banks.insert(places[8 * matrix + i] / 16 % 8);
      }
      EXPECT_EQ(banks.size(), 8u);
      for (int lane = 0; lane < kWave; ++lane) {
        const int g = lane / 4;
        const int c = lane % 4;
        for (int i = 0; i < 4; ++i) {
          const int row = transposed ? 2 * c + i / 2 : g;
          const int byte = transposed ? 2 * g + i % 2 : 4 * c + i;
          r[matrix][lane][i] = bytes_.at(places[8 * matrix + row] + byte);
        }
      }
    }
    return r;
  }

  // KeyOperand and ValueOperand: where the lanes' units lie, of keys from `first_key` on and of the head's block
  // `block`.
  static std::array<int, kWave> places(int first_key, const HeadPlace& head, int block) {
    std::array<int, kWave> places{};
    for (int lane = 0; lane < kWave; ++lane) {
      places[lane] =
          offset(first_key + lane % 16, first_unit_byte(kFormat, head, block) + 16 * lane_unit(kFormat, lane));
    }
    return places;
  }
  static std::array<int, kWave> at(std::array<int, kWave> places, int key, int byte) {
    for (int& place : places) place += row_offset(key) + byte;
    return places;
  }

 private:
  // `bytes` of heads from `head` on, and of what is `before` it.
  void copy(int row, int first, int bytes, int head, int unit, int before = 0) {
    for (int byte = first; byte < first + bytes; byte += unit) {
      const int to = offset(row, byte);
      EXPECT_EQ(to % unit, 0);
      // Whole rows in their ring, and sectors, or lines of 128 bytes, that stay what they are.
      if (kHeads > 1) {
        EXPECT_EQ(to / kRingBytes, row / Layout::kRows);
        EXPECT_LE(to % kRingBytes + unit, Layout::kTileBytes);
        constexpr int kPart = Layout::kExchanged;
        EXPECT_EQ(to % kRingBytes / kPart, (row % Layout::kRows * Layout::kPitch + byte) / kPart);
      }
      for (int i = 0; i < unit; ++i) {
        int& place = bytes_.at(to + i);
        EXPECT_EQ(place, kNothing);
        const int of_stretch = byte + i - first - before + kHeads * Layout::kHeadBytes;
        place = name_of(row, head - kHeads + of_stretch / Layout::kHeadBytes, of_stretch % Layout::kHeadBytes);
      }
    }
  }

  std::vector<int> bytes_;
};

int selected(unsigned selector, int i) { return static_cast<int>(selector >> (4 * i) & 7); }

// What a team works on, and how it lies in the tile.
struct Head {
  int team, head;
  bool together;
};

// The units of the block that KeyOperand and ValueOperand have when they come to `group` of so many: the one in which
// it begins, the one in which it ends and, of q8_0, the one between.
template <class T>
struct Units {
  std::vector<Register> first, last, middle, kept;

  void load(const T& tile, bool transposed, const std::array<int, kWave>& places, int key, int group, int groups) {
    const auto matrices = [&](int count, int byte) {
      return tile.ldmatrix(count, transposed, T::at(places, key, byte));
    };
    const auto half = [](const std::vector<Register>& r, int i) { return std::vector<Register>{r[i], r[i + 1]}; };
    if constexpr (T::kFormat == KvFormat::kQ8_0) {
      const int byte = 16 * block_unit(T::kFormat, group);
      first = group % 8 == 0 ? matrices(2, byte - 32) : last;
      const auto next = matrices(4, byte);
      last = half(next, 0);
      middle = half(next, 2);
    } else {
      if (group == 0) kept = matrices(4, 0);
      first = half(kept, group % 2 * 2);
      if (group % 2 == 1) kept = matrices(group + 1 < groups ? 4 : 2, 16 * (group + 1));
      last = half(kept, (group + 1) % 2 * 2);
    }
  }
};

// KeyOperand::load() and scale() of all of a team's waves, against the columns of the query.
template <class T>
void check_keys(const T& tile, const Head& of, int waves) {
  constexpr KvFormat kFormat = T::kFormat;
  const HeadPlace place = head_place<typename T::Layout>(of.team, of.head, of.together);
  const int first_block = place.block;
  std::array<int, T::kDims> dims;
  dims.fill(kNothing);
  for (int dim = 0; dim < T::kDims; ++dim) dims.at(query_column(dim_order(kFormat), first_block, dim)) = dim;
  for (int dim : dims) EXPECT_NE(dim, kNothing);

  const int key_tiles = T::kKeys / waves / 16;
  for (int wave = 0; wave < waves; ++wave) {
    const int first_key = wave * key_tiles * 16;
    const auto places = T::places(first_key, place, 0);
    for (int key_tile = 0; key_tile < key_tiles; ++key_tile) {
      Units<T> units;
      for (int block = 0; block < T::kBlocks; ++block) {
        units.load(tile, false, places, 16 * key_tile, block, T::kBlocks);
        for (int lane = 0; lane < kWave; ++lane) {
          const int g = lane / 4;
          const int c = lane % 4;
          for (int half = 0; half < 2; ++half) {
            const int key = first_key + 16 * key_tile + g + 8 * half;
            const unsigned selector = block_selector(kFormat, first_block + block % 8, c);
            for (int step = 0; step < 2; ++step) {
              for (int i = 0; i < 4; ++i) {
                const int from = selected(selector, i);
                const int byte = kFormat == KvFormat::kQ8_0 && step == 1 ? units.middle[half][lane][i]
                                 : from < 4                              ? units.first[half][lane][from]
                                                                         : units.last[half][lane][from - 4];
                const int k = kFormat != KvFormat::kQ4_0 ? 2 * c + i % 2 + i / 2 * 8 : 2 * c + i / 2 + i % 2 * 8;
                const int dim = dims[32 * block + 16 * step + k];
                EXPECT_TRUE(!has_nibbles(kFormat) || dim % 32 / 16 == step);
                ASSERT_EQ(byte, name_of_value(kFormat, key, of.head, dim))
                    << "team " << of.team << " head " << of.head << " key " << key << " block " << block << " lane "
                    << lane;
              }
            }
            constexpr int kPlaces = T::Layout::kScalePlaces;
            const int at = place.byte + block_bytes(kFormat) * (block % kPlaces);
            const int scale = T::offset(first_key + lane / 4, at) + T::row_offset(16 * key_tile + 8 * half) +
                              block_bytes(kFormat) * (block / kPlaces * kPlaces);
            for (int i = 0; i < 2; ++i) {
              ASSERT_EQ(tile.bytes().at(scale + i), name_of(key, of.head, block_bytes(kFormat) * block + i));
            }
          }
        }
      }
    }
  }
}

// ValueOperand::load() likewise: registers against the columns that tiles.h gives them and the keys of P.
template <class T>
void check_values(const T& tile, const Head& of, int waves) {
  constexpr KvFormat kFormat = T::kFormat;
  const HeadPlace place = head_place<typename T::Layout>(of.team, of.head, of.together);
  const int first_block = place.block;
  const int groups = T::kBlocks / waves;
  for (int wave = 0; wave < waves; ++wave) {
    const int first_group = wave * groups;
    const auto places = T::places(0, place, first_group);
    for (int first_key = 0; first_key < T::kKeys; first_key += 16) {
      Units<T> units;
      for (int group = 0; group < groups; ++group) {
        units.load(tile, true, places, first_key, group, groups);
        const int block = first_group + group;
        for (int lane = 0; lane < kWave; ++lane) {
          const int g = lane / 4;
          const int c = lane % 4;
          const int behind_scale = g - (first_block + first_group) % 8 - group;
          for (int half = 0; half < 2; ++half) {
            const Bytes& scales = units.first[half].at(lane - 4 * behind_scale);
            const Bytes split = behind_scale > 0 ? units.first[half][lane] : units.last[half][lane];
            const Bytes two_tiles[2] = {split, kFormat == KvFormat::kQ8_0 ? units.middle[half][lane] : split};
            for (int i = 0; i < 4; ++i) {
              const int key = first_key + 8 * half + 2 * c + i / 2;
              ASSERT_EQ(scales[i], name_of(key, of.head, block_bytes(kFormat) * block + i % 2));
              for (int of_two = 0; of_two < 2; ++of_two) {
                const int column = value_column(dim_order(kFormat), first_block, 2 * block + of_two, g, i % 2);
                EXPECT_TRUE(!has_nibbles(kFormat) || column % 32 / 16 == of_two);
                ASSERT_EQ(two_tiles[of_two][i], name_of_value(kFormat, key, of.head, column))
                    << "team " << of.team << " head " << of.head << " key " << key << " block " << block << " lane "
                    << lane;
              }
            }
          }
        }
      }
    }
  }
}

// For long headers this checks the copies only: their operands find units otherwise, which whole kernels on this
// machine show (kernels_test).
template <class T>
void check(const T& tile, const Head& of) {
  if (has_long_header(T::kFormat)) return;
  for (int waves : {1, 2, 4}) {
    check_keys(tile, of, waves);
    // A wave's columns are at most eight blocks.
    if (T::kBlocks % waves == 0 && 8 % (T::kBlocks / waves) == 0) check_values(tile, of, waves);
  }
  if (T::kDims == 512) check_values(tile, of, 8);
}

template <KvFormat kFormat, int kDim>
void check_one_head(int unit) {
  Tile<kFormat, kDim, 1> tile;
  tile.copy_head(0, 3, unit);
  check(tile, {0, 3, false});
}

TEST(RowLayout, OneHead) {
  check_one_head<KvFormat::kQ8_0, 64>(4);
  check_one_head<KvFormat::kQ8_0, 128>(4);
  check_one_head<KvFormat::kQ8_0, 192>(4);
  check_one_head<KvFormat::kQ8_0, 256>(4);
  check_one_head<KvFormat::kQ8_0, 512>(4);
  check_one_head<KvFormat::kQ4_0, 128>(8);
  check_one_head<KvFormat::kIq4Nl, 128>(8);
}

template <KvFormat kFormat, int kDim, int kHeads, int kKeys>
void check_heads_of_teams() {
  Tile<kFormat, kDim, kHeads, kKeys> together;
  together.copy_rows(16);
  for (int team = 0; team < kHeads; ++team) check(together, {team, team, true});
  for (int unit : {8, 4, 2}) {
    for (int head = 0; head < 8; ++head) {  // neighbours, but any of them in any team
      Tile<kFormat, kDim, kHeads, kKeys> apart;
      for (int team = 0; team < kHeads; ++team) apart.copy_head(team, (head + 3 * team) % 8, unit);
      for (int team = 0; team < kHeads; ++team) check(apart, {team, (head + 3 * team) % 8, false});
    }
  }
}

// What teams that help the first one copy, in any column.
template <KvFormat kFormat>
void check_units_of_heads() {
  for (int head = 0; head < 8; ++head) {
    Tile<kFormat, 128, 2, 128> tile;
    for (int team = 0; team < 2; ++team) tile.copy_head_in_units(team, head);
    for (int team = 0; team < 2; ++team) check(tile, {team, head, false});
  }
}

TEST(RowLayout, UnitsOfHeads) {
  check_units_of_heads<KvFormat::kQ8_0>();
  check_units_of_heads<KvFormat::kQ4_0>();
  check_units_of_heads<KvFormat::kIq4Nl>();
  check_units_of_heads<KvFormat::kQ5_1>();
  check_units_of_heads<KvFormat::kQ5_0>();
  check_units_of_heads<KvFormat::kQ4_1>();
}

TEST(RowLayout, HeadsOfTeams) {
  check_heads_of_teams<KvFormat::kQ8_0, 128, 2, 128>();
  check_heads_of_teams<KvFormat::kQ8_0, 128, 4, 64>();
  check_heads_of_teams<KvFormat::kQ8_0, 256, 2, 64>();
  check_heads_of_teams<KvFormat::kQ4_0, 128, 2, 128>();
  check_heads_of_teams<KvFormat::kQ4_0, 128, 4, 64>();
  check_heads_of_teams<KvFormat::kQ4_0, 128, 4, 128>();
  check_heads_of_teams<KvFormat::kIq4Nl, 128, 4, 128>();
  check_heads_of_teams<KvFormat::kQ5_1, 128, 4, 64>();
  check_heads_of_teams<KvFormat::kQ5_0, 128, 4, 64>();
  check_heads_of_teams<KvFormat::kQ4_1, 128, 4, 64>();
}

// KeyOperand::load() and ValueOperand::load() of 16 bits: register `matrix` against where mma.sync has A's keys and
// dims, or columns and keys.
template <class T>
void check_16_bits(const T& tile, const Head& of, int waves) {
  using Layout = typename T::Layout;
  const HeadPlace place = head_place<Layout>(of.team, of.head, of.together);
  EXPECT_EQ(place.block, 0);
  // LanePlaces: a lane's units 32 bytes on are exchanged alike, and rows a multiple of 16 on lie a constant apart.
  const auto at = [&](int first_row, int row, int first, int unit, int byte) {
    const int exchanged = first % 128 ^ Layout::swizzle(first_row);
    const int to = T::row_offset(first_row) + first / 128 * 128 + (unit ^ exchanged ^ byte % 128) + byte / 128 * 128 +
                   T::row_offset(row);
    EXPECT_EQ(to, T::offset(first_row + row, first + unit + byte));
    return to;
  };
  const auto expect_values = [&](const Register& r, const auto& name_of_value) {
    for (int lane = 0; lane < kWave; ++lane) {
      for (int i = 0; i < 4; ++i) {
        ASSERT_EQ(r[lane][i], name_of_value(lane / 4, lane % 4, i / 2) + i % 2)
            << "team " << of.team << " head " << of.head << " lane " << lane;
      }
    }
  };
  std::array<int, kWave> places{};
  const int keys = T::kKeys / waves;
  for (int key = 0; key < T::kKeys; key += 16) {
    const int first_key = key / keys * keys;
    for (int dim = 0; dim < T::kDims; dim += 16) {
      for (int lane = 0; lane < kWave; ++lane) {
        places[lane] = at(first_key + lane % 16, key - first_key, place.byte, 16 * (lane / 16), 2 * dim);
      }
      const std::vector<Register> a = tile.ldmatrix(4, false, places);
      for (int matrix = 0; matrix < 4; ++matrix) {
        expect_values(a[matrix], [&](int g, int c, int i) {
          return name_of(key + g + matrix % 2 * 8, of.head, 2 * (dim + matrix / 2 * 8 + 2 * c + i));
        });
      }
    }
  }
  const int columns = T::kDims / waves;
  for (int key = 0; key < T::kKeys; key += 16) {
    for (int column = 0; column < T::kDims; column += 16) {
      const int first = place.byte + column / columns * columns * 2;
      for (int lane = 0; lane < kWave; ++lane) {
        places[lane] = at(lane / 16 * 8 + lane % 8, key, first, 16 * (lane / 8 % 2), 2 * column + place.byte - first);
      }
      const std::vector<Register> a = tile.ldmatrix(4, true, places);
      for (int matrix = 0; matrix < 4; ++matrix) {
        expect_values(a[matrix], [&](int g, int c, int i) {
          return name_of(key + matrix / 2 * 8 + 2 * c + i, of.head, 2 * (column + g + matrix % 2 * 8));
        });
      }
    }
  }
}

template <int kDim, int kHeads, int kKeys>
void check_16_bit_heads() {
  Tile<KvFormat::kBf16, kDim, kHeads, kKeys> together, apart;
  together.copy_rows(16);
  for (int team = 0; team < kHeads; ++team) apart.copy_head(team, 5 - 2 * team, 16);
  for (int team = 0; team < kHeads; ++team) {
    check_16_bits(together, {team, team, true}, 4);
    check_16_bits(apart, {team, 5 - 2 * team, false}, 4);
  }
}

TEST(RowLayout, HeadsOf16Bits) {
  check_16_bit_heads<64, 1, 128>();
  check_16_bit_heads<64, 2, 128>();
  check_16_bit_heads<128, 1, 64>();
}

// Heads that are copied alone are turned as those of teams are. Otherwise kernels of one shape would differ in bits.
template <KvFormat kFormat>
void check_alone() {
  using Alone = RowLayout<kFormat, 128, 1>;
  for (int head = 0; head < 8; ++head) {
    EXPECT_EQ(Alone::first_block(head), (RowLayout<kFormat, 128, 4>::first_block(head)));
    EXPECT_EQ(Alone::head_offset(0, head, false), block_bytes(kFormat) * Alone::first_block(head) % 16);
    EXPECT_LE(Alone::head_offset(0, head, false) + Alone::kHeadBytes, Alone::kPitch);
  }
}

// The order of the products, which bits follow from, is a head's own.
template <KvFormat kFormat, int kHeads>
void check_first_blocks() {
  using Layout = RowLayout<kFormat, 128, kHeads>;
  for (int head = 0; head < 16; ++head) {
    const int among_neighbours = Layout::head_offset(head % kHeads, head, true) % 16;
    EXPECT_EQ(among_neighbours, block_bytes(kFormat) * Layout::first_block(head) % 16);
    EXPECT_EQ(Layout::first_block(head), (RowLayout<kFormat, 128, 4>::first_block(head)));
    for (int team = 0; team < kHeads; ++team) EXPECT_EQ(Layout::head_offset(team, head, false) % 16, among_neighbours);
  }
}
TEST(RowLayout, FirstBlockFollowsFromTheHead) {
  check_first_blocks<KvFormat::kQ8_0, 2>();
  check_first_blocks<KvFormat::kQ8_0, 4>();
  check_first_blocks<KvFormat::kQ4_0, 2>();
  check_first_blocks<KvFormat::kQ4_0, 4>();
  check_alone<KvFormat::kQ8_0>();
  check_alone<KvFormat::kQ4_0>();
}

// The 128-byte swizzle of the PTX manual: what wgmma does to each address that it forms from a descriptor.
constexpr int swizzled(int address) { return address ^ (address >> 7 & 7) << 4; }

// Panels, as wgmma's descriptors step through them (cuda/decode/wgmma_tiles.h), against where copies put each value.
template <int kDim, int kRows = kLeafKeys>
void check_panels() {
  using Layout = PanelLayout<kDim, kRows>;
  constexpr int kGroup = 1024;  // from eight rows to the next eight
  const auto row_in_panel = [](int row) { return row / 8 * kGroup + row % 8 * 128; };
  for (int step = 0; step < kDim / 16; ++step) {  // 16 dims of each row: queries, keys
    const int first = step / 4 * Layout::kPanelBytes + step % 4 * 32;
    for (int row = 0; row < Layout::kRows; ++row) {
      for (int dim = 0; dim < 16; ++dim) {
        ASSERT_EQ(swizzled(first + row_in_panel(row) + 2 * dim), Layout::offset(row, 2 * (16 * step + dim)));
      }
    }
  }
  for (int step = 0; step < Layout::kRows / 16; ++step) {  // 16 rows of 64 columns: values
    for (int panel = 0; panel < kDim / 64; ++panel) {
      const int first = panel * Layout::kPanelBytes + step * 16 * 128;
      for (int key = 0; key < 16; ++key) {
        for (int column = 0; column < 64; ++column) {
          ASSERT_EQ(swizzled(first + row_in_panel(key) + 2 * column),
                    Layout::offset(16 * step + key, 2 * (64 * panel + column)));
        }
      }
    }
  }
  // RowCopies: a lane keeps its place and adds rows and whole panels to it.
  std::set<int> taken;
  for (int row = 0; row < Layout::kRows; ++row) {
    for (int byte = 0; byte < Layout::kBytes; byte += 16) {
      const int to = Layout::row_offset(row) + (Layout::column(byte) ^ Layout::swizzle(row));
      EXPECT_EQ(to, Layout::offset(row, byte));
      EXPECT_EQ(Layout::column(byte), Layout::column(byte % 128) + Layout::column(byte / 128 * 128));
      EXPECT_GE(to, 0);
      EXPECT_LE(to + 16, Layout::kRows * Layout::kPitch);
      EXPECT_TRUE(taken.insert(to).second);
    }
  }
}

TEST(RowLayout, PanelsAreWhatWgmmaReads) {
  check_panels<64>();
  check_panels<64, 128>();
  check_panels<128>();
  check_panels<128, 128>();
  check_panels<192>();
  check_panels<256>();
}

}  // namespace
}  // namespace flashport
