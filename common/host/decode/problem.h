// A decode call after validation: every layout has become (table, page size, byte strides), every option a number in
// DecodeParams, and nothing of the schedule is chosen yet. Validation is pure: it looks at shapes, strides and options,
// never at the contents of a tensor, and at no device.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <flashport/decode.h>

#include "common/device/decode/params.h"
#include "common/host/check.h"
#include "common/host/kv/cache_layout.h"
#include "common/host/kv/pages.h"

namespace flashport {

// What a call of segments has besides, or one whose cache has scales beside it, the only segment.
struct MixedProblem {
  CacheSegment segments[kMostSegments];
  IndexBounds bounds[kMostSegments];
  std::int32_t segment_count = 0;
  std::uint32_t formats = 0;  // of all segments: format_bit() of each; 0: those of the problem's one cache
  LogitBias bias{};
  std::int64_t mask_keys = 0;  // that the mask has; 0: no mask
};

struct DecodeProblem {
  const char* function;
  TensorView q;           // whose device the call runs on
  DecodeParams params{};  // all but row_tiles, chunks and workspace; max_len is what the layout can hold
  KvFormat k_format, v_format;
  bool empty = false;  // no output has elements: nothing to run
  IndexBounds bounds;
  std::int64_t total_q = 0;  // rows of a ragged q

  int num_splits = kInvariantSplits;
  // Stage 1: chunk_keys > 0 keys a chunk, and the chunks that out and lse have room for.
  std::int64_t fixed_chunks = 0;
  std::int64_t chunk_keys = 0;

  std::optional<TensorView> workspace;
  bool segments_as_stored = false;      // one kernel may read all of them so, if there is one (stored_segments.h)
  bool by_segment = false;              // kernels of flash_decode may read each segment by itself, if there are any
  bool is_partial = false;              // a launch after it merges the result with others
  bool appends = false;                 // the launch may write new keys first, if there is a kernel that does
  std::unique_ptr<MixedProblem> mixed;  // null: k_format and v_format say all
};

// The extents of q and of the caches that params have.
struct DecodeExtents {
  bool ragged;
  std::int64_t batch, q_len, num_q_heads, head_dim, head_dim_v, num_kv_heads;
};
// Describes q, out and lse in the problem's params.
void fill_tensors(DecodeProblem& problem, const DecodeExtents& extents, const TensorView& q, const TensorView& out,
                  const std::optional<TensorView>& lse, const std::optional<TensorView>& cu_seqlens_q);
// The scales of one cache. Those that lie beside it make it the only segment, for kernels that read segments or
// factors; without any, both sides have scales of one shape.
struct CacheScales {
  const std::optional<TensorView>& k_scale;
  const TensorView& k;
  const std::optional<TensorView>& v_scale;
  const TensorView& v;
};
void check_scale_pair(const Check& check, const CacheScales& scales, std::int64_t num_kv_heads);
// After the cache and the formats of the problem.
void fill_scales(DecodeProblem& problem, const CacheScales& scales, const CacheAxes& axes);
// Makes a segment without scales beside it the only cache of the problem.
void read_one_cache(DecodeProblem& problem, const CacheSegment& segment, const IndexBounds& bounds);
// A side of a window as kernels take it.
[[nodiscard]] std::int32_t window_side(std::int64_t keys);
// Sets the right side of a window, which is 0 for causal queries. Call it after max_q_len and tree_mask are set.
void fill_right_window(DecodeParams& p, std::int32_t window_right);

[[nodiscard]] DecodeProblem validate_flash_decode(const DecodeArgs& args);
// The same of a call that will not be made: its output need not be there, and what it would write is not looked at.
[[nodiscard]] DecodeProblem validate_decode_size(const DecodeArgs& args);
[[nodiscard]] DecodeProblem validate_mixed(const MixedDecodeArgs& args);
[[nodiscard]] DecodeProblem validate_mixed_size(const MixedDecodeArgs& args);
[[nodiscard]] DecodeProblem validate_decode_stage1(const DecodeStage1Args& args);

// The calls as the log of calls shows them.
[[nodiscard]] std::string call_text(const DecodeArgs& args);
[[nodiscard]] std::string call_text(const MixedDecodeArgs& args);
[[nodiscard]] std::string call_text(const DecodeStage1Args& args);

// Lengths are 32-bit numbers on the device, with room for one tile past the end.
inline constexpr std::int64_t kMaxSequence = 0x7fff0000;

}  // namespace flashport
