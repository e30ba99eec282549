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

// What a call does to scores. Scales that are not positive and biases whose keys are not neighbours are nothing for
// kernels of one option, and large caps nothing for some (has_unshifted_weights()).
struct ScoreNeeds {
  ScoreForm options = ScoreForm::kPlain;
  bool positive_scale = true, bias_in_rows = true, small_cap = true;
  friend bool operator==(const ScoreNeeds&, const ScoreNeeds&) = default;
};

struct AttentionRequest {
  DType q_dtype, dtype;  // of q; and of the output, which products are computed in
  KvFormat k_format, v_format;
  bool paged;
  std::int64_t head_dim_qk, head_dim_v;
  ScoreNeeds needs;
  bool scales_beside = false;  // of keys or values, one for each row or group of values
  bool appends = false;        // new keys come first
  friend bool operator==(const AttentionRequest&, const AttentionRequest&) = default;
};

// A kernel that computes in the request's own type is preferred to one that computes in fp32, then the smallest tile
// that covers the head dims, then the fewest options of scores. Null: `reason` says why, if it is not null.
[[nodiscard]] const KernelEntry* choose_attention_kernel(std::span<const KernelEntry> kernels, std::string_view target,
                                                         const AttentionRequest& request, std::string* reason);

[[nodiscard]] ScoreNeeds score_needs(bool softcap, bool alibi, bool bias, bool dropout, bool positive_scale);
[[nodiscard]] AttentionRequest request_of(const AttentionQuery& query);

// The kernel of a query of supports(), which_kernel() or explain().
[[nodiscard]] const KernelEntry* find_attention_kernel(const AttentionQuery& query, std::string& reason);

}  // namespace flashport
