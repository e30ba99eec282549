#include "tests/ops/decode/mixed_call.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/ops/decode/call.h"
#include "tests/reference/blocks.h"
#include "tests/reference/scaled_rows.h"
#include "tests/support/compare.h"

namespace flashport_test {
namespace {

using reference::Type;

constexpr std::int64_t kGroup = 8;  // values that share a factor

std::optional<flashport::TensorView> view_of(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return tensor->view();
}

// A random row as the cache stores it; gives what is read back.
std::vector<double> store_row(Random& random, Tensor& cache, const Shape& row, std::int64_t dim, double spread) {
  std::vector<float> values(static_cast<std::size_t>(dim));
  for (float& value : values) value = static_cast<float>(spread * random.normal());
  write_row(cache, row, values);
  std::vector<double> stored(values.size());
  const unsigned char* at = cache.address(row);
  for (std::int64_t d = 0; d < dim; ++d) {
    stored[static_cast<std::size_t>(d)] =
        reference::is_blocks(cache.type()) ? reference::read_block_value(cache.type(), at, d)
        : cache.type() == reference::Type::kI4
            ? reference::read_scaled_value(cache.type(), at, d)
            : reference::read_number(at + d * reference::type_bytes(cache.type()), cache.type());
  }
  return stored;
}

// Codes of e5m2 are large, and their factors often far below fp16's normal numbers.
double spread_of_codes(reference::Type type, Scales kind) {
  return type == reference::Type::kE5M2 && lie_beside(kind) ? 0x1p14 : 1.0;
}

// Sets the factors of a row, which may be those of others too, and multiplies its values by them. `size`: theirs.
void scale_row(Random& random, std::optional<Tensor>& scale, Scales kind, Shape row, std::int64_t head, double size,
               std::vector<double>& values) {
  if (kind == Scales::kNone) return;
  const auto factor = [&](const Shape& at) {
    if (std::isnan(scale->get(at))) scale->set(at, size * (0.5 + random.uniform()));
    return scale->get(at);
  };
  row.pop_back();
  for (std::size_t d = 0; d < values.size(); ++d) {
    const auto group = static_cast<std::int64_t>(d) / kGroup;
    Shape at = kind == Scales::kOne ? Shape{0} : kind == Scales::kHead ? Shape{head} : row;
    if (are_of_groups(kind)) at.push_back(group);
    values[d] *= factor(at);
  }
}

}  // namespace

MixedCall::MixedCall(const MixedSpec& spec, std::uint64_t seed) : spec_(spec) {
  Random random(seed);
  make_queries(random);
  for (const SegmentSpec& s : spec_.segments) make_segment(random, s);
  for (std::int64_t b = 0; b < batch(); ++b) fill_rows(random, b);
  make_options(random);
  for (auto& segment : segments_) {
    for (std::optional<Tensor>* tensor : {&segment->k, &segment->v, &segment->lens, &segment->block_table,
                                          &segment->token_table, &segment->k_scale, &segment->v_scale}) {
      if (*tensor) (*tensor)->upload();
    }
  }
  for (std::optional<Tensor>* tensor : {&q_, &cu_seqlens_q_, &slopes_, &sinks_, &mask_, &mask_slopes_}) {
    if (*tensor) (*tensor)->upload();
  }
}

void MixedCall::make_queries(Random& random) {
  requests_.resize(static_cast<std::size_t>(batch()));
  for (std::int64_t b = 0; b < batch(); ++b) q_starts_.push_back(q_starts_.back() + q_len_of(b));
  const std::int64_t total = q_starts_.back();
  const Shape shape = spec_.ragged       ? Shape{total, spec_.hq, spec_.dk}
                      : spec_.q_len == 1 ? Shape{batch(), spec_.hq, spec_.dk}
                                         : Shape{batch(), spec_.q_len, spec_.hq, spec_.dk};
  q_.emplace(spec_.q, shape);
  q_->for_each([&](const Shape& at) { q_->set(at, random.normal()); });
  const std::vector<double> values = q_->values();
  for (std::int64_t b = 0; b < batch(); ++b) {
    reference::Request& r = requests_[static_cast<std::size_t>(b)];
    r.q_len = q_len_of(b);
    r.num_q_heads = spec_.hq;
    r.num_kv_heads = spec_.hkv;
    r.dim_qk = spec_.dk;
    r.dim_v = spec_.dv;
    const std::int64_t row = spec_.hq * spec_.dk;
    r.q.assign(values.begin() + q_starts_[b] * row, values.begin() + q_starts_[b + 1] * row);
    r.k_scale.assign(static_cast<std::size_t>(spec_.hkv), 1.0);
    r.v_scale = r.k_scale;
    r.softmax_scale = 1 / std::sqrt(static_cast<double>(spec_.dk));
    r.softcap = spec_.softcap;
    r.window_left = spec_.window_left;
    r.window_right = spec_.window_right;
  }
  if (spec_.ragged) {
    cu_seqlens_q_.emplace(Type::kI32, Shape{batch() + 1});
    for (std::int64_t b = 0; b <= batch(); ++b) cu_seqlens_q_->set({b}, static_cast<double>(q_starts_[b]));
  }
  Shape out_shape = shape, lse_shape(shape.begin(), shape.end() - 1);
  out_shape.back() = spec_.dv;
  out_.emplace(spec_.out_fp32 ? Type::kF32 : spec_.q, out_shape);
  lse_.emplace(Type::kF32, lse_shape);
}

void MixedCall::make_segment(Random& random, const SegmentSpec& s) {
  segments_.push_back(std::make_unique<Segment>());
  Segment& segment = *segments_.back();
  const std::int64_t longest = std::max<std::int64_t>(*std::max_element(s.lens.begin(), s.lens.end()), 1);
  const bool pool = s.pages == Pages::kTokens, paged = s.pages == Pages::kBlocks;
  const std::int64_t tokens = pool ? 1 : paged ? s.page_size : longest + 2;
  const std::int64_t of_sequence = (longest + tokens - 1) / tokens;
  const std::int64_t pages = pool || paged ? batch() * of_sequence + 2 : batch();
  CacheShape shape{pages, tokens, spec_.hkv, row_extent(s.k, spec_.dk), s.pages == Pages::kHeadsFirst, pool};
  segment.k.emplace(make_cache(s.k, shape));
  shape.extent = row_extent(s.v, spec_.dv);
  segment.v.emplace(make_cache(s.v, shape));
  segment.lens.emplace(Type::kI32, Shape{batch()});
  for (std::int64_t b = 0; b < batch(); ++b) segment.lens->set({b}, static_cast<double>(s.lens[b]));
  if (pool || paged) {
    const std::vector<std::int64_t> order = random.permutation(pages);
    std::optional<Tensor>& table = pool ? segment.token_table : segment.block_table;
    table.emplace(Type::kI32, Shape{batch(), std::max(of_sequence, s.room / tokens) + 1});
    for (std::int64_t b = 0; b < batch(); ++b) {
      for (std::int64_t p = 0; p < (s.lens[b] + tokens - 1) / tokens; ++p) {
        table->set({b, p}, static_cast<double>(order[b * of_sequence + p]));
      }
    }
  }
  const auto scale_shape = [&](const Tensor& cache, std::int64_t dim) {
    if (s.scales == Scales::kOne) return Shape{1};
    if (s.scales == Scales::kHead) return Shape{spec_.hkv};
    Shape axes(cache.shape().begin(), cache.shape().end() - 1);
    if (are_of_groups(s.scales)) axes.push_back(dim / kGroup);
    return axes;
  };
  if (s.scales != Scales::kNone) {
    const bool half = s.scales == Scales::kHalfGroup;
    segment.k_scale.emplace(half || s.scales == Scales::kTurnedRow ? Type::kF16 : Type::kF32,
                            scale_shape(*segment.k, spec_.dk));
    segment.v_scale.emplace(half || s.scales == Scales::kRow ? Type::kF16 : Type::kF32,
                            scale_shape(*segment.v, spec_.dv));
  }
}

void MixedCall::fill_rows(Random& random, std::int64_t b) {
  reference::Request& r = requests_[static_cast<std::size_t>(b)];
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    Segment& segment = *segments_[i];
    const SegmentSpec& s = spec_.segments[i];
    r.kv_len += s.lens[b];
    for (std::int64_t t = 0; t < s.lens[b]; ++t) {
      const double spread = random.below(10) == 0 ? 2.5 : 1.0;
      for (std::int64_t h = 0; h < spec_.hkv; ++h) {
        Shape row;
        switch (s.pages) {
          case Pages::kRows: row = {b, t, h, 0}; break;
          case Pages::kHeadsFirst: row = {b, h, t, 0}; break;
          case Pages::kTokens: row = {static_cast<std::int64_t>(segment.token_table->get({b, t})), h, 0}; break;
          case Pages::kBlocks:
            row = {static_cast<std::int64_t>(segment.block_table->get({b, t / s.page_size})), t % s.page_size, h, 0};
            break;
        }
        const double of_k = spread_of_codes(s.k, s.scales), of_v = spread_of_codes(s.v, s.scales);
        std::vector<double> k = store_row(random, *segment.k, row, spec_.dk, spread * of_k);
        std::vector<double> v = store_row(random, *segment.v, row, spec_.dv, of_v);
        scale_row(random, segment.k_scale, s.scales, row, h, 1 / of_k, k);
        scale_row(random, segment.v_scale, s.scales, row, h, (of_v == 1.0 ? 1.0 : 0x1p-5) / of_v, v);
        r.k.insert(r.k.end(), k.begin(), k.end());
        r.v.insert(r.v.end(), v.begin(), v.end());
      }
    }
  }
}

void MixedCall::make_options(Random& random) {
  const auto per_head = [&](std::optional<Tensor>& tensor, double scale) {
    tensor.emplace(Type::kF32, Shape{spec_.hq});
    tensor->for_each([&](const Shape& at) { tensor->set(at, scale * random.normal()); });
    return tensor->values();
  };
  std::vector<double> slopes, sinks, factors(static_cast<std::size_t>(spec_.hq), 1.0);
  if (spec_.alibi) slopes = per_head(slopes_, 0.1);
  if (spec_.sinks) sinks = per_head(sinks_, 1.0);
  if (spec_.mask_slopes) factors = per_head(mask_slopes_, 1.0);
  std::int64_t longest = 0;
  for (reference::Request& r : requests_) {
    r.slopes = slopes;
    r.sinks = sinks;
    longest = std::max(longest, r.kv_len);
  }
  if (!spec_.mask) return;
  // More rows and keys than there are, which are NaN; some rows of -inf alone.
  const std::int64_t batches = spec_.mask_broadcasts ? 1 : batch(), heads = spec_.mask_broadcasts ? 1 : spec_.hq;
  mask_.emplace(*spec_.mask, Shape{batches, heads, spec_.q_len + 3, longest + 5});
  for (std::int64_t b = 0; b < batch(); ++b) {
    reference::Request& r = requests_[static_cast<std::size_t>(b)];
    for (std::int64_t i = 0; i < r.q_len; ++i) {
      for (std::int64_t h = 0; h < spec_.hq; ++h) {
        for (std::int64_t j = 0; j < r.kv_len; ++j) {
          const Shape at{b % batches, h % heads, i, j};
          if (std::isnan(mask_->get(at))) {
            const bool hides = (h == 1 && b % 3 == 0 && !spec_.mask_broadcasts) || random.below(4) == 0;
            mask_->set(at, hides ? -std::numeric_limits<double>::infinity() : random.normal());
          }
          const double value = mask_->get(at);
          r.mask.push_back(std::isinf(value) ? value : value * factors[static_cast<std::size_t>(h)]);
        }
      }
    }
  }
}

flashport::MixedDecodeArgs MixedCall::args() const {
  flashport::MixedDecodeArgs a;
  a.q = q_->view();
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = *segments_[i];
    flashport::DecodeSegment& s = a.segments.emplace_back();
    s.k = segment.k->view();
    s.v = segment.v->view();
    s.seqlens = segment.lens->view();
    s.block_table = view_of(segment.block_table);
    s.token_table = view_of(segment.token_table);
    s.k_scale = view_of(segment.k_scale);
    s.v_scale = view_of(segment.v_scale);
    s.k_format = format_of(spec_.segments[i].k);
    s.v_format = format_of(spec_.segments[i].v);
    if (spec_.segments[i].pages == Pages::kHeadsFirst) s.kv_layout = flashport::KvLayout::kHND;
  }
  a.cu_seqlens_q = view_of(cu_seqlens_q_);
  if (cu_seqlens_q_) a.max_q_len = spec_.q_len;
  a.window_left = spec_.window_left;
  a.window_right = spec_.window_right;
  a.by_segment = spec_.by_segment;
  a.softcap = spec_.softcap;
  a.alibi_slopes = view_of(slopes_);
  a.sinks = view_of(sinks_);
  a.mask = view_of(mask_);
  a.mask_slopes = view_of(mask_slopes_);
  a.out = out_->view();
  a.lse = lse_->view();
  return a;
}

flashport::MixedDecodeArgs MixedCall::args_of(std::int64_t b) const {
  flashport::MixedDecodeArgs a = args();
  const auto keep = [b](flashport::TensorView& view) {
    view.data = static_cast<char*>(view.data) + b * view.strides[0] * flashport::element_size(view.dtype);
    view.shape[0] = 1;
  };
  keep(a.q);
  keep(a.out);
  keep(*a.lse);
  for (std::size_t i = 0; i < a.segments.size(); ++i) {
    flashport::DecodeSegment& s = a.segments[i];
    keep(s.seqlens);
    if (s.block_table) {
      keep(*s.block_table);
    } else if (s.token_table) {
      keep(*s.token_table);
    } else {
      keep(s.k);
      keep(s.v);
      for (std::optional<flashport::TensorView>* scale : {&s.k_scale, &s.v_scale}) {
        if (*scale && (*scale)->rank >= 3) keep(**scale);
      }
    }
  }
  if (a.mask && a.mask->shape[0] > 1) keep(*a.mask);
  return a;
}

flashport::DecodeQuery MixedCall::query() const {
  flashport::DecodeQuery query{query_target(), dtype_of(spec_.q)};
  query.head_dim_qk = spec_.dk;
  query.head_dim_v = spec_.dv;
  query.group_size = spec_.hq / spec_.hkv;
  query.q_len = spec_.q_len;
  for (const SegmentSpec& s : spec_.segments) {
    query.segment_formats.push_back(format_of(s.k));
    query.segment_formats.push_back(format_of(s.v));
  }
  return query;
}

std::set<std::string> MixedCall::kernels() const {
  const auto is_of_one = [](const SegmentSpec& s) { return !lie_beside(s.scales); };
  std::set<std::pair<Type, Type>> pairs;
  for (const SegmentSpec& s : spec_.segments) pairs.emplace(s.k, s.v);
  const bool apart = spec_.by_segment && spec_.segments.size() > 1 && pairs.size() > 1 && spec_.q_len == 1 &&
                     !spec_.ragged && spec_.window_left < 0 && !spec_.alibi && !spec_.mask &&
                     std::ranges::all_of(spec_.segments, is_of_one);
  std::set<std::string> keys;
  for (std::size_t i = 0; apart && i < spec_.segments.size(); ++i) {
    flashport::DecodeQuery one = query();
    one.segment_formats.clear();
    one.k_format = format_of(spec_.segments[i].k);
    one.v_format = format_of(spec_.segments[i].v);
    const std::string key = flashport::supports(one).supported ? flashport::which_kernel(one) : "";
    if (key.empty() || key.find("/kv=any/") != std::string::npos) break;
    keys.insert(key);
    if (i + 1 == spec_.segments.size()) return keys;
  }
  return {flashport::which_kernel(query())};
}

std::string MixedCall::check() {
  if (std::string damage = out_->damage(); !damage.empty()) return "out: " + damage;
  if (std::string damage = lse_->damage(); !damage.empty()) return "lse: " + damage;
  // Where each segment has a kernel of its own, the result has the error of the least precise, whose bound is the
  // largest.
  std::string failure;
  for (const std::string& key : kernels()) {
    failure = compare_with(math_of_key(key));
    if (failure.empty()) break;
  }
  return failure;
}

std::string MixedCall::compare_with(Type math) {
  const std::vector<double> ours = out_->values(), ours_lse = lse_->values();
  // Errors of all sequences together: that of a few keys is that of a few roundings, which chance makes large or small.
  std::vector<double> exact_out, plain_out, exact_lse, plain_lse;
  for (std::size_t b = 0; b < requests_.size(); ++b) {
    const reference::RequestResult exact = reference::attend(requests_[b]);
    const reference::RequestResult plain = reference::attend_plain(requests_[b], math, out_->type());
    exact_out.insert(exact_out.end(), exact.out.begin(), exact.out.end());
    plain_out.insert(plain_out.end(), plain.out.begin(), plain.out.end());
    exact_lse.insert(exact_lse.end(), exact.lse.begin(), exact.lse.end());
    plain_lse.insert(plain_lse.end(), plain.lse.begin(), plain.lse.end());
  }
  Comparison compared =
      compare(ours, exact_out, plain_out, fp32_floor(exact_out), output_rounding(exact_out, out_->type()));
  if (!compared.failure.empty()) return "out: " + compared.failure;
  compared = compare(ours_lse, exact_lse, plain_lse, lse_floor(exact_lse));
  return compared.failure.empty() ? "" : "lse: " + compared.failure;
}

std::vector<unsigned char> MixedCall::bits(std::int64_t b) {
  const std::vector<unsigned char> out = out_->element_bytes(), lse = lse_->element_bytes();
  const auto rows = static_cast<std::size_t>(q_starts_.back());
  const std::size_t out_row = out.size() / rows, lse_row = lse.size() / rows;
  const auto part = [&](const std::vector<unsigned char>& bytes, std::size_t row) {
    return std::vector<unsigned char>(bytes.begin() + static_cast<std::ptrdiff_t>(q_starts_[b] * row),
                                      bytes.begin() + static_cast<std::ptrdiff_t>(q_starts_[b + 1] * row));
  };
  std::vector<unsigned char> all = part(out, out_row);
  const std::vector<unsigned char> more = part(lse, lse_row);
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

flashport::DecodeArgs as_flash_decode(const flashport::MixedDecodeArgs& from) {
  const flashport::DecodeSegment& only = from.segments[0];
  flashport::DecodeArgs args;
  args.q = from.q;
  args.k_cache = only.k;
  args.v_cache = only.v;
  args.seqlens = only.seqlens;
  args.block_table = only.block_table;
  args.token_table = only.token_table;
  args.kv_layout = only.kv_layout;
  args.k_scale = only.k_scale;
  args.v_scale = only.v_scale;
  args.k_format = only.k_format;
  args.v_format = only.v_format;
  args.out = from.out;
  args.lse = from.lse;
  return args;
}

flashport::DecodeQuery as_flash_decode(flashport::DecodeQuery query, const SegmentSpec& only) {
  query.k_format = format_of(only.k);
  query.v_format = format_of(only.v);
  query.segment_formats.clear();
  query.scales_beside = lie_beside(only.scales);
  if (only.scales == Scales::kHalfGroup) query.scale_group = 8;
  if (only.scales == Scales::kRow || only.scales == Scales::kTurnedRow) query.scale_group = query.head_dim_qk;
  return query;
}

}  // namespace flashport_test
