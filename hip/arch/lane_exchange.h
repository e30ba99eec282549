// Exchanges between the lanes of a wave, where each has a part of several sums. A sub-wave is the set of lanes that
// make their sums together, described by its steps: in each step a lane exchanges with the lane whose number differs by
// a mask. Masks below 16 are one DPP operand of an ordinary instruction; so the low bits take the masks 15 and 7
// (mirrors) where one would expect 8 and 4.
#pragma once

#include <utility>

#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

template <int kControl>
FLASHPORT_DEVICE float dpp(float x) {
  return __builtin_bit_cast(float,
                            __builtin_amdgcn_update_dpp(0, __builtin_bit_cast(int, x), kControl, 0xf, 0xf, true));
}

// The value of the lane 16 further on in the same half of the wave, and 32 further on.
FLASHPORT_DEVICE float swap_16(float x) {
  constexpr int kXor16 = 16 << 10 | 0x1f;
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_swizzle(__builtin_bit_cast(int, x), kXor16));
}
FLASHPORT_DEVICE float swap_32(float x) {
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((lane ^ 32) * 4, __builtin_bit_cast(int, x)));
}

// The value of lane ^ kMask.
template <int kMask>
FLASHPORT_DEVICE float exchange(float x) {
  if constexpr (kMask == 1) {
    return dpp<0xb1>(x);  // quad_perm:[1,0,3,2]
  } else if constexpr (kMask == 2) {
    return dpp<0x4e>(x);  // quad_perm:[2,3,0,1]
  } else if constexpr (kMask == 7) {
    return dpp<0x141>(x);  // row_half_mirror
  } else if constexpr (kMask == 8) {
    return dpp<0x128>(x);  // row_ror:8
  } else if constexpr (kMask == 15) {
    return dpp<0x140>(x);  // row_mirror
  } else if constexpr (kMask == 16) {
    return swap_16(x);
  } else {
    static_assert(kMask == 32);
    return swap_32(x);
  }
}

// The value of lane kLane of this lane's 16. The control is row_share on RDNA, row_newbcast on CDNA.
template <int kLane>
FLASHPORT_DEVICE float from_lane_of_16(float x) {
  return dpp<0x150 + kLane>(x);
}

struct LaneSteps {
  int count = 0;
  int masks[6] = {};

  constexpr void add(int mask) { masks[count++] = mask; }
};

// A wave is divided twice: into sub-waves of `lanes` (2 to 64) neighbours, and into sub-waves of others, which have the
// same number among their neighbours. Where there are fewer than 8 neighbours, their numbers fall in every second four
// lanes, since the first mask of the others is 7.
constexpr LaneSteps steps_of_neighbours(int lanes) {
  LaneSteps steps;
  if (lanes >= 16) steps.add(15);
  if (lanes >= 8) steps.add(7);
  if (lanes >= 4) steps.add(2);
  if (lanes >= 2) steps.add(1);
  if (lanes >= 32) steps.add(16);
  if (lanes >= 64) steps.add(32);
  return steps;
}
constexpr LaneSteps steps_of_others(int neighbours) {
  LaneSteps steps;
  if (neighbours <= 4) steps.add(7);
  if (neighbours <= 2) steps.add(2);
  if (neighbours <= 8) steps.add(8);
  if (neighbours <= 16) steps.add(16);
  if (neighbours <= 32 && kWaveSize == 64) steps.add(32);
  return steps;
}
template <int kNeighbours>
FLASHPORT_DEVICE int number_among_neighbours(int lane) {
  const int number = lane % kNeighbours;
  return kNeighbours < 8 && (lane & 4) != 0 ? number ^ (kNeighbours - 1) : number;
}

template <LaneSteps kSteps>
struct SubWave {
  // The highest bit that a step's mask flips says which of the two lanes this is; later masks do not flip it.
  template <int kStep>
  FLASHPORT_DEVICE static bool is_upper(int lane) {
    constexpr int kMask = kSteps.masks[kStep];
    return (lane & (kMask == 15 ? 8 : kMask == 7 ? 4 : kMask)) != 0;
  }

  // The sum over the sub-wave. All lanes get the same bits, since both lanes of a step add the same two numbers.
  template <int kStep = 0>
  FLASHPORT_DEVICE static float sum(float x) {
    if constexpr (kStep == kSteps.count) {
      return x;
    } else {
      return sum<kStep + 1>(x + exchange<kSteps.masks[kStep]>(x));
    }
  }

  // The sums of kCount numbers, each made as above; a lane gets that of index<kCount>(lane).
  template <int kStep = 0, int kCount>
  FLASHPORT_DEVICE static float sum_each(const float (&x)[kCount], int lane) {
    if constexpr (kCount == 1) {
      return sum<kStep>(x[0]);
    } else {
      constexpr int kHalf = kCount / 2;
      const bool upper = is_upper<kStep>(lane);
      float half[kHalf];
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float kept = upper ? x[i + kHalf] : x[i], sent = upper ? x[i] : x[i + kHalf];
        half[i] = kept + exchange<kSteps.masks[kStep]>(sent);
      }
      return sum_each<kStep + 1>(half, lane);
    }
  }
  template <int kCount, int kStep = 0>
  FLASHPORT_DEVICE static int index(int lane) {
    if constexpr (kCount == 1) {
      return 0;
    } else {
      return (is_upper<kStep>(lane) ? kCount / 2 : 0) + index<kCount / 2, kStep + 1>(lane);
    }
  }
  // Whether this is the first of the lanes that have the same index.
  template <int kCount, int kStep = 0>
  FLASHPORT_DEVICE static bool is_first(int lane) {
    if constexpr (kStep == kSteps.count) {
      return true;
    } else {
      const bool rest = is_first<(kCount > 1 ? kCount / 2 : 1), kStep + 1>(lane);
      return kCount > 1 ? rest : rest && !is_upper<kStep>(lane);
    }
  }
  // Gathers the numbers of all lanes: each lane has kOwn of them, and those of index i come from i kOwn on.
  template <int kStep = 0, int kCount, int kOwn>
  FLASHPORT_DEVICE static void gather(const float (&own)[kOwn], float (&all)[kCount], int lane) {
    if constexpr (kCount == kOwn) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) all[i] = own[i];
    } else {
      constexpr int kHalf = kCount / 2;
      const bool upper = is_upper<kStep>(lane);
      float half[kHalf];
      gather<kStep + 1>(own, half, lane);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float other = exchange<kSteps.masks[kStep]>(half[i]);
        all[i] = upper ? other : half[i];
        all[i + kHalf] = upper ? half[i] : other;
      }
    }
  }
  // The same for one number a lane, where the sub-wave consists of whole sixteens of neighbours.
  template <int kCount>
  FLASHPORT_DEVICE static void gather_in_16(float own, float (&all)[kCount]) {
    static_assert(kSteps.masks[0] == 15 && kCount <= 16);
    [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
      ((all[kIndex] = from_lane_of_16<kIndex * (16 / kCount)>(own)), ...);
    }(std::make_integer_sequence<int, kCount>());
  }
};

}  // namespace flashport::FLASHPORT_TARGET
