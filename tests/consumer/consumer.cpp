// Uses the installed C++ interface: merges two blocks of one request (stage 2), attends to a prompt, and reads an error
// text.
#include <flashport/attention.h>
#include <flashport/backend.h>
#include <flashport/decode.h>
#include <flashport/error.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

namespace {

constexpr int kDim = 16;

bool expect(bool holds, const char* what) {
  if (!holds) std::printf("consumer_cpp: failed: %s\n", what);
  return holds;
}

// Queries of a prompt whose keys are equal see the mean of the values up to their own.
bool attends() {
  using flashport::Device;
  using flashport::DType;
  using flashport::TensorView;
  constexpr int kTokens = 4;
  float q[kTokens * kDim], k[kTokens * kDim], v[kTokens * kDim], out[kTokens * kDim] = {};
  for (int i = 0; i < kTokens * kDim; ++i) {
    q[i] = static_cast<float>(i);
    k[i] = 1.0f;
    v[i] = static_cast<float>(i / kDim);
  }
  flashport::AttentionArgs args;
  args.q = TensorView(q, DType::kFloat32, Device{}, {1, kTokens, 1, kDim});
  args.k = TensorView(k, DType::kFloat32, Device{}, {1, kTokens, 1, kDim});
  args.v = TensorView(v, DType::kFloat32, Device{}, {1, kTokens, 1, kDim});
  args.out = TensorView(out, DType::kFloat32, Device{}, {1, kTokens, 1, kDim});
  args.causal = true;
  flashport::attention(args);
  bool good = true;
  for (int i = 0; i < kTokens * kDim; ++i) {
    good = expect(std::fabs(out[i] - static_cast<float>(i / kDim) / 2) < 1e-5f, "the mean of what is seen") && good;
  }
  flashport::AttentionScheduleQuery query;
  query.num_q_heads = query.num_kv_heads = 8;
  query.q_len = query.kv_len = 1000;
  const flashport::AttentionSchedule schedule = flashport::explain(query);
  std::printf("%s\n", schedule.text.c_str());
  return expect(schedule.kernel == flashport::which_kernel(query.call), "explain() names the kernel") && good;
}

}  // namespace

int main() {
  using flashport::Device;
  using flashport::DType;
  using flashport::TensorView;

  float mid_out[2 * kDim];
  for (int i = 0; i < kDim; ++i) {
    mid_out[i] = 1.0f;
    mid_out[kDim + i] = 4.0f;
  }
  float mid_lse[2] = {0.0f, std::log(2.0f)};  // weights 1 and 2
  std::int32_t length = 100;
  float out[kDim] = {};

  flashport::DecodeStage2Args args;
  args.mid_out = TensorView(mid_out, DType::kFloat32, Device{}, {1, 1, 2, kDim});
  args.mid_out_logexpsum = TensorView(mid_lse, DType::kFloat32, Device{}, {1, 1, 2});
  args.b_seqlen = TensorView(&length, DType::kInt32, Device{}, {1});
  args.out = TensorView(out, DType::kFloat32, Device{}, {1, 1, kDim});
  args.block_seq = 64;
  flashport::flash_decode_stage2(args);

  bool good = attends();
  for (float x : out) good = expect(std::fabs(x - 3.0f) < 1e-5f, "(1 * 1 + 2 * 4) / 3 is 3") && good;

  args.mid_out.rank = 3;
  try {
    flashport::flash_decode_stage2(args);
    good = expect(false, "a tensor of the wrong rank is refused");
  } catch (const flashport::ValueError& error) {
    good = expect(std::string(error.what()).find("mid_out") != std::string::npos, "the error names mid_out") && good;
  }

  bool cpu_is_there = false;
  for (const flashport::BackendStatus& backend : flashport::backends()) {
    std::printf("%s: %s\n", backend.name.c_str(), backend.detail.c_str());
    cpu_is_there = cpu_is_there || (backend.name == "cpu" && backend.available);
  }
  good = expect(cpu_is_there, "the CPU backend is built in") && good;
  std::printf("flashport %s: %s\n", flashport::version(), good ? "good" : "failed");
  return good ? 0 : 1;
}
