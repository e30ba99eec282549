// Rows of fewer bits between their boxes and the widened tiles: where lanes read and write, that a row in registers
// widens to what a row in memory does, and that the warps of a block hand slots and stages to each other in an order
// that none of them breaks.
#include "cuda/attention/stored_rows.h"

#include <gtest/gtest.h>

#include <algorithm>

#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <vector>

#define FLASHPORT_TARGET host_words
#define FLASHPORT_WORDS_HEADER "tests/device/kv/word_verbs.h"
#include "common/device/kv/widen.h"
#include "cuda/attention/tensor_maps.h"

namespace flashport::cuda_runtime {
namespace {
BoxedTensor encoded;  // the last one
}
const char* encode_map(const BoxedTensor& tensor, TensorMap&, bool& readable) {
  encoded = tensor;
  readable = reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0;
  for (int axis = 0; axis < 3; ++axis) {
    readable =
        readable && (tensor.extents[axis + 1] == 1 || (tensor.strides[axis] > 0 && tensor.strides[axis] % 16 == 0));
  }
  return nullptr;
}
}  // namespace flashport::cuda_runtime

namespace flashport::host_words {
namespace {

using namespace cuda_attention;

constexpr int kKeys = 128, kPanelSize = kKeys * 128;
constexpr KvFormat kFormats[] = {KvFormat::kFp8E4M3, KvFormat::kFp8E4M3Fnuz, KvFormat::kFp8E5M2, KvFormat::kInt8,
                                 KvFormat::kInt4,    KvFormat::kQ8_0,        KvFormat::kQ4_0,    KvFormat::kQ4_1,
                                 KvFormat::kQ5_0,    KvFormat::kQ5_1,        KvFormat::kIq4Nl};

// Whether the eight lanes of vectors that shared memory serves together are in banks of their own.
template <class Offset>
bool are_apart(int first_lane, const Offset& offset) {
  std::set<int> vectors;
  for (int lane = first_lane; lane < first_lane + 8; ++lane) vectors.insert(offset(lane) / 16 % 8);
  return vectors.size() == 8;
}

TEST(StoredRows, LieInBanksOfTheirOwn) {
  for (const KvFormat format : kFormats) {
    const int bytes = kv_row_bytes(format, kStoredDim), pitch = stored_row_pitch(bytes);
    EXPECT_GE(pitch, bytes);
    EXPECT_LE(pitch, kMostStoredRow);
    EXPECT_LE(pitch, 256);          // of a box
    EXPECT_EQ(8 * pitch % 128, 0);  // where the box of eight keys begins
    for (int first = 0; first < kKeys; first += 8) {
      for (int byte = 0; byte < bytes; byte += 16) {
        EXPECT_TRUE(are_apart(first, [&](int row) { return row * pitch + byte; }));
      }
    }
  }
}

TEST(StoredRows, FactorsLieInBanksOfTheirOwn) {
  const int pitch = factor_pitch(Factors::kHalves);
  EXPECT_GE(pitch, factor_bytes(Factors::kHalves));
  EXPECT_EQ(kStoredRows * pitch % 128, 0);  // after them the next slot's box begins
  EXPECT_EQ(kStoredRows * factor_pitch(Factors::kOfRow) % 128, 0);
  for (int byte = 0; byte < factor_bytes(Factors::kHalves); byte += 16) {
    EXPECT_TRUE(are_apart(0, [&](int row) { return row * pitch + byte; }));
  }
}

// A half beside a row is in the word that is copied, at an even head in the one half of it and at an odd head in the
// other.
TEST(StoredRows, FactorsComeToSlotsWhereWordsAndVectorsDo) {
  alignas(16) static std::uint16_t halves[64];
  const auto data = reinterpret_cast<std::uintptr_t>(halves);
  KeyScales scales{halves, DType::kFloat16, 32, 2, 1, 0, 0};
  EXPECT_TRUE(come_to_slots({}, 0, KvFormat::kQ8_0));
  EXPECT_FALSE(come_to_slots(scales, data, KvFormat::kQ8_0));
  for (const std::uintptr_t first : {data, data + 2}) {
    EXPECT_TRUE(come_to_slots(scales, first, KvFormat::kInt8));
    for (const int head : {0, 1}) {
      for (const int token : {0, 5}) {
        const std::uintptr_t at = first + 2 * (scales.stride_token * token + scales.stride_head * head);
        EXPECT_EQ(at % 4, static_cast<unsigned>(factor_begin(scales, first, head)));
      }
    }
  }
  scales.stride_token = 3;
  EXPECT_FALSE(come_to_slots(scales, data, KvFormat::kInt8));
  scales.dtype = DType::kFloat32;
  EXPECT_TRUE(come_to_slots(scales, data, KvFormat::kFp8E4M3));
  EXPECT_EQ(factor_begin(scales, data, 1), 0);
  scales = {halves, DType::kFloat16, 512, 32, 16, 1, 8};
  EXPECT_TRUE(come_to_slots(scales, data, KvFormat::kInt4));
  EXPECT_FALSE(come_to_slots(scales, data + 2, KvFormat::kInt4));
  scales.stride_group = 2;
  EXPECT_FALSE(come_to_slots(scales, data, KvFormat::kInt4));
  scales = {halves, DType::kFloat16, 256, 16, 8, 1, 16};
  EXPECT_FALSE(come_to_slots(scales, data, KvFormat::kInt4));
}

TEST(StoredRows, WidenedVectorsHaveAPlaceEachAndBanksOfTheirOwn) {
  std::set<int> places;
  for (int vector = 0; vector < kStoredDim / 8; ++vector) {
    for (int row = 0; row < kKeys; ++row) {
      const int place = widened_place(row, vector, kPanelSize);
      EXPECT_EQ(place % 16, 0);
      EXPECT_EQ(place / kPanelSize, vector / 8);
      // wgmma.h: elements of swizzled_offset(), panel by panel
      EXPECT_EQ(place % kPanelSize, 2 * (row * 64 + (vector % 8 ^ (row & 7)) * 8));
      places.insert(place);
    }
    for (int first = 0; first < kKeys; first += 8) {
      EXPECT_TRUE(are_apart(first, [&](int row) { return widened_place(row, vector, kPanelSize); }));
    }
  }
  EXPECT_EQ(places.size(), std::size_t{kKeys} * kStoredDim / 8);
  EXPECT_EQ(*places.rbegin(), 2 * kPanelSize - 16);
}

TEST(StoredRows, PairsOfTokensLieInBanksOfTheirOwnToo) {
  std::set<int> rows, places;
  for (int lane = 0; lane < kStoredRows; ++lane) {
    const int row = paired_row(lane), place = paired_place(row);
    rows.insert(row);
    places.insert(place);
    // A box of even or of odd tokens: from one to the next, from the first of sixteen keys on.
    EXPECT_EQ(place, paired_place(row / 16 * 16 + row % 2) + row % 16 / 2);
    EXPECT_EQ(paired_place(row / 16 * 16 + row % 2) % 8, 0);
  }
  EXPECT_EQ(rows.size(), std::size_t{kStoredRows});
  EXPECT_EQ(places.size(), std::size_t{kStoredRows});
  EXPECT_EQ(*rows.rbegin(), kStoredRows - 1);
  EXPECT_EQ(*places.rbegin(), kStoredRows - 1);
  for (int first = 0; first < kStoredRows; first += 8) {
    for (const int pitch : {80, 112, 144}) {
      EXPECT_TRUE(are_apart(first, [&](int lane) { return paired_place(paired_row(lane)) * pitch; }));
    }
    for (int vector = 0; vector < kStoredDim / 8; ++vector) {
      EXPECT_TRUE(are_apart(first, [&](int lane) { return widened_place(paired_row(lane), vector, kPanelSize); }));
    }
  }
}

struct MemoryRow {
  const unsigned char* bytes;
  unsigned word(int byte) const {
    unsigned x;
    std::memcpy(&x, bytes + byte, 4);
    return x;
  }
  unsigned half(int byte) const { return word(byte) & 0xffff; }
};

TEST(StoredRows, WidenFromRegistersAsFromMemory) {
  std::mt19937 random(3);
  for (const KvFormat format : kFormats) {
    kv::with_format(format, [&](auto constant) {
      constexpr KvFormat kFormat = constant;
      if constexpr (kFormat != KvFormat::kFp16 && kFormat != KvFormat::kBf16) {
        constexpr int kVectors = (kv_row_bytes(kFormat, kStoredDim) + 15) / 16;
        for (int repeat = 0; repeat < 100; ++repeat) {
          // What follows the row in its box may be anything.
          std::vector<unsigned char> bytes(16 * kVectors + 4);
          for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
          RegisterRow<kVectors> row;
          std::memcpy(row.words, bytes.data(), sizeof row.words);
          for (int unit = 0; unit < kStoredDim / kv::kUnitValues; ++unit) {
            unsigned got[8], want[8];
            kv::widen_unit<kFormat>(got, row, unit);
            kv::widen_unit<kFormat>(want, MemoryRow{bytes.data()}, unit);
            for (int i = 0; i < 8; ++i) ASSERT_EQ(got[i], want[i]) << kv_format_trait(format).name << " unit " << unit;
          }
        }
        // A key that is not there is read from zeros, and has to be numbers that weights of 0 hide.
        RegisterRow<kVectors> zeros = {};
        unsigned x[8];
        for (int unit = 0; unit < kStoredDim / kv::kUnitValues; ++unit) {
          kv::widen_unit<kFormat>(x, zeros, unit);
          for (const unsigned two : x) EXPECT_EQ(two & 0x7fff7fff, 0u) << kv_format_trait(format).name;
        }
      }
    });
  }
}

// What TMA copies of a tensor of bytes.
void copy_box(unsigned char* to, const cuda_runtime::BoxedTensor& tensor, int x, int y, int z, int w,
              const std::vector<unsigned char>& cache) {
  ASSERT_EQ(x % 16, 0) << "an illegal instruction on a GPU";
  for (int row = 0; row < tensor.box_rows; ++row) {
    for (int byte = 0; byte < tensor.box_bytes; ++byte) {
      const std::int64_t at[] = {x + byte, y + row, z, w};
      bool inside = true;
      for (int axis = 0; axis < 4; ++axis) inside = inside && at[axis] >= 0 && at[axis] < tensor.extents[axis];
      const std::int64_t offset =
          at[0] + at[1] * tensor.strides[0] + at[2] * tensor.strides[1] + at[3] * tensor.strides[2];
      if (inside) {
        ASSERT_LT(offset, static_cast<std::int64_t>(cache.size())) << "reads past the tensor";
      }
      to[row * tensor.box_bytes + byte] = inside ? cache[static_cast<std::size_t>(offset)] : 0;
    }
  }
}

struct CacheShape {
  KvFormat format;
  int heads, tokens, pages;  // tokens of a page
  bool paged, heads_first;
  int gap = 0;  // bytes after a token's heads
};

// Brings all slots of a page as the copying warp does, and reads them as the lanes that widen do.
void expect_slots(const CacheShape& shape, bool by_boxes) {
  const int row_bytes = kv_row_bytes(shape.format, kStoredDim);
  AttentionParams p = {};
  p.num_kv_heads = shape.heads;
  p.head_dim_qk = p.head_dim_v = kStoredDim;
  p.batch = shape.pages;
  p.kv_len = shape.tokens;
  p.total_k = std::int64_t{shape.pages} * shape.tokens;
  const std::int32_t table = 0;
  if (shape.paged) {
    p.cache.table = &table;
    p.cache.page_size = shape.tokens;
  }
  CacheParams& cache = p.cache.k;
  cache.row_bytes = row_bytes;
  cache.token_stride = shape.heads_first ? row_bytes : shape.heads * row_bytes + shape.gap;
  cache.head_stride = shape.heads_first ? shape.tokens * row_bytes : row_bytes;
  cache.page_stride = shape.heads_first ? shape.heads * cache.head_stride : shape.tokens * cache.token_stride;
  std::vector<unsigned char> bytes(static_cast<std::size_t>(shape.pages * cache.page_stride));
  std::mt19937 random(5);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  alignas(16) static unsigned char aligned[16];
  cache.data = aligned;  // addresses are offsets into `bytes`
  p.cache.v = cache;
  ASSERT_EQ(encode_stored_maps<kKeys>(p), nullptr);
  ASSERT_EQ(p.k_box.row_bytes != 0, by_boxes);
  if (!by_boxes) return;
  const StoredBox& box = p.k_box;
  EXPECT_EQ(box.row_bytes % 16, 0);
  EXPECT_EQ(kStoredRows % p.box_keys, 0);
  for (int page = 0; page < shape.pages; ++page) {
    for (int head = 0; head < shape.heads; ++head) {
      // A slot's rows from any token on where the tensor is no page, as sequences may begin anywhere.
      for (int first = 0; first < shape.tokens; first += shape.paged ? p.box_keys : 7) {
        std::vector<unsigned char> slot(static_cast<std::size_t>(kStoredRows * box.row_bytes), 0xee);
        const int rows = shape.paged ? p.box_keys : kStoredRows;  // other rows come from other pages
        const int row = shape.paged ? first / p.box_keys * p.box_keys % kStoredRows : 0;
        for (int i = 0; i < boxes_of_place(box); ++i) {
          const StoredBoxPlace at = stored_box_place(box, head, first, row, i);
          EXPECT_EQ(at.row * box.row_bytes % 128, 0);
          EXPECT_EQ(cuda_runtime::encoded.box_rows * boxes_of_place(box), p.box_keys);
          copy_box(slot.data() + at.row * box.row_bytes, cuda_runtime::encoded, at.x, at.y, at.z, page, bytes);
        }
        for (int lane = 0; lane < kStoredRows; ++lane) {
          const int of_slot = box.pair_bytes != 0 ? paired_row(lane) : lane;
          const int place = box.pair_bytes != 0 ? paired_place(of_slot) : of_slot;
          const int token = first + of_slot - row;
          if (of_slot < row || of_slot >= row + rows || token >= shape.tokens) continue;
          const std::int64_t from = page * cache.page_stride + token * cache.token_stride + head * cache.head_stride;
          const int shift = stored_row_shift(box, head, token);
          ASSERT_LE(shift + row_bytes, box.row_bytes);
          ASSERT_TRUE(shift == 0 || (shift == 8 && row_bytes % 16 == 8)) << "as load_row() takes it";
          ASSERT_EQ(std::memcmp(slot.data() + place * box.row_bytes + shift, bytes.data() + from, row_bytes), 0)
              << kv_format_trait(shape.format).name << " token " << token << " head " << head;
        }
      }
    }
  }
}

TEST(StoredRows, BoxesBringRowsOfAnyLayout) {
  for (const KvFormat format : kFormats) {
    for (const bool heads_first : {false, true}) {
      for (const int heads : {1, 2, 5}) {
        const int row_bytes = kv_row_bytes(format, kStoredDim);
        const int token = heads_first ? row_bytes : heads * row_bytes;
        for (const int tokens : {16, 48, 128}) expect_slots({format, heads, tokens, 3, true, heads_first}, true);
        expect_slots({format, heads, 8, 3, true, heads_first}, token % 16 == 0);
        expect_slots({format, heads, 24, 3, true, heads_first}, token % 16 == 0);
        expect_slots({format, heads, 4, 3, true, heads_first}, false);
        expect_slots({format, heads, 202, 2, false, heads_first}, true);
        expect_slots({format, heads, 202, 2, false, false, 16}, true);
        expect_slots({format, heads, 202, 2, false, false, 2}, false);
      }
    }
  }
}

// An mbarrier: `phase` is the one that has not completed.
struct ModelBarrier {
  int arrivals, left, bytes = 0;
  unsigned phase = 0;
  explicit ModelBarrier(int count) : arrivals(count), left(count) {}
  [[nodiscard]] bool has_completed(unsigned parity) const { return (phase & 1) != parity; }
  void check() {
    if (left != 0 || bytes != 0) return;
    ++phase;
    left = arrivals;
  }
  void arrive() {
    --left;
    check();
  }
  void expect(int more) {
    bytes += more;
    arrive();
  }
  void land(int fewer) {
    bytes -= fewer;
    check();
  }
};
struct ModelStage {
  ModelBarrier full, empty;
  int holds = -1, written = 0;  // number of the copy, and by how many warps
};

// What a warp does, step by step: it waits until `ready`, then does `act`.
struct Step {
  std::function<bool()> ready;
  std::function<void()> act;
};

void run_block(const std::vector<int>& work, int slots, unsigned seed) {
  constexpr int kConsumers = 8, kStages = 2;
  std::vector<std::vector<ModelStage>> rings(kWideningWarps);
  std::vector<ModelStage> keys, values;
  for (auto& ring : rings) {
    for (int i = 0; i < slots; ++i) ring.push_back({ModelBarrier(1), ModelBarrier(1)});
  }
  for (auto* stages : {&keys, &values}) {
    for (int i = 0; i < kStages; ++i) stages->push_back({ModelBarrier(kWarpsOfTile), ModelBarrier(kConsumers)});
  }
  std::vector<std::vector<Step>> warps;
  std::vector<std::pair<ModelStage*, int>> on_their_way;  // to a slot, of a tile: kSlotsOfTile for each
  const auto wait = [](ModelBarrier& barrier, unsigned parity) {
    return [&barrier, parity] { return barrier.has_completed(parity); };
  };
  std::vector<Step> copier;
  StoredTurn turns[2][kSlotsOfTile];  // of keys and values, of the lanes of a slot
  for (auto& of_kind : turns) {
    for (int i = 0; i < kSlotsOfTile; ++i) of_kind[i].slot = i;
  }
  int brought[2] = {};
  for (const int tiles : work) {
    for (int i = 0; i <= tiles && tiles > 0; ++i) {
      for (const bool of_values : {false, true}) {
        if (of_values ? i == 0 : i == tiles) continue;
        for (int row = 0; row < kKeys; row += kStoredRows) {
          const int part = row / kStoredRows % kSlotsOfTile;
          const int warp = (of_values ? kWarpsOfTile : 0) + row / (kStoredRows * kSlotsOfTile);
          const StoredTurn& turn = turns[of_values ? 1 : 0][part];
          ModelStage& slot = rings[static_cast<std::size_t>(warp)][static_cast<std::size_t>(turn.slot)];
          const int number = brought[of_values ? 1 : 0] * kSlotsOfTile + part;
          copier.push_back({wait(slot.empty, turn.phase ^ 1), [&slot, &on_their_way, number] {
                              slot.full.expect(100);
                              on_their_way.emplace_back(&slot, number);
                            }});
        }
        for (StoredTurn& turn : turns[of_values ? 1 : 0]) turn.skip(kSlotsOfTile, slots);
        ++brought[of_values ? 1 : 0];
      }
    }
  }
  warps.push_back(copier);
  for (int warp = 0; warp < kWideningWarps; ++warp) {
    const bool of_values = warp >= kWarpsOfTile;
    std::vector<Step> widener;
    StoredTurn turn;
    int copy = 0;
    for (const int tiles : work) {
      for (int i = 0; i < tiles; ++i, ++copy) {
        ModelStage& stage = (of_values ? values : keys)[static_cast<std::size_t>(copy % kStages)];
        for (int part = 0; part < kSlotsOfTile; ++part) {
          ModelStage& slot = rings[static_cast<std::size_t>(warp)][static_cast<std::size_t>(turn.slot)];
          widener.push_back({wait(slot.full, turn.phase), [&slot, number = copy * kSlotsOfTile + part] {
                               EXPECT_EQ(slot.holds, number);
                               slot.empty.arrive();
                             }});
          turn.skip(1, slots);
          if (part > 0) continue;
          widener.push_back({wait(stage.empty, (static_cast<unsigned>(copy / kStages) & 1) ^ 1), [&stage, copy] {
                               if (stage.written++ % kWarpsOfTile != 0) {
                                 EXPECT_EQ(stage.holds, copy);
                               }
                               stage.holds = copy;
                             }});
        }
        widener.push_back({[] { return true; },
                           [&stage, copy] {
                             EXPECT_EQ(stage.holds, copy);
                             stage.full.arrive();
                           }});
      }
    }
    EXPECT_EQ(copy, brought[0]);
    EXPECT_EQ(copy, brought[1]);
    warps.push_back(widener);
  }
  for (int warp = 0; warp < kConsumers; ++warp) {
    std::vector<Step> consumer;
    int key = 0, value = 0;
    const auto use = [&](std::vector<ModelStage>& stages, int& copy) {
      ModelStage& stage = stages[static_cast<std::size_t>(copy % kStages)];
      consumer.push_back({wait(stage.full, static_cast<unsigned>(copy / kStages) & 1), [&stage, copy] {
                            EXPECT_EQ(stage.holds, copy);
                            EXPECT_EQ(stage.written % kWarpsOfTile, 0);
                          }});
      ++copy;
    };
    const auto release = [&](std::vector<ModelStage>& stages, int copy) {
      ModelStage& stage = stages[static_cast<std::size_t>(copy % kStages)];
      consumer.push_back({[] { return true; },
                          [&stage, copy] {
                            EXPECT_EQ(stage.holds, copy);
                            stage.empty.arrive();
                          }});
    };
    for (const int tiles : work) {  // kernel.h: S(j) is begun before P(j-1) V(j-1), and settled first
      for (int j = 0; j <= tiles && tiles > 0; ++j) {
        if (j < tiles) use(keys, key);
        if (j > 0) use(values, value);
        if (j < tiles) release(keys, key - 1);
        if (j > 0) release(values, value - 1);
      }
    }
    warps.push_back(consumer);
  }
  std::vector<std::size_t> at(warps.size(), 0);
  std::mt19937 random(seed);
  while (true) {
    std::vector<int> able;  // warps, and copies on their way as -1
    bool is_done = true;
    for (std::size_t warp = 0; warp < warps.size(); ++warp) {
      if (at[warp] == warps[warp].size()) continue;
      is_done = false;
      if (warps[warp][at[warp]].ready()) able.push_back(static_cast<int>(warp));
    }
    if (!on_their_way.empty()) able.push_back(-1);
    if (is_done && on_their_way.empty()) break;
    ASSERT_FALSE(able.empty()) << "no warp goes on";
    const int chosen = able[random() % able.size()];
    if (chosen < 0) {
      const std::size_t which = random() % on_their_way.size();
      ModelStage& slot = *on_their_way[which].first;
      slot.holds = on_their_way[which].second;
      slot.full.land(100);
      on_their_way.erase(on_their_way.begin() + static_cast<std::ptrdiff_t>(which));
    } else {
      const auto warp = static_cast<std::size_t>(chosen);
      warps[warp][at[warp]++].act();
    }
  }
}

TEST(StoredRows, WarpsHandSlotsAndStagesOver) {
  for (int slots = 2; slots <= kMostStoredSlots; ++slots) {
    for (unsigned seed = 0; seed < 40; ++seed) {
      run_block({0}, slots, seed);
      run_block({1}, slots, seed);
      run_block({3, 0, 1, 1, 2, 0, 7, 4}, slots, seed);
    }
  }
}

}  // namespace
}  // namespace flashport::host_words
