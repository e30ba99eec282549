// The gated delta rule (Qwen3-Next, Kimi linear attention): a recurrence over a state S [K, V] for each value head.
// All calls are asynchronous on `stream`, validate on the host before they read a size or a stride, and leave every
// output untouched when they throw. An output shares no element with another argument. Symbols in shapes: N sequences,
// B batch rows, T tokens of a row, H query and key heads, HV value heads (a multiple of H), K and V head dimensions (16
// to 256, multiples of 8).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <flashport/enums.h>
#include <flashport/export.h>
#include <flashport/types.h>

namespace flashport {

// Order of the inner axes of a state. VK: (..., HV, V, K), as SGLang has it today. KV: (..., HV, K, V), as FLA has it.
enum class StateLayout : std::int32_t { kVK, kKV };

// The query head of value head hv: hv / (HV / H), or hv % H (llama.cpp).
enum class HeadMap : std::int32_t { kConsecutive, kModulo };

// Per token, in fp32:
//   S *= exp(g);   u = beta * (v - S^T k);   S += k u^T;   out = S^T (scale * q)
// g comes as it is, or from a: with x = a + dt_bias
//   g = -exp(A_log) * softplus(x), or with lower_bound g = lower_bound * sigmoid(exp(A_log) * x)
// softplus(x) = log1p(exp(softplus_beta * x)) / softplus_beta while softplus_beta * x <= softplus_threshold, else x.
// gk and gv decay rows and columns of S on top of that: S *= exp(g + gk) exp(gv)^T. Without any of them nothing decays.
// beta comes as it is, or is sigmoid(b); without either it is 1.
struct GatedDeltaUpdateArgs {
  TensorView q, k;  // (B, T, H, K) fp16, bf16 or fp32; stride 1 along K
  TensorView v;     // (B, T, HV, V), type of q; stride 1 along V

  // Gates; of tokens fp16, bf16 or fp32, any strides. Not a and g, nor b and beta.
  std::optional<TensorView> a;        // (B, T, HV) or (B * T, HV); is_kda: with HV * K, or HV, K in place of HV
  std::optional<TensorView> b;        // (B, T, HV), (B * T, HV), or of columns (B, T, HV, V)
  std::optional<TensorView> a_log;    // HV elements, fp32, bf16 or fp16; with a
  std::optional<TensorView> dt_bias;  // HV elements, is_kda: HV * K; fp32, bf16 or fp16; only with a
  std::optional<TensorView> g;        // (B, T, HV) or (B * T, HV)
  std::optional<TensorView> gk;       // (B, T, HV, K)
  std::optional<TensorView> gv;       // (B, T, HV, V)
  std::optional<TensorView> beta;     // (B, T, HV), (B * T, HV), or of columns (B, T, HV, V)

  // The pool of states, fp32, bf16 or fp16; slots may lie apart, their inner axes are dense. All 16-bit
  // states of a call have one type. Sequence n starts from slot state_indices[n] and leaves its last state there; an
  // index below 0 starts at zero and writes nothing, as does a call without a pool. Slots of one call that are written
  // must differ: an error on the CPU, undefined on a GPU.
  std::optional<TensorView> state;          // (slots, HV, V, K) or (slots, HV, K, V)
  std::optional<TensorView> state_indices;  // (N) int32 or int64; default 0..N-1
  StateLayout state_layout = StateLayout::kVK;
  bool update_state = true;

  // The states that sequences end with, also of those without tokens, and of those whose index is below 0.
  std::optional<TensorView> final_states;  // (N, HV, V, K) or (N, HV, K, V) fp32, bf16, fp16

  // N = B, or with cu_seqlens B = 1 and N + 1 offsets into T. A sequence without tokens leaves its slot and out alone.
  std::optional<TensorView> cu_seqlens;  // (N + 1) int32 or int64

  // Speculative verify: the state after each token t of sequence n goes to [intermediate_indices[n], t]; an index below
  // 0 stores nothing. With parent_tokens token t > 0 starts from the state that was stored for its parent in [0, t)
  // (from the token before it where nothing is stored), and token 0 from the pool.
  std::optional<TensorView> intermediate_states;   // (slots, steps, HV, V, K) or (slots, steps, HV, K, V), as `state`
  std::optional<TensorView> intermediate_indices;  // (N) int32 or int64
  std::optional<TensorView> parent_tokens;         // (N, steps) int32 or int64, any strides

  std::optional<double> scale;  // default 1 / sqrt(K)
  double softplus_beta = 1.0;
  double softplus_threshold = 20.0;
  std::optional<double> lower_bound;
  bool use_qk_l2norm = false;     // x / sqrt(sum x^2 + 1e-6) for q and k
  bool is_kda = false;            // a has a gate for each of the K channels
  bool allow_neg_eigval = false;  // beta = 2 * sigmoid(b)
  bool zero_padding = false;      // the output of a sequence whose index is below 0 is zeros
  HeadMap head_map = HeadMap::kConsecutive;

  TensorView out;  // (B, T, HV, V), type of q; stride 1 along V
};
FLASHPORT_API void gated_delta_update(const GatedDeltaUpdateArgs& args, Stream stream = 0);

// The same recurrence for prompts, by chunks of 64 tokens, counted from a sequence's first one, whose triangular system
// is solved with matrix products (the WY form). g comes in log space, or with a_log as the gate's input:
//   g = -exp(A_log) * softplus(g + dt_bias)
struct GatedDeltaChunkArgs {
  TensorView q, k;  // (B, T, H, K) fp16, bf16 or fp32; stride 1 along K
  TensorView v;     // (B, T, HV, V), type of q; stride 1 along V
  TensorView g;     // (B, T, HV) fp32, fp16 or bf16; one below -120 counts as -120
  TensorView beta;  // (B, T, HV) fp32, fp16 or bf16

  std::optional<TensorView> a_log;    // HV elements; fp32, bf16 or fp16
  std::optional<TensorView> dt_bias;  // HV elements; fp32, bf16 or fp16; only with a_log
  bool beta_sigmoid = false;          // beta = sigmoid(beta)
  bool allow_neg_eigval = false;      // beta = 2 * sigmoid(beta); only with beta_sigmoid

  // As those of GatedDeltaUpdateArgs. A sequence without tokens leaves its slot alone.
  std::optional<TensorView> state;          // (slots, HV, V, K) or (slots, HV, K, V)
  std::optional<TensorView> state_indices;  // (N) int32 or int64; default 0..N-1
  StateLayout state_layout = StateLayout::kVK;
  bool update_state = true;

  // The states that sequences end with, also of those without tokens, and of those whose index is below 0.
  std::optional<TensorView> final_states;  // (N, HV, V, K) or (N, HV, K, V) fp32, bf16, fp16
  // The states that enter the chunks of a row of the batch; with cu_seqlens those of sequence n after those of n - 1.
  std::optional<TensorView> chunk_states;  // (B, chunks, HV, V, K) or (B, chunks, HV, K, V), type of k

  // N = B, or with cu_seqlens B = 1 and N + 1 offsets into T.
  std::optional<TensorView> cu_seqlens;  // (N + 1) int32 or int64

  std::optional<double> scale;  // default 1 / sqrt(K)
  bool use_qk_l2norm = false;   // x / sqrt(sum x^2 + 1e-6) for q and k
  HeadMap head_map = HeadMap::kConsecutive;

  std::optional<TensorView> workspace;  // uint8 (gated_delta_chunk_workspace_size bytes), not one of decode
  TensorView out;                       // (B, T, HV, V), type of q; stride 1 along V
};
FLASHPORT_API void gated_delta_chunk(const GatedDeltaChunkArgs& args, Stream stream = 0);

// Bytes that a call with these arguments needs as workspace; depends on shapes and the device, never on lengths.
// Nothing is allocated, read or written; `out` may be left out (rank 0, null data).
[[nodiscard]] FLASHPORT_API std::int64_t gated_delta_chunk_workspace_size(const GatedDeltaChunkArgs& args);

// What a target can do: supports(), which_kernel() and explain() as decode.h has them.

// gated_delta_update.
struct GatedDeltaQuery {
  std::string target = "cpu";
  DType q_dtype = DType::kBFloat16;
  DType state_dtype = DType::kFloat32;  // also where there is no pool
  std::int64_t head_dim_k = 128;
  std::int64_t head_dim_v = 128;
  StateLayout state_layout = StateLayout::kVK;
  GateForm gate = GateForm::kHead;
};
[[nodiscard]] FLASHPORT_API Support supports(const GatedDeltaQuery& query);
// "gated_delta_update/state=fp32/vk/gate=head/k128/sm90a"
[[nodiscard]] FLASHPORT_API std::string which_kernel(const GatedDeltaQuery& query);

struct GatedDeltaScheduleQuery {
  GatedDeltaQuery call;
  std::int64_t batch = 1;        // sequences
  std::int64_t num_v_heads = 1;  // HV
};
struct GatedDeltaSchedule {
  std::string kernel;                // as which_kernel() gives it
  std::int64_t columns = 0;          // of V that a block takes, with all of K
  std::int64_t threads = 0;          // of a block of the device
  std::int64_t teams = 1;            // blocks of the grid that one of the device holds
  std::int64_t slices = 0;           // of a state: so many blocks share its columns
  std::int64_t blocks = 0;           // of the grid: one for each slice of each sequence's and head's state
  std::int64_t shared_bytes = 0;     // of a block of the device
  std::int64_t workspace_bytes = 0;  // none is needed
  std::string text;                  // all of this in a sentence
};
[[nodiscard]] FLASHPORT_API GatedDeltaSchedule explain(const GatedDeltaScheduleQuery& query);

// gated_delta_chunk, which has two kernels: the key is that of the chain over its chunks.
struct GatedDeltaChunkQuery {
  std::string target = "cpu";
  DType q_dtype = DType::kBFloat16;
  DType state_dtype = DType::kFloat32;  // also where there is no pool
  std::int64_t head_dim_k = 128;
  std::int64_t head_dim_v = 128;
  StateLayout state_layout = StateLayout::kVK;
  GateForm gate = GateForm::kHead;
};
[[nodiscard]] FLASHPORT_API Support supports(const GatedDeltaChunkQuery& query);
[[nodiscard]] FLASHPORT_API std::string which_kernel(const GatedDeltaChunkQuery& query);

struct GatedDeltaChunkScheduleQuery {
  GatedDeltaChunkQuery call;
  std::int64_t batch = 1;                       // sequences
  std::int64_t num_heads = 1, num_v_heads = 1;  // H and HV
  std::int64_t tokens = 1;                      // T: of every sequence, or packed of all together
  bool packed = false;                          // with cu_seqlens
};
// The first launch prepares chunks, the second carries the states over them. For packed sequences the shapes give the
// most chunks that there may be.
struct GatedDeltaChunkSchedule {
  std::string kernel;                // of the second launch, as which_kernel() gives it
  std::int64_t columns = 0;          // of V that a block takes, with all of K
  std::int64_t threads = 0;          // of a block
  std::int64_t blocks = 0;           // of the grid
  std::int64_t shared_bytes = 0;     // of a block
  std::string prepare_kernel;        // of the first launch
  std::int64_t prepare_threads = 0;  // of a block of the device
  std::int64_t prepare_teams = 1;    // blocks of the grid that one of the device holds
  std::int64_t prepare_blocks = 0;   // of the grid
  std::int64_t prepare_shared_bytes = 0;
  std::int64_t chunk_tokens = 0;  // of a chunk
  std::int64_t chunks = 0;        // of all sequences
  bool concurrent = false;        // the launches run side by side
  std::int64_t workspace_bytes = 0;
  std::string text;  // all of this in a sentence
};
[[nodiscard]] FLASHPORT_API GatedDeltaChunkSchedule explain(const GatedDeltaChunkScheduleQuery& query);

}  // namespace flashport
