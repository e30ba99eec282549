// The rows of segments that CUDA's producer waves leave in the ring, against the reference's codecs, by the kernel's
// own text: copying and widening waves, whose lanes are threads, and one thread in place of the waves that compute.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#define FLASHPORT_TARGET host_warps
#define FLASHPORT_TARGET_HEADER "tests/device/decode/warps_target.h"
#define FLASHPORT_WORDS_HEADER "tests/device/kv/word_verbs.h"
#include "cuda/decode/segment_producer.h"
#include "tests/device/decode/random_segments.h"

namespace flashport::host_warps::decode {

template <DecodeConfig kCfg>
struct DecodeShared : SegmentStages<kCfg> {
  KvRing<kCfg> ring;
  unsigned arrive_flag;
};

namespace {

double read_tile(std::uint16_t bits, MathType math) {
  return math == MathType::kBf16 ? to_float(BFloat16{bits}) : to_float(std::bit_cast<Half>(bits));
}

// Rounded once.
bool is_near(double x, double exact, MathType math) {
  return std::fabs(x - exact) <= 1e-6 + std::fabs(exact) * (math == MathType::kBf16 ? 0x1.02p-8 : 0x1.02p-11);
}

// Runs a call's producers over the keys of each sequence in turn.
template <DecodeConfig kCfg>
void check_tiles(Call& call, int dims) {
  using Shared = DecodeShared<kCfg>;
  using Layout = typename KvTiles<kCfg>::Keys;
  constexpr int kThreads = kCfg.tuning.producer_waves * kWaveSize;
  constexpr MathType kMath = kCfg.shape.math;
  for (int seq = 0; seq < kBatch; ++seq) {
    Range range{};
    Segment& s = range.segment;
    s.seq = seq;
    s.kv_head = seq % kHeads;
    s.key_high = call.keys(seq);
    s.key_low = std::min(s.key_high, call.below(2) * call.below(40));
    s.last = s.leaves = leaf_count(0, s.key_high);
    const auto memory = std::make_unique<Shared>();
    Shared& shared = *memory;
    std::memset(static_cast<void*>(&shared), 0xff, sizeof shared);
    for (auto& query : shared.ring.queries) query.copies = 0;
    for (int thread = 0; thread < kThreads; ++thread) {
      shared.ring.init(thread);
      shared.stored.init(thread);
    }
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::thread> threads;
    for (int wave = 0; wave < kCfg.tuning.producer_waves; ++wave) warps.push_back(std::make_unique<Warp>());
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        my_warp = warps[thread / kWaveSize].get();
        my_thread = thread;
        produce_segments<kCfg>(call.params(), range, Block(nullptr, 0, kThreads, 0), 0, shared);
      });
    }
    PipelineState<KvRing<kCfg>::kTiles> place;
    bool good = true;
    for (LeafCursor now(range); !now.done(); now.next(call.params(), kCfg.tuning.leaves)) {
      for (const bool is_key : {true, false}) {
        mbarrier_wait(&shared.ring.ready[place.stage], place.phase);
        if (is_key && now.at_segment_start()) {
          EXPECT_EQ(shared.ring.queries[0].copies, side_wideners(kCfg) * kWaveSize);
        }
        for (int row = 0; row < turn_keys(kCfg); ++row) {
          for (int dim = 0; dim < kCfg.shape.head_dim_qk; ++dim) {
            std::uint16_t bits;
            std::memcpy(&bits, shared.ring.tiles[place.stage] + Layout::offset(row, 2 * dim), sizeof bits);
            const int key = now.key() + row;
            const bool exists = key >= s.key_low && key < s.key_high && dim < dims;
            const double exact = exists ? call.value(seq, key, s.kv_head, is_key, dim) : 0.0;
            if (std::isnan(exact) || std::fabs(exact) > 65000) continue;  // of e5m2, and where its products overflow
            if (good && !is_near(read_tile(bits, kMath), exact, kMath)) {
              good = false;
              ADD_FAILURE() << "key " << key << (is_key ? " K" : " V") << " dim " << dim << ": "
                            << read_tile(bits, kMath) << " in place of " << exact;
            }
          }
        }
        for (int wave = 0; wave < kCfg.tuning.waves; ++wave) mbarrier_arrive(&shared.ring.free[place.stage]);
        place.next();
      }
    }
    for (std::thread& thread : threads) thread.join();
    if (!good) return;
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
    check_tiles<kCfg>(call, dims);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(SegmentProducer, BringsTheReferencesRows) {
  for (const int dims : {16, 72, 128}) {
    check_dims<config(128, 8, MathType::kFp16, {4, 4, 1, 12, 1, 2})>(dims, 2);
    check_dims<config(128, 16, MathType::kBf16, {4, 2, 1, 12, 1, 2})>(dims, 2);
  }
}

TEST(SegmentProducer, BringsWideRows) {
  for (const int dims : {192, 256}) check_dims<config(256, 16, MathType::kFp16, {8, 4, 1, 8})>(dims, 1);
  for (const int dims : {264, 512}) check_dims<config(512, 16, MathType::kBf16, {8, 2, 1, 8})>(dims, 1);
}

}  // namespace
}  // namespace flashport::host_warps::decode
