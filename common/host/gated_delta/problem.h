// Validation of the gated delta rule's calls, and the params that come of it.
#pragma once

#include <string>

#include <flashport/gated_delta.h>

#include "common/device/gated_delta/chunk_params.h"
#include "common/host/check.h"

namespace flashport {

[[nodiscard]] GatedDeltaUpdateParams gated_delta_update_problem(const Check& check, const GatedDeltaUpdateArgs& args);

// All but the workspace.
[[nodiscard]] GatedDeltaChunkParams gated_delta_chunk_problem(const Check& check, const GatedDeltaChunkArgs& args);
// The same of a call that will not be made: its output need not be there, and what it would write is not looked at.
[[nodiscard]] GatedDeltaChunkParams gated_delta_chunk_size_problem(const Check& check, const GatedDeltaChunkArgs& args);

// The calls as the log of calls shows them.
[[nodiscard]] std::string call_text(const Check& check, const GatedDeltaUpdateArgs& args);
[[nodiscard]] std::string call_text(const Check& check, const GatedDeltaChunkArgs& args);

}  // namespace flashport
