// Which kernel serves an attention request, or the sentence that says what is missing. The target's table of kernels is
// the only place that knows what there is.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <flashport/attention.h>

#include "common/host/backend_abi.h"

namespace flashport {

struct AttentionRequest {
  DType dtype;  // of q, k, v and the output
  std::int64_t head_dim_qk, head_dim_v;
  ScoreForm form;
  friend bool operator==(const AttentionRequest&, const AttentionRequest&) = default;
};

// Of a call that has each. A scale that is not above 0 counts as a softcap.
[[nodiscard]] constexpr ScoreForm score_form(bool softcap, bool alibi, bool bias, bool dropout) {
  return static_cast<ScoreForm>((softcap ? 1 : 0) | (alibi ? 2 : 0) | (bias ? 4 : 0) | (dropout ? 8 : 0));
}
[[nodiscard]] constexpr ScoreForm form_of(const AttentionQuery& query) {
  return score_form(query.softcap, query.alibi, query.bias, query.dropout);
}

// A kernel that computes in the request's own type is preferred to one that computes in fp32, then the smallest tile
// that covers the head dims, then the one that can do the least to scores. Null: `reason` says why, if it is not null.
[[nodiscard]] const KernelEntry* choose_attention_kernel(std::span<const KernelEntry> kernels, std::string_view target,
                                                         const AttentionRequest& request, std::string* reason);

// The kernel of a query of supports(), which_kernel() or explain().
[[nodiscard]] const KernelEntry* find_attention_kernel(const AttentionQuery& query, std::string& reason);

}  // namespace flashport
