#include "tests/ops/decode/call.h"
#include "tests/reference/blocks.h"
#include "tests/reference/scaled_rows.h"

#include <flashport/backend.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "tests/support/compare.h"
#include "tests/support/device.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

using reference::Type;

constexpr int kSparePages = 3;  // of every pool: in no table, all NaN

// The same on every platform, unlike std::hash.
std::uint64_t hash(const std::string& text) {
  std::uint64_t value = 14695981039346656037u;
  for (unsigned char byte : text) value = (value ^ byte) * 1099511628211u;
  return value;
}

std::vector<float> random_row(Random& random, std::int64_t dim, double spread) {
  std::vector<float> values(dim);
  for (float& value : values) value = static_cast<float>(spread * random.normal());
  return values;
}

template <typename Values>
Tensor filled(Type type, const Values& values) {
  Tensor tensor(type, {static_cast<std::int64_t>(values.size())});
  for (std::size_t i = 0; i < values.size(); ++i) {
    tensor.set({static_cast<std::int64_t>(i)}, static_cast<double>(values[i]));
  }
  return tensor;
}

std::optional<flashport::TensorView> view_of(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return tensor->view();
}
std::optional<reference::Array> array_of(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return tensor->array();
}

}  // namespace

std::int64_t row_extent(Type type, std::int64_t dim) { return reference::stored_extent(type, dim); }

Tensor make_cache(Type type, const CacheShape& s) {
  const bool broadcast = s.strides == "kv_broadcast";
  // Odd rows begin at addresses that only 2-byte loads are aligned to.
  const std::int64_t pad = s.strides == "kv_odd" ? std::max(1, 2 / reference::type_bytes(type)) : 0;
  const std::int64_t row = s.extent + pad;
  const std::int64_t heads = broadcast ? 1 : s.heads;
  const std::int64_t slices = s.strides == "kv_sliced" ? 2 : 1;
  std::int64_t token_stride = s.heads_first ? row : heads * row * slices;
  std::int64_t head_stride = broadcast ? 0 : s.heads_first ? s.tokens * row * slices : row;
  const std::int64_t page_stride = s.tokens * heads * row * slices;
  const std::int64_t offset = pad + (slices - 1) * heads * row;
  if (s.pool) return Tensor(type, {s.pages, s.heads, s.extent}, {heads * row * slices, head_stride, 1}, offset);
  if (s.heads_first) {
    return Tensor(type, {s.pages, s.heads, s.tokens, s.extent}, {page_stride, head_stride, token_stride, 1}, offset);
  }
  return Tensor(type, {s.pages, s.tokens, s.heads, s.extent}, {page_stride, token_stride, head_stride, 1}, offset);
}

void write_row(Tensor& cache, const Shape& row, const std::vector<float>& values) {
  unsigned char* at = cache.address(row);
  if (reference::is_blocks(cache.type())) {
    reference::write_blocks(cache.type(), at, values.data(), static_cast<std::int64_t>(values.size()));
    return;
  }
  if (cache.type() == reference::Type::kI4) {
    for (std::size_t d = 0; d < values.size(); ++d) {
      reference::write_scaled_value(cache.type(), at, static_cast<std::int64_t>(d), values[d]);
    }
    return;
  }
  const int bytes = reference::type_bytes(cache.type());
  for (std::size_t d = 0; d < values.size(); ++d) reference::write_number(at + d * bytes, cache.type(), values[d]);
}

DecodeCall::DecodeCall(const DecodeCase& c, std::uint64_t seed) : case_(c) {
  Random random(hash(c.name) + seed);
  random_ = &random;
  if (hash(c.name) % 2 == 0) scale_ = 0.8 / std::sqrt(static_cast<double>(c.dk));
  make_queries();
  make_caches();
  make_options();
  make_outputs();
  random_ = nullptr;
}

void DecodeCall::make_queries() {
  const auto batch = static_cast<std::int64_t>(case_.lens.size());
  const bool ragged = case_.q_form == "ragged";
  std::int64_t total = 0;
  std::vector<std::int64_t> starts{0};
  for (std::int64_t b = 0; b < batch; ++b) {
    std::int64_t q_len = case_.q_len;
    if (ragged && b != 1) q_len = 1 + random_->below(case_.q_len);
    if (ragged && batch >= 4 && b == batch - 1) q_len = 0;
    q_lens_.push_back(q_len);
    starts.push_back(total += q_len);
  }
  if (ragged) cu_seqlens_q_ = filled(Type::kI32, starts);
  Shape shape = ragged                    ? Shape{total, case_.hq, case_.dk}
                : case_.q_form == "token" ? Shape{batch, case_.hq, case_.dk}
                                          : Shape{batch, case_.q_len, case_.hq, case_.dk};
  Shape strides = dense_strides(shape);
  if (case_.strides == "q_padded" || case_.strides == "q_inner") {
    const std::int64_t inner = case_.strides == "q_inner" ? 2 : 1;
    Shape padded = shape;
    for (std::int64_t& extent : padded) extent += inner == 1 ? 8 : 1;
    strides = dense_strides(padded);
    for (std::int64_t& stride : strides) stride *= inner;
  }
  q_.emplace(case_.q, shape, strides);
  q_->for_each([&](const Shape& index) { q_->set(index, random_->normal()); });
}

// One token of every kv head. Every tenth key is larger, so that running maxima move late.
void DecodeCall::fill_token(std::int64_t page, std::int64_t offset) {
  const double spread = random_->below(10) == 0 ? 2.5 : 1.0;
  const bool heads_first = case_.layout.ends_with("hnd");
  for (std::int64_t h = 0; h < case_.hkv; ++h) {
    const Shape row = case_.layout == "token" ? Shape{page, h, 0}
                      : heads_first           ? Shape{page, h, offset, 0}
                                              : Shape{page, offset, h, 0};
    write_row(*k_, row, random_row(*random_, case_.dk, spread));
    write_row(*v_, row, random_row(*random_, case_.dv, 1.0));
  }
}

void DecodeCall::make_caches() {
  const auto batch = static_cast<std::int64_t>(case_.lens.size());
  const std::int64_t longest = std::max<std::int64_t>(1, *std::max_element(case_.lens.begin(), case_.lens.end()));
  const bool pool = case_.layout == "token", paged = case_.page > 0;
  const std::int64_t tokens = pool ? 1 : paged ? case_.page : longest + 3;
  const auto pages_of = [&](std::int64_t b) { return (case_.lens[b] + tokens - 1) / tokens; };
  std::int64_t pages = batch;
  if (pool || paged) {
    pages = kSparePages;
    for (std::int64_t b = 0; b < batch; ++b) pages += pages_of(b);
  }
  CacheShape shape{pages, tokens,       case_.hkv, row_extent(case_.k_format, case_.dk), case_.layout.ends_with("hnd"),
                   pool,  case_.strides};
  k_.emplace(make_cache(case_.k_format, shape));
  shape.extent = row_extent(case_.v_format, case_.dv);
  v_.emplace(make_cache(case_.v_format, shape));

  const Type index = case_.index64 ? Type::kI64 : Type::kI32;
  const bool csr = case_.layout.starts_with("csr");
  // CSR goes without seqlens in one half of its cases.
  if (!csr || case_.index64) seqlens_ = filled(index, case_.lens);

  const std::vector<std::int64_t> order = random_->permutation(pages);
  std::int64_t next = 0;
  std::vector<std::int64_t> rows(batch), indptr{0}, last;
  if (pool) {
    rows = random_->permutation(batch + 2);
    rows.resize(batch);
    request_index_ = filled(index, rows);
    token_table_.emplace(Type::kI32, Shape{batch + 2, std::max(longest, case_.room) + 2});
  } else if (case_.layout.starts_with("block")) {
    block_table_.emplace(Type::kI32, Shape{batch, (std::max(longest, case_.room) + tokens - 1) / tokens + 2});
  } else if (csr) {
    kv_indices_.emplace(Type::kI32, Shape{pages});
  }
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t p = 0; p < (pool || paged ? pages_of(b) : 1); ++p) {
      const std::int64_t page = pool || paged ? order[next++] : b;
      if (pool) token_table_->set({rows[b], p}, static_cast<double>(page));
      if (block_table_) block_table_->set({b, p}, static_cast<double>(page));
      if (csr) kv_indices_->set({next - 1}, static_cast<double>(page));
      const std::int64_t first = p * tokens;
      for (std::int64_t t = first; t < std::min(first + tokens, case_.lens[b]); ++t) fill_token(page, t - first);
    }
    indptr.push_back(next);
    last.push_back(case_.lens[b] == 0 ? 0 : (case_.lens[b] - 1) % tokens + 1);
  }
  if (csr) {
    kv_indptr_ = filled(Type::kI32, indptr);
    kv_last_page_len_ = filled(Type::kI32, last);
  }
}

void DecodeCall::make_options() {
  const auto batch = static_cast<std::int64_t>(case_.lens.size());
  if (case_.alibi != "none") {
    alibi_.emplace(Type::kF32, case_.alibi == "heads" ? Shape{case_.hq} : Shape{batch, case_.hq});
    alibi_->for_each([&](const Shape& index) { alibi_->set(index, 0.3 * random_->uniform()); });
  }
  if (case_.sinks) {
    sinks_.emplace(Type::kF32, Shape{case_.hq});
    sinks_->for_each([&](const Shape& index) { sinks_->set(index, random_->normal()); });
  }
  if (case_.tree) {
    // Any bits: also those of later tokens and those past q_len, which no key belongs to.
    const bool ragged = case_.q_form == "ragged";
    tree_.emplace(Type::kU32, ragged ? Shape{q_->shape()[0]} : Shape{batch, case_.q_len});
    tree_->for_each([&](const Shape& index) { tree_->set(index, static_cast<double>(random_->below(1ll << 32))); });
  }
  if (case_.scales != "none") {
    const std::int64_t count = case_.scales == "head" ? case_.hkv : 1;
    for (std::optional<Tensor>* scale : {&k_scale_, &v_scale_}) {
      scale->emplace(Type::kF32, Shape{count});
      (*scale)->for_each([&](const Shape& index) { (*scale)->set(index, 0.5 + random_->uniform()); });
    }
  }
}

void DecodeCall::make_outputs() {
  Shape shape = q_->shape();
  shape.back() = case_.dv;
  Shape strides = dense_strides(shape);
  Shape lse_shape(shape.begin(), shape.end() - 1);
  Shape lse_strides = dense_strides(lse_shape);
  if (case_.strides == "out_padded") {
    Shape padded = shape;
    for (std::int64_t& extent : padded) extent += 1;
    strides = dense_strides(padded);
    for (std::int64_t& stride : strides) stride *= 2;
    for (std::int64_t& stride : lse_strides) stride *= 3;
  }
  out_.emplace(case_.out_fp32 ? Type::kF32 : case_.q, shape, strides);
  if (case_.lse) lse_.emplace(Type::kF32, lse_shape, lse_strides);
}

std::vector<Tensor*> DecodeCall::all_inputs() {
  std::vector<Tensor*> present;
  for (std::optional<Tensor>* tensor :
       {&q_, &k_, &v_, &seqlens_, &block_table_, &token_table_, &request_index_, &kv_indptr_, &kv_indices_,
        &kv_last_page_len_, &cu_seqlens_q_, &alibi_, &sinks_, &tree_, &k_scale_, &v_scale_}) {
    if (*tensor) present.push_back(&**tensor);
  }
  return present;
}

void DecodeCall::upload() {
  for (Tensor* tensor : all_inputs()) tensor->upload();
}

void DecodeCall::run() {
  out_->poison();
  if (lse_) lse_->poison();
  flashport::flash_decode(args());
  out_->download();
  if (lse_) lse_->download();
}

flashport::DecodeArgs DecodeCall::args() const {
  flashport::DecodeArgs a;
  a.q = q_->view();
  a.k_cache = k_->view();
  a.v_cache = v_->view();
  a.k_format = format_of(case_.k_format);
  a.v_format = format_of(case_.v_format);
  if (seqlens_) a.seqlens = seqlens_->view();
  a.block_table = view_of(block_table_);
  a.token_table = view_of(token_table_);
  a.request_index = view_of(request_index_);
  a.kv_indptr = view_of(kv_indptr_);
  a.kv_indices = view_of(kv_indices_);
  a.kv_last_page_len = view_of(kv_last_page_len_);
  a.kv_layout = case_.layout.ends_with("hnd") ? flashport::KvLayout::kHND : flashport::KvLayout::kNHD;
  a.cu_seqlens_q = view_of(cu_seqlens_q_);
  if (cu_seqlens_q_) a.max_q_len = case_.q_len;
  a.softmax_scale = scale_;
  a.window_left = case_.window_left;
  a.window_right = case_.window_right;
  a.softcap = case_.softcap;
  a.alibi_slopes = view_of(alibi_);
  a.sinks = view_of(sinks_);
  a.tree_mask = view_of(tree_);
  a.k_scale = view_of(k_scale_);
  a.v_scale = view_of(v_scale_);
  a.num_splits = case_.splits;
  a.out = out_->view();
  a.lse = view_of(lse_);
  return a;
}

reference::DecodeInputs DecodeCall::inputs() const {
  reference::DecodeInputs in;
  in.q = q_->array();
  in.k_cache = k_->array();
  in.v_cache = v_->array();
  in.seqlens = array_of(seqlens_);
  in.block_table = array_of(block_table_);
  in.token_table = array_of(token_table_);
  in.request_index = array_of(request_index_);
  in.kv_indptr = array_of(kv_indptr_);
  in.kv_indices = array_of(kv_indices_);
  in.kv_last_page_len = array_of(kv_last_page_len_);
  in.heads_first = case_.layout.ends_with("hnd");
  in.cu_seqlens_q = array_of(cu_seqlens_q_);
  in.head_dim_qk = case_.dk;
  in.head_dim_v = case_.dv;
  in.softmax_scale = scale_ ? *scale_ : 1 / std::sqrt(static_cast<double>(case_.dk));
  in.window_left = case_.window_left;
  in.window_right = case_.window_right;
  in.softcap = case_.softcap;
  in.alibi_slopes = array_of(alibi_);
  in.sinks = array_of(sinks_);
  in.tree_mask = array_of(tree_);
  in.k_scale = array_of(k_scale_);
  in.v_scale = array_of(v_scale_);
  return in;
}

std::string DecodeCall::check(Type math) {
  if (std::string damage = out_->damage(); !damage.empty()) return "out: " + damage;
  if (lse_) {
    if (std::string damage = lse_->damage(); !damage.empty()) return "lse: " + damage;
  }
  const std::vector<reference::Request> requests = reference::gather(inputs());
  const std::vector<double> ours = out_->values();
  std::vector<double> ours_lse = lse_ ? lse_->values() : std::vector<double>{};
  std::vector<double> exact_all, plain_all, exact_lse, plain_lse;
  std::size_t at = 0;
  for (std::size_t b = 0; b < requests.size(); ++b) {
    const reference::RequestResult exact = reference::attend(requests[b]);
    const std::vector<double> mine(ours.begin() + at, ours.begin() + at + exact.out.size());
    at += exact.out.size();
    // Request by request: a short one's larger errors must not hide a long one's. Where few rows have few keys that
    // count, chance may make the roundings of probabilities small, so the plain implementation may have these in any of
    // four units. A lone key's probability is 1, in no other unit.
    const bool is_small = requests[b].kv_len > 1 && requests[b].q_len * requests[b].num_q_heads <= 16;
    reference::RequestResult plain;
    Comparison compared;
    for (const double unit : {1.0, 0.84, 0.71, 0.59}) {
      plain = reference::attend_plain(requests[b], math, out_->type(), unit);
      compared = compare(mine, exact.out, plain.out, fp32_floor(exact.out), output_rounding(exact.out, out_->type()));
      if (compared.failure.empty() || !is_small) break;
    }
    if (!compared.failure.empty()) {
      return "out of request " + std::to_string(b) + " (length " + std::to_string(requests[b].kv_len) + ", q_len " +
             std::to_string(requests[b].q_len) + "): " + compared.failure;
    }
    exact_all.insert(exact_all.end(), exact.out.begin(), exact.out.end());
    plain_all.insert(plain_all.end(), plain.out.begin(), plain.out.end());
    exact_lse.insert(exact_lse.end(), exact.lse.begin(), exact.lse.end());
    plain_lse.insert(plain_lse.end(), plain.lse.begin(), plain.lse.end());
  }
  const Comparison whole = compare(ours, exact_all, plain_all, fp32_floor(exact_all));
  if (!whole.failure.empty()) return "out: " + whole.failure;
  if (!lse_) return {};
  const Comparison compared = compare(ours_lse, exact_lse, plain_lse, lse_floor(exact_lse));
  return compared.failure.empty() ? "" : "lse: " + compared.failure;
}

std::vector<std::vector<unsigned char>> DecodeCall::bits() {
  const std::vector<unsigned char> out = out_->element_bytes();
  const std::vector<unsigned char> lse = lse_ ? lse_->element_bytes() : std::vector<unsigned char>{};
  const std::int64_t out_row = case_.hq * case_.dv * reference::type_bytes(out_->type());
  const std::int64_t lse_row = lse_ ? case_.hq * 4 : 0;
  std::vector<std::vector<unsigned char>> requests;
  std::int64_t row = 0;
  for (std::int64_t q_len : q_lens_) {
    std::vector<unsigned char> bytes(out.begin() + row * out_row, out.begin() + (row + q_len) * out_row);
    bytes.insert(bytes.end(), lse.begin() + row * lse_row, lse.begin() + (row + q_len) * lse_row);
    requests.push_back(std::move(bytes));
    row += q_len;
  }
  return requests;
}

bool has_plain_kernels() {
  return std::ranges::any_of(flashport::kernel_keys(query_target()),
                             [](const std::string& key) { return key.starts_with("decode_plain/"); });
}

bool reads_scales_beside(const std::string& key) {
  return key.find("/kv=int") != std::string::npos || key.find("/kv=bytes") != std::string::npos;
}

Type math_of_key(const std::string& key) {
  const std::size_t first = key.find('/') + 1;
  return type_named(key.substr(first, key.find('/', first) - first));
}

}  // namespace flashport_test
