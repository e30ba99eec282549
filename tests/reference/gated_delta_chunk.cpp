#include "tests/reference/gated_delta_chunk.h"

#include <algorithm>
#include <cmath>

namespace reference {
namespace {

constexpr std::int64_t kChunk = 64;

// What one head reads of a sequence, in fp64 or fp32.
template <class Real>
struct Head {
  std::vector<Real> q, k, v;  // [count][K], [count][K], [count][V]; q with the scale
  std::vector<Real> g, beta;  // [count]
};

template <class Real>
class Rule {
 public:
  explicit Rule(const GatedDeltaChunkInputs& in)
      : in_(in),
        heads_(in.q.shape[2]),
        v_heads_(in.v.shape[2]),
        dim_k_(in.q.shape[3]),
        dim_v_(in.v.shape[3]),
        head_states_(dim_k_ * dim_v_) {}

  // run_head(head, s [K][V], out(t, column), enter()) goes through the tokens of one head; enter() keeps s.
  template <class RunHead>
  std::vector<GatedDeltaChunkSequence> run(Type operand, const RunHead& run_head) const {
    std::vector<GatedDeltaChunkSequence> all;
    const std::int64_t sequences = in_.cu_seqlens ? in_.cu_seqlens->shape[0] - 1 : in_.q.shape[0];
    for (std::int64_t n = 0; n < sequences; ++n) {
      GatedDeltaChunkSequence result;
      result.row = in_.cu_seqlens ? 0 : n;
      result.first = in_.cu_seqlens ? in_.cu_seqlens->integer({n}) : 0;
      result.count = in_.cu_seqlens ? in_.cu_seqlens->integer({n + 1}) - result.first : in_.q.shape[1];
      result.out.resize(result.count * v_heads_ * dim_v_);
      result.state.resize(v_heads_ * head_states_);
      result.entering.assign((result.count + kChunk - 1) / kChunk, result.state);
      const std::int64_t slot = !in_.state ? -1 : in_.state_indices ? in_.state_indices->integer({n}) : n;
      for (std::int64_t v_head = 0; v_head < v_heads_; ++v_head) {
        std::vector<Real> s(head_states_, Real(0));
        for (std::int64_t i = 0; i < head_states_ && slot >= 0; ++i) {
          const std::int64_t key = i / dim_v_, column = i % dim_v_;
          s[i] = Real(in_.key_major ? in_.state->at({slot, v_head, key, column})
                                    : in_.state->at({slot, v_head, column, key}));
        }
        const auto out = [&](std::int64_t t, std::int64_t column) -> double& {
          return result.out[(t * v_heads_ + v_head) * dim_v_ + column];
        };
        const auto enter = [&](std::int64_t chunk) {
          std::copy(s.begin(), s.end(), result.entering[chunk].begin() + v_head * head_states_);
        };
        run_head(gather(result, v_head, operand), s, out, enter);
        std::copy(s.begin(), s.end(), result.state.begin() + v_head * head_states_);
      }
      all.push_back(std::move(result));
    }
    return all;
  }

  std::int64_t dim_k() const { return dim_k_; }
  std::int64_t dim_v() const { return dim_v_; }

 private:
  Real gate(double g, std::int64_t v_head) const {
    if (!in_.a_log) return Real(g);
    const Real x = Real(g) + (in_.dt_bias ? Real(in_.dt_bias->at({v_head})) : Real(0));
    return -std::exp(Real(in_.a_log->at({v_head}))) * (x <= 20 ? std::log1p(std::exp(x)) : x);
  }

  // Normalised rows are rounded to `operand`.
  std::vector<Real> keys_of(const Array& array, const GatedDeltaChunkSequence& s, std::int64_t head, Real scale,
                            Type operand) const {
    std::vector<Real> x(s.count * dim_k_);
    for (std::int64_t t = 0; t < s.count; ++t) {
      Real squares = 0;
      for (std::int64_t i = 0; i < dim_k_; ++i) {
        const Real value = Real(array.at({s.row, s.first + t, head, i}));
        x[t * dim_k_ + i] = value;
        squares += value * value;
      }
      const Real factor = in_.l2norm ? 1 / std::sqrt(squares + Real(1e-6)) : Real(1);
      for (std::int64_t i = 0; i < dim_k_; ++i) {
        Real& value = x[t * dim_k_ + i];
        value *= factor * scale;
        if (in_.l2norm && sizeof(Real) == 4) value = Real(round_to(value, operand));
      }
    }
    return x;
  }

  Head<Real> gather(const GatedDeltaChunkSequence& s, std::int64_t v_head, Type operand) const {
    const std::int64_t head = in_.modulo ? v_head % heads_ : v_head / (v_heads_ / heads_);
    Head<Real> h;
    h.q = keys_of(in_.q, s, head, Real(in_.scale), operand);
    h.k = keys_of(in_.k, s, head, Real(1), operand);
    for (std::int64_t t = 0; t < s.count; ++t) {
      for (std::int64_t c = 0; c < dim_v_; ++c) h.v.push_back(Real(in_.v.at({s.row, s.first + t, v_head, c})));
      h.g.push_back(gate(in_.g.at({s.row, s.first + t, v_head}), v_head));
      const Real beta = Real(in_.beta.at({s.row, s.first + t, v_head}));
      h.beta.push_back(in_.beta_sigmoid ? Real(in_.beta_factor) / (1 + std::exp(-beta)) : beta);
    }
    return h;
  }

  const GatedDeltaChunkInputs& in_;
  std::int64_t heads_, v_heads_, dim_k_, dim_v_, head_states_;
};

}  // namespace

std::vector<GatedDeltaChunkSequence> gated_delta_chunk(const GatedDeltaChunkInputs& inputs) {
  const Rule<double> rule(inputs);
  const std::int64_t keys = rule.dim_k(), columns = rule.dim_v();
  return rule.run(Type::kF32, [&](const Head<double>& h, std::vector<double>& s, const auto& out, const auto& enter) {
    std::vector<double> recalled(columns);
    for (std::size_t t = 0; t < h.g.size(); ++t) {
      if (t % kChunk == 0) enter(static_cast<std::int64_t>(t) / kChunk);
      const double decay = std::exp(h.g[t]);
      std::fill(recalled.begin(), recalled.end(), 0.0);
      for (std::int64_t key = 0; key < keys; ++key) {
        for (std::int64_t c = 0; c < columns; ++c) {
          s[key * columns + c] *= decay;
          recalled[c] += s[key * columns + c] * h.k[t * keys + key];
        }
      }
      for (std::int64_t c = 0; c < columns; ++c) out(t, c) = 0;
      for (std::int64_t key = 0; key < keys; ++key) {
        for (std::int64_t c = 0; c < columns; ++c) {
          s[key * columns + c] += h.k[t * keys + key] * h.beta[t] * (h.v[t * columns + c] - recalled[c]);
          out(t, c) += s[key * columns + c] * h.q[t * keys + key];
        }
      }
    }
  });
}

std::vector<GatedDeltaChunkSequence> gated_delta_chunk_plain(const GatedDeltaChunkInputs& inputs, Type operand) {
  const Rule<float> rule(inputs);
  const std::int64_t keys = rule.dim_k(), columns = rule.dim_v();
  using Matrix = std::vector<float>;
  const auto rounded = [&](Matrix x) {
    for (float& value : x) value = static_cast<float>(round_to(value, operand));
    return x;
  };
  // x [rows, depth] y [depth, columns]
  const auto product = [](const Matrix& x, const Matrix& y, std::int64_t rows, std::int64_t depth, std::int64_t width) {
    Matrix z(rows * width, 0.0f);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < depth; ++i) {
        for (std::int64_t c = 0; c < width; ++c) z[r * width + c] += x[r * depth + i] * y[i * width + c];
      }
    }
    return z;
  };
  const auto one_chunk = [&](const Head<float>& h, std::int64_t first, std::int64_t count, Matrix& s, const auto& out) {
    const Matrix q(h.q.begin() + first * keys, h.q.begin() + (first + count) * keys);
    const Matrix k(h.k.begin() + first * keys, h.k.begin() + (first + count) * keys);
    // Gates are added up in fp64, none below -1000, so that differences are numbers: the yardstick is of the products,
    // not of how sums of gates lose digits.
    std::vector<double> sum(count);
    double before = 0;
    for (std::int64_t i = 0; i < count; ++i) sum[i] = before += std::max<double>(h.g[first + i], -1000);
    const auto decay = [](double g) { return std::exp(static_cast<float>(g)); };
    const auto dot = [&](const Matrix& x, std::int64_t i, std::int64_t j) {
      float total = 0;
      for (std::int64_t key = 0; key < keys; ++key) total += x[i * keys + key] * k[j * keys + key];
      return total;
    };
    Matrix inverse(count * count, 0.0f), scores(count * count, 0.0f);
    for (std::int64_t i = 0; i < count; ++i) {
      inverse[i * count + i] = 1;
      for (std::int64_t j = 0; j <= i; ++j) {
        const float d = decay(sum[i] - sum[j]);
        scores[i * count + j] = dot(q, i, j) * d;
        if (j == i) continue;
        const float a = h.beta[first + i] * dot(k, i, j) * d;
        for (std::int64_t c = 0; c <= j; ++c) inverse[i * count + c] -= a * inverse[j * count + c];
      }
    }
    Matrix u(count * columns), w(count * keys);
    for (std::int64_t i = 0; i < count; ++i) {
      const float beta = h.beta[first + i];
      for (std::int64_t c = 0; c < columns; ++c) u[i * columns + c] = beta * h.v[(first + i) * columns + c];
      for (std::int64_t key = 0; key < keys; ++key) w[i * keys + key] = beta * decay(sum[i]) * k[i * keys + key];
    }
    inverse = rounded(inverse);
    u = rounded(product(inverse, rounded(u), count, count, columns));
    w = rounded(product(inverse, rounded(w), count, count, keys));
    const Matrix carried = rounded(s);
    const Matrix taken = product(w, carried, count, keys, columns);
    Matrix new_values(count * columns);
    for (std::size_t i = 0; i < new_values.size(); ++i) new_values[i] = u[i] - taken[i];
    const Matrix kept = product(q, carried, count, keys, columns);
    const Matrix added = product(rounded(scores), rounded(new_values), count, count, columns);
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t c = 0; c < columns; ++c) {
        out(first + i, c) = round_to(decay(sum[i]) * kept[i * columns + c] + added[i * columns + c], operand);
        new_values[i * columns + c] *= decay(sum[count - 1] - sum[i]);
      }
    }
    new_values = rounded(new_values);
    Matrix turned(keys * count);
    for (std::int64_t i = 0; i < count * keys; ++i) turned[i % keys * count + i / keys] = k[i];
    const Matrix change = product(turned, new_values, keys, count, columns);
    const float left = decay(sum[count - 1]);
    for (std::size_t i = 0; i < s.size(); ++i) s[i] = left * s[i] + change[i];
  };
  auto all = rule.run(operand, [&](const Head<float>& h, std::vector<float>& s, const auto& out, const auto& enter) {
    const auto count = static_cast<std::int64_t>(h.g.size());
    for (std::int64_t first = 0; first < count; first += kChunk) {
      enter(first / kChunk);
      one_chunk(h, first, std::min(kChunk, count - first), s, out);
    }
  });
  for (GatedDeltaChunkSequence& s : all) {
    for (std::vector<double>& entering : s.entering) {
      for (double& x : entering) x = round_to(x, operand);
    }
  }
  return all;
}

}  // namespace reference
