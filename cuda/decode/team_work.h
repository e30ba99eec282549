// What a block of a decode kernel does: the teams that share it, and in each the threads that compute and those that
// copy.
#pragma once

#include "common/device/decode/kernel.h"
#include "cuda/decode/early_range.h"
#include "cuda/decode/kv_producer.h"
#include "cuda/decode/stored_segments_producer.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Registers of a thread that computes and of one that does not, where some give up what others take; 0: all have what
// the compiler allots.
struct RegisterSplit {
  int compute, producer;
};
constexpr RegisterSplit register_split(const DecodeConfig& cfg) {
  if (reads_segments(cfg.shape)) return cfg.tuning.waves == 4 ? RegisterSplit{200, 104} : RegisterSplit{168, 88};
  // Two warpgroups of teams compute and one copies. A pair of teams with keys of q8_0 is slower so.
  if (cfg.tuning.teams == 4 || (cfg.tuning.teams == 2 && has_nibbles(cfg.shape.k_format))) return {200, 104};
  // Two blocks of a multiprocessor have 128 registers a thread, three warpgroups of one 168.
  const bool moves = uses_wgmma(cfg.shape) && (cfg.tuning.blocks_per_multiprocessor == 2 || warpgroups(cfg) == 2);
  return moves ? RegisterSplit{warpgroups(cfg) == 2 ? 232 : 216, 40} : RegisterSplit{};
}

// A team is a block as the schedule counts them. Its waves part: the first compute, the others bring them keys and
// values. Compute threads of all teams come first, so that registers move between whole warpgroups, and producers begin
// with thread kFirstProducer. Where multiprocessors are more than there is work for, a device block counts as one: its
// first team computes, and the others help it to copy.
template <DecodeConfig kCfg>
constexpr int first_producer() {
  return kCfg.tuning.teams * compute_threads(kCfg);
}
template <DecodeConfig kCfg>
class TeamWork {
  static constexpr int kFirstProducer = first_producer<kCfg>();
  static constexpr int kTeams = kCfg.tuning.teams;
  static constexpr int kCompute = compute_threads(kCfg), kProducers = producer_threads(kCfg);
  static constexpr int kReserved = 1024;  // of each block, for the system
  static_assert((kTeams * sizeof(DecodeShared<kCfg>) + kReserved) * kCfg.tuning.blocks_per_multiprocessor <= 228 * 1024,
                "shared memory of a multiprocessor's blocks");
  static_assert(kFirstTeamBarrier + kTeams * kTeamBarriers <= 16, "a block has 16 barriers");

 public:
  using Params = DecodeParamsOf<kCfg>;

  FLASHPORT_DEVICE TeamWork(const Params& p, DecodeShared<kCfg>* shared, bool produces)
      : p_(p),
        shared_(shared),
        team_(kTeams == 1 ? 0 : __shfl_sync(~0u, (produces ? of_producers() / kProducers : threadIdx.x / kCompute), 0)),
        first_(produces ? kFirstProducer + team_ * kProducers - kCompute : team_ * kCompute),
        helps_(teams_may_help(kCfg.shape, kTeams) && p.teams_help) {}

  FLASHPORT_DEVICE static int of_producers() { return static_cast<int>(threadIdx.x) - kFirstProducer; }
  FLASHPORT_DEVICE int thread() const { return static_cast<int>(threadIdx.x) - first_; }  // of the team's
  FLASHPORT_DEVICE int team() const { return team_; }
  FLASHPORT_DEVICE DecodeShared<kCfg>& own() const { return shared_[team_]; }
  FLASHPORT_DEVICE Block whole() const { return part(0, kCompute + kProducers, kRangeBarrier); }

  FLASHPORT_DEVICE void compute(const Range& range) const {
    const Block block = part(0, kCompute, kComputeBarrier);
    if constexpr (kTeams > 1) {
      if (thread() == 0) own().heads_together = teams_share_rows<kCfg>(p_, range);
      block.sync();
    }
    if (helps_ && team_ > 0) return;
    decode<kCfg>(p_, range, block, own());
  }

  FLASHPORT_DEVICE void produce(const Range& range) const {
    const Block producers = part(kCompute, kProducers, kProducerBarrier);
    if constexpr (reads_segments(kCfg.shape)) {
      produce_segments<kCfg>(p_, range, producers, first_ + kCompute, own());
    } else if (teams_share_rows<kCfg>(p_, range)) {
      Producer<Sharing::kRows>(p_, producers, range.line, shared_).run(p_, range);
    } else if (helps_) {
      if constexpr (teams_may_help(kCfg.shape, kTeams)) {
        const Block all(&shared_[0].arrive_flag, kFirstProducer, kTeams * kProducers, 0);
        Producer<Sharing::kFirstTeam>(p_, all, range.line, shared_).run(p_, range);
      }
    } else if constexpr (!kCfg.shape.has_wide_segments) {
      Producer<Sharing::kNone>(p_, producers, range.line, shared_).run(p_, range);
    }
  }

 private:
  template <Sharing kSharing>
  using Producer =
      std::conditional_t<kCfg.shape.has_wide_segments, StoredSegmentsProducer<kCfg, kSharing, DecodeShared<kCfg>>,
                         KvProducer<kCfg, kSharing, DecodeShared<kCfg>>>;

  FLASHPORT_DEVICE Block part(int begin, int threads, TeamBarrier barrier) const {
    const int its_barrier = kFirstTeamBarrier + team_ * kTeamBarriers + barrier;
    return Block(&own().arrive_flag, first_ + begin, threads, its_barrier, helps_ ? 0 : team_, helps_ ? 1 : kTeams);
  }

  const Params& p_;
  DecodeShared<kCfg>* shared_;
  int team_, first_;
  bool helps_;
};

template <DecodeConfig kCfg>
FLASHPORT_DEVICE void decode_block(const DecodeParamsOf<kCfg>& p, DecodeShared<kCfg>* shared) {
  constexpr RegisterSplit kRegisters = register_split(kCfg);
  static_assert(kRegisters.compute == 0 ||
                (first_producer<kCfg>() % 128 == 0 && kCfg.tuning.teams * producer_threads(kCfg) % 128 == 0));
  using Work = TeamWork<kCfg>;
  const bool produces = Work::of_producers() >= 0;
  const Work work(p, shared, produces);
  DecodeShared<kCfg>& own = work.own();
  own.ring.init(work.thread());
  if constexpr (reads_segments(kCfg.shape)) own.stored.init(work.thread());
  if constexpr (factors_of(kCfg.shape) == Factors::kOfRows) {
    fill_factors(p, own.ring, work.thread(), compute_threads(kCfg) + producer_threads(kCfg));
  }
  if (work.thread() == 0) own.arrive_flag = touch_params(p);
  const Range range = begin_range<kCfg>(p, work.whole(), own.lengths);
  if (!produces) {
    if constexpr (kRegisters.compute > 0) increase_registers<kRegisters.compute>();
    work.compute(range);
  } else {
    if constexpr (kRegisters.producer > 0) decrease_registers<kRegisters.producer>();
    work.produce(range);
  }
}

// Functions, as nvcc 13.0 spells the names of such types wrong where it writes out variables of a namespace.
template <DecodeConfig kCfg>
constexpr int shared_bytes() {
  return kCfg.tuning.teams * static_cast<int>(sizeof(DecodeShared<kCfg>));
}

}  // namespace flashport::FLASHPORT_TARGET::decode
