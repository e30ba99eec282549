// Factors of rows, or of groups of their values, that lie beside keys or values (KeyScales): a lane loads those of its
// values together with these, and multiplies by them when it widens.
#pragma once

#include "common/device/attention/work.h"
#include "hip/attention/row_offsets.h"
#include "hip/attention/widen.h"

namespace flashport::FLASHPORT_TARGET::attention {

constexpr bool has_factors(KeySources sources) { return has(sources, KeySources::kScaled); }

// Where the factors of a tile's rows lie; nothing, where a kernel reads none.
template <bool kThere>
struct FactorPlaces {
  // `first`: of the keys of the work tile, where they are on no pages.
  FLASHPORT_DEVICE void begin(const KeyScales&, const std::int32_t*, const WorkTile&, int) {}
  FLASHPORT_DEVICE RowOffsets offsets(const KeyScales&, kv::TokenCoord) const { return {}; }
};
template <>
struct FactorPlaces<true> {
  FLASHPORT_DEVICE void begin(const KeyScales& scales, const std::int32_t* pages, const WorkTile& work, int head) {
    const kv::TokenCoord first{work.seq, static_cast<int>(work.k_begin)};
    head_ = kv::scale_element(scales, pages == nullptr ? first : kv::TokenCoord{0, 0}, head);
  }
  FLASHPORT_DEVICE RowOffsets offsets(const KeyScales& scales, kv::TokenCoord place) const {
    const std::int64_t element = head_ + kv::scale_element(scales, place, 0);
    return {(GlobalBytes)scales.data, place.offset < 0 ? RowOffsets::kNone : element * element_bytes(scales)};
  }
  FLASHPORT_DEVICE static int element_bytes(const KeyScales& scales) { return scales.dtype == DType::kFloat16 ? 2 : 4; }

 private:
  std::int64_t head_;  // the element of the head's first row
};

// The factors of the same values of kRows rows.
template <bool kThere, int kRows>
struct RowFactors {
  template <class F>
  FLASHPORT_DEVICE void load(const RowOffsets&, const KeyScales&, unsigned, bool, const F&) {}
  template <class Words>
  FLASHPORT_DEVICE void multiply(Words (&)[kRows], const KeyScales&) const {}
};
template <int kRows>
struct RowFactors<true, kRows> {
  // lane_of(row): the lane that looked it up. `first`: of the values.
  template <class F>
  FLASHPORT_DEVICE void load(const RowOffsets& offsets, const KeyScales& scales, unsigned first, bool is_live,
                             const F& lane_of) {
    if (scales.data == nullptr) return;
    std::int64_t byte = 0;
    if (scales.dims_per_scale != 0) {
      // Quotients of such small numbers lie farther from integers than the reciprocal is off.
      const float inverse = reciprocal_approx(static_cast<float>(scales.dims_per_scale));
      const int group = static_cast<int>((static_cast<float>(first) + 0.5f) * inverse);
      byte = group * scales.stride_group * FactorPlaces<true>::element_bytes(scales);
    }
    const auto load_each = [&](const auto& load_one) FLASHPORT_INLINE {
#pragma unroll
      for (int i = 0; i < kRows; ++i) stored_[i] = load_one(offsets.address(lane_of(i), byte, is_live));
    };
    if (scales.dtype == DType::kFloat16) {
      load_each([](GlobalBytes at) FLASHPORT_INLINE { return unsigned{load_half_word(at)}; });
    } else {
      load_each([](GlobalBytes at) FLASHPORT_INLINE { return load_words<1>(at)[0]; });
    }
  }
  // Values of fp16, which hold all that formats with factors store. In fp32, because factors may be far smaller than
  // fp16's normal numbers.
  template <class Words>
  FLASHPORT_DEVICE void multiply(Words (&rows)[kRows], const KeyScales& scales) const {
    if (scales.data == nullptr) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float factor =
          scales.dtype == DType::kFloat16 ? kv::half_to_float(stored_[i]) : __builtin_bit_cast(float, stored_[i]);
#pragma unroll
      for (unsigned word = 0; word < sizeof(Words) / sizeof(unsigned); ++word) {
        rows[i][word] = floats_to_halves(halves_to_floats(rows[i][word]) * factor);
      }
    }
  }

 private:
  unsigned stored_[kRows];
};

}  // namespace flashport::FLASHPORT_TARGET::attention
