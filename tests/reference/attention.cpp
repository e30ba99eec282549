#include "tests/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/reference/blocks.h"
#include "tests/reference/scaled_rows.h"

namespace reference {
namespace {

// The tokens of one sequence, gathered.
struct Sequence {
  std::int64_t index = 0, first_q = 0, first_k = 0, q_len = 0, kv_len = 0;
};

struct Dims {
  std::int64_t q_heads, kv_heads, dim_qk, dim_v;
};

bool is_packed(const AttentionInputs& in) { return in.cu_seqlens_q.has_value(); }

Dims dims_of(const AttentionInputs& in) {
  const std::size_t head = is_packed(in) ? 1 : 2;
  const std::int64_t extent_v = in.v.shape[head + 1];
  return {in.q.shape[head], in.k.shape[head], in.q.shape[head + 1], stored_dim(in.v.type, extent_v)};
}

std::vector<Sequence> sequences_of(const AttentionInputs& in) {
  const std::int64_t batch = is_packed(in) ? in.cu_seqlens_q->shape[0] - 1 : in.q.shape[0];
  std::vector<Sequence> all;
  for (std::int64_t b = 0; b < batch; ++b) {
    Sequence s{b, 0, 0, 0, 0};
    if (is_packed(in)) {
      s.first_q = in.cu_seqlens_q->integer({b});
      s.first_k = in.cu_seqlens_k->integer({b});
      s.q_len = in.cu_seqlens_q->integer({b + 1}) - s.first_q;
      s.kv_len = in.cu_seqlens_k->integer({b + 1}) - s.first_k;
    } else {
      s.q_len = in.q.shape[1];
      s.kv_len = in.k.shape[1];
    }
    if (in.seqused_q) s.q_len = in.seqused_q->integer({b});
    if (in.seqused_k) s.kv_len = in.seqused_k->integer({b});
    if (in.leftpad_k) {
      s.first_k += in.leftpad_k->integer({b});
      s.kv_len -= in.leftpad_k->integer({b});
    }
    all.push_back(s);
  }
  return all;
}

double element(const AttentionInputs& in, const Array& array, const Sequence& s, std::int64_t token, std::int64_t head,
               std::int64_t dim) {
  if (is_blocks(array.type) || array.type == Type::kI4) {
    const auto* row = is_packed(in) ? array.address({token, head, 0}) : array.address({s.index, token, head, 0});
    return array.type == Type::kI4 ? read_scaled_value(array.type, row, dim) : read_block_value(array.type, row, dim);
  }
  return is_packed(in) ? array.at({token, head, dim}) : array.at({s.index, token, head, dim});
}

double scale_of(const std::optional<Array>& scale, const Sequence& s, std::int64_t kv_head) {
  return scale ? scale->at({s.index, kv_head}) : 1;
}

// The scale of value `dim` of `dims`, one that lies beside its row.
double row_scale_of(const AttentionInputs& in, const std::optional<Array>& scale, const Sequence& s, std::int64_t token,
                    std::int64_t kv_head, std::int64_t dim, std::int64_t dims) {
  if (!scale) return 1;
  const bool packed = is_packed(in);
  if (scale->shape.size() == (packed ? 2u : 3u)) {
    return packed ? scale->at({token, kv_head}) : scale->at({s.index, token, kv_head});
  }
  const std::int64_t group = dim / (dims / scale->shape.back());
  return packed ? scale->at({token, kv_head, group}) : scale->at({s.index, token, kv_head, group});
}

bool sees(const AttentionInputs& in, const Sequence& s, std::int64_t row, std::int64_t key) {
  const std::int64_t distance = key - (row + s.kv_len - s.q_len);  // below 0: the key stands to the left
  if (in.causal && distance > 0) return false;
  if (in.window_left >= 0 && -distance > in.window_left) return false;
  return in.window_right < 0 || distance <= in.window_right;
}

// What joins a logit by the positions of query and key.
double addend(const AttentionInputs& in, const Sequence& s, std::int64_t head, std::int64_t row, std::int64_t key) {
  double sum = 0;
  if (in.alibi_slopes) {
    const bool of_all = in.alibi_slopes->shape.size() == 1;
    const double slope = of_all ? in.alibi_slopes->at({head}) : in.alibi_slopes->at({s.index, head});
    sum -= slope * std::fabs(static_cast<double>(row + s.kv_len - s.q_len - key));
  }
  if (in.bias) {
    sum += in.bias->at({in.bias->shape[0] == 1 ? 0 : s.index, in.bias->shape[1] == 1 ? 0 : head,
                        in.bias->shape[2] == 1 ? 0 : row, key});
  }
  return sum;
}

// One text for both: Real is double, or float where `math` says what operands and probabilities are rounded to.
template <class Real>
AttentionSequence attend(const AttentionInputs& in, const Sequence& s, std::optional<Type> math,
                         std::optional<Type> out) {
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  const Dims dims = dims_of(in);
  const auto kv_len = static_cast<std::size_t>(s.kv_len), dim_v = static_cast<std::size_t>(dims.dim_v);
  AttentionSequence result{s.first_q, s.q_len, s.kv_len, {}, {}};
  result.out.assign(static_cast<std::size_t>(s.q_len * dims.q_heads) * dim_v, 0.0);
  result.lse.assign(static_cast<std::size_t>(s.q_len * dims.q_heads), -std::numeric_limits<double>::infinity());
  const std::int64_t group = dims.kv_heads == 0 ? 1 : dims.q_heads / dims.kv_heads;
  const bool modified = in.alibi_slopes || in.bias;
  const auto cap = static_cast<Real>(in.softcap), scale = static_cast<Real>(in.softmax_scale);
  const auto keep_scale = static_cast<Real>(1 / (1 - in.dropout.p));
  const auto operand = [&](const Array& array, std::int64_t token, std::int64_t head, std::int64_t d,
                           double factor = 1) {
    const double x = element(in, array, s, token, head, d) * factor;
    return math ? round_to(x, *math) : x;
  };
  std::vector<Real> k(kv_len * static_cast<std::size_t>(dims.dim_qk)), v(kv_len * dim_v), scores(kv_len), sums(dim_v);
  for (std::int64_t head = 0; head < dims.q_heads; ++head) {
    for (std::int64_t j = 0; j < s.kv_len && head % group == 0; ++j) {
      const std::int64_t token = s.first_k + j, kv_head = head / group;
      for (std::int64_t d = 0; d < dims.dim_qk; ++d) {  // [dim][key]
        k[static_cast<std::size_t>(d * s.kv_len + j)] = static_cast<Real>(
            operand(in.k, token, kv_head, d, row_scale_of(in, in.k_row_scale, s, token, kv_head, d, dims.dim_qk)) *
            scale_of(in.k_scale, s, kv_head));
      }
      for (std::int64_t d = 0; d < dims.dim_v; ++d) {  // [key][dim]
        v[static_cast<std::size_t>(j * dims.dim_v + d)] = static_cast<Real>(
            operand(in.v, token, kv_head, d, row_scale_of(in, in.v_row_scale, s, token, kv_head, d, dims.dim_v)) *
            scale_of(in.v_scale, s, kv_head));
      }
    }
    for (std::int64_t row = 0; row < s.q_len; ++row) {
      std::fill(scores.begin(), scores.end(), Real{0});
      for (std::int64_t d = 0; d < dims.dim_qk; ++d) {
        const auto x =
            static_cast<Real>(operand(in.q, s.first_q + row, head, d) * scale_of(in.q_scale, s, head / group));
        const Real* of_dim = k.data() + d * s.kv_len;
        for (std::size_t j = 0; j < kv_len; ++j) scores[j] += x * of_dim[j];
      }
      const Real sink = in.sinks ? static_cast<Real>(in.sinks->at({head})) : -kInfinity;
      Real largest = sink;
      for (std::int64_t j = 0; j < s.kv_len; ++j) {
        Real& score = scores[static_cast<std::size_t>(j)];
        score *= scale;
        if (cap > 0) score = cap * std::tanh(score / cap);
        if (modified) score += static_cast<Real>(addend(in, s, head, row, j));
        if (!sees(in, s, row, j)) score = -kInfinity;
        largest = std::isnan(score) ? score : std::max(largest, score);
      }
      if (largest == -kInfinity) continue;
      Real sum = std::exp(sink - largest);
      for (Real& score : scores) sum += score = std::exp(score - largest);
      std::fill(sums.begin(), sums.end(), Real{0});
      for (std::int64_t j = 0; j < s.kv_len; ++j) {
        Real p = scores[static_cast<std::size_t>(j)];
        if (p == 0) continue;
        p /= sum;
        if (in.dropout.p > 0) p = in.dropout.keeps(s.index * dims.q_heads + head, row, j) ? p * keep_scale : 0;
        if (math) p = static_cast<Real>(round_to(p, *math));
        const Real* of_key = v.data() + j * dims.dim_v;
        for (std::size_t d = 0; d < dim_v; ++d) sums[d] += p * of_key[d];
      }
      const std::int64_t at = row * dims.q_heads + head;
      for (std::int64_t d = 0; d < dims.dim_v; ++d) {
        const double x = sums[static_cast<std::size_t>(d)];
        result.out[static_cast<std::size_t>(at * dims.dim_v + d)] = out ? round_to(x, *out) : x;
      }
      result.lse[static_cast<std::size_t>(at)] = largest + std::log(sum);
    }
  }
  return result;
}

}  // namespace

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  const auto product = [](std::uint64_t a, std::uint32_t b) { return a * b; };
  for (int round = 0; round < 10; ++round) {
    if (round > 0) {  // the Weyl sequences of the key: the golden ratio and sqrt(3) - 1
      key[0] += 0x9E3779B9;
      key[1] += 0xBB67AE85;
    }
    const std::uint64_t left = product(0xD2511F53, counter[0]), right = product(0xCD9E8D57, counter[2]);
    counter = {static_cast<std::uint32_t>(right >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(right),
               static_cast<std::uint32_t>(left >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(left)};
  }
  return counter;
}

double Dropout::share() const { return std::min(std::nearbyint(p * 256), 255.0) / 256; }

bool Dropout::keeps(std::int64_t head, std::int64_t row, std::int64_t key) const {
  // Four calls serve 64 keys; call c has the keys 2c and 2c + 1 of each eight.
  const std::int64_t call = key / 64 * 4 + key % 8 / 2;
  const std::int64_t byte = key % 64 / 8 * 2 + key % 2;  // 0 to 15
  const auto bits_seed = static_cast<std::uint64_t>(seed), bits_offset = static_cast<std::uint64_t>(offset);
  const std::array<std::uint32_t, 4> words =
      philox4x32({static_cast<std::uint32_t>(call), static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(head),
                  static_cast<std::uint32_t>(bits_offset)},
                 {static_cast<std::uint32_t>(bits_seed),
                  static_cast<std::uint32_t>(bits_seed >> 32) ^ static_cast<std::uint32_t>(bits_offset >> 32)});
  const std::uint32_t bits = words[static_cast<std::size_t>(byte / 4)] >> (byte % 4 * 8) & 0xFF;
  return bits >= share() * 256;
}

std::vector<AttentionSequence> attention(const AttentionInputs& inputs) {
  std::vector<AttentionSequence> all;
  for (const Sequence& s : sequences_of(inputs)) all.push_back(attend<double>(inputs, s, std::nullopt, std::nullopt));
  return all;
}

std::vector<AttentionSequence> attention_plain(const AttentionInputs& inputs, Type math, Type out) {
  std::vector<AttentionSequence> all;
  for (const Sequence& s : sequences_of(inputs)) all.push_back(attend<float>(inputs, s, math, out));
  return all;
}

}  // namespace reference
