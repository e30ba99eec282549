// Wrong calls on the device under test: the class and the text of the error, and outputs that keep their bits. The host
// suite walks through every argument; here are those that would read or write where nothing is.
#include <gtest/gtest.h>

#include <flashport/error.h>

#include <functional>

#include "tests/ops/decode/call.h"
#include "tests/support/message_of.h"

namespace flashport_test {
namespace {

using flashport::DecodeArgs;
using reference::Type;

class Errors : public testing::Test {
 protected:
  Errors() : call_(small_case()) {
    call_.upload();
    call_.out().poison();
    call_.lse()->poison();
    before_ = call_.out().element_bytes();
    before_lse_ = call_.lse()->element_bytes();
  }

  static DecodeCase small_case() {
    DecodeCase c{};
    c.name = "errors";
    c.q = c.k_format = c.v_format = Type::kF16;
    c.dk = c.dv = 64;
    c.hq = 4;
    c.hkv = 2;
    c.q_len = 1;
    c.q_form = "token";
    c.layout = "block_nhd";
    c.page = 16;
    c.lens = {5, 20};
    c.window_left = c.window_right = -1;
    c.alibi = c.scales = "none";
    c.lse = true;
    c.strides = "dense";
    c.splits = flashport::kInvariantSplits;
    return c;
  }

  template <class E>
  void refuses(const std::string& text, const std::function<void(DecodeArgs&)>& spoil) {
    DecodeArgs args = call_.args();
    spoil(args);
    const std::string said = message_of<E>([&] { flashport::flash_decode(args); });
    EXPECT_NE(said.find(text), std::string::npos) << said;
    EXPECT_TRUE(said.starts_with("flash_decode: ")) << said;
    call_.out().download();
    call_.lse()->download();
    EXPECT_TRUE(call_.out().element_bytes() == before_ && call_.lse()->element_bytes() == before_lse_) << said;
  }

  DecodeCall call_;
  std::vector<unsigned char> before_, before_lse_;
};

TEST_F(Errors, Ranks) {
  refuses<flashport::ValueError>("q must have", [](DecodeArgs& a) { a.q.rank = 2; });
  refuses<flashport::ValueError>("k_cache must have", [](DecodeArgs& a) { a.k_cache.rank = 5; });
  refuses<flashport::ValueError>("out must have 3 dimensions (batch, num_q_heads, head_dim_v), got 4",
                                 [](DecodeArgs& a) { a.out.rank = 4; });
  refuses<flashport::ValueError>("block_table must have 2 dimensions (batch, max_pages), got 1",
                                 [](DecodeArgs& a) { a.block_table->rank = 1; });
}

TEST_F(Errors, Shapes) {
  refuses<flashport::ValueError>("seqlens must have shape", [](DecodeArgs& a) { a.seqlens.shape[0] = 3; });
  refuses<flashport::ValueError>("multiple of num_kv_heads",
                                 [](DecodeArgs& a) { a.k_cache.shape[2] = a.v_cache.shape[2] = 3; });
  refuses<flashport::ValueError>("v_cache must have shape", [](DecodeArgs& a) { a.v_cache.shape[1] = 8; });
  refuses<flashport::ValueError>("lse must have shape", [](DecodeArgs& a) { a.lse->shape[1] = 5; });
}

TEST_F(Errors, TypesAndKinds) {
  refuses<flashport::TypeError>("block_table must be int32",
                                [](DecodeArgs& a) { a.block_table->dtype = flashport::DType::kInt64; });
  refuses<flashport::TypeError>("q must be", [](DecodeArgs& a) { a.q.dtype = flashport::DType::kInt32; });
  refuses<flashport::TypeError>("v_cache must be float16",
                                [](DecodeArgs& a) { a.v_cache.dtype = flashport::DType::kBFloat16; });
}

TEST_F(Errors, Memory) {
  refuses<flashport::ValueError>("out is written and must not be read-only",
                                 [](DecodeArgs& a) { a.out.read_only = true; });
  refuses<flashport::ValueError>("out is written and must not be broadcast",
                                 [](DecodeArgs& a) { a.out.strides[0] = 0; });
  refuses<flashport::ValueError>("k_cache must have stride 1", [](DecodeArgs& a) { a.k_cache.strides[3] = 2; });
  refuses<flashport::ValueError>("q must have data", [](DecodeArgs& a) { a.q.data = nullptr; });
}

// What crashed, or gave wrong numbers: the kernel would read as an index or a query what it has just written.
TEST_F(Errors, SharedMemory) {
  // The smaller tensor in the larger one's memory: else what lies after it may be shared as well.
  refuses<flashport::ValueError>("out must not share memory with block_table; pass another tensor",
                                 [](DecodeArgs& a) { a.block_table->data = a.out.data; });
  refuses<flashport::ValueError>("out must not share memory with seqlens; pass another tensor",
                                 [](DecodeArgs& a) { a.seqlens.data = a.out.data; });
  refuses<flashport::ValueError>("lse must not share memory with k_cache; pass another tensor",
                                 [](DecodeArgs& a) { a.lse->data = static_cast<char*>(a.k_cache.data) + 64; });
  refuses<flashport::ValueError>("out must not share memory with q; pass another tensor", [](DecodeArgs& a) {
    // out begins in the gap between two rows of q, which its last heads step over.
    a.q.strides[0] = a.out.strides[0] = 2 * 4 * 64;
    a.out.data = static_cast<char*>(a.q.data) + 4 * 64 * sizeof(std::uint16_t);
    a.out.strides[1] = 2 * 64;
  });
}

TEST_F(Errors, Values) {
  refuses<flashport::ValueError>("softcap must be", [](DecodeArgs& a) { a.softcap = -1; });
  refuses<flashport::ValueError>("window must be", [](DecodeArgs& a) { a.window_left = -2; });
  refuses<flashport::ValueError>("workspace", [](DecodeArgs& a) {
    a.workspace = a.q;
    a.workspace->dtype = flashport::DType::kUInt8;
    a.workspace->rank = 1;
    a.workspace->shape[0] = 1;
    a.workspace->strides[0] = 1;
  });
}

TEST_F(Errors, WhatNoKernelServes) {
  // A head_dim that is no multiple of 8, said before anything runs.
  refuses<flashport::NotSupportedError>("head_dim must be a multiple of 8", [](DecodeArgs& a) {
    for (flashport::TensorView* view : {&a.q, &a.out}) view->shape[2] = 60;
    for (flashport::TensorView* view : {&a.k_cache, &a.v_cache}) view->shape[3] = 60;
  });
}

// A pair that neither a kernel of its own nor one of any formats reads is refused with what the target has.
TEST_F(Errors, PairsOfFormats) {
  const auto blocks = [](flashport::TensorView& view) {
    view.dtype = flashport::DType::kUInt8;
    view.shape[3] = view.shape[3] / 32 * 34;
  };
  const auto refuses_pair = [&](flashport::KvFormat k, flashport::KvFormat v, const char* text, const auto& change) {
    const flashport::DecodeQuery query{query_target(), flashport::DType::kFloat16, k, v, 64, 64, 4, 1};
    if (flashport::supports(query).supported) return;
    refuses<flashport::NotSupportedError>(text, change);
  };
  refuses_pair(flashport::KvFormat::kQ8_0, flashport::KvFormat::kFp16, "has no kernel for k=q8_0 with v=fp16; it has ",
               [&](DecodeArgs& a) {
                 blocks(a.k_cache);
                 a.k_format = flashport::KvFormat::kQ8_0;
               });
  refuses_pair(flashport::KvFormat::kFp16, flashport::KvFormat::kFp8E4M3,
               "has no kernel for k=fp16 with v=fp8_e4m3; it has ", [&](DecodeArgs& a) {
                 a.v_cache.dtype = flashport::DType::kFp8E4M3;
                 a.v_format = flashport::KvFormat::kFp8E4M3;
               });
  refuses<flashport::ValueError>(
      "v_format must say what v_cache of uint8 stores, got none; pass v_format=\"q8_0\", \"q4_0\", \"q4_1\", \"q5_0\", "
      "\"q5_1\" or \"iq4_nl\"",
      [&](DecodeArgs& a) {
        blocks(a.v_cache);
        a.v_format.reset();
      });
  refuses<flashport::TypeError>("k_cache must be uint8 for k_format=\"q8_0\", got float16",
                                [](DecodeArgs& a) { a.k_format = flashport::KvFormat::kQ8_0; });
}

TEST(StageErrors, RanksAreReadBeforeStrides) {
  Tensor mid(Type::kF32, {2, 3, 4, 5, 6}), lse(Type::kF32, {2, 3, 4}), out(Type::kF16, {2, 3, 6});
  Tensor seqlens(Type::kI32, {2});
  out.upload();
  const std::vector<unsigned char> before = out.element_bytes();
  flashport::DecodeStage2Args a;
  a.mid_out = mid.view();
  a.mid_out_logexpsum = lse.view();
  a.b_seqlen = seqlens.view();
  a.out = out.view();
  a.block_seq = 16;
  EXPECT_EQ(message_of<flashport::ValueError>([&] { flashport::flash_decode_stage2(a); }),
            "flash_decode_stage2: mid_out must have 4 dimensions (batch, num_q_heads, blocks, head_dim), got 5: "
            "(2, 3, 4, 5, 6)");
  out.download();
  EXPECT_TRUE(out.element_bytes() == before);
}

}  // namespace
}  // namespace flashport_test
