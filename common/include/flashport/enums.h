// The enumerations of the public interface that kernels are compiled for. This header has no standard containers, whose
// headers every kernel would pay for when it is compiled.
#pragma once

#include <cstdint>

#include <flashport/export.h>

namespace flashport {

enum class DType : std::int32_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFp8E4M3,      // OCP e4m3 (finite, one NaN), as NVIDIA, gfx950 and gfx12 have it
  kFp8E4M3Fnuz,  // FNUZ e4m3, as gfx942 has it; gfx950 widens it too
  kInt32,
  kInt64,
  kUInt32,
  kUInt8,  // the carrier of blocks: a cache of it says by name which format they have (KvFormat)
  kInt8,   // of a cache alone, like the next
  kFp8E5M2,

  // No argument may have these: refusals name them.
  kFloat64,
  kInt16,
  kBool,
};

// Bytes of one element. Every DType has a fixed size.
[[nodiscard]] constexpr int element_size(DType type) {
  switch (type) {
    case DType::kFloat64:
    case DType::kInt64: return 8;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16: return 2;
    case DType::kFp8E4M3:
    case DType::kFp8E4M3Fnuz:
    case DType::kFp8E5M2:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool: return 1;
  }
  return 0;
}

// Lower-case name as messages, kernel keys and the Python package spell it: "bfloat16", "float8_e4m3fn", ...
[[nodiscard]] FLASHPORT_API const char* dtype_name(DType type);

// How a cache stores keys or values. Most formats are an element type's own, and tensors of that type need no other
// word; blocks of ggml come as bytes: a q8_0 row of D values is D / 32 * 34 elements of kUInt8. kInt4 has two signed
// values in each element of kInt8, the first in the low bits. Scales of kInt8 and kInt4, and of fp8 where it has them,
// are a tensor of their own: one for a row, or for each group of 8 values of it or a multiple of 8, as LightLLM has
// them.
enum class KvFormat : std::int32_t {
  kFp32,
  kFp16,
  kBf16,
  kFp8E4M3,
  kFp8E4M3Fnuz,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kIq4Nl,
  kFp8E5M2,
  kInt8,
  kInt4,

  kBytes = 253,   // no cache's: kernels that read rows of the call's formats of one byte a value say it
  kBlocks = 254,  // no cache's: kernels that read blocks of the call's formats say it
  kAny = 255,     // no cache's: kernels that widen whatever format a row has say it
};

// "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e4m3fnuz", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl",
// "fp8_e5m2", "int8", "int4": as messages, kernel keys and the Python package spell it.
[[nodiscard]] FLASHPORT_API const char* kv_format_name(KvFormat format);

// What decays and rates of the gated delta rule are made of. kHead, kKey: of a, A_log and dt_bias, one for each head or
// (is_kda) each key, and b; of a chunked call, whatever it takes is kHead. kAny: what else gated_delta_update may have,
// logarithms, rates, gates of columns, final states.
enum class GateForm : std::int32_t { kHead, kKey, kAny };

}  // namespace flashport
