// The partial result of one softmax over some keys, per query row: m = max of the base-2 logits, l = sum of
// exp2(logit - m), o = sum of exp2(logit - m) * v, not yet divided by l. merge() joins the results of two disjoint key
// sets; it is the only place where partial results meet (leaves, nodes, splits, states), and every operation in it is
// explicit, so that equal trees give equal bits on every path.
#pragma once

#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

struct MergeWeights {
  float m, a, b;
};

// Weights of two partial results with maxima m_a and m_b. -inf on both sides gives weights 0, never NaN.
FLASHPORT_DEVICE MergeWeights merge_weights(float m_a, float m_b) {
  const float m = maximum(m_a, m_b);
  const float finite = m == -kInfinity ? 0.0f : m;
  return {m, exp2_approx(m_a - finite), exp2_approx(m_b - finite)};
}

FLASHPORT_DEVICE float merge_value(float acc, float a, float x, float b) { return fma_rn(x, b, mul_rn(acc, a)); }

template <class Tiles>
struct SoftmaxState {
  typename Tiles::Rows m, l;
  typename Tiles::Out o;
};

// Joins the per-row values; a and b become the weights of the two outputs.
template <class Tiles>
FLASHPORT_DEVICE void merge_rows(const Tiles& tiles, typename Tiles::Rows& m, typename Tiles::Rows& l,
                                 const typename Tiles::Rows& x_m, const typename Tiles::Rows& x_l,
                                 typename Tiles::Rows& a, typename Tiles::Rows& b) {
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    const MergeWeights w = merge_weights(m[slot], x_m[slot]);
    m[slot] = w.m;
    l[slot] = merge_value(l[slot], w.a, x_l[slot], w.b);
    a[slot] = w.a;
    b[slot] = w.b;
  }
}

// acc = acc joined with x
template <class Tiles>
FLASHPORT_DEVICE void merge(const Tiles& tiles, SoftmaxState<Tiles>& acc, const SoftmaxState<Tiles>& x) {
  typename Tiles::Rows a, b;
  merge_rows(tiles, acc.m, acc.l, x.m, x.l, a, b);
  tiles.for_each_pair(acc.o, x.o,
                      [&](float& to, float from, int slot) { to = merge_value(to, a[slot], from, b[slot]); });
}

// A state in memory: m [live rows], l [live rows], o [live rows, DV].
template <class Tiles>
FLASHPORT_DEVICE void store_state(const Tiles& tiles, float* to, const SoftmaxState<Tiles>& state) {
  tiles.store_rows(state.m, to);
  tiles.store_rows(state.l, to + tiles.live_rows());
  tiles.store_tile(state.o, to + 2 * tiles.live_rows());
}
template <class Tiles>
FLASHPORT_DEVICE void load_state(const Tiles& tiles, const float* from, SoftmaxState<Tiles>& state) {
  tiles.load_rows(state.m, from);
  tiles.load_rows(state.l, from + tiles.live_rows());
  tiles.for_each_stored(state.o, from + 2 * tiles.live_rows(), [](float& x, float stored, int) { x = stored; });
}

// acc = acc joined with the state in memory: what merge() does, without a second output tile in registers.
template <class Tiles>
FLASHPORT_DEVICE void merge_stored(const Tiles& tiles, SoftmaxState<Tiles>& acc, const float* stored) {
  typename Tiles::Rows m, l, a, b;
  tiles.load_rows(m, stored);
  tiles.load_rows(l, stored + tiles.live_rows());
  merge_rows(tiles, acc.m, acc.l, m, l, a, b);
  tiles.for_each_stored(acc.o, stored + 2 * tiles.live_rows(), [&](float& x, float other, int slot) {
    x = merge_value(x, a[slot], other, b[slot]);
  });
}

// x = the state in memory joined with x, in this order.
template <class Tiles>
FLASHPORT_DEVICE void merge_onto_stored(const Tiles& tiles, const float* stored, SoftmaxState<Tiles>& x) {
  typename Tiles::Rows m, l, a, b;
  tiles.load_rows(m, stored);
  tiles.load_rows(l, stored + tiles.live_rows());
  merge_rows(tiles, m, l, x.m, x.l, a, b);
  x.m = m;
  x.l = l;
  tiles.for_each_stored(x.o, stored + 2 * tiles.live_rows(), [&](float& value, float other, int slot) {
    value = merge_value(other, a[slot], value, b[slot]);
  });
}

}  // namespace flashport::FLASHPORT_TARGET
