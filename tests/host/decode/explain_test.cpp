// Where the host has partial results combined, and what explain() says of a call.
#include "tests/host/decode/plan_fixture.h"

namespace flashport::test {
namespace {

// Large states are combined by a second launch.
TEST_F(PlanDecode, LargeStates) {
  DecodeInputs inputs(kGpu);
  DecodeArgs& a = inputs.args;
  std::int32_t length = 500;
  a.q = TensorView(scratch(), DType::kBFloat16, kGpu, {1, 64, 128});
  a.out = TensorView(scratch_at(1 << 19), DType::kBFloat16, kGpu, {1, 64, 128});
  a.seqlens = ints(&length, {1});
  a.block_table = ints(inputs.pages.data(), {1, 1000});
  const DecodePlan two = plan(a);  // tiles, of 32 rows each
  EXPECT_STREQ(two.kernel->key, "decode_plain/bf16/kv=bf16/hd128/r64/fakegpu");
  EXPECT_EQ(two.grid, 20);
  EXPECT_STREQ(two.combine_kernel->key, "decode_plain_combine/fakegpu");
  EXPECT_EQ(two.params.combine.rows, 64);
  EXPECT_EQ(two.params.combine.columns, 128);
  // As many parts of a tile as fill the device, and no more than its vectors need.
  EXPECT_EQ(two.params.combine.parts, 10);
  EXPECT_EQ(two.combine_grid, 2 * 10);
  flash_decode(a, 10);
  ASSERT_EQ(fake_state().launches.size(), 2u);
  EXPECT_EQ(fake_state().launches[1].key, "decode_plain_combine/fakegpu");
  EXPECT_EQ(fake_state().launches[1].grid, 20);
  EXPECT_EQ(fake_state().launches[1].as<DecodeParams>().partials, fake_state().launches[0].as<DecodeParams>().partials);

  // Small states of one slice are combined in the launch.
  a.q = TensorView(scratch(), DType::kBFloat16, kGpu, {1, 8, 128});
  a.out = TensorView(scratch_at(1 << 19), DType::kBFloat16, kGpu, {1, 8, 128});
  EXPECT_EQ(plan(a).combine_kernel, nullptr);

  DecodeScheduleQuery query{.call = {.target = "fakegpu", .group_size = 32}, .num_kv_heads = 2};
  query.max_kv_len = 16000;
  EXPECT_EQ(explain(query).combine, Combine::kSecondLaunch);
  query.num_kv_heads = 300;
  EXPECT_EQ(explain(query).combine, Combine::kSecondLaunch);
  query.max_kv_len = 64;  // a chunk a tile
  EXPECT_EQ(explain(query).combine, Combine::kNone);
}

// So are slices of columns, where there are few tiles, and a wave would make many trips to L2.
TEST_F(PlanDecode, SlicesOfColumnsOfFewTiles) {
  fake_state().multiprocessors = 128;  // with two blocks each
  DecodeScheduleQuery query{.call = {.target = "fakegpu", .head_dim_qk = 256, .head_dim_v = 256, .group_size = 4}};
  query.num_kv_heads = 8;
  query.max_kv_len = 32 * 1024;
  DecodeSchedule s = explain(query);
  EXPECT_EQ(s.kernel, "decode/bf16/kv=bf16/hd256/r16/fakegpu");
  EXPECT_EQ(s.blocks, 256);
  EXPECT_EQ(s.query_tiles, 8);  // of 32 blocks each
  EXPECT_EQ(s.most_chunks, 32);
  EXPECT_EQ(s.combine, Combine::kSecondLaunch);
  EXPECT_NE(s.text.find("; combined in a second launch; "), std::string::npos) << s.text;
  query.max_kv_len = 31 * 1024;
  s = explain(query);
  EXPECT_EQ(s.most_chunks, 31);
  EXPECT_EQ(s.combine, Combine::kSecondLaunch);
  query.max_kv_len = 32 * 1024;
  query.batch = 4;  // a tile for four multiprocessors
  EXPECT_EQ(explain(query).combine, Combine::kSecondLaunch);
  query.batch = 5;
  EXPECT_EQ(explain(query).combine, Combine::kInLaunch);
  query.batch = 8;  // for two, one of which may be long: of 24 groups, and of 25
  query.max_kv_len = 96 * 1024;
  EXPECT_EQ(explain(query).combine, Combine::kInLaunch);
  query.max_kv_len = 97 * 1024;
  EXPECT_EQ(explain(query).combine, Combine::kSecondLaunch);
  query.batch = 9;
  EXPECT_EQ(explain(query).combine, Combine::kInLaunch);
  query.max_kv_len = 32 * 1024;
  query.batch = 1;
  query.call.head_dim_qk = query.call.head_dim_v = 128;  // one slice
  EXPECT_EQ(explain(query).combine, Combine::kInLaunch);
  query.call.q_dtype = DType::kFloat16;
  query.call.k_format = query.call.v_format = KvFormat::kFp8E4M3;  // slices of rows and columns, each read at once
  EXPECT_EQ(explain(query).combine, Combine::kSecondLaunch);
  query.max_kv_len = 3 * 1024;  // 24 chunks: three trips for results
  EXPECT_EQ(explain(query).combine, Combine::kInLaunch);
  query.call.group_size = 16;  // each in two parts
  EXPECT_EQ(explain(query).combine, Combine::kSecondLaunch);
  query.max_kv_len = 16 * 1024;
  EXPECT_EQ(explain(query).most_chunks, 32);  // finer ones
  EXPECT_EQ(explain(query).shortest_chunk, 128);
  EXPECT_EQ(explain(query).longest_chunk, 512);
  query.call.q_dtype = DType::kBFloat16;
  query.call.k_format = query.call.v_format = KvFormat::kBf16;
  query.call.head_dim_qk = query.call.head_dim_v = 256;
  query.call.group_size = 2;     // a vector of each result a lane
  query.max_kv_len = 96 * 1024;  // blocks of three chunks, which publish groups
  EXPECT_EQ(explain(query).most_chunks, 96);
  EXPECT_EQ(explain(query).combine, Combine::kInLaunch);
  query.max_kv_len = 64 * 1024;  // of two chunks
  EXPECT_EQ(explain(query).most_chunks, 64);
  EXPECT_EQ(explain(query).combine, Combine::kSecondLaunch);

  // A thread of the second launch has four columns of a row of one slice.
  DecodeInputs inputs(kGpu, 256);
  std::int32_t length = 500;
  inputs.args.q = TensorView(scratch(), DType::kBFloat16, kGpu, {1, 8, 256});
  inputs.args.out = TensorView(scratch_at(1 << 19), DType::kBFloat16, kGpu, {1, 8, 256});
  inputs.args.seqlens = ints(&length, {1});
  inputs.args.block_table = ints(inputs.pages.data(), {1, 2048});
  const DecodePlan p = plan(inputs.args);
  EXPECT_STREQ(p.combine_kernel->key, "decode_combine/fakegpu");
  EXPECT_EQ(p.params.combine.rows, 16);
  EXPECT_EQ(p.params.combine.columns, 64);
  EXPECT_EQ(p.params.combine.column_slices, 4);
  EXPECT_EQ(p.params.combine.parts, 16 * 64 / 4 / 128);
  EXPECT_EQ(p.combine_grid, 2 * 4 * 2);  // tiles, slices, parts
}

// explain() says what the plan of such a call is.
TEST_F(PlanDecode, Explained) {
  DecodeScheduleQuery query{.call = {.target = "fakegpu", .group_size = 4}, .batch = 3, .num_kv_heads = 2};
  query.max_kv_len = 160;
  DecodeInputs inputs(kGpu);
  DecodeSchedule s = explain(query);
  EXPECT_EQ(s.kernel, which_kernel(query.call));
  EXPECT_EQ(s.blocks, plan(inputs.args).grid);
  EXPECT_EQ(s.rows, 16);
  EXPECT_EQ(s.keys, 64);
  EXPECT_EQ(s.stages, 3);
  EXPECT_EQ(s.threads, 128);
  EXPECT_EQ(s.teams, 1);
  EXPECT_EQ(s.shared_bytes, 65536);
  EXPECT_EQ(s.query_tiles, 6);
  EXPECT_EQ(s.most_chunks, 3);
  EXPECT_EQ(s.shortest_chunk, 64);
  EXPECT_EQ(s.longest_chunk, 64);
  EXPECT_EQ(s.combine, Combine::kInLaunch);
  EXPECT_EQ(s.workspace_bytes, decode_workspace_size(inputs.args));
  EXPECT_EQ(
      s.text,
      "decode/bf16/kv=bf16/hd128/r16/fakegpu: 18 blocks of 128 threads and 65536 bytes of shared memory for 6 query "
      "tiles of 16 rows, each in at most 3 chunks of 64 keys; 64 keys a turn, 3 stages; combined in the launch; " +
          std::to_string(s.workspace_bytes) + " bytes of workspace");
  query.max_kv_len = 32000;
  s = explain(query);
  EXPECT_EQ(s.blocks, 20);
  EXPECT_EQ(s.most_chunks, 64);
  EXPECT_EQ(s.longest_chunk, 512);
  EXPECT_NE(s.text.find("at most 64 chunks of 64 to 512 keys"), std::string::npos) << s.text;
  query.num_splits = 4;
  s = explain(query);
  EXPECT_EQ(s.blocks, 24);
  EXPECT_EQ(s.most_chunks, 4);
  EXPECT_EQ(s.longest_chunk, 8000);
  EXPECT_EQ(s.combine, Combine::kSecondLaunch);
  query.num_splits = 1;
  s = explain(query);
  EXPECT_EQ(s.combine, Combine::kNone);
  EXPECT_NE(s.text.find("of shared memory for 6 query tiles of 16 rows, each in one chunk; 64 keys a turn, 3 stages; "
                        "nothing to combine; "),
            std::string::npos)
      << s.text;
  query.num_splits = kInvariantSplits;
  query.max_kv_len = 64;
  EXPECT_EQ(explain(query).combine, Combine::kNone);
  query.max_kv_len = 0;
  EXPECT_EQ(explain(query).most_chunks, 1);
  query.call.q_dtype = DType::kFloat16;
  query.call.k_format = query.call.v_format = KvFormat::kFp8E4M3;
  EXPECT_EQ(explain(query).keys, 128);  // two leaves a turn
  query.call.k_format = query.call.v_format = KvFormat::kQ8_0;
  EXPECT_EQ(explain(query).teams, 4);
  EXPECT_NE(explain(query).text.find(" blocks in teams of 4 of 128 threads"), std::string::npos) << explain(query).text;
  EXPECT_TRUE(fake_state().launches.empty());
  EXPECT_EQ(fake_state().allocations, 0);
}

TEST_F(PlanDecode, ExplainedOnlyWhereItRuns) {
  DecodeScheduleQuery query{.call = {.target = "fakegpu"}};
  const auto refusal = [&] { return error_of<ValueError>([&] { (void)explain(query); }); };
  query.batch = 0;
  EXPECT_EQ(refusal(), "explain: batch must be from 1 to 16777216, got 0");
  query.batch = 1 << 20;
  query.num_kv_heads = 17;
  EXPECT_EQ(refusal(), "explain: num_kv_heads must be from 1 to 16, got 17");
  query.num_kv_heads = 2;
  query.max_kv_len = -1;
  EXPECT_EQ(refusal(), "explain: max_kv_len must be from 0 to 2147418112, got -1");
  query.max_kv_len = 0;
  query.num_splits = -2;
  EXPECT_EQ(refusal(), "explain: num_splits must be from -1 to 2147483647, got -2");
  query.num_splits = kInvariantSplits;
  query.call.q_len = 17;
  const auto reason = [&] { return error_of<NotSupportedError>([&] { (void)explain(query); }); };
  EXPECT_EQ(reason(), "explain: q_len must be 1 to 16, got 17");
  query.call = {.target = "fakecpu"};
  EXPECT_EQ(reason(), "explain: no device of target fakecpu is here");
  query.call.target = "cpu";
  EXPECT_EQ(reason(), "");
}

}  // namespace
}  // namespace flashport::test
