// Flash decoding: attention of a few new query tokens over a long key-value cache, and its companions.
// All calls are asynchronous on `stream`, validate on the host before they read a size or a stride, and leave every
// output untouched when they throw. An output shares no element with another argument; views that interleave will do.
// Symbols in shapes: B requests, Hq query heads, Hkv kv heads, D head_dim_qk, DV head_dim_v. Scores are scaled by
// softmax_scale; lse is natural log, fp32, -inf where a row attends to nothing (its output is then 0).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <flashport/export.h>
#include <flashport/types.h>

namespace flashport {

// Order of the axes of a cache. NHD: (B, S, Hkv, D) or (pages, page_size, Hkv, D). HND: (B, Hkv, S, D) or
// (pages, Hkv, page_size, D).
enum class KvLayout : std::int32_t { kNHD, kHND };

struct DecodeArgs {
  TensorView q;        // (B, Hq, D), (B, q_len, Hq, D), or (total_q, Hq, D) with cu_seqlens_q
  TensorView k_cache;  // see KvLayout; with token_table (slots, Hkv, D); see KvFormat for rows of blocks
  TensorView v_cache;  // as k_cache with DV
  TensorView seqlens;  // (B) int32 or int64: keys in the cache, the q_len newest tokens among them

  // At most one of: block_table; token_table (+ request_index); kv_indptr + kv_indices + kv_last_page_len; none.
  std::optional<TensorView> block_table;       // (B, max_pages) int32
  std::optional<TensorView> token_table;       // (requests, max_len) int32: row of a request, token -> slot
  std::optional<TensorView> request_index;     // (B) int32 or int64: row of token_table; default 0..B-1
  std::optional<TensorView> kv_indptr;         // (B + 1) int32, as FlashInfer has it
  std::optional<TensorView> kv_indices;        // (pages in use) int32
  std::optional<TensorView> kv_last_page_len;  // (B) int32; seqlens may then be left out (rank 0, null data)
  KvLayout kv_layout = KvLayout::kNHD;

  // (B + 1) int32. Rows of q past the last offset belong to no request: their rows of out and lse are not written.
  std::optional<TensorView> cu_seqlens_q;
  std::int64_t max_q_len = 0;  // needed with cu_seqlens_q

  std::optional<double> softmax_scale;     // default 1 / sqrt(D)
  bool causal = true;                      // no key after a query's own position, but for those of a tree_mask
  std::int64_t window_left = -1;           // keys to the left of a query's own position; -1 is infinite
  std::int64_t window_right = -1;          // and to the right
  double softcap = 0.0;                    // s = cap * tanh(s / cap) after the scale, in fp32; 0 is off
  std::optional<TensorView> alibi_slopes;  // fp32 (Hq) or (B, Hq): bias -slope * |query position - key position|
  std::optional<TensorView> sinks;         // fp32 (Hq): a logit that joins the denominator only
  std::optional<TensorView> tree_mask;     // (B, q_len), ragged (total_q), uint32: bit j of token i lets it see draft j
  // K = k_scale * stored: fp32 (1) or (Hkv), finite and not 0, and where both are given both of one shape; or beside
  // the cache, as DecodeSegment has it for rows and groups of values, which kernels of any formats read.
  std::optional<TensorView> k_scale, v_scale;
  std::optional<KvFormat> k_format;  // what k_cache stores; default its element type's own, which uint8 has not; 16
                                     // bits of another type than q's must be named
  std::optional<KvFormat> v_format;  // what v_cache stores
  int num_splits = kInvariantSplits;

  TensorView out;                       // as q with DV in place of D; fp16, bf16 or fp32
  std::optional<TensorView> lse;        // fp32, as out without its last axis
  std::optional<TensorView> workspace;  // uint8 (decode_workspace_size bytes), zero before its first use
};

// softmax(scale q k^T + bias) v over the cached keys.
FLASHPORT_API void flash_decode(const DecodeArgs& args, Stream stream = 0);

// Bytes that a call with these arguments needs as workspace; depends on shapes and the device, never on lengths.
// Nothing is allocated, read or written; `out` may be left out (rank 0, null data).
[[nodiscard]] FLASHPORT_API std::int64_t decode_workspace_size(const DecodeArgs& args);

inline constexpr int kMostDecodeSegments = 4;

// A part of each sequence: keys and values that follow each other, in a format and a layout of their own.
struct DecodeSegment {
  TensorView k;        // as DecodeArgs::k_cache, of any type that a cache may have
  TensorView v;        // as k with DV
  TensorView seqlens;  // (B) int32 or int64: the segment's keys in each sequence, from 0; where it is left out (rank 0,
                       // null data), all that the cache has for a sequence
  // At most one of: block_table; token_table (+ request_index); kv_indptr + kv_indices; none.
  std::optional<TensorView> block_table, token_table, request_index, kv_indptr, kv_indices;
  KvLayout kv_layout = KvLayout::kNHD;
  // fp32 or fp16: (1), (Hkv), one a row on the axes of k without its last, or on all axes of k one for each group of so
  // many values that D is a multiple of it and it of 8.
  std::optional<TensorView> k_scale, v_scale;
  std::optional<KvFormat> k_format, v_format;  // as in DecodeArgs
};

// The segments one after the other are the keys of a sequence, the oldest first: positions, windows and slopes count
// from the first key of the first segment.
struct MixedDecodeArgs {
  TensorView q;                         // as in DecodeArgs; fp32 on the CPU, whatever the segments store
  std::vector<DecodeSegment> segments;  // 1 to kMostDecodeSegments
  std::optional<TensorView> cu_seqlens_q;
  std::int64_t max_q_len = 0;
  std::optional<double> softmax_scale;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;  // for calls with a mask
  double softcap = 0.0;
  std::optional<TensorView> alibi_slopes;
  std::optional<TensorView> sinks;
  // (B or 1, Hq or 1, q_len or more, keys of a sequence or more) fp16 or fp32, as ggml has it: added to the logits
  // after the softcap, -inf where a query does not see a key. A mask says all that a query sees (within the window):
  // without one new token i sees the keys up to its own.
  std::optional<TensorView> mask;
  std::optional<TensorView> mask_slopes;  // fp32 (Hq): factors of the mask, ALiBi's of ggml's max_bias; -inf stays
  // Each segment as it is stored: by one kernel where the target has it for the formats, also with a mask, or each by
  // the kernel of its formats in a launch of its own, and a launch that merges, without one. Faster over large caches,
  // slower over small ones. Only where flash_decode has a kernel for each segment (16-bit ones of q's type, scales as
  // DecodeArgs has them) and one query sees all keys alike but for a mask: not with q_len above 1, cu_seqlens_q, a
  // window or slopes; nor, if no one kernel reads all segments, with a mask and where all segments have the same
  // formats. Elsewhere it changes nothing. which_kernel() knows nothing of it.
  bool by_segment = false;
  TensorView out;
  std::optional<TensorView> lse;
  std::optional<TensorView> workspace;  // mixed_workspace_size bytes
};

// One softmax over the keys of all segments, in one launch or by_segment. One segment without a mask is a call of
// flash_decode, with its kernels.
FLASHPORT_API void flash_decode_mixed(const MixedDecodeArgs& args, Stream stream = 0);
[[nodiscard]] FLASHPORT_API std::int64_t mixed_workspace_size(const MixedDecodeArgs& args);

// LightLLM's first stage: attention of q over each block of block_seq keys of a request.
struct DecodeStage1Args {
  TensorView q;              // (B, Hq, D) fp16, bf16; fp32 on the CPU
  TensorView k, v;           // (slots, Hkv, D)
  TensorView req_to_tokens;  // (max_requests, max_len) int32
  TensorView b_req_idx;      // (B) int32 or int64
  TensorView b_seqlen;       // (B) int32 or int64
  std::int64_t max_len_in_batch = 0;
  TensorView mid_out;            // (B, Hq, blocks, D) fp32; rows past ceil(len / block_seq) are not written
  TensorView mid_out_logsumexp;  // (B, Hq, blocks) fp32, natural log
  std::int64_t block_seq = 0;
  std::optional<double> softmax_scale;
  std::optional<KvFormat> k_format, v_format;  // as in DecodeArgs
  std::optional<TensorView> k_scale, v_scale;  // as in DecodeArgs; LightLLM's are (slots, Hkv, D / 8)
};
FLASHPORT_API void flash_decode_stage1(const DecodeStage1Args& args, Stream stream = 0);

// LightLLM's second stage: merges the blocks of each request into Out. Length 0 gives 0.
struct DecodeStage2Args {
  TensorView mid_out;             // (B, Hq, blocks, D) fp32, any strides
  TensorView mid_out_logexpsum;   // (B, Hq, blocks) fp32
  TensorView b_seqlen;            // (B) int32 or int64
  TensorView out;                 // (B, Hq, D) fp16, bf16, fp32, any strides
  std::optional<TensorView> lse;  // (B, Hq) fp32
  std::int64_t block_seq = 0;
};
FLASHPORT_API void flash_decode_stage2(const DecodeStage2Args& args, Stream stream = 0);

// Writes new tokens into a paged, contiguous or pooled cache, converting to the format of each side.
struct AppendKvArgs {
  TensorView k, v;              // (tokens, Hkv, D) and (tokens, Hkv, DV)
  TensorView k_cache, v_cache;  // as in DecodeArgs; with page_size from their shape
  TensorView positions;         // (tokens) int32 or int64: each token's slot, page * page_size + offset; -1 skips it
  KvLayout kv_layout = KvLayout::kNHD;
  // stored = value / scale. fp32 (1) or (Hkv): finite and not 0, for all rows. For fp8, int8 and int4 also, as in
  // DecodeSegment, fp32 or fp16 on the axes of the cache, one for each row or group of values of it: written, so that
  // the largest magnitude of the row or group is stored as the largest of the format. int4 needs those.
  std::optional<TensorView> k_scale, v_scale;
  std::optional<KvFormat> k_format, v_format;  // as in DecodeArgs
};
FLASHPORT_API void append_kv(const AppendKvArgs& args, Stream stream = 0);

// Rows of numbers as rows of a quantised format, and back. Formats of ggml's blocks (q8_0, q4_0, q4_1, q5_0, q5_1,
// iq4_nl) get the bits of its reference; a block that a NaN or an infinity goes into is NaN throughout. fp8, int8 and
// int4 have scales beside them, which are written as append_kv writes them.
struct QuantizeKvArgs {
  TensorView x;    // (..., D) fp16, bf16, fp32, any strides; D a multiple of 32 in blocks and int4
  TensorView out;  // (..., elements of a row) of the type that carries the format, innermost stride 1
  KvFormat format = KvFormat::kQ8_0;
  // fp32 or fp16, of fp8, int8 and int4 alone: (...) or (..., groups of 8 values or a multiple of it). Written.
  std::optional<TensorView> scale = {};
};
FLASHPORT_API void quantize_kv(const QuantizeKvArgs& args, Stream stream = 0);
struct DequantizeKvArgs {
  TensorView x;    // as QuantizeKvArgs::out
  TensorView out;  // (..., D) fp16, bf16, fp32, any strides
  KvFormat format = KvFormat::kQ8_0;
  std::optional<TensorView> scale = {};  // as there; read
};
FLASHPORT_API void dequantize_kv(const DequantizeKvArgs& args, Stream stream = 0);

// Merges n partial results of one softmax. lse_base is e, or 2 for FlashInfer's.
struct MergeStatesArgs {
  TensorView o;        // (n, ..., D) fp16, bf16, fp32
  TensorView lse;      // (n, ...) fp32
  TensorView out;      // (..., D), dtype of o
  TensorView out_lse;  // (...) fp32
  bool lse_base_2 = false;
};
FLASHPORT_API void merge_states(const MergeStatesArgs& args, Stream stream = 0);

// (o_a, lse_a) and (o_b, lse_b) of one shape.
struct MergeStateArgs {
  TensorView o_a, lse_a, o_b, lse_b;
  TensorView out, out_lse;
  bool lse_base_2 = false;
};
FLASHPORT_API void merge_state(const MergeStateArgs& args, Stream stream = 0);

// The published split-count heuristic of flash-attention, exactly.
[[nodiscard]] FLASHPORT_API int num_splits_heuristic(int batch_nheads_mblocks, int num_sms, int num_n_blocks,
                                                     int max_splits);

// What a target can do: supports() says whether it serves such a call, and if not, why; which_kernel() gives the key of
// the kernel that the call runs, and throws NotSupportedError with the same reason. A call of flash_decode that asks
// for nothing but the output may run the same text without the code for more, with equal bits: "decode_plain/..." in
// place of "decode/...". Over ggml's blocks the size of the cache may choose a kernel of other rows, or one of blocks
// of any formats, with equal bits too. explain() names what runs. Both take the query of any operation, also those of
// gated_delta.h. The target is a name such as "cpu", "sm90a" or "gfx942", that of a backend ("cuda", "hip") for its
// first device, or empty: the first GPU's, else the CPU's.

// flash_decode and flash_decode_mixed, and with one head dim and one token flash_decode_stage1.
struct DecodeQuery {
  std::string target = "cpu";
  DType q_dtype = DType::kBFloat16;
  std::optional<KvFormat> k_format = {}, v_format = {};  // default: q_dtype's own
  std::int64_t head_dim_qk = 128;
  std::int64_t head_dim_v = 128;
  std::int64_t group_size = 1;  // Hq / Hkv
  std::int64_t q_len = 1;
  // For flash_decode_mixed with several segments or a mask: all formats of their keys and values, in any order.
  // k_format and v_format are then not read.
  std::vector<KvFormat> segment_formats = {};
  bool scales_beside = false;    // whether k_scale or v_scale has a number for each row or group of values of its cache
  std::int64_t scale_group = 0;  // then how many values share one: 8 (of fp16), or head_dim for a row's; 0: not said
  bool appends = false;          // of attention (attention.h), where the launch also writes new keys if a kernel does
};
[[nodiscard]] FLASHPORT_API Support supports(const DecodeQuery& query);
[[nodiscard]] FLASHPORT_API std::string which_kernel(
    const DecodeQuery& query);  // "decode/fp16/kv=q8_0/hd128/r16/sm90a"

// explain() says how the first device of the target runs a call of any of these operations, as far as shapes decide it:
// lengths stay on the device. Throws NotSupportedError where no kernel serves the call or no such device is there. Of
// every kernel it says the threads of a block, and the shared memory that the launch gives it: on a CPU a block is one
// thread, and its shared memory is that thread's scratch; what AMD's kernels have is in their code, and 0 here.

// What explain() is asked about a call of flash_decode, whose tile scheduler cuts each sequence by its own length.
struct DecodeScheduleQuery {
  DecodeQuery call;
  std::int64_t batch = 1;
  std::int64_t num_kv_heads = 1;
  std::int64_t max_kv_len = 0;  // keys of the longest sequence that the cache or its table has room for
  int num_splits = kInvariantSplits;
  bool causal = true;  // as DecodeArgs has it
};
// Where the partial results of a query tile become one: nowhere, as every tile is one chunk; in the same launch, by the
// last block of each tile; or in a second launch, as those of few tiles, of large ones, of tables with room for long
// sequences beside short ones, and of all that num_splits cuts.
enum class Combine : std::int32_t { kNone, kInLaunch, kSecondLaunch };
struct DecodeSchedule {
  std::string kernel;             // of a call that asks for nothing but the output
  std::int64_t rows = 0;          // query rows of a tile: the heads of a group, of each new token
  std::int64_t keys = 0;          // that a turn of the main loop takes
  std::int64_t stages = 0;        // tiles of keys or values in flight or in use, as the target counts them
  std::int64_t threads = 0;       // of a block of the device
  std::int64_t teams = 1;         // blocks of the grid that one of the device holds
  std::int64_t blocks = 0;        // of the grid
  std::int64_t query_tiles = 0;   // of all sequences, kv heads and tiles of query rows
  std::int64_t shared_bytes = 0;  // of a block of the device
  std::int64_t most_chunks = 0;   // of a query tile
  std::int64_t shortest_chunk = 0, longest_chunk = 0;  // keys; a sequence's last chunk may have fewer
  Combine combine = Combine::kNone;
  std::int64_t workspace_bytes = 0;
  std::string text;  // all of this in a sentence
};
[[nodiscard]] FLASHPORT_API DecodeSchedule explain(const DecodeScheduleQuery& query);

// What explain() says of an operation whose blocks never meet.
struct LaunchSchedule {
  std::string kernel;             // as which_kernel() gives it
  std::int64_t threads = 0;       // of a block
  std::int64_t blocks = 0;        // of the grid
  std::int64_t work = 0;          // rows that are written, a block for each, or units of 32 values, a thread for each
  std::int64_t shared_bytes = 0;  // of a block
  std::int64_t workspace_bytes = 0;  // none is needed
  std::string text;                  // all of this in a sentence
};

// flash_decode_stage2.
struct DecodeStage2Query {
  std::string target = "cpu";
  DType out_dtype = DType::kBFloat16;
};
[[nodiscard]] FLASHPORT_API Support supports(const DecodeStage2Query& query);
[[nodiscard]] FLASHPORT_API std::string which_kernel(const DecodeStage2Query& query);  // "decode_stage2/sm90a"
struct DecodeStage2ScheduleQuery {
  DecodeStage2Query call;
  std::int64_t batch = 1, num_q_heads = 1;
};
[[nodiscard]] FLASHPORT_API LaunchSchedule explain(const DecodeStage2ScheduleQuery& query);

// append_kv.
struct AppendQuery {
  std::string target = "cpu";
  DType dtype = DType::kBFloat16;                        // of k and v
  std::optional<KvFormat> k_format = {}, v_format = {};  // default: dtype's own
  std::int64_t head_dim_qk = 128;
  std::int64_t head_dim_v = 128;
  bool scales_beside = false;  // whether k_scale or v_scale lies beside its cache
};
[[nodiscard]] FLASHPORT_API Support supports(const AppendQuery& query);
// "append_kv/sm90a"; "append_any/sm90a" for blocks other than q8_0, fp8 e5m2, int8, int4, and scales beside a cache
[[nodiscard]] FLASHPORT_API std::string which_kernel(const AppendQuery& query);
struct AppendScheduleQuery {
  AppendQuery call;
  std::int64_t tokens = 1, num_kv_heads = 1;
};
[[nodiscard]] FLASHPORT_API LaunchSchedule explain(const AppendScheduleQuery& query);

// quantize_kv, or dequantize_kv.
struct QuantizeQuery {
  std::string target = "cpu";
  DType dtype = DType::kBFloat16;  // of the numbers
  KvFormat format = KvFormat::kQ8_0;
  std::int64_t head_dim = 128;
  bool dequantize = false;
};
[[nodiscard]] FLASHPORT_API Support supports(const QuantizeQuery& query);
[[nodiscard]] FLASHPORT_API std::string which_kernel(const QuantizeQuery& query);  // "quantize_kv/sm90a"
struct QuantizeScheduleQuery {
  QuantizeQuery call;
  std::int64_t rows = 1;  // of head_dim values
};
[[nodiscard]] FLASHPORT_API LaunchSchedule explain(const QuantizeScheduleQuery& query);

// merge_states and merge_state.
struct MergeQuery {
  std::string target = "cpu";
  DType dtype = DType::kBFloat16;  // of o
  std::int64_t head_dim = 128;
};
[[nodiscard]] FLASHPORT_API Support supports(const MergeQuery& query);
[[nodiscard]] FLASHPORT_API std::string which_kernel(const MergeQuery& query);  // "merge_states/sm90a"
struct MergeScheduleQuery {
  MergeQuery call;
  std::int64_t rows = 1;  // of out, of head_dim values
};
[[nodiscard]] FLASHPORT_API LaunchSchedule explain(const MergeScheduleQuery& query);

}  // namespace flashport
