// What reaches the kernels: tables and strides of every layout, scales, tiles, grids and workspaces.
#include <gtest/gtest.h>

#include <cmath>

#include <flashport/backend.h>

#include "common/device/decode/chunks.h"
#include "common/host/decode/kernel_choice.h"
#include "tests/host/decode/plan_fixture.h"

namespace flashport::test {
namespace {

constexpr float kLog2e = 1.44269504f;

TEST_F(PlanDecode, BlockTable) {
  DecodeInputs inputs(kGpu);
  const DecodeParams p = plan(inputs.args).params;
  EXPECT_EQ(p.batch, 3);
  EXPECT_EQ(p.num_q_heads, 8);
  EXPECT_EQ(p.num_kv_heads, 2);
  EXPECT_EQ(p.group_size, 4);
  EXPECT_EQ(p.max_q_len, 1);
  EXPECT_EQ(p.row_tiles, 1);
  EXPECT_EQ(p.cache.table, inputs.pages.data());
  EXPECT_EQ(p.cache.table_stride, 10);
  EXPECT_EQ(p.cache.table_row.data, nullptr);
  EXPECT_EQ(p.cache.page_size, 16);
  EXPECT_EQ(p.cache.max_len, 160);
  EXPECT_EQ(p.cache.k.page_stride, 16 * 2 * 128 * 2);
  EXPECT_EQ(p.q.stride_seq, 8 * 128);
  EXPECT_EQ(p.q.stride_token, 0);
  EXPECT_EQ(p.q.stride_head, 128);
  EXPECT_EQ(p.out.stride_head, 128);
  EXPECT_EQ(p.lse.data, nullptr);
  EXPECT_FLOAT_EQ(p.score_scale, kLog2e / std::sqrt(128.0f));
  EXPECT_EQ(p.cap_scale, 0.0f);
}

TEST_F(PlanDecode, ContiguousHnd) {
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  a.block_table.reset();
  a.kv_layout = KvLayout::kHND;
  a.k_cache = TensorView(scratch(), DType::kBFloat16, kGpu, {3, 2, 200, 128});
  a.v_cache = a.k_cache;
  const DecodeParams p = plan(a).params;
  EXPECT_EQ(p.cache.table, nullptr);
  EXPECT_EQ(p.cache.max_len, 200);
  EXPECT_EQ(p.cache.page_size, 200);
  EXPECT_EQ(p.cache.k.page_stride, 2 * 200 * 128 * 2);
  EXPECT_EQ(p.cache.k.head_stride, 200 * 128 * 2);
  EXPECT_EQ(p.cache.k.token_stride, 128 * 2);
}

TEST_F(PlanDecode, TokenTable) {
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  a.block_table.reset();
  std::int64_t rows[3] = {2, 0, 1};
  a.token_table = ints(inputs.pages.data(), {3, 10});
  a.request_index = TensorView(rows, DType::kInt64, kGpu, {3});
  a.k_cache = TensorView(scratch_at(16 << 20), DType::kBFloat16, kGpu, {1000, 2, 128});
  a.k_cache.strides[0] = 2 * 2 * 128;  // K and V are slices of one pool
  a.v_cache = a.k_cache;
  const DecodeParams p = plan(a).params;
  EXPECT_EQ(p.cache.page_size, 1);
  EXPECT_EQ(p.cache.max_len, 10);
  EXPECT_EQ(p.cache.table_row.data, rows);
  EXPECT_TRUE(p.cache.table_row.is_int64);
  EXPECT_EQ(p.cache.k.page_stride, 2 * 2 * 128 * 2);
  EXPECT_EQ(p.cache.k.head_stride, 128 * 2);
}

TEST_F(PlanDecode, Csr) {
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  a.block_table.reset();
  a.seqlens = {};
  std::int32_t indptr[4] = {0, 1, 1, 11};
  std::int32_t last[3] = {5, 0, 16};
  a.kv_indptr = ints(indptr, {4});
  a.kv_indices = ints(inputs.pages.data(), {11});
  a.kv_last_page_len = ints(last, {3});
  const DecodeParams p = plan(a).params;
  EXPECT_EQ(p.cache.seqlens.data, nullptr);
  EXPECT_EQ(p.cache.kv_indptr, indptr);
  EXPECT_EQ(p.cache.kv_last_page_len, last);
  EXPECT_EQ(p.cache.table, inputs.pages.data());
  EXPECT_EQ(p.cache.max_len, 11 * 16);
}

TEST_F(PlanDecode, RaggedQuery) {
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  std::int32_t offsets[4] = {0, 2, 3, 7};
  a.q = TensorView(scratch(), DType::kBFloat16, kGpu, {7, 8, 128});
  a.out = TensorView(scratch_at(1 << 19), DType::kBFloat16, kGpu, {7, 8, 128});
  a.lse = TensorView(scratch_at(1 << 18), DType::kFloat32, kGpu, {7, 8});
  a.cu_seqlens_q = ints(offsets, {4});
  a.max_q_len = 4;
  DecodePlan plain = plan(a);
  EXPECT_EQ(plain.params.batch, 3);
  EXPECT_EQ(plain.params.max_q_len, 4);
  EXPECT_EQ(plain.params.q.stride_token, 8 * 128);
  EXPECT_EQ(plain.params.lse.stride_token, 8);
  a.num_splits = 3;
  DecodePlan split = plan(a);
  EXPECT_EQ(split.merge.params.batch, 7);
  EXPECT_EQ(split.merge.params.tokens, 1);
  EXPECT_EQ(split.merge.params.mid.stride_seq, 8 * 3 * 128);
  EXPECT_EQ(split.merge.params.out.stride_seq, 8 * 128);
  EXPECT_EQ(split.merge.params.lse.stride_seq, 8);
  EXPECT_EQ(split.params.out.stride_token, 8 * 3 * 128);
}

TEST_F(PlanDecode, SoftcapMovesTheScales) {
  DecodeInputs inputs(kGpu);
  inputs.args.softmax_scale = 0.5;
  inputs.args.softcap = 30.0;
  const DecodeParams p = plan(inputs.args).params;
  EXPECT_FLOAT_EQ(p.score_scale, 0.5f / 30.0f);
  EXPECT_FLOAT_EQ(p.cap_scale, 30.0f * kLog2e);
}

TEST_F(PlanDecode, TilesByHeadDimAndRows) {
  const auto key = [&](std::int64_t dim, std::int64_t q_len) {
    DecodeInputs inputs(kGpu, dim);
    inputs.args.q = TensorView(scratch(), DType::kBFloat16, kGpu, {3, q_len, 8, dim});
    inputs.args.out = TensorView(scratch_at(1 << 19), DType::kBFloat16, kGpu, {3, q_len, 8, dim});
    return std::string(plan(inputs.args).kernel->key);
  };
  EXPECT_EQ(key(64, 1), "decode_plain/bf16/kv=bf16/hd64/r16/fakegpu");
  EXPECT_EQ(key(80, 1), "decode/bf16/kv=bf16/hd128/r16/fakegpu");
  EXPECT_EQ(key(128, 4), "decode/bf16/kv=bf16/hd128/r16/fakegpu");
  EXPECT_EQ(key(128, 5), "decode_plain/bf16/kv=bf16/hd128/r64/fakegpu");  // 20 packed rows
  EXPECT_EQ(key(64, 5), "decode_plain/bf16/kv=bf16/hd64/r16/fakegpu");    // has no 64-row tile
  EXPECT_EQ(key(192, 1), "decode/bf16/kv=bf16/hd256/r16/fakegpu");
  EXPECT_EQ(key(264, 1), "decode/bf16/kv=bf16/hd512/r16/fakegpu");
}

TEST_F(PlanDecode, RowTilesCoverThePackedRows) {
  DecodeInputs inputs(kGpu, 64);
  inputs.args.q = TensorView(scratch(), DType::kBFloat16, kGpu, {3, 5, 8, 64});
  inputs.args.out = TensorView(scratch_at(1 << 19), DType::kBFloat16, kGpu, {3, 5, 8, 64});
  EXPECT_EQ(plan(inputs.args).params.row_tiles, 2);  // 20 rows in tiles of 16
}

TEST_F(PlanDecode, DifferentValueDims) {
  DecodeInputs inputs(kGpu, 192);
  inputs.args.v_cache = TensorView(scratch(), DType::kBFloat16, kGpu, {64, 16, 2, 128});
  inputs.args.out = TensorView(scratch_at(1 << 19), DType::kBFloat16, kGpu, {3, 8, 128});
  const DecodePlan p = plan(inputs.args);
  EXPECT_STREQ(p.kernel->key, "decode/bf16/kv=bf16/hd192x128/r16/fakegpu");
  EXPECT_EQ(p.params.head_dim_v, 128);
  EXPECT_EQ(p.params.cache.v.row_bytes, 256);
}

TEST_F(PlanDecode, QuantisedCaches) {
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  a.k_cache = TensorView(scratch(), DType::kUInt8, kGpu, {64, 16, 2, 128 / 32 * 34});
  a.v_cache = a.k_cache;
  a.k_format = a.v_format = KvFormat::kQ8_0;
  float scales[2] = {1.0f, 2.0f};
  a.k_scale = TensorView(scales, DType::kFloat32, kGpu, {2});
  const DecodePlan p = plan(a);
  EXPECT_STREQ(p.kernel->key, "decode_plain/fp16/kv=q8_0/hd128/r16/fakegpu");
  EXPECT_EQ(p.params.cache.k.row_bytes, 136);
  EXPECT_EQ(p.params.cache.k.copy_unit, 8);
  EXPECT_EQ(p.params.scale_stride, 1);
  a.q.dtype = DType::kFloat32;
  EXPECT_NE(error_of<NotSupportedError>([&] { (void)plan(a); }).find("float32 q; use float16 or bfloat16"),
            std::string::npos);
}

TEST_F(PlanDecode, InvariantSchedule) {
  DecodeInputs inputs(kGpu);
  DecodePlan p = plan(inputs.args);
  EXPECT_EQ(p.params.num_chunks, 0);
  EXPECT_EQ(p.params.chunk_rule.target_shift, 6);  // 64 chunks of each of two kv heads
  EXPECT_EQ(p.params.chunk_rule.least_shift, 0);
  EXPECT_EQ(p.params.slices, 1);
  EXPECT_EQ(p.params.slice_floats, slice_floats(4, 128));  // four live rows of a group, not sixteen
  EXPECT_EQ(p.params.side_partials, 3);                    // 160 keys are 3 leaves, each a chunk
  EXPECT_EQ(p.grid, 18);                                   // those of six tiles; 10 multiprocessors x 2 hold more
  EXPECT_EQ(p.workspace_bytes, kCounterBytes + partials_bytes(18, 3, p.params.slice_floats));
  inputs.args.block_table = ints(inputs.pages.data(), {3, 2000});
  inputs.args.block_table->strides[0] = 10;
  p = plan(inputs.args);
  EXPECT_EQ(p.params.side_partials, 38);  // up to 64 chunks
  EXPECT_EQ(p.grid, 20);
  EXPECT_EQ(p.params.cuts[0].concurrent.value, 1u);
  EXPECT_EQ(p.params.cuts[0].ranges.value, 20u);
  EXPECT_EQ(p.params.cuts[0].rows, 2);
  EXPECT_EQ(p.params.cuts[1].concurrent.value, 2u);
  EXPECT_EQ(p.params.cuts[1].ranges.value, 10u);
  EXPECT_EQ(p.params.cuts[1].rows, 1);
  set_multiprocessor_limit(7);
  EXPECT_EQ(plan(inputs.args).grid, 14);
  set_multiprocessor_limit(0);
  EXPECT_EQ(p.workspace_bytes, kCounterBytes + partials_bytes(20, 38, p.params.slice_floats));
  EXPECT_EQ(p.workspace_bytes, decode_workspace_size(inputs.args));
  bind_workspace(p, scratch());
  EXPECT_EQ(p.params.counters, scratch());
  EXPECT_EQ(p.params.partials, scratch_at(kCounterBytes));
}

// What a kernel publishes by itself, and the leaves of its turns, decide on memory, counters and the shortest chunk.
TEST_F(PlanDecode, SlicesAndTurnsOfTheKernel) {
  fake_state().multiprocessors = 100'000;
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  a.k_cache = TensorView(scratch_at(16 << 20), DType::kFp8E4M3, kGpu, {64, 16, 2, 128});
  a.v_cache = a.k_cache;
  const DecodePlan p = plan(a);
  EXPECT_STREQ(p.kernel->key, "decode/fp16/kv=fp8_e4m3/hd128/r16/fakegpu");
  EXPECT_EQ(p.params.slices, 8);  // two of rows, four of columns
  EXPECT_EQ(p.params.slice_floats, slice_floats(4, 32));
  EXPECT_EQ(p.params.chunk_rule.least_shift, 1);
  EXPECT_EQ(p.params.side_partials, 2);
  EXPECT_EQ(p.workspace_bytes, kCounterBytes + partials_bytes(p.grid, 2, 8 * slice_floats(4, 32)));
  // A counter for each slice of each block: a grid has no more blocks than these serve.
  a.block_table = ints(inputs.pages.data(), {3, 1 << 20});
  a.block_table->strides[0] = 10;
  EXPECT_EQ(plan(inputs.args).grid * 8, kCounterCapacity);
}

// Where few chunks are in a call, a device block counts as one, and its teams share the copies.
TEST_F(PlanDecode, TeamsHelp) {
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  a.k_cache = TensorView(scratch(), DType::kUInt8, kGpu, {64, 16, 2, 128 / 32 * 34});
  a.v_cache = a.k_cache;
  a.k_format = a.v_format = KvFormat::kQ8_0;
  fake_state().multiprocessors = 100;
  DecodePlan p = plan(a);  // six tiles of three leaves, each a chunk, and four teams for each
  EXPECT_EQ(p.grid, 18 * 4);
  EXPECT_TRUE(p.params.teams_help);
  EXPECT_EQ(p.params.cuts[0].ranges.value, 18u);
  set_multiprocessor_limit(17);
  p = plan(a);
  set_multiprocessor_limit(0);
  EXPECT_EQ(p.grid, 34);
  EXPECT_FALSE(p.params.teams_help);
  EXPECT_EQ(p.params.cuts[0].ranges.value, 34u);
}

// Heads that blocks copy at once: of K and of V side by side, and as many as there are teams.
TEST_F(PlanDecode, HeadsSideBySide) {
  constexpr std::int64_t kRow = 128 / 32 * 34;
  const auto found = [this](std::int64_t heads, bool has_gap) {
    DecodeInputs inputs(kGpu);
    DecodeArgs& a = inputs.args;
    a.q = TensorView(a.q.data, a.q.dtype, kGpu, {3, 4 * heads, 128});
    a.out = TensorView(a.out.data, a.q.dtype, kGpu, {3, 4 * heads, 128});
    a.k_cache = TensorView(a.k_cache.data, DType::kUInt8, kGpu, {16, 16, heads, kRow});
    a.v_cache = a.k_cache;
    if (has_gap) a.v_cache.strides[2] += 16;
    a.k_format = a.v_format = KvFormat::kQ8_0;
    const DecodePlan p = plan(a);
    EXPECT_EQ(p.params.cuts[1].least_leaves, p.params.heads_side_by_side ? 4 : 8);
    return p.params.heads_side_by_side;
  };
  EXPECT_TRUE(found(8, false));
  EXPECT_FALSE(found(8, true));
  EXPECT_FALSE(found(6, false));  // four teams
}

// Leaves of all tiles: the places on the line fit 32 bits.
TEST_F(PlanDecode, LongestLine) {
  DecodeInputs inputs(kGpu);
  DecodeProblem problem = validate_flash_decode(inputs.args);
  problem.params.cache.max_len = 1 << 30;
  const auto error = [&] {
    return error_of<NotSupportedError>(
        [&] { static_cast<void>(plan_decode(problem, device_context(Check("flash_decode"), problem.q, "q"))); });
  };
  // 2^24 leaves a sequence, in at most 2^29 / 8.
  problem.params.batch = 3;
  EXPECT_EQ(error(), "");
  problem.params.batch = 4;
  EXPECT_EQ(
      error(),
      "flash_decode: batch 4 with room for 1073741824 keys each and 2 query tiles a sequence is more than one call "
      "takes; pass fewer sequences or a narrower table");
  problem.params.cache.kv_indptr = inputs.pages.data();
  EXPECT_EQ(error(), "");
  problem.bounds.table_entries = std::int64_t{1} << 33;
  EXPECT_EQ(
      error(),
      "flash_decode: batch 4 with room for 137438953472 keys in all and 2 query tiles a sequence is more than one "
      "call takes; pass fewer sequences");
}

TEST_F(PlanDecode, EqualSplits) {
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  a.lse = TensorView(scratch_at(1 << 18), DType::kFloat32, kGpu, {3, 8});
  a.num_splits = 2;
  DecodePlan p = plan(a);
  EXPECT_EQ(p.grid, 3 * 2 * 2);
  EXPECT_EQ(p.params.num_chunks, 2);
  EXPECT_EQ(p.params.chunk_keys, 0);
  EXPECT_EQ(p.params.write_empty_chunks, 1);
  EXPECT_EQ(p.params.out.dtype, DType::kFloat32);
  EXPECT_EQ(p.params.out_stride_chunk, 128);
  EXPECT_EQ(p.params.out.stride_head, 2 * 128);
  EXPECT_EQ(p.params.out.stride_seq, 8 * 2 * 128);
  EXPECT_STREQ(p.merge.kernel->key, "decode_stage2/fakegpu");
  EXPECT_EQ(p.merge.grid, 3 * 8);
  EXPECT_EQ(p.merge.params.max_chunks, 2);
  EXPECT_EQ(p.merge.params.chunk_keys, 0);
  EXPECT_EQ(p.merge.params.out.data, a.out.data);
  EXPECT_EQ(p.merge.params.out.dtype, DType::kBFloat16);
  EXPECT_EQ(p.merge.params.lse.data, a.lse->data);
  bind_workspace(p, scratch());
  EXPECT_EQ(p.params.out.data, scratch_at(kCounterBytes));  // the counters stay untouched
  EXPECT_EQ(p.merge.params.mid.data, p.params.out.data);
  EXPECT_EQ(p.merge.params.mid_lse.data, scratch_at(kCounterBytes + 3 * 8 * 2 * 128 * 4));
  EXPECT_EQ(p.params.lse.data, p.merge.params.mid_lse.data);
}

TEST_F(PlanDecode, SplitsBeyondTheLeavesAreDropped) {
  DecodeInputs inputs(kGpu);
  inputs.args.num_splits = 50;
  EXPECT_EQ(plan(inputs.args).params.num_chunks, 3);  // 160 keys are 3 leaves
}

TEST_F(PlanDecode, OneSplitWritesTheOutputItself) {
  DecodeInputs inputs(kGpu);
  inputs.args.num_splits = 1;
  const DecodePlan p = plan(inputs.args);
  EXPECT_EQ(p.params.num_chunks, 1);
  EXPECT_EQ(p.params.write_empty_chunks, 1);
  EXPECT_EQ(p.params.out.data, inputs.args.out.data);
  EXPECT_EQ(p.params.out.dtype, DType::kBFloat16);
  EXPECT_EQ(p.merge.kernel, nullptr);
  EXPECT_EQ(p.workspace_bytes, 0);
}

// One of the kernel's own chunks where it may be: up to 16 leaves.
TEST_F(PlanDecode, ShortSplitsNeedNoPartialResults) {
  DecodeInputs inputs(kGpu);
  inputs.args.block_table = ints(inputs.pages.data(), {3, 128});  // 2048 keys: 32 leaves, 16 a split
  inputs.args.block_table->strides[0] = 10;
  inputs.args.num_splits = 2;
  const DecodePlan p = plan(inputs.args);
  EXPECT_EQ(p.params.side_partials, 1);
  EXPECT_EQ(p.merge.offset, kCounterBytes);
}

TEST_F(PlanDecode, LongSplitsCombineInMemoryOfTheirBlock) {
  DecodeInputs inputs(kGpu);
  inputs.args.block_table = ints(inputs.pages.data(), {3, 200});  // 3200 keys: 50 leaves, 25 a split
  inputs.args.block_table->strides[0] = 10;
  inputs.args.num_splits = 2;
  DecodePlan p = plan(inputs.args);
  EXPECT_EQ(p.params.side_partials, 2);  // chunks of 16
  EXPECT_EQ(p.partials_offset, kCounterBytes);
  EXPECT_EQ(p.merge.offset, kCounterBytes + partials_bytes(3 * 2 * 2, 2, p.params.slice_floats));
  EXPECT_EQ(p.workspace_bytes, p.merge.offset + p.merge.lse_offset + 3 * 8 * 2 * 4);
  inputs.args.num_splits = 1;
  p = plan(inputs.args);
  EXPECT_EQ(p.params.side_partials, 4);
  EXPECT_EQ(p.workspace_bytes, kCounterBytes + partials_bytes(3 * 2, 4, p.params.slice_floats));
}

TEST_F(PlanDecode, HeuristicCountsKvHeadsOfTheBatch) {
  DecodeInputs inputs(kGpu);
  inputs.args.block_table = ints(inputs.pages.data(), {3, 2000});
  inputs.args.num_splits = 0;
  EXPECT_EQ(plan(inputs.args).params.num_chunks, num_splits_heuristic(3 * 2, 20, 32000 / 128, 128));
}

// The size of a workspace follows from the call's arguments, also without an output, whose memory nobody looks at.
TEST_F(PlanDecode, SizesNeedNoOutput) {
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  const std::int64_t bytes = decode_workspace_size(a);
  EXPECT_GT(bytes, 0);
  a.out.data = nullptr;
  EXPECT_EQ(decode_workspace_size(a), bytes);
  EXPECT_NE(error_of<ValueError>([&] { flash_decode(a); }).find("out must have data"), std::string::npos);
  a.out.shape[1] = 4;
  EXPECT_NE(error_of<ValueError>([&] { (void)decode_workspace_size(a); }).find("out must have shape"),
            std::string::npos);
  a.out = {};
  EXPECT_EQ(decode_workspace_size(a), bytes);
  a.k_cache = a.v_cache = TensorView(scratch(), DType::kUInt8, kGpu, {64, 16, 2, 128 / 32 * 34});
  EXPECT_EQ(error_of<ValueError>([&] { (void)decode_workspace_size(a); }),
            "flash_decode: v_format must say what v_cache of uint8 stores, got none; pass v_format=\"q8_0\", \"q4_0\", "
            "\"q4_1\", \"q5_0\", \"q5_1\" or \"iq4_nl\"");
  a.k_format = a.v_format = KvFormat::kQ8_0;
  EXPECT_EQ(decode_workspace_size(a), kCounterBytes + (bytes - kCounterBytes) / 18 * 20);  // of 20 blocks, not 18
  a.q.rank = 2;
  EXPECT_NE(error_of<ValueError>([&] { (void)decode_workspace_size(a); }).find("q must have 3 dimensions"),
            std::string::npos);
  EXPECT_TRUE(fake_state().launches.empty());
}

}  // namespace
}  // namespace flashport::test
