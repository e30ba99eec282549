// Biases of a tile of keys that a warp reads itself, ahead of where it adds them: of 16 bits in the math type, two
// neighbours a register, or of fp32 the first half, behind which the second half follows as soon as that is added. Both
// lie in rows of neighbours that begin at any address.
//
// As in a sum of wgmma: lane 4 g + c has rows g and g + 8, and of each eight keys of a tile keys 2 c and 2 c + 1.
#pragma once

#include "common/device/attention/params.h"
#include "cuda/arch/words.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The low (0) or high (1) of two values of the math type.
template <MathType kMath>
FLASHPORT_DEVICE float wide(unsigned two, int half) {
  if constexpr (kMath == MathType::kBf16) return __uint_as_float(half == 0 ? two << 16 : two & 0xffff0000u);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(half == 0 ? two : two >> 16)));
}

template <MathType kMath, int kKeys>
class BiasRows {
  static constexpr int kSlots = 2;  // rows of a lane
  static constexpr DType kOwn = kMath == MathType::kBf16 ? DType::kBFloat16 : DType::kFloat16;
  enum class Kind { kOther, kPairs, kFloats };

 public:
  // Where a lane's biases of a tile begin, in elements of the tensor, and how many later its rows end. `part` is its
  // number among the four lanes of a row.
  struct Place {
    std::int64_t row_at[kSlots];
    int keys, part;
  };

  FLASHPORT_DEVICE void fetch(const BiasParams& bias, const Place& place) {
    kind_ = Kind::kOther;
    if (bias.data == nullptr || bias.stride_key != 1) return;
    if (bias.dtype == kOwn) {
      kind_ = Kind::kPairs;
      if (kKeys - 2 * place.part < place.keys) {  // the four lanes' keys, and one more
        fetch_pairs<false>(bias, place);
      } else {
        fetch_pairs<true>(bias, place);
      }
    } else if (bias.dtype == DType::kFloat32) {
      kind_ = Kind::kFloats;
      fetch_floats<0>(bias, place);
    }
  }
  FLASHPORT_DEVICE bool are_there() const { return kind_ != Kind::kOther; }

  // f(eight, i, bias) for register i of each eight keys, once, by whole warps.
  template <class F>
  FLASHPORT_DEVICE void for_each(const BiasParams& bias, const Place& place, F&& f) {
    if (kind_ == Kind::kFloats) {
      for_each_float<0>(f);
      fetch_floats<1>(bias, place);
      return for_each_float<1>(f);
    }
    if (!__all_sync(~0u, !odd_[0] && !odd_[1])) join_pairs(place.part);
#pragma unroll
    for (int eight = 0; eight < kKeys / 8; ++eight) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(eight, i, wide<kMath>(words_[eight][i / 2], i % 2));
    }
  }

 private:
  // In aligned words, which begin a bias early in an odd row. kEnds: a row may end in the tile or behind it, and no
  // read passes its end.
  template <bool kEnds>
  FLASHPORT_DEVICE void fetch_pairs(const BiasParams& bias, const Place& place) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const auto* row = static_cast<const std::uint16_t*>(bias.data) + place.row_at[slot];
      odd_[slot] = reinterpret_cast<std::uintptr_t>(row) % 4 != 0;
      row -= odd_[slot];
      const int end = place.keys + odd_[slot];
      const auto word = [&](int at) -> unsigned {
        if (!kEnds || at + 1 < end) return __ldg(reinterpret_cast<const unsigned*>(row + at));
        return at < end ? row[at] : 0;  // the row's last, or none
      };
#pragma unroll
      for (int eight = 0; eight < kKeys / 8; ++eight) words_[eight][slot] = word(8 * eight);
      if (odd_[slot] && place.part == slot) tail_ = word(kKeys - 2 * slot);
    }
  }

  // From words of odd rows to pairs. The other half of a pair is in the next lane's word, or in the first lane's next.
  FLASHPORT_DEVICE void join_pairs(int part) {
    const int first_lane = static_cast<int>(threadIdx.x) % kWaveSize - part, next_lane = first_lane + (part + 1) % 4;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll
      for (int eight = 0; eight < kKeys / 8; ++eight) {
        const bool last = eight == kKeys / 8 - 1;
        unsigned& own = words_[eight][slot];
        unsigned next = __shfl_sync(~0u, part == 0 && !last ? words_[eight + !last][slot] : own, next_lane);
        if (last) {
          const unsigned tail = __shfl_sync(~0u, tail_, first_lane + slot);
          if (part == 3) next = tail;
        }
        own = __byte_perm(own, next, odd_[slot] ? 0x5432 : 0x3210);
      }
    }
  }

  template <int kHalf>
  FLASHPORT_DEVICE void fetch_floats(const BiasParams& bias, const Place& place) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const float* row = static_cast<const float*>(bias.data) + place.row_at[slot] + kHalf * (kKeys / 2);
      if (kKeys - 2 * place.part <= place.keys && reinterpret_cast<std::uintptr_t>(row) % 8 == 0) {
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
          const uint2 pair = __ldg(reinterpret_cast<const uint2*>(row + 8 * i));
          words_[2 * i][slot] = pair.x;
          words_[2 * i + 1][slot] = pair.y;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
          const int key = i / 2 * 8 + i % 2;
          words_[i][slot] = kHalf * (kKeys / 2) + key < place.keys ? __float_as_uint(__ldg(row + key)) : 0;
        }
      }
    }
  }
  template <int kHalf, class F>
  FLASHPORT_DEVICE void for_each_float(F& f) {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        f(kHalf * (kKeys / 16) + i, at, __uint_as_float(words_[2 * i + at % 2][at / 2]));
      }
    }
  }

  // The last pair of an odd row ends in a word more: `tail_`, which the first lane has for the first slot, and the
  // second lane for the second.
  unsigned words_[kKeys / 8][kSlots], tail_;
  Kind kind_;
  bool odd_[kSlots];  // whether a row begins between aligned words
};

}  // namespace flashport::FLASHPORT_TARGET::attention
