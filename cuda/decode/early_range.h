// A block's work range, found while the kernel before it still runs, from the lengths that are there by then. That
// kernel may be the one that writes them, so they are read again after it, and where one has changed the range is found
// once more. Early they are read around L1, which would keep what it has read.
#pragma once

#include "common/device/decode/schedule.h"
#include "cuda/decode/block_shape.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The lengths that ranges follow from, in shared memory, of batches of up to so many sequences: fewer where new keys
// take the room, few where two teams share a block, fewer where two warpgroups share the columns of 64 rows, whose
// segments lie in shared memory, too, and none where four teams fill it. Kernels that read segments have none, as their
// ranges follow from more than one array.
constexpr int most_early_lengths(const DecodeConfig& cfg) {
  if (reads_segments(cfg.shape) || cfg.shape.has_wide_segments) return 0;
  if (cfg.shape.appends) return cfg.shape.rows == 8 && cfg.tuning.blocks_per_multiprocessor == 1 ? 256 : 96;
  if (cfg.tuning.teams > 1) return cfg.tuning.teams > 2 ? 0 : 32;
  return uses_wgmma(cfg.shape) && column_warpgroups(cfg) == 2 ? 8 : 256;
}
template <int kMost>
struct EarlyLengths {
  int of[kMost];
  bool changed;
};
template <>
struct EarlyLengths<0> {};
template <DecodeConfig kCfg>
using EarlyLengthsOf = EarlyLengths<most_early_lengths(kCfg)>;

struct LoadAroundL1 {
  template <class T>
  FLASHPORT_DEVICE T operator()(const T* at) const {
    return load_around_l1(at);
  }
};

// Whether how many new keys a sequence has is an array's word, too.
template <class Params>
FLASHPORT_DEVICE bool has_new_key_offsets(const Params& p) {
  if constexpr (Appends<Params>) {
    return p.append.cu_seqlens_k_new != nullptr;
  } else {
    return false;
  }
}

// Begins the kernel, and returns the range of `team`, which has all threads of a team; `lengths` is its own. All teams
// of the device block call it together.
template <DecodeConfig kCfg>
FLASHPORT_DEVICE Range begin_range(const DecodeParamsOf<kCfg>& p, const Block& team, EarlyLengthsOf<kCfg>& lengths) {
  constexpr int kMost = most_early_lengths(kCfg);
  constexpr bool kPlain = DecodeParamsOf<kCfg>::kPlain;
  // Then nothing else of device memory is read for a range.
  const bool is_early =
      kMost > 0 && p.batch <= kMost && p.num_chunks == 0 && p.cu_seqlens_q == nullptr && !has_new_key_offsets(p);
  const auto length_of = [&](int seq) {
    if constexpr (kMost > 0) {
      if (is_early) return lengths.of[seq];
    }
    return key_count(p, seq);
  };
  const auto read_lengths = [&] {
    if constexpr (kMost > 0) {
      FLASHPORT_UNROLL(1)
      for (int seq = team.thread(); seq < p.batch; seq += team.threads()) {
        lengths.of[seq] = key_count(p, seq, LoadAroundL1{});
      }
    }
  };
  const auto have_changed = [&] {
    if constexpr (kMost > 0) {
      FLASHPORT_UNROLL(1)
      for (int seq = team.thread(); seq < p.batch; seq += team.threads()) {
        if (key_count(p, seq) != lengths.of[seq]) lengths.changed = true;
      }
      team.sync();
      return lengths.changed;
    } else {
      return false;
    }
  };
  const auto find = [&] {
    if constexpr (!kPlain && !kCfg.shape.has_wide_segments) {
      if (p.num_chunks > 0) return chunk_range(p, team);
    }
    return balanced_range(p, team, length_of);
  };
  if (is_early) {
    read_lengths();
    if constexpr (kMost > 0) lengths.changed = false;
  } else {
    begin_kernel();
  }
  __syncthreads();
  FLASHPORT_UNROLL(1)
  for (bool is_guess = is_early;; is_guess = false) {
    Range range = find();
    if (is_guess) begin_kernel();
    if (!is_guess || !have_changed()) {
      range.segment.pages = kv::page_list<kPlain>(p.cache, range.segment.seq);
      return range;
    }
    read_lengths();
    team.sync();
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
