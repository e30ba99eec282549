// An attention call over host memory that tests bend one argument at a time.
#pragma once

#include <cstdint>
#include <vector>

#include <flashport/attention.h>

#include "tests/host/decode/decode_inputs.h"

namespace flashport::test {

struct AttentionInputs {
  // 3 sequences of 300 queries and 500 keys, 8 / 2 heads.
  std::vector<std::int32_t> offsets_q = {0, 300, 310, 500}, offsets_k = {0, 500, 600, 1100};
  std::vector<std::int32_t> used = {300, 5, 0}, pads = {1, 5, 0};
  std::vector<std::int64_t> state = {17, 4};
  Device device;
  AttentionArgs args;

  explicit AttentionInputs(Device where = {}) : device(where) { set_head_dims(128, 128); }
  AttentionInputs(const AttentionInputs&) = delete;
  AttentionInputs& operator=(const AttentionInputs&) = delete;

  void set_head_dims(std::int64_t qk, std::int64_t v) {
    args.q = TensorView(scratch_at(0), DType::kBFloat16, device, {3, 300, 8, qk});
    args.k = TensorView(scratch_at(16 << 20), DType::kBFloat16, device, {3, 500, 2, qk});
    args.v = TensorView(scratch_at(24 << 20), DType::kBFloat16, device, {3, 500, 2, v});
    args.out = TensorView(scratch_at(32 << 20), DType::kBFloat16, device, {3, 300, 8, v});
  }
  // 500 queries and 1100 keys of all sequences, with room for more.
  void pack() {
    const std::int64_t head_dim = args.q.shape[3];
    args.q = TensorView(args.q.data, DType::kBFloat16, device, {600, 8, head_dim});
    args.out = TensorView(args.out.data, DType::kBFloat16, device, {600, 8, head_dim});
    args.k = TensorView(args.k.data, DType::kBFloat16, device, {1200, 2, head_dim});
    args.v = TensorView(args.v.data, DType::kBFloat16, device, {1200, 2, head_dim});
    args.cu_seqlens_q = ints(offsets_q);
    args.cu_seqlens_k = ints(offsets_k);
    args.max_seqlen_q = 300;
    args.max_seqlen_k = 500;
  }
  void drop(double p) {
    args.dropout_p = p;
    args.rng_state = TensorView(state.data(), DType::kInt64, device, {2});
  }
  TensorView ints(std::vector<std::int32_t>& values) const {
    return TensorView(values.data(), DType::kInt32, device, {static_cast<std::int64_t>(values.size())});
  }
  TensorView floats(std::initializer_list<std::int64_t> shape) const {
    return TensorView(scratch_at(40 << 20), DType::kFloat32, device, shape);
  }
};

}  // namespace flashport::test
