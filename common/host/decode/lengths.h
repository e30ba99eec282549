// Checks of what stands in the lengths, page tables and query offsets of a decode call. contents.h says when.
#pragma once

#include "common/host/check.h"
#include "common/host/decode/problem.h"
#include "common/host/devices.h"

namespace flashport {

void check_decode_contents(const Check& check, const DeviceContext& device, Stream stream,
                           const DecodeProblem& problem);

}  // namespace flashport
