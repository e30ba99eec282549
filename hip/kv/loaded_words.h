// The words of a lane's load beside those of its neighbours (loaded_row.h), by DPP.
#pragma once

#include "hip/kv/loaded_row.h"

namespace flashport::FLASHPORT_TARGET::kv {

// The word of another lane in the lanes of banks kBanks (four lanes each, of 16), `kept` in others.
template <int kControl, int kBanks>
FLASHPORT_DEVICE unsigned exchange_in_banks(unsigned kept, unsigned x) {
  return static_cast<unsigned>(
      __builtin_amdgcn_update_dpp(static_cast<int>(kept), static_cast<int>(x), kControl, 0xf, kBanks, kBanks == 0xf));
}

// The word of lane lane_of(kWhich, lane).
template <LaneOf kWhich>
FLASHPORT_DEVICE unsigned exchange_word(unsigned x) {
  constexpr int kFirst = 0x00, kEven = 0xa0, kReversed = 0x1b;  // quad_perm
  constexpr int kHalfMirror = 0x141;
  constexpr int kAll = 0xf, kLow = 0x5, kHigh = 0xa;
  if constexpr (kWhich == LaneOf::kFirstOfFour) {
    return exchange_in_banks<kFirst, kAll>(0, x);
  } else if constexpr (kWhich == LaneOf::kEven) {
    return exchange_in_banks<kEven, kAll>(0, x);
  } else if constexpr (kWhich == LaneOf::kFirstOfEight) {
    const unsigned firsts = exchange_in_banks<kFirst, kAll>(0, x);
    return exchange_in_banks<kHalfMirror, kHigh>(firsts, firsts);
  } else if constexpr (kWhich == LaneOf::kHighFour) {
    return exchange_in_banks<kHalfMirror, kLow>(x, x);
  } else {
    const unsigned mirrored = exchange_in_banks<kHalfMirror, kAll>(0, x);
    return exchange_in_banks<kReversed, kHigh>(x, mirrored);
  }
}

// Words: a vector of what the lane loaded, of values from `first` on.
template <class Words>
struct LoadedWords {
  const Words& words;
  unsigned first;

  FLASHPORT_DEVICE unsigned word(int i) const { return words[i]; }
  template <LaneOf kWhich, class F>
  FLASHPORT_DEVICE unsigned take(const F& f) const {
    return exchange_word<kWhich>(f(*this, first));
  }
};

}  // namespace flashport::FLASHPORT_TARGET::kv
