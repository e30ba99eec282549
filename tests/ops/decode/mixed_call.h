// One call of flash_decode_mixed: segments of any formats and layouts, whose rows that no sequence has are NaN, and the
// same values as requests of the oracle.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include <flashport/decode.h>

#include "tests/support/random.h"
#include "tests/support/tensor.h"

namespace flashport_test {

enum class Pages { kRows, kHeadsFirst, kBlocks, kTokens };
// In fp32, but those of rows of V, or of K where turned, and half groups in fp16.
enum class Scales { kNone, kOne, kHead, kRow, kTurnedRow, kGroup, kHalfGroup };
constexpr const char* scales_name(Scales scales) {
  constexpr const char* kNames[] = {"bare", "one", "heads", "rows", "turned_rows", "groups", "half_groups"};
  return kNames[static_cast<int>(scales)];
}
// Whether rows or groups of values have them.
constexpr bool lie_beside(Scales scales) { return scales >= Scales::kRow; }
constexpr bool are_of_groups(Scales scales) { return scales >= Scales::kGroup; }
// Whether one side's are of fp16, one for each row.
constexpr bool has_half_rows(Scales scales) { return lie_beside(scales) && !are_of_groups(scales); }

struct SegmentSpec {
  reference::Type k, v;
  std::vector<std::int64_t> lens;  // of each sequence
  Pages pages = Pages::kRows;
  std::int64_t page_size = 16;  // of kBlocks
  Scales scales = Scales::kNone;
  std::int64_t room = 0;  // keys of a sequence that the table of kBlocks or kTokens has room for, if more than needed
};

struct MixedSpec {
  std::vector<SegmentSpec> segments;
  reference::Type q = reference::Type::kF16;
  std::int64_t dk = 64, dv = 64, hq = 4, hkv = 2, q_len = 1;
  bool ragged = false;  // sequence b has q_len - b % 2 queries
  std::int64_t window_left = -1, window_right = -1;
  double softcap = 0;
  bool alibi = false, sinks = false;
  std::optional<reference::Type> mask;
  bool mask_slopes = false, mask_broadcasts = false;  // over sequences and heads
  bool out_fp32 = false;
  bool by_segment = false;
};

class MixedCall {
 public:
  explicit MixedCall(const MixedSpec& spec, std::uint64_t seed = 1);

  [[nodiscard]] flashport::MixedDecodeArgs args() const;
  [[nodiscard]] flashport::DecodeQuery query() const;
  void run() { run(args()); }
  void run(const flashport::MixedDecodeArgs& args) {
    run([&] { flashport::flash_decode_mixed(args); });
  }
  // Poisons the outputs, makes a call that writes them, and fetches them.
  template <class Call>
    requires std::is_invocable_v<const Call&>
  void run(const Call& call) {
    out_->poison();
    lse_->poison();
    call();
    out_->download();
    lse_->download();
  }
  // A call for each sequence.
  void run_each_alone() {
    run([&] {
      for (std::int64_t b = 0; b < batch(); ++b) flashport::flash_decode_mixed(args_of(b));
    });
  }
  // That read the keys: one, or that of each segment.
  [[nodiscard]] std::set<std::string> kernels() const;
  // As DecodeCall::check().
  [[nodiscard]] std::string check();
  // The bits of out and lse of sequence b.
  [[nodiscard]] std::vector<unsigned char> bits(std::int64_t b);
  [[nodiscard]] std::int64_t batch() const { return static_cast<std::int64_t>(spec_.segments[0].lens.size()); }

 private:
  // The arguments of a call for sequence b alone.
  [[nodiscard]] flashport::MixedDecodeArgs args_of(std::int64_t b) const;
  [[nodiscard]] std::string compare_with(reference::Type math);
  struct Segment {
    std::optional<Tensor> k, v, lens, block_table, token_table, k_scale, v_scale;
  };
  void make_queries(Random& random);
  void make_segment(Random& random, const SegmentSpec& s);
  void fill_rows(Random& random, std::int64_t b);
  void make_options(Random& random);
  [[nodiscard]] std::int64_t q_len_of(std::int64_t b) const { return spec_.q_len - (spec_.ragged ? b % 2 : 0); }

  MixedSpec spec_;
  std::vector<std::unique_ptr<Segment>> segments_;
  std::vector<reference::Request> requests_;
  std::vector<std::int64_t> q_starts_{0};
  std::optional<Tensor> q_, out_, lse_, cu_seqlens_q_, slopes_, sinks_, mask_, mask_slopes_;
};

// The call of flash_decode over the only segment, and what it asks.
[[nodiscard]] flashport::DecodeArgs as_flash_decode(const flashport::MixedDecodeArgs& from);
[[nodiscard]] flashport::DecodeQuery as_flash_decode(flashport::DecodeQuery query, const SegmentSpec& only);

}  // namespace flashport_test
