/* Uses the installed C interface, every operation of it: one request whose keys are equal, so that its output is the
 * mean of its values, is written into pages, decoded in one call and in two stages, and its blocks are merged; the
 * gated delta rule is held against its recurrence in double precision, and attention against its definition. */
#include "consumer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { kDim = 64, kTokens = 100, kPage = 16, kPages = 7, kBlock = 64, kBlocks = 2 };

static float tokens_k[kTokens][kDim], tokens_v[kTokens][kDim];
static float k_pages[kPages][kPage][kDim], v_pages[kPages][kPage][kDim];
static float q[kDim], out[kDim], lse, mid_out[kBlocks][kDim], mid_lse[kBlocks];
static int64_t positions[kTokens];
static int32_t block_table[kPages], slots[kTokens], request = 0, length = kTokens;
int good = 1;

fp_tensor contiguous(void* data, fp_dtype dtype, int rank, const int64_t* shape) {
  fp_tensor tensor;
  int64_t step = 1;
  int axis;
  memset(&tensor, 0, sizeof(tensor));
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = rank;
  for (axis = rank - 1; axis >= 0; --axis) {
    tensor.shape[axis] = shape[axis];
    tensor.strides[axis] = step;
    step *= shape[axis];
  }
  return tensor;
}

void expect(int holds, const char* what) {
  if (!holds) printf("consumer_c: failed: %s (%s)\n", what, fp_last_error());
  good = good && holds;
}

float random_number(void) {
  static uint32_t bits = 1;
  bits = bits * 1664525u + 1013904223u;
  return (float)(bits >> 8) / (1 << 23) - 1;
}

/* The values of tokens are 0, 1, ..; clears `out` and `lse` for the next call. */
static void expect_mean_of_all(const char* what) {
  int i;
  for (i = 0; i < kDim; ++i) expect(fabsf(out[i] - (kTokens - 1) / 2.0f) < 1e-4f, what);
  expect(fabsf(lse - logf(kTokens)) < 1e-5f, what);
  memset(out, 0, sizeof(out));
  lse = 0;
}

/* Causal attention of a prompt of two heads that share a kv head, and the mask of its dropout. */
enum { kHeads = 2, kRows = 5, kWidth = 16 };

static float aq[kRows][kHeads][kWidth], ak[kRows][kWidth], av[kRows][kWidth], aout[kRows][kHeads][kWidth];
static float alse[kHeads][kRows];

static void expect_row(int row, int head) {
  double weights[kRows], sum = 0, value;
  int key, i;
  for (key = 0; key <= row; ++key) {
    double product = 0;
    for (i = 0; i < kWidth; ++i) product += (double)aq[row][head][i] * ak[key][i];
    sum += weights[key] = exp(product / 4);
  }
  for (i = 0; i < kWidth; ++i) {
    for (value = 0, key = 0; key <= row; ++key) value += weights[key] / sum * av[key][i];
    expect(fabs(aout[row][head][i] - value) < 1e-5, "the output of attention");
  }
  expect(fabs(alse[head][row] - log(sum)) < 1e-5, "the lse of attention");
}

static void attend_a_prompt(void) {
  const int64_t q_shape[] = {1, kRows, kHeads, kWidth}, k_shape[] = {1, kRows, 1, kWidth},
                lse_shape[] = {1, kHeads, kRows}, mask_shape[] = {1, kHeads, kRows, kRows}, two[] = {2};
  const fp_tensor queries = contiguous(aq, fp_float32, 4, q_shape), keys = contiguous(ak, fp_float32, 4, k_shape),
                  values = contiguous(av, fp_float32, 4, k_shape), result = contiguous(aout, fp_float32, 4, q_shape),
                  lses = contiguous(alse, fp_float32, 3, lse_shape);
  static uint8_t kept[kHeads * kRows * kRows];
  static int64_t seed_and_offset[2] = {1, 2};
  const fp_tensor mask = contiguous(kept, fp_uint8, 4, mask_shape),
                  state = contiguous(seed_and_offset, fp_int64, 1, two);
  fp_attention_args call;
  fp_dropout_mask_args dropout;
  fp_query query;
  int64_t bytes = -1;
  char text[512];
  int i, row, head, ones = 0;

  for (i = 0; i < kRows * kHeads * kWidth; ++i) aq[0][0][i] = random_number();
  for (i = 0; i < kRows * kWidth; ++i) ak[0][i] = random_number();
  for (i = 0; i < kRows * kWidth; ++i) av[0][i] = random_number();
  FP_INIT(&call);
  call.q = &queries;
  call.k = &keys;
  call.v = &values;
  call.causal = 1;
  call.lse = &lses;
  expect(fp_attention(&call, 0) == fp_value_error, "attention without an output is refused");
  expect(strcmp(fp_last_error(), "attention: out must be given, got null") == 0, "the error names out");
  expect(fp_attention_workspace_size(&call, &bytes) == fp_ok && bytes > 0, "attention says what workspace it needs");
  call.out = &result;
  expect(fp_attention(&call, 0) == fp_ok, "attention runs");
  for (row = 0; row < kRows; ++row) {
    for (head = 0; head < kHeads; ++head) expect_row(row, head);
  }
  call.has_num_splits = 1;
  call.num_splits = 7;
  expect(fp_attention(&call, 0) == fp_ok, "attention runs with its keys in pieces");
  for (row = 0; row < kRows; ++row) {
    for (head = 0; head < kHeads; ++head) expect_row(row, head);
  }
  call.num_splits = 129;
  expect(fp_attention(&call, 0) == fp_value_error, "more pieces than 128 are refused");

  FP_INIT(&dropout);
  dropout.mask = &mask;
  dropout.rng_state = &state;
  dropout.dropout_p = 0.5;
  expect(fp_dropout_mask(&dropout, 0) == fp_ok, "the mask of dropout is drawn");
  for (i = 0; i < kHeads * kRows * kRows; ++i) ones += kept[i];
  expect(ones > 0 && ones < kHeads * kRows * kRows, "some weights are kept and some are not");

  FP_INIT(&query);
  query.operation = fp_op_attention;
  query.target = "cpu";
  query.dtype = fp_bfloat16;
  query.head_dim_qk = query.head_dim_v = 128;
  query.batch = query.num_kv_heads = 1;
  query.group_size = 4;
  query.q_len = query.max_kv_len = 1000;
  expect(fp_supports(&query) == fp_ok, "attention of bf16 is supported");
  expect(fp_which_kernel(&query, text, sizeof(text)) == fp_ok && strncmp(text, "attention/", 10) == 0, "its kernel");
  expect(fp_explain(&query, text, sizeof(text)) == fp_ok && strstr(text, " work tiles of ") != NULL, "it is explained");
  query.q_len = 100;
  query.max_kv_len = 65536;
  query.has_window = 1;
  query.window_left = -1;
  query.window_right = -1;
  expect(fp_explain(&query, text, sizeof(text)) == fp_ok && strstr(text, "merged in a second") != NULL, "keys are cut");
  query.window_left = 1000;
  expect(fp_explain(&query, text, sizeof(text)) == fp_ok && strstr(text, "keys in 1 piece;") != NULL,
         "a window is not");
  query.operation = fp_op_merge;
  query.tokens = 12;
  expect(fp_explain(&query, text, sizeof(text)) == fp_ok && strstr(text, " for 12 rows") != NULL,
         "a merge is explained");
}

/* Values are multiples of the scale that q4_0 finds for them, so that the way there and back loses nothing. */
static void check_blocks(void) {
  enum { kRows = 3, kBytes = kDim / 32 * 18 };
  static float rows[kRows][kDim], back[kRows][kDim];
  static unsigned char blocks[kRows][kBytes];
  const int64_t shape[] = {kRows, kDim}, blocks_shape[] = {kRows, kBytes};
  const fp_tensor numbers = contiguous(rows, fp_float32, 2, shape),
                  stored = contiguous(blocks, fp_uint8, 2, blocks_shape), read = contiguous(back, fp_float32, 2, shape);
  fp_quantize_kv_args quantize;
  fp_query query;
  char key[64];
  int row, i;
  for (row = 0; row < kRows; ++row) {
    for (i = 0; i < kDim; ++i) rows[row][i] = 0.25f * (float)((i + row) % 16 - 8);
  }
  FP_INIT(&quantize);
  quantize.x = &numbers;
  quantize.out = &stored;
  quantize.format = fp_format_q4_0;
  expect(fp_quantize_kv(&quantize, 0) == fp_ok, "rows become blocks");
  expect(blocks[0][0] == 0x00 && blocks[0][1] == 0x34, "the scale is 0.25 in fp16");
  quantize.x = &stored;
  quantize.out = &read;
  expect(fp_dequantize_kv(&quantize, 0) == fp_ok, "blocks become rows");
  expect(memcmp(rows, back, sizeof(rows)) == 0, "which are those that they were made of");
  quantize.format = fp_format_own;
  expect(fp_dequantize_kv(&quantize, 0) == fp_value_error, "blocks have a format of their own");
  FP_INIT(&query);
  query.target = "cpu";
  query.operation = fp_op_quantize;
  query.dtype = fp_float16;
  query.k_format = fp_format_q5_1;
  query.head_dim_qk = kDim;
  expect(fp_supports(&query) == fp_ok, "rows of fp16 become blocks too");
  expect(fp_which_kernel(&query, key, sizeof(key)) == fp_ok && strncmp(key, "quantize_kv/", 12) == 0, "by this kernel");
}

/* Blocks and after them the numbers that they hold are one cache of these numbers, bit for bit. */
static void check_segments(void) {
  enum { kOld = 3, kBytes = kDim / 32 * 18 };
  static float rows[2 * kOld][kDim], q[kDim], out[kDim], wanted[kDim];
  static unsigned char blocks[kOld][kBytes];
  const int64_t rows_shape[] = {kOld, kDim}, blocks_shape[] = {kOld, kBytes}, q_shape[] = {1, 1, kDim},
                old_shape[] = {1, kOld, 1, kBytes}, hot_shape[] = {1, kOld, 1, kDim},
                all_shape[] = {1, 2 * kOld, 1, kDim}, one[] = {1};
  static int32_t all_keys[] = {2 * kOld};
  const fp_tensor numbers = contiguous(rows, fp_float32, 2, rows_shape),
                  stored = contiguous(blocks, fp_uint8, 2, blocks_shape), query = contiguous(q, fp_float32, 3, q_shape),
                  old = contiguous(blocks, fp_uint8, 4, old_shape),
                  hot = contiguous(rows[kOld], fp_float32, 4, hot_shape),
                  all = contiguous(rows, fp_float32, 4, all_shape), keys = contiguous(all_keys, fp_int32, 1, one),
                  result = contiguous(out, fp_float32, 3, q_shape), other = contiguous(wanted, fp_float32, 3, q_shape);
  fp_quantize_kv_args quantize;
  fp_decode_segment segments[2];
  fp_mixed_decode_args mixed;
  fp_decode_args whole;
  fp_query asked;
  int64_t bytes = -1;
  char key[64];
  int row, i;
  for (row = 0; row < 2 * kOld; ++row) {
    for (i = 0; i < kDim; ++i) rows[row][i] = 0.25f * (float)((i * (row + 1)) % 16 - 8);
  }
  for (i = 0; i < kDim; ++i) q[i] = 0.1f * (float)(i % 7 - 3);
  FP_INIT(&quantize);
  quantize.x = &numbers;
  quantize.out = &stored;
  quantize.format = fp_format_q4_0;
  expect(fp_quantize_kv(&quantize, 0) == fp_ok, "the older rows become blocks");
  memset(segments, 0, sizeof(segments));
  segments[0].k = segments[0].v = &old;
  segments[0].k_format = segments[0].v_format = fp_format_q4_0;
  segments[1].k = segments[1].v = &hot;
  FP_INIT(&mixed);
  mixed.segment_size = sizeof(fp_decode_segment);
  mixed.q = &query;
  mixed.segments = segments;
  mixed.num_segments = 2;
  mixed.out = &result;
  expect(fp_flash_decode_mixed(&mixed, 0) == fp_ok, "two segments");
  expect(fp_mixed_workspace_size(&mixed, &bytes) == fp_ok && bytes >= 0, "their workspace has a size");
  FP_INIT(&whole);
  whole.q = &query;
  whole.k_cache = whole.v_cache = &all;
  whole.seqlens = &keys;
  whole.out = &other;
  expect(fp_flash_decode(&whole, 0) == fp_ok, "one cache");
  expect(memcmp(out, wanted, sizeof(out)) == 0, "give the same bits");
  mixed.by_segment = 1;
  expect(fp_flash_decode_mixed(&mixed, 0) == fp_ok, "and one launch for each");
  for (i = 0; i < kDim; ++i) expect(fabsf(out[i] - wanted[i]) < 1e-4f, "the same numbers");
  segments[1].k = NULL;
  expect(fp_flash_decode_mixed(&mixed, 0) == fp_value_error, "a segment needs keys");
  expect(strcmp(fp_last_error(), "flash_decode_mixed: segments[1]: k must be given, got null") == 0, "and says which");
  mixed.num_segments = 5;
  expect(fp_flash_decode_mixed(&mixed, 0) == fp_value_error, "there are four segments at most");
  FP_INIT(&asked);
  asked.target = "cpu";
  asked.dtype = fp_float32;
  asked.head_dim_qk = asked.head_dim_v = kDim;
  asked.group_size = asked.q_len = 1;
  asked.segment_formats = 1u << fp_format_q4_0 | 1u << fp_format_fp32;
  expect(fp_which_kernel(&asked, key, sizeof(key)) == fp_ok && strstr(key, "/kv=any/") != NULL, "by this kernel");
}

int main(void) {
  const int64_t q_shape[] = {1, 1, kDim}, lse_shape[] = {1, 1}, kv_shape[] = {kTokens, 1, kDim},
                pages_shape[] = {kPages, kPage, 1, kDim}, table_shape[] = {1, kPages}, slots_shape[] = {1, kTokens},
                mid_shape[] = {1, 1, kBlocks, kDim}, mid_lse_shape[] = {1, 1, kBlocks}, one[] = {1},
                state_shape[] = {kBlocks, 1, 1, kDim}, state_lse_shape[] = {kBlocks, 1, 1}, tokens_shape[] = {kTokens};
  const fp_tensor query = contiguous(q, fp_float32, 3, q_shape), result = contiguous(out, fp_float32, 3, q_shape),
                  result_lse = contiguous(&lse, fp_float32, 2, lse_shape),
                  k = contiguous(tokens_k, fp_float32, 3, kv_shape), v = contiguous(tokens_v, fp_float32, 3, kv_shape),
                  k_cache = contiguous(k_pages, fp_float32, 4, pages_shape),
                  v_cache = contiguous(v_pages, fp_float32, 4, pages_shape),
                  places = contiguous(positions, fp_int64, 1, tokens_shape),
                  pages = contiguous(block_table, fp_int32, 2, table_shape),
                  lengths = contiguous(&length, fp_int32, 1, one), requests = contiguous(&request, fp_int32, 1, one),
                  table = contiguous(slots, fp_int32, 2, slots_shape),
                  parts_lse = contiguous(mid_lse, fp_float32, 3, mid_lse_shape),
                  states = contiguous(mid_out, fp_float32, 4, state_shape),
                  states_lse = contiguous(mid_lse, fp_float32, 3, state_lse_shape),
                  first = contiguous(mid_out[0], fp_float32, 3, q_shape),
                  first_lse = contiguous(&mid_lse[0], fp_float32, 2, lse_shape),
                  second = contiguous(mid_out[1], fp_float32, 3, q_shape),
                  second_lse = contiguous(&mid_lse[1], fp_float32, 2, lse_shape);
  fp_tensor parts = contiguous(mid_out, fp_float32, 4, mid_shape);
  fp_append_kv_args append;
  fp_decode_args decode;
  fp_decode_stage1_args stage1;
  fp_decode_stage2_args stage2;
  fp_merge_states_args merge_all;
  fp_merge_state_args merge_two;
  fp_query kernel;
  int64_t bytes = -1;
  char key[128];
  int i, token;

  for (i = 0; i < kDim; ++i) q[i] = 1.0f;
  for (i = 0; i < kPages; ++i) block_table[i] = kPages - 1 - i;
  for (token = 0; token < kTokens; ++token) {
    for (i = 0; i < kDim; ++i) tokens_v[token][i] = (float)token;
    positions[token] = block_table[token / kPage] * kPage + token % kPage;
    slots[token] = token;
  }

  FP_INIT(&append);
  append.k = &k;
  append.v = &v;
  append.k_cache = &k_cache;
  append.v_cache = &v_cache;
  append.positions = &places;
  expect(fp_append_kv(&append, 0) == fp_ok, "tokens are written into pages");
  expect(v_pages[0][kTokens % kPage - 1][0] == kTokens - 1, "the last token lies in the first page");

  FP_INIT(&decode);
  decode.q = &query;
  decode.k_cache = &k_cache;
  decode.v_cache = &v_cache;
  decode.seqlens = &lengths;
  decode.block_table = &pages;
  decode.out = &result;
  decode.lse = &result_lse;
  expect(fp_flash_decode(&decode, 0) == fp_ok, "decode runs");
  expect_mean_of_all("the output of decode");
  expect(fp_decode_workspace_size(&decode, &bytes) == fp_ok && bytes >= 0, "decode says what workspace it needs");

  FP_INIT(&stage1);
  stage1.q = &query;
  stage1.k = &k;
  stage1.v = &v;
  stage1.req_to_tokens = &table;
  stage1.b_req_idx = &requests;
  stage1.b_seqlen = &lengths;
  stage1.max_len_in_batch = kTokens;
  stage1.block_seq = kBlock;
  stage1.mid_out = &parts;
  stage1.mid_out_logsumexp = &parts_lse;
  expect(fp_flash_decode_stage1(&stage1, 0) == fp_ok, "stage 1 runs");
  expect(fabsf(mid_out[0][5] - 31.5f) < 1e-4f && fabsf(mid_out[1][5] - 81.5f) < 1e-4f, "the blocks' means");

  FP_INIT(&stage2);
  stage2.mid_out = &parts;
  stage2.mid_out_logexpsum = &parts_lse;
  stage2.b_seqlen = &lengths;
  stage2.out = &result;
  stage2.lse = &result_lse;
  stage2.block_seq = kBlock;
  expect(fp_flash_decode_stage2(&stage2, 0) == fp_ok, "stage 2 runs");
  expect_mean_of_all("the output of stage 2");

  FP_INIT(&merge_all);
  merge_all.o = &states;
  merge_all.lse = &states_lse;
  merge_all.out = &result;
  merge_all.out_lse = &result_lse;
  expect(fp_merge_states(&merge_all, 0) == fp_ok, "states merge");
  expect_mean_of_all("the merge of all states");

  FP_INIT(&merge_two);
  merge_two.o_a = &first;
  merge_two.lse_a = &first_lse;
  merge_two.o_b = &second;
  merge_two.lse_b = &second_lse;
  merge_two.out = &result;
  merge_two.out_lse = &result_lse;
  expect(fp_merge_state(&merge_two, 0) == fp_ok, "two states merge");
  expect_mean_of_all("the merge of two states");

  parts.rank = 3;
  expect(fp_flash_decode_stage2(&stage2, 0) == fp_value_error, "a tensor of the wrong rank is refused");
  expect(strstr(fp_last_error(), "mid_out") != NULL, "the error names mid_out");
  expect(out[0] == 0.0f, "and nothing is written");

  FP_INIT(&kernel);
  kernel.target = "cpu";
  kernel.dtype = fp_bfloat16;
  kernel.head_dim_qk = kernel.head_dim_v = 128;
  kernel.group_size = 4;
  kernel.q_len = 1;
  expect(fp_supports(&kernel) == fp_ok, "bf16 is supported");
  expect(fp_which_kernel(&kernel, key, sizeof(key)) == fp_ok, "the CPU decodes bf16");
  kernel.k_format = kernel.v_format = fp_format_q8_0;
  expect(fp_supports(&kernel) == fp_ok, "a cache of q8_0 is supported");
  kernel.v_format = fp_format_own;
  expect(fp_supports(&kernel) == fp_ok, "and so is K of q8_0 with V of bf16, which a kernel widens");
  expect(fp_which_kernel(&kernel, key, sizeof(key)) == fp_ok && strstr(key, "any") != NULL, "its name says so");
  kernel.q_len = 17;
  expect(fp_supports(&kernel) == fp_not_supported, "17 new tokens are not");
  expect(strstr(fp_last_error(), "17") != NULL, "it says what is too many");
  expect(fp_num_splits_heuristic(8, 108, 16, 128) > 1, "few tiles are split");

  update_a_draft();
  prefill_a_prompt();
  ask_for_the_gated_delta_rule();
  attend_a_prompt();
  check_blocks();
  check_segments();
  printf("flashport %s, %s: %s\n", fp_version(), key, good ? "good" : "failed");
  return good ? 0 : 1;
}
