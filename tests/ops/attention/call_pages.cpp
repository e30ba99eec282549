// The scales and the pages of a call's keys and values.
#include <algorithm>

#include "tests/ops/attention/call.h"
#include "tests/ops/attention/call_support.h"
#include "tests/ops/decode/call.h"
#include "tests/reference/scaled_rows.h"
#include "tests/support/random.h"

namespace flashport_test {

using reference::Type;

// One for each sequence and kv head, and a broadcast axis.
void AttentionCall::make_scales() {
  const auto batch = static_cast<std::int64_t>(places_.size());
  Random random(seed_of(c_) + 9);
  for (std::optional<Tensor>* scale : {&q_scale_, &k_scale_, &v_scale_}) {
    if (scale == &q_scale_ && !c_.q_fp8) continue;
    if ((scale == &k_scale_ && k_row_scale_) || (scale == &v_scale_ && v_row_scale_)) continue;
    scale->emplace(Type::kF32, Shape{batch, c_.kv_heads});
    (*scale)->for_each([&](const Shape& at) { (*scale)->set(at, 0.5 + random.uniform()); });
  }
}

Beside AttentionCall::beside(const Tensor& tensor) const {
  return &tensor == &*k_ ? c_.k_beside : &tensor == &*v_ ? c_.v_beside : Beside::kNone;
}

void AttentionCall::write_scaled_row(Tensor& tensor, Tensor& scale, const Shape& row,
                                     const std::vector<float>& values) const {
  const auto dim = static_cast<std::int64_t>(values.size());
  const bool grouped = beside(tensor) == Beside::kGroup;
  Shape place = row;
  place.pop_back();
  if (grouped) place.push_back(0);
  if (reference::type_bytes(tensor.type()) > 1) {  // whose rows have no largest number
    scale.set(place, 0.75);
    return write_row(tensor, row, values);
  }
  const std::int64_t groups = grouped ? scale.shape().back() : 1, count = dim / groups;
  for (std::int64_t group = 0; group < groups; ++group) {
    if (grouped) place.back() = group;
    scale.set(place, reference::write_scaled_group(tensor.type(), scale.type(), tensor.address(row), group * count,
                                                   values.data() + group * count, count));
  }
}

// Copies the keys that sequences have, those before a left pad among them, to pages in random order. All other tokens
// of the cache are NaN, and so are spare entries of a table no page.
void AttentionCall::make_pages() {
  const auto batch = static_cast<std::int64_t>(places_.size());
  const bool pool = c_.pages == Pages::kTokenTable, heads_first = c_.pages == Pages::kBlockTableHnd;
  const std::int64_t page_size = pool ? 1 : c_.page_size;
  std::vector<std::int64_t> lengths, pages, indptr = {0};
  for (std::int64_t b = 0; b < batch; ++b) {
    const Place& place = places_[static_cast<std::size_t>(b)];
    lengths.push_back(place.pad + c_.kv_lens[static_cast<std::size_t>(b)]);
    pages.push_back((lengths.back() + page_size - 1) / page_size);
    indptr.push_back(indptr.back() + pages.back());
  }
  const std::int64_t all = indptr.back() + 2, most = *std::max_element(pages.begin(), pages.end()) + 1;
  Random random(seed_of(c_) + 7);
  const std::vector<std::int64_t> order = random.permutation(all);
  const auto cache = [&](const Tensor& from) {
    const std::int64_t dim = from.shape().back();
    if (pool) return Tensor(from.type(), {all, c_.kv_heads, dim}, dense_strides({all, c_.kv_heads, dim}));
    const Shape shape = heads_first ? Shape{all, c_.kv_heads, page_size, dim} : Shape{all, page_size, c_.kv_heads, dim};
    return Tensor(from.type(), shape, dense_strides(shape));
  };
  k_pages_.emplace(cache(*k_));
  v_pages_.emplace(cache(*v_));
  if (k_row_scale_) k_page_scale_ = scale_beside(k_pages_->shape(), c_.k_beside, c_.dim_qk);
  if (v_row_scale_) v_page_scale_ = scale_beside(v_pages_->shape(), c_.v_beside, c_.dim_v);
  const auto copy = [&](Tensor& from, Tensor& to, std::int64_t b, std::int64_t token, bool has_values) {
    const Place& place = places_[static_cast<std::size_t>(b)];
    const std::int64_t page = order[static_cast<std::size_t>(indptr[static_cast<std::size_t>(b)] + token / page_size)];
    const std::int64_t offset = token % page_size;
    for (std::int64_t head = 0; head < c_.kv_heads; ++head) {
      Shape to_row = pool ? Shape{page, head} : heads_first ? Shape{page, head, offset} : Shape{page, offset, head};
      Shape from_row = c_.packed ? Shape{place.k_first + token, head} : Shape{b, place.k_first + token, head};
      if (has_values) to_row.push_back(0), from_row.push_back(0);
      const std::int64_t count = has_values ? from.shape().back() : 1;
      std::copy_n(from.address(from_row), count * reference::type_bytes(from.type()), to.address(to_row));
    }
  };
  const auto table = [&](std::int64_t rows, std::int64_t extent) {
    Tensor tensor(Type::kI32, {rows, extent});
    tensor.for_each([&](const Shape& at) { tensor.set(at, 1 << 30); });
    return tensor;
  };
  const std::vector<std::int64_t> rows = random.permutation(batch);
  if (c_.pages == Pages::kCsr) {
    kv_indices_.emplace(int_tensor(order));
    kv_indptr_.emplace(int_tensor(indptr));
  } else if (pool) {
    token_table_.emplace(table(batch, most));
    request_index_.emplace(int_tensor(rows, Type::kI64));
  } else {
    block_table_.emplace(table(batch, most));
  }
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto at = static_cast<std::size_t>(b);
    for (std::int64_t page = 0; page < pages[at]; ++page) {
      const auto number = static_cast<double>(order[static_cast<std::size_t>(indptr[at] + page)]);
      if (token_table_) token_table_->set({rows[at], page}, number);
      if (block_table_) block_table_->set({b, page}, number);
    }
    for (std::int64_t token = places_[at].pad; token < lengths[at]; ++token) {
      copy(*k_, *k_pages_, b, token, true);
      copy(*v_, *v_pages_, b, token, true);
      if (k_row_scale_) copy(*k_row_scale_, *k_page_scale_, b, token, c_.k_beside == Beside::kGroup);
      if (v_row_scale_) copy(*v_row_scale_, *v_page_scale_, b, token, c_.v_beside == Beside::kGroup);
    }
  }
  kv_lengths_.emplace(int_tensor(lengths));
}

}  // namespace flashport_test
