#include "tests/reference/gated_delta.h"

#include <algorithm>
#include <cmath>

namespace reference {
namespace {

template <class Real>
class Recurrence {
 public:
  explicit Recurrence(const GatedDeltaInputs& in)
      : in_(in),
        heads_(in.q.shape[2]),
        v_heads_(in.v.shape[2]),
        dim_k_(in.q.shape[3]),
        dim_v_(in.v.shape[3]),
        head_states_(dim_k_ * dim_v_) {}

  std::vector<GatedDeltaSequence> run() const {
    std::vector<GatedDeltaSequence> all;
    const std::int64_t sequences = in_.cu_seqlens ? in_.cu_seqlens->shape[0] - 1 : in_.q.shape[0];
    for (std::int64_t n = 0; n < sequences; ++n) {
      GatedDeltaSequence s;
      s.row = in_.cu_seqlens ? 0 : n;
      s.first = in_.cu_seqlens ? in_.cu_seqlens->integer({n}) : 0;
      s.count = in_.cu_seqlens ? in_.cu_seqlens->integer({n + 1}) - s.first : in_.q.shape[1];
      s.out.resize(s.count * v_heads_ * dim_v_);
      s.state.resize(v_heads_ * head_states_);
      s.final_state = s.state;
      s.steps.assign(s.count, s.state);
      for (std::int64_t head = 0; head < v_heads_; ++head) run_head(n, head, s);
      all.push_back(std::move(s));
    }
    return all;
  }

 private:
  double stored(const Array& pool, std::int64_t slot, std::int64_t head, std::int64_t key, std::int64_t column) const {
    return in_.key_major ? pool.at({slot, head, key, column}) : pool.at({slot, head, column, key});
  }

  // The last axis may have one number for all.
  static Real at_last(const Array& array, std::int64_t row, std::int64_t token, std::int64_t head, std::int64_t last) {
    return Real(array.at({row, token, head, array.shape[3] == 1 ? 0 : last}));
  }

  Real made_decay(std::int64_t row, std::int64_t token, std::int64_t head, std::int64_t key) const {
    Real x = at_last(*in_.a, row, token, head, key);
    if (in_.dt_bias) x += Real(in_.dt_bias->at({head, in_.dt_bias->shape[1] == 1 ? 0 : key}));
    const Real rate = std::exp(Real(in_.a_log->at({head})));
    if (in_.lower_bound) return std::exp(Real(*in_.lower_bound) / (1 + std::exp(-rate * x)));
    const Real scaled = Real(in_.softplus_beta) * x;
    const Real softplus =
        scaled <= Real(in_.softplus_threshold) ? std::log1p(std::exp(scaled)) / Real(in_.softplus_beta) : x;
    return std::exp(-rate * softplus);
  }

  // Each gate by itself, one after the other.
  void decay(std::vector<Real>& s, std::int64_t row, std::int64_t token, std::int64_t head) const {
    for (std::int64_t key = 0; key < dim_k_; ++key) {
      const Real made = in_.a ? made_decay(row, token, head, key) : Real(1);
      const Real of_head = in_.g ? std::exp(at_last(*in_.g, row, token, head, key)) : Real(1);
      const Real of_key = in_.gk ? std::exp(at_last(*in_.gk, row, token, head, key)) : Real(1);
      for (std::int64_t c = 0; c < dim_v_; ++c) {
        Real& x = s[key * dim_v_ + c];
        x *= made;
        x *= of_head;
        x *= of_key;
        if (in_.gv) x *= std::exp(at_last(*in_.gv, row, token, head, c));
      }
    }
  }

  Real rate_of(std::int64_t row, std::int64_t token, std::int64_t head, std::int64_t column) const {
    if (in_.beta) return at_last(*in_.beta, row, token, head, column);
    if (!in_.b) return 1;
    return Real(in_.allow_neg_eigval ? 2 : 1) / (1 + std::exp(-at_last(*in_.b, row, token, head, column)));
  }

  std::vector<Real> row_of(const Array& array, std::int64_t row, std::int64_t token, std::int64_t head) const {
    std::vector<Real> x(dim_k_);
    Real squares = 0;
    for (std::int64_t i = 0; i < dim_k_; ++i) {
      x[i] = Real(array.at({row, token, head, i}));
      squares += x[i] * x[i];
    }
    for (Real& value : x) {
      if (in_.l2norm) value /= std::sqrt(squares + Real(1e-6));
    }
    return x;
  }

  void run_head(std::int64_t n, std::int64_t v_head, GatedDeltaSequence& result) const {
    const std::int64_t head = in_.modulo ? v_head % heads_ : v_head / (v_heads_ / heads_);
    const std::int64_t slot = !in_.state ? -1 : in_.state_indices ? in_.state_indices->integer({n}) : n;
    const std::int64_t steps_slot = in_.steps ? in_.step_indices->integer({n}) : -1;
    std::vector<Real> s(head_states_, Real(0));
    for (std::int64_t i = 0; i < head_states_ && slot >= 0; ++i) {
      s[i] = Real(stored(*in_.state, slot, v_head, i / dim_v_, i % dim_v_));
    }
    for (std::int64_t t = 0; t < result.count; ++t) {
      const std::int64_t row = result.row, token = result.first + t;
      if (t > 0 && in_.parents && steps_slot >= 0) {
        const std::vector<double>& parent = result.steps[in_.parents->integer({n, t})];
        for (std::int64_t i = 0; i < head_states_; ++i) {
          s[i] = Real(round_to(parent[v_head * head_states_ + i], in_.steps->type));
        }
      }
      const std::vector<Real> k = row_of(in_.k, row, token, head);
      std::vector<Real> q = row_of(in_.q, row, token, head);
      for (Real& value : q) value *= Real(in_.scale);
      decay(s, row, token, v_head);
      for (std::int64_t c = 0; c < dim_v_; ++c) {
        Real read = 0, out = 0;
        for (std::int64_t key = 0; key < dim_k_; ++key) read += s[key * dim_v_ + c] * k[key];
        const Real u = rate_of(row, token, v_head, c) * (Real(in_.v.at({row, token, v_head, c})) - read);
        for (std::int64_t key = 0; key < dim_k_; ++key) {
          s[key * dim_v_ + c] += k[key] * u;
          out += s[key * dim_v_ + c] * q[key];
        }
        result.out[(t * v_heads_ + v_head) * dim_v_ + c] = out;
      }
      std::copy(s.begin(), s.end(), result.steps[t].begin() + v_head * head_states_);
    }
    std::copy(s.begin(), s.end(), result.state.begin() + v_head * head_states_);
    std::copy(s.begin(), s.end(), result.final_state.begin() + v_head * head_states_);
  }

  const GatedDeltaInputs& in_;
  std::int64_t heads_, v_heads_, dim_k_, dim_v_, head_states_;
};

}  // namespace

std::vector<GatedDeltaSequence> gated_delta(const GatedDeltaInputs& inputs) { return Recurrence<double>(inputs).run(); }

std::vector<GatedDeltaSequence> gated_delta_plain(const GatedDeltaInputs& inputs, Type out, Type state,
                                                  Type final_state) {
  std::vector<GatedDeltaSequence> all = Recurrence<float>(inputs).run();
  for (GatedDeltaSequence& s : all) {
    for (double& x : s.out) x = round_to(x, out);
    for (double& x : s.state) x = round_to(x, state);
    for (double& x : s.final_state) x = round_to(x, final_state);
    for (std::vector<double>& step : s.steps) {
      for (double& x : step) x = round_to(x, inputs.steps ? inputs.steps->type : state);
    }
  }
  return all;
}

}  // namespace reference
