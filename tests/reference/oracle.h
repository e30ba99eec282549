// The oracle: attention over a key-value cache in fp64, written from the specification and sharing no code with the
// library. It reads the same memory as the call under test, through its own addressing of every layout.
// And the plain implementation: the same sums with operands and probabilities rounded to the math type and fp32
// accumulation, in the simplest order. Its error against the oracle is the yardstick of every tolerance.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "tests/reference/codecs.h"

namespace reference {

// A strided array in host memory; strides count elements.
struct Array {
  const void* data = nullptr;
  Type type = Type::kF32;
  std::vector<std::int64_t> shape, strides;

  [[nodiscard]] const unsigned char* address(std::initializer_list<std::int64_t> index) const;
  [[nodiscard]] double at(std::initializer_list<std::int64_t> index) const;
  [[nodiscard]] std::int64_t integer(std::initializer_list<std::int64_t> index) const;
};

// Arguments of flash_decode, in the order and with the meaning of the specification.
struct DecodeInputs {
  Array q;                 // (B, Hq, D), (B, q_len, Hq, D) or (total_q, Hq, D)
  Array k_cache, v_cache;  // of blocks the last axis counts bytes
  std::optional<Array> seqlens;
  std::optional<Array> block_table, token_table, request_index, kv_indptr, kv_indices, kv_last_page_len;
  bool heads_first = false;  // HND
  std::optional<Array> cu_seqlens_q;
  std::int64_t head_dim_qk = 0, head_dim_v = 0;
  double softmax_scale = 1;
  std::int64_t window_left = -1, window_right = -1;
  double softcap = 0;
  std::optional<Array> alibi_slopes, sinks, tree_mask, k_scale, v_scale;
};

// One request of a batch with its rows gathered: what attention is a function of.
struct Request {
  std::int64_t q_len = 0, kv_len = 0, num_q_heads = 0, num_kv_heads = 0, dim_qk = 0, dim_v = 0;
  std::vector<double> q;                 // [q_len][num_q_heads][dim_qk]
  std::vector<double> k, v;              // [kv_len][num_kv_heads][dim], before k_scale and v_scale
  std::vector<double> k_scale, v_scale;  // [num_kv_heads]
  double softmax_scale = 1, softcap = 0;
  std::int64_t window_left = -1, window_right = -1;
  std::vector<double> slopes, sinks;     // [num_q_heads] or empty
  std::vector<std::uint32_t> tree_mask;  // [q_len] or empty
  // [q_len][num_q_heads][kv_len] or empty: added to the logits, -inf where a row does not see a key, whatever its
  // position.
  std::vector<double> mask;

  // Whether query row `row` attends to key `key`.
  [[nodiscard]] bool visible(std::int64_t row, std::int64_t key) const;
};

struct RequestResult {
  std::vector<double> out;  // [q_len][num_q_heads][dim_v]
  std::vector<double> lse;  // [q_len][num_q_heads], natural log
};

// The requests of a call, in batch order.
[[nodiscard]] std::vector<Request> gather(const DecodeInputs& inputs);

// fp64 over keys [first, last) of the request; the sink joins when `with_sink`.
[[nodiscard]] RequestResult attend(const Request& request, std::int64_t first, std::int64_t last,
                                   bool with_sink = true);
[[nodiscard]] RequestResult attend(const Request& request);

// The plain implementation: operands and probabilities, these times `unit`, rounded to `math`, fp32 sums, output
// rounded to `out`.
[[nodiscard]] RequestResult attend_plain(const Request& request, Type math, Type out, std::int64_t first,
                                         std::int64_t last, double unit = 1);
[[nodiscard]] RequestResult attend_plain(const Request& request, Type math, Type out, double unit = 1);

// Merge of partial results of one softmax: o [n][dim] and lse [n] to out [dim]; returns the lse.
// Two states that saw nothing give 0 and -inf.
double merge(const std::vector<std::vector<double>>& o, const std::vector<double>& lse, std::vector<double>& out);
// The same in fp32 with the output rounded to `type`.
double merge_plain(const std::vector<std::vector<double>>& o, const std::vector<double>& lse, Type type,
                   std::vector<double>& out);

}  // namespace reference
