#include "tests/ops/gated_delta/chunk_call.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/ops/gated_delta/call.h"
#include "tests/ops/written.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

using reference::Type;

constexpr std::int64_t kSlots = 7, kChunk = 64;

std::int64_t count(const DeltaChunkCase& c) { return static_cast<std::int64_t>(c.lens.size()); }
std::int64_t total(const DeltaChunkCase& c) { return std::accumulate(c.lens.begin(), c.lens.end(), std::int64_t{0}); }
std::int64_t chunks_of(std::int64_t length) { return (length + kChunk - 1) / kChunk; }

// (rows, tokens, heads, dim) as a slice of tokens that have more elements.
Tensor token_tensor(const DeltaChunkCase& c, Type type, std::int64_t heads, std::int64_t dim) {
  const std::int64_t rows = c.varlen ? 1 : count(c);
  const std::int64_t tokens = c.varlen ? total(c) + 1 : c.lens[0];  // one token that no sequence has
  const std::int64_t stride = heads * dim + (c.packed ? 24 : 0);
  return Tensor(type, {rows, tokens, heads, dim}, {tokens * stride, stride, dim, 1}, c.packed ? 3 : 0);
}

// States after the axes `outer`; slots lie apart where they are packed.
Tensor state_tensor(const DeltaChunkCase& c, Type type, Shape outer) {
  outer.push_back(c.v_heads);
  outer.push_back(c.key_major ? c.dim_k : c.dim_v);
  outer.push_back(c.key_major ? c.dim_v : c.dim_k);
  Shape strides = dense_strides(outer);
  strides[0] += c.packed ? 64 : 0;
  return Tensor(type, outer, strides, c.packed ? 1 : 0);
}

Tensor index_tensor(const DeltaChunkCase& c, const std::vector<std::int64_t>& values) {
  Tensor tensor(c.index64 ? Type::kI64 : Type::kI32, {static_cast<std::int64_t>(values.size())});
  for (std::size_t i = 0; i < values.size(); ++i) {
    tensor.set({static_cast<std::int64_t>(i)}, static_cast<double>(values[i]));
  }
  return tensor;
}

double log_gate(LogGates kind, Random& random) {
  const std::int64_t which = random.below(8);
  switch (kind) {
    case LogGates::kExtreme: return which == 0 ? -1e6 : which == 1 ? -300.0 : which == 2 ? -20.0 : -1e-3;
    case LogGates::kSlow: return -1e-6;
    case LogGates::kInfinite: return which == 0 ? -std::numeric_limits<double>::infinity() : -0.1;
    case LogGates::kGrowing: return 0.02 * random.normal();
    default: return -0.6 * random.uniform();
  }
}

double gate_input(LogGates kind, std::int64_t v_head, Random& random) {
  constexpr double kExtreme[] = {80, -80, -17};
  return kind == LogGates::kExtreme ? kExtreme[v_head < 3 ? v_head : random.below(3)] : random.normal();
}

double rate_logit(LogGates kind, Random& random) {
  return kind == LogGates::kExtreme ? 100.0 * static_cast<double>(random.below(3) - 1) : 3 * random.normal();
}

}  // namespace

DeltaChunkCall::DeltaChunkCall(const DeltaChunkCase& c)
    : c_(c),
      tokens_(c.varlen ? total(c) : c.lens[0]),
      q_(token_tensor(c, c.type, c.heads, c.dim_k)),
      k_(token_tensor(c, c.type, c.heads, c.dim_k)),
      v_(token_tensor(c, c.type, c.v_heads, c.dim_v)),
      g_(token_tensor(c, c.gates, c.v_heads, 1)),
      beta_(token_tensor(c, c.beta, c.v_heads, 1)),
      out_(token_tensor(c, c.type, c.v_heads, c.dim_v)) {
  offsets_.push_back(0);
  for (std::int64_t length : c.lens) offsets_.push_back(offsets_.back() + length);
  if (c.a_log) a_log_.emplace(c.a_log_type, Shape{c.v_heads});
  if (c.dt_bias) dt_bias_.emplace(Type::kBF16, Shape{c.v_heads, 1});
  if (!c.slots.empty()) {
    state_.emplace(state_tensor(c, c.state, {kSlots}));
    if (!c.identity) state_indices_ = index_tensor(c, c.slots);
  }
  if (c.finals) final_states_.emplace(state_tensor(c, c.final_type, {count(c)}));
  if (c.chunks) {
    std::int64_t chunks = chunks_of(c.lens[0]);
    if (c.varlen) {
      chunks = 1;  // and one that no sequence has
      for (std::int64_t length : c.lens) chunks += chunks_of(length);
    }
    chunk_states_.emplace(state_tensor(c, c.type, {c.varlen ? 1 : count(c), chunks}));
  }
  if (c.varlen) cu_seqlens_ = index_tensor(c, offsets_);
  fill();
  for (Tensor* tensor : {&q_, &k_, &v_, &g_, &beta_, &out_}) tensor->upload();
  for (std::optional<Tensor>* tensor :
       {&a_log_, &dt_bias_, &state_, &state_indices_, &cu_seqlens_, &final_states_, &chunk_states_}) {
    if (*tensor) (*tensor)->upload();
  }
}

void DeltaChunkCall::fill() {
  Random random(static_cast<std::uint64_t>(c_.dim_k * 1000 + c_.dim_v + 7 * total(c_) + 13 * c_.v_heads));
  const double k_size = c_.l2norm ? 1.0 : 1.0 / std::sqrt(static_cast<double>(c_.dim_k));
  const double sizes[] = {c_.size, c_.size * k_size, 1.0};
  Tensor* const inputs[] = {&q_, &k_, &v_};
  for (int i = 0; i < 3; ++i) {
    inputs[i]->for_each([&](const Shape& at) {
      if (at[1] < tokens_) inputs[i]->set(at, sizes[i] * random.normal());
    });
  }
  g_.for_each([&](const Shape& at) {
    if (at[1] < tokens_) g_.set(at, c_.a_log ? gate_input(c_.gating, at[2], random) : log_gate(c_.gating, random));
  });
  beta_.for_each([&](const Shape& at) {
    if (at[1] < tokens_) beta_.set(at, c_.sigmoid ? rate_logit(c_.gating, random) : random.uniform());
  });
  if (a_log_) {
    const bool extreme = c_.gating == LogGates::kExtreme;
    a_log_->for_each([&](const Shape& at) { a_log_->set(at, extreme ? 10 : std::log(0.05 + random.uniform())); });
  }
  if (dt_bias_) dt_bias_->for_each([&](const Shape& at) { dt_bias_->set(at, 0.5 * random.normal()); });
  // Slots that no sequence names hold NaN.
  if (state_) {
    state_->for_each([&](const Shape& at) {
      const bool named =
          c_.identity ? at[0] < count(c_) : std::find(c_.slots.begin(), c_.slots.end(), at[0]) != c_.slots.end();
      if (named) state_->set(at, random.normal());
    });
  }
}

flashport::GatedDeltaChunkArgs DeltaChunkCall::args() const {
  flashport::GatedDeltaChunkArgs a;
  a.q = q_.view();
  a.k = k_.view();
  a.v = v_.view();
  a.g = g_.view();
  a.beta = beta_.view();
  a.g.rank = a.beta.rank = 3;
  const auto give = [](std::optional<flashport::TensorView>& to, const std::optional<Tensor>& from) {
    if (from) to = from->view();
  };
  give(a.a_log, a_log_);
  give(a.dt_bias, dt_bias_);
  give(a.state, state_);
  give(a.state_indices, state_indices_);
  give(a.final_states, final_states_);
  give(a.chunk_states, chunk_states_);
  give(a.cu_seqlens, cu_seqlens_);
  a.beta_sigmoid = c_.sigmoid;
  a.allow_neg_eigval = c_.neg_eigval;
  a.state_layout = c_.key_major ? flashport::StateLayout::kKV : flashport::StateLayout::kVK;
  a.update_state = c_.update;
  a.scale = c_.scale;
  a.use_qk_l2norm = c_.l2norm;
  a.head_map = c_.modulo ? flashport::HeadMap::kModulo : flashport::HeadMap::kConsecutive;
  a.out = out_.view();
  return a;
}

reference::GatedDeltaChunkInputs DeltaChunkCall::inputs() const {
  reference::GatedDeltaChunkInputs in;
  in.q = q_.array();
  in.k = k_.array();
  in.v = v_.array();
  in.g = g_.array();
  in.beta = beta_.array();
  for (reference::Array* gates : {&in.g, &in.beta}) {
    gates->shape.pop_back();
    gates->strides.pop_back();
  }
  const auto give = [](std::optional<reference::Array>& to, const std::optional<Tensor>& from) {
    if (from) to = from->array();
  };
  give(in.a_log, a_log_);
  give(in.dt_bias, dt_bias_);
  if (in.dt_bias) in.dt_bias->shape.pop_back();
  give(in.state, state_);
  give(in.state_indices, state_indices_);
  give(in.cu_seqlens, cu_seqlens_);
  in.key_major = c_.key_major;
  in.l2norm = c_.l2norm;
  in.modulo = c_.modulo;
  in.beta_sigmoid = c_.sigmoid;
  in.beta_factor = c_.neg_eigval ? 2 : 1;
  in.scale = c_.scale.value_or(1 / std::sqrt(static_cast<double>(c_.dim_k)));
  return in;
}

void DeltaChunkCall::run(const flashport::GatedDeltaChunkArgs& args) {
  flashport::gated_delta_chunk(args);
  download();
}

void DeltaChunkCall::download() {
  out_.download();
  for (std::optional<Tensor>* tensor : {&state_, &final_states_, &chunk_states_}) {
    if (*tensor) (*tensor)->download();
  }
}

void DeltaChunkCall::check(const std::function<void()>& calls) {
  const std::vector<reference::GatedDeltaChunkSequence> exact = reference::gated_delta_chunk(inputs());
  const std::vector<reference::GatedDeltaChunkSequence> plain = reference::gated_delta_chunk_plain(inputs(), c_.type);
  Written outs(out_);
  std::optional<Written> states, finals, chunks;
  if (state_) states.emplace(*state_);
  if (final_states_) finals.emplace(*final_states_);
  if (chunk_states_) chunks.emplace(*chunk_states_);
  const auto expect_state = [&](Written& written, const Shape& outer, const std::vector<double>& wanted,
                                std::vector<double> usual, Type type) {
    for (double& x : usual) x = reference::round_to(x, type);
    written.expect_state(outer, c_.key_major, c_.v_heads, c_.dim_k, c_.dim_v, wanted, usual);
  };
  std::int64_t chunk = 0;
  for (std::size_t n = 0; n < exact.size(); ++n) {
    const reference::GatedDeltaChunkSequence& e = exact[n];
    const auto sequence = static_cast<std::int64_t>(n);
    std::size_t i = 0;
    for (std::int64_t t = 0; t < e.count; ++t) {
      for (std::int64_t head = 0; head < c_.v_heads; ++head) {
        for (std::int64_t column = 0; column < c_.dim_v; ++column, ++i) {
          outs.expect({e.row, e.first + t, head, column}, e.out[i], plain[n].out[i]);
        }
      }
    }
    if (!c_.varlen) chunk = 0;
    for (std::size_t own = 0; own < e.entering.size() && chunks; ++own, ++chunk) {
      expect_state(*chunks, {e.row, chunk}, e.entering[own], plain[n].entering[own], c_.type);
    }
    const std::int64_t slot = !state_ ? -1 : c_.identity ? sequence : c_.slots[n];
    if (slot >= 0 && e.count > 0 && c_.update) expect_state(*states, {slot}, e.state, plain[n].state, c_.state);
    if (finals) expect_state(*finals, {sequence}, e.state, plain[n].state, c_.final_type);
  }
  calls();
  download();
  outs.judge("out");
  if (states) states->judge("state");
  if (finals) finals->judge("final_states");
  if (chunks) chunks->judge("chunk_states");
}

std::vector<unsigned char> DeltaChunkCall::out_of(std::int64_t sequence) {
  const std::vector<unsigned char> all = out_.element_bytes();
  const std::size_t token = all.size() / static_cast<std::size_t>(out_.shape()[0] * out_.shape()[1]);
  return {all.begin() + offsets_[sequence] * token, all.begin() + offsets_[sequence + 1] * token};
}

std::vector<unsigned char> DeltaChunkCall::state_of(std::int64_t slot) {
  const std::vector<unsigned char> all = state_->element_bytes();
  const std::size_t one = all.size() / kSlots;
  return {all.begin() + slot * one, all.begin() + (slot + 1) * one};
}

flashport::GatedDeltaChunkArgs part_of(flashport::GatedDeltaChunkArgs a, std::int64_t first, std::int64_t count) {
  for (flashport::TensorView* view : {&a.q, &a.k, &a.v, &a.g, &a.beta, &a.out}) *view = tokens_of(*view, first, count);
  return a;
}

}  // namespace flashport_test
