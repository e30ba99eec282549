// The formats of a cache, a row each: whatever host and device know of a format's memory follows from its row. The
// arithmetic of a format is in the loaders of each target, and in blocks.h and append_kernel.h.
#pragma once

#include <cstdint>

#include <flashport/enums.h>

namespace flashport {

struct KvFormatTrait {
  const char* name;
  DType dtype;       // the elements of tensors that carry it
  int block_values;  // values that are stored together; 1: an element is a value, and the format is its type's own
  int block_bytes;
  int scale_bytes;  // of the block, what its values share
  int largest = 0;  // what the largest magnitude of a row or group is stored as where its scale lies beside the cache;
                    // 0: the format has no such scales
};

inline constexpr int kKvFormats = static_cast<int>(KvFormat::kInt4) + 1;
// Not what kernels alone are named for.
constexpr bool is_cache_format(KvFormat format) { return static_cast<unsigned>(format) < kKvFormats; }

[[gnu::always_inline]] constexpr KvFormatTrait kv_format_trait(KvFormat format) {
  switch (format) {
    case KvFormat::kFp32: return {"fp32", DType::kFloat32, 1, 4, 0};
    case KvFormat::kFp16: return {"fp16", DType::kFloat16, 1, 2, 0};
    case KvFormat::kBf16: return {"bf16", DType::kBFloat16, 1, 2, 0};
    case KvFormat::kFp8E4M3: return {"fp8_e4m3", DType::kFp8E4M3, 1, 1, 0, 448};
    case KvFormat::kFp8E4M3Fnuz: return {"fp8_e4m3fnuz", DType::kFp8E4M3Fnuz, 1, 1, 0, 240};
    case KvFormat::kQ8_0: return {"q8_0", DType::kUInt8, 32, 34, 2};
    case KvFormat::kQ4_0: return {"q4_0", DType::kUInt8, 32, 18, 2};
    case KvFormat::kQ4_1: return {"q4_1", DType::kUInt8, 32, 20, 4};
    case KvFormat::kQ5_0: return {"q5_0", DType::kUInt8, 32, 22, 2};
    case KvFormat::kQ5_1: return {"q5_1", DType::kUInt8, 32, 24, 4};
    case KvFormat::kIq4Nl: return {"iq4_nl", DType::kUInt8, 32, 18, 2};
    case KvFormat::kFp8E5M2: return {"fp8_e5m2", DType::kFp8E5M2, 1, 1, 0, 57344};
    case KvFormat::kInt8: return {"int8", DType::kInt8, 1, 1, 0, 127};
    case KvFormat::kInt4: return {"int4", DType::kInt8, 32, 16, 0, 7};    // units without a scale of their own
    case KvFormat::kBlocks: return {"blocks", DType::kUInt8, 32, 34, 2};  // the longest that such kernels read
    case KvFormat::kBytes: return {"bytes", DType::kUInt8, 1, 1, 0};
    case KvFormat::kAny: return {"any", DType::kUInt8, 1, 1, 0};
  }
  return {"unknown", DType::kUInt8, 1, 1, 0};
}

// One byte a value, whose scales, if there are some, lie beside the rows.
constexpr bool is_format_of_bytes(KvFormat format) {
  return is_cache_format(format) && kv_format_trait(format).block_bytes == 1;
}

// Bytes of a block of ggml's formats before its codes, which fill whole units of 16 bytes.
constexpr int header_bytes(KvFormat format) { return kv_format_trait(format).block_bytes % 16; }

// Sets of formats have a bit for each.
constexpr std::uint32_t format_bit(KvFormat format) { return std::uint32_t{1} << static_cast<int>(format); }

// Bytes of one K or V row of `dim` values as stored, of whole blocks.
[[gnu::always_inline]] constexpr int kv_row_bytes(KvFormat format, int dim) {
  return dim / kv_format_trait(format).block_values * kv_format_trait(format).block_bytes;
}

// Values of a row that have one factor where those of groups lie beside the cache.
inline constexpr int kFactoredValues = 8;

// The units that so many bytes of a row are copied in.
constexpr int widest_unit(int bytes) { return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : 4; }

}  // namespace flashport
