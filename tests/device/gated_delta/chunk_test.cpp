// The text of the chunked gated delta rule's kernels on blocks of several threads, with two stages of tiles and with
// operands in bf16, as GPUs run it: against the fp64 recurrence and the plain WY form.
#define FLASHPORT_TARGET lanes
#define FLASHPORT_TARGET_HEADER "tests/device/gated_delta/lanes_target.h"
#define FLASHPORT_DELTA_TILES_HEADER "tests/device/gated_delta/lanes_tiles.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/device/gated_delta/chunk_kernel.h"
#include "common/device/gated_delta/prepare_kernel.h"
#include "tests/reference/gated_delta_chunk.h"
#include "tests/support/compare.h"
#include "tests/support/random.h"

namespace flashport::lanes::gated_delta {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Case {
  std::string name;
  MathType math;
  int threads;
  bool packed, key_major;
  double least_gate;  // of a uniform distribution
};

// Packed sequences of 70, 0, 130 and 64 tokens, or two of 70; 2 heads, 4 value heads, K 24 in a tile of 32, V 40 in
// slices of 16.
class ChunkKernels : public testing::TestWithParam<Case> {
 protected:
  static constexpr int kHeads = 2, kValueHeads = 4, kKeys = 24, kColumns = 40;

  struct Tensor {
    std::vector<float> x;
    std::vector<std::int64_t> shape;

    explicit Tensor(std::vector<std::int64_t> extents) : shape(std::move(extents)) {
      std::int64_t count = 1;
      for (std::int64_t extent : shape) count *= extent;
      x.assign(static_cast<std::size_t>(count), kNaN);
    }
    [[nodiscard]] reference::Array array() const {
      reference::Array a{x.data(), reference::Type::kF32, shape, shape};
      std::int64_t step = 1;
      for (std::size_t axis = shape.size(); axis-- > 0; step *= shape[axis]) a.strides[axis] = step;
      return a;
    }
    [[nodiscard]] StridedRows rows() {
      const std::int64_t dim = shape.size() > 3 ? shape[3] : 1;
      return {x.data(), DType::kFloat32, shape[1] * shape[2] * dim, shape[2] * dim, dim, 1};
    }
  };
};

template <GatedDeltaChunkConfig kCfg>
void run(GatedDeltaChunkParams p, int threads, std::int64_t chunks) {
  std::vector<float> inverses(chunks * p.num_v_heads * kChunkTokens * kChunkTokens, kNaN), scores = inverses;
  std::vector<ChunkFactors> factors(chunks * p.num_v_heads);
  p.workspace = {inverses.data(), scores.data(), factors.data(), nullptr, chunks};
  auto prepare_memory = std::make_unique<PrepareShared<kCfg>>();
  run_blocks(chunks * p.num_heads, threads,
             [&](const Block& block) { gated_delta_prepare<kCfg>(p, block, *prepare_memory); });
  auto chain_memory = std::make_unique<ChainMemory<kCfg>>();
  const std::int64_t slices = (p.head_dim_v + kCfg.columns - 1) / kCfg.columns;
  run_blocks(p.batch * p.num_v_heads * slices, threads,
             [&](const Block& block) { gated_delta_chunk<DeltaTiles<kCfg>>(p, block, *chain_memory); });
}

TEST_P(ChunkKernels, AreAsGoodAsThePlainWyForm) {
  const Case& c = GetParam();
  const std::vector<std::int32_t> offsets = {0, 70, 70, 200, 264};
  const std::int64_t rows = c.packed ? 1 : 2, tokens = c.packed ? 264 : 70, sequences = c.packed ? 4 : 2;
  const std::vector<std::int32_t> indices = {2, 4, -1, 0};
  Tensor q({rows, tokens, kHeads, kKeys}), k = q, v({rows, tokens, kValueHeads, kColumns}), out = v;
  Tensor g({rows, tokens, kValueHeads}), beta = g;
  const int outer = c.key_major ? kKeys : kColumns, inner = c.key_major ? kColumns : kKeys;
  Tensor state({5, kValueHeads, outer, inner}), final_states({sequences, kValueHeads, outer, inner});
  Tensor chunk_states({rows, c.packed ? 6 : 2, kValueHeads, outer, inner});
  flashport_test::Random random(7);
  // Values of the inputs are those of bf16, so that both math types read the same numbers.
  for (Tensor* tensor : {&q, &k, &v, &state}) {
    for (float& x : tensor->x) x = to_float(to_bfloat16(static_cast<float>(random.normal())));
  }
  for (float& x : g.x) x = static_cast<float>(c.least_gate * random.uniform());
  for (float& x : beta.x) x = static_cast<float>(random.uniform());

  reference::GatedDeltaChunkInputs in;
  in.q = q.array();
  in.k = k.array();
  in.v = v.array();
  in.g = g.array();
  in.beta = beta.array();
  const Tensor before = state;
  in.state = before.array();
  in.state_indices = reference::Array{indices.data(), reference::Type::kI32, {sequences}, {1}};
  if (c.packed) in.cu_seqlens = reference::Array{offsets.data(), reference::Type::kI32, {5}, {1}};
  in.key_major = c.key_major;
  in.l2norm = true;
  in.scale = 0.3;
  const reference::Type type = c.math == MathType::kBf16 ? reference::Type::kBF16 : reference::Type::kF32;
  const auto exact = reference::gated_delta_chunk(in), plain = reference::gated_delta_chunk_plain(in, type);

  GatedDeltaChunkParams p{};
  p.batch = static_cast<std::int32_t>(sequences);
  p.tokens = static_cast<std::int32_t>(tokens);
  p.num_heads = kHeads;
  p.num_v_heads = kValueHeads;
  p.group_size = kValueHeads / kHeads;
  p.head_dim_k = kKeys;
  p.head_dim_v = kColumns;
  p.key_major = c.key_major ? 1 : 0;
  p.l2norm = p.update_state = 1;
  p.q = q.rows();
  p.k = k.rows();
  p.v = v.rows();
  p.g = g.rows();
  p.beta = beta.rows();
  p.out = out.rows();
  if (c.packed) p.cu_seqlens = {offsets.data(), 0};
  const std::int64_t states = kValueHeads * kKeys * kColumns;
  p.state = {state.x.data(), DType::kFloat32, states, 0, {indices.data(), 0}};
  p.final_states = {final_states.x.data(), DType::kFloat32, states, 0, {}};
  p.chunk_states = {chunk_states.x.data(), DType::kFloat32, chunk_states.shape[1] * states, states, {}};
  p.chunk_states_count = static_cast<std::int32_t>(chunk_states.shape[1]);
  p.scale = 0.3f;
  p.beta_factor = 1;
  const std::int64_t chunks = c.packed ? tokens / kChunkTokens + sequences : rows * 2;
  if (c.math == MathType::kBf16) {
    run<GatedDeltaChunkConfig{MathType::kBf16, 32, 16}>(p, c.threads, chunks);
  } else {
    run<GatedDeltaChunkConfig{MathType::kFp32, 32, 16}>(p, c.threads, chunks);
  }

  const auto judge = [](const std::vector<float>& got, const std::vector<double>& wanted,
                        const std::vector<double>& usual, const std::string& what) {
    const std::vector<double> ours(got.begin(), got.end());
    const auto compared = flashport_test::compare(ours, wanted, usual, flashport_test::fp32_floor(wanted));
    EXPECT_EQ(compared.failure, "") << what;
  };
  // [HV][K][V] in the order of memory
  const auto turned = [&](const std::vector<double>& x) {
    std::vector<double> y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t head = i / (kKeys * kColumns), key = i / kColumns % kKeys, column = i % kColumns;
      y[head * kKeys * kColumns + (c.key_major ? key * kColumns + column : column * kKeys + key)] = x[i];
    }
    return y;
  };
  const auto part = [](const std::vector<float>& x, std::int64_t first, std::int64_t count) {
    return std::vector<float>(x.begin() + first, x.begin() + first + count);
  };
  std::int64_t chunk = 0;
  for (std::int64_t n = 0; n < sequences; ++n) {
    const auto& e = exact[n];
    const std::string name = "sequence " + std::to_string(n);
    const std::int64_t width = kValueHeads * kColumns;
    judge(part(out.x, (e.row * tokens + e.first) * width, e.count * width), e.out, plain[n].out, name);
    judge(part(final_states.x, n * states, states), turned(e.state), turned(plain[n].state), name + ", final");
    if (indices[n] >= 0) {
      judge(part(state.x, indices[n] * states, states), turned(e.state), turned(plain[n].state), name + ", state");
    }
    if (!c.packed) chunk = 0;
    for (std::size_t i = 0; i < e.entering.size(); ++i, ++chunk) {
      judge(part(chunk_states.x, (e.row * chunk_states.shape[1] + chunk) * states, states), turned(e.entering[i]),
            turned(plain[n].entering[i]), name + ", chunk " + std::to_string(i));
    }
  }
  for (std::int64_t slot : {1, 3})
    EXPECT_EQ(part(state.x, slot * states, states), part(before.x, slot * states, states));
}

INSTANTIATE_TEST_SUITE_P(Blocks, ChunkKernels,
                         testing::Values(Case{"bf16", MathType::kBf16, 8, false, false, -0.3},
                                         Case{"bf16_packed", MathType::kBf16, 8, true, true, -0.3},
                                         Case{"bf16_slow", MathType::kBf16, 8, false, true, -0.003},
                                         Case{"bf16_fast", MathType::kBf16, 8, false, false, -6.0},
                                         Case{"fp32_packed", MathType::kFp32, 8, true, false, -0.3},
                                         Case{"one_thread", MathType::kFp32, 1, false, false, -0.3},
                                         Case{"seven_threads", MathType::kFp32, 7, true, true, -0.3},
                                         Case{"many_threads", MathType::kFp32, 70, false, false, -0.3}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace flashport::lanes::gated_delta
