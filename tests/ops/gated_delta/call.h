// A gated_delta_update call as the tests make it: its tensors, the call, and everything that it may and may not have
// written compared with the reference.
#pragma once

#include <flashport/backend.h>
#include <flashport/gated_delta.h>

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tests/reference/gated_delta.h"
#include "tests/support/tensor.h"

namespace flashport_test {

// a of +-80 with A_log 10 and b of +-100; or decays so near 1 that fp32's 1 + exp(x) would lose them.
enum class Gating { kUsual, kExtreme, kSlow };

// What a call has for a gate: a, A_log and dt_bias; without dt_bias; the logarithm of the decay; nothing.
enum class GateInput { kMade, kWithoutBias, kLogarithm, kNoGate };
// And for a rate: its logit; that of twice the rate; of each column; the rate itself; of each column; nothing.
enum class RateInput { kLogit, kTwice, kColumnLogits, kRate, kColumnRates, kNoRate };

struct GatedDeltaCase {
  std::string name;
  std::vector<std::int64_t> lens = {1, 1};  // equal ones unless varlen
  bool varlen = false;
  std::int64_t heads = 2, v_heads = 4, dim_k = 128, dim_v = 128;
  reference::Type type = reference::Type::kBF16, gates = reference::Type::kF32;
  reference::Type state = reference::Type::kF32, steps_type = reference::Type::kF32;
  reference::Type a_log = reference::Type::kF32;
  bool key_major = false, modulo = false, l2norm = true;
  int kda = 0;                             // 0: a gate a head; a as 1: (B, T, HV, K), 2: (B, T, HV * K)
  bool joined_rows = false;                // a and b as (B * T, ...)
  bool packed = false;                     // q, k, v, a, b and out are slices of wider rows
  std::vector<std::int64_t> slots = {};    // empty: no pool
  bool identity = false;                   // no state_indices
  std::vector<std::int64_t> steps = {};    // empty: no intermediate states
  std::vector<std::int64_t> parents = {};  // of tokens 0, 1, ..., for every sequence; empty: a chain
  bool update = true, index64 = false;
  bool zero_padding = false;  // and what sequences without a slot have for inputs is NaN
  Gating gating = Gating::kUsual;
  double size = 1;  // of q and k
  GateInput gate = GateInput::kMade;
  RateInput rate = RateInput::kLogit;
  bool key_gates = false, column_gates = false;  // gk, gv
  std::optional<reference::Type> final_states = {};
  std::optional<double> lower_bound = {}, scale = {};
  double softplus_beta = 1, softplus_threshold = 20;
};

inline std::ostream& operator<<(std::ostream& out, const GatedDeltaCase& c) { return out << c.name; }

// For the target under test.
[[nodiscard]] flashport::Support update_support();

class GatedDeltaCall {
 public:
  explicit GatedDeltaCall(const GatedDeltaCase& c);

  [[nodiscard]] flashport::GatedDeltaUpdateArgs args() const;
  void upload();
  // Makes the call; its outputs are downloaded.
  void run() { run(args()); }
  void run(const flashport::GatedDeltaUpdateArgs& args);
  // Runs, and compares with the reference.
  void check() {
    check([&] { flashport::gated_delta_update(args()); });
  }
  // The same of what several calls do together.
  void check(const std::function<void()>& calls);

  [[nodiscard]] Tensor& out() { return out_; }
  [[nodiscard]] Tensor* state() { return state_ ? &*state_ : nullptr; }
  [[nodiscard]] Tensor* steps() { return steps_ ? &*steps_ : nullptr; }
  [[nodiscard]] Tensor* final_states() { return final_states_ ? &*final_states_ : nullptr; }
  [[nodiscard]] const std::vector<std::int64_t>& offsets() const { return offsets_; }

 private:
  void fill();
  [[nodiscard]] bool is_padding(std::int64_t sequence) const;
  void download();
  [[nodiscard]] reference::GatedDeltaInputs inputs() const;

  GatedDeltaCase c_;
  std::int64_t rows_, tokens_;
  std::vector<std::int64_t> offsets_;
  Tensor q_, k_, v_, a_, b_, a_log_, dt_bias_, out_;
  std::optional<Tensor> key_gates_, column_gates_, final_states_;
  std::optional<Tensor> state_, state_indices_, steps_, step_indices_, parents_, cu_seqlens_;
};

// Tokens [first, first + count) of each row.
[[nodiscard]] flashport::TensorView tokens_of(flashport::TensorView view, std::int64_t first, std::int64_t count);
// The call of these tokens, of inputs (B, T, ...).
[[nodiscard]] flashport::GatedDeltaUpdateArgs part_of(flashport::GatedDeltaUpdateArgs args, std::int64_t first,
                                                      std::int64_t count);

}  // namespace flashport_test
