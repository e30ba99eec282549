#include "tests/ops/decode/request_pool.h"

#include <algorithm>

#include "tests/ops/decode/call.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

std::int64_t page_count(std::int64_t len, std::int64_t page) { return (len + page - 1) / page; }

CacheShape cache_shape(const PoolShape& s, const std::vector<std::int64_t>& lens, reference::Type type,
                       std::int64_t dim) {
  std::int64_t pages = 2;
  for (std::int64_t len : lens) pages += page_count(len, s.page);
  return {pages, s.page, s.hkv, row_extent(type, dim)};
}

}  // namespace

flashport::DecodeQuery PoolShape::query(std::int64_t with_q_len) const {
  return {query_target(), dtype_of(q), format_of(kv), format_of(v), dk, dv, hq / hkv, with_q_len};
}

RequestPool::RequestPool(const PoolShape& shape, std::vector<std::int64_t> lens, std::uint64_t seed)
    : shape_(shape),
      lens_(std::move(lens)),
      max_pages_(1 + page_count(std::max(shape.room, *std::max_element(lens_.begin(), lens_.end())), shape.page)),
      q_(shape.q, {static_cast<std::int64_t>(lens_.size()), shape.q_len, shape.hq, shape.dk}),
      k_(make_cache(shape.kv, cache_shape(shape, lens_, shape.kv, shape.dk))),
      v_(make_cache(shape.v, cache_shape(shape, lens_, shape.v, shape.dv))) {
  Random random(seed);
  q_.for_each([&](const Shape& index) { q_.set(index, random.normal()); });
  const std::vector<std::int64_t> order = random.permutation(k_.shape()[0]);
  std::size_t next = 0;
  std::vector<float> row;
  for (std::int64_t len : lens_) {
    pages_.emplace_back();
    for (std::int64_t first = 0; first < len; first += shape.page) {
      const std::int64_t page = order[next++];
      pages_.back().push_back(page);
      for (std::int64_t t = first; t < std::min(first + shape.page, len); ++t) {
        for (std::int64_t h = 0; h < shape.hkv; ++h) {
          for (Tensor* cache : {&k_, &v_}) {
            row.resize(cache == &k_ ? shape.dk : shape.dv);
            for (float& value : row) value = static_cast<float>(random.normal());
            write_row(*cache, {page, t - first, h, 0}, row);
          }
        }
      }
    }
  }
  k_.upload();
  v_.upload();
}

RequestPool::Call::Call(const RequestPool& pool, const std::vector<std::int64_t>& ids, bool ragged)
    : q_len_(pool.shape_.q_len),
      out_row_(pool.shape_.hq * pool.shape_.dv * reference::type_bytes(pool.shape_.q)),
      lse_row_(pool.shape_.lse ? pool.shape_.hq * 4 : 0),
      q_(pool.shape_.q, {static_cast<std::int64_t>(ids.size()), q_len_, pool.shape_.hq, pool.shape_.dk}),
      seqlens_(reference::Type::kI32, {static_cast<std::int64_t>(ids.size())}),
      table_(reference::Type::kI32, {static_cast<std::int64_t>(ids.size()), pool.max_pages_}),
      out_(pool.shape_.q, {static_cast<std::int64_t>(ids.size()), q_len_, pool.shape_.hq, pool.shape_.dv}),
      lse_(reference::Type::kF32, {static_cast<std::int64_t>(ids.size()), q_len_, pool.shape_.hq}) {
  const PoolShape& s = pool.shape_;
  const auto batch = static_cast<std::int64_t>(ids.size());
  const std::int64_t q_bytes = q_len_ * s.hq * s.dk * reference::type_bytes(s.q);
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto& source = static_cast<const unsigned char*>(pool.q_.array().data) + ids[b] * q_bytes;
    std::copy(source, source + q_bytes, q_.address({b, 0, 0, 0}));
    seqlens_.set({b}, static_cast<double>(pool.lens_[ids[b]]));
    for (std::size_t p = 0; p < pool.pages_[ids[b]].size(); ++p) {
      table_.set({b, static_cast<std::int64_t>(p)}, static_cast<double>(pool.pages_[ids[b]][p]));
    }
  }
  if (ragged) {
    starts_.emplace(reference::Type::kI32, Shape{batch + 1});
    for (std::int64_t b = 0; b <= batch; ++b) starts_->set({b}, static_cast<double>(b * q_len_));
    q_.restride({batch * q_len_, s.hq, s.dk}, {s.hq * s.dk, s.dk, 1}, 0);
    out_.restride({batch * q_len_, s.hq, s.dv}, {s.hq * s.dv, s.dv, 1}, 0);
    lse_.restride({batch * q_len_, s.hq}, {s.hq, 1}, 0);
    starts_->upload();
    args_.cu_seqlens_q = starts_->view();
    args_.max_q_len = q_len_;
  }
  for (Tensor* tensor : {&q_, &seqlens_, &table_}) tensor->upload();
  args_.q = q_.view();
  args_.k_cache = pool.k_.view();
  args_.v_cache = pool.v_.view();
  args_.k_format = format_of(s.kv);
  args_.v_format = format_of(s.v);
  args_.seqlens = seqlens_.view();
  args_.block_table = table_.view();
  args_.out = out_.view();
  if (s.lse) args_.lse = lse_.view();
}

void RequestPool::Call::set_lengths(const std::vector<std::int64_t>& lens) {
  for (std::size_t b = 0; b < lens.size(); ++b) {
    seqlens_.set({static_cast<std::int64_t>(b)}, static_cast<double>(lens[b]));
  }
  seqlens_.upload();
}

void RequestPool::Call::poison_outputs() {
  out_.poison();
  lse_.poison();
}

RequestPool::Bits RequestPool::Call::fetch() {
  out_.download();
  lse_.download();
  const std::vector<unsigned char> out = out_.element_bytes(), lse = lse_.element_bytes();
  Bits bits;
  for (std::int64_t b = 0; b < seqlens_.shape()[0]; ++b) {
    bits.emplace_back(out.begin() + b * q_len_ * out_row_, out.begin() + (b + 1) * q_len_ * out_row_);
    bits.back().insert(bits.back().end(), lse.begin() + b * q_len_ * lse_row_,
                       lse.begin() + (b + 1) * q_len_ * lse_row_);
  }
  return bits;
}

RequestPool::Bits RequestPool::run(const std::vector<std::int64_t>& ids, bool ragged) const {
  Call call(*this, ids, ragged);
  call.poison_outputs();
  flashport::flash_decode(call.args());
  return call.fetch();
}

std::vector<unsigned char> RequestPool::run_token(std::int64_t id, std::int64_t token) const {
  Call call(*this, {id}, false);
  call.poison_outputs();
  call.set_lengths({lens_[id] - shape_.q_len + 1 + token});
  flashport::DecodeArgs args = call.args();
  const auto one = [&](flashport::TensorView& view) {
    view.shape[1] = 1;
    view.data = static_cast<char*>(view.data) + token * view.strides[1] * flashport::element_size(view.dtype);
  };
  one(args.q);
  one(args.out);
  if (args.lse) one(*args.lse);
  flashport::flash_decode(args);
  const std::vector<unsigned char> all = call.fetch()[0];
  const std::int64_t out_row = shape_.hq * shape_.dv * reference::type_bytes(shape_.q);
  const std::int64_t lse_row = shape_.lse ? shape_.hq * 4 : 0;
  const auto lse = all.begin() + shape_.q_len * out_row + token * lse_row;
  std::vector<unsigned char> bits(all.begin() + token * out_row, all.begin() + (token + 1) * out_row);
  bits.insert(bits.end(), lse, lse + lse_row);
  return bits;
}

}  // namespace flashport_test
