/* The gated delta rule through the C interface, held against its recurrence in double precision. */
#include "consumer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* The gated delta rule of one sequence in slot 1 of 2: a query head, kHeads value heads. */
enum { kHeads = 2, kKeys = 16, kValues = 24, kState = kKeys * kValues, kPrompt = 70, kDraft = 3 };

static float dq[kPrompt][kKeys], dk[kPrompt][kKeys], dv[kPrompt][kHeads][kValues], dout[kPrompt][kHeads][kValues];
static float gates[kPrompt][kHeads], rates[kPrompt][kHeads], pool[2][kHeads][kState];
static struct {
  fp_tensor q, k, v, out, gates, rates, pool;
} prompt;
static double truth[kHeads][kKeys][kValues];

/* Element (key, value) of the state of a head, as the pool has it. */
static float* stored(int head, int key, int value, int keys_outside) {
  return &pool[1][head][keys_outside ? key * kValues + value : value * kKeys + key];
}

/* Random numbers; `prompt` has so many tokens of them, `truth` the states. */
static void make_prompt(int tokens, int keys_outside) {
  const int64_t q_shape[] = {1, tokens, 1, kKeys}, v_shape[] = {1, tokens, kHeads, kValues},
                gate_shape[] = {1, tokens, kHeads},
                pool_shape[] = {2, kHeads, keys_outside ? kKeys : kValues, keys_outside ? kValues : kKeys};
  float* arrays[] = {dq[0], dk[0], dv[0][0], gates[0], rates[0], pool[1][0]};
  const int counts[] = {kPrompt * kKeys,  kPrompt * kKeys,  kPrompt * kHeads * kValues,
                        kPrompt * kHeads, kPrompt * kHeads, kHeads * kState};
  int array, i, head, key, value;
  for (array = 0; array < 6; ++array) {
    for (i = 0; i < counts[array]; ++i) arrays[array][i] = random_number();
  }
  for (i = 0; i < kPrompt * kKeys; ++i) dk[0][i] /= 4;
  for (i = 0; i < kPrompt * kHeads * kValues; ++i) dout[0][0][i] = NAN;
  for (i = 0; i < kHeads * kState; ++i) pool[0][0][i] = NAN;
  for (head = 0; head < kHeads; ++head) {
    for (key = 0; key < kKeys; ++key) {
      for (value = 0; value < kValues; ++value) truth[head][key][value] = *stored(head, key, value, keys_outside);
    }
  }
  prompt.q = contiguous(dq, fp_float32, 4, q_shape);
  prompt.k = contiguous(dk, fp_float32, 4, q_shape);
  prompt.v = contiguous(dv, fp_float32, 4, v_shape);
  prompt.out = contiguous(dout, fp_float32, 4, v_shape);
  prompt.gates = contiguous(gates, fp_float32, 3, gate_shape);
  prompt.rates = contiguous(rates, fp_float32, 3, gate_shape);
  prompt.pool = contiguous(pool, fp_float32, 4, pool_shape);
}

/* One token of the recurrence on `truth`; g is the logarithm of the decay. */
static void expect_token(int token, int head, double g, double rate, const char* what) {
  int key, value;
  for (value = 0; value < kValues; ++value) {
    double seen = 0, out_value = 0, learned;
    for (key = 0; key < kKeys; ++key) seen += (truth[head][key][value] *= exp(g)) * dk[token][key];
    learned = rate * (dv[token][head][value] - seen);
    for (key = 0; key < kKeys; ++key) {
      truth[head][key][value] += dk[token][key] * learned;
      out_value += truth[head][key][value] * dq[token][key] / sqrt(kKeys);
    }
    expect(fabs(dout[token][head][value] - out_value) < 1e-5, what);
  }
}

/* The state that was left is the truth's, and the other slot was not written. */
static void expect_states(int keys_outside, const char* what) {
  int head, key, value, i;
  for (head = 0; head < kHeads; ++head) {
    for (key = 0; key < kKeys; ++key) {
      for (value = 0; value < kValues; ++value) {
        expect(fabs(*stored(head, key, value, keys_outside) - truth[head][key][value]) < 1e-5, what);
      }
    }
  }
  for (i = 0; i < kHeads * kState; ++i) expect(isnan(pool[0][0][i]), what);
}

void update_a_draft(void) {
  static float a_log[kHeads] = {-0.5f, 0.25f}, bias[kHeads] = {0.5f, -1.0f};
  static int64_t slot = 1;
  const int64_t head_shape[] = {kHeads}, one[] = {1};
  const fp_tensor speed = contiguous(a_log, fp_float32, 1, head_shape),
                  shift = contiguous(bias, fp_float32, 1, head_shape), slots_of = contiguous(&slot, fp_int64, 1, one);
  fp_gated_delta_update_args update;
  int token, head;

  make_prompt(kDraft, 0);
  FP_INIT(&update);
  update.q = &prompt.q;
  update.k = &prompt.k;
  update.v = &prompt.v;
  update.out = &prompt.out;
  update.a = &prompt.gates;
  update.b = &prompt.rates;
  update.a_log = &speed;
  update.dt_bias = &shift;
  update.state = &prompt.pool;
  update.state_indices = &slots_of;
  update.state_layout = 2;
  expect(fp_gated_delta_update(&update, 0) == fp_value_error, "a layout that is none is refused");
  expect(strstr(fp_last_error(), "state_layout must be fp_vk or fp_kv, got 2") != NULL, "the error names the layout");
  update.state_layout = fp_vk;
  update.has_scale = 1;
  expect(fp_gated_delta_update(&update, 0) == fp_value_error, "scale 0 is refused");
  expect(isnan(dout[0][0][0]), "and nothing is written");
  update.has_scale = 0;
  expect(fp_gated_delta_update(&update, 0) == fp_ok, "the update runs");
  for (token = 0; token < kDraft; ++token) {
    for (head = 0; head < kHeads; ++head) {
      const double g = -exp(a_log[head]) * log1p(exp(gates[token][head] + bias[head]));
      expect_token(token, head, g, 1 / (1 + exp(-rates[token][head])), "the output of the update");
    }
  }
  expect(isnan(dout[kDraft][0][0]), "nothing behind the draft is written");
  expect_states(0, "the states that the update leaves");
}

void prefill_a_prompt(void) {
  static int32_t slot = 1;
  const int64_t one[] = {1};
  const fp_tensor slots_of = contiguous(&slot, fp_int32, 1, one);
  fp_gated_delta_chunk_args prefill;
  int64_t bytes = -1;
  int token, head;

  make_prompt(kPrompt, 1);
  for (token = 0; token < kPrompt * kHeads; ++token) {
    gates[0][token] = -fabsf(gates[0][token]) / 8;
    rates[0][token] = fabsf(rates[0][token]);
  }
  FP_INIT(&prefill);
  prefill.q = &prompt.q;
  prefill.k = &prompt.k;
  prefill.v = &prompt.v;
  prefill.out = &prompt.out;
  prefill.g = &prompt.gates;
  prefill.state = &prompt.pool;
  prefill.state_indices = &slots_of;
  prefill.state_layout = fp_kv;
  expect(fp_gated_delta_chunk(&prefill, 0) == fp_value_error, "a call without rates is refused");
  expect(strcmp(fp_last_error(), "gated_delta_chunk: beta must be given, got null") == 0, "the error names beta");
  prefill.beta = &prompt.rates;
  expect(fp_gated_delta_chunk_workspace_size(&prefill, &bytes) == fp_ok && bytes > 0, "the chunks need a workspace");
  expect(isnan(dout[0][0][0]), "nothing is written yet");
  expect(fp_gated_delta_chunk(&prefill, 0) == fp_ok, "the chunks run");
  for (token = 0; token < kPrompt; ++token) {
    for (head = 0; head < kHeads; ++head) {
      expect_token(token, head, gates[token][head], rates[token][head], "the output of the chunks");
    }
  }
  expect_states(1, "the states that the chunks leave");
}

void ask_for_the_gated_delta_rule(void) {
  fp_query query;
  char key[128], text[512];
  FP_INIT(&query);
  query.operation = fp_op_gated_delta_chunk;
  query.target = "cpu";
  query.dtype = fp_bfloat16;
  query.state_dtype = fp_float32;
  query.head_dim_qk = query.head_dim_v = 128;
  expect(fp_supports(&query) == fp_ok, "chunks of bf16 are supported");
  expect(fp_which_kernel(&query, key, sizeof(key)) == fp_ok, "the CPU has chunks");
  expect(strncmp(key, "gated_delta_chunk/", 18) == 0, "the key is that of the chain");
  query.batch = query.num_kv_heads = 1;
  query.group_size = 2;
  query.tokens = 100;
  expect(fp_explain(&query, text, sizeof(text)) == fp_ok, "how they are cut is explained");
  expect(strstr(text, " for 2 chunks of 64 tokens, then ") != NULL, "their chunks are counted");
  query.head_dim_v = 300;
  expect(fp_supports(&query) == fp_not_supported, "a head dim of 300 is not");
  expect(strstr(fp_last_error(), "head_dim_v must be a multiple of 8 from 16 to 256, got 300") != NULL, "it says why");
}
