#include "tests/reference/oracle.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "tests/reference/blocks.h"
#include "tests/reference/scaled_rows.h"

namespace reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Where the row of one token of one head begins.
struct RowFinder {
  const DecodeInputs& in;

  [[nodiscard]] std::int64_t page_size(const Array& cache) const { return cache.shape[in.heads_first ? 2 : 1]; }

  // Page (or slot, or sequence) and offset inside it of key `token` of request `b`.
  void locate(std::int64_t b, std::int64_t token, std::int64_t& page, std::int64_t& offset) const {
    if (in.token_table) {
      const std::int64_t row = in.request_index ? in.request_index->integer({b}) : b;
      page = in.token_table->integer({row, token});
      offset = 0;
      return;
    }
    if (!in.block_table && !in.kv_indptr) {
      page = b;
      offset = token;
      return;
    }
    const std::int64_t size = page_size(in.k_cache);
    offset = token % size;
    page = in.block_table ? in.block_table->integer({b, token / size})
                          : in.kv_indices->integer({in.kv_indptr->integer({b}) + token / size});
  }

  [[nodiscard]] const unsigned char* row(const Array& cache, std::int64_t b, std::int64_t token,
                                         std::int64_t head) const {
    std::int64_t page, offset;
    locate(b, token, page, offset);
    if (page < 0 || page >= cache.shape[0]) throw std::logic_error("the oracle was led to a page that does not exist");
    if (in.token_table) return cache.address({page, head, 0});
    return in.heads_first ? cache.address({page, head, offset, 0}) : cache.address({page, offset, head, 0});
  }
};

std::int64_t length_of(const DecodeInputs& in, std::int64_t b) {
  if (in.seqlens) return in.seqlens->integer({b});
  const std::int64_t pages = in.kv_indptr->integer({b + 1}) - in.kv_indptr->integer({b});
  const std::int64_t size = in.k_cache.shape[in.heads_first ? 2 : 1];
  return pages == 0 ? 0 : (pages - 1) * size + in.kv_last_page_len->integer({b});
}

double row_value(const Array& cache, const unsigned char* row, std::int64_t dim) {
  if (is_blocks(cache.type)) return read_block_value(cache.type, row, dim);
  if (cache.type == Type::kI4) return read_scaled_value(cache.type, row, dim);
  return read_number(row + dim * cache.strides.back() * type_bytes(cache.type), cache.type);
}

std::vector<double> per_head(const std::optional<Array>& scale, std::int64_t heads) {
  std::vector<double> values(heads, 1.0);
  if (!scale) return values;
  for (std::int64_t h = 0; h < heads; ++h) values[h] = scale->at({scale->shape[0] == 1 ? 0 : h});
  return values;
}

}  // namespace

const unsigned char* Array::address(std::initializer_list<std::int64_t> index) const {
  std::int64_t offset = 0;
  std::size_t axis = 0;
  for (std::int64_t i : index) offset += i * strides[axis++];
  return static_cast<const unsigned char*>(data) + offset * type_bytes(type);
}

double Array::at(std::initializer_list<std::int64_t> index) const { return read_number(address(index), type); }

std::int64_t Array::integer(std::initializer_list<std::int64_t> index) const {
  const unsigned char* at = address(index);
  if (type == Type::kI64) return load_as<std::int64_t>(at);
  if (type == Type::kU32) return load_as<std::uint32_t>(at);
  return load_as<std::int32_t>(at);
}

bool Request::visible(std::int64_t row, std::int64_t key) const {
  const std::int64_t draft = kv_len - q_len;  // position of the first new token
  const std::int64_t position = draft + row;
  if (tree_mask.empty()) {
    if (mask.empty() && key > position) return false;
  } else if (key >= draft && ((tree_mask[row] >> (key - draft)) & 1u) == 0) {
    return false;
  }
  if (window_left >= 0 && key < position - window_left) return false;
  if (window_right >= 0 && key > position + window_right) return false;
  return true;
}

std::vector<Request> gather(const DecodeInputs& in) {
  const bool ragged = in.cu_seqlens_q.has_value();
  const std::int64_t batch = ragged ? in.cu_seqlens_q->shape[0] - 1 : in.q.shape.size() == 0 ? 0 : in.q.shape[0];
  const std::size_t head_axis = in.q.shape.size() - 2;
  std::vector<Request> requests(batch);
  for (std::int64_t b = 0; b < batch; ++b) {
    Request& r = requests[b];
    r.num_q_heads = in.q.shape[head_axis];
    r.num_kv_heads = in.k_cache.shape[in.token_table || !in.heads_first ? in.k_cache.shape.size() - 2 : 1];
    r.dim_qk = in.head_dim_qk;
    r.dim_v = in.head_dim_v;
    r.kv_len = length_of(in, b);
    const std::int64_t first = ragged ? in.cu_seqlens_q->integer({b}) : 0;
    r.q_len = ragged ? in.cu_seqlens_q->integer({b + 1}) - first : in.q.shape.size() == 4 ? in.q.shape[1] : 1;
    for (std::int64_t i = 0; i < r.q_len; ++i) {
      for (std::int64_t h = 0; h < r.num_q_heads; ++h) {
        for (std::int64_t d = 0; d < r.dim_qk; ++d) {
          r.q.push_back(ragged                   ? in.q.at({first + i, h, d})
                        : in.q.shape.size() == 4 ? in.q.at({b, i, h, d})
                                                 : in.q.at({b, h, d}));
        }
      }
    }
    const RowFinder find{in};
    r.k.reserve(r.kv_len * r.num_kv_heads * r.dim_qk);
    r.v.reserve(r.kv_len * r.num_kv_heads * r.dim_v);
    for (std::int64_t j = 0; j < r.kv_len; ++j) {
      for (std::int64_t h = 0; h < r.num_kv_heads; ++h) {
        const unsigned char* k = find.row(in.k_cache, b, j, h);
        const unsigned char* v = find.row(in.v_cache, b, j, h);
        for (std::int64_t d = 0; d < r.dim_qk; ++d) r.k.push_back(row_value(in.k_cache, k, d));
        for (std::int64_t d = 0; d < r.dim_v; ++d) r.v.push_back(row_value(in.v_cache, v, d));
      }
    }
    r.k_scale = per_head(in.k_scale, r.num_kv_heads);
    r.v_scale = per_head(in.v_scale, r.num_kv_heads);
    r.softmax_scale = in.softmax_scale;
    r.softcap = in.softcap;
    r.window_left = in.window_left;
    r.window_right = in.window_right;
    for (std::int64_t h = 0; h < r.num_q_heads; ++h) {
      if (in.alibi_slopes) {
        r.slopes.push_back(in.alibi_slopes->shape.size() == 2 ? in.alibi_slopes->at({b, h}) : in.alibi_slopes->at({h}));
      }
      if (in.sinks) r.sinks.push_back(in.sinks->at({h}));
    }
    for (std::int64_t i = 0; in.tree_mask && i < r.q_len; ++i) {
      r.tree_mask.push_back(
          static_cast<std::uint32_t>(ragged ? in.tree_mask->integer({first + i}) : in.tree_mask->integer({b, i})));
    }
  }
  return requests;
}

RequestResult attend(const Request& r) { return attend(r, 0, r.kv_len, true); }

RequestResult attend(const Request& r, std::int64_t first, std::int64_t last, bool with_sink) {
  RequestResult result;
  result.out.assign(r.q_len * r.num_q_heads * r.dim_v, 0.0);
  result.lse.assign(r.q_len * r.num_q_heads, -kInf);
  const std::int64_t group = r.num_q_heads / r.num_kv_heads;
  std::vector<double> scores(std::max<std::int64_t>(last - first, 0));
  for (std::int64_t row = 0; row < r.q_len * r.num_q_heads; ++row) {
    const std::int64_t i = row / r.num_q_heads, h = row % r.num_q_heads, kv_head = h / group;
    const double* q = r.q.data() + row * r.dim_qk;
    double largest = with_sink && !r.sinks.empty() ? r.sinks[h] : -kInf;
    bool has_nan = false;
    for (std::int64_t j = first; j < last; ++j) {
      double& score = scores[j - first];
      score = -kInf;
      if (!r.visible(i, j)) continue;
      const double* k = r.k.data() + (j * r.num_kv_heads + kv_head) * r.dim_qk;
      double dot = 0;
      for (std::int64_t d = 0; d < r.dim_qk; ++d) dot += q[d] * k[d];
      score = dot * r.k_scale[kv_head] * r.softmax_scale;
      if (r.softcap > 0) score = r.softcap * std::tanh(score / r.softcap);
      if (!r.slopes.empty()) score -= r.slopes[h] * std::fabs(static_cast<double>(r.kv_len - r.q_len + i - j));
      if (!r.mask.empty()) score = r.mask[row * r.kv_len + j] == -kInf ? -kInf : score + r.mask[row * r.kv_len + j];
      has_nan = has_nan || std::isnan(score);
      largest = std::max(largest, score);
    }
    double* out = result.out.data() + row * r.dim_v;
    if (has_nan) {
      std::fill(out, out + r.dim_v, std::numeric_limits<double>::quiet_NaN());
      result.lse[row] = std::numeric_limits<double>::quiet_NaN();
      continue;
    }
    if (largest == -kInf) continue;
    double sum = with_sink && !r.sinks.empty() ? std::exp(r.sinks[h] - largest) : 0.0;
    for (std::int64_t j = first; j < last; ++j) {
      if (scores[j - first] == -kInf) continue;
      const double p = std::exp(scores[j - first] - largest);
      sum += p;
      const double* v = r.v.data() + (j * r.num_kv_heads + kv_head) * r.dim_v;
      for (std::int64_t d = 0; d < r.dim_v; ++d) out[d] += p * v[d];
    }
    for (std::int64_t d = 0; d < r.dim_v; ++d) out[d] *= r.v_scale[kv_head] / sum;
    result.lse[row] = largest + std::log(sum);
  }
  return result;
}

RequestResult attend_plain(const Request& r, Type math, Type out_type, double unit) {
  return attend_plain(r, math, out_type, 0, r.kv_len, unit);
}

RequestResult attend_plain(const Request& r, Type math, Type out_type, std::int64_t first, std::int64_t last,
                           double unit) {
  RequestResult result;
  result.out.assign(r.q_len * r.num_q_heads * r.dim_v, 0.0);
  result.lse.assign(r.q_len * r.num_q_heads, -kInf);
  const auto operands = [math](const std::vector<double>& values) {
    std::vector<float> rounded(values.size());
    std::transform(values.begin(), values.end(), rounded.begin(),
                   [math](double x) { return static_cast<float>(round_to(x, math)); });
    return rounded;
  };
  const std::vector<float> q_all = operands(r.q), k_all = operands(r.k), v_all = operands(r.v);
  const std::int64_t group = r.num_q_heads / r.num_kv_heads;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> scores(std::max<std::int64_t>(last - first, 0)), sums(r.dim_v);
  for (std::int64_t row = 0; row < r.q_len * r.num_q_heads; ++row) {
    const std::int64_t i = row / r.num_q_heads, h = row % r.num_q_heads, kv_head = h / group;
    const float* q = q_all.data() + row * r.dim_qk;
    const auto scale = static_cast<float>(r.softmax_scale);
    const auto k_scale = static_cast<float>(r.k_scale[kv_head]), v_scale = static_cast<float>(r.v_scale[kv_head]);
    const auto cap = static_cast<float>(r.softcap);
    float largest = r.sinks.empty() ? -kInfinity : static_cast<float>(r.sinks[h]);
    for (std::int64_t j = first; j < last; ++j) {
      float& score = scores[j - first];
      score = -kInfinity;
      if (!r.visible(i, j)) continue;
      const float* k = k_all.data() + (j * r.num_kv_heads + kv_head) * r.dim_qk;
      float dot = 0;
      for (std::int64_t d = 0; d < r.dim_qk; ++d) dot += q[d] * k[d];
      score = dot * k_scale * scale;
      if (cap > 0) score = cap * std::tanh(score / cap);
      if (!r.slopes.empty()) {
        score -= static_cast<float>(r.slopes[h]) * std::fabs(static_cast<float>(r.kv_len - r.q_len + i - j));
      }
      if (!r.mask.empty()) score += static_cast<float>(r.mask[row * r.kv_len + j]);
      largest = std::max(largest, score);
    }
    if (largest == -kInfinity) continue;
    float sum = r.sinks.empty() ? 0.0f : std::exp(static_cast<float>(r.sinks[h]) - largest);
    for (float& score : scores) {
      score = std::exp(score - largest);
      sum += score;
    }
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (std::int64_t j = first; j < last; ++j) {
      if (scores[j - first] == 0.0f) continue;
      const auto p = static_cast<float>(round_to(scores[j - first] / sum * unit, math) / unit);
      const float* v = v_all.data() + (j * r.num_kv_heads + kv_head) * r.dim_v;
      for (std::int64_t d = 0; d < r.dim_v; ++d) sums[d] += p * v[d];
    }
    for (std::int64_t d = 0; d < r.dim_v; ++d) {
      result.out[row * r.dim_v + d] = round_to(sums[d] * v_scale, out_type);
    }
    result.lse[row] = largest + std::log(sum);
  }
  return result;
}

double merge(const std::vector<std::vector<double>>& o, const std::vector<double>& lse, std::vector<double>& out) {
  const double largest = *std::max_element(lse.begin(), lse.end());
  std::fill(out.begin(), out.end(), 0.0);
  if (largest == -kInf) return -kInf;
  double sum = 0;
  for (std::size_t n = 0; n < o.size(); ++n) {
    if (lse[n] == -kInf) continue;  // its o may hold anything
    const double weight = std::exp(lse[n] - largest);
    sum += weight;
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += weight * o[n][d];
  }
  for (double& value : out) value /= sum;
  return largest + std::log(sum);
}

double merge_plain(const std::vector<std::vector<double>>& o, const std::vector<double>& lse, Type type,
                   std::vector<double>& out) {
  const auto largest = static_cast<float>(*std::max_element(lse.begin(), lse.end()));
  std::fill(out.begin(), out.end(), 0.0);
  if (largest == -std::numeric_limits<float>::infinity()) return -kInf;
  std::vector<float> sums(out.size(), 0.0f);
  float sum = 0;
  for (std::size_t n = 0; n < o.size(); ++n) {
    if (lse[n] == -kInf) continue;
    const float weight = std::exp(static_cast<float>(lse[n]) - largest);
    sum += weight;
    for (std::size_t d = 0; d < out.size(); ++d) sums[d] += weight * static_cast<float>(o[n][d]);
  }
  for (std::size_t d = 0; d < out.size(); ++d) out[d] = round_to(sums[d] / sum, type);
  return largest + std::log(sum);
}

}  // namespace reference
