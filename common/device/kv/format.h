// The element types of a cache.
#pragma once

#include <cstdint>

namespace flashport {

enum class KvFormat : std::int32_t { kFp32, kFp16, kBf16, kFp8E4M3, kFp8E4M3Fnuz, kQ8_0 };

// Bytes of one K or V row of `dim` elements as stored.
constexpr int kv_row_bytes(KvFormat format, int dim) {
  switch (format) {
    case KvFormat::kFp32: return 4 * dim;
    case KvFormat::kFp16:
    case KvFormat::kBf16: return 2 * dim;
    case KvFormat::kFp8E4M3:
    case KvFormat::kFp8E4M3Fnuz: return dim;
    case KvFormat::kQ8_0: return dim / 32 * 34;
  }
  return 0;
}

}  // namespace flashport
