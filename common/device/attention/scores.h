// From products q.k to what the softmax takes, and back to an output: scale or softcap, ALiBi, bias, mask; lse and the
// sink. Logits are in base 2.
#pragma once

#include "common/device/attention/config.h"
#include "common/device/attention/philox.h"
#include "common/device/attention/work.h"
#include "common/device/core/scalar_access.h"
#include "common/device/merge/online_softmax.h"

namespace flashport::FLASHPORT_TARGET::attention {

// Whether scores become logits in place. Otherwise the exponential multiplies them by their positive scale, and m and
// the scores are kept without it. A kernel of softcaps alone keeps sigmoids: cap tanh(s) = 2 cap sigmoid(2 s) - cap.
template <ScoreForm kForm>
FLASHPORT_DEVICE bool makes_logits(const AttentionParams& p) {
  if constexpr (kForm != ScoreForm::kAny) return false;
  return p.cap_scale != 0.0f || p.score_scale <= 0.0f;
}
// What the products of stored queries and keys are multiplied by.
FLASHPORT_DEVICE float score_scale_of(const AttentionParams& p, const WorkTile& work) {
  return p.score_scale * head_scale(p, p.q_scale, work) * head_scale(p, p.k_scale, work);
}
template <ScoreForm kForm>
FLASHPORT_DEVICE float exponent_scale(const AttentionParams& p, float score_scale) {
  if constexpr (kForm == ScoreForm::kSoftcap) return 2.0f * p.cap_scale;
  return makes_logits<kForm>(p) ? 1.0f : score_scale;
}
// The logit, in base 2, of a row's largest score.
template <ScoreForm kForm>
FLASHPORT_DEVICE float largest_logit(const AttentionParams& p, float most, float scale) {
  if (most == -kInfinity) return -kInfinity;
  return kForm == ScoreForm::kSoftcap ? fma_rn(most, scale, -p.cap_scale) : most * scale;
}

template <ScoreForm kForm>
FLASHPORT_DEVICE bool drops(const AttentionParams& p) {
  if constexpr (kForm == ScoreForm::kDropout) return true;
  return has(kForm, ScoreForm::kDropout) && p.dropout.rng_state != nullptr;
}

// Tiles of kernels that draw ahead have a type Kept for what they have drawn.
template <class Tiles, bool kDrawsAhead>
struct KeptOf {
  struct Type {};
};
template <class Tiles>
struct KeptOf<Tiles, true> {
  using Type = typename Tiles::Kept;
};

// What the scores of a work tile are modified by, read once.
struct Modifiers {
  float score_scale;     // of score_scale_of()
  float log2e;           // what natural logits are multiplied by: log2(e), over what the exponential multiplies by
  float slope;           // ALiBi, times log2e
  DropoutKey dropout;    // if there is dropout
  std::uint32_t head;    // of all sequences'
  std::int64_t bias_at;  // offset of the head's bias
};
template <ScoreForm kForm>
FLASHPORT_DEVICE Modifiers modifiers_of(const AttentionParams& p, const WorkTile& work, float score_scale) {
  Modifiers modifiers = {};
  if constexpr (kForm == ScoreForm::kPlain) return modifiers;
  modifiers.score_scale = score_scale;
  modifiers.log2e = kLog2e / exponent_scale<kForm>(p, score_scale);
  if (has(kForm, ScoreForm::kAlibi) && p.alibi_slopes != nullptr) {
    modifiers.slope = p.alibi_slopes[work.seq * p.alibi_stride_seq + work.head] * modifiers.log2e;
  }
  if (drops<kForm>(p)) modifiers.dropout = dropout_key(p.dropout.rng_state);
  modifiers.head = static_cast<std::uint32_t>(work.seq) * static_cast<std::uint32_t>(p.num_q_heads) +
                   static_cast<std::uint32_t>(work.head);
  modifiers.bias_at = work.seq * p.bias.stride_seq + work.head * p.bias.stride_head;
  return modifiers;
}

// tanh with an absolute error of a few units in the last place of 1, which is what logits ask for.
FLASHPORT_DEVICE float tanh_approx(float x) {
  return 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(2.0f * kLog2e * x));
}

// Adds the bias of keys from first_key on, of which `keys` exist, to rows whose biases begin at data[row_at[slot]].
template <bool kUnitStride, class Tiles, class T>
FLASHPORT_DEVICE void add_bias(const Tiles& tiles, const T* data, const std::int64_t (&row_at)[Tiles::kRowSlots],
                               std::int64_t stride_key, int keys, float log2e, typename Tiles::Scores& scores) {
  tiles.for_each(scores, [&](float& x, int slot, int offset) {
    if (offset < keys) {
      x = fma_rn(log2e, to_float(data[row_at[slot] + (kUnitStride ? offset : offset * stride_key)]), x);
    }
  });
}

template <class Tiles>
FLASHPORT_DEVICE void add_biases(const Tiles& tiles, const AttentionParams& p, const WorkTile& work,
                                 const Modifiers& modifiers, int first_key, typename Tiles::Scores& scores) {
  std::int64_t row_at[Tiles::kRowSlots];
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    row_at[slot] = modifiers.bias_at + minimum(tiles.row_of(slot), work.q_len - 1) * p.bias.stride_row +
                   first_key * p.bias.stride_key;
  }
  const int keys = work.kv_len - first_key;
  with_type(const_cast<void*>(p.bias.data), p.bias.dtype, [&](const auto* data) {
    if (p.bias.stride_key == 1) {
      add_bias<true>(tiles, data, row_at, 1, keys, modifiers.log2e, scores);
    } else {
      add_bias<false>(tiles, data, row_at, p.bias.stride_key, keys, modifiers.log2e, scores);
    }
  });
}

// From the products of tile number `tile` to its scores: scale or softcap, ALiBi and bias. The keys that a query does
// not see are hidden later.
template <class Tiles>
FLASHPORT_DEVICE void modify_scores(const Tiles& tiles, const AttentionParams& p, const WorkTile& work,
                                    const Modifiers& modifiers, int tile, typename Tiles::Scores& scores) {
  constexpr ScoreForm kForm = Tiles::kForm;
  const int first_key = tile * Tiles::kKeys + tiles.first_key();
  const float scale = modifiers.score_scale, cap = p.cap_scale;
  if constexpr (kForm == ScoreForm::kSoftcap) return tiles.take_sigmoids(scores, 2.0f * kLog2e * scale);
  if (has(kForm, ScoreForm::kSoftcap) && cap != 0.0f) {
    tiles.for_each(scores, [&](float& x, int, int) { x = cap * tanh_approx(x * scale); });
  } else if (makes_logits<kForm>(p)) {
    tiles.for_each(scores, [&](float& x, int, int) { x *= scale; });
  }
  if constexpr (has(kForm, ScoreForm::kAlibi)) {
    if (p.alibi_slopes != nullptr) {
      float distance[Tiles::kRowSlots];
      for (int slot = 0; slot < tiles.row_slots(); ++slot) {
        distance[slot] = static_cast<float>(tiles.row_of(slot) + work.kv_len - work.q_len - first_key);
      }
      tiles.for_each(scores, [&](float& x, int slot, int offset) {
        x = fma_rn(-modifiers.slope, __builtin_fabsf(distance[slot] - static_cast<float>(offset)), x);
      });
    }
  }
  if constexpr (has(kForm, ScoreForm::kBias)) {
    if (p.bias.data != nullptr) add_biases(tiles, p, work, modifiers, first_key, scores);
  }
}

// Where in a tile there may be keys that a query does not see: before those that it sees, after them.
enum class Hidden { kNone, kAfter, kBeforeAndAfter };

// Hides the keys of tile number `tile` that a query does not see, behind `score`.
template <Hidden kHidden, class Tiles>
FLASHPORT_DEVICE void hide_keys(const Tiles& tiles, const AttentionParams& p, const WorkTile& work, int tile,
                                typename Tiles::Scores& scores, float score = -kInfinity) {
  const int first_key = tile * Tiles::kKeys + tiles.first_key();
  KeySpan spans[Tiles::kRowSlots];
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    const KeySpan span = visible_keys(p, work, tiles.row_of(slot));
    spans[slot] = {span.low - first_key, span.high - first_key};
  }
  tiles.for_each(scores, [&](float& x, int slot, int offset) {
    const KeySpan span = spans[slot];
    const bool before = kHidden == Hidden::kBeforeAndAfter && offset < span.low;
    if (before || offset >= span.high) x = score;
  });
}

// Sets the dropped weights of tile number `tile` to 0. The row sums are of all weights. Tiles visit those that share
// random bits together: 16, or 8 where a tile ends within 64 keys.
template <class Tiles>
FLASHPORT_DEVICE void drop_weights(const Tiles& tiles, const AttentionParams& p, const Modifiers& modifiers, int tile,
                                   typename Tiles::Scores& weights) {
  constexpr int kWords = Tiles::kDrawnTogether / 4;
  const DropLimit limit = drop_limit(p.dropout.drop_below);
  const int first_key = tile * Tiles::kKeys + tiles.first_key();
  // f(weights, slot, offset of the first)
  tiles.for_each_drawn(weights, [&](const auto& drawn, int slot, int offset) {
    const int first = first_key + offset;
    const Philox random = dropout_bits(modifiers.dropout, modifiers.head, tiles.row_of(slot), first);
    const bool second = kWords == 2 && first % kPhiloxKeys >= kPhiloxKeys / 2;
    FLASHPORT_UNROLL(4)
    for (int word = 0; word < kWords; ++word) {
      const std::uint32_t kept = kept_weights(second ? random.words[word + 4 - kWords] : random.words[word], limit);
      FLASHPORT_UNROLL(4)
      for (int i = 0; i < 4; ++i) {
        if ((kept & 0x80u << 8 * i) == 0) drawn(word * 4 + i) = 0.0f;
      }
    }
  });
}

// Whether a work tile's results are partial: those of one of several pieces.
FLASHPORT_DEVICE bool is_partial(const WorkTile& work) { return work.out_begin < 0; }
// The row of partial results, among those of all heads.
FLASHPORT_DEVICE std::int64_t partial_index(const AttentionParams& p, const WorkTile& work, int row) {
  return work.head * p.pieces.rows + row - (work.out_begin + 1);
}

// Writes lse, if `leads`, and returns the factor of the row's sums. A row that sees no key has factor 0, and its output
// is 0 even if the sums are NaN; partial outputs of it are not read.
FLASHPORT_DEVICE float finish_row(const AttentionParams& p, const WorkTile& work, int row, float m, float l,
                                  bool leads) {
  float factor = head_scale(p, p.v_scale, work);
  if (p.dropout.rng_state != nullptr) factor *= p.dropout.keep_scale;
  if (is_partial(work)) {
    if (leads && row < work.q_len) {
      p.pieces.lse[partial_index(p, work, row)] = l == 0.0f ? -kInfinity : m + log2_full(l);
    }
    return l == 0.0f ? 0.0f : factor / l;
  }
  if (p.sinks != nullptr) {
    const merge::MergeWeights w = merge::merge_weights(m, p.sinks[work.head] * kLog2e);
    l = merge::merge_value(l, w.a, 1.0f, w.b);
    m = w.m;
    factor *= w.a;
  }
  if (leads && p.lse != nullptr && row < work.q_len) {
    const std::int64_t at =
        work.seq * p.lse_stride_seq + work.head * p.lse_stride_head + (work.out_begin + row) * p.lse_stride_token;
    p.lse[at] = l == 0.0f ? -kInfinity : (m + log2_full(l)) * kLn2;
  }
  return l == 0.0f ? 0.0f : factor / l;
}

FLASHPORT_DEVICE std::int64_t output_offset(const AttentionParams& p, const WorkTile& work, int row) {
  return work.seq * p.out.stride_seq + (work.out_begin + row) * p.out.stride_token + work.head * p.out.stride_head;
}

// Where the output of a row of a piece goes, with all columns of the kernel's tile.
FLASHPORT_DEVICE float* partial_output(const AttentionParams& p, const WorkTile& work, int row) {
  return p.pieces.out + partial_index(p, work, row) * p.pieces.columns;
}

}  // namespace flashport::FLASHPORT_TARGET::attention
