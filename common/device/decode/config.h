// The compile-time description of one decode kernel: its shape (a row of cmake/decode_instances.txt) and the schedule
// that <vendor>/tuning/decode/<target>.h chose for that shape.
#pragma once

#include "common/device/core/types.h"
#include "common/device/kv/format.h"

namespace flashport {

// The template shape of a decode kernel; one row of cmake/decode_instances.txt, or of
// cmake/decode_append_instances.txt for those that append.
struct DecodeShape {
  int head_dim_qk;  // tile extents: a head_dim of 80 or 96 runs in a tile of 128, zero-filled
  int head_dim_v;
  int rows;  // query rows of a tile: 8, 16, 64 or 128
  MathType math;
  // kBlocks, kBytes: one of several, as DecodeParams says; kAny: of each segment, as MixedDecodeParams says, and
  // then v_format is the same.
  KvFormat k_format;
  KvFormat v_format;
  bool appends = false;  // writes new keys and values as it comes to them (new_keys.h), and turns the queries
  bool plain = false;    // for calls without options (PlainDecodeParams): a row of cmake/decode_plain_instances.txt, or
                         // of cmake/decode_append_instances.txt
  // A second kernel of the same bits, for caches with room for many keys.
  bool large_cache = false;
  // In kernels of blocks: segments of them and of 16 bits are read as they are stored (SegmentsDecodeParams).
  bool has_wide_segments = false;
};
constexpr bool reads_segments(const DecodeShape& shape) { return shape.k_format == KvFormat::kAny; }
// Kernels of blocks learn the format of keys, of values or of both from the call, which may be these.
constexpr bool chooses_formats(const DecodeShape& shape) {
  return shape.k_format == KvFormat::kBlocks || shape.v_format == KvFormat::kBlocks;
}
constexpr bool is_chosen_format(KvFormat format) {
  return is_cache_format(format) && kv_format_trait(format).scale_bytes > 0;
}
// Whether a side of such a format may be stored in `format`, and whether keys or values may.
constexpr bool may_be_stored_in(KvFormat side, KvFormat format) {
  if (side == KvFormat::kBytes) return is_format_of_bytes(format);
  return side == format || (side == KvFormat::kBlocks && is_chosen_format(format));
}
constexpr bool has_format(const DecodeShape& shape, KvFormat format) {
  return may_be_stored_in(shape.k_format, format) || may_be_stored_in(shape.v_format, format);
}
// The format in which products read rows that are stored in `format`: as stored or, in kernels of any formats, widened
// to the math type.
constexpr KvFormat product_format(const DecodeShape& shape, KvFormat format) {
  if (!reads_segments(shape)) return format;
  return shape.math == MathType::kBf16 ? KvFormat::kBf16 : KvFormat::kFp16;
}

// Factors that lie beside the rows and that a kernel reads with them (FactorDecodeParams).
enum class Factors {
  kNone,
  kOfGroups,  // of fp16, one for each eight values
  kOfRows,    // of fp16 or fp32, one for each row; or none, on either side
};
constexpr Factors factors_of(const DecodeShape& shape) {
  if (shape.k_format == KvFormat::kBytes) return Factors::kOfRows;
  const bool in_groups = shape.k_format == KvFormat::kInt8 || shape.k_format == KvFormat::kInt4;
  return in_groups ? Factors::kOfGroups : Factors::kNone;
}
constexpr bool reads_factors(const DecodeShape& shape) { return factors_of(shape) != Factors::kNone; }

struct DecodeTuning {
  int waves;                      // compute waves of a block
  int stages;                     // buffers in flight or in use, as the target counts them
  int blocks_per_multiprocessor;  // what the register and shared-memory budget is cut for
  int producer_waves = 0;         // further waves, which only copy
  int teams = 1;                  // teams in one block of the device, which share copies where they can
  int leaves = 1;                 // that a turn of the main loop takes: 1 or 2
};

struct DecodeConfig {
  DecodeShape shape;
  DecodeTuning tuning;
};

// Whether teams of a block help the first one where multiprocessors are more than there is work for. Where there is
// room for many keys there is more.
constexpr bool teams_may_help(const DecodeShape& shape, int teams) { return teams > 1 && !shape.large_cache; }

// What the host must know of how a kernel works on a tile.
struct DecodeSplit {
  int turn_leaves = 1;                    // leaves that a turn of the main loop takes: 1 or 2
  int row_slices = 1, column_slices = 1;  // parts of a state that are published by themselves (chunks.h)
  bool large = false;   // a state is so large that chunks have two leaves at least, and a second launch combines them
  bool finer = false;   // more blocks are resident than long sequences have chunks: ChunkRule
  bool wide = false;    // combining a chunk takes about as long as a leaf: chunks of few leaves are longer
  bool powers = false;  // ChunkRule, too
};

}  // namespace flashport
