// Attention of many query tokens: prefill, encoders, and any call that is not the decoding of a few tokens.
// All calls are asynchronous on `stream`, validate on the host before they read a size or a stride, and leave every
// output untouched when they throw. An output shares no element with another argument. Symbols in shapes: B sequences,
// Sq and Sk tokens of a sequence, Tq and Tk tokens of all packed sequences, Hq query heads, Hkv kv heads (Hq is a
// multiple), D head_dim_qk, DV head_dim_v (16 to 512, multiples of 8).
//
// Causal and window masks are aligned bottom-right: query i of a sequence of q_len queries and kv_len keys stands at
// position i + kv_len - q_len. A query that sees no key gets output 0 and lse -inf.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <flashport/decode.h>
#include <flashport/export.h>
#include <flashport/types.h>

namespace flashport {

struct AttentionArgs {
  // q: (B, Sq, Hq, D), or packed (Tq, Hq, D) with cu_seqlens_q; fp16, bf16, fp8; fp32 on the CPU; last stride 1. k:
  // (B, Sk, Hkv, D), packed (Tk, Hkv, D) with cu_seqlens_k, or on pages as DecodeArgs::k_cache has it; q's type, or
  // what k_format says, fp16 and bf16 where it names them. v: as k with DV, chosen freely. Views of a packed projection
  // will do.
  TensorView q, k, v;

  // Packed sequences: both, or with keys of rank 4 or on pages cu_seqlens_q alone. Rows past the last offset belong to
  // no sequence and are not touched.
  std::optional<TensorView> cu_seqlens_q;  // (B + 1) int32: where each sequence begins, and the end of the last
  std::optional<TensorView> cu_seqlens_k;  // (B + 1) int32
  std::int64_t max_seqlen_q = 0;           // needed with cu_seqlens_q; no sequence is longer
  std::int64_t max_seqlen_k = 0;           // needed with cu_seqlens_k

  std::optional<TensorView> seqused_q;  // (B) int32: queries of a sequence in use; rows past them are not written
  std::optional<TensorView> seqused_k;  // (B) int32: keys of a sequence in use, those before leftpad_k included
  std::optional<TensorView> leftpad_k;  // (B) int32: first keys of a sequence that do not exist

  // Keys and values on pages, as in DecodeArgs; seqused_k has the lengths.
  std::optional<TensorView> block_table, token_table, request_index, kv_indptr, kv_indices, kv_last_page_len;
  KvLayout kv_layout = KvLayout::kNHD;  // of k and v with 4 axes

  // New keys and values, which the call writes into k and v after the seqused_k keys of each sequence, which must be
  // given, before it attends to all of them: (B, Sn, Hkv, D), or packed (Tn, Hkv, D) with cu_seqlens_k_new (B + 1)
  // int32; v_new with DV; fp16, bf16 or fp32. k and v are then a cache: of rank 4 without cu_seqlens_k, or on pages. A
  // sequence's new keys for which its cache has no room are refused where lengths are in host memory, and else dropped.
  // k_scale and v_scale divide them, unless q is fp8; scales beside k and v do not come with new keys.
  std::optional<TensorView> k_new, v_new, cu_seqlens_k_new;
  // Rotary position embedding of k_new and q, of one type and with the same two tensors: (positions, rotary_dim / 2) of
  // fp16, bf16 or fp32, rotary_dim a multiple of 16 and at most D. A sequence's new key i is turned to position
  // seqused_k + i; so is query i where the call is causal or has a window, else to seqused_k. Positions past the
  // tensors are not turned. Pairs are dims i and i + rotary_dim / 2, or if interleaved 2i and 2i + 1.
  std::optional<TensorView> rotary_cos, rotary_sin;
  bool rotary_interleaved = false;

  std::optional<double> softmax_scale;     // default 1 / sqrt(D)
  bool causal = false;                     // no key after a query's own position, whatever window_right is
  std::int64_t window_left = -1;           // keys to the left of a query's own position; -1 is infinite
  std::int64_t window_right = -1;          // and to the right
  double softcap = 0.0;                    // s = cap * tanh(s / cap) after the scale, in fp32; 0 is off
  std::optional<TensorView> alibi_slopes;  // fp32 (Hq) or (B, Hq): bias -slope * |query position - key position|
  std::optional<TensorView> sinks;         // fp32 (Hq): a logit that joins the denominator only
  std::optional<TensorView> bias;          // (B or 1, Hq or 1, Sq, Sk) fp32 or q's type, added to the logits; -inf
                                           // hides a key; not with packed sequences, pages or leftpad_k

  // Probability p, below 1, that a weight is dropped, in steps of 1/256; the others grow by 1 / (1 - p).
  double dropout_p = 0.0;
  std::optional<TensorView> rng_state;  // (2) int64 in the tensors' memory: seed and offset; needed with dropout_p

  // What stored queries, keys and values are multiplied by: fp32 (1), (Hkv) or (B, Hkv), positive. k_scale and v_scale
  // may also lie beside k and v, each in its own way, as DecodeSegment has it: fp32 or fp16, one for each row, or for
  // each group of 8 values of a row or a multiple of it. (B, Hkv) beside k of 3 axes with B rows is one for each
  // sequence; those of the rows then need a third axis of 1.
  std::optional<TensorView> q_scale, k_scale, v_scale;
  std::optional<KvFormat> k_format, v_format;  // as in DecodeArgs

  // Pieces of keys that run side by side and are merged in a second launch (types.h), at most 128. kInvariantSplits
  // cuts the keys of few queries; with 1 none are, and the bits of a prompt are those of its chunks.
  int num_splits = kInvariantSplits;

  TensorView out;                       // as q with DV in place of D, of q's type (fp16 or bf16 for fp8); any strides
  std::optional<TensorView> lse;        // fp32 natural log, (B, Hq, Sq) or packed (Hq, Tq)
  std::optional<TensorView> workspace;  // uint8 (attention_workspace_size bytes), zero before its first use
};

// softmax(softmax_scale q k^T + bias) v. Few queries on a cache run flash_decode's kernels, where these serve the call
// and are faster: q of rank 4 with up to 16 tokens, keys with seqused_k or kv_last_page_len, and kInvariantSplits.
// which_kernel() and explain() say so.
FLASHPORT_API void attention(const AttentionArgs& args, Stream stream = 0);

// Bytes that a call with these arguments needs as workspace; depends on shapes and the device, never on lengths.
// Nothing is allocated, read or written; `out` may be left out (rank 0, null data).
[[nodiscard]] FLASHPORT_API std::int64_t attention_workspace_size(const AttentionArgs& args);

// Which weights attention() drops with the same rng_state: 1 where a weight is kept, 0 where it is dropped. The mask is
// a function of seed, offset, sequence, head, query and key alone, the same on every target.
struct DropoutMaskArgs {
  TensorView mask;       // (B, Hq, Sq, Sk) uint8
  TensorView rng_state;  // (2) int64
  double dropout_p = 0.0;
};
FLASHPORT_API void dropout_mask(const DropoutMaskArgs& args, Stream stream = 0);

// Queries as in decode.h.
struct AttentionQuery {
  std::string target = "cpu";
  DType dtype = DType::kBFloat16;  // of q
  std::int64_t head_dim_qk = 128;
  std::int64_t head_dim_v = 128;
  std::optional<KvFormat> k_format = {}, v_format = {};  // default: dtype's own
  bool paged = false;                                    // keys and values on pages
  bool causal = false;
  bool softcap = false;  // whether the call has each
  bool alibi = false;
  bool bias = false;
  bool dropout = false;
  bool seqused_k = false;
  bool appends = false;         // new keys, few of each sequence, and all types as q
  bool scales_beside = false;   // k_scale or v_scale has a number for each row or group of values
  std::int64_t q_len = 0;       // queries of every sequence of a call without cu_seqlens_q; 0: packed, or many
  std::int64_t group_size = 1;  // Hq / Hkv
};
[[nodiscard]] FLASHPORT_API Support supports(const AttentionQuery& query);
[[nodiscard]] FLASHPORT_API std::string which_kernel(
    const AttentionQuery& query);  // "attention/bf16/hd128/plain/sm90a"

// explain() says how the first device of the target runs a call of attention, as far as shapes decide it. Throws
// NotSupportedError where no kernel serves the call or no such device is there.
struct AttentionScheduleQuery {
  AttentionQuery call;
  std::int64_t batch = 1;
  std::int64_t num_q_heads = 1, num_kv_heads = 1;
  std::int64_t q_len = 1, kv_len = 1;  // of every sequence; of packed ones, or with lengths, the most that one has
  int num_splits = kInvariantSplits;
  std::int64_t window_left = -1, window_right = -1;
  std::int64_t total_q = 0, total_k = 0;      // tokens of a call with cu_seqlens_q, and with cu_seqlens_k; 0: without
  bool same_offsets = false;                  // one tensor is both: every sequence has as many queries as keys
  bool seqused_q = false, leftpad_k = false;  // whether the call has each, as call.seqused_k
  bool rotary = false;                        // new keys come with rotary_cos, so that the workspace has turned queries
};
// Where flash_decode's kernels serve the call: its query tiles, chunks and blocks.
struct AttentionSchedule {
  std::string kernel;             // as which_kernel() gives it
  std::int64_t rows = 0;          // queries of a work tile
  std::int64_t keys = 0;          // of a key tile
  std::int64_t stages = 0;        // key tiles in flight or in use
  std::int64_t threads = 0;       // of a block
  std::int64_t blocks = 0;        // of the grid
  std::int64_t work_tiles = 0;    // of all sequences, heads and pieces
  std::int64_t shared_bytes = 0;  // of a block
  std::int64_t pieces = 1;        // that the keys of a sequence are cut into
  std::int64_t workspace_bytes = 0;
  std::string text;  // all of this in a sentence
};
[[nodiscard]] FLASHPORT_API AttentionSchedule explain(const AttentionScheduleQuery& query);

}  // namespace flashport
