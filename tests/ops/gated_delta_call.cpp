#include "tests/ops/gated_delta_call.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/support/compare.h"
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

GatedDeltaCall::GatedDeltaCall(const GatedDeltaCase& c)
    : c_(c),
      rows_(c.varlen ? 1 : static_cast<std::int64_t>(c.lens.size())),
      tokens_(c.varlen ? total(c) : c.lens[0]),
      q_(token_tensor(c, c.type, c.heads, c.dim_k)),
      k_(token_tensor(c, c.type, c.heads, c.dim_k)),
      v_(token_tensor(c, c.type, c.v_heads, c.dim_v)),
      a_(token_tensor(c, c.gates, c.v_heads, c.kda != 0 ? c.dim_k : 1)),
      b_(token_tensor(c, c.gates, c.v_heads, 1)),
      a_log_(Type::kF32, {c.v_heads}),
      dt_bias_(c.packed ? Type::kBF16 : Type::kF32, {c.v_heads, c.kda != 0 ? c.dim_k : 1}),
      out_(token_tensor(c, c.type, c.v_heads, c.dim_v)) {
  offsets_.push_back(0);
  for (std::int64_t length : c.lens) offsets_.push_back(offsets_.back() + length);
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

void GatedDeltaCall::fill() {
  Random random(static_cast<std::uint64_t>(c_.dim_k * 1000 + c_.dim_v + 7 * total(c_) + 13 * c_.v_heads));
  const double k_size = c_.l2norm ? 1.0 : 1.0 / std::sqrt(static_cast<double>(c_.dim_k));
  const double sizes[] = {c_.size, c_.size * k_size, 1.0};
  const bool extreme = c_.gating == Gating::kExtreme;
  Tensor* const inputs[] = {&q_, &k_, &v_};
  for (int i = 0; i < 3; ++i) {
    inputs[i]->for_each([&](const Shape& at) {
      if (at[1] < tokens_) inputs[i]->set(at, sizes[i] * random.normal());
    });
  }
  a_.for_each([&](const Shape& at) {
    if (at[1] >= tokens_) return;
    const double sign = random.below(2) == 0 ? 80.0 : -80.0;
    a_.set(at, random.normal() + (extreme ? sign : c_.gating == Gating::kSlow ? -16.0 : 0.0));
  });
  b_.for_each([&](const Shape& at) {
    if (at[1] >= tokens_) return;
    const std::int64_t kind = random.below(3);
    b_.set(at, extreme && kind > 0 ? (kind == 1 ? 100.0 : -100.0) : random.normal());
  });
  a_log_.for_each(
      [&](const Shape& at) { a_log_.set(at, c_.gating == Gating::kUsual ? std::log(0.05 + random.uniform()) : 10.0); });
  dt_bias_.for_each([&](const Shape& at) { dt_bias_.set(at, 0.5 * random.normal()); });
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
  for (std::optional<Tensor>* tensor : {&state_, &state_indices_, &steps_, &step_indices_, &parents_, &cu_seqlens_}) {
    if (*tensor) (*tensor)->upload();
  }
}

flashport::GatedDeltaUpdateArgs GatedDeltaCall::args() const {
  flashport::GatedDeltaUpdateArgs a;
  a.q = q_.view();
  a.k = k_.view();
  a.v = v_.view();
  a.a = joined(a_.view(), c_.kda != 1, c_.joined_rows);
  a.b = joined(b_.view(), true, c_.joined_rows);
  if (c_.kda == 0) a.a.strides[a.a.rank - 1] = a_.strides()[2];
  a.b.strides[a.b.rank - 1] = b_.strides()[2];
  a.a_log = a_log_.view();
  a.dt_bias = dt_bias_.view();
  const auto give = [](std::optional<flashport::TensorView>& to, const std::optional<Tensor>& from) {
    if (from) to = from->view();
  };
  give(a.state, state_);
  give(a.state_indices, state_indices_);
  give(a.intermediate_states, steps_);
  give(a.intermediate_indices, step_indices_);
  give(a.parent_tokens, parents_);
  give(a.cu_seqlens, cu_seqlens_);
  a.state_layout = c_.key_major ? flashport::StateLayout::kKV : flashport::StateLayout::kVK;
  a.update_state = c_.update;
  a.scale = c_.scale;
  a.lower_bound = c_.lower_bound;
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
  in.a = a_.array();
  in.b = b_.array();
  in.a_log = a_log_.array();
  in.dt_bias = dt_bias_.array();
  in.b.shape.pop_back();
  in.b.strides.pop_back();
  const auto give = [](std::optional<reference::Array>& to, const std::optional<Tensor>& from) {
    if (from) to = from->array();
  };
  give(in.state, state_);
  give(in.state_indices, state_indices_);
  give(in.steps, steps_);
  give(in.step_indices, step_indices_);
  give(in.parents, parents_);
  give(in.cu_seqlens, cu_seqlens_);
  in.key_major = c_.key_major;
  in.per_key = c_.kda != 0;
  in.l2norm = c_.l2norm;
  in.modulo = c_.modulo;
  in.scale = c_.scale.value_or(1 / std::sqrt(static_cast<double>(c_.dim_k)));
  in.lower_bound = c_.lower_bound;
  return in;
}

void GatedDeltaCall::run(const flashport::GatedDeltaUpdateArgs& args) {
  flashport::gated_delta_update(args);
  out_.download();
  if (state_) state_->download();
  if (steps_) steps_->download();
}

void GatedDeltaCall::check() {
  const std::vector<reference::GatedDeltaSequence> exact = reference::gated_delta(inputs());
  const std::vector<reference::GatedDeltaSequence> plain = reference::gated_delta_plain(inputs(), c_.type, c_.state);
  // What must keep its bits is what is here now.
  std::vector<unsigned char> state_before, steps_before;
  if (state_) state_before = state_->element_bytes();
  if (steps_) steps_before = steps_->element_bytes();
  const std::vector<unsigned char> out_before = out_.element_bytes();
  run();

  // The elements that the call has to write: index, exact, plain.
  struct Expected {
    std::vector<double> got, exact, plain;
    std::vector<bool> written;
  };
  const auto place_of = [](const Tensor& tensor, const Shape& at) {
    std::int64_t place = 0;
    for (std::size_t axis = 0; axis < at.size(); ++axis) place = place * tensor.shape()[axis] + at[axis];
    return static_cast<std::size_t>(place);
  };
  const auto expect = [&](Expected& e, Tensor& tensor, const Shape& at, double wanted, double usual) {
    e.written.resize(static_cast<std::size_t>(tensor.numel()));
    e.written[place_of(tensor, at)] = true;
    e.got.push_back(tensor.get(at));
    e.exact.push_back(wanted);
    e.plain.push_back(usual);
  };
  const auto expect_state = [&](Expected& e, Tensor& tensor, Shape outer, const std::vector<double>& wanted,
                                const std::vector<double>& usual) {
    std::size_t i = 0;
    for (std::int64_t head = 0; head < c_.v_heads; ++head) {
      for (std::int64_t key = 0; key < c_.dim_k; ++key) {
        for (std::int64_t column = 0; column < c_.dim_v; ++column, ++i) {
          Shape at = outer;
          at.insert(at.end(), {head, c_.key_major ? key : column, c_.key_major ? column : key});
          expect(e, tensor, at, wanted[i], usual[i]);
        }
      }
    }
  };
  Expected outs, states, steps;
  for (std::size_t n = 0; n < exact.size(); ++n) {
    const reference::GatedDeltaSequence& e = exact[n];
    std::size_t i = 0;
    for (std::int64_t t = 0; t < e.count; ++t) {
      for (std::int64_t head = 0; head < c_.v_heads; ++head) {
        for (std::int64_t column = 0; column < c_.dim_v; ++column, ++i) {
          expect(outs, out_, {e.row, e.first + t, head, column}, e.out[i], plain[n].out[i]);
        }
      }
      if (steps_ && c_.steps[n] >= 0) {
        expect_state(steps, *steps_, {c_.steps[n], t}, e.steps[t], plain[n].steps[t]);
      }
    }
    const std::int64_t slot = !state_ ? -1 : c_.identity ? static_cast<std::int64_t>(n) : c_.slots[n];
    if (slot >= 0 && e.count > 0 && c_.update) expect_state(states, *state_, {slot}, e.state, plain[n].state);
  }
  const auto judge = [&](const char* what, Expected& e, Tensor& tensor, const std::vector<unsigned char>& before) {
    EXPECT_EQ(tensor.damage(), "") << what;
    const Comparison compared = compare(e.got, e.exact, e.plain, fp32_floor(e.exact));
    EXPECT_EQ(compared.failure, "") << what;
    e.written.resize(static_cast<std::size_t>(tensor.numel()));
    const std::vector<unsigned char> now = tensor.element_bytes();
    const std::size_t bytes = now.empty() ? 1 : now.size() / e.written.size();
    for (std::size_t i = 0; i < e.written.size(); ++i) {
      if (e.written[i]) continue;
      ASSERT_TRUE(std::equal(now.begin() + i * bytes, now.begin() + (i + 1) * bytes, before.begin() + i * bytes))
          << what << ": element " << i << " was written";
    }
  };
  judge("out", outs, out_, out_before);
  if (state_) judge("state", states, *state_, state_before);
  if (steps_) judge("intermediate_states", steps, *steps_, steps_before);
}

}  // namespace flashport_test
