// The rows of segments that CUDA's producer waves leave in the ring, against the reference's codecs, by the kernel's
// own text: copying and widening waves of a machine of the host, and one lane in place of the waves that compute.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>

#define FLASHPORT_TARGET sm90a
#define FLASHPORT_TARGET_HEADER "tests/device/machine/target.h"
#include "cuda/decode/kernels.h"

#include "tests/device/decode/random_segments.h"

namespace flashport::sm90a::decode {
namespace {

double read_tile(std::uint16_t bits, MathType math) {
  return math == MathType::kBf16 ? to_float(BFloat16{bits}) : to_float(std::bit_cast<Half>(bits));
}

// Rounded once.
bool is_near(double x, double exact, MathType math) {
  return std::fabs(x - exact) <= 1e-6 + std::fabs(exact) * (math == MathType::kBf16 ? 0x1.02p-8 : 0x1.02p-11);
}

// The keys of a sequence.
Range range_of(Call& call, int seq) {
  Range range{};
  Segment& s = range.segment;
  s.seq = seq;
  s.kv_head = seq % kHeads;
  s.key_high = call.keys(seq);
  s.key_low = std::min(s.key_high, call.below(2) * call.below(40));
  s.last = s.leaves = leaf_count(0, s.key_high);
  return range;
}

// Waits for each tile in turn, and gives it back. What is wrong first, or nothing.
template <DecodeConfig kCfg>
std::string check_tiles(const Call& call, const Range& range, int dims, DecodeShared<kCfg>& shared) {
  using Layout = typename KvTiles<kCfg>::Keys;
  constexpr MathType kMath = kCfg.shape.math;
  const Segment& s = range.segment;
  PipelineState<KvRing<kCfg>::kTiles> place;
  std::string wrong;
  for (LeafCursor now(range); !now.done(); now.next(call.params(), kCfg.tuning.leaves)) {
    for (const bool is_key : {true, false}) {
      mbarrier_wait(&shared.ring.ready[place.stage], place.phase);
      for (int row = 0; row < turn_keys(kCfg); ++row) {
        for (int dim = 0; dim < kCfg.shape.head_dim_qk && wrong.empty(); ++dim) {
          std::uint16_t bits;
          std::memcpy(&bits, shared.ring.tile(place.stage) + Layout::offset(row, 2 * dim), sizeof bits);
          const int key = now.key() + row;
          const bool exists = key >= s.key_low && key < s.key_high && dim < dims;
          const double exact = exists ? call.value(s.seq, key, s.kv_head, is_key, dim) : 0.0;
          if (std::isnan(exact) || std::fabs(exact) > 65000) continue;  // of e5m2, and where its products overflow
          const double x = read_tile(bits, kMath);
          if (is_near(x, exact, kMath)) continue;
          wrong = "key " + std::to_string(key) + (is_key ? " K" : " V") + " dim " + std::to_string(dim) + ": " +
                  std::to_string(x) + " in place of " + std::to_string(exact);
        }
      }
      for (int wave = 0; wave < kCfg.tuning.waves; ++wave) mbarrier_arrive(&shared.ring.free[place.stage]);
      place.next();
    }
  }
  return wrong;
}

// Runs a call's producers over the keys of each sequence in turn.
template <DecodeConfig kCfg>
void check_call(Call& call, int dims, std::uint64_t seed) {
  for (int seq = 0; seq < kBatch; ++seq) {
    const Range range = range_of(call, seq);
    std::string wrong;
    const auto kernel = [&](void* memory) {
      auto& shared = *static_cast<DecodeShared<kCfg>*>(memory);
      const int thread = static_cast<int>(machine::thread_index());
      shared.ring.init(thread);
      shared.stored.init(thread);
      __syncthreads();
      if (thread == 0) wrong = check_tiles<kCfg>(call, range, dims, shared);
      if (thread < kWaveSize) return;
      const Block producers(&shared.arrive_flag, kWaveSize, producer_threads(kCfg), 1);
      produce_segments<kCfg>(call.params(), range, producers, kWaveSize, shared);
    };
    EXPECT_EQ(machine::run({.threads = kWaveSize + producer_threads(kCfg),
                            .shared_bytes = sizeof(DecodeShared<kCfg>),
                            .seed = seed + static_cast<unsigned>(seq),
                            .kernel = kernel}),
              "");
    ASSERT_EQ(wrong, "");
  }
}

constexpr DecodeConfig config(int dims, int rows, MathType math, DecodeTuning tuning) {
  return {{dims, dims, rows, math, KvFormat::kAny, KvFormat::kAny}, tuning};
}

template <DecodeConfig kCfg>
void check_dims(int dims, int repeats) {
  std::mt19937 random(static_cast<unsigned>(dims));
  for (int repeat = 0; repeat < repeats; ++repeat) {
    SCOPED_TRACE(std::to_string(dims) + " dims, call " + std::to_string(repeat));
    Call call(dims, random, dims <= 256);  // at larger ones the host refuses the others
    check_call<kCfg>(call, dims, static_cast<unsigned>(100 * dims + 10 * repeat));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(SegmentProducer, BringsTheReferencesRows) {
  for (const int dims : {16, 72, 104, 128}) {
    check_dims<config(128, 8, MathType::kFp16, {4, 4, 1, 12, 1, 2})>(dims, 8);
    check_dims<config(128, 16, MathType::kBf16, {4, 2, 1, 12, 1, 2})>(dims, 8);
  }
}

TEST(SegmentProducer, BringsWideRows) {
  for (const int dims : {192, 256}) check_dims<config(256, 16, MathType::kFp16, {8, 4, 1, 8})>(dims, 4);
  for (const int dims : {264, 512}) check_dims<config(512, 16, MathType::kBf16, {8, 2, 1, 8})>(dims, 4);
}

}  // namespace
}  // namespace flashport::sm90a::decode
