// Checks of what stands in the offsets and lengths of an attention call. contents.h says when.
#pragma once

#include "common/host/attention/problem.h"
#include "common/host/check.h"
#include "common/host/devices.h"

namespace flashport {

void check_attention_contents(const Check& check, const DeviceContext& device, Stream stream,
                              const AttentionProblem& problem);

}  // namespace flashport
