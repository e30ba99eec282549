#include "tests/ops/attention/call.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/ops/attention/call_support.h"
#include "tests/ops/decode/call.h"
#include "tests/support/compare.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

using reference::Type;

constexpr std::int64_t kSpareRows = 3;  // of a packed tensor, in no sequence
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Row-major strides of a shape whose axes have room for more.
Shape strides_with_gaps(Shape shape, std::int64_t more, std::int64_t inner_more) {
  for (std::size_t axis = 0; axis < shape.size(); ++axis) shape[axis] += axis + 1 < shape.size() ? more : inner_more;
  return dense_strides(shape);
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const AttentionCase& c) {
  out << c.name << ": " << type_name(c.type) << " D " << c.dim_qk << "/" << c.dim_v << " heads " << c.q_heads << "/"
      << c.kv_heads << (c.packed ? " packed" : "") << " lengths";
  for (std::size_t i = 0; i < c.q_lens.size(); ++i) out << " " << c.q_lens[i] << "x" << c.kv_lens[i];
  if (c.pages != Pages::kNone) out << " pages " << static_cast<int>(c.pages) << " of " << c.page_size;
  if (c.kv_type) out << " keys " << type_name(*c.kv_type);
  if (c.v_type) out << " values " << type_name(*c.v_type);
  if (c.q_fp8) out << " queries fp8";
  if (c.scales) out << " scales";
  if (c.k_beside != Beside::kNone) out << " beside k " << static_cast<int>(c.k_beside);
  if (c.v_beside != Beside::kNone) out << " beside v " << static_cast<int>(c.v_beside);
  if (c.used_q) out << " seqused_q";
  if (c.used_k) out << " seqused_k";
  if (c.leftpad) out << " leftpad";
  if (c.causal) out << " causal";
  if (c.window_left >= 0 || c.window_right >= 0) out << " window " << c.window_left << "," << c.window_right;
  if (c.softcap > 0) out << " softcap " << c.softcap;
  if (c.slopes != Slopes::kNone) out << " alibi";
  if (c.sinks) out << " sinks";
  if (c.bias != Bias::kNone) out << " bias " << static_cast<int>(c.bias);
  if (c.dropout > 0) out << " dropout " << c.dropout;
  if (c.scale) out << " scale " << *c.scale;
  if (!c.lse) out << " no lse";
  if (c.splits >= 0) out << " splits " << c.splits;
  return out << " layout " << static_cast<int>(c.layout) << " seed " << c.seed;
}

flashport::AttentionQuery AttentionCase::query() const {
  return {.target = query_target(),
          .dtype = q_fp8 ? flashport::DType::kFp8E4M3 : dtype_of(type),
          .head_dim_qk = dim_qk,
          .head_dim_v = dim_v,
          .k_format = kv_type ? std::optional(format_of(key_type())) : std::nullopt,
          .v_format = kv_type || v_type ? std::optional(format_of(value_type())) : std::nullopt,
          .paged = pages != Pages::kNone,
          .causal = causal,
          .softcap = softcap > 0,
          .alibi = slopes != Slopes::kNone,
          .bias = bias != Bias::kNone,
          .dropout = dropout > 0,
          .scales_beside = k_beside != Beside::kNone || v_beside != Beside::kNone};
}

std::string AttentionCase::support_name() const {
  const std::string dims = std::to_string(dim_qk) + (dim_qk == dim_v ? "" : "x" + std::to_string(dim_v));
  return std::string("attention_") + type_name(type) + "_d" + dims + "_" + name;
}

AttentionCall::AttentionCall(const AttentionCase& c) : c_(c) {
  place();
  make_tensors();
  make_options();
  if (c_.scales) make_scales();
  if (c_.pages != Pages::kNone) make_pages();
  for (std::optional<Tensor>* tensor :
       {&q_,          &k_,          &v_,           &cu_seqlens_q_, &cu_seqlens_k_, &seqused_q_,     &seqused_k_,
        &leftpad_k_,  &slopes_,     &sinks_,       &bias_,         &rng_state_,    &q_scale_,       &k_scale_,
        &v_scale_,    &k_pages_,    &v_pages_,     &block_table_,  &token_table_,  &request_index_, &kv_indptr_,
        &kv_indices_, &kv_lengths_, &k_row_scale_, &v_row_scale_,  &k_page_scale_, &v_page_scale_}) {
    if (*tensor) (*tensor)->upload();
  }
}

void AttentionCall::place() {
  Random random(seed_of(c_));
  std::int64_t most_q = 0, most_k = 0;
  for (std::size_t b = 0; b < c_.q_lens.size(); ++b) {
    Place place;
    place.pad = c_.leftpad ? random.below(70) : 0;
    place.q_rows = c_.q_lens[b] + (c_.used_q ? random.below(4) : 0);
    place.k_rows = place.pad + c_.kv_lens[b] + (c_.used_k ? random.below(70) : 0);
    most_q = std::max(most_q, place.q_rows);
    most_k = std::max(most_k, place.k_rows);
    places_.push_back(place);
  }
  if (!c_.packed) {
    q_rows_ = most_q;
    k_rows_ = most_k;
    for (std::size_t b = 0; b < places_.size(); ++b) {
      if (!c_.used_k && c_.leftpad) places_[b].pad = most_k - c_.kv_lens[b];
      places_[b].q_rows = most_q;
      places_[b].k_rows = most_k;
    }
    return;
  }
  for (Place& place : places_) {
    place.q_first = q_rows_;
    place.k_first = k_rows_;
    q_rows_ += place.q_rows;
    k_rows_ += place.k_rows;
  }
  q_rows_ += kSpareRows;
  k_rows_ += kSpareRows;
}

Tensor AttentionCall::tensor(Type type, std::int64_t rows, std::int64_t heads, std::int64_t dim,
                             std::int64_t first_head, bool written) const {
  const auto batch = static_cast<std::int64_t>(places_.size());
  Shape shape = {batch, rows, heads, dim}, strides = dense_strides(shape);
  std::int64_t offset = 0;
  switch (c_.layout) {
    case Layout::kDense: break;
    case Layout::kProjection:
      if (written) break;
      strides = dense_strides({batch, rows, c_.q_heads + 2 * c_.kv_heads, dim});
      offset = first_head * dim;
      break;
    case Layout::kHeadsFirst: strides = {heads * rows * dim, dim, rows * dim, 1}; break;
    case Layout::kGaps:
      strides = strides_with_gaps(shape, 1, 8);
      offset = 16;
      break;
    case Layout::kOddQueries:
      if (written || first_head > 0) break;
      [[fallthrough]];
    case Layout::kOdd:
      strides = strides_with_gaps(shape, 1, 1);
      offset = 1;
      break;
  }
  if (c_.packed) {
    shape.erase(shape.begin());
    strides.erase(strides.begin());
  }
  return Tensor(type, shape, strides, offset);
}

// Fills tokens [first, first + count) of a sequence. Every tenth is larger, so that running maxima move late.
void AttentionCall::fill(Tensor& tensor, std::int64_t sequence, std::int64_t first, std::int64_t count, double spread) {
  Random random(seed_of(c_) +
                77 * static_cast<std::uint64_t>(&tensor == &*q_   ? 1
                                                : &tensor == &*k_ ? 2
                                                                  : 3) +
                1000 * static_cast<std::uint64_t>(1 + (c_.ids.empty() ? sequence : c_.ids[sequence])));
  const std::int64_t heads = tensor.shape()[tensor.shape().size() - 2];
  std::vector<float> row(static_cast<std::size_t>(&tensor == &*v_ ? c_.dim_v : c_.dim_qk));
  for (std::int64_t i = 0; i < count; ++i) {
    const double size = random.below(10) == 0 ? spread : 1;
    for (std::int64_t head = 0; head < heads; ++head) {
      for (float& x : row) x = static_cast<float>(size * random.normal());
      const Shape at = c_.packed ? Shape{first + i, head, 0} : Shape{sequence, first + i, head, 0};
      if (beside(tensor) == Beside::kNone) {
        write_row(tensor, at, row);
      } else {
        write_scaled_row(tensor, &tensor == &*k_ ? *k_row_scale_ : *v_row_scale_, at, row);
      }
    }
  }
}

void AttentionCall::make_tensors() {
  const Type k_type = c_.key_type(), v_type = c_.value_type();
  q_.emplace(tensor(c_.q_fp8 ? Type::kE4M3 : c_.type, q_rows_, c_.q_heads, c_.dim_qk, 0, false));
  k_.emplace(tensor(k_type, k_rows_, c_.kv_heads, row_extent(k_type, c_.dim_qk), c_.q_heads, false));
  v_.emplace(tensor(v_type, k_rows_, c_.kv_heads, row_extent(v_type, c_.dim_v), c_.q_heads + c_.kv_heads, false));
  out_.emplace(tensor(c_.type, q_rows_, c_.q_heads, c_.dim_v, 0, true));
  if (c_.lse) {
    Shape shape = {static_cast<std::int64_t>(places_.size()), c_.q_heads, q_rows_};
    if (c_.packed) shape.erase(shape.begin());
    Shape strides = dense_strides(shape);
    if (c_.layout == Layout::kOdd) {
      for (std::int64_t& stride : strides) stride *= 3;
    }
    lse_.emplace(Type::kF32, shape, strides);
  }
  for (auto [rows, scale, dim] : {std::tuple(&*k_, &k_row_scale_, c_.dim_qk), {&*v_, &v_row_scale_, c_.dim_v}}) {
    if (beside(*rows) != Beside::kNone) *scale = scale_beside(rows->shape(), beside(*rows), dim);
  }
  for (std::size_t b = 0; b < places_.size(); ++b) {
    const auto sequence = static_cast<std::int64_t>(b);
    const Place& place = places_[b];
    fill(*q_, sequence, place.q_first, c_.q_lens[b], 1.0);
    fill(*k_, sequence, place.k_first + place.pad, c_.kv_lens[b], 2.5);
    fill(*v_, sequence, place.k_first + place.pad, c_.kv_lens[b], 1.0);
  }
}

// By lengths, the causal mask and the window.
bool AttentionCall::sees(std::size_t sequence, std::int64_t row, std::int64_t key) const {
  const std::int64_t q_len = c_.q_lens[sequence], kv_len = c_.kv_lens[sequence];
  const std::int64_t distance = key - (row + kv_len - q_len);
  return row < q_len && key < kv_len && !(c_.causal && distance > 0) &&
         !(c_.window_left >= 0 && -distance > c_.window_left) && !(c_.window_right >= 0 && distance > c_.window_right);
}

// Entries that no sequence sees stay NaN. A row has the same numbers in any batch.
void AttentionCall::make_bias() {
  const auto batch = static_cast<std::int64_t>(places_.size());
  const bool of_keys = c_.bias == Bias::kOfKeys, all = of_keys || c_.bias == Bias::kOwnTypeOfAll;
  const bool own = all || c_.bias == Bias::kOwnType;
  const bool shared = all || c_.bias == Bias::kOfAllSequences;
  const std::int64_t heads = all || c_.bias == Bias::kOfAllHeads ? 1 : c_.q_heads;
  bias_.emplace(own ? c_.type : Type::kF32, Shape{shared ? 1 : batch, heads, of_keys ? 1 : q_rows_, k_rows_});
  for (std::int64_t b = 0; b < bias_->shape()[0]; ++b) {
    const auto sequence = static_cast<std::size_t>(b);
    const auto id = static_cast<std::uint64_t>(shared || c_.ids.empty() ? b : c_.ids[sequence]);
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::int64_t row = 0; row < bias_->shape()[2]; ++row) {
        Random random(seed_of(c_) + 1000 * (1 + id) + 100'000 * static_cast<std::uint64_t>(head * 100'000 + row));
        for (std::int64_t key = 0; key < k_rows_; ++key) {
          const double x = random.below(10) == 0 || row == 2 ? -kInfinity : random.normal();  // row 2 sees no key
          bool seen = of_keys;
          for (std::size_t i = 0; i < places_.size(); ++i) seen |= (shared || i == sequence) && sees(i, row, key);
          if (seen) bias_->set({b, head, row, key}, x);
        }
      }
    }
  }
}

void AttentionCall::make_options() {
  const auto batch = static_cast<std::int64_t>(places_.size());
  Random random(seed_of(c_) + 5);
  if (c_.packed) {
    std::vector<std::int64_t> q_offsets, k_offsets;
    for (const Place& place : places_) {
      q_offsets.push_back(place.q_first);
      k_offsets.push_back(place.k_first);
    }
    q_offsets.push_back(q_rows_ - kSpareRows);
    k_offsets.push_back(k_rows_ - kSpareRows);
    cu_seqlens_q_ = int_tensor(q_offsets);
    cu_seqlens_k_ = int_tensor(k_offsets);
  }
  if (c_.used_q) seqused_q_ = int_tensor(c_.q_lens);
  std::vector<std::int64_t> used, pads;
  for (std::size_t b = 0; b < places_.size(); ++b) {
    pads.push_back(places_[b].pad);
    used.push_back(places_[b].pad + c_.kv_lens[b]);
  }
  if (c_.used_k || c_.pages != Pages::kNone) seqused_k_ = int_tensor(used);  // on pages the oracle reads them
  if (c_.leftpad) leftpad_k_ = int_tensor(pads);
  if (c_.slopes != Slopes::kNone) {
    slopes_.emplace(Type::kF32, c_.slopes == Slopes::kOfHeads ? Shape{c_.q_heads} : Shape{batch, c_.q_heads});
    slopes_->for_each([&](const Shape& index) { slopes_->set(index, 0.3 * random.uniform()); });
  }
  if (c_.sinks) {
    sinks_.emplace(Type::kF32, Shape{c_.q_heads});
    sinks_->for_each([&](const Shape& index) { sinks_->set(index, random.normal()); });
  }
  if (c_.bias != Bias::kNone) make_bias();
  if (c_.dropout > 0) {
    rng_state_ =
        int_tensor({static_cast<std::int64_t>(seed_of(c_) % 1000000) - 500000, std::int64_t{5} << 31}, Type::kI64);
  }
}

flashport::AttentionArgs AttentionCall::args() const {
  flashport::AttentionArgs a;
  const auto give = [](std::optional<flashport::TensorView>& to, const std::optional<Tensor>& from) {
    if (from) to = from->view();
  };
  a.q = q_->view();
  a.k = k_->view();
  a.v = v_->view();
  a.out = out_->view();
  give(a.lse, lse_);
  give(a.cu_seqlens_q, cu_seqlens_q_);
  if (c_.pages == Pages::kNone) {
    give(a.cu_seqlens_k, cu_seqlens_k_);
    give(a.seqused_k, seqused_k_);
  } else {
    a.k = k_pages_->view();
    a.v = v_pages_->view();
    give(a.block_table, block_table_);
    give(a.token_table, token_table_);
    give(a.request_index, request_index_);
    give(a.kv_indptr, kv_indptr_);
    give(a.kv_indices, kv_indices_);
    give(a.seqused_k, kv_lengths_);
    if (c_.pages == Pages::kBlockTableHnd) a.kv_layout = flashport::KvLayout::kHND;
  }
  give(a.q_scale, q_scale_);
  for (const std::optional<Tensor>* scale : {&k_scale_, &k_row_scale_, &k_page_scale_}) give(a.k_scale, *scale);
  for (const std::optional<Tensor>* scale : {&v_scale_, &v_row_scale_, &v_page_scale_}) give(a.v_scale, *scale);
  const auto name = [&](std::optional<flashport::KvFormat>& to, Type type) {
    const bool is_own =
        type == c_.type || type == Type::kE4M3 || type == Type::kE4M3Fnuz || type == Type::kE5M2 || type == Type::kI8;
    if (!is_own) to = format_of(type);  // what needs a name
  };
  name(a.k_format, c_.key_type());
  name(a.v_format, c_.value_type());
  if (c_.packed) {
    a.max_seqlen_q = a.max_seqlen_k = 1;
    for (const Place& place : places_) {
      a.max_seqlen_q = std::max(a.max_seqlen_q, place.q_rows);
      a.max_seqlen_k = std::max(a.max_seqlen_k, place.k_rows);
    }
  }
  if (c_.pages != Pages::kNone) a.max_seqlen_k = 0;
  give(a.seqused_q, seqused_q_);
  give(a.leftpad_k, leftpad_k_);
  a.softmax_scale = c_.scale;
  a.causal = c_.causal;
  a.window_left = c_.window_left;
  a.window_right = c_.window_right;
  a.softcap = c_.softcap;
  give(a.alibi_slopes, slopes_);
  give(a.sinks, sinks_);
  give(a.bias, bias_);
  if (c_.bias == Bias::kOfKeys) {
    a.bias->shape[2] = q_rows_;
    a.bias->strides[2] = 0;
  }
  a.dropout_p = c_.dropout;
  a.num_splits = c_.splits;
  give(a.rng_state, rng_state_);
  return a;
}

reference::AttentionInputs AttentionCall::inputs() const {
  reference::AttentionInputs in;
  const auto give = [](std::optional<reference::Array>& to, const std::optional<Tensor>& from) {
    if (from) to = from->array();
  };
  in.q = q_->array();
  in.k = k_->array();
  in.v = v_->array();
  give(in.cu_seqlens_q, cu_seqlens_q_);
  give(in.cu_seqlens_k, cu_seqlens_k_);
  give(in.seqused_q, seqused_q_);
  give(in.seqused_k, seqused_k_);
  give(in.leftpad_k, leftpad_k_);
  in.softmax_scale = c_.scale.value_or(1 / std::sqrt(static_cast<double>(c_.dim_qk)));
  in.causal = c_.causal;
  in.window_left = c_.window_left;
  in.window_right = c_.window_right;
  in.softcap = c_.softcap;
  give(in.alibi_slopes, slopes_);
  give(in.sinks, sinks_);
  give(in.bias, bias_);
  give(in.q_scale, q_scale_);
  give(in.k_scale, k_scale_);
  give(in.v_scale, v_scale_);
  give(in.k_row_scale, k_row_scale_);
  give(in.v_row_scale, v_row_scale_);
  if (rng_state_) {
    in.dropout = {c_.dropout, rng_state_->array().integer({0}), rng_state_->array().integer({1})};
  }
  return in;
}

void AttentionCall::poison_outputs() {
  out_->poison();
  if (lse_) lse_->poison();
}

void AttentionCall::fetch() {
  out_->download();
  if (lse_) lse_->download();
}

void AttentionCall::run() {
  poison_outputs();
  flashport::attention(args());
  fetch();
}

void AttentionCall::set_lengths(const std::vector<std::int64_t>& q_lens, const std::vector<std::int64_t>& kv_lens) {
  c_.q_lens = q_lens;
  c_.kv_lens = kv_lens;
  std::int64_t q_end = 0, k_end = 0;
  for (std::size_t b = 0; b < places_.size(); ++b) {
    places_[b] = {q_end, k_end, q_lens[b], kv_lens[b], 0};
    q_end += q_lens[b];
    k_end += kv_lens[b];
    const auto next = static_cast<std::int64_t>(b) + 1;
    cu_seqlens_q_->set({next}, static_cast<double>(q_end));
    cu_seqlens_k_->set({next}, static_cast<double>(k_end));
  }
  cu_seqlens_q_->upload();
  cu_seqlens_k_->upload();
}

Shape AttentionCall::out_index(std::int64_t sequence, std::int64_t row, std::int64_t head) const {
  const std::int64_t token = places_[static_cast<std::size_t>(sequence)].q_first + row;
  return c_.packed ? Shape{token, head, 0} : Shape{sequence, token, head, 0};
}

Shape AttentionCall::lse_index(std::int64_t sequence, std::int64_t row, std::int64_t head) const {
  const std::int64_t token = places_[static_cast<std::size_t>(sequence)].q_first + row;
  return c_.packed ? Shape{head, token} : Shape{sequence, head, token};
}

std::string AttentionCall::check_untouched() {
  const auto batch = static_cast<std::int64_t>(places_.size());
  std::vector<bool> written(static_cast<std::size_t>(q_rows_ * (c_.packed ? 1 : batch)));
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto at = static_cast<std::size_t>(b);
    for (std::int64_t row = 0; row < c_.q_lens[at]; ++row) {
      written[static_cast<std::size_t>((c_.packed ? 0 : b * q_rows_) + places_[at].q_first + row)] = true;
    }
  }
  std::string failure;
  const auto expect_poison = [&](Tensor& tensor, const Shape& index, std::int64_t row, const char* what) {
    if (written[static_cast<std::size_t>(row)]) return;
    const unsigned char* bytes = tensor.address(index);
    const int count = reference::type_bytes(tensor.type());
    if (std::all_of(bytes, bytes + count, [](unsigned char byte) { return byte == 0xff; })) return;
    failure = std::string(what) + " of row " + std::to_string(row) + ", which is not in use, was written";
  };
  out_->for_each(
      [&](const Shape& at) { expect_poison(*out_, at, c_.packed ? at[0] : at[0] * q_rows_ + at[1], "out"); });
  if (const std::string damage = out_->damage(); !damage.empty()) return "out: " + damage;
  if (!lse_) return failure;
  lse_->for_each(
      [&](const Shape& at) { expect_poison(*lse_, at, c_.packed ? at[1] : at[0] * q_rows_ + at[2], "lse"); });
  if (const std::string damage = lse_->damage(); !damage.empty()) return "lse: " + damage;
  return failure;
}

std::string AttentionCall::check() { return check(math_of_key(flashport::which_kernel(c_.query()))); }

std::string AttentionCall::check(Type math) {
  if (std::string failure = check_untouched(); !failure.empty()) return failure;
  const std::vector<reference::AttentionSequence> exact = reference::attention(inputs());
  const std::vector<reference::AttentionSequence> plain = reference::attention_plain(inputs(), math, c_.type);
  std::vector<double> ours, exact_out, plain_out, our_lse, exact_lse, plain_lse;
  const int bytes = reference::type_bytes(c_.type);
  for (std::size_t b = 0; b < exact.size(); ++b) {
    const auto sequence = static_cast<std::int64_t>(b);
    for (std::int64_t row = 0; row < exact[b].q_len; ++row) {
      for (std::int64_t head = 0; head < c_.q_heads; ++head) {
        const unsigned char* at = out_->address(out_index(sequence, row, head));
        for (std::int64_t d = 0; d < c_.dim_v; ++d) ours.push_back(reference::read_number(at + d * bytes, c_.type));
        if (lse_) our_lse.push_back(lse_->get(lse_index(sequence, row, head)));
      }
    }
    exact_out.insert(exact_out.end(), exact[b].out.begin(), exact[b].out.end());
    plain_out.insert(plain_out.end(), plain[b].out.begin(), plain[b].out.end());
    exact_lse.insert(exact_lse.end(), exact[b].lse.begin(), exact[b].lse.end());
    plain_lse.insert(plain_lse.end(), plain[b].lse.begin(), plain[b].lse.end());
  }
  // A small call has few samples of the largest error.
  const double rounding = ours.size() < 100000 ? output_rounding(exact_out, c_.type) : 0;
  // tanh is good to a few roundings of 1, so that scores are to as many of the softcap.
  double of_scores = 4 * 0x1p-24 * c_.softcap;
  // A score grown by ALiBi is rounded in base 2, where half a unit in the last place is up to twice that of base e. The
  // product of softmax_scale and two scales is rounded twice.
  const int roundings = (c_.slopes != Slopes::kNone ? 1 : 0) + (c_.scales ? 2 : 0);
  if (roundings > 0) {
    double most = 0;
    for (const double x : exact_lse) most = std::isfinite(x) ? std::max(most, std::fabs(x)) : most;
    of_scores += roundings * 0x1p-24 * most;
  }
  const double floor = fp32_floor(exact_out) * (1 + of_scores / (8 * 0x1p-24));
  const Comparison compared = compare(ours, exact_out, plain_out, floor, rounding);
  if (!compared.failure.empty()) return "out: " + compared.failure;
  if (!lse_) return "";
  const Comparison of_lse = compare(our_lse, exact_lse, plain_lse, lse_floor(exact_lse) + of_scores);
  return of_lse.failure.empty() ? "" : "lse: " + of_lse.failure;
}

std::vector<unsigned char> AttentionCall::bits() {
  std::vector<unsigned char> all;
  for (std::size_t b = 0; b < places_.size(); ++b) {
    const std::vector<unsigned char> one = bits(static_cast<std::int64_t>(b));
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

std::vector<unsigned char> AttentionCall::bits(std::int64_t sequence) {
  std::vector<unsigned char> all;
  const int bytes = reference::type_bytes(c_.type);
  for (std::int64_t row = 0; row < c_.q_lens[static_cast<std::size_t>(sequence)]; ++row) {
    for (std::int64_t head = 0; head < c_.q_heads; ++head) {
      const unsigned char* at = out_->address(out_index(sequence, row, head));
      all.insert(all.end(), at, at + c_.dim_v * bytes);
      if (!lse_) continue;
      const unsigned char* of_lse = lse_->address(lse_index(sequence, row, head));
      all.insert(all.end(), of_lse, of_lse + 4);
    }
  }
  return all;
}

}  // namespace flashport_test
