// A call of decode over segments, as the tests of what brings their rows make it: random formats, lengths, pages and
// factors, rows of random bytes. The file that includes it names the target before.
#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "common/device/decode/segments.h"
#include "tests/reference/blocks.h"

namespace flashport::FLASHPORT_TARGET::decode {

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

inline double stored_value(const unsigned char* row, Type type, int at) {
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

  // The number of a row in its cache.
  std::size_t row(int seq, int key, int head) const {
    const int page = table[static_cast<std::size_t>(seq * pages + key / page_size)];
    return static_cast<std::size_t>((page * page_size + key % page_size) * kHeads + head);
  }
};

class Call {
 public:
  // `any_groups`: groups of every format have factors, and not those alone whose values are integers or fp8.
  Call(int dims, std::mt19937& random, bool any_groups = true)
      : dims_(dims), any_groups_(any_groups), random_(random), params_(std::make_unique<MixedDecodeParams>()) {
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
    side.bytes.resize(rows * row_bytes + 16);  // whole units of a copy are read
    for (unsigned char& byte : side.bytes) byte = static_cast<unsigned char>(random_());
    std::uniform_real_distribution<double> ordinary(-2.0, 2.0);
    if (trait.scale_bytes > 0 || trait.dtype == DType::kFloat16 || trait.dtype == DType::kBFloat16) {
      const Type type = trait.scale_bytes > 0 ? Type::kF16 : side.format.type;
      const int numbers = std::max(trait.scale_bytes, 2);
      for (std::size_t at = 0; at < side.bytes.size(); at += trait.block_bytes) {
        for (int i = 0; i < numbers; i += 2) reference::write_number(&side.bytes[at + i], type, ordinary(random_));
      }
    }
    const auto bits = reinterpret_cast<std::uintptr_t>(side.bytes.data()) | static_cast<unsigned>(row_bytes) | 16;
    const auto unit = static_cast<std::int32_t>(bits & -bits);
    cache = {side.bytes.data(), std::int64_t{page_rows} * row_bytes, kHeads * row_bytes, row_bytes, row_bytes, unit};
    const int kind = below(3);  // no factors, one a row, one a group
    if (kind == 0 || (kind == 2 && !any_groups_ && trait.largest == 0)) return;
    side.group_dims = kind == 1 ? dims_ : dims_ % 16 == 0 && below(2) == 0 ? 16 : 8;
    const int groups = dims_ / side.group_dims;
    side.scales.resize(rows * groups + 4);
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
  bool any_groups_;
  std::mt19937& random_;
  std::unique_ptr<MixedDecodeParams> params_;
  std::vector<Stored> segments_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
