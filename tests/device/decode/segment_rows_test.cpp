// Leaves of segments as the tile of AMD's kernels has them, against the reference's codecs: segments of random formats,
// lengths, pages and factors, rows of random bytes, and zeros where a leaf has no row and a row no dim.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#define FLASHPORT_TARGET host_words
#define FLASHPORT_TARGET_HEADER "tests/device/decode/rows_target.h"
#define FLASHPORT_WORDS_HEADER "tests/device/kv/word_verbs.h"
#include "hip/decode/segment_rows.h"
#include "tests/reference/blocks.h"

namespace flashport::host_words::decode {
namespace {

using reference::Type;

struct Format {
  KvFormat format;
  Type type;
};
// fp8 e4m3 widens by verbs of each target.
constexpr Format kFormats[] = {
    {KvFormat::kFp16, Type::kF16},     {KvFormat::kBf16, Type::kBF16},  {KvFormat::kInt8, Type::kI8},
    {KvFormat::kFp8E5M2, Type::kE5M2}, {KvFormat::kInt4, Type::kI4},    {KvFormat::kQ8_0, Type::kQ8_0},
    {KvFormat::kQ4_0, Type::kQ4_0},    {KvFormat::kQ4_1, Type::kQ4_1},  {KvFormat::kQ5_0, Type::kQ5_0},
    {KvFormat::kQ5_1, Type::kQ5_1},    {KvFormat::kIq4Nl, Type::kIq4Nl}};
constexpr int kBatch = 3, kHeads = 2, kMostKeys = 101;

double stored_value(const unsigned char* row, Type type, int at) {
  if (reference::is_blocks(type)) return reference::read_block_value(type, row, at);
  if (type == Type::kI4) return static_cast<signed char>((row[at / 2] >> at % 2 * 4 & 15) << 4) / 16;
  return reference::read_number(row + at * reference::type_bytes(type), type);
}

// K or V of a segment.
struct Side {
  Format format;
  std::vector<unsigned char> bytes;
  std::vector<float> scales;
  int group_dims = 0;  // that share a factor; 0: there are none
};
struct Stored {
  std::vector<int> lens, table;
  int page_size, pages;  // of a sequence
  Side k, v;

  // Of a row in its cache.
  std::size_t row(int seq, int key, int head) const {
    const int page = table[static_cast<std::size_t>(seq * pages + key / page_size)];
    return static_cast<std::size_t>((page * page_size + key % page_size) * kHeads + head);
  }
};

class Call {
 public:
  Call(int dims, std::mt19937& random) : dims_(dims), random_(random), params_(std::make_unique<MixedDecodeParams>()) {
    MixedDecodeParams& p = *params_;
    p.head_dim_qk = p.head_dim_v = dims;
    p.window_left = p.window_right = -1;
    p.segment_count = 1 + below(kMostSegments);
    segments_.resize(static_cast<std::size_t>(p.segment_count));
    for (int i = 0; i < p.segment_count; ++i) {
      Stored& stored = segments_[i];
      for (int b = 0; b < kBatch; ++b) stored.lens.push_back(std::vector{0, 1, 63, 64, 65, 30, 100}[below(7)]);
      stored.page_size = 1 + below(20);
      stored.pages = (kMostKeys + stored.page_size - 1) / stored.page_size;
      for (int page = kBatch * stored.pages; page > 0; --page) stored.table.push_back(page - 1);
      CacheSegment& s = p.segments[i];
      s.cache.seqlens.data = stored.lens.data();
      s.cache.table = stored.table.data();
      s.cache.table_stride = stored.pages;
      s.cache.page_size = stored.page_size;
      s.cache.page_shift = -1;
      s.cache.max_len = stored.pages * stored.page_size;
      p.cache.max_len += s.cache.max_len;
      fill(stored, stored.k, s.cache.k, s.k_scale, s.k_format);
      fill(stored, stored.v, s.cache.v, s.v_scale, s.v_format);
    }
  }

  const MixedDecodeParams& params() const { return *params_; }
  int keys(int seq) const { return key_count(*params_, seq); }
  int below(int most) { return static_cast<int>(random_() % static_cast<unsigned>(most)); }

  double value(int seq, int key, int head, bool is_key, int dim) const {
    std::size_t segment = 0;
    while (key >= segments_[segment].lens[seq]) key -= segments_[segment++].lens[seq];
    const Stored& stored = segments_[segment];
    const Side& side = is_key ? stored.k : stored.v;
    const std::size_t row = stored.row(seq, key, head);
    const double x =
        stored_value(side.bytes.data() + row * kv_row_bytes(side.format.format, dims_), side.format.type, dim);
    return side.group_dims == 0 ? x : x * side.scales[row * (dims_ / side.group_dims) + dim / side.group_dims];
  }

 private:
  void fill(const Stored& stored, Side& side, CacheParams& cache, KeyScales& scales, KvFormat& format) {
    do {
      side.format = kFormats[below(static_cast<int>(std::size(kFormats)))];
    } while (dims_ % kv_format_trait(side.format.format).block_values != 0);
    format = side.format.format;
    const KvFormatTrait trait = kv_format_trait(format);
    const int row_bytes = kv_row_bytes(format, dims_), page_rows = stored.page_size * kHeads;
    const auto rows = static_cast<std::size_t>(kBatch * stored.pages * page_rows);
    side.bytes.resize(rows * row_bytes);
    for (unsigned char& byte : side.bytes) byte = static_cast<unsigned char>(random_());
    std::uniform_real_distribution<double> ordinary(-2.0, 2.0);
    if (trait.scale_bytes > 0 || trait.dtype == DType::kFloat16 || trait.dtype == DType::kBFloat16) {
      const Type type = trait.scale_bytes > 0 ? Type::kF16 : side.format.type;
      const int numbers = std::max(trait.scale_bytes, 2);
      for (std::size_t at = 0; at < side.bytes.size(); at += trait.block_bytes) {
        for (int i = 0; i < numbers; i += 2) reference::write_number(&side.bytes[at + i], type, ordinary(random_));
      }
    }
    cache = {side.bytes.data(), std::int64_t{page_rows} * row_bytes, kHeads * row_bytes, row_bytes, row_bytes, 2};
    const int kind = below(3);  // no factors, one a row, one a group
    if (kind == 0) return;
    side.group_dims = kind == 1 ? dims_ : dims_ % 16 == 0 && below(2) == 0 ? 16 : 8;
    const int groups = dims_ / side.group_dims;
    side.scales.resize(rows * groups);
    for (float& scale : side.scales) scale = static_cast<float>(1.0 + ordinary(random_) / 4);
    scales = {side.scales.data(),
              DType::kFloat32,
              std::int64_t{page_rows} * groups,
              kHeads * groups,
              groups,
              kind == 1 ? 0 : 1,
              kind == 1 ? 0 : side.group_dims};
  }

  int dims_;
  std::mt19937& random_;
  std::unique_ptr<MixedDecodeParams> params_;
  std::vector<Stored> segments_;
};

double read_tile(std::uint16_t bits, MathType math) {
  return math == MathType::kBf16 ? to_float(BFloat16{bits}) : to_float(std::bit_cast<Half>(bits));
}

// Rounded once.
::testing::AssertionResult is_near(double x, double exact, MathType math) {
  const double bound = 1e-6 + std::fabs(exact) * (math == MathType::kBf16 ? 0x1.02p-8 : 0x1.02p-11);
  if (std::fabs(x - exact) <= bound) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << x << " in place of " << exact;
}

template <int kDims, MathType kMath, int kWaves>
void check_leaves(Call& call, int dims) {
  constexpr DecodeConfig kCfg{{kDims, kDims, 16, kMath, KvFormat::kAny, KvFormat::kAny}, {kWaves, 1, 1}};
  using Tile = WideTile<kCfg>;
  const auto tile = std::make_unique<Tile>();
  std::vector<Block> blocks;
  for (int i = 0; i < kWaves * kWaveSize; ++i) blocks.push_back({i, kWaves * kWaveSize});
  std::vector<SegmentRows<kCfg>> threads;
  for (const Block& block : blocks) threads.emplace_back(call.params(), block, *tile);
  const auto check = [&](const LeafCursor& at, std::uint16_t bits, int key, bool is_key, int dim) {
    const Segment& s = at.segment;
    const bool exists = key >= s.key_low && key < s.key_high && dim < dims;
    const double exact = exists ? call.value(s.seq, key, s.kv_head, is_key, dim) : 0.0;
    if (std::isnan(exact) || std::fabs(exact) > 65000) return;  // of e5m2, and where its products overflow
    ASSERT_TRUE(is_near(read_tile(bits, kMath), exact, kMath)) << key << " " << is_key << " " << dim;
  };
  for (int seq = 0; seq < kBatch; ++seq) {
    LeafCursor at(Range{});
    Segment& s = at.segment;
    s = {};
    s.seq = seq;
    s.kv_head = seq % kHeads;
    s.key_high = call.keys(seq);
    s.key_low = std::min(s.key_high, call.below(2) * call.below(40));
    s.last = s.leaves = leaf_count(0, s.key_high);
    for (at.leaf = 0; at.leaf < s.last; ++at.leaf) {
      for (auto& thread : threads) thread.look_up(at);
      for (auto& thread : threads) thread.touch();
      for (auto& thread : threads) thread.begin_leaf();
      for (int first = 0; first < kDims; first += Tile::kKeyDims) {
        std::memset(&tile->keys, 0xff, sizeof tile->keys);
        for (auto& thread : threads) thread.widen_keys(first);
        for (int key = 0; key < kLeafKeys; ++key) {
          for (int i = 0; i < Tile::kKeyDims; ++i) check(at, tile->keys[key][i], at.key() + key, true, first + i);
        }
      }
      for (int first = 0; first < kLeafKeys; first += Tile::kValues) {
        std::memset(&tile->values, 0xff, sizeof tile->values);
        for (auto& thread : threads) thread.widen_values(first);
        for (int key = 0; key < Tile::kValues; ++key) {
          for (int i = 0; i < kDims; ++i) check(at, tile->values[key][i], at.key() + first + key, false, i);
        }
      }
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

template <int kDims, MathType kMath, int kWaves>
void check_dims(int dims) {
  std::mt19937 random(static_cast<unsigned>(dims));
  for (int repeat = 0; repeat < 8; ++repeat) {
    SCOPED_TRACE(repeat);
    Call call(dims, random);
    check_leaves<kDims, kMath, kWaves>(call, dims);
  }
}

TEST(SegmentRows, AreTheReferencesInTheMathType) {
  for (const int dims : {16, 24, 72, 96, 104, 128}) check_dims<128, MathType::kFp16, 2>(dims);
  for (const int dims : {96, 120, 128}) check_dims<128, MathType::kBf16, 2>(dims);
}

TEST(SegmentRows, OfManyDimsComeInHalves) {
  check_dims<256, MathType::kFp16, 4>(192);
  for (const int dims : {256, 264, 512}) check_dims<512, MathType::kFp16, 4>(dims);
}

}  // namespace
}  // namespace flashport::host_words::decode
