/* The C interface: the operations of attention.h, decode.h and gated_delta.h for callers from C and from languages that
 * can call C. Every function returns fp_ok or the kind of error; fp_last_error() then gives the text (of this thread's
 * last failing call). Nothing is written before the arguments have passed validation. Shapes, meanings and defaults of
 * arguments are those of these headers. An argument struct begins with its own size: set it by FP_INIT (all other
 * members become 0, which is their default unless stated otherwise), so that later versions can add members at the end.
 */
#ifndef FLASHPORT_CAPI_H_
#define FLASHPORT_CAPI_H_

#include <stddef.h>
#include <stdint.h>

#include <flashport/export.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fp_status {
  fp_ok = 0,
  fp_value_error = 1,   /* a wrong rank, shape, stride, device or value */
  fp_type_error = 2,    /* a wrong element type */
  fp_not_supported = 3, /* valid, but no kernel of this device serves it */
  fp_backend_error = 4, /* a driver or runtime call failed */
  fp_internal_error = 5 /* out of memory, or a fault of this library */
} fp_status;

typedef enum fp_dtype {
  fp_float32 = 0,
  fp_float16 = 1,
  fp_bfloat16 = 2,
  fp_float8_e4m3fn = 3,
  fp_float8_e4m3fnuz = 4,
  fp_int32 = 5,
  fp_int64 = 6,
  fp_uint32 = 7,
  fp_uint8 = 8, /* carries blocks: a cache of it needs k_format and v_format */
  fp_int8 = 9,
  fp_float8_e5m2 = 10
} fp_dtype;

typedef enum fp_device_kind { fp_cpu = 0, fp_cuda = 1, fp_hip = 2 } fp_device_kind;
typedef enum fp_kv_layout { fp_nhd = 0, fp_hnd = 1 } fp_kv_layout;
/* How a cache stores keys or values; a q8_0 row of D values is D / 32 * 34 elements of fp_uint8. */
typedef enum fp_kv_format {
  fp_format_own = 0, /* the element type's own, which fp_uint8 has not */
  fp_format_fp32 = 1,
  fp_format_fp16 = 2,
  fp_format_bf16 = 3,
  fp_format_fp8_e4m3 = 4,
  fp_format_fp8_e4m3fnuz = 5,
  fp_format_q8_0 = 6,
  fp_format_q4_0 = 7,
  fp_format_q4_1 = 8,
  fp_format_q5_0 = 9,
  fp_format_q5_1 = 10,
  fp_format_iq4_nl = 11,
  fp_format_fp8_e5m2 = 12,
  fp_format_int8 = 13,
  fp_format_int4 = 14
} fp_kv_format;
typedef enum fp_state_layout { fp_vk = 0, fp_kv = 1 } fp_state_layout;
typedef enum fp_head_map { fp_consecutive = 0, fp_modulo = 1 } fp_head_map;
typedef enum fp_gate_form { fp_gate_head = 0, fp_gate_key = 1, fp_gate_any = 2 } fp_gate_form;
/* What fp_supports(), fp_which_kernel() and fp_explain() are asked about. */
typedef enum fp_operation {
  fp_op_decode = 0,        /* fp_flash_decode, fp_flash_decode_mixed, fp_flash_decode_stage1 */
  fp_op_decode_stage2 = 1, /* fp_flash_decode_stage2 */
  fp_op_append = 2,        /* fp_append_kv */
  fp_op_merge = 3,         /* fp_merge_states, fp_merge_state */
  fp_op_gated_delta = 4,   /* fp_gated_delta_update */
  fp_op_gated_delta_chunk = 5,
  fp_op_attention = 6, /* fp_attention */
  fp_op_quantize = 7,  /* fp_quantize_kv */
  fp_op_dequantize = 8 /* fp_dequantize_kv */
} fp_operation;

#define FP_MAX_RANK 8
#define FP_INVARIANT_SPLITS (-1)

/* A strided, non-owning view; strides count elements. */
typedef struct fp_tensor {
  void* data;
  int32_t dtype;       /* fp_dtype */
  int32_t device_kind; /* fp_device_kind */
  int32_t device_index;
  int32_t rank;
  int64_t shape[FP_MAX_RANK];
  int64_t strides[FP_MAX_RANK];
  int32_t read_only;
} fp_tensor;

/* A stream handle of the tensors' device; 0 is the default stream. */
typedef uintptr_t fp_stream;

/* Zeroes an argument struct and writes its size: FP_INIT(&args). */
#define FP_INIT(args) fp_init_struct((args), sizeof(*(args)))
FLASHPORT_API void fp_init_struct(void* args, size_t size);

/* Required tensors are pointers that must not be null; optional ones are null where they are not given. */
typedef struct fp_decode_args {
  size_t struct_size;
  const fp_tensor* q;
  const fp_tensor* k_cache;
  const fp_tensor* v_cache;
  const fp_tensor* seqlens; /* null only with kv_last_page_len */
  const fp_tensor* out;
  const fp_tensor* lse; /* optional, as all below */
  const fp_tensor* block_table;
  const fp_tensor* token_table;
  const fp_tensor* request_index;
  const fp_tensor* kv_indptr;
  const fp_tensor* kv_indices;
  const fp_tensor* kv_last_page_len;
  const fp_tensor* cu_seqlens_q;
  const fp_tensor* alibi_slopes;
  const fp_tensor* sinks;
  const fp_tensor* tree_mask;
  const fp_tensor* k_scale; /* as v_scale of the whole cache or beside it: decode.h */
  const fp_tensor* v_scale;
  const fp_tensor* workspace;
  int32_t kv_layout;         /* fp_kv_layout */
  int32_t has_softmax_scale; /* 0: 1 / sqrt(head_dim) */
  double softmax_scale;
  double softcap;
  int64_t max_q_len;
  int32_t has_window;     /* 0: both sides are infinite */
  int32_t has_num_splits; /* 0: the invariant schedule */
  int64_t window_left;
  int64_t window_right;
  int32_t num_splits;
  int32_t k_format; /* fp_kv_format, as v_format */
  int32_t v_format;
} fp_decode_args;

/* A part of each sequence's keys and values, in a format and layout of its own. */
typedef struct fp_decode_segment {
  const fp_tensor* k;
  const fp_tensor* v;
  const fp_tensor* seqlens; /* optional, as all below; null: all keys that a contiguous cache has */
  const fp_tensor* block_table;
  const fp_tensor* token_table;
  const fp_tensor* request_index;
  const fp_tensor* kv_indptr;
  const fp_tensor* kv_indices;
  const fp_tensor* k_scale;
  const fp_tensor* v_scale;
  int32_t kv_layout; /* fp_kv_layout */
  int32_t k_format;  /* fp_kv_format, as v_format */
  int32_t v_format;
} fp_decode_segment;

typedef struct fp_mixed_decode_args {
  size_t struct_size;
  size_t segment_size; /* sizeof(fp_decode_segment); a caller of an older version has fewer members */
  const fp_tensor* q;
  const fp_decode_segment* segments; /* an array, the oldest keys first */
  int64_t num_segments;              /* 1 to 4 */
  const fp_tensor* out;
  const fp_tensor* lse; /* optional, as all below */
  const fp_tensor* mask;
  const fp_tensor* mask_slopes;
  const fp_tensor* cu_seqlens_q;
  const fp_tensor* alibi_slopes;
  const fp_tensor* sinks;
  const fp_tensor* workspace;
  int64_t max_q_len;
  int32_t has_softmax_scale; /* 0: 1 / sqrt(head_dim) */
  int32_t has_window;        /* 0: both sides are infinite */
  double softmax_scale;
  double softcap;
  int64_t window_left;
  int64_t window_right;
  int32_t by_segment; /* not 0: each segment by the kernel of its formats, where they have some (decode.h) */
} fp_mixed_decode_args;

typedef struct fp_decode_stage1_args {
  size_t struct_size;
  const fp_tensor* q;
  const fp_tensor* k;
  const fp_tensor* v;
  const fp_tensor* req_to_tokens;
  const fp_tensor* b_req_idx;
  const fp_tensor* b_seqlen;
  const fp_tensor* mid_out;
  const fp_tensor* mid_out_logsumexp;
  int64_t max_len_in_batch;
  int64_t block_seq;
  int32_t has_softmax_scale;
  double softmax_scale;
  int32_t k_format; /* fp_kv_format, as v_format */
  int32_t v_format;
  const fp_tensor* k_scale; /* optional, as v_scale: that of fp_decode_args */
  const fp_tensor* v_scale;
} fp_decode_stage1_args;

typedef struct fp_decode_stage2_args {
  size_t struct_size;
  const fp_tensor* mid_out;
  const fp_tensor* mid_out_logexpsum;
  const fp_tensor* b_seqlen;
  const fp_tensor* out;
  const fp_tensor* lse; /* optional */
  int64_t block_seq;
} fp_decode_stage2_args;

typedef struct fp_append_kv_args {
  size_t struct_size;
  const fp_tensor* k;
  const fp_tensor* v;
  const fp_tensor* k_cache;
  const fp_tensor* v_cache;
  const fp_tensor* positions;
  const fp_tensor* k_scale; /* optional */
  const fp_tensor* v_scale; /* optional */
  int32_t kv_layout;        /* fp_kv_layout */
  int32_t k_format;         /* fp_kv_format, as v_format */
  int32_t v_format;
} fp_append_kv_args;

/* Of fp_quantize_kv() and fp_dequantize_kv(). */
typedef struct fp_quantize_kv_args {
  size_t struct_size;
  const fp_tensor* x;
  const fp_tensor* out;
  int32_t format;         /* fp_kv_format, that of what is stored */
  const fp_tensor* scale; /* fp8, int8 and int4 alone, which need it */
} fp_quantize_kv_args;

typedef struct fp_merge_states_args {
  size_t struct_size;
  const fp_tensor* o;
  const fp_tensor* lse;
  const fp_tensor* out;
  const fp_tensor* out_lse;
  int32_t lse_base_2;
} fp_merge_states_args;

typedef struct fp_merge_state_args {
  size_t struct_size;
  const fp_tensor* o_a;
  const fp_tensor* lse_a;
  const fp_tensor* o_b;
  const fp_tensor* lse_b;
  const fp_tensor* out;
  const fp_tensor* out_lse;
  int32_t lse_base_2;
} fp_merge_state_args;

typedef struct fp_gated_delta_update_args {
  size_t struct_size;
  const fp_tensor* q;
  const fp_tensor* k;
  const fp_tensor* v;
  const fp_tensor* out;
  const fp_tensor* a; /* optional, as all below */
  const fp_tensor* b;
  const fp_tensor* a_log;
  const fp_tensor* dt_bias;
  const fp_tensor* g;
  const fp_tensor* gk;
  const fp_tensor* gv;
  const fp_tensor* beta;
  const fp_tensor* state;
  const fp_tensor* state_indices;
  const fp_tensor* final_states;
  const fp_tensor* cu_seqlens;
  const fp_tensor* intermediate_states;
  const fp_tensor* intermediate_indices;
  const fp_tensor* parent_tokens;
  int32_t state_layout;         /* fp_state_layout */
  int32_t head_map;             /* fp_head_map */
  int32_t disable_state_update; /* 1: `state` is only read */
  int32_t use_qk_l2norm;
  int32_t is_kda;
  int32_t allow_neg_eigval;
  int32_t has_scale;    /* 0: 1 / sqrt(head_dim_k) */
  int32_t has_softplus; /* 0: softplus_beta is 1, softplus_threshold 20 */
  double scale;
  double softplus_beta;
  double softplus_threshold;
  int32_t has_lower_bound; /* 0: none */
  double lower_bound;
  int32_t zero_padding; /* 1: the output of a sequence whose index is below 0 is zeros */
} fp_gated_delta_update_args;

typedef struct fp_gated_delta_chunk_args {
  size_t struct_size;
  const fp_tensor* q;
  const fp_tensor* k;
  const fp_tensor* v;
  const fp_tensor* g;
  const fp_tensor* beta;
  const fp_tensor* out;
  const fp_tensor* a_log; /* optional, as all below */
  const fp_tensor* dt_bias;
  const fp_tensor* state;
  const fp_tensor* state_indices;
  const fp_tensor* final_states;
  const fp_tensor* chunk_states;
  const fp_tensor* cu_seqlens;
  const fp_tensor* workspace;
  int32_t state_layout;         /* fp_state_layout */
  int32_t head_map;             /* fp_head_map */
  int32_t disable_state_update; /* 1: `state` is only read */
  int32_t use_qk_l2norm;
  int32_t beta_sigmoid;
  int32_t allow_neg_eigval;
  int32_t has_scale; /* 0: 1 / sqrt(head_dim_k) */
  double scale;
} fp_gated_delta_chunk_args;

typedef struct fp_attention_args {
  size_t struct_size;
  const fp_tensor* q;
  const fp_tensor* k;
  const fp_tensor* v;
  const fp_tensor* out;
  const fp_tensor* lse; /* optional, as all below */
  const fp_tensor* cu_seqlens_q;
  const fp_tensor* cu_seqlens_k;
  const fp_tensor* seqused_q;
  const fp_tensor* seqused_k;
  const fp_tensor* leftpad_k;
  const fp_tensor* alibi_slopes;
  const fp_tensor* sinks;
  const fp_tensor* bias;
  const fp_tensor* rng_state;
  const fp_tensor* workspace;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  int32_t has_softmax_scale; /* 0: 1 / sqrt(head_dim) */
  int32_t causal;
  double softmax_scale;
  double softcap;
  double dropout_p;
  int64_t window_left;
  int64_t window_right;
  int32_t has_window;     /* 0: both sides are infinite */
  int32_t has_num_splits; /* 0: the invariant schedule */
  int32_t num_splits;
  int32_t kv_layout; /* fp_kv_layout */
  const fp_tensor* block_table;
  const fp_tensor* token_table;
  const fp_tensor* request_index;
  const fp_tensor* kv_indptr;
  const fp_tensor* kv_indices;
  const fp_tensor* kv_last_page_len;
  const fp_tensor* q_scale;
  const fp_tensor* k_scale;
  const fp_tensor* v_scale;
  int32_t k_format; /* fp_kv_format, as v_format */
  int32_t v_format;
  const fp_tensor* k_new; /* written to k, at the ends of sequences, before the attention */
  const fp_tensor* v_new;
  const fp_tensor* cu_seqlens_k_new;
  const fp_tensor* rotary_cos;
  const fp_tensor* rotary_sin;
  int32_t rotary_interleaved;
} fp_attention_args;

typedef struct fp_dropout_mask_args {
  size_t struct_size;
  const fp_tensor* mask;
  const fp_tensor* rng_state;
  double dropout_p;
} fp_dropout_mask_args;

/* A call that fp_supports(), fp_which_kernel() and fp_explain() are asked about. Members that the operation has no use
 * for are not read. */
typedef struct fp_query {
  size_t struct_size;
  int32_t operation;   /* fp_operation */
  int32_t dtype;       /* fp_dtype of q; of k and v (append), o (merge), Out (decode_stage2), numbers (quantize) */
  const char* target;  /* "cpu", "sm90a", ...; null or "": the first GPU's, else the CPU's */
  int64_t head_dim_qk; /* of queries and keys; the gated delta rule's K, and the head dim of a merge or of rows */
  int64_t head_dim_v;
  int64_t group_size; /* decode, attention, fp_explain() of all: num_q_heads / num_kv_heads */
  int64_t q_len;      /* decode; attention: queries of every sequence, 0 where they are packed */
  int32_t k_format;   /* fp_kv_format, decode, append and attention, as v_format; fp_format_own is that of `dtype`.
                       * Quantize and dequantize: what is stored; fp_format_own is q8_0 */
  int32_t v_format;
  int32_t state_dtype;    /* fp_dtype, gated delta rule; fp_float32 also where there is no pool */
  int32_t state_layout;   /* fp_state_layout, gated delta rule */
  int32_t gate;           /* fp_gate_form, gated delta rule */
  int64_t batch;          /* fp_explain(), as all below; sequences */
  int64_t num_kv_heads;   /* the gated delta rule's heads of q and k, with group_size value heads for each */
  int64_t max_kv_len;     /* keys of the longest sequence that the cache or its table has room for; attention: of
                           * every sequence */
  int32_t has_num_splits; /* 0: the invariant schedule */
  int32_t num_splits;
  int32_t causal;  /* attention, as those below */
  int32_t softcap; /* whether the call has each */
  int32_t alibi;
  int32_t bias;
  int32_t dropout;
  int32_t paged; /* keys and values on pages; their formats are those above */
  int32_t seqused_k;
  uint32_t segment_formats; /* decode, where fp_flash_decode_mixed has several segments or a mask: 1 << fp_kv_format of
                             * every format of theirs; k_format and v_format are then not read */
  int32_t scales_beside;    /* decode, append, attention: whether a scale has the axes of its cache; append writes it */
  int32_t scale_group;      /* decode, with scales_beside: how many values share one, 8 (of fp16) or head_dim_qk for a
                             * row's; 0: not said */
  int64_t tokens;  /* fp_explain(), as all below. append: of k; merge, quantize, dequantize: rows of head_dim_qk
                    * values, of merge those of the result; gated_delta_chunk: of every sequence, or of all */
  int64_t total_q; /* attention, as all below but packed: tokens of q and of k, 0 where there are no offsets */
  int64_t total_k;
  int64_t window_left;
  int64_t window_right;
  int32_t has_window;   /* 0: both sides are infinite */
  int32_t same_offsets; /* one tensor is cu_seqlens_q and cu_seqlens_k */
  int32_t seqused_q;    /* whether the call has each */
  int32_t leftpad_k;
  int32_t appends; /* new keys, few of each sequence; also of the other questions */
  int32_t rotary;
  int32_t packed; /* gated_delta_chunk: whether the call has cu_seqlens */
} fp_query;

FLASHPORT_API fp_status fp_attention(const fp_attention_args* args, fp_stream stream);
/* Like the other sizes of a workspace, this takes the call's arguments; `out` may be null. */
FLASHPORT_API fp_status fp_attention_workspace_size(const fp_attention_args* args, int64_t* bytes);
FLASHPORT_API fp_status fp_dropout_mask(const fp_dropout_mask_args* args, fp_stream stream);

FLASHPORT_API fp_status fp_flash_decode(const fp_decode_args* args, fp_stream stream);
FLASHPORT_API fp_status fp_decode_workspace_size(const fp_decode_args* args, int64_t* bytes);
FLASHPORT_API fp_status fp_flash_decode_mixed(const fp_mixed_decode_args* args, fp_stream stream);
FLASHPORT_API fp_status fp_mixed_workspace_size(const fp_mixed_decode_args* args, int64_t* bytes);
FLASHPORT_API fp_status fp_flash_decode_stage1(const fp_decode_stage1_args* args, fp_stream stream);
FLASHPORT_API fp_status fp_flash_decode_stage2(const fp_decode_stage2_args* args, fp_stream stream);
FLASHPORT_API fp_status fp_append_kv(const fp_append_kv_args* args, fp_stream stream);
FLASHPORT_API fp_status fp_quantize_kv(const fp_quantize_kv_args* args, fp_stream stream);
FLASHPORT_API fp_status fp_dequantize_kv(const fp_quantize_kv_args* args, fp_stream stream);
FLASHPORT_API fp_status fp_merge_states(const fp_merge_states_args* args, fp_stream stream);
FLASHPORT_API fp_status fp_merge_state(const fp_merge_state_args* args, fp_stream stream);

FLASHPORT_API fp_status fp_gated_delta_update(const fp_gated_delta_update_args* args, fp_stream stream);
FLASHPORT_API fp_status fp_gated_delta_chunk(const fp_gated_delta_chunk_args* args, fp_stream stream);
FLASHPORT_API fp_status fp_gated_delta_chunk_workspace_size(const fp_gated_delta_chunk_args* args, int64_t* bytes);

FLASHPORT_API int32_t fp_num_splits_heuristic(int32_t batch_nheads_mblocks, int32_t num_sms, int32_t num_n_blocks,
                                              int32_t max_splits);

/* fp_ok: supported. fp_not_supported: fp_last_error() says what is missing. */
FLASHPORT_API fp_status fp_supports(const fp_query* query);
/* Writes the key of the kernel that serves such a call, cut to `size` bytes with the ending zero. */
FLASHPORT_API fp_status fp_which_kernel(const fp_query* query, char* key, size_t size);
/* Writes a sentence about how the first device of the target cuts and launches such a call: kernels, blocks, their
 * threads and shared memory, what they share (tiles, chunks, rows) and workspace; cut like the key. */
FLASHPORT_API fp_status fp_explain(const fp_query* query, char* text, size_t size);

/* The text of this thread's last failing call; "" before any. Valid until the thread's next failing call. */
FLASHPORT_API const char* fp_last_error(void);
/* "major.minor.patch" */
FLASHPORT_API const char* fp_version(void);

#ifdef __cplusplus
}
#endif

#endif /* FLASHPORT_CAPI_H_ */
