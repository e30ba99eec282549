// The arguments of the attention kernels. Plain structs; strides count elements.
#pragma once

#include "common/device/core/tensor_map.h"
#include "common/device/core/types.h"
#include "common/device/kv/params.h"

namespace flashport {

// A bias of every query and key. Broadcast axes have stride 0.
struct BiasParams {
  const void* data;  // null: none
  DType dtype;
  std::int32_t has_map;  // whether AttentionParams::bias_map is valid, set with it
  std::int64_t stride_seq, stride_head, stride_row, stride_key;
};

// Dropout by position (philox.h).
struct DropoutParams {
  const std::int64_t* rng_state;  // seed and offset, in device memory; null: no dropout
  std::uint32_t drop_below;       // of 256: a weight is dropped where its byte of random bits is below
  float keep_scale;               // 1 / (1 - p)
};

// A mask of the weights that dropout keeps (dropout_mask_kernel.h).
struct DropoutMaskParams {
  std::uint8_t* mask;
  std::int64_t strides[4];
  std::int32_t batch, num_heads, q_len, kv_len;
  DropoutParams dropout;
};

// By which rule the keys of a sequence are cut into pieces (pieces.h).
struct PieceRule {
  std::int32_t count;       // of every sequence that has as many key tiles; 0: by its lengths
  std::int32_t work_tiles;  // by lengths: of a head, that pieces may make of a sequence
  std::int32_t rows, keys;  // of a work tile and of a key tile
};

// Pieces, and the partial results of the sequences that are cut. One has `rows` for all pieces and queries.
struct PieceParams {
  PieceRule rule;
  std::int32_t most;     // that a sequence of this call has; up to 1: none is cut, and nothing else here is read
  std::int32_t columns;  // of a row of partial results, those of the kernel's tile; head_dim_v of them are read
  // The first row of a sequence is their sum over the sequence's number, its first query and its first key.
  std::int64_t rows_of_sequence;
  std::int32_t rows_of_query, rows_of_four_keys;
  std::int64_t rows;  // of a head
  float* out;         // [num_q_heads, rows, columns], normalised
  float* lse;         // [num_q_heads, rows], base 2
};

// Boxes that bring rows of a cache as they are stored.
struct StoredBox {
  std::int32_t row_bytes;   // that a row of a box has: those of the cache's row, and some after them; 0: no such boxes
  std::int32_t head_bytes;  // by which heads lie apart on the first axis; 0: they have an axis of their own
  std::int32_t pair_bytes;  // by which the two tokens of a pair lie apart on the first axis; 0: each is on an axis
};

struct AttentionParams {
  TensorMap q_map, k_map, v_map, bias_map;
  std::int32_t has_q_map, has_kv_maps;  // which maps are valid, set with them
  std::int32_t box_keys;                // keys of a box of k_map and v_map
  StoredBox k_box, v_box;               // of the same maps, in place of boxes of the math type

  std::int32_t batch;
  std::int32_t q_len, kv_len;  // rows that every sequence has; packed: that none has more of
  std::int32_t num_q_heads, num_kv_heads, group_size;
  std::int32_t head_dim_qk, head_dim_v;

  // Packed tensors have all tokens on one axis, and stride_seq is 0.
  StridedRows q, out;
  PagedCache cache;  // keys and values; where they are not on pages, a page is a sequence, and packed page_stride is 0
  KvFormat k_format, v_format;
  HeadScales q_scale, k_scale, v_scale;
  std::int64_t total_q, total_k;     // tokens of all sequences that the tensors have room for
  const std::int32_t* cu_seqlens_q;  // null: sequences are not packed
  const std::int32_t* cu_seqlens_k;
  const std::int32_t* seqused_q;  // null: all
  const std::int32_t* leftpad_k;  // null: 0
  float* lse;                     // null: not wanted
  std::int64_t lse_stride_seq, lse_stride_head, lse_stride_token;

  // kPlain: logits in base 2 are q.k * score_scale, which is positive. kAny: cap_scale * tanh(q.k * score_scale) with a
  // softcap.
  float score_scale;                       // softmax_scale * log2e, or softmax_scale / softcap with softcap
  float cap_scale;                         // softcap * log2e; 0: no softcap
  std::int32_t window_left, window_right;  // -1: infinite; causal: window_right is 0
  const float* alibi_slopes;
  std::int64_t alibi_stride_seq;
  const float* sinks;
  BiasParams bias;
  DropoutParams dropout;

  PieceParams pieces;

  // The order of work tiles (tile_scheduler.h).
  std::int32_t section_heads;  // kv heads whose tiles come before those of others
  std::uint32_t* counter;      // of tiles that blocks have taken, in the workspace; 0 before and after every call

  // For kernels of KeySources::kScaled: scales beside keys and values in place of k_scale and v_scale. Null data: none.
  KeyScales k_row_scales, v_row_scales;
};

}  // namespace flashport
