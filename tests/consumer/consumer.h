/* What the programs of the C interface share. */
#include <flashport/capi.h>

#include <stdint.h>

/* 1 until an expectation fails. */
extern int good;
void expect(int holds, const char* what);
fp_tensor contiguous(void* data, fp_dtype dtype, int rank, const int64_t* shape);
float random_number(void); /* in [-1, 1) */

/* The gated delta rule (gated_delta.c). */
void update_a_draft(void);
void prefill_a_prompt(void);
void ask_for_the_gated_delta_rule(void);
