// From raw dot products to base-2 logits: scale or softcap, ALiBi, then the mask. Options are uniform run-time
// branches; a leaf that every row of the tile sees whole pays for the scale only.
#pragma once

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

FLASHPORT_DEVICE RowView row_view(const DecodeParams& p, const Segment& s, QueryRow row) {
  RowView view{};
  if (row.token >= s.q_len) return view;
  view.position = s.length - s.q_len + row.token;
  view.draft = s.length - s.q_len;
  view.low = s.key_low;
  if (p.window_left >= 0) {
    view.low = maximum(view.low, view.position - p.window_left);
  }
  view.high = minimum(s.key_high, p.tree_mask != nullptr ? s.length : view.position + 1);
  if (p.window_right >= 0) {
    view.high = view.high - view.position > p.window_right ? view.position + 1 + p.window_right : view.high;
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

template <class Tiles>
FLASHPORT_DEVICE void to_logits(const Tiles& tiles, const DecodeParams& p, const Segment& s, int key, float scale,
                                typename Tiles::Scores& scores) {
  if (p.cap_scale != 0.0f) {
    tiles.for_each(scores, [&](float& x, int, int) { x = p.cap_scale * tanh_full(x * scale); });
  } else {
    tiles.for_each(scores, [&](auto& x, int, int) { x *= scale; });
  }
  const bool masked = needs_mask(s, key, Tiles::kTurnLeaves * kLeafKeys);
  if (!masked && p.alibi_slopes == nullptr) return;
  const DecodeParams& rare = reread(p);
  RowView views[Tiles::kRowSlots];
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    views[slot] = row_view(rare, s, query_row(rare, s, Tiles::kRows, tiles.row_of(slot)));
  }
  tiles.for_each(scores, [&](float& x, int slot, int col) {
    const RowView& view = views[slot];
    const int distance = view.position - (key + col);
    x -= view.slope * static_cast<float>(distance < 0 ? -distance : distance);
    if (masked && !visible(view, key + col)) x = -kInfinity;
  });
}

}  // namespace flashport::FLASHPORT_TARGET::decode
