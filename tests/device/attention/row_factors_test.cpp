// Tiles that the producers of attention leave for its consumers, where factors lie beside keys and values: against the
// reference's codecs, by the kernels' own text. All producer warps run on a machine of the host, and one lane stands in
// place of the warps that compute.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#define FLASHPORT_TARGET sm90a
#define FLASHPORT_TARGET_HEADER "tests/device/machine/target.h"
#include FLASHPORT_TARGET_HEADER  // which names the words that the others take

#include "cuda/attention/stored_boxes.h"
#include "cuda/attention/tensor_maps.h"
#include "cuda/attention/widening_producer.h"

#include "tests/device/decode/random_segments.h"

namespace flashport::sm90a::attention {
namespace {

using decode::Format;
using reference::Type;

constexpr int kBatch = 2, kHeads = 2, kQueries = 5;
constexpr double kMostHalf = 65000;

// Keys or values: rows of random bytes, and the factors beside them.
struct Side {
  Format format;
  std::vector<unsigned char> bytes, factors;
  KeyScales scales{};
  int dims = 0;

  double value(const CacheParams& cache, kv::TokenCoord at, int head, int dim) const {
    const double x = decode::stored_value(bytes.data() + kv::row_offset(cache, at, head), format.type, dim);
    if (scales.data == nullptr) return x;
    const std::int64_t group = scales.dims_per_scale == 0 ? 0 : dim / scales.dims_per_scale;
    const std::int64_t element = kv::scale_element(scales, at, head) + group * scales.stride_group;
    if (scales.dtype == DType::kFloat32) return x * static_cast<const float*>(scales.data)[element];
    return x * to_float(static_cast<const Half*>(scales.data)[element]);
  }
};

class Call {
 public:
  Call(int dims, std::mt19937& random) : dims_(dims), random_(random) {
    p_.batch = kBatch;
    p_.q_len = kQueries;
    p_.num_q_heads = p_.num_kv_heads = kHeads;
    p_.group_size = 1;
    p_.head_dim_qk = p_.head_dim_v = dims;
    p_.window_left = p_.window_right = -1;
    queries_.resize(static_cast<std::size_t>(kBatch * kQueries * kHeads * dims));
    p_.q = {queries_.data(), DType::kFloat16, kQueries * kHeads * dims, kHeads * dims, dims, 1};
    p_.total_q = kBatch * kQueries;
    page_size_ = below(2) == 0 ? 8 << below(4) : below(3) == 0 ? 1 : 1 + below(20);
    pages_ = (kMostKeys + page_size_ - 1) / page_size_;
    const bool paged = below(3) > 0;
    if (!paged) {
      page_size_ = kMostKeys;
      pages_ = 1;
    }
    for (int page = kBatch * pages_; page > 0; --page) table_.push_back(page - 1);
    p_.kv_len = kMostKeys;
    p_.total_k = std::int64_t{kBatch} * pages_ * page_size_;
    p_.cache.max_len = kMostKeys;
    p_.cache.page_size = page_size_;
    p_.cache.page_shift = -1;
    if (paged) {
      p_.cache.table = table_.data();
      p_.cache.table_stride = pages_;
      if (below(2) == 0) p_.leftpad_k = table_.data();  // which boxes of pages do not go with
    }
    fill(k_, p_.cache.k, p_.k_row_scales, p_.k_format);
    fill(v_, p_.cache.v, p_.v_row_scales, p_.v_format);
  }

  const AttentionParams& params() const { return p_; }
  // Boxes bring keys and values where TMA can read them.
  bool encode_boxes() {
    EXPECT_EQ(cuda_attention::encode_stored_maps<128>(p_), nullptr);
    return p_.k_box.row_bytes != 0;
  }
  bool has_factors() const { return k_.scales.data != nullptr || v_.scales.data != nullptr; }
  bool is_narrow() const {
    return cuda_attention::is_stored_narrow(p_.k_format) && cuda_attention::is_stored_narrow(p_.v_format);
  }
  int below(int most) { return static_cast<int>(random_() % static_cast<unsigned>(most)); }

  WorkTile work(int keys) {
    WorkTile work{};
    work.seq = below(kBatch);
    work.head = below(kHeads);
    work.q_len = kQueries;
    if (p_.cache.table == nullptr || p_.leftpad_k != nullptr) work.k_begin = below(2) * below(30);
    work.kv_len = std::vector{1, 31, 64, 65, 128, 150, 200}[below(7)];
    work.end_tile = (work.kv_len + keys - 1) / keys;
    return work;
  }

  // How far a value of a tile may be from the exact one, and whether it tells anything.
  bool is_right(const WorkTile& work, int key, bool is_key, int dim, double x) const {
    if (key >= work.kv_len || dim >= dims_) return x == 0;
    const Side& side = is_key ? k_ : v_;
    const kv::TokenCoord at =
        kv::token_coord(p_.cache, kv::page_list(p_.cache, work.seq), work.seq, work.k_begin + key, true);
    const double exact = side.value(is_key ? p_.cache.k : p_.cache.v, at, work.head, dim);
    if (!std::isfinite(exact) || std::fabs(exact) > kMostHalf) return true;
    const bool twice = reference::is_blocks(side.format.type) || side.format.type == Type::kBF16;
    return std::fabs(x - exact) <= 1e-6 + std::fabs(exact) * (twice ? 0x2.02p-11 : 0x1.02p-11);
  }

  std::string text() const {
    const auto side = [](const Side& s) {
      if (s.scales.data == nullptr) return std::string(kv_format_trait(s.format.format).name);
      return std::string(kv_format_trait(s.format.format).name) + " factors of " +
             std::to_string(s.scales.dims_per_scale) + (s.scales.dtype == DType::kFloat16 ? " fp16" : " fp32") +
             " stride " + std::to_string(s.scales.stride_group);
    };
    return side(k_) + " and " + side(v_) + ", pages of " + std::to_string(page_size_);
  }

 private:
  static constexpr int kMostKeys = 240;

  void fill(Side& side, CacheParams& cache, KeyScales& scales, KvFormat& format) {
    side.dims = dims_;
    do {
      const int number = below(static_cast<int>(std::size(decode::kFormats)) + 1);
      side.format = number == 0 ? Format{KvFormat::kFp8E4M3, Type::kE4M3} : decode::kFormats[number - 1];
    } while (dims_ % kv_format_trait(side.format.format).block_values != 0);
    format = side.format.format;
    const KvFormatTrait trait = kv_format_trait(format);
    const int row_bytes = kv_row_bytes(format, dims_), page_rows = page_size_ * kHeads;
    const auto rows = static_cast<std::size_t>(kBatch * pages_ * page_rows);
    side.bytes.resize(rows * row_bytes);
    for (unsigned char& byte : side.bytes) byte = static_cast<unsigned char>(random_());
    std::uniform_real_distribution<double> ordinary(-2.0, 2.0);
    if (trait.scale_bytes > 0 || trait.dtype == DType::kFloat16 || trait.dtype == DType::kBFloat16) {
      const Type type = trait.scale_bytes > 0 ? Type::kF16 : side.format.type;
      for (std::size_t at = 0; at < side.bytes.size(); at += trait.block_bytes) {
        for (int i = 0; i < std::max(trait.scale_bytes, 2); i += 2) {
          reference::write_number(&side.bytes[at + i], type, ordinary(random_));
        }
      }
    }
    const auto bits = reinterpret_cast<std::uintptr_t>(side.bytes.data()) | static_cast<unsigned>(row_bytes) | 16;
    cache = {side.bytes.data(), std::int64_t{page_rows} * row_bytes,    kHeads * row_bytes, row_bytes,
             row_bytes,         static_cast<std::int32_t>(bits & -bits)};
    fill_factors(side, rows, page_rows);
    scales = side.scales;
  }

  // None, one a row or one a group; in either type, aligned or not, those of a row side by side or apart.
  void fill_factors(Side& side, std::size_t rows, int page_rows) {
    const int kind = below(4);
    if (kind == 0) return;
    const bool is_half = below(2) == 0, apart = kind == 3 && below(3) == 0;
    const int group_dims = kind == 1 ? dims_ : dims_ % 16 == 0 && below(2) == 0 ? 16 : 8, groups = dims_ / group_dims;
    const std::size_t size = is_half ? 2 : 4, count = rows * groups, first = static_cast<std::size_t>(below(3));
    side.factors.resize((first + count) * size);
    std::uniform_real_distribution<float> ordinary(0.5f, 1.5f);
    for (std::size_t i = 0; i < first + count; ++i) {
      const float x = i < first ? std::nanf("") : ordinary(random_);
      if (is_half) {
        const Half half = to_half(x);
        std::memcpy(&side.factors[i * 2], &half, 2);
      } else {
        std::memcpy(&side.factors[i * 4], &x, 4);
      }
    }
    const std::int64_t row = apart ? 1 : groups;
    side.scales = {side.factors.data() + first * size,
                   is_half ? DType::kFloat16 : DType::kFloat32,
                   page_rows * row,
                   kHeads * row,
                   row,
                   kind == 1 ? 0
                   : apart   ? static_cast<std::int64_t>(rows)
                             : 1,
                   kind == 1 ? 0 : group_dims};
  }

  const int dims_;
  std::mt19937& random_;
  AttentionParams p_{};
  std::vector<std::uint16_t> queries_;
  std::vector<std::int32_t> table_;
  int page_size_, pages_;
  Side k_, v_;
};

// Takes the tiles of each work tile as the consumers do. What is wrong first, or nothing.
template <AttentionConfig kCfg>
std::string check_tiles(const Call& call, const std::vector<WorkTile>& all, AttentionMemory<kCfg>& memory) {
  constexpr int kKeys = kCfg.tuning.keys, kConsumers = consumer_threads(kCfg) / kWaveSize;
  std::string wrong;
  const auto take = [&](Barriers* barriers, int stages, int copy, const auto& read) {
    Barriers& stage = barriers[copy % stages];
    mbarrier_wait(&stage.full, static_cast<unsigned>(copy / stages) & 1);
    read(copy % stages);
    for (int i = 0; i < kConsumers; ++i) mbarrier_arrive(&stage.empty);
  };
  const auto check = [&](const unsigned char* tile, const WorkTile& work, int number, bool is_key) {
    for (int row = 0; row < kKeys; ++row) {
      for (int dim = 0; dim < kCfg.shape.head_dim_qk && wrong.empty(); ++dim) {
        Half bits;
        std::memcpy(&bits, tile + cuda_attention::widened_place(row, dim / 8, kKeys * 128) + dim % 8 * 2, sizeof bits);
        const double x = to_float(bits);
        if (call.is_right(work, number * kKeys + row, is_key, dim, x)) continue;
        wrong = "key " + std::to_string(number * kKeys + row) + (is_key ? " K" : " V") + " dim " + std::to_string(dim) +
                ": " + std::to_string(x);
      }
    }
  };
  int copy = 0, queries = 0;
  for (const WorkTile& work : all) {
    for (int i = 0; i <= work.end_tile; ++i) {
      if (i < work.end_tile) {
        take(memory.key_barriers, kCfg.tuning.stages, copy + i,
             [&](int stage) { check(memory.keys[stage].x[0], work, i, true); });
      }
      if (i == 0) take(memory.query_barriers, kQueryStages, queries++, [](int) {});
      if (i > 0) {
        take(memory.value_barriers, value_stages(kCfg.tuning), copy + i - 1,
             [&](int stage) { check(memory.values[stage].x[0], work, i - 1, false); });
      }
    }
    copy += work.end_tile;
  }
  return wrong;
}

// As produce() does.
template <AttentionConfig kCfg>
void bring_tiles(const AttentionParams& p, const Block& block, AttentionMemory<kCfg>& memory,
                 const std::vector<WorkTile>& works) {
  const auto bring = [&](auto producer) {
    for (const WorkTile& work : works) producer.bring(work);
  };
  if constexpr (stored_bytes(kCfg) == 0) {
    bring(RowProducer<kCfg>(p, block, memory));
  } else if (p.k_box.row_bytes == 0) {
    bring(WideningProducer<kCfg>(p, block, memory));
  } else if (block.wave() >= cuda_attention::kWideningWarps) {
    bring(RowWidener<kCfg>(p, block, memory));
  } else if (block.wave() == 1) {
    bring(StoredBoxProducer<kCfg>(p, block, memory));
  } else {
    bring(QueryProducer<kCfg>(p, block, memory, 2));
  }
}

enum class Way { kAny, kBoxes };  // kBoxes: those that boxes bring with factors alone
template <int kDim, ScoreForm kForm>
void check_dims(int dims, int repeats, Way way = Way::kAny) {
  constexpr AttentionShape kShape{MathType::kFp16, kDim, kDim, kForm, KeySources::kScaled};
  constexpr AttentionConfig kCfg{kShape, attention_tuning(kShape)};
  constexpr int kProducers = producer_groups(kCfg) * kWarpgroup;
  std::mt19937 random(static_cast<unsigned>(dims + kDim));
  for (int repeat = 0; repeat < repeats;) {
    Call call(dims, random);
    const bool by_boxes = stored_bytes(kCfg) > 0 && call.is_narrow() && call.encode_boxes();
    if (way == Way::kBoxes && !(by_boxes && call.has_factors())) continue;
    ++repeat;
    SCOPED_TRACE(std::to_string(dims) + " dims, call " + std::to_string(repeat) + ": " + call.text() +
                 (by_boxes ? ", by boxes" : ""));
    std::vector<WorkTile> works;
    for (int i = 0; i < 3; ++i) works.push_back(call.work(kCfg.tuning.keys));
    std::string wrong;
    const auto kernel = [&](void* bytes) {
      auto& memory = *static_cast<AttentionMemory<kCfg>*>(bytes);
      const int thread = static_cast<int>(machine::thread_index());
      if (thread == 0) memory.init(call.params());
      __syncthreads();
      if (thread == 0) wrong = check_tiles<kCfg>(call, works, memory);
      if (thread < kWaveSize) return;
      const Block producers(&memory.flag, kWaveSize, kProducers, 1);
      if (producers.wave() == 0) return;  // which takes work tiles
      bring_tiles<kCfg>(call.params(), producers, memory, works);
    };
    EXPECT_EQ(machine::run({.threads = kWaveSize + kProducers,
                            .shared_bytes = sizeof(AttentionMemory<kCfg>),
                            .seed = static_cast<unsigned>(100 * dims + repeat),
                            .kernel = kernel}),
              "");
    ASSERT_EQ(wrong, "");
  }
}

TEST(RowFactors, MultiplyRowsThatWaitBesideTheTiles) {
  for (const int dims : {128, 96, 40}) check_dims<128, ScoreForm::kPlain>(dims, 12);
}

TEST(RowFactors, MultiplyRowsThatBoxesBring) { check_dims<128, ScoreForm::kPlain>(128, 40, Way::kBoxes); }

TEST(RowFactors, MultiplyRowsThatAreWidenedInPlace) {
  for (const int dims : {64, 40}) check_dims<64, ScoreForm::kAny>(dims, 10);
  check_dims<128, ScoreForm::kAny>(128, 10);
  for (const int dims : {256, 136}) check_dims<256, ScoreForm::kAny>(dims, 8);
  for (const int dims : {512, 264}) check_dims<512, ScoreForm::kAny>(dims, 6);
}

}  // namespace
}  // namespace flashport::sm90a::attention
