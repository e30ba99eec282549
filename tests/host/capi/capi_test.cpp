// The C interface over the operations: which members of a struct reach a kernel, and which errors a caller gets.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include <flashport/backend.h>
#include <flashport/capi.h>
#include <flashport/gated_delta.h>

#include "common/device/gated_delta/chunk_params.h"
#include "common/device/gated_delta/params.h"
#include "tests/host/capi/to_c.h"
#include "tests/host/decode/decode_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

struct CInterface : ::testing::Test {
  FakeBackends backends_;
};

TEST_F(CInterface, DecodesAndReportsErrors) {
  DecodeInputs inputs;
  fp_tensor q = to_c(inputs.args.q);
  const fp_tensor k = to_c(inputs.args.k_cache);
  const fp_tensor v = to_c(inputs.args.v_cache);
  const fp_tensor lengths = to_c(inputs.args.seqlens);
  const fp_tensor table = to_c(*inputs.args.block_table);
  const fp_tensor out = to_c(inputs.args.out);
  fp_decode_args args;
  FP_INIT(&args);
  args.q = &q;
  args.k_cache = &k;
  args.v_cache = &v;
  args.seqlens = &lengths;
  args.block_table = &table;
  args.out = &out;
  EXPECT_EQ(fp_flash_decode(&args, 0), fp_ok) << fp_last_error();
  const auto p = fake_state().launches.at(0).as<DecodeParams>();
  EXPECT_EQ(p.window_left, -1);
  EXPECT_EQ(p.num_chunks, 0);
  std::int64_t bytes = 0;
  EXPECT_EQ(fp_decode_workspace_size(&args, &bytes), fp_ok);
  EXPECT_GT(bytes, 0);

  q.rank = 2;
  EXPECT_EQ(fp_flash_decode(&args, 0), fp_value_error);
  EXPECT_NE(std::string(fp_last_error()).find("flash_decode: q must have 3 dimensions"), std::string::npos);
  q.rank = 9;
  EXPECT_EQ(fp_flash_decode(&args, 0), fp_value_error);
  q = to_c(inputs.args.q);
  q.dtype = fp_int32;
  EXPECT_EQ(fp_flash_decode(&args, 0), fp_type_error);
  q.dtype = fp_float8_e5m2 + 1;
  EXPECT_EQ(refusal(fp_flash_decode(&args, 0), fp_value_error),
            "flash_decode: q must have a dtype of fp_dtype, got 11");
  q = to_c(inputs.args.q);
  args.k_format = fp_format_int4 + 1;
  EXPECT_EQ(refusal(fp_flash_decode(&args, 0), fp_value_error),
            "flash_decode: k_format must be one of fp_kv_format, got 15");
  args.k_format = fp_format_q8_0;
  EXPECT_EQ(fp_flash_decode(&args, 0), fp_type_error);
  EXPECT_EQ(std::string(fp_last_error()).find("flash_decode: k_cache must be uint8 for k_format=\"q8_0\""), 0u);
  args.k_format = args.v_format = fp_format_bf16;
  EXPECT_EQ(fp_flash_decode(&args, 0), fp_ok);
  args.out = nullptr;
  EXPECT_EQ(fp_decode_workspace_size(&args, &bytes), fp_ok);
  EXPECT_EQ(refusal(fp_flash_decode(&args, 0), fp_value_error), "flash_decode: out must be given, got null");
  args.q = nullptr;
  EXPECT_EQ(refusal(fp_flash_decode(&args, 0), fp_value_error), "flash_decode: q must be given, got null");
  args.struct_size += 1;
  EXPECT_EQ(fp_flash_decode(&args, 0), fp_value_error);
  EXPECT_EQ(fp_flash_decode(nullptr, 0), fp_value_error);
}

// Asks about one token and one head of 128 in bf16.
fp_query decode_query() {
  fp_query query;
  FP_INIT(&query);
  query.target = "fakegpu";
  query.dtype = fp_bfloat16;
  query.head_dim_qk = query.head_dim_v = 128;
  query.group_size = query.q_len = 1;
  return query;
}

TEST_F(CInterface, Queries) {
  fp_query query = decode_query();
  EXPECT_EQ(fp_supports(&query), fp_ok);
  char key[16];
  EXPECT_EQ(fp_which_kernel(&query, key, sizeof(key)), fp_ok);
  EXPECT_STREQ(key, "decode/bf16/kv=");
  query.q_len = 17;
  EXPECT_EQ(refusal(fp_supports(&query), fp_not_supported), "q_len must be 1 to 16, got 17");
  query.q_len = 1;
  query.k_format = fp_format_q8_0;
  EXPECT_EQ(fp_supports(&query), fp_not_supported);
  EXPECT_EQ(std::string(fp_last_error()).find("fakegpu has no kernel for k=q8_0 with v=bf16; it has"), 0u);
  query.v_format = fp_format_fp8_e4m3;
  char pair[64];
  EXPECT_EQ(fp_which_kernel(&query, pair, sizeof(pair)), fp_ok);
  EXPECT_STREQ(pair, "decode/fp16/k=q8_0/v=fp8_e4m3/hd128/r16/fakegpu");
  query.v_format = -1;
  EXPECT_EQ(refusal(fp_supports(&query), fp_value_error), "supports: v_format must be one of fp_kv_format, got -1");
  EXPECT_STREQ(fp_version(), version());
  EXPECT_EQ(fp_num_splits_heuristic(48, 108, 64, 128), 2);
}

TEST_F(CInterface, Explains) {
  fp_query query = decode_query();
  query.batch = 4;
  query.num_kv_heads = 8;
  query.max_kv_len = 2048;
  char text[256];
  EXPECT_EQ(fp_explain(&query, text, sizeof(text)), fp_ok) << fp_last_error();
  EXPECT_EQ(std::string(text).find(
                "decode/bf16/kv=bf16/hd128/r16/fakegpu: 20 blocks of 128 threads and 65536 bytes of shared "
                "memory for 32 query tiles of 16 rows, each in at most 16 chunks of 64 to 128 keys; "),
            0u)
      << text;
  query.has_num_splits = 1;
  query.num_splits = 2;
  EXPECT_EQ(fp_explain(&query, text, sizeof(text)), fp_ok) << fp_last_error();
  EXPECT_NE(
      std::string(text).find(" for 32 query tiles of 16 rows, each in at most 2 chunks of 64 to 1024 keys; 64 keys a "
                             "turn, 3 stages; combined in a second launch; "),
      std::string::npos)
      << text;
  EXPECT_EQ(refusal(fp_explain(&query, nullptr, 9), fp_value_error),
            "explain: text must have room, got null or size 0");
  query.batch = 0;
  EXPECT_EQ(refusal(fp_explain(&query, text, sizeof(text)), fp_value_error),
            "explain: batch must be from 1 to 16777216, got 0");
  query.operation = 9;
  EXPECT_EQ(refusal(fp_explain(&query, text, sizeof(text)), fp_value_error),
            "explain: operation must be one of fp_operation, got 9");
}

// Every operation with its sizes: the C++ interface's text.
TEST_F(CInterface, ExplainsEachOperation) {
  fp_query query = decode_query();
  char text[512];
  const auto explained = [&](int operation) {
    query.operation = operation;
    EXPECT_EQ(fp_explain(&query, text, sizeof(text)), fp_ok) << fp_last_error();
    return std::string(text);
  };
  query.batch = 3;
  query.num_kv_heads = 2;
  query.group_size = 4;
  query.tokens = 100;
  const std::string target = "fakegpu";
  EXPECT_EQ(explained(fp_op_decode_stage2),
            explain(DecodeStage2ScheduleQuery{.call = {.target = target}, .batch = 3, .num_q_heads = 8}).text);
  EXPECT_EQ(explained(fp_op_append),
            explain(AppendScheduleQuery{.call = {.target = target}, .tokens = 100, .num_kv_heads = 2}).text);
  EXPECT_EQ(explained(fp_op_merge), explain(MergeScheduleQuery{.call = {.target = target}, .rows = 100}).text);
  EXPECT_EQ(explained(fp_op_quantize), explain(QuantizeScheduleQuery{.call = {.target = target}, .rows = 100}).text);
  EXPECT_EQ(explained(fp_op_dequantize),
            explain(QuantizeScheduleQuery{.call = {.target = target, .dequantize = true}, .rows = 100}).text);
  const auto chunks = [&](bool packed) {
    return explain(GatedDeltaChunkScheduleQuery{.call = {.target = target},
                                                .batch = 3,
                                                .num_heads = 2,
                                                .num_v_heads = 8,
                                                .tokens = 100,
                                                .packed = packed})
        .text;
  };
  EXPECT_EQ(explained(fp_op_gated_delta_chunk), chunks(false));
  query.packed = 1;
  EXPECT_EQ(explained(fp_op_gated_delta_chunk), chunks(true));
  EXPECT_NE(chunks(false), chunks(true));
  query.target = "cpu";
  EXPECT_EQ(explained(fp_op_gated_delta),
            explain(GatedDeltaScheduleQuery{.call = {.target = "cpu"}, .batch = 3, .num_v_heads = 8}).text);
  query.group_size = 0;
  EXPECT_EQ(refusal(fp_explain(&query, text, sizeof(text)), fp_value_error),
            "explain: num_kv_heads and group_size must be 1 or more and below 2^31, got 2 and 0");
}

// Two tokens, 2 / 4 heads, K 32, V 64, on the fake CPU, whose kernels take states [V, K].
struct DeltaTensors {
  fp_tensor q = to_c(TensorView(scratch_at(0), DType::kBFloat16, Device{}, {1, 2, 2, 32}));
  fp_tensor k = to_c(TensorView(scratch_at(1 << 16), DType::kBFloat16, Device{}, {1, 2, 2, 32}));
  fp_tensor v = to_c(TensorView(scratch_at(2 << 16), DType::kBFloat16, Device{}, {1, 2, 4, 64}));
  fp_tensor out = to_c(TensorView(scratch_at(3 << 16), DType::kBFloat16, Device{}, {1, 2, 4, 64}));
  fp_tensor gate = to_c(TensorView(scratch_at(4 << 16), DType::kFloat32, Device{}, {1, 2, 4}));
  fp_tensor rate = to_c(TensorView(scratch_at(5 << 16), DType::kFloat32, Device{}, {1, 2, 4}));
  fp_tensor heads = to_c(TensorView(scratch_at(6 << 16), DType::kFloat32, Device{}, {4}));
  fp_tensor state = to_c(TensorView(scratch_at(16 << 20), DType::kFloat32, Device{}, {3, 4, 64, 32}));

  // What both calls take.
  template <class Args>
  [[nodiscard]] Args args() const {
    Args args;
    FP_INIT(&args);
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.out = &out;
    args.state = &state;
    return args;
  }
};

TEST_F(CInterface, UpdatesTheGatedDeltaRule) {
  DeltaTensors t;
  auto args = t.args<fp_gated_delta_update_args>();
  args.a = &t.gate;
  args.b = &t.rate;
  args.a_log = args.dt_bias = &t.heads;
  EXPECT_EQ(fp_gated_delta_update(&args, 0), fp_ok) << fp_last_error();
  EXPECT_EQ(fake_state().launches.at(0).key, "gated_delta_update/state=fp32/vk/k64/fakecpu");
  auto p = fake_state().launches[0].as<GatedDeltaUpdateParams>();
  EXPECT_EQ(p.update_state, 1);
  EXPECT_EQ(p.softplus_beta, 1.0f);
  EXPECT_EQ(p.softplus_threshold, 20.0f);
  EXPECT_EQ(p.has_lower_bound, 0);
  EXPECT_FLOAT_EQ(p.scale, 1.0f / std::sqrt(32.0f));

  args.disable_state_update = args.use_qk_l2norm = args.allow_neg_eigval = 1;
  args.head_map = fp_modulo;
  args.has_scale = args.has_softplus = args.has_lower_bound = 1;
  args.scale = 2;
  args.softplus_beta = 3;
  args.lower_bound = -5;
  EXPECT_EQ(fp_gated_delta_update(&args, 0), fp_ok) << fp_last_error();
  p = fake_state().launches.at(1).as<GatedDeltaUpdateParams>();
  EXPECT_EQ(p.update_state, 0);
  EXPECT_EQ(p.l2norm, 1);
  EXPECT_EQ(p.heads_modulo, 1);
  EXPECT_EQ(p.beta_factor, 2.0f);
  EXPECT_EQ(p.scale, 2.0f);
  EXPECT_EQ(p.softplus_beta, 3.0f);
  EXPECT_EQ(p.softplus_threshold, 0.0f);
  EXPECT_EQ(p.lower_bound, -5.0f);
  EXPECT_EQ(p.zero_padding, 0);
  args.zero_padding = 1;
  EXPECT_EQ(refusal(fp_gated_delta_update(&args, 0), fp_value_error),
            "gated_delta_update: zero_padding needs state_indices, and neither final_states nor intermediate_states");
  args.zero_padding = 0;

  args.head_map = 2;
  EXPECT_EQ(refusal(fp_gated_delta_update(&args, 0), fp_value_error),
            "gated_delta_update: head_map must be fp_consecutive or fp_modulo, got 2");
  args.head_map = fp_consecutive;
  t.v.dtype = fp_float16;
  EXPECT_EQ(refusal(fp_gated_delta_update(&args, 0), fp_type_error),
            "gated_delta_update: v must be bfloat16, got float16");
  args.out = nullptr;
  EXPECT_EQ(refusal(fp_gated_delta_update(&args, 0), fp_value_error),
            "gated_delta_update: out must be given, got null");
  EXPECT_EQ(fake_state().launches.size(), 2u);
}

TEST_F(CInterface, RunsTheGatedDeltaRuleByChunks) {
  DeltaTensors t;
  auto args = t.args<fp_gated_delta_chunk_args>();
  args.g = &t.gate;
  args.beta = &t.rate;
  args.a_log = &t.heads;
  args.beta_sigmoid = args.allow_neg_eigval = args.disable_state_update = 1;
  std::int64_t bytes = 0;
  EXPECT_EQ(fp_gated_delta_chunk_workspace_size(&args, &bytes), fp_ok) << fp_last_error();
  EXPECT_GT(bytes, 0);
  fp_tensor workspace = to_c(TensorView(scratch_at(20 << 20), DType::kUInt8, Device{}, {bytes}));
  args.workspace = &workspace;
  EXPECT_EQ(fp_gated_delta_chunk(&args, 0), fp_ok) << fp_last_error();
  ASSERT_EQ(fake_state().launches.size(), 2u);
  const auto p = fake_state().launches[1].as<GatedDeltaChunkParams>();
  EXPECT_EQ(p.beta_sigmoid, 1);
  EXPECT_EQ(p.beta_factor, 2.0f);
  EXPECT_EQ(p.update_state, 0);
  EXPECT_EQ(p.a_log, t.heads.data);
  EXPECT_EQ(p.workspace.inverses, workspace.data);
  args.state_layout = fp_kv;
  EXPECT_EQ(fp_gated_delta_chunk_workspace_size(&args, &bytes), fp_value_error);
  EXPECT_EQ(std::string(fp_last_error()).find("gated_delta_chunk_workspace_size: state must have shape"), 0u);
  EXPECT_EQ(fp_gated_delta_chunk_workspace_size(&args, nullptr), fp_value_error);
  EXPECT_EQ(refusal(fp_gated_delta_chunk(nullptr, 0), fp_value_error), "gated_delta_chunk: args must not be null");
}

TEST_F(CInterface, QueriesOfTheGatedDeltaRule) {
  fp_query query;
  FP_INIT(&query);
  query.operation = fp_op_gated_delta;
  query.target = "cpu";
  query.dtype = fp_bfloat16;
  query.head_dim_qk = query.head_dim_v = 128;
  query.gate = fp_gate_key;
  EXPECT_EQ(fp_supports(&query), fp_ok) << fp_last_error();
  char key[64];
  EXPECT_EQ(fp_which_kernel(&query, key, sizeof(key)), fp_ok);
  EXPECT_STREQ(key, "gated_delta_update/kda/fakecpu");
  EXPECT_EQ(refusal(fp_which_kernel(&query, key, 0), fp_value_error),
            "which_kernel: key must have room, got null or size 0");
  query.state_layout = fp_kv;
  EXPECT_EQ(fp_supports(&query), fp_not_supported);
  query.operation = fp_op_gated_delta_chunk;
  EXPECT_EQ(fp_supports(&query), fp_not_supported);
  EXPECT_EQ(std::string(fp_last_error()).find("gated_delta_chunk takes one gate for each head"), 0u);
  query.gate = 3;
  EXPECT_EQ(refusal(fp_supports(&query), fp_value_error),
            "supports: gate must be fp_gate_head, fp_gate_key or fp_gate_any, got 3");
  query.dtype = 11;
  query.gate = fp_gate_head;
  EXPECT_EQ(refusal(fp_supports(&query), fp_value_error), "supports: dtype must be one of fp_dtype, got 11");
}

TEST_F(CInterface, QueriesOfEveryOperation) {
  const std::pair<fp_operation, const char*> keys[] = {{fp_op_decode, "decode/bf16/kv=bf16/hd128/r16/fakegpu"},
                                                       {fp_op_decode_stage2, "decode_stage2/fakegpu"},
                                                       {fp_op_append, "append_kv/fakegpu"},
                                                       {fp_op_merge, "merge_states/fakegpu"},
                                                       {fp_op_gated_delta_chunk, "gated_delta_chunk/bf16/k128/fakegpu"},
                                                       {fp_op_attention, "attention/bf16/hd128/plain/fakegpu"},
                                                       {fp_op_quantize, "quantize_kv/fakegpu"},
                                                       {fp_op_dequantize, "dequantize_kv/fakegpu"}};
  fp_query query = decode_query();
  char key[64];
  for (const auto& [operation, wanted] : keys) {
    query.operation = operation;
    EXPECT_EQ(fp_supports(&query), fp_ok) << fp_last_error();
    EXPECT_EQ(fp_which_kernel(&query, key, sizeof(key)), fp_ok) << fp_last_error();
    EXPECT_STREQ(key, wanted);
  }
  query.operation = fp_op_gated_delta;
  EXPECT_EQ(refusal(fp_supports(&query), fp_not_supported), "fakegpu has no kernel gated_delta_update");
  query.operation = fp_op_dequantize + 1;
  EXPECT_EQ(refusal(fp_supports(&query), fp_value_error), "supports: operation must be one of fp_operation, got 9");
  query.struct_size = sizeof(query) + 1;
  EXPECT_EQ(fp_supports(&query), fp_value_error);
}

}  // namespace
}  // namespace flashport::test
