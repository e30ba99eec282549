// One compiled kernel of a target: what it does, its compile-time shape, and how it is launched.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/device/attention/config.h"
#include "common/device/decode/config.h"
#include "common/device/gated_delta/config.h"

namespace flashport {

enum class KernelTag : std::int32_t {
  kDecode,
  kDecodeAppend,
  kDecodeAppendPlain,
  kDecodePlain,
  kDecodePlainLarge,  // on caches with room for many keys
  kDecodeLarge,       // for all calls on such caches
  kDecodeSegments,    // of segments of blocks and of 16 bits, as they are stored
  kDecodeSegmentsLarge,
  kDecodeSegmentsCombine,
  kDecodeCombine,
  kDecodeAppendCombine,
  kDecodePlainCombine,
  kDecodeStage2,
  kMergeStates,
  kAppendKv,
  kAppendAny,
  kAppendRotary,
  kQuantizeKv,
  kDequantizeKv,
  kReadBandwidth,
  kGatedDeltaUpdate,
  kGatedDeltaPrepare,
  kGatedDeltaChunk,
  kAttention,
  kAttentionMerge,
  kDropoutMask,
  kProbe,  // of tests
};
inline constexpr int kKernelTags = static_cast<int>(KernelTag::kProbe) + 1;

// The operation's name, with which the keys of its kernels begin.
[[nodiscard]] constexpr const char* kernel_tag_name(KernelTag tag) {
  switch (tag) {
    case KernelTag::kDecode: return "decode";
    case KernelTag::kDecodeAppend:
    case KernelTag::kDecodeAppendPlain: return "decode_append";
    case KernelTag::kDecodePlain:
    case KernelTag::kDecodePlainLarge: return "decode_plain";
    case KernelTag::kDecodeLarge: return "decode";
    case KernelTag::kDecodeSegments:
    case KernelTag::kDecodeSegmentsLarge: return "decode_segments";
    case KernelTag::kDecodeSegmentsCombine: return "decode_segments_combine";
    case KernelTag::kDecodeCombine: return "decode_combine";
    case KernelTag::kDecodeAppendCombine: return "decode_append_combine";
    case KernelTag::kDecodePlainCombine: return "decode_plain_combine";
    case KernelTag::kDecodeStage2: return "decode_stage2";
    case KernelTag::kMergeStates: return "merge_states";
    case KernelTag::kAppendKv: return "append_kv";
    case KernelTag::kAppendAny: return "append_any";
    case KernelTag::kAppendRotary: return "append_rotary";
    case KernelTag::kQuantizeKv: return "quantize_kv";
    case KernelTag::kDequantizeKv: return "dequantize_kv";
    case KernelTag::kReadBandwidth: return "read_bandwidth";
    case KernelTag::kGatedDeltaUpdate: return "gated_delta_update";
    case KernelTag::kGatedDeltaPrepare: return "gated_delta_prepare";
    case KernelTag::kGatedDeltaChunk: return "gated_delta_chunk";
    case KernelTag::kAttention: return "attention";
    case KernelTag::kAttentionMerge: return "attention_merge";
    case KernelTag::kDropoutMask: return "dropout_mask";
    case KernelTag::kProbe: return "probe";
  }
  return "";
}

// The member that KernelEntry::tag names. Kernels without a template shape have none.
union KernelShape {
  DecodeConfig decode;
  GatedDeltaConfig gated_delta_update;
  GatedDeltaChunkConfig gated_delta_chunk;  // the prepare kernel's and the chain's
  AttentionConfig attention;
};

struct KernelEntry {
  const char* key;  // "decode/bf16/kv=bf16/hd128/r16/sm90a", "decode_stage2/sm90a", "append_kv/sm90a", ...
  KernelTag tag;
  int threads;                   // threads of a block
  int shared_bytes = 0;          // dynamic shared memory of a block (CPU: scratch of a worker)
  const void* handle = nullptr;  // the backend's own: function pointer, or symbol and code object
  KernelShape shape = {};
  int teams = 1;                  // blocks, as grids count them, in one block of the device
  DecodeSplit decode_split = {};  // of a decode kernel
  std::uint32_t formats = ~0u;    // that a decode kernel of any formats widens: format_bit() of each

  // The kernel strides over its work, whatever the grid, and signals each part that is complete to the kernel after it,
  // so that the two may run concurrently.
  bool signals = false;

  // Completes a launch's own copy of the params with what the vendor's side alone can make (tensor maps). Returns null,
  // or an error text. Null where there is nothing to complete.
  const char* (*prepare)(void* params) = nullptr;
};

// Every kernel takes one params struct by value, of at most so many bytes.
inline constexpr std::size_t kMostParamsBytes = 4096;

// Blocks of a launch; x is the fastest. `cluster` neighbouring blocks along x are one cluster: their multiprocessors
// can read each other's shared memory.
struct LaunchGrid {
  std::int64_t x, y = 1, z = 1;
  int cluster = 1;

  [[nodiscard]] constexpr bool is_empty() const { return x <= 0 || y <= 0 || z <= 0; }
};

}  // namespace flashport
