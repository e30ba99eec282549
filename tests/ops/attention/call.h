// One call of attention made from a case: its tensors on host and device, the arguments for the library, and the same
// memory as inputs of the oracle. Rows that no sequence has, rows past a length, keys before a left pad, gaps of
// strides and entries of a bias that a mask hides are NaN.
#pragma once

#include <flashport/attention.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tests/reference/attention.h"
#include "tests/support/tensor.h"

namespace flashport_test {

// How q, k, v, out and lse lie in memory. kProjection: as views of one (tokens, Hq + 2 Hkv, D) projection. kHeadsFirst:
// tokens of a head are neighbours. kGaps: aligned gaps on every axis. kOdd: rows begin at addresses that only loads of
// an element are aligned to, and the elements of lse lie apart. kOddQueries: those of q alone.
enum class Layout { kDense, kProjection, kHeadsFirst, kGaps, kOdd, kOddQueries };
enum class Slopes { kNone, kOfHeads, kOfSequences };
// Where keys lie: in tensors of their own, or on pages that a table names in random order.
enum class Pages { kNone, kBlockTable, kBlockTableHnd, kTokenTable, kCsr };
// Scales beside keys or values: of a row, fp32, or of each 8 of its values, fp16.
enum class Beside { kNone, kRow, kGroup };
enum class Bias { kNone, kFloat, kOwnType, kOfAllHeads, kOfAllSequences, kOwnTypeOfAll, kOfKeys };

struct AttentionCase {
  std::string name;
  reference::Type type = reference::Type::kBF16;
  std::int64_t dim_qk = 64, dim_v = 64, q_heads = 4, kv_heads = 2;
  std::vector<std::int64_t> q_lens = {113, 113}, kv_lens = {203, 203};  // equal ones unless packed or with lengths
  bool packed = false;
  Pages pages = Pages::kNone;
  std::int64_t page_size = 16;                                // tokens of a page, where it has more than one
  std::optional<reference::Type> kv_type = {};                // of keys and values; default: `type`
  std::optional<reference::Type> v_type = {};                 // of values; default: that of keys
  bool q_fp8 = false;                                         // queries are e4m3 too, and `type` is that of the output
  bool scales = false;                                        // q_scale (if q_fp8), k_scale and v_scale
  Beside k_beside = Beside::kNone, v_beside = Beside::kNone;  // in place of those
  bool used_q = false, used_k = false, leftpad = false;  // tensors have rows before and past those of the sequences
  bool causal = false;
  std::int64_t window_left = -1, window_right = -1;
  double softcap = 0;
  Slopes slopes = Slopes::kNone;
  bool sinks = false;
  Bias bias = Bias::kNone;
  double dropout = 0;
  std::optional<double> scale = {};
  bool lse = true;
  Layout layout = Layout::kDense;
  std::uint64_t seed = 0;
  int splits = flashport::kInvariantSplits;
  std::vector<std::int64_t> ids = {};  // sequences of one id and seed have the same numbers; empty: their index

  [[nodiscard]] reference::Type key_type() const { return kv_type.value_or(type); }
  [[nodiscard]] reference::Type value_type() const { return v_type.value_or(key_type()); }
  [[nodiscard]] flashport::AttentionQuery query() const;
  // As ci/expected_support has it: "attention_bf16_d192x128_<name>".
  [[nodiscard]] std::string support_name() const;
};

std::ostream& operator<<(std::ostream& out, const AttentionCase& c);

class AttentionCall {
 public:
  explicit AttentionCall(const AttentionCase& c);

  [[nodiscard]] flashport::AttentionArgs args() const;
  // Poisons the outputs, makes the call and fetches them.
  void run();
  void poison_outputs();
  void fetch();
  // Other lengths of packed sequences, whose tokens move together; no more in all than the call was made with. The
  // device's offsets change, and args() only in what they say of the longest sequence.
  void set_lengths(const std::vector<std::int64_t>& q_lens, const std::vector<std::int64_t>& kv_lens);
  // Compares the fetched outputs with the oracle, and what the call may not write with poison. Empty when they agree.
  [[nodiscard]] std::string check();
  [[nodiscard]] std::string check(reference::Type math);  // of a kernel that the case's query does not know
  // The bits of out and lse of each row and head of a sequence, and of all sequences.
  [[nodiscard]] std::vector<unsigned char> bits(std::int64_t sequence);
  [[nodiscard]] std::vector<unsigned char> bits();

  [[nodiscard]] reference::AttentionInputs inputs() const;
  Tensor& out() { return *out_; }
  std::optional<Tensor>& lse() { return lse_; }

 private:
  // Where a sequence lies on the token axes, and how many rows the tensors have for it.
  struct Place {
    std::int64_t q_first = 0, k_first = 0, q_rows = 0, k_rows = 0, pad = 0;
  };

  void place();
  void make_tensors();
  void fill(Tensor& tensor, std::int64_t sequence, std::int64_t first, std::int64_t count, double spread);
  void make_options();
  void make_bias();
  void make_pages();
  void make_scales();
  [[nodiscard]] Beside beside(const Tensor& tensor) const;
  void write_scaled_row(Tensor& tensor, Tensor& scale, const Shape& row, const std::vector<float>& values) const;
  [[nodiscard]] Tensor tensor(reference::Type type, std::int64_t rows, std::int64_t heads, std::int64_t dim,
                              std::int64_t first_head, bool written) const;
  [[nodiscard]] bool sees(std::size_t sequence, std::int64_t row, std::int64_t key) const;
  [[nodiscard]] Shape out_index(std::int64_t sequence, std::int64_t row, std::int64_t head) const;
  [[nodiscard]] Shape lse_index(std::int64_t sequence, std::int64_t row, std::int64_t head) const;
  [[nodiscard]] std::string check_untouched();

  AttentionCase c_;
  std::vector<Place> places_;
  std::int64_t q_rows_ = 0, k_rows_ = 0;  // of the token axes
  // Tensors have no empty state; those that every call has are optional only until the constructor has made them.
  std::optional<Tensor> q_, k_, v_, out_, lse_, cu_seqlens_q_, cu_seqlens_k_, seqused_q_, seqused_k_, leftpad_k_;
  std::optional<Tensor> slopes_, sinks_, bias_, rng_state_, q_scale_, k_scale_, v_scale_;
  std::optional<Tensor> k_row_scale_, v_row_scale_, k_page_scale_, v_page_scale_;
  // Keys on pages: copies of those of k_ and v_, which then only the oracle reads.
  std::optional<Tensor> k_pages_, v_pages_, block_table_, token_table_, request_index_, kv_indptr_, kv_indices_;
  std::optional<Tensor> kv_lengths_;
};

}  // namespace flashport_test
