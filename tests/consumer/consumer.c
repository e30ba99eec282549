/* Uses the installed C interface: merges two blocks of one request (stage 2), and reads an error text. */
#include <flashport/capi.h>

#include <stdio.h>
#include <string.h>

enum { kDim = 16 };

static fp_tensor contiguous(void* data, fp_dtype dtype, int rank, const int64_t* shape) {
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

static int expect(int holds, const char* what) {
  if (!holds) printf("consumer_c: failed: %s (%s)\n", what, fp_last_error());
  return holds;
}

int main(void) {
  float mid_out[2 * kDim], mid_lse[2], out[kDim];
  int32_t length = 100;
  const int64_t mid_shape[] = {1, 1, 2, kDim}, lse_shape[] = {1, 1, 2}, length_shape[] = {1},
                out_shape[] = {1, 1, kDim};
  fp_tensor mid, lse, lengths, merged;
  fp_decode_stage2_args args;
  fp_decode_query query;
  char key[128];
  int i, good = 1;

  for (i = 0; i < kDim; ++i) {
    mid_out[i] = 1.0f;
    mid_out[kDim + i] = 4.0f;
  }
  mid_lse[0] = 0.0f; /* weights 1 and 2 */
  mid_lse[1] = 0.69314718f;
  mid = contiguous(mid_out, fp_float32, 4, mid_shape);
  lse = contiguous(mid_lse, fp_float32, 3, lse_shape);
  lengths = contiguous(&length, fp_int32, 1, length_shape);
  merged = contiguous(out, fp_float32, 3, out_shape);
  FP_INIT(&args);
  args.mid_out = &mid;
  args.mid_out_logexpsum = &lse;
  args.b_seqlen = &lengths;
  args.out = &merged;
  args.block_seq = 64;
  good = expect(fp_flash_decode_stage2(&args, 0) == fp_ok, "stage 2 runs") && good;
  for (i = 0; i < kDim; ++i) good = expect(out[i] > 2.99999f && out[i] < 3.00001f, "(1 * 1 + 2 * 4) / 3 is 3") && good;

  mid.rank = 3;
  good = expect(fp_flash_decode_stage2(&args, 0) == fp_value_error, "a tensor of the wrong rank is refused") && good;
  good = expect(strstr(fp_last_error(), "mid_out") != NULL, "the error names mid_out") && good;

  FP_INIT(&query);
  query.target = "cpu";
  query.kv = "bf16";
  query.q_dtype = fp_bfloat16;
  query.head_dim_qk = query.head_dim_v = 128;
  query.group_size = 4;
  query.q_len = 1;
  good = expect(fp_which_kernel(&query, key, sizeof(key)) == fp_ok, "the CPU decodes bf16") && good;
  printf("flashport %s, %s: %s\n", fp_version(), key, good ? "good" : "failed");
  return good ? 0 : 1;
}
