#include "tests/ops/gated_delta/call.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/ops/written.h"
#include "tests/support/expected_support.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

using reference::Type;

constexpr std::int64_t kSlots = 7, kStepSlots = 6, kSpareSteps = 2;

std::int64_t total(const GatedDeltaCase& c) { return std::accumulate(c.lens.begin(), c.lens.end(), std::int64_t{0}); }
std::int64_t longest(const GatedDeltaCase& c) { return *std::max_element(c.lens.begin(), c.lens.end()); }

// (rows, tokens, heads, dim) as a slice of tokens that are `spare` elements longer.
Tensor token_tensor(const GatedDeltaCase& c, Type type, std::int64_t heads, std::int64_t dim) {
  const std::int64_t rows = c.varlen ? 1 : static_cast<std::int64_t>(c.lens.size());
  const std::int64_t tokens = c.varlen ? total(c) + 1 : c.lens[0];  // one token that no sequence has
  const std::int64_t stride = heads * dim + (c.packed ? 24 : 0);
  return Tensor(type, {rows, tokens, heads, dim}, {tokens * stride, stride, dim, 1}, c.packed ? 3 : 0);
}

// Axes of a head's state.
Shape state_shape(const GatedDeltaCase& c, Shape outer) {
  outer.push_back(c.v_heads);
  outer.push_back(c.key_major ? c.dim_k : c.dim_v);
  outer.push_back(c.key_major ? c.dim_v : c.dim_k);
  return outer;
}

Tensor index_tensor(const GatedDeltaCase& c, const std::vector<std::int64_t>& values) {
  Tensor tensor(c.index64 ? Type::kI64 : Type::kI32, {static_cast<std::int64_t>(values.size())});
  for (std::size_t i = 0; i < values.size(); ++i) {
    tensor.set({static_cast<std::int64_t>(i)}, static_cast<double>(values[i]));
  }
  return tensor;
}

bool of_columns(RateInput rate) { return rate == RateInput::kColumnLogits || rate == RateInput::kColumnRates; }
bool is_made(GateInput gate) { return gate == GateInput::kMade || gate == GateInput::kWithoutBias; }

double log_gate(Gating gating, Random& random) {
  const std::int64_t which = random.below(8);
  switch (gating) {
    case Gating::kExtreme:
      return which == 0 ? -std::numeric_limits<double>::infinity() : which < 3 ? -300.0 * which : -1e-3;
    case Gating::kSlow: return -1e-6 * random.uniform();
    default: return 0.02 * random.normal() - 0.3 * random.uniform();
  }
}

// The same rows with the last two axes as one, or rows of all sequences as one axis.
flashport::TensorView joined(flashport::TensorView view, bool inner, bool rows) {
  if (inner) {
    --view.rank;
    view.shape[view.rank - 1] *= view.shape[view.rank];
    view.strides[view.rank - 1] = view.strides[view.rank];
  }
  if (rows) {
    --view.rank;
    view.shape[1] *= view.shape[0];
    for (int axis = 0; axis < view.rank; ++axis) {
      view.shape[axis] = view.shape[axis + 1];
      view.strides[axis] = view.strides[axis + 1];
    }
  }
  return view;
}

}  // namespace

flashport::Support update_support() {
  return flashport::supports(flashport::GatedDeltaQuery{.target = query_target()});
}

GatedDeltaCall::GatedDeltaCall(const GatedDeltaCase& c)
    : c_(c),
      rows_(c.varlen ? 1 : static_cast<std::int64_t>(c.lens.size())),
      tokens_(c.varlen ? total(c) : c.lens[0]),
      q_(token_tensor(c, c.type, c.heads, c.dim_k)),
      k_(token_tensor(c, c.type, c.heads, c.dim_k)),
      v_(token_tensor(c, c.type, c.v_heads, c.dim_v)),
      a_(token_tensor(c, c.gates, c.v_heads, c.kda != 0 ? c.dim_k : 1)),
      b_(token_tensor(c, c.gates, c.v_heads, of_columns(c.rate) ? c.dim_v : 1)),
      a_log_(c.a_log, {c.v_heads}),
      dt_bias_(c.packed ? Type::kBF16 : Type::kF32, {c.v_heads, c.kda != 0 ? c.dim_k : 1}),
      out_(token_tensor(c, c.type, c.v_heads, c.dim_v)) {
  offsets_.push_back(0);
  for (std::int64_t length : c.lens) offsets_.push_back(offsets_.back() + length);
  if (c.key_gates) key_gates_ = token_tensor(c, c.gates, c.v_heads, c.dim_k);
  if (c.column_gates) column_gates_ = token_tensor(c, c.gates, c.v_heads, c.dim_v);
  if (c.final_states) {
    Shape shape = state_shape(c, {static_cast<std::int64_t>(c.lens.size())});
    Shape strides = dense_strides(shape);
    strides[0] += c.packed ? 24 : 0;
    final_states_.emplace(*c.final_states, shape, strides, c.packed ? 1 : 0);
  }
  if (!c.slots.empty()) {
    Shape shape = state_shape(c, {kSlots});
    Shape strides = dense_strides(shape);
    strides[0] += c.packed ? 64 : 0;
    state_.emplace(c.state, shape, strides, c.packed ? 1 : 0);
    if (!c.identity) state_indices_ = index_tensor(c, c.slots);
  }
  if (!c.steps.empty()) {
    Shape shape = state_shape(c, {kStepSlots, longest(c) + kSpareSteps});
    Shape strides = dense_strides(shape);
    strides[0] += c.packed ? 8 : 0;
    steps_.emplace(c.steps_type, shape, strides, 0);
    step_indices_ = index_tensor(c, c.steps);
  }
  if (!c.parents.empty()) {
    const auto sequences = static_cast<std::int64_t>(c.lens.size()), width = longest(c);
    // Transposed, so that both strides count.
    parents_.emplace(c.index64 ? Type::kI64 : Type::kI32, Shape{sequences, width}, Shape{1, sequences});
    parents_->for_each([&](const Shape& at) {
      if (at[1] > 0) parents_->set(at, static_cast<double>(c.parents[static_cast<std::size_t>(at[1])]));
    });
  }
  if (c.varlen) cu_seqlens_ = index_tensor(c, offsets_);
  fill();
  upload();
}

bool GatedDeltaCall::is_padding(std::int64_t sequence) const {
  return c_.zero_padding && c_.slots[static_cast<std::size_t>(sequence)] < 0;
}

void GatedDeltaCall::fill() {
  Random random(static_cast<std::uint64_t>(c_.dim_k * 1000 + c_.dim_v + 7 * total(c_) + 13 * c_.v_heads));
  const double k_size = c_.l2norm ? 1.0 : 1.0 / std::sqrt(static_cast<double>(c_.dim_k));
  const double sizes[] = {c_.size, c_.size * k_size, 1.0};
  const bool extreme = c_.gating == Gating::kExtreme;
  Tensor* const inputs[] = {&q_, &k_, &v_};
  for (int i = 0; i < 3; ++i) {
    inputs[i]->for_each([&](const Shape& at) {
      if (at[1] < tokens_ && (c_.varlen || !is_padding(at[0]))) inputs[i]->set(at, sizes[i] * random.normal());
    });
  }
  a_.for_each([&](const Shape& at) {
    if (at[1] >= tokens_) return;
    if (c_.gate == GateInput::kLogarithm) return a_.set(at, log_gate(c_.gating, random));
    const double sign = random.below(2) == 0 ? 80.0 : -80.0;
    a_.set(at, random.normal() + (extreme ? sign : c_.gating == Gating::kSlow ? -16.0 : 0.0));
  });
  b_.for_each([&](const Shape& at) {
    if (at[1] >= tokens_) return;
    if (c_.rate == RateInput::kRate || c_.rate == RateInput::kColumnRates) return b_.set(at, 2 * random.uniform());
    const std::int64_t kind = random.below(3);
    b_.set(at, extreme && kind > 0 ? (kind == 1 ? 100.0 : -100.0) : random.normal());
  });
  a_log_.for_each(
      [&](const Shape& at) { a_log_.set(at, c_.gating == Gating::kUsual ? std::log(0.05 + random.uniform()) : 10.0); });
  dt_bias_.for_each([&](const Shape& at) { dt_bias_.set(at, 0.5 * random.normal()); });
  for (std::optional<Tensor>* gates : {&key_gates_, &column_gates_}) {
    if (!*gates) continue;
    (*gates)->for_each([&](const Shape& at) {
      if (at[1] < tokens_) (*gates)->set(at, log_gate(c_.gating, random));
    });
  }
  // Slots that no sequence names hold NaN.
  if (state_) {
    state_->for_each([&](const Shape& at) {
      const bool named = c_.identity ? at[0] < static_cast<std::int64_t>(c_.lens.size())
                                     : std::find(c_.slots.begin(), c_.slots.end(), at[0]) != c_.slots.end();
      if (named) state_->set(at, random.normal());
    });
  }
}

void GatedDeltaCall::upload() {
  for (Tensor* tensor : {&q_, &k_, &v_, &a_, &b_, &a_log_, &dt_bias_, &out_}) tensor->upload();
  for (std::optional<Tensor>* tensor : {&key_gates_, &column_gates_, &final_states_, &state_, &state_indices_, &steps_,
                                        &step_indices_, &parents_, &cu_seqlens_}) {
    if (*tensor) (*tensor)->upload();
  }
}

flashport::GatedDeltaUpdateArgs GatedDeltaCall::args() const {
  flashport::GatedDeltaUpdateArgs a;
  a.q = q_.view();
  a.k = k_.view();
  a.v = v_.view();
  flashport::TensorView gate = joined(a_.view(), c_.kda != 1, c_.joined_rows);
  if (c_.kda == 0) gate.strides[gate.rank - 1] = a_.strides()[2];
  if (is_made(c_.gate)) {
    a.a = gate;
    a.a_log = a_log_.view();
    if (c_.gate == GateInput::kMade) a.dt_bias = dt_bias_.view();
  } else if (c_.gate == GateInput::kLogarithm) {
    a.g = gate;
  }
  flashport::TensorView rate = b_.view();
  if (!of_columns(c_.rate)) {
    rate = joined(rate, true, c_.joined_rows);
    rate.strides[rate.rank - 1] = b_.strides()[2];
  }
  if (c_.rate == RateInput::kRate || c_.rate == RateInput::kColumnRates) {
    a.beta = rate;
  } else if (c_.rate != RateInput::kNoRate) {
    a.b = rate;
  }
  a.allow_neg_eigval = c_.rate == RateInput::kTwice;
  const auto give = [](std::optional<flashport::TensorView>& to, const std::optional<Tensor>& from) {
    if (from) to = from->view();
  };
  give(a.gk, key_gates_);
  give(a.gv, column_gates_);
  give(a.final_states, final_states_);
  give(a.state, state_);
  give(a.state_indices, state_indices_);
  give(a.intermediate_states, steps_);
  give(a.intermediate_indices, step_indices_);
  give(a.parent_tokens, parents_);
  give(a.cu_seqlens, cu_seqlens_);
  a.state_layout = c_.key_major ? flashport::StateLayout::kKV : flashport::StateLayout::kVK;
  a.update_state = c_.update;
  a.zero_padding = c_.zero_padding;
  a.scale = c_.scale;
  a.lower_bound = c_.lower_bound;
  a.softplus_beta = c_.softplus_beta;
  a.softplus_threshold = c_.softplus_threshold;
  a.use_qk_l2norm = c_.l2norm;
  a.is_kda = c_.kda != 0;
  a.head_map = c_.modulo ? flashport::HeadMap::kModulo : flashport::HeadMap::kConsecutive;
  a.out = out_.view();
  return a;
}

reference::GatedDeltaInputs GatedDeltaCall::inputs() const {
  reference::GatedDeltaInputs in;
  in.q = q_.array();
  in.k = k_.array();
  in.v = v_.array();
  if (is_made(c_.gate)) {
    in.a = a_.array();
    in.a_log = a_log_.array();
    if (c_.gate == GateInput::kMade) in.dt_bias = dt_bias_.array();
  } else if (c_.gate == GateInput::kLogarithm) {
    in.g = a_.array();
  }
  if (c_.rate == RateInput::kRate || c_.rate == RateInput::kColumnRates) {
    in.beta = b_.array();
  } else if (c_.rate != RateInput::kNoRate) {
    in.b = b_.array();
  }
  in.allow_neg_eigval = c_.rate == RateInput::kTwice;
  const auto give = [](std::optional<reference::Array>& to, const std::optional<Tensor>& from) {
    if (from) to = from->array();
  };
  give(in.gk, key_gates_);
  give(in.gv, column_gates_);
  give(in.state, state_);
  give(in.state_indices, state_indices_);
  give(in.steps, steps_);
  give(in.step_indices, step_indices_);
  give(in.parents, parents_);
  give(in.cu_seqlens, cu_seqlens_);
  in.key_major = c_.key_major;
  in.l2norm = c_.l2norm;
  in.modulo = c_.modulo;
  in.scale = c_.scale.value_or(1 / std::sqrt(static_cast<double>(c_.dim_k)));
  in.lower_bound = c_.lower_bound;
  in.softplus_beta = c_.softplus_beta;
  in.softplus_threshold = c_.softplus_threshold;
  return in;
}

void GatedDeltaCall::run(const flashport::GatedDeltaUpdateArgs& args) {
  flashport::gated_delta_update(args);
  download();
}

void GatedDeltaCall::download() {
  out_.download();
  if (state_) state_->download();
  if (steps_) steps_->download();
  if (final_states_) final_states_->download();
}

void GatedDeltaCall::check(const std::function<void()>& calls) {
  const std::vector<reference::GatedDeltaSequence> exact = reference::gated_delta(inputs());
  const std::vector<reference::GatedDeltaSequence> plain =
      reference::gated_delta_plain(inputs(), c_.type, c_.state, c_.final_states.value_or(Type::kF32));
  Written outs(out_);
  std::optional<Written> states, steps, finals;
  if (state_) states.emplace(*state_);
  if (steps_) steps.emplace(*steps_);
  if (final_states_) finals.emplace(*final_states_);
  const auto expect_state = [&](Written& written, const Shape& outer, const std::vector<double>& wanted,
                                const std::vector<double>& usual) {
    written.expect_state(outer, c_.key_major, c_.v_heads, c_.dim_k, c_.dim_v, wanted, usual);
  };
  for (std::size_t n = 0; n < exact.size(); ++n) {
    const reference::GatedDeltaSequence& e = exact[n];
    std::size_t i = 0;
    for (std::int64_t t = 0; t < e.count; ++t) {
      for (std::int64_t head = 0; head < c_.v_heads; ++head) {
        for (std::int64_t column = 0; column < c_.dim_v; ++column, ++i) {
          const bool zero = is_padding(static_cast<std::int64_t>(n));
          outs.expect({e.row, e.first + t, head, column}, zero ? 0.0 : e.out[i], zero ? 0.0 : plain[n].out[i]);
        }
      }
      if (steps_ && c_.steps[n] >= 0) expect_state(*steps, {c_.steps[n], t}, e.steps[t], plain[n].steps[t]);
    }
    if (finals) expect_state(*finals, {static_cast<std::int64_t>(n)}, e.final_state, plain[n].final_state);
    const std::int64_t slot = !state_ ? -1 : c_.identity ? static_cast<std::int64_t>(n) : c_.slots[n];
    if (slot >= 0 && e.count > 0 && c_.update) expect_state(*states, {slot}, e.state, plain[n].state);
  }
  calls();
  download();
  outs.judge("out");
  if (states) states->judge("state");
  if (steps) steps->judge("intermediate_states");
  if (finals) finals->judge("final_states");
}

flashport::TensorView tokens_of(flashport::TensorView view, std::int64_t first, std::int64_t count) {
  view.data = static_cast<char*>(view.data) + first * view.strides[1] * flashport::element_size(view.dtype);
  view.shape[1] = count;
  return view;
}

flashport::GatedDeltaUpdateArgs part_of(flashport::GatedDeltaUpdateArgs a, std::int64_t first, std::int64_t count) {
  for (flashport::TensorView* view : {&a.q, &a.k, &a.v, &a.out}) *view = tokens_of(*view, first, count);
  for (std::optional<flashport::TensorView>* view : {&a.a, &a.b, &a.g, &a.gk, &a.gv, &a.beta}) {
    if (*view) *view = tokens_of(**view, first, count);
  }
  return a;
}

}  // namespace flashport_test
