// From raw dot products to base-2 logits: scale or softcap, ALiBi, then the mask. Options are uniform run-time
// branches; a leaf that every row of the tile sees whole pays for the scale only.
#pragma once

#include <type_traits>

#include "common/device/decode/query.h"
#include "common/device/decode/schedule.h"

namespace flashport::FLASHPORT_TARGET::decode {

// What a row sees: keys [low, high), and through the tree mask the draft tokens from `draft` on.
struct RowView {
  int low, high;
  int position;
  int draft;
  std::uint32_t tree;
  float slope;  // ALiBi, base 2; 0 without
};

template <class Params>
FLASHPORT_DEVICE RowView row_view(const Params& p, const Segment& s, QueryRow row) {
  RowView view{};
  if (row.token >= s.q_len) return view;
  view.position = s.length - s.q_len + row.token;
  view.draft = s.length - s.q_len;
  view.low = s.key_low;
  if (p.window_left >= 0) {
    view.low = maximum(view.low, view.position - p.window_left);
  }
  view.high = s.key_high;
  if (p.window_right >= 0 && view.high - view.position > p.window_right) {
    view.high = view.position + 1 + p.window_right;
  }
  view.tree = ~0u;
  if (p.tree_mask != nullptr) {
    view.tree = p.cu_seqlens_q == nullptr ? p.tree_mask[s.seq * p.tree_mask_stride + row.token]
                                          : p.tree_mask[s.q_begin + row.token];
    view.tree &= ~0u >> (32 - minimum(s.q_len, 32));  // used here, so that no leaf without a mask waits for the load
  }
  if (p.alibi_slopes != nullptr) view.slope = p.alibi_slopes[s.seq * p.alibi_stride_seq + row.head] * kLog2e;
  return view;
}

FLASHPORT_DEVICE bool visible(const RowView& view, int key) {
  if (key < view.low || key >= view.high) return false;
  return key < view.draft || ((view.tree >> (key - view.draft)) & 1u) != 0;
}

// Whether some row of the tile may not see some of `keys` keys from `key` on.
FLASHPORT_DEVICE bool needs_mask(const Segment& s, int key, int keys) {
  return key < maximum(s.key_low, s.clear_low) || key + keys > minimum(s.key_high, s.clear_high);
}

FLASHPORT_DEVICE float biased(float x, float slope, float added) {
  return added == -kInfinity ? -kInfinity : x + slope * added;
}

// Adds the bias of each row's keys, base 2. What it hides is -inf, whatever the score is.
template <class Tiles>
FLASHPORT_DEVICE void add_bias(const Tiles& tiles, const MixedDecodeParams& p, const Segment& s, int key,
                               typename Tiles::Scores& scores) {
  const LogitBias& bias = p.bias;
  std::int64_t rows[Tiles::kRowSlots];
  float slopes[Tiles::kRowSlots];
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    const QueryRow row = query_row(p, s, Tiles::kRows, tiles.row_of(slot));
    const int token = maximum(minimum(row.token, s.q_len - 1), 0);  // padding rows take that of the last one
    rows[slot] = s.seq * bias.stride_seq + row.head * bias.stride_head + token * bias.stride_row;
    slopes[slot] = bias.slopes == nullptr ? kLog2e : bias.slopes[row.head] * kLog2e;
  }
  tiles.for_each(scores, [&](float& x, int slot, int col) {
    const int at = key + col;
    if (at < s.key_low || at >= s.key_high) return;
    const float added = load_as_float(bias.data, bias.dtype, rows[slot] + at * bias.stride_key);
    x = biased(x, slopes[slot], added);
  });
}

template <class Tiles, class Params>
FLASHPORT_DEVICE void scale_scores(const Tiles& tiles, const Params& p, float scale, typename Tiles::Scores& scores) {
  if (p.cap_scale != 0.0f) {
    tiles.for_each(scores, [&](float& x, int, int) { x = p.cap_scale * tanh_full(x * scale); });
  } else {
    tiles.for_each(scores, [&](auto& x, int, int) { x *= scale; });
  }
}

template <class Tiles, class Params>
FLASHPORT_DEVICE void to_logits(const Tiles& tiles, const Params& p, const Segment& s, int key, float scale,
                                typename Tiles::Scores& scores) {
  scale_scores(tiles, p, scale, scores);
  if constexpr (std::is_same_v<Params, MixedDecodeParams>) {
    if (has_bias(p)) add_bias(tiles, p, s, key, scores);
  }
  const bool masked = needs_mask(s, key, Tiles::kTurnLeaves * kLeafKeys);
  if (!masked && p.alibi_slopes == nullptr) return;
  const Params& rare = reread(p);
  RowView views[Tiles::kRowSlots];
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    views[slot] = row_view(rare, s, query_row(rare, s, Tiles::kRows, tiles.row_of(slot)));
  }
  tiles.for_each(scores, [&](float& x, int slot, int col) {
    const RowView& view = views[slot];
    const int distance = view.position - (key + col);
    x -= view.slope * static_cast<float>(distance < 0 ? -distance : distance);
    bool hides = masked;
    if constexpr (requires { Tiles::at_use(masked); }) hides = Tiles::at_use(masked);
    if (hides && !visible(view, key + col)) x = -kInfinity;
  });
}

// add_bias() of the keys of a turn, with no branch between the loads.
template <class Tiles>
FLASHPORT_DEVICE void add_bias_of_turn(const Tiles& tiles, const SegmentsDecodeParams& p, const Segment& s,
                                       typename Tiles::Scores& scores) {
  const LogitBias& bias = p.bias;
  const TurnKeys& turn = tiles.turn();
  if (turn.count <= 0) return;
  std::int64_t rows[Tiles::kRowSlots];
  float slopes[Tiles::kRowSlots];
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    const int row = minimum(tiles.row_of(slot), p.group_size - 1);  // padding rows take that of the last one
    const int head = s.kv_head * p.group_size + row;
    rows[slot] = s.seq * bias.stride_seq + head * bias.stride_head + turn.position * bias.stride_key;
    slopes[slot] = bias.slopes == nullptr ? kLog2e : bias.slopes[head] * kLog2e;
  }
  const auto add = [&](const auto* values) {
    tiles.for_each(scores, [&](float& x, int slot, int col) {
      const float added = to_float(values[rows[slot] + minimum(col, turn.count - 1) * bias.stride_key]);
      x = biased(x, slopes[slot], added);
    });
  };
  if (bias.dtype == DType::kFloat16) {
    add(static_cast<const Half*>(bias.data));
  } else {
    add(static_cast<const float*>(bias.data));
  }
}

// Where turns are of one segment each.
template <class Tiles>
FLASHPORT_DEVICE void to_logits(const Tiles& tiles, const SegmentsDecodeParams& p, const Segment& s, int /*key*/,
                                float scale, typename Tiles::Scores& scores) {
  const TurnKeys& turn = tiles.turn();
  scale_scores(tiles, p, scale * tiles.turn_score_unit(), scores);
  if (has_bias(p)) add_bias_of_turn(tiles, p, s, scores);
  if (turn.is_whole()) return;
  tiles.for_each(scores, [&](float& x, int, int col) {
    if (col >= turn.count) x = -kInfinity;
  });
}

}  // namespace flashport::FLASHPORT_TARGET::decode
