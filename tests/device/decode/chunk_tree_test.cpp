// Launches of the real tree over states that are made up: whatever the grid, the batch and the order of blocks, a
// tile's output is that of one fixed order of merges, which this file writes out anew. Partial results lie in memory
// that may be written once, and counters come back to zero.
#include "tests/device/decode/launch_model.h"

#include "common/device/decode/chunk_tree.h"
#include "common/device/decode/combine_kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace flashport::turns::decode {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kLiveRows = 2, kAllColumns = 8;

// Which slice of a state some threads have: rows [first_row, ...), columns [first_column, ...).
template <int kSlices_, int kKept, int kTurn>
struct FakeTiles {
  static constexpr int kSlices = kSlices_;  // 1, or 2 of columns, or 4 of rows and columns
  static constexpr int kSliceRows = kSlices == 4 ? 1 : 2;
  static constexpr int kSliceColumns = kSlices == 1 ? kAllColumns : kAllColumns / 2;
  static constexpr int kColumns = kAllColumns;
  static constexpr int kRows = kLiveRows;
  static constexpr int kRowSlots = kSliceRows;
  static constexpr int kKeptStates = kKept;
  static constexpr int kTurnLeaves = kTurn;
  static constexpr int kPiecesAtOnce = kTurn;
  struct Rows {
    float v[kRowSlots] = {};
    float& operator[](int slot) { return v[slot]; }
    float operator[](int slot) const { return v[slot]; }
  };
  struct Out {
    float x[kRowSlots][kSliceColumns] = {};
  };

  const Block& block;
  int number;  // of the slice

  int slice() const { return number; }
  const Block& slice_threads() const { return block; }
  static int row_slots() { return kRowSlots; }
  static int slice_rows() { return kSliceRows; }
  static int live_rows() { return kLiveRows; }
  int first_row() const { return kSlices == 4 ? number / 2 : 0; }
  int first_column() const { return kSlices == 1 ? 0 : number % 2 * kSliceColumns; }
  int row_of(int slot) const { return first_row() + slot; }
  bool owns_row(int) const { return first_column() == 0; }

  void clear(Out& out) const {
    for (auto& row : out.x) std::fill(std::begin(row), std::end(row), 0.0f);
  }
  template <class F>
  void for_each_pair(Out& to, const Out& from, F&& f) const {
    for (int row = 0; row < kRowSlots; ++row) {
      for (int col = 0; col < kSliceColumns; ++col) f(to.x[row][col], from.x[row][col], row);
    }
  }
  template <class F>
  void for_each_out(const Out& out, F&& f) const {
    for (int row = 0; row < kRowSlots; ++row) {
      for (int col = 0; col < kSliceColumns; ++col) f(out.x[row][col], row, first_column() + col);
    }
  }
  static void store(const float* from, int count, float* to) {
    once_memory.write(to, count);
    if (!once_memory.fault) std::copy(from, from + count, to);
  }
  void store_rows(const Rows& m, const Rows& l, float* to) const {
    for (int slot = 0; slot < kRowSlots; ++slot) {
      store(m.v + slot, 1, to + 2 * slot);
      store(l.v + slot, 1, to + 2 * slot + 1);
    }
  }
  void store_tile(const Out& out, float* to) const { store(out.x[0], kRowSlots * kSliceColumns, to); }
};

// Keeps the tile's o by itself.
struct KeepingTiles : FakeTiles<2, 2, 1> {
  static constexpr int kStatesInMemory = 1;
  static constexpr bool kTileInShared = true;
  mutable Out kept = {};

  template <class F>
  void for_each_kept(Out& out, F&& f) const {
    for (int row = 0; row < kRowSlots; ++row) {
      for (int col = 0; col < kSliceColumns; ++col) f(kept.x[row][col], out.x[row][col], row);
    }
  }
};

// The result of one leaf: numbers of its own, whatever the launch. Some rows see none of its keys.
float made_up(int tile_id, int leaf, int row, int column) {
  std::uint32_t x = 0x9e3779b9u;
  for (const int each : {tile_id, leaf, row, column})
    x = (x ^ static_cast<std::uint32_t>(each + 1)) * 0x85ebca6bu, x ^= x >> 15;
  return static_cast<float>(x >> 8) * 0x1p-24f;
}
struct LeafRow {
  float m, l;
  LeafRow(int tile_id, int leaf, int row) {
    const bool hidden = made_up(tile_id, leaf, row, -2) < 0.05f;
    m = hidden ? -kInfinity : 20.0f * made_up(tile_id, leaf, row, -3);
    l = hidden ? 0.0f : 1.0f + made_up(tile_id, leaf, row, -4);
  }
  float o(int tile_id, int leaf, int row, int column) const {
    return l == 0.0f ? 0.0f : made_up(tile_id, leaf, row, column) - 0.5f;
  }
};

// Sequences keep their numbers wherever they are in a batch.
struct Batch {
  Launch launch;
  std::vector<int> ids;
  int tile_id(int seq, int tile) const { return ids[seq] * launch.tiles() + tile; }
};

// (m, l, o) of a whole row in one fixed order: leaves of a chunk, chunks of a group, groups of the tile.
struct Row {
  float m = -kInfinity, l = 0.0f;
  std::vector<float> o = std::vector<float>(kAllColumns, 0.0f);
  void join(const Row& x) {
    const merge::MergeWeights w = merge::merge_weights(m, x.m);
    m = w.m;
    l = merge::merge_value(l, w.a, x.l, w.b);
    for (int col = 0; col < kAllColumns; ++col) o[col] = merge::merge_value(o[col], w.a, x.o[col], w.b);
  }
};

template <class Part>
Row join_in_order(int count, const Part& part, bool from_nothing = false) {
  Row all = from_nothing ? Row{} : part(0);
  for (int i = from_nothing ? 0 : 1; i < count; ++i) all.join(part(i));
  return all;
}

Row expected_row(int tile_id, int leaves, const ChunkRule& rule, int row) {
  const int size = chunk_size(leaves, rule).leaves;
  const int chunks = (leaves + size - 1) / size;
  const auto leaf = [&](int number) {
    const LeafRow from(tile_id, number, row);
    Row state;
    state.m = from.m;
    state.l = from.l;
    for (int col = 0; col < kAllColumns; ++col) state.o[col] = from.o(tile_id, number, row, col);
    return state;
  };
  const auto chunk = [&](int number) {
    const int first = number * size;
    return join_in_order(std::min(size, leaves - first), [&](int i) { return leaf(first + i); }, true);
  };
  const auto group = [&](int number) {
    const int first = number * 4;
    return join_in_order(std::min(4, chunks - first), [&](int i) { return chunk(first + i); });
  };
  return join_in_order((chunks + 3) / 4, group);
}

// out and lse of each row of each tile of a batch.
using Outputs = std::vector<std::vector<float>>;

template <class Tiles>
class TreeLaunch {
 public:
  explicit TreeLaunch(const Batch& batch) : batch_(batch), p_(params_of(batch.launch)) {
    p_.group_size = kLiveRows * p_.row_tiles;
    p_.by_group_size = make_divisor(p_.group_size);
    p_.num_q_heads = p_.num_kv_heads * p_.group_size;
    p_.head_dim_v = kAllColumns;
    p_.slices = Tiles::kSlices;
    p_.slice_floats = slice_floats(Tiles::kSliceRows, Tiles::kSliceColumns);
    const std::int64_t rows = std::int64_t{p_.batch} * p_.num_q_heads;
    out_.resize(rows * kAllColumns);
    lse_.resize(rows);
    const auto rows_of = [&](std::vector<float>& data, int dim) -> StridedRows {
      return {data.data(), DType::kFloat32, std::int64_t{p_.num_q_heads} * dim, 0, dim, 1};
    };
    p_.out = rows_of(out_, kAllColumns);
    p_.lse = rows_of(lse_, 1);
    counters_.assign(batch.launch.grid * p_.slices, 0);
    p_.counters = counters_.data();
    partials_.resize(partials_bytes(batch.launch.grid, p_.side_partials, p_.slices * p_.slice_floats) / 4);
    p_.partials = partials_.data();
  }

  // Blocks run one after the other, in any order; so do the slices of a block.
  void run(std::mt19937& random, bool second_launch, int& combined) {
    p_.combine = second_launch ? CombineLaunch{3, Tiles::kSliceRows, Tiles::kSliceColumns, std::min(Tiles::kSlices, 2)}
                               : CombineLaunch{};
    for (auto* poisoned : {&out_, &lse_, &partials_}) std::fill(poisoned->begin(), poisoned->end(), kNaN);
    once_memory = {partials_.data(), std::vector<int>(partials_.size()), false};
    std::vector<int> order(batch_.launch.grid * p_.slices);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (const int each : order) run_block(each / p_.slices, each % p_.slices);
    const std::int64_t combine_grid = std::int64_t{p_.batch} * batch_.launch.tiles() * p_.slices * p_.combine.parts;
    for (std::int64_t i = 0; i < combine_grid; ++i) {
      Wave wave;
      CombineShared shared;
      decode_combine(p_, Block(i, combine_grid, 0, wave), shared, [] {});
    }
    ASSERT_FALSE(once_memory.fault) << "outside of the workspace";
    const std::int64_t block_floats = std::int64_t{partials_per_block(p_.side_partials)} * p_.slices * p_.slice_floats;
    const std::int64_t side_floats = 2 * std::int64_t{p_.side_partials} * p_.slices * p_.slice_floats;
    for (std::size_t i = 0; i < once_memory.writes.size(); ++i) {
      const auto place = static_cast<std::int64_t>(i) % block_floats;
      ASSERT_TRUE(place >= side_floats || once_memory.writes[i] <= 1) << "float " << i;
    }
    for (const std::uint32_t counter : counters_) ASSERT_EQ(counter, 0u);
    if (std::count(once_memory.writes.begin(), once_memory.writes.end(), 1) > 0) ++combined;
  }

  void check() const {
    for (int seq = 0; seq < p_.batch; ++seq) {
      for (int tile = 0; tile < batch_.launch.tiles(); ++tile) {
        const int leaves = leaves_of_tile(batch_.launch, batch_.launch.lengths[seq]);
        for (int row = 0; row < kLiveRows; ++row) {
          const Row expected = expected_row(batch_.tile_id(seq, tile), leaves, p_.chunk_rule, row);
          const std::int64_t at = std::int64_t{seq} * p_.num_q_heads + tile * kLiveRows + row;
          const float lse = expected.l == 0.0f ? -kInfinity : (expected.m + std::log2(expected.l)) * kLn2;
          ASSERT_EQ(lse_[at], lse) << "sequence " << seq << ", tile " << tile << ", row " << row;
          for (int col = 0; col < kAllColumns; ++col) {
            const float o = expected.l == 0.0f ? 0.0f : expected.o[col] * (1.0f / expected.l);
            ASSERT_EQ(out_[at * kAllColumns + col], o) << "sequence " << seq << ", tile " << tile << ", column " << col;
          }
        }
      }
    }
  }

 private:
  // As kernel.h has it, with leaves that cost nothing.
  void run_block(std::int64_t index, int slice) {
    Wave wave;
    const Block block(index, batch_.launch.grid, 0, wave);
    const Range range = range_of(p_, index, batch_.launch.grid);
    LeafCursor now(range);
    if (now.done()) return;
    const Tiles tiles{block, slice};
    PartialList list;
    KeptState<Tiles, kOfGroup> group;
    KeptState<Tiles, kOfTile> tile;
    ChunkTree<Tiles, DecodeParams> tree(p_, block, list, group, tile);
    merge::SoftmaxState<Tiles> state;
    merge::clear(tiles, state);
    for (; !now.done(); now.next(p_, Tiles::kTurnLeaves)) {
      const Segment& s = now.segment;
      const int tile_id = batch_.tile_id(s.seq, s.kv_head * p_.row_tiles + s.row_tile);
      if (now.at_segment_start()) tree.begin_segment(tiles, s, now.line);
      for (int leaf = now.leaf; leaf < std::min(now.leaf + Tiles::kTurnLeaves, s.leaves); ++leaf) {
        merge::SoftmaxState<Tiles> next;
        for (int slot = 0; slot < Tiles::kRowSlots; ++slot) {
          const int row = tiles.row_of(slot);
          const LeafRow from(tile_id, leaf, row);
          next.m[slot] = from.m;
          next.l[slot] = from.l;
          for (int col = 0; col < Tiles::kSliceColumns; ++col) {
            next.o.x[slot][col] = from.o(tile_id, leaf, row, tiles.first_column() + col);
          }
        }
        merge::merge(tiles, state, next);
      }
      tree.end_turn(tiles, now, state);
      if (s.whole() && now.leaf + Tiles::kTurnLeaves >= s.last) forget(index, slice);
    }
  }

  // What a slice has published of a tile that the block has for itself may give way to the next tile's.
  void forget(std::int64_t block, int slice) {
    for (int index = 0; index < p_.side_partials; ++index) {
      const std::int64_t number = partial_number(block, p_.side_partials, 1, index) * p_.slices + slice;
      const auto first = static_cast<std::size_t>(number * p_.slice_floats);
      std::fill_n(once_memory.writes.begin() + first, p_.slice_floats, 0);
      std::fill_n(partials_.begin() + first, p_.slice_floats, kNaN);
    }
  }

  const Batch& batch_;
  DecodeParams p_;
  std::vector<float> out_, lse_, partials_;
  std::vector<std::uint32_t> counters_;
};

template <class Tiles>
class ChunkTrees : public testing::Test {};
// Slices, states kept in registers, leaves of a turn.
using Kinds = testing::Types<FakeTiles<1, 2, 1>, FakeTiles<1, 1, 1>, FakeTiles<1, 0, 1>, FakeTiles<2, 2, 2>,
                             FakeTiles<4, 0, 2>, FakeTiles<4, 1, 1>, KeepingTiles>;
TYPED_TEST_SUITE(ChunkTrees, Kinds);

template <class Tiles>
void check_batch(const Batch& batch, std::mt19937& random, int& combined) {
  SCOPED_TRACE(testing::PrintToString(batch.launch));
  kWaveSize = 1;
  TreeLaunch<Tiles> launch(batch);
  for (int replay = 0; replay < 3 && !testing::Test::HasFatalFailure(); ++replay) {
    launch.run(random, replay == 1, combined);
    if (!testing::Test::HasFatalFailure()) launch.check();
  }
}

TYPED_TEST(ChunkTrees, OutputsFollowFromTheTileAlone) {
  constexpr int kGrids[] = {1, 2, 3, 7, 16, 33, 132, 264, 528};
  constexpr std::int32_t kLengths[] = {0,    1,    64,   65,    257,   1024,  1025,  2048,
                                       4100, 8192, 8193, 12000, 14000, 16385, 28000, 40000};
  std::mt19937 random(3);
  const auto pick = [&](const auto& from) { return from[random() % std::size(from)]; };
  int combined = 0;
  for (int round = 0; round < 120 && !this->HasFatalFailure(); ++round) {
    Batch batch;
    batch.launch.kv_heads = round % 6 == 0 ? 8 : static_cast<int>(1 + random() % 4);
    batch.launch.row_tiles = static_cast<int>(1 + random() % 2);
    batch.launch.grid = pick(kGrids);
    batch.launch.turn_leaves = TypeParam::kTurnLeaves;
    if (round % 5 == 0) batch.launch.window = pick(kLengths);
    batch.launch.lengths.resize(1 + random() % 5);
    for (std::int32_t& length : batch.launch.lengths) {
      length = random() % 3 == 0 ? static_cast<std::int32_t>(random() % 5000) : pick(kLengths);
      batch.ids.push_back(static_cast<int>(random() % 1000));
    }
    check_batch<TypeParam>(batch, random, combined);
  }
  EXPECT_GT(combined, 50);
}

// 128 chunks and more leaves than those hold by the rule, on grids that give a block a chunk, and that give it many.
TYPED_TEST(ChunkTrees, LongTiles) {
  std::mt19937 random(4);
  int combined = 0;
  for (const std::int64_t grid : {1, 5, 16, 132, 264, 528}) {
    Batch batch;
    batch.ids = {7};
    batch.launch.lengths = {131072 + 70};
    batch.launch.grid = grid;
    batch.launch.turn_leaves = TypeParam::kTurnLeaves;
    check_batch<TypeParam>(batch, random, combined);
    batch.launch.lengths = {3000, 131072 + 70, 0};
    batch.launch.kv_heads = 2;
    batch.ids = {1, 2, 3};
    check_batch<TypeParam>(batch, random, combined);
  }
}

}  // namespace
}  // namespace flashport::turns::decode
