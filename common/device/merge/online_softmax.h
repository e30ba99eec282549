// The partial result of one softmax over some keys, per query row: m = max of the base-2 logits, l = sum of
// exp2(logit - m), o = sum of exp2(logit - m) * v, not yet divided by l. The results of disjoint key sets are
// combined by merge_weights() and merge_value() alone. Every operation in them is explicit about its rounding, so that
// equal trees give equal bits on every path.
#pragma once

#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::merge {

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

// The state of no keys.
template <class Tiles>
FLASHPORT_DEVICE void clear(const Tiles& tiles, SoftmaxState<Tiles>& state) {
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    state.m[slot] = -kInfinity;
    state.l[slot] = 0.0f;
  }
  tiles.clear(state.o);
}

// acc = acc combined with x
template <class Tiles>
FLASHPORT_DEVICE void merge(const Tiles& tiles, SoftmaxState<Tiles>& acc, const SoftmaxState<Tiles>& x) {
  typename Tiles::Rows a, b;
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    const MergeWeights w = merge_weights(acc.m[slot], x.m[slot]);
    acc.m[slot] = w.m;
    acc.l[slot] = merge_value(acc.l[slot], w.a, x.l[slot], w.b);
    a[slot] = w.a;
    b[slot] = w.b;
  }
  tiles.for_each_pair(acc.o, x.o,
                      [&](float& to, float from, int slot) { to = merge_value(to, a[slot], from, b[slot]); });
}

// A state whose o the tiles keep elsewhere.
template <class Tiles>
struct KeptRows {
  typename Tiles::Rows m, l;
};
template <class Tiles>
FLASHPORT_DEVICE void keep(const Tiles& tiles, KeptRows<Tiles>& kept, SoftmaxState<Tiles>& x) {
  kept = {x.m, x.l};
  tiles.for_each_kept(x.o, [](float& to, float from, int) { to = from; });
}
// x = kept combined with x, as merge() does.
template <class Tiles>
FLASHPORT_DEVICE void merge_kept(const Tiles& tiles, const KeptRows<Tiles>& kept, SoftmaxState<Tiles>& x) {
  typename Tiles::Rows a, b;
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    const MergeWeights w = merge_weights(kept.m[slot], x.m[slot]);
    x.m[slot] = w.m;
    x.l[slot] = merge_value(kept.l[slot], w.a, x.l[slot], w.b);
    a[slot] = w.a;
    b[slot] = w.b;
  }
  tiles.for_each_kept(x.o, [&](float from, float& to, int slot) { to = merge_value(from, a[slot], to, b[slot]); });
}

}  // namespace flashport::FLASHPORT_TARGET::merge
