// One call of attention that appends, made from a case: its tensors, the cache as it should be afterwards, and the call
// without new keys on such a cache.
#pragma once

#include <gtest/gtest.h>

#include <flashport/attention.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tests/ops/attention/call_support.h"
#include "tests/ops/decode/call.h"
#include "tests/support/device.h"
#include "tests/support/random.h"

namespace flashport_test {

enum class Rotary { kNone, kHalves, kInterleaved };

struct AppendCase {
  std::string name;
  reference::Type type = reference::Type::kBF16;
  std::optional<reference::Type> cache_type = {};  // default: `type`
  std::vector<std::int64_t> before = {0, 15, 16, 40}, added = {3, 3, 3, 3};
  bool packed_new = false;
  std::vector<std::int64_t> queries = {3, 3, 3, 3};
  bool packed_q = false;
  Pages pages = Pages::kNone;
  std::int64_t dim_qk = 64, dim_v = 64, q_heads = 4, kv_heads = 2;
  Rotary rotary = Rotary::kHalves;
  std::int64_t rotary_dim = 64, positions = 4096;
  reference::Type angles = reference::Type::kBF16;
  bool causal = true;
  bool scales = false;
  bool loose = false;  // new keys lie at addresses that only loads of an element are aligned to
  std::int64_t room = 64, window_left = -1;
  bool one_launch = false;  // on targets with kernels that decode and append
  bool lse = true;          // asked for, which plain calls do not

  [[nodiscard]] flashport::AttentionQuery query() const {
    const bool is_own = !cache_type || *cache_type == type;
    return {.target = query_target(),
            .dtype = dtype_of(type),
            .head_dim_qk = dim_qk,
            .head_dim_v = dim_v,
            .k_format = is_own ? std::nullopt : std::optional(format_of(*cache_type)),
            .v_format = is_own ? std::nullopt : std::optional(format_of(*cache_type)),
            .paged = pages != Pages::kNone,
            .causal = causal,
            .seqused_k = true,
            .appends = true,
            .q_len = packed_q ? 0 : queries[0],
            .group_size = q_heads / kv_heads};
  }
};

inline std::ostream& operator<<(std::ostream& out, const AppendCase& c) { return out << c.name; }

inline std::int64_t sum_of(const std::vector<std::int64_t>& values) {
  std::int64_t all = 0;
  for (const std::int64_t value : values) all += value;
  return all;
}

inline std::vector<std::int64_t> offsets_of(const std::vector<std::int64_t>& lens) {
  std::vector<std::int64_t> offsets = {0};
  for (const std::int64_t len : lens) offsets.push_back(offsets.back() + len);
  return offsets;
}

class AppendCall {
 public:
  static constexpr std::int64_t kPageSize = 8;

  explicit AppendCall(const AppendCase& c)
      : c_(c),
        pages_(batch() * (c.room / kPageSize) + kUnusedPages),
        random_(static_cast<std::uint64_t>(c.dim_qk * 31 + c.rotary_dim)),
        q_(rows(c.queries, c.packed_q, c.q_heads, c.dim_qk, false)),
        k_new_(rows(c.added, c.packed_new, c.kv_heads, c.dim_qk, c.loose)),
        v_new_(rows(c.added, c.packed_new, c.kv_heads, c.dim_v, c.loose)),
        cos_(c.angles, {c.positions, c.rotary_dim / 2}),
        sin_(c.angles, {c.positions, c.rotary_dim / 2}),
        k_cache_(cache(c.dim_qk)),
        v_cache_(cache(c.dim_v)),
        k_wanted_(cache(c.dim_qk)),
        v_wanted_(cache(c.dim_v)),
        seqlens_(int_tensor(c.before)),
        out_(rows(c.queries, c.packed_q, c.q_heads, c.dim_v, false)),
        lse_(reference::Type::kF32,
             c.packed_q ? Shape{c.q_heads, sum_of(c.queries)} : Shape{batch(), c.q_heads, c.queries[0]}) {
    for (Tensor* tensor : {&q_, &k_new_, &v_new_}) {
      tensor->for_each([&](const Shape& at) { tensor->set(at, random_.normal()); });
    }
    cos_.for_each([&](const Shape& at) {
      const double angle = static_cast<double>(at[0]) * std::pow(10000.0, -static_cast<double>(at[1]) / 16.0);
      cos_.set(at, std::cos(angle));
      sin_.set(at, std::sin(angle));
    });
    order_ = random_.permutation(pages_);
    make_tables();
    if (c.scales) {
      for (std::optional<Tensor>* scale : {&k_scale_, &v_scale_}) {
        scale->emplace(reference::Type::kF32, Shape{c.kv_heads});
        (*scale)->for_each([&](const Shape& at) { (*scale)->set(at, 0.25 + random_.uniform()); });
      }
    }
    fill_caches();
  }

  // All arguments but the new keys'.
  flashport::AttentionArgs args() {
    flashport::AttentionArgs a;
    a.q = q_.view();
    a.k = k_cache_.view();
    a.v = v_cache_.view();
    if (c_.cache_type) a.k_format = a.v_format = format_of(*c_.cache_type);
    a.seqused_k = seqlens_.view();
    a.causal = c_.causal;
    a.window_left = c_.window_left;
    a.out = out_.view();
    if (c_.lse) a.lse = lse_.view();
    a.kv_layout = c_.pages == Pages::kBlockTableHnd ? flashport::KvLayout::kHND : flashport::KvLayout::kNHD;
    const auto give = [](std::optional<flashport::TensorView>& view, const std::optional<Tensor>& tensor) {
      if (tensor) view = tensor->view();
    };
    give(a.k_scale, k_scale_);
    give(a.v_scale, v_scale_);
    give(a.block_table, block_table_);
    give(a.token_table, token_table_);
    give(a.kv_indptr, kv_indptr_);
    give(a.kv_indices, kv_indices_);
    give(a.cu_seqlens_q, cu_seqlens_q_);
    if (c_.packed_q) a.max_seqlen_q = *std::max_element(c_.queries.begin(), c_.queries.end());
    return a;
  }
  flashport::AttentionArgs appending_args() {
    flashport::AttentionArgs a = args();
    a.k_new = k_new_.view();
    a.v_new = v_new_.view();
    if (cu_seqlens_new_) a.cu_seqlens_k_new = cu_seqlens_new_->view();
    if (c_.rotary != Rotary::kNone) {
      a.rotary_cos = cos_.view();
      a.rotary_sin = sin_.view();
      a.rotary_interleaved = c_.rotary == Rotary::kInterleaved;
    }
    return a;
  }

  void upload() {
    for (Tensor* tensor : {&q_, &k_new_, &v_new_, &cos_, &sin_, &k_cache_, &v_cache_, &seqlens_}) tensor->upload();
    for (auto* tensor : {&k_scale_, &v_scale_, &block_table_, &token_table_, &kv_indptr_, &kv_indices_, &cu_seqlens_q_,
                         &cu_seqlens_new_}) {
      if (*tensor) (*tensor)->upload();
    }
    out_.poison();
    lse_.poison();
  }
  std::vector<unsigned char> fetch() {
    out_.download();
    lse_.download();
    std::vector<unsigned char> bytes = out_.element_bytes();
    const std::vector<unsigned char> more = lse_.element_bytes();
    bytes.insert(bytes.end(), more.begin(), more.end());
    return bytes;
  }

  // The cache as the call should leave it, and the queries and lengths of the call without new keys.
  void make_wanted() {
    for (std::int64_t b = 0; b < batch(); ++b) {
      for (std::int64_t i = 0; i < added(b); ++i) {
        const std::int64_t position = before(b) + i;
        const Shape from = c_.packed_new ? Shape{new_first(b) + i, 0, 0} : Shape{b, i, 0, 0};
        for (std::int64_t head = 0; head < c_.kv_heads; ++head) {
          write_row(k_wanted_, row(b, position, head),
                    divided(turned(row_of(k_new_, from, head, c_.dim_qk), position), k_scale_, head));
          write_row(v_wanted_, row(b, position, head), divided(row_of(v_new_, from, head, c_.dim_v), v_scale_, head));
        }
      }
      seqlens_.set({b}, static_cast<double>(before(b) + added(b)));
      for (std::int64_t i = 0; i < c_.queries[static_cast<std::size_t>(b)]; ++i) {
        const std::int64_t position = before(b) + (c_.causal ? i : 0);
        Shape at =
            c_.packed_q ? Shape{offsets_of(c_.queries)[static_cast<std::size_t>(b)] + i, 0, 0} : Shape{b, i, 0, 0};
        for (std::int64_t head = 0; head < c_.q_heads; ++head) {
          const std::vector<float> values = turned(row_of(q_, at, head, c_.dim_qk), position);
          at[at.size() - 2] = head;
          for (std::int64_t d = 0; d < c_.dim_qk; ++d) {
            at.back() = d;
            q_.set(at, static_cast<double>(values[static_cast<std::size_t>(d)]));
          }
        }
      }
    }
  }
  std::string check_caches() {
    for (Tensor* cache : {&k_cache_, &v_cache_}) {
      cache->download();
      if (const std::string damage = cache->damage(); !damage.empty()) return damage;
      const std::vector<unsigned char> got = cache->element_bytes();
      const std::vector<unsigned char> wanted = (cache == &k_cache_ ? k_wanted_ : v_wanted_).element_bytes();
      const auto differs = std::mismatch(got.begin(), got.end(), wanted.begin());
      if (differs.first != got.end()) {
        return std::string(cache == &k_cache_ ? "k" : "v") + ": byte " + std::to_string(differs.first - got.begin()) +
               " of " + std::to_string(got.size()) + " differs";
      }
    }
    return "";
  }

  Tensor& seqlens() { return seqlens_; }
  Tensor& k_cache() { return k_cache_; }
  Tensor& out() { return out_; }
  Tensor& block_table() { return *block_table_; }
  Tensor& cu_seqlens_new() { return *cu_seqlens_new_; }

 private:
  static constexpr std::int64_t kUnusedPages = 8;

  [[nodiscard]] std::int64_t batch() const { return static_cast<std::int64_t>(c_.before.size()); }
  [[nodiscard]] std::int64_t before(std::int64_t b) const { return c_.before[static_cast<std::size_t>(b)]; }
  [[nodiscard]] std::int64_t added(std::int64_t b) const { return c_.added[static_cast<std::size_t>(b)]; }
  [[nodiscard]] std::int64_t new_first(std::int64_t b) const {
    return offsets_of(c_.added)[static_cast<std::size_t>(b)];
  }
  [[nodiscard]] bool pool() const { return c_.pages == Pages::kTokenTable; }

  [[nodiscard]] Tensor rows(const std::vector<std::int64_t>& lens, bool packed, std::int64_t heads, std::int64_t dim,
                            bool loose) const {
    const Shape shape =
        packed ? Shape{sum_of(lens), heads, dim} : Shape{static_cast<std::int64_t>(lens.size()), lens[0], heads, dim};
    Shape strides = dense_strides(shape);
    if (!loose) return {c_.type, shape, strides};
    for (std::size_t axis = 0; axis + 1 < strides.size(); ++axis) strides[axis] = strides[axis] / dim * (dim + 1);
    return {c_.type, shape, strides, 1};
  }
  [[nodiscard]] Tensor cache(std::int64_t dim) const {
    const reference::Type type = c_.cache_type.value_or(c_.type);
    const bool heads_first = c_.pages == Pages::kBlockTableHnd;
    const bool dense = c_.pages == Pages::kNone;
    const CacheShape shape{pool()  ? pages_ * kPageSize
                           : dense ? batch()
                                   : pages_,
                           dense ? c_.room : kPageSize,
                           c_.kv_heads,
                           row_extent(type, dim),
                           heads_first,
                           pool(),
                           "dense"};
    return make_cache(type, shape);
  }
  // Where a token's row of a head lies in the cache.
  [[nodiscard]] Shape row(std::int64_t b, std::int64_t token, std::int64_t head) const {
    if (c_.pages == Pages::kNone) return {b, token, head, 0};
    const std::int64_t page = order_[static_cast<std::size_t>(b * (c_.room / kPageSize) + token / kPageSize)];
    if (pool()) return {page * kPageSize + token % kPageSize, head, 0};
    return c_.pages == Pages::kBlockTableHnd ? Shape{page, head, token % kPageSize, 0}
                                             : Shape{page, token % kPageSize, head, 0};
  }
  void make_tables() {
    const std::int64_t pages_each = c_.room / kPageSize;
    const auto page = [&](std::int64_t b, std::int64_t i) {
      return static_cast<double>(order_[static_cast<std::size_t>(b * pages_each + i)]);
    };
    if (c_.pages == Pages::kBlockTable || c_.pages == Pages::kBlockTableHnd) {
      block_table_.emplace(reference::Type::kI32, Shape{batch(), pages_each});
      block_table_->for_each([&](const Shape& at) { block_table_->set(at, page(at[0], at[1])); });
    } else if (pool()) {
      token_table_.emplace(reference::Type::kI32, Shape{batch(), c_.room});
      token_table_->for_each([&](const Shape& at) {
        token_table_->set(at, page(at[0], at[1] / kPageSize) * kPageSize + static_cast<double>(at[1] % kPageSize));
      });
    } else if (c_.pages == Pages::kCsr) {
      kv_indices_.emplace(reference::Type::kI32, Shape{batch() * pages_each});
      kv_indices_->for_each(
          [&](const Shape& at) { kv_indices_->set(at, page(at[0] / pages_each, at[0] % pages_each)); });
      kv_indptr_.emplace(reference::Type::kI32, Shape{batch() + 1});
      kv_indptr_->for_each([&](const Shape& at) { kv_indptr_->set(at, static_cast<double>(at[0] * pages_each)); });
    }
    if (c_.packed_q) cu_seqlens_q_.emplace(int_tensor(offsets_of(c_.queries)));
    if (c_.packed_new) cu_seqlens_new_.emplace(int_tensor(offsets_of(c_.added)));
  }
  void fill_caches() {
    for (std::int64_t b = 0; b < batch(); ++b) {
      for (std::int64_t token = 0; token < before(b); ++token) {
        for (std::int64_t head = 0; head < c_.kv_heads; ++head) {
          for (Tensor* cache : {&k_cache_, &v_cache_}) {
            std::vector<float> values(static_cast<std::size_t>(cache == &k_cache_ ? c_.dim_qk : c_.dim_v));
            for (float& value : values) value = static_cast<float>(random_.normal());
            write_row(*cache, row(b, token, head), values);
            write_row(cache == &k_cache_ ? k_wanted_ : v_wanted_, row(b, token, head), values);
          }
        }
      }
    }
  }
  static std::vector<float> row_of(Tensor& tensor, Shape at, std::int64_t head, std::int64_t dim) {
    std::vector<float> values;
    at[at.size() - 2] = head;
    for (at.back() = 0; at.back() < dim; ++at.back()) values.push_back(static_cast<float>(tensor.get(at)));
    return values;
  }
  // As the target's fma_rn: cpu_generic's processors need not have one.
  [[nodiscard]] float multiply_add(float a, float b, float c) const {
    if (!flashport::which_kernel(c_.query()).ends_with("/cpu_generic")) return std::fma(a, b, c);
    const volatile float product = a * b;
    return product + c;
  }
  static std::vector<float> divided(std::vector<float> values, const std::optional<Tensor>& scale, std::int64_t head) {
    if (!scale) return values;
    for (float& value : values) value /= static_cast<float>(scale->array().at({head}));
    return values;
  }
  std::vector<float> turned(std::vector<float> values, std::int64_t position) {
    if (c_.rotary == Rotary::kNone || position >= c_.positions) return values;
    const std::int64_t half = c_.rotary_dim / 2;
    for (std::int64_t i = 0; i < half; ++i) {
      const bool pairs = c_.rotary == Rotary::kInterleaved;
      float& x = values[static_cast<std::size_t>(pairs ? 2 * i : i)];
      float& y = values[static_cast<std::size_t>(pairs ? 2 * i + 1 : i + half)];
      const auto cos = static_cast<float>(cos_.get({position, i})), sin = static_cast<float>(sin_.get({position, i}));
      const double exact_x = double{x} * cos - double{y} * sin, exact_y = double{x} * sin + double{y} * cos;
      const double bound = 0x1p-22 * (std::fabs(x) + std::fabs(y));
      const float new_x = multiply_add(x, cos, -(y * sin)), new_y = multiply_add(y, cos, x * sin);
      EXPECT_NEAR(new_x, exact_x, bound);
      EXPECT_NEAR(new_y, exact_y, bound);
      x = new_x;
      y = new_y;
    }
    return values;
  }

  AppendCase c_;
  std::int64_t pages_;
  Random random_;
  Tensor q_, k_new_, v_new_, cos_, sin_, k_cache_, v_cache_, k_wanted_, v_wanted_, seqlens_, out_, lse_;
  std::vector<std::int64_t> order_;
  std::optional<Tensor> k_scale_, v_scale_, block_table_, token_table_, kv_indptr_, kv_indices_, cu_seqlens_q_,
      cu_seqlens_new_;
};

}  // namespace flashport_test
