// One call of flash_decode made from a case: its tensors on host and device, the arguments for the library, and the
// same memory as inputs of the oracle. Slots, pages and rows that no request uses are NaN; table entries past a length
// point beyond all memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tests/ops/decode/cases.h"
#include "tests/support/tensor.h"

namespace flashport_test {

class Random;

// A cache of `pages` pages in the order and with the strides that a case names.
struct CacheShape {
  std::int64_t pages, tokens, heads, extent;  // extent: stored elements of a row
  bool heads_first = false, pool = false;     // pool: rank 3, pages of one token
  std::string strides = "dense";
};
[[nodiscard]] Tensor make_cache(reference::Type type, const CacheShape& shape);
// Stored elements of a row of `dim` values.
[[nodiscard]] std::int64_t row_extent(reference::Type type, std::int64_t dim);
// Fills the row of one token of one head.
void write_row(Tensor& cache, const Shape& row, const std::vector<float>& values);

class DecodeCall {
 public:
  explicit DecodeCall(const DecodeCase& c, std::uint64_t seed = 0);

  [[nodiscard]] flashport::DecodeArgs args() const;
  [[nodiscard]] reference::DecodeInputs inputs() const;
  [[nodiscard]] const std::vector<std::int64_t>& q_lens() const { return q_lens_; }

  void upload();
  // Poisons the outputs, calls flash_decode and fetches them.
  void run();
  // Compares the fetched outputs with the oracle; `math` is what the kernel computes in. Empty when they agree.
  [[nodiscard]] std::string check(reference::Type math);
  // The bits of out and lse of each request.
  [[nodiscard]] std::vector<std::vector<unsigned char>> bits();

  Tensor& q() { return *q_; }
  Tensor& k() { return *k_; }
  Tensor& v() { return *v_; }
  Tensor& out() { return *out_; }
  std::optional<Tensor>& lse() { return lse_; }
  std::optional<Tensor>& seqlens() { return seqlens_; }

 private:
  void make_queries();
  void make_caches();
  void make_options();
  void make_outputs();
  void fill_token(std::int64_t page, std::int64_t offset);
  [[nodiscard]] std::vector<Tensor*> all_inputs();

  DecodeCase case_;
  Random* random_ = nullptr;  // while the constructor runs
  std::vector<std::int64_t> q_lens_;
  std::optional<double> scale_;
  // Tensors have no empty state; those that every call has are optional only until the constructor has made them.
  std::optional<Tensor> q_, k_, v_, out_, lse_, seqlens_;
  std::optional<Tensor> block_table_, token_table_, request_index_, kv_indptr_, kv_indices_, kv_last_page_len_;
  std::optional<Tensor> cu_seqlens_q_, alibi_, sinks_, tree_, k_scale_, v_scale_;
};

// Whether plain calls have kernels of their own on the target.
[[nodiscard]] bool has_plain_kernels();
// The math type in a kernel key, "decode/bf16/...".
[[nodiscard]] reference::Type math_of_key(const std::string& key);
// Whether the kernel is of int8 or int4 with groups, or of bytes, which may have a scale for each row.
[[nodiscard]] bool reads_scales_beside(const std::string& key);

}  // namespace flashport_test
