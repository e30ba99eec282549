// Attention forward of a work tile: one softmax per query, continued over the key tiles in ascending order.
//
// With Q [rows, D], and for key tile j K [keys, D], V [keys, DV]:
//   S(j) = Q K(j)^T                      [rows, keys], then scale, softcap, ALiBi, bias, mask
//   m'   = max(m, rowmax S(j))           [rows]
//   P(j) = exp2(S(j) - m')               [rows, keys], rounded to the math type
//   l    = l exp2(m - m') + rowsum P(j)  [rows]
//   O    = O exp2(m - m') + P(j) V(j)    [rows, DV]
//   out  = O / l, lse = ln(2^m l)
//
// Two products are in flight at a time: P(j-1) V(j-1) runs while the softmax of S(j) is computed, and on targets whose
// blocks have several groups of waves the groups take turns, so that one group's softmax runs under another's products.
// Only the tiles at the ends of the keys that a work tile sees have masks; they are loops of their own, unless the text
// of a step is so long that there is one loop, where every tile has them. A mask that hides no key changes no bit.
#pragma once

#include "common/device/attention/scores.h"
#include "common/device/attention/tile_scheduler.h"
#include "common/device/core/constant.h"

namespace flashport::FLASHPORT_TARGET::attention {

// Per row: the maximum of the scores so far and the sum of the weights, of the lane's own keys until finish(). Kernels
// whose weights are not shifted (config.h) leave the maximum as it was.
template <class Tiles>
struct RowState {
  typename Tiles::Rows m, l;
};

// Both products of a step: the scores of this tile, and the values of the one before by its weights.
template <class Tiles, class Masked>
FLASHPORT_DEVICE void multiply_both(Tiles& tiles, typename Tiles::Scores& scores, typename Tiles::Out& out,
                                    const typename Tiles::Operand& weights, int tile, Masked masked) {
  if constexpr (requires { tiles.multiply_both(scores, out, weights); }) {
    tiles.multiply_both(scores, out, weights);
  } else {
    tiles.multiply_keys(scores, tile, masked);
    tiles.add_values(out, weights, tile - 1, masked);
  }
}

template <class Tiles>
FLASHPORT_DEVICE void attend(const AttentionParams& p, Tiles& tiles, const WorkTile& work) {
  constexpr ScoreForm kForm = Tiles::kForm;
  const KeyTiles range = key_tiles<Tiles::kKeys>(p, work, Tiles::kBlockRows);
  const float score_scale = score_scale_of(p, work);
  const float scale = exponent_scale<kForm>(p, score_scale);
  RowState<Tiles> state;
  typename Tiles::Out out;
  tiles.clear(state.m, state.l, out);
  if (range.begin < range.end) {
    tiles.begin(work);
    const Modifiers modifiers = modifiers_of<kForm>(p, work, score_scale);
    // Which weights are dropped follows from their places: a kernel of dropout alone draws that under a product.
    constexpr bool kDrawsAhead = kForm == ScoreForm::kDropout;
    typename KeptOf<Tiles, kDrawsAhead>::Type kept;
    const DropLimit limit = drop_limit(p.dropout.drop_below);
    const auto draw = [&](int tile) {
      if constexpr (kDrawsAhead) tiles.draw(kept, limit, modifiers, tile);
    };
    const auto round = [&](const auto& scores) FLASHPORT_INLINE {
      typename Tiles::Operand weights = tiles.to_operand(scores);
      if constexpr (kDrawsAhead) tiles.drop(kept, weights);
      return weights;
    };
    typename Tiles::Scores scores;
    typename Tiles::Rows factors;
    // From the product to weights that wait to be rounded; `factors` are what O comes to the new maximum by.
    const auto weigh = [&](auto hidden, int tile) FLASHPORT_INLINE {
      // Sigmoids share a reciprocal, and what is hidden may be NaN.
      if constexpr (kForm == ScoreForm::kSoftcap && hidden != Hidden::kNone) {
        hide_keys<hidden>(tiles, p, work, tile, scores, 0.0f);
      }
      if constexpr (kForm == ScoreForm::kBias) {
        tiles.add_bias(p, modifiers, scores);
      } else {
        modify_scores(tiles, p, work, modifiers, tile, scores);
      }
      if constexpr (hidden != Hidden::kNone) hide_keys<hidden>(tiles, p, work, tile, scores);
      tiles.exponentiate(scores, scale, state, factors);
      if (!kDrawsAhead && drops<kForm>(p)) drop_weights(tiles, p, modifiers, tile, scores);
    };
    constexpr Constant<Hidden::kNone> kPlain;
    constexpr Constant<Hidden::kAfter> kLast;
    constexpr Constant<Hidden::kBeforeAndAfter> kMasked;

    tiles.multiply_keys(scores, range.begin, Constant<true>());
    draw(range.begin);
    tiles.template settle_keys<0>(scores);
    // A branch has registers and a text of its own for the scores on each path. Tiles that want one hide no key of a
    // plain tile.
    if (!requires { requires Tiles::kMasksFirst; } && range.begin >= range.plain_begin &&
        range.begin < range.plain_end) {
      weigh(kPlain, range.begin);
    } else {
      weigh(kMasked, range.begin);
    }
    typename Tiles::Operand weights = round(scores);

    const auto step = [&](auto hidden, int tile) FLASHPORT_INLINE {
      constexpr Constant<hidden != Hidden::kNone> masked;
      tiles.take_turn();
      multiply_both(tiles, scores, out, weights, tile, masked);
      tiles.give_turn();
      draw(tile);
      tiles.template settle_keys<1>(scores);
      weigh(hidden, tile);
      tiles.settle_values(out);
      tiles.scale(out, factors);
      weights = round(scores);
    };
    int tile = range.begin + 1;
    if constexpr (requires { requires Tiles::kMasksAll; }) {  // steps too long for three loops
      for (; tile < range.end; ++tile) step(kMasked, tile);
    } else if constexpr (requires { requires Tiles::kMasksInOneLoop; }) {  // too long for more than two
      while (tile < range.end) {
        const int end = tile < range.plain_end ? range.plain_begin : range.end;
        for (; tile < end; ++tile) step(kMasked, tile);
        for (; tile < range.plain_end; ++tile) step(kPlain, tile);
      }
    } else {
      for (; tile < range.plain_begin; ++tile) step(kMasked, tile);
      for (; tile < range.plain_end; ++tile) step(kPlain, tile);
      for (; tile < range.end; ++tile) step(kLast, tile);
    }
    tiles.release_queries();
    tiles.add_values(out, weights, range.end - 1, Constant<true>());
    tiles.settle_values(out);
  }
  tiles.store(p, work, state, scale, out);
}

}  // namespace flashport::FLASHPORT_TARGET::attention
