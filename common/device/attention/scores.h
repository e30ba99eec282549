// From products q.k to what the softmax takes, and back to an output: scale or softcap, ALiBi, bias, mask; lse and the
// sink. Logits are in base 2.
#pragma once

#include "common/device/attention/config.h"
#include "common/device/attention/philox.h"
#include "common/device/attention/work.h"
#include "common/device/core/scalar_access.h"
#include "common/device/merge/online_softmax.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The factor that is left to the exponential: m and scores are kept without it.
template <ScoreForm kForm>
FLASHPORT_DEVICE float exponent_scale(const AttentionParams& p) {
  return kForm == ScoreForm::kPlain ? p.score_scale : 1.0f;
}

// Of tile number `tile`: softcap, ALiBi and bias. The keys that no query sees are hidden later.
template <class Tiles>
FLASHPORT_DEVICE void modify_scores(const Tiles& tiles, const AttentionParams& p, const WorkTile& work, int tile,
                                    typename Tiles::Scores& scores) {
  const float scale = p.score_scale, cap = p.cap_scale;
  if (cap != 0.0f) {
    tiles.for_each(scores, [&](float& x, int, int) { x = cap * tanh_full(x * scale); });
  } else {
    tiles.for_each(scores, [&](float& x, int, int) { x *= scale; });
  }
  const int first_key = tile * Tiles::kKeys + tiles.first_key();
  if (p.alibi_slopes != nullptr) {
    const float slope = p.alibi_slopes[work.seq * p.alibi_stride_seq + work.head] * kLog2e;
    const int shift = work.kv_len - work.q_len - first_key;
    tiles.for_each(scores, [&](float& x, int slot, int offset) {
      const int distance = tiles.row_of(slot) + shift - offset;
      x -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    });
  }
  if (p.bias.data != nullptr) {
    const std::int64_t from = work.seq * p.bias.stride_seq + work.head * p.bias.stride_head;
    tiles.for_each(scores, [&](float& x, int slot, int offset) {
      const int row = tiles.row_of(slot), key = first_key + offset;
      if (row >= work.q_len || key >= work.kv_len) return;
      x += kLog2e * load_as_float(p.bias.data, p.bias.dtype, from + row * p.bias.stride_row + key * p.bias.stride_key);
    });
  }
}

// Hides the keys of tile number `tile` that a query does not see.
template <class Tiles>
FLASHPORT_DEVICE void hide_keys(const Tiles& tiles, const AttentionParams& p, const WorkTile& work, int tile,
                                typename Tiles::Scores& scores) {
  const int first_key = tile * Tiles::kKeys + tiles.first_key();
  KeySpan spans[Tiles::kRowSlots];
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    const KeySpan span = visible_keys(p, work, tiles.row_of(slot));
    spans[slot] = {span.low - first_key, span.high - first_key};
  }
  tiles.for_each(scores, [&](float& x, int slot, int offset) {
    const KeySpan span = spans[slot];
    if (offset < span.low || offset >= span.high) x = -kInfinity;
  });
}

// Sets the dropped weights of tile number `tile` to 0. The row sums are of all weights.
template <class Tiles>
FLASHPORT_DEVICE void drop_weights(const Tiles& tiles, const AttentionParams& p, const WorkTile& work, int tile,
                                   typename Tiles::Scores& weights) {
  const DropoutKey key = dropout_key(p.dropout.rng_state);
  const auto head = static_cast<std::uint32_t>(work.seq) * static_cast<std::uint32_t>(p.num_q_heads) +
                    static_cast<std::uint32_t>(work.head);
  const std::uint32_t below = p.dropout.drop_below;
  // f(eight weights, slot, offset of the first)
  tiles.for_each_eight(weights, [&](const auto& eight, int slot, int offset) {
    const int first_key = tile * Tiles::kKeys + tiles.first_key() + offset;
    const Philox random = dropout_bits(key, head, tiles.row_of(slot), first_key);
    FLASHPORT_UNROLL(8)
    for (int i = 0; i < 8; ++i) {
      if (random.bits(i) < below) eight(i) = 0.0f;
    }
  });
}

// Writes lse, if `leads`, and returns the factor of the row's sums. A row that sees no key has factor 0, and its output
// is 0 even if the sums are NaN.
FLASHPORT_DEVICE float finish_row(const AttentionParams& p, const WorkTile& work, int row, float m, float l,
                                  bool leads) {
  float factor = p.dropout.rng_state != nullptr ? p.dropout.keep_scale : 1.0f;
  if (p.sinks != nullptr) {
    const merge::MergeWeights w = merge::merge_weights(m, p.sinks[work.head] * kLog2e);
    l = merge::merge_value(l, w.a, 1.0f, w.b);
    m = w.m;
    factor *= w.a;
  }
  if (leads && p.lse != nullptr && row < work.q_len) {
    const std::int64_t at = work.seq * p.lse_stride_seq + work.head * p.lse_stride_head +
                            (work.q_begin + row) * p.lse_stride_token;
    p.lse[at] = l == 0.0f ? -kInfinity : (m + log2_full(l)) * kLn2;
  }
  return l == 0.0f ? 0.0f : factor / l;
}

FLASHPORT_DEVICE std::int64_t output_offset(const AttentionParams& p, const WorkTile& work, int row) {
  return work.seq * p.out.stride_seq + (work.q_begin + row) * p.out.stride_token + work.head * p.out.stride_head;
}

}  // namespace flashport::FLASHPORT_TARGET::attention
