// The scales and the pages of a call's keys and values.
#include <algorithm>

#include "tests/ops/attention/call.h"
#include "tests/ops/attention/call_support.h"
#include "tests/support/random.h"

namespace flashport_test {

using reference::Type;

// One for each sequence and kv head, and a broadcast axis.
void AttentionCall::make_scales() {
  const auto batch = static_cast<std::int64_t>(places_.size());
  Random random(seed_of(c_) + 9);
  for (std::optional<Tensor>* scale : {&q_scale_, &k_scale_, &v_scale_}) {
    if (scale == &q_scale_ && !c_.q_fp8) continue;
    scale->emplace(Type::kF32, Shape{batch, c_.kv_heads});
    (*scale)->for_each([&](const Shape& at) { (*scale)->set(at, 0.5 + random.uniform()); });
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
  const auto copy = [&](Tensor& from, Tensor& to, std::int64_t b, std::int64_t token) {
    const Place& place = places_[static_cast<std::size_t>(b)];
    const std::int64_t page = order[static_cast<std::size_t>(indptr[static_cast<std::size_t>(b)] + token / page_size)];
    const std::int64_t offset = token % page_size;
    for (std::int64_t head = 0; head < c_.kv_heads; ++head) {
      const Shape row = pool          ? Shape{page, head, 0}
                        : heads_first ? Shape{page, head, offset, 0}
                                      : Shape{page, offset, head, 0};
      const unsigned char* source = c_.packed ? from.address({place.k_first + token, head, 0})
                                              : from.address({b, place.k_first + token, head, 0});
      std::copy_n(source, from.shape().back() * reference::type_bytes(from.type()), to.address(row));
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
      copy(*k_, *k_pages_, b, token);
      copy(*v_, *v_pages_, b, token);
    }
  }
  kv_lengths_.emplace(int_tensor(lengths));
}

}  // namespace flashport_test
