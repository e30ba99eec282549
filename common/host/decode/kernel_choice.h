// Which kernel serves a decode request, or the sentence that says what is missing. The target's table of kernels is the
// only place that knows what there is.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <flashport/decode.h>

#include "common/device/decode/params.h"
#include "common/host/backend_abi.h"

namespace flashport {

struct KernelRequest {
  DType q_dtype;
  KvFormat k_format, v_format;
  std::int64_t head_dim_qk, head_dim_v;
  std::int64_t group_size;  // Hq / Hkv
  std::int64_t q_len;
  std::uint32_t segment_formats = 0;  // of all segments, where a kernel must read them, as bits; 0: k_format, v_format
  bool scales_beside = false;         // of the cache, which most kernels of one pair of formats do not read
  Factors factors = Factors::kNone;   // what they are to kernels that read factors
  bool segments_as_stored = false;    // a kernel may read the segments so (stored_segments.h)
  friend bool operator==(const KernelRequest&, const KernelRequest&) = default;
};

inline constexpr int kMaxQueryLength = 16;
inline constexpr int kMaxGroupSize = 128;
inline constexpr int kMinHeadDim = 16;
inline constexpr int kMaxHeadDim = 512;
inline constexpr int kHeadDimStep = 8;

// A kernel of the very formats, of blocks or of bytes (KvFormat::kBlocks, kBytes), or where there is none, or scales
// lie beside the cache, one of any formats (kAny), whose math is bf16 if one of them is, else fp16 or fp32. Among those
// the kernel with the smallest tile that covers the head dims. Tiles have 8, 16, 64 or 128 query rows: it takes the
// fewest that hold all packed rows (group_size x q_len), or else the most there are. Segments of blocks and of 16 bits
// have a kernel that reads them as they are stored (KernelTag::kDecodeSegments), where the target has one and rows are
// few. Null: `reason` says why, if it is not null.
[[nodiscard]] const KernelEntry* choose_decode_kernel(std::span<const KernelEntry> kernels, std::string_view target,
                                                      const KernelRequest& request, std::string* reason);

// The kernel of the same shape that appends (KernelTag::kDecodeAppend), or is for plain calls on any caches
// (kDecodePlain) or on large ones (kDecodePlainLarge), or for all calls on large ones (kDecodeLarge, for blocks without
// one of their own that of blocks of any formats; kDecodeSegmentsLarge). Null where the target has none.
[[nodiscard]] const KernelEntry* find_twin(std::span<const KernelEntry> kernels, const KernelEntry& kernel,
                                           KernelTag tag);

// The same with other rows, for kernels that read blocks as stored: their bits do not follow from the rows of a tile.
[[nodiscard]] const KernelEntry* find_twin(std::span<const KernelEntry> kernels, const KernelEntry& kernel,
                                           KernelTag tag, int rows);

// Whether kernels are for tiles of one shape, of the same formats and math.
[[nodiscard]] bool is_same_tile(const DecodeShape& a, const DecodeShape& b);

// Whether keys and queries of a call are as PlainDecodeParams says, for kernels of this shape; and the whole call.
[[nodiscard]] bool reads_plain_rows(const DecodeParams& p, const DecodeShape& shape);
[[nodiscard]] bool is_plain(const DecodeParams& p, const DecodeShape& shape);

// What a query of supports(), which_kernel() or explain() asks for. The type of q is one that some queries have.
[[nodiscard]] KernelRequest request_of(const DecodeQuery& query);
// The kernel of such a query.
[[nodiscard]] const KernelEntry* find_decode_kernel(const DecodeQuery& query, std::string& reason);

}  // namespace flashport
