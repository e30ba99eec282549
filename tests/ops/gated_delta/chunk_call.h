// A gated_delta_chunk call as the tests make it: its tensors, the call, and everything that it may and may not have
// written compared with the reference.
#pragma once

#include <flashport/gated_delta.h>

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tests/reference/gated_delta_chunk.h"
#include "tests/support/tensor.h"

namespace flashport_test {

// Log gates: of about -0.3; from -1e6 to -1e-3 in one chunk; -1e-6 each; -infinity among usual ones; of both signs.
// Extreme ones with A_log: that is 10, and g is 80, -80 and -17 in value heads 0, 1 and 2, and any of them in others.
// Extreme ones with a sigmoid: logits of beta are 100, -100 and 0.
enum class LogGates { kUsual, kExtreme, kSlow, kInfinite, kGrowing };

struct DeltaChunkCase {
  std::string name;
  std::vector<std::int64_t> lens = {65, 65};  // equal ones unless varlen
  bool varlen = false;
  std::int64_t heads = 1, v_heads = 2, dim_k = 64, dim_v = 64;
  reference::Type type = reference::Type::kBF16, gates = reference::Type::kF32, beta = reference::Type::kF32;
  reference::Type state = reference::Type::kF32, final_type = reference::Type::kF32;
  bool key_major = false, modulo = false, l2norm = true;
  bool packed = false;                   // q, k, v, g, beta and out are slices of wider rows; slots lie apart
  std::vector<std::int64_t> slots = {};  // empty: no pool
  bool identity = false;                 // no state_indices
  bool update = true, index64 = false;
  bool finals = false, chunks = false;  // final_states and chunk_states are given
  LogGates gating = LogGates::kUsual;
  bool a_log = false, dt_bias = false;
  reference::Type a_log_type = reference::Type::kF32;
  bool sigmoid = false, neg_eigval = false;
  double size = 1;  // of q and k
  std::optional<double> scale = {};
};

inline std::ostream& operator<<(std::ostream& out, const DeltaChunkCase& c) { return out << c.name; }

class DeltaChunkCall {
 public:
  explicit DeltaChunkCall(const DeltaChunkCase& c);

  [[nodiscard]] flashport::GatedDeltaChunkArgs args() const;
  // Makes the call; its outputs are downloaded.
  void run() { run(args()); }
  void run(const flashport::GatedDeltaChunkArgs& args);
  // Runs, and compares with the reference.
  void check() {
    check([&] { flashport::gated_delta_chunk(args()); });
  }
  // The same of what several calls do together.
  void check(const std::function<void()>& calls);

  [[nodiscard]] Tensor& gates() { return g_; }
  [[nodiscard]] Tensor& out() { return out_; }
  [[nodiscard]] Tensor& state() { return *state_; }
  [[nodiscard]] Tensor& final_states() { return *final_states_; }
  [[nodiscard]] Tensor& chunk_states() { return *chunk_states_; }
  // Bytes of a sequence's output.
  [[nodiscard]] std::vector<unsigned char> out_of(std::int64_t sequence);
  // Bytes of a slot.
  [[nodiscard]] std::vector<unsigned char> state_of(std::int64_t slot);

 private:
  void fill();
  void download();
  [[nodiscard]] reference::GatedDeltaChunkInputs inputs() const;

  DeltaChunkCase c_;
  std::int64_t tokens_;
  std::vector<std::int64_t> offsets_;
  Tensor q_, k_, v_, g_, beta_, out_;
  std::optional<Tensor> a_log_, dt_bias_, state_, state_indices_, cu_seqlens_, final_states_, chunk_states_;
};

// The call of tokens [first, first + count) of each row.
[[nodiscard]] flashport::GatedDeltaChunkArgs part_of(flashport::GatedDeltaChunkArgs args, std::int64_t first,
                                                     std::int64_t count);

}  // namespace flashport_test
