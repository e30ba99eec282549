// An attention call after validation: its params without the order of work. Validation is pure: it looks at shapes,
// strides and options, never at the contents of a tensor, and at no device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <flashport/attention.h>

#include "common/device/attention/params.h"
#include "common/host/attention/kernel_choice.h"
#include "common/host/check.h"
#include "common/host/kv/pages.h"

namespace flashport {

struct AttentionProblem {
  const char* function;
  TensorView q;              // whose device the call runs on
  AttentionParams params{};  // all but pieces, section_heads, counter and the maps
  int num_splits = kInvariantSplits;
  ScoreNeeds needs;
  bool paged = false;          // keys and values are on pages
  bool scales_beside = false;  // keys or values have scales of rows or of groups of values
  IndexBounds bounds;          // of them
  bool empty = false;          // no query has an output

  // New keys come first (append.h). All but turned_q and seqlens_out, which lie in the workspace.
  bool appends = false;
  AppendRotaryParams append{};
  std::optional<TensorView> workspace;
};

[[nodiscard]] AttentionProblem validate_attention(const AttentionArgs& args);
// The same of a call that will not be made: its output need not be there, and what it would write is not looked at.
[[nodiscard]] AttentionProblem validate_attention_size(const AttentionArgs& args);

// Whether k_scale or v_scale lies beside its keys or values: one for each row or group of values. Two axes of a scale
// beside keys with three are those of sequences and heads if there are as many sequences, else those of rows.
[[nodiscard]] bool is_beside(const AttentionArgs& args, const std::optional<TensorView>& scale);

// The call as the log of calls shows it.
[[nodiscard]] std::string call_text(const AttentionArgs& args);

// Sets both sides of the window, where a side that hides no key from any query is infinite. After the lengths.
void fill_window(AttentionParams& params, std::int64_t left, std::int64_t right, bool causal);

// Dropout with this probability: checked, and as kernels take it.
void check_dropout(const Check& check, double dropout_p);
[[nodiscard]] DropoutParams dropout_params(const TensorView& rng_state, double dropout_p);

// No sequence has more queries or keys: the sum of two positions fits 32 bits.
inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;

}  // namespace flashport
