// The tile scheduler: every work tile once, long tiles first, the heads of a kv head as neighbours, and the same order
// whatever the lanes of a wave are; and which keys a work tile sees, against a search over all pairs.
#define FLASHPORT_TARGET wave
#define FLASHPORT_TARGET_HEADER "tests/device/attention/wave_target.h"
#include "common/device/attention/tile_scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <compare>
#include <ostream>
#include <random>
#include <string>
#include <vector>

namespace flashport::wave::attention {
namespace {

constexpr int kRows = 16, kKeys = 8;

struct Tile {
  int head, seq, first_row, q_len, kv_len;
  std::int64_t q_begin, k_begin;
  int first_tile = 0, end_tile = 0x7fffffff, out_begin = 0;
  friend auto operator<=>(const Tile&, const Tile&) = default;
};
std::ostream& operator<<(std::ostream& out, const Tile& t) {
  return out << "head " << t.head << " seq " << t.seq << " row " << t.first_row << " q_len " << t.q_len << " kv_len "
             << t.kv_len << " at " << t.q_begin << ", " << t.k_begin << " tiles " << t.first_tile << " to "
             << t.end_tile << " out " << t.out_begin;
}

// A call: lengths of its sequences, packed or not, and how many rows of each are in use.
struct Call {
  std::vector<int> q_lens, kv_lens;
  bool packed = true;
  std::vector<int> used_q = {}, used_k = {}, pads = {};
  int kv_heads = 2, group = 2, section = 1;
  // How keys are cut: so many pieces of each sequence, or by lengths.
  int pieces = 1, window_left = -1;
  bool by_lengths = false;

  [[nodiscard]] int batch() const { return static_cast<int>(q_lens.size()); }
};

struct Params {
  std::vector<std::int32_t> offsets_q, offsets_k;
  AttentionParams p{};

  explicit Params(const Call& call) {
    offsets_q = offsets_k = {0};
    for (int b = 0; b < call.batch(); ++b) {
      offsets_q.push_back(offsets_q.back() + call.q_lens[static_cast<std::size_t>(b)]);
      offsets_k.push_back(offsets_k.back() + call.kv_lens[static_cast<std::size_t>(b)]);
      p.q_len = std::max(p.q_len, call.q_lens[static_cast<std::size_t>(b)]);
      p.kv_len = std::max(p.kv_len, call.kv_lens[static_cast<std::size_t>(b)]);
    }
    p.batch = call.batch();
    p.num_kv_heads = call.kv_heads;
    p.group_size = call.group;
    p.num_q_heads = call.kv_heads * call.group;
    p.section_heads = call.section;
    p.window_left = call.window_left;
    p.window_right = -1;
    p.total_q = call.packed ? offsets_q.back() : std::int64_t{p.q_len} * p.batch;
    p.total_k = call.packed ? offsets_k.back() : std::int64_t{p.kv_len} * p.batch;
    if (call.packed) {
      p.cu_seqlens_q = offsets_q.data();
      p.cu_seqlens_k = offsets_k.data();
    }
    if (!call.used_q.empty()) p.seqused_q = call.used_q.data();
    p.cache.max_len = p.kv_len;
    if (!call.used_k.empty()) p.cache.seqlens = {call.used_k.data(), 0};
    if (!call.pads.empty()) p.leftpad_k = call.pads.data();
    if (call.pieces > 1 || call.by_lengths) cut(call);
  }
  // Partial results lie by the sequence's number, its first query and its first key, so that each shows.
  void cut(const Call& call) {
    p.pieces.rule = {call.by_lengths ? 0 : call.pieces, 12 / call.group / call.kv_heads, kRows, kKeys};
    p.pieces.most = call.by_lengths ? 12 : call.pieces;
    const bool all_alike = !call.packed && call.used_q.empty() && call.used_k.empty() && call.pads.empty();
    if (all_alike) p.pieces.most = cut_keys(p.pieces.rule, p.q_len, 0, p.kv_len).count;
    p.pieces.rows_of_query = 1000;
    p.pieces.rows_of_four_keys = 1;
    p.pieces.rows_of_sequence = 1000000;
  }
  Params(const Params&) = delete;
  Params& operator=(const Params&) = delete;
};

// How the comments say that the keys of a sequence are cut.
struct PiecesOf {
  int count, each, first;
};
PiecesOf pieces_of(const Call& call, int q_len, int kv_len) {
  const int first_key = call.window_left < 0 ? 0 : std::max(kv_len - q_len - call.window_left, 0);
  const int first = first_key / kKeys, tiles = (kv_len + kKeys - 1) / kKeys - first;
  int wanted = call.pieces;
  if (call.by_lengths) {
    const int query_tiles = std::max((q_len + kRows - 1) / kRows, 1);
    wanted = std::min(12 / (call.group * call.kv_heads) / query_tiles,
                      (kv_len - first_key) / std::max({1024, 4 * q_len, 1}));
  }
  if (wanted <= 1 || tiles <= 1 || q_len == 0) return {1, tiles, 0};
  const int each = (tiles + wanted - 1) / wanted;
  const int count = (tiles + each - 1) / each;
  return count == 1 ? PiecesOf{1, tiles, 0} : PiecesOf{count, each, first};
}

// The order as the scheduler's comment says it, from the lengths.
std::vector<Tile> expected(const Call& call) {
  std::vector<Tile> tiles;
  const int levels = (*std::max_element(call.q_lens.begin(), call.q_lens.end()) + kRows - 1) / kRows * 12;
  for (int section = 0; section < call.kv_heads; section += call.section) {
    for (int level = levels - 1; level >= 0; --level) {
      std::int64_t q_begin = 0, k_begin = 0;
      for (int seq = 0; seq < call.batch(); ++seq) {
        const auto at = static_cast<std::size_t>(seq);
        const int pad = call.pads.empty() ? 0 : call.pads[at];
        const int q_len = call.used_q.empty() ? call.q_lens[at] : call.used_q[at];
        const int kv_len = (call.used_k.empty() ? call.kv_lens[at] : call.used_k[at]) - pad;
        const int query_tiles = (q_len + kRows - 1) / kRows;
        const PiecesOf cut = pieces_of(call, q_len, kv_len);
        const int piece = query_tiles == 0 ? 0 : level / query_tiles;
        Tile tile{0, seq, level * kRows - piece * query_tiles * kRows, q_len, kv_len, q_begin, k_begin + pad};
        tile.out_begin = static_cast<int>(q_begin);
        if (cut.count > 1) {
          tile.first_tile = cut.first + piece * cut.each;
          tile.end_tile = tile.first_tile + cut.each;
          const std::int64_t row = seq * 1000000 + q_begin * 1000 + (k_begin + pad) / 4 + piece * q_len;
          tile.out_begin = static_cast<int>(-1 - row);
        }
        for (int kv_head = section; kv_head < std::min(section + call.section, call.kv_heads); ++kv_head) {
          for (int i = 0; i < call.group && level < query_tiles * cut.count; ++i) {
            tile.head = kv_head * call.group + i;
            tiles.push_back(tile);
          }
        }
        if (call.packed) q_begin += call.q_lens[at], k_begin += call.kv_lens[at];
      }
    }
  }
  return tiles;
}

std::vector<Tile> scheduled(const AttentionParams& p, const Block& block) {
  TileScheduler<kRows, kKeys> scheduler(p, block);
  std::vector<Tile> tiles;
  for (int i = 0; i < scheduler.count(); ++i) {
    WorkTile work;
    scheduler.tile(i, work);
    tiles.push_back({work.head, work.seq, work.first_row, work.q_len, work.kv_len, work.q_begin, work.k_begin,
                     work.first_tile, work.end_tile, work.out_begin});
  }
  return tiles;
}

void expect_order(const Call& call) {
  const Params params(call);
  const std::vector<Tile> wanted = expected(call);
  for (const int lanes : {1, 3, 8, 32}) {
    const auto found =
        run_wave<std::vector<Tile>>(lanes, [&](const Block& block) { return scheduled(params.p, block); });
    for (const std::vector<Tile>& of_lane : found) ASSERT_EQ(of_lane, wanted) << lanes << " lanes";
  }
}

TEST(TileScheduler, DenseSequences) {
  expect_order({.q_lens = {40, 40, 40}, .kv_lens = {7, 7, 7}, .packed = false});
  expect_order({.q_lens = {1}, .kv_lens = {0}, .packed = false, .kv_heads = 3, .group = 1, .section = 3});
  expect_order({.q_lens = {16, 16}, .kv_lens = {7, 7}, .packed = false, .kv_heads = 5, .group = 3, .section = 2});
}

TEST(TileScheduler, PackedSequences) {
  expect_order({.q_lens = {40, 0, 17, 100, 1, 16}, .kv_lens = {40, 5, 0, 300, 1, 2}});
  expect_order({.q_lens = {0, 0}, .kv_lens = {4, 4}});
  expect_order({.q_lens = {33}, .kv_lens = {33}, .kv_heads = 3, .group = 2, .section = 2});
}

TEST(TileScheduler, LengthsInUse) {
  expect_order({.q_lens = {40, 40, 40},
                .kv_lens = {50, 50, 50},
                .packed = false,
                .used_q = {0, 40, 17},
                .used_k = {50, 3, 20},
                .pads = {4, 3, 0}});
  expect_order({.q_lens = {40, 16, 70}, .kv_lens = {50, 3, 20}, .used_q = {1, 16, 60}, .used_k = {50, 0, 20}});
}

// More sequences than a wave has lanes.
TEST(TileScheduler, RandomBatches) {
  std::mt19937 random(3);
  for (int round = 0; round < 6; ++round) {
    Call call;
    call.kv_heads = static_cast<int>(1 + random() % 3);
    call.group = static_cast<int>(1 + random() % 2);
    call.section = static_cast<int>(1 + random() % static_cast<unsigned>(call.kv_heads));
    const auto batch = 1 + random() % 40;
    for (unsigned b = 0; b < batch; ++b) {
      call.q_lens.push_back(static_cast<int>(random() % 3 == 0 ? random() % 60 : random() % 18));
      call.kv_lens.push_back(static_cast<int>(random() % 100));
    }
    expect_order(call);
  }
}

TEST(TileScheduler, PiecesOfDenseSequences) {
  expect_order({.q_lens = {40, 40}, .kv_lens = {100, 100}, .packed = false, .pieces = 3});
  expect_order({.q_lens = {1}, .kv_lens = {20}, .packed = false, .pieces = 3});
  expect_order({.q_lens = {20, 20}, .kv_lens = {3000, 3000}, .packed = false, .group = 1, .by_lengths = true});
}

// Several pieces, one, and none; where a window begins, and where few key tiles make fewer pieces.
TEST(TileScheduler, PiecesOfSequencesWithLengthsOfTheirOwn) {
  expect_order({.q_lens = {40, 0, 17, 100, 1, 16}, .kv_lens = {40, 5, 0, 300, 1, 2}, .pieces = 7});
  expect_order({.q_lens = {40, 0, 17, 100}, .kv_lens = {40, 5, 0, 300}, .pieces = 3, .window_left = 33});
  expect_order({.q_lens = {40, 40, 40},
                .kv_lens = {50, 50, 50},
                .packed = false,
                .used_k = {50, 3, 20},
                .pads = {4, 3, 0},
                .pieces = 2});
  expect_order({.q_lens = {5, 20, 40, 700, 3, 0},
                .kv_lens = {4100, 2048, 9000, 2800, 2047, 5000},
                .kv_heads = 1,
                .by_lengths = true});
  expect_order({.q_lens = {5, 5}, .kv_lens = {9000, 9000}, .packed = false, .used_q = {5, 2}, .by_lengths = true});
  expect_order({.q_lens = {5, 30}, .kv_lens = {9000, 9000}, .kv_heads = 1, .window_left = 2100, .by_lengths = true});
}

// The pieces of a sequence together have each of its key tiles once, and none has many more than another.
TEST(Pieces, HaveEachKeyTileOnce) {
  for (const int count : {0, 2, 3, 7, 128}) {
    for (const int q_len : {1, 16, 300, 1 << 30}) {
      for (const int kv_len : {0, 1, 8, 9, 500, 2047, 2048, 5000, 64 << 10, 1 << 30}) {
        for (const int first_key : {0, kv_len / 3}) {
          const Pieces cut = cut_keys({count, 32, kRows, kKeys}, q_len, first_key, kv_len);
          ASSERT_TRUE(cut.count >= 1 && cut.count <= kMostPieces);
          if (cut.count == 1) continue;
          const int tiles = (kv_len + kKeys - 1) / kKeys - first_key / kKeys;
          EXPECT_LT((cut.count - 1) * cut.tiles, tiles);
          EXPECT_GE(cut.count * cut.tiles, tiles);
          if (count > 0) continue;
          EXPECT_LE(cut.count * ((q_len + kRows - 1) / kRows), 32);
          EXPECT_GE((kv_len - first_key) / cut.count, std::max(1024, 4 * q_len));
        }
      }
    }
  }
}

// Few queries on many keys are cut into as many pieces as make 128 work tiles of 32 heads; prompts are not cut.
TEST(Pieces, FollowFromTheLengths) {
  const PieceRule rule{0, 128 / 32, 128, 128};
  const auto count = [&](int q_len, int kv_len, int first_key = 0) {
    return cut_keys(rule, q_len, first_key, kv_len).count;
  };
  EXPECT_EQ(count(128, 65536), 4);
  EXPECT_EQ(count(1, 65536), 4);
  EXPECT_EQ(count(129, 65536), 2);
  EXPECT_EQ(count(256, 65536), 2);
  EXPECT_EQ(count(257, 65536), 1);
  EXPECT_EQ(count(128, 4095), 3);
  EXPECT_EQ(count(128, 2048), 2);
  EXPECT_EQ(count(128, 2047), 1);
  EXPECT_EQ(count(128, 65536, 65536 - 2000), 1);
  EXPECT_EQ(count(2048, 2048), 1);
  EXPECT_EQ(cut_keys({0, 128, 128, 128}, 1, 0, 1 << 30).count, 128);
  EXPECT_EQ(cut_keys({0, 128, 128, 128}, 1024, 0, 16384).count, 4);
}

// Offsets that no validation has seen are cut to the tensors.
TEST(TileScheduler, WrongOffsetsStayInTheTensors) {
  const Call call{.q_lens = {40, 40}, .kv_lens = {40, 40}};
  Params params(call);
  params.offsets_q = {-5, 1000, 20};
  params.offsets_k = {50, 20, 1 << 30};
  const auto found = run_wave<std::vector<Tile>>(4, [&](const Block& block) { return scheduled(params.p, block); });
  EXPECT_FALSE(found[0].empty());
  for (const Tile& tile : found[0]) {
    EXPECT_TRUE(tile.q_begin >= 0 && tile.q_len >= 0 && tile.q_begin + tile.q_len <= params.p.total_q) << tile;
    EXPECT_TRUE(tile.k_begin >= 0 && tile.kv_len >= 0 && tile.k_begin + tile.kv_len <= params.p.total_k) << tile;
  }
}

bool sees(const AttentionParams& p, const WorkTile& work, int row, int key) {
  const int distance = key - (row + work.kv_len - work.q_len);
  return (p.window_left < 0 || -distance <= p.window_left) && (p.window_right < 0 || distance <= p.window_right);
}

// The key tiles of every work tile of such lengths.
template <int kKeys>
void expect_key_tiles(const AttentionParams& p, int q_len, int kv_len, int rows) {
  for (int first_row = 0; first_row < q_len; first_row += rows) {
    WorkTile work{};
    work.end_tile = 1 << 30;
    work.first_row = first_row;
    work.q_len = q_len;
    work.kv_len = kv_len;
    const KeyTiles tiles = key_tiles<kKeys>(p, work, rows);
    const std::string what = "q_len " + std::to_string(q_len) + " kv_len " + std::to_string(kv_len) + " row " +
                             std::to_string(first_row) + " window " + std::to_string(p.window_left) + ", " +
                             std::to_string(p.window_right);
    ASSERT_LE(tiles.begin, tiles.end) << what;
    ASSERT_LE(tiles.plain_begin, tiles.plain_end) << what;
    for (int tile = 0; tile * kKeys < kv_len; ++tile) {
      bool some = false, all = (tile + 1) * kKeys <= kv_len;
      for (int row = first_row; row < std::min(first_row + rows, q_len); ++row) {
        const KeySpan span = visible_keys(p, work, row);
        for (int key = tile * kKeys; key < std::min((tile + 1) * kKeys, kv_len); ++key) {
          const bool visible = sees(p, work, row, key);
          ASSERT_EQ(visible, key >= span.low && key < span.high) << what << " key " << key;
          some = some || visible;
          all = all && visible;
        }
      }
      ASSERT_EQ(some, tile >= tiles.begin && tile < tiles.end) << what << " tile " << tile;
      // Masks are only at the ends.
      ASSERT_EQ(all, tile >= tiles.plain_begin && tile < tiles.plain_end) << what << " tile " << tile;
    }
    ASSERT_LE(tiles.end * kKeys, (kv_len + kKeys - 1) / kKeys * kKeys) << what;
  }
}

TEST(KeyTiles, AreThoseThatAreSeen) {
  AttentionParams p{};
  constexpr int kSides[] = {-1, 0, 1, 7, 8, 9, 20, 63, 64};
  for (const int left : kSides) {
    for (const int right : kSides) {
      p.window_left = left;
      p.window_right = right;
      for (const int q_len : {1, 5, 16, 33, 70}) {
        for (const int kv_len : {0, 1, 7, 8, 9, 32, 65, 100}) expect_key_tiles<8>(p, q_len, kv_len, 16);
      }
    }
  }
}

}  // namespace
}  // namespace flashport::wave::attention
