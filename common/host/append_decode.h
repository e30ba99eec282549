// What attention asks of flash_decode beside its public functions.
#pragma once

#include <flashport/decode.h>

#include "common/device/kv/params.h"

namespace flashport {

// A call whose seqlens do not count the new keys and whose queries are not turned: its launch does both, and writes the
// new keys. False, and nothing is launched, where the target has no kernel that does.
[[nodiscard]] bool decode_and_append(const DecodeArgs& args, const AppendRotaryParams& append, Stream stream);

}  // namespace flashport
