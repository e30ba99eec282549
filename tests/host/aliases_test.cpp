// Every output of every operation over every other argument: refused, by both names. Views that interleave without
// sharing an element are taken.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include <flashport/attention.h>
#include <flashport/gated_delta.h>

#include "tests/host/decode/decode_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

struct Aliases : ::testing::Test {
  FakeBackends backends_;
};

// Hands out zeros: as indices, lengths and offsets they are right for one sequence. An array reaches none of the others
// from where another one lies.
class Arena {
 public:
  TensorView operator()(DType type, std::initializer_list<std::int64_t> shape) {
    constexpr std::int64_t kMost = 1 << 20;
    alignas(64) static unsigned char memory[40 * kMost];
    const TensorView view(memory + 2 * kMost * count_++, type, Device{}, shape);
    std::memset(view.data, 0, static_cast<std::size_t>(view.numel() * element_size(type)));
    return view;
  }

  TensorView scales(std::initializer_list<std::int64_t> shape) {
    const TensorView view = (*this)(DType::kFloat32, shape);
    std::fill_n(static_cast<float*>(view.data), view.numel(), 0.5f);
    return view;
  }

 private:
  std::int64_t count_ = 0;
};

struct Named {
  const char* name;
  TensorView* view;
  bool written = false;
};
constexpr bool kIsWritten = true;

// `arguments(args)` lists all arrays of a call that `make()` gives and `call` takes.
template <class Make, class List, class Call>
void expect_outputs_apart(const char* function, const Make& make, const List& arguments, const Call& call) {
  auto untouched = make();
  EXPECT_EQ(error_of<Error>([&] { call(untouched); }), "") << function;
  const std::size_t count = arguments(untouched).size();
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t j = 0; j < count; ++j) {
      auto args = make();
      const std::vector<Named> all = arguments(args);
      if (i == j || !all[i].written) continue;
      all[i].view->data = all[j].view->data;
      const auto text = [&](const Named& one, const Named& other) {
        return std::string(function) + ": " + one.name + " must not share memory with " + other.name +
               "; pass another tensor";
      };
      const std::string said = error_of<ValueError>([&] { call(args); });
      EXPECT_TRUE(said == text(all[i], all[j]) || (all[j].written && said == text(all[j], all[i])))
          << all[i].name << " over " << all[j].name << ": " << said;
    }
  }
}

// Which of the ways to say where keys lie.
enum class Form { kPages, kSlots, kCsr };

DecodeArgs decode_args(Form form) {
  Arena arena;
  DecodeArgs a;
  a.q = arena(DType::kBFloat16, {1, 8, 128});
  if (form == Form::kSlots) {
    a.k_cache = arena(DType::kBFloat16, {64, 2, 128});
    a.v_cache = arena(DType::kBFloat16, {64, 2, 128});
    a.token_table = arena(DType::kInt32, {1, 160});
    a.request_index = arena(DType::kInt64, {1});
  } else {
    a.k_cache = arena(DType::kBFloat16, {64, 16, 2, 128});
    a.v_cache = arena(DType::kBFloat16, {64, 16, 2, 128});
  }
  if (form == Form::kPages) a.block_table = arena(DType::kInt32, {1, 10});
  if (form == Form::kCsr) {
    a.kv_indptr = arena(DType::kInt32, {2});
    a.kv_indices = arena(DType::kInt32, {10});
    a.kv_last_page_len = arena(DType::kInt32, {1});
    a.cu_seqlens_q = arena(DType::kInt32, {2});
    a.max_q_len = 1;
    a.tree_mask = arena(DType::kUInt32, {1});
  } else {
    a.seqlens = arena(DType::kInt32, {1});
  }
  a.alibi_slopes = arena(DType::kFloat32, {8});
  a.sinks = arena(DType::kFloat32, {8});
  a.k_scale = arena.scales({2});
  a.v_scale = arena.scales({2});
  a.out = arena(DType::kBFloat16, {1, 8, 128});
  a.lse = arena(DType::kFloat32, {1, 8});
  a.workspace = arena(DType::kUInt8, {1 << 20});
  return a;
}

std::vector<Named> arrays(DecodeArgs& a) {
  std::vector<Named> all = {{"q", &a.q}, {"k_cache", &a.k_cache}, {"v_cache", &a.v_cache}};
  if (a.seqlens.rank > 0) all.push_back({"seqlens", &a.seqlens});
  const auto add = [&](const char* name, std::optional<TensorView>& view, bool written = false) {
    if (view) all.push_back({name, &*view, written});
  };
  add("block_table", a.block_table);
  add("token_table", a.token_table);
  add("request_index", a.request_index);
  add("kv_indptr", a.kv_indptr);
  add("kv_indices", a.kv_indices);
  add("kv_last_page_len", a.kv_last_page_len);
  add("cu_seqlens_q", a.cu_seqlens_q);
  add("alibi_slopes", a.alibi_slopes);
  add("sinks", a.sinks);
  add("tree_mask", a.tree_mask);
  add("k_scale", a.k_scale);
  add("v_scale", a.v_scale);
  all.push_back({"out", &a.out, kIsWritten});
  add("lse", a.lse, kIsWritten);
  add("workspace", a.workspace, kIsWritten);
  return all;
}

TEST_F(Aliases, OfFlashDecode) {
  for (Form form : {Form::kPages, Form::kSlots, Form::kCsr}) {
    expect_outputs_apart(
        "flash_decode", [&] { return decode_args(form); }, arrays, [](const DecodeArgs& a) { flash_decode(a); });
  }
}

DecodeStage1Args stage1_args() {
  Arena arena;
  DecodeStage1Args a;
  a.q = arena(DType::kBFloat16, {1, 8, 128});
  a.k = arena(DType::kBFloat16, {400, 2, 128});
  a.v = arena(DType::kBFloat16, {400, 2, 128});
  a.req_to_tokens = arena(DType::kInt32, {2, 300});
  a.b_req_idx = arena(DType::kInt32, {1});
  a.b_seqlen = arena(DType::kInt64, {1});
  a.mid_out = arena(DType::kFloat32, {1, 8, 3, 128});
  a.mid_out_logsumexp = arena(DType::kFloat32, {1, 8, 3});
  a.max_len_in_batch = 300;
  a.block_seq = 128;
  return a;
}

TEST_F(Aliases, OfStage1) {
  const auto list = [](DecodeStage1Args& a) {
    return std::vector<Named>{{"q", &a.q},
                              {"k", &a.k},
                              {"v", &a.v},
                              {"Req_to_tokens", &a.req_to_tokens},
                              {"B_req_idx", &a.b_req_idx},
                              {"B_Seqlen", &a.b_seqlen},
                              {"mid_out", &a.mid_out, kIsWritten},
                              {"mid_out_logsumexp", &a.mid_out_logsumexp, kIsWritten}};
  };
  expect_outputs_apart("flash_decode_stage1", stage1_args, list,
                       [](const DecodeStage1Args& a) { flash_decode_stage1(a); });
}

TEST_F(Aliases, OfStage1AreTakenWhereSlicesInterleave) {
  DecodeStage1Args a = stage1_args();
  Arena arena;
  const TensorView both = arena(DType::kFloat32, {1, 8, 3, 129});
  char* end = static_cast<char*>(a.mid_out.data) + (1 << 20);  // nothing else is there
  for (TensorView* view : {&a.mid_out, &a.mid_out_logsumexp}) {
    for (int axis = 0; axis < 3; ++axis) view->strides[axis] = both.strides[axis];
  }
  a.mid_out.data = end;
  a.mid_out_logsumexp.data = end + 4 * 128;
  EXPECT_EQ(error_of<Error>([&] { flash_decode_stage1(a); }), "");
  a.mid_out_logsumexp.data = end + 4 * 127;
  EXPECT_EQ(error_of<ValueError>([&] { flash_decode_stage1(a); }),
            "flash_decode_stage1: mid_out_logsumexp must not share memory with mid_out; pass another tensor");
}

TEST_F(Aliases, OfStridedQueriesAreTakenWhereRowsInterleave) {
  // q and out lie in the rows of one projection, whose elements they share or not.
  const auto text = [](std::int64_t out_at) {
    DecodeInputs inputs;
    inputs.args.q.strides[0] = inputs.args.out.strides[0] = 3 * 8 * 128;
    inputs.args.out.data = scratch_at(out_at);
    return error_of<Error>([&] { flash_decode(inputs.args); });
  };
  EXPECT_EQ(text(2 * 8 * 128), "");
  EXPECT_EQ(text(4 * 8 * 128), "");
  EXPECT_EQ(text(2 * 8 * 128 - 2), "flash_decode: out must not share memory with q; pass another tensor");
  EXPECT_EQ(text(4 * 8 * 128 + 2), "flash_decode: out must not share memory with q; pass another tensor");
}

TEST_F(Aliases, OfStage2) {
  const auto make = [] {
    Arena arena;
    DecodeStage2Args a;
    a.mid_out = arena(DType::kFloat32, {1, 8, 3, 128});
    a.mid_out_logexpsum = arena(DType::kFloat32, {1, 8, 3});
    a.b_seqlen = arena(DType::kInt32, {1});
    a.out = arena(DType::kFloat16, {1, 8, 128});
    a.lse = arena(DType::kFloat32, {1, 8});
    a.block_seq = 128;
    return a;
  };
  const auto list = [](DecodeStage2Args& a) {
    return std::vector<Named>{{"mid_out", &a.mid_out},
                              {"mid_out_logexpsum", &a.mid_out_logexpsum},
                              {"B_Seqlen", &a.b_seqlen},
                              {"Out", &a.out, kIsWritten},
                              {"lse", &*a.lse, kIsWritten}};
  };
  expect_outputs_apart("flash_decode_stage2", make, list, [](const DecodeStage2Args& a) { flash_decode_stage2(a); });
}

TEST_F(Aliases, OfAppendKv) {
  const auto make = [] {
    Arena arena;
    AppendKvArgs a;
    a.k = arena(DType::kFloat16, {3, 2, 64});
    a.v = arena(DType::kFloat16, {3, 2, 32});
    a.k_cache = arena(DType::kUInt8, {64, 16, 2, 68});
    a.v_cache = arena(DType::kUInt8, {64, 16, 2, 34});
    a.k_format = a.v_format = KvFormat::kQ8_0;
    a.positions = arena(DType::kInt64, {3});
    a.k_scale = arena.scales({1});
    a.v_scale = arena.scales({1});
    return a;
  };
  const auto list = [](AppendKvArgs& a) {
    return std::vector<Named>{{"k", &a.k},
                              {"v", &a.v},
                              {"positions", &a.positions},
                              {"k_scale", &*a.k_scale},
                              {"v_scale", &*a.v_scale},
                              {"k_cache", &a.k_cache, kIsWritten},
                              {"v_cache", &a.v_cache, kIsWritten}};
  };
  expect_outputs_apart("append_kv", make, list, [](const AppendKvArgs& a) { append_kv(a); });
}

TEST_F(Aliases, OfQuantizeKv) {
  const auto make = [] {
    Arena arena;
    QuantizeKvArgs a;
    a.x = arena(DType::kFloat16, {3, 2, 64});
    a.out = arena(DType::kUInt8, {3, 2, 68});
    return a;
  };
  const auto list = [](QuantizeKvArgs& a) { return std::vector<Named>{{"x", &a.x}, {"out", &a.out, kIsWritten}}; };
  expect_outputs_apart("quantize_kv", make, list, [](const QuantizeKvArgs& a) { quantize_kv(a); });
  const auto make_back = [] {
    Arena arena;
    DequantizeKvArgs a;
    a.x = arena(DType::kUInt8, {3, 2, 68});
    a.out = arena(DType::kFloat16, {3, 2, 64});
    return a;
  };
  const auto list_back = [](DequantizeKvArgs& a) {
    return std::vector<Named>{{"x", &a.x}, {"out", &a.out, kIsWritten}};
  };
  expect_outputs_apart("dequantize_kv", make_back, list_back, [](const DequantizeKvArgs& a) { dequantize_kv(a); });
}

TEST_F(Aliases, OfMerges) {
  const auto many = [] {
    Arena arena;
    MergeStatesArgs a;
    a.o = arena(DType::kFloat32, {5, 7, 16});
    a.lse = arena(DType::kFloat32, {5, 7});
    a.out = arena(DType::kFloat32, {7, 16});
    a.out_lse = arena(DType::kFloat32, {7});
    return a;
  };
  const auto list_of_many = [](MergeStatesArgs& a) {
    return std::vector<Named>{
        {"o", &a.o}, {"lse", &a.lse}, {"out", &a.out, kIsWritten}, {"out_lse", &a.out_lse, kIsWritten}};
  };
  expect_outputs_apart("merge_states", many, list_of_many, [](const MergeStatesArgs& a) { merge_states(a); });
  const auto two = [] {
    Arena arena;
    MergeStateArgs a;
    a.o_a = arena(DType::kFloat32, {7, 16});
    a.lse_a = arena(DType::kFloat32, {7});
    a.o_b = arena(DType::kFloat32, {7, 16});
    a.lse_b = arena(DType::kFloat32, {7});
    a.out = arena(DType::kFloat32, {7, 16});
    a.out_lse = arena(DType::kFloat32, {7});
    return a;
  };
  const auto list_of_two = [](MergeStateArgs& a) {
    return std::vector<Named>{{"o_a", &a.o_a},     {"lse_a", &a.lse_a},         {"o_b", &a.o_b},
                              {"lse_b", &a.lse_b}, {"out", &a.out, kIsWritten}, {"out_lse", &a.out_lse, kIsWritten}};
  };
  expect_outputs_apart("merge_state", two, list_of_two, [](const MergeStateArgs& a) { merge_state(a); });
  MergeStateArgs twice = two();
  twice.o_b = twice.o_a;  // one tensor may be two inputs
  twice.lse_b = twice.lse_a;
  EXPECT_EQ(error_of<Error>([&] { merge_state(twice); }), "");
}

TEST_F(Aliases, OfGatedDeltaUpdate) {
  const auto make = [](bool made_gates) {
    Arena arena;
    GatedDeltaUpdateArgs a;
    a.q = arena(DType::kBFloat16, {1, 3, 2, 32});
    a.k = arena(DType::kBFloat16, {1, 3, 2, 32});
    a.v = arena(DType::kBFloat16, {1, 3, 4, 64});
    if (made_gates) {
      a.a = arena(DType::kFloat32, {1, 3, 4});
      a.b = arena(DType::kFloat32, {1, 3, 4});
      a.a_log = arena(DType::kFloat32, {4});
      a.dt_bias = arena(DType::kFloat32, {4});
    } else {
      a.g = arena(DType::kFloat32, {1, 3, 4});
      a.beta = arena(DType::kFloat32, {1, 3, 4});
    }
    a.gk = arena(DType::kFloat32, {1, 3, 4, 32});
    a.gv = arena(DType::kFloat32, {1, 3, 4, 64});
    a.state = arena(DType::kFloat32, {5, 4, 64, 32});
    a.state_indices = arena(DType::kInt64, {1});
    a.final_states = arena(DType::kFloat32, {1, 4, 64, 32});
    a.cu_seqlens = arena(DType::kInt64, {2});
    a.intermediate_states = arena(DType::kFloat32, {5, 3, 4, 64, 32});
    a.intermediate_indices = arena(DType::kInt64, {1});
    a.parent_tokens = arena(DType::kInt64, {1, 3});
    a.out = arena(DType::kBFloat16, {1, 3, 4, 64});
    return a;
  };
  const auto list = [](GatedDeltaUpdateArgs& a) {
    std::vector<Named> all = {{"q", &a.q}, {"k", &a.k}, {"v", &a.v}, {"out", &a.out, kIsWritten}};
    const auto add = [&](const char* name, std::optional<TensorView>& view, bool written = false) {
      if (view) all.push_back({name, &*view, written});
    };
    add("a", a.a);
    add("b", a.b);
    add("A_log", a.a_log);
    add("dt_bias", a.dt_bias);
    add("g", a.g);
    add("beta", a.beta);
    add("gk", a.gk);
    add("gv", a.gv);
    add("state", a.state, kIsWritten);
    add("state_indices", a.state_indices);
    add("final_states", a.final_states, kIsWritten);
    add("cu_seqlens", a.cu_seqlens);
    add("intermediate_states", a.intermediate_states, kIsWritten);
    add("intermediate_indices", a.intermediate_indices);
    add("parent_tokens", a.parent_tokens);
    return all;
  };
  for (bool made_gates : {true, false}) {
    expect_outputs_apart(
        "gated_delta_update", [&] { return make(made_gates); }, list,
        [](const GatedDeltaUpdateArgs& a) { gated_delta_update(a); });
  }
}

TEST_F(Aliases, OfGatedDeltaChunk) {
  const auto make = [] {
    Arena arena;
    GatedDeltaChunkArgs a;
    a.q = arena(DType::kBFloat16, {1, 70, 2, 32});
    a.k = arena(DType::kBFloat16, {1, 70, 2, 32});
    a.v = arena(DType::kBFloat16, {1, 70, 4, 80});
    a.g = arena(DType::kFloat32, {1, 70, 4});
    a.beta = arena(DType::kBFloat16, {1, 70, 4});
    a.a_log = arena(DType::kFloat32, {4});
    a.dt_bias = arena(DType::kBFloat16, {4});
    a.state = arena(DType::kFloat32, {5, 4, 80, 32});
    a.state_indices = arena(DType::kInt64, {1});
    a.final_states = arena(DType::kFloat32, {1, 4, 80, 32});
    a.chunk_states = arena(DType::kBFloat16, {1, 2, 4, 80, 32});
    a.cu_seqlens = arena(DType::kInt32, {2});
    a.workspace = arena(DType::kUInt8, {1 << 20});
    a.out = arena(DType::kBFloat16, {1, 70, 4, 80});
    return a;
  };
  const auto list = [](GatedDeltaChunkArgs& a) {
    return std::vector<Named>{{"q", &a.q},
                              {"k", &a.k},
                              {"v", &a.v},
                              {"g", &a.g},
                              {"beta", &a.beta},
                              {"A_log", &*a.a_log},
                              {"dt_bias", &*a.dt_bias},
                              {"state", &*a.state, kIsWritten},
                              {"state_indices", &*a.state_indices},
                              {"final_states", &*a.final_states, kIsWritten},
                              {"chunk_states", &*a.chunk_states, kIsWritten},
                              {"cu_seqlens", &*a.cu_seqlens},
                              {"workspace", &*a.workspace, kIsWritten},
                              {"out", &a.out, kIsWritten}};
  };
  expect_outputs_apart("gated_delta_chunk", make, list, [](const GatedDeltaChunkArgs& a) { gated_delta_chunk(a); });
}

// Every array, packed or with a bias.
AttentionArgs attention_args(bool packed) {
  Arena arena;
  AttentionArgs a;
  const auto tensor = [&](std::int64_t tokens, std::int64_t heads) {
    return packed ? arena(DType::kBFloat16, {tokens, heads, 64}) : arena(DType::kBFloat16, {1, tokens, heads, 64});
  };
  a.q = tensor(4, 4);
  a.k = tensor(6, 2);
  a.v = tensor(6, 2);
  a.out = tensor(4, 4);
  if (packed) {
    a.cu_seqlens_q = arena(DType::kInt32, {2});
    a.cu_seqlens_k = arena(DType::kInt32, {2});
    a.max_seqlen_q = a.max_seqlen_k = 6;
    a.seqused_q = arena(DType::kInt32, {1});
    a.seqused_k = arena(DType::kInt32, {1});
    a.leftpad_k = arena(DType::kInt32, {1});
    a.lse = arena(DType::kFloat32, {4, 4});
  } else {
    a.bias = arena(DType::kFloat32, {1, 1, 4, 6});
    a.lse = arena(DType::kFloat32, {1, 4, 4});
  }
  a.alibi_slopes = arena(DType::kFloat32, {4});
  a.sinks = arena(DType::kFloat32, {4});
  a.rng_state = arena(DType::kInt64, {2});
  a.dropout_p = 0.5;
  a.workspace = arena(DType::kUInt8, {256});
  return a;
}

TEST_F(Aliases, OfAttention) {
  for (const bool packed : {false, true}) {
    expect_outputs_apart(
        "attention", [&] { return attention_args(packed); },
        [&](AttentionArgs& a) {
          std::vector<Named> all = {{"q", &a.q},
                                    {"k", &a.k},
                                    {"v", &a.v},
                                    {"alibi_slopes", &*a.alibi_slopes},
                                    {"sinks", &*a.sinks},
                                    {"rng_state", &*a.rng_state},
                                    {"out", &a.out, kIsWritten},
                                    {"lse", &*a.lse, kIsWritten},
                                    {"workspace", &*a.workspace, kIsWritten}};
          if (packed) {
            all.insert(all.end(), {{"cu_seqlens_q", &*a.cu_seqlens_q},
                                   {"cu_seqlens_k", &*a.cu_seqlens_k},
                                   {"seqused_q", &*a.seqused_q},
                                   {"seqused_k", &*a.seqused_k},
                                   {"leftpad_k", &*a.leftpad_k}});
          } else {
            all.push_back({"bias", &*a.bias});
          }
          return all;
        },
        [](const AttentionArgs& a) { attention(a); });
  }
}

}  // namespace
}  // namespace flashport::test
