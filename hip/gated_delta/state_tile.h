// A slice of a gated delta rule's state in the registers of a wave, of 32 lanes or 64: some columns of V and all of K.
// A lane holds kLaneKeys keys of kLaneColumns columns, in units of 16 bytes as they lie in the pool:
//   states [V, K]: a row of K lies across as many lanes as it has units, so that a lane has few keys
//   states [K, V]: neighbours have a key's row of the slice, 64 bytes or more; a lane's keys are neighbours
// Sums over K are made in the lane and then across the lanes of a column, in an order that nothing changes. Where each
// of them has several columns they part these between them: of what is one number a column (`Columns`) a lane has one.
// Keys and columns that are missing are zeros, which stay zeros.
//
// Units are read and written with one instruction whatever their alignment, and no path is needed that goes by
// elements: under amdhsa vector memory is in its unaligned access mode.
#pragma once

#include <type_traits>

#include "common/device/gated_delta/config.h"
#include "common/device/gated_delta/params.h"
#include "hip/arch/global_memory.h"
#include "hip/arch/lane_exchange.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

template <class T>
using InGlobal = T __attribute__((address_space(1)));
template <class T>
using InConstant = T __attribute__((address_space(4)));

// x[i] = the index at place(i), 0 where there is none. Scalar loads, all of them on their way before the first is
// awaited.
template <int kCount, class F>
FLASHPORT_DEVICE void load_indices(const Block&, int (&x)[kCount], const F& place) {
  const auto* none = (InConstant<const int>*)__builtin_amdgcn_kernarg_segment_ptr();
  bool live[kCount];
  int high[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const ShortIndex at = place(i);
    live[i] = at.low != nullptr;
    const auto* from = live[i] ? (InConstant<const int>*)at.low : none;
    x[i] = *from;
    high[i] = from[at.is_int64];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = live[i] ? with_sign(x[i], high[i]) : 0;
}

// f(an element of the type). Tests that the compiler cannot make one switch of: of its paths, two of which lead to the
// last case, each would have registers of its own for what f writes.
template <class F>
FLASHPORT_DEVICE void with_element_type(DType dtype, const F& f) {
  if (dtype == DType::kFloat32) {
    f(float());
  } else if (recompute_scalar(static_cast<int>(dtype)) == static_cast<int>(DType::kFloat16)) {
    f(Half());
  } else {
    f(BFloat16());
  }
}

FLASHPORT_DEVICE void round_to(float& to, float x) { to = x; }
FLASHPORT_DEVICE void round_to(Half& to, float x) { to = to_half(x); }
FLASHPORT_DEVICE void round_to(BFloat16& to, float x) { to = to_bfloat16(x); }

// A run of neighbours as they lie in memory, `offset` elements behind an address that all lanes have in common.
template <class T, int kCount>
struct Run {
  static constexpr int kPieceBytes = kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16;
  static constexpr int kPieces = kCount * sizeof(T) / kPieceBytes;
  using Words = unsigned __attribute__((ext_vector_type(kPieceBytes / 4)));
  using WordsAnywhere = Words __attribute__((aligned(alignof(T))));

  Words words[kPieces];

  FLASHPORT_DEVICE void load(const T* from, int offset) {
    const auto* at = (InGlobal<const char>*)from + static_cast<unsigned>(offset) * unsigned{sizeof(T)};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) words[i] = *(InGlobal<const WordsAnywhere>*)(at + i * kPieceBytes);
  }
  FLASHPORT_DEVICE void store(T* to, int offset) const {
    auto* at = (InGlobal<char>*)to + static_cast<unsigned>(offset) * unsigned{sizeof(T)};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) *(InGlobal<WordsAnywhere>*)(at + i * kPieceBytes) = words[i];
  }
  // f(i, element i)
  template <class F>
  FLASHPORT_DEVICE void widen(const F& f) const {
    T elements[kCount];
    __builtin_memcpy(elements, words, sizeof elements);
#pragma unroll
    for (int i = 0; i < kCount; ++i) f(i, to_float(elements[i]));
  }
  template <class F>
  FLASHPORT_DEVICE void round(const F& x) {
    T elements[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) round_to(elements[i], x(i));
    __builtin_memcpy(words, elements, sizeof elements);
  }
};

template <GatedDeltaConfig kCfg>
struct StateTileMemory {};

template <GatedDeltaConfig kCfg>
class StateTile {
  static constexpr bool kKeyMajor = kCfg.shape.key_major != 0;
  static constexpr bool kPacked = is_packed(kCfg.shape);
  static constexpr int kAllKeys = kCfg.shape.head_dim_k;
  static constexpr int kUnit = kPacked ? 8 : 4;
  static constexpr int kColumns = kCfg.tuning.columns;
  static constexpr int kRowLanes = (kKeyMajor ? kColumns : kAllKeys) / kUnit;
  static constexpr int kNeighbours = kRowLanes < kWaveSize ? kRowLanes : kWaveSize;
  static constexpr int kOthers = kWaveSize / kNeighbours;
  static constexpr int kKeyLanes = kKeyMajor ? kOthers : kNeighbours;
  static constexpr int kColumnLanes = kKeyMajor ? kNeighbours : kOthers;
  static constexpr int kLaneKeys = kAllKeys / kKeyLanes;
  static constexpr int kLaneColumns = kColumns / kColumnLanes;
  static constexpr int kOwnKeys = kLaneKeys / kColumnLanes;
  static constexpr int kUnits = kLaneColumns * kLaneKeys / kUnit;
  static_assert(kLaneKeys % kUnit == 0 && kLaneColumns <= kKeyLanes && kColumnLanes <= kLaneKeys);
  static_assert(kKeyMajor ? kLaneColumns == kUnit : kKeyLanes >= 8);

  static constexpr LaneSteps kNeighbourSteps = steps_of_neighbours(kNeighbours);
  static constexpr LaneSteps kOtherSteps = steps_of_others(kNeighbours);
  using OfColumn = LaneGroup<(kKeyMajor ? kOtherSteps : kNeighbourSteps)>;  // the lanes that share a column
  using OfKey = LaneGroup<(kKeyMajor ? kNeighbourSteps : kOtherSteps)>;

  using Narrow = std::conditional_t<kCfg.shape.state == DType::kFloat16, Half, BFloat16>;  // states of 16 bits
  using State = std::conditional_t<kPacked, Narrow, float>;

  // In the registers that a load fills together: numbers by themselves would be copied whenever paths meet.
  using Quad = float __attribute__((ext_vector_type(4)));
  static constexpr int kQuads = kUnit / 4;
  struct Unit {
    Quad quads[kQuads];

    FLASHPORT_DEVICE float at(int i) const { return quads[i / 4][i % 4]; }
    FLASHPORT_DEVICE void set(int i, float x) { quads[i / 4][i % 4] = x; }
    template <class T>
    FLASHPORT_DEVICE void set(const Run<T, kUnit>& run) {
      run.widen([&](int i, float x) { set(i, x); });
    }
  };

 public:
  // Whether the last token's states are stored before its outputs.
  static constexpr bool kPoolFirst = false;

  struct Keys {
    float x[kLaneKeys];
  };
  using Columns = float;
  template <class T>
  struct Shares {
    T x[kOwnKeys];
  };

  FLASHPORT_DEVICE StateTile(const GatedDeltaUpdateParams& p, const Block& block, StateTileMemory<kCfg>&, int column)
      : keys_(p.head_dim_k), columns_(p.head_dim_v), column_(column), block_(block) {}

  FLASHPORT_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
      for (int j = 0; j < kQuads; ++j) state_[i].quads[j] = Quad{};
    }
  }
  // `at`: the element that the head's state begins with.
  FLASHPORT_DEVICE void load(const void* data, DType dtype, std::int64_t at) {
    with_states(data, dtype, at, [&](auto* from) FLASHPORT_INLINE {
      for_each_unit([&](int unit, int first, int offset, bool live) FLASHPORT_INLINE {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
        Run<T, kUnit> run = {};
        if (live) run.load(scalar_address(from + first), offset);
        state_[unit].set(run);
      });
    });
  }
  // The same from the pool, but settle() waits for it, and for clear() has nothing to do.
  FLASHPORT_DEVICE void fetch(const void* data, std::int64_t at) {
    const State* from = static_cast<const State*>(data) + block_.uniform(at);
    for_each_unit([&](int unit, int first, int offset, bool live) FLASHPORT_INLINE {
      Run<State, kUnit> run = {};
      if (live) run.load(scalar_address(from + first), offset);
      __builtin_memcpy(&state_[unit], &run, sizeof run);
    });
  }
  FLASHPORT_DEVICE void settle() {
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        Run<State, kUnit> run;
        __builtin_memcpy(&run, &state_[i], sizeof run);
        state_[i].set(run);
      }
    }
  }
  FLASHPORT_DEVICE void store(void* data, DType dtype, std::int64_t at) const {
    with_states(data, dtype, at, [&](auto* to) FLASHPORT_INLINE {
      for_each_unit([&](int unit, int first, int offset, bool live) FLASHPORT_INLINE {
        Run<std::remove_pointer_t<decltype(to)>, kUnit> run;
        run.round([&](int i) { return state_[unit].at(i); });
        if (live) run.store(scalar_address(to + first), offset);
      });
    });
  }

  // k, q and v of one type, from the elements that they begin with; v's first is that of the slice.
  FLASHPORT_DEVICE void load_inputs(const GatedDeltaUpdateParams& p, std::int64_t at_k, std::int64_t at_q,
                                    std::int64_t at_v, Keys& k, Keys& q, Columns& v) const {
    with_element_type(p.q.dtype, [&](auto type) FLASHPORT_INLINE {
      using T = decltype(type);
      const Place at = place();
      const int own = column_of(at, OfColumn::template index<kLaneColumns>(at.lane));
      const auto* from_v = (InGlobal<const T>*)p.v.data + block_.uniform(at_v);
      RawKeys<T> raw_k, raw_q;
      const T raw_v = from_v[minimum(own, columns_ - 1 - column_)];
      raw_k.load(static_cast<const T*>(p.k.data) + block_.uniform(at_k), keys_, at);
      raw_q.load(static_cast<const T*>(p.q.data) + block_.uniform(at_q), keys_, at);
      raw_k.widen(k, keys_, at);
      raw_q.widen(q, keys_, at);
      v = column_ + own < columns_ ? to_float(raw_v) : 0.0f;
    });
  }
  // Shares: what f(key) says of a part of the keys, of which each of the lanes that share keys has another.
  template <class T, class F>
  FLASHPORT_DEVICE void load_shares(Shares<T>& shares, const F& f) const {
    const Place at = place();
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) shares.x[i] = f(minimum(own_key(at, i), keys_ - 1));
  }
  // f(share of a key)
  template <class T, class F>
  FLASHPORT_DEVICE void set_keys(Keys& keys, const Shares<T>& shares, const F& f) const {
    const Place at = place();
    float own[kOwnKeys];
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) own[i] = own_key(at, i) < keys_ ? f(shares.x[i]) : 0.0f;
    OfKey::gather(own, keys.x, at.lane);
  }
  // f(column of the head); of a column that is missing that of the last one.
  template <class F>
  FLASHPORT_DEVICE Columns make_columns(const F& f) const {
    const Place at = place();
    return f(minimum(column_ + column_of(at, OfColumn::template index<kLaneColumns>(at.lane)), columns_ - 1));
  }
  FLASHPORT_DEVICE void scale_keys(Keys& keys, float factor) const {
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) keys.x[i] = mul_rn(keys.x[i], factor);
  }
  FLASHPORT_DEVICE float dot(const Keys& a, const Keys& b) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) sum = fma_rn(a.x[i], b.x[i], sum);
    return OfColumn::sum(sum);
  }
  FLASHPORT_DEVICE void store_columns(void* data, DType dtype, std::int64_t first, Columns own) const {
    const Place at = place();
    const int column = column_of(at, OfColumn::template index<kLaneColumns>(at.lane));
    const bool stores = OfColumn::template is_first<kLaneColumns>(at.lane) && column_ + column < columns_;
    with_element_type(dtype, [&](auto type) FLASHPORT_INLINE {
      using T = decltype(type);
      T rounded;
      round_to(rounded, own);
      if (stores) ((InGlobal<T>*)data + block_.uniform(first))[column] = rounded;
    });
  }
  FLASHPORT_DEVICE static Columns multiply_add(float factor, Columns x, Columns sum) { return fma_rn(factor, x, sum); }

  // read = S^T (decay k), carried = S^T (decay q)
  FLASHPORT_DEVICE void project(float decay, const Keys& k, const Keys& q, Columns& read, Columns& carried) const {
    read = mul_rn(decay, project([&](int j) { return k.x[j]; }));
    carried = mul_rn(decay, project([&](int j) { return q.x[j]; }));
  }
  FLASHPORT_DEVICE void project(const Keys& decay, const Keys& k, const Keys& q, Columns& read,
                                Columns& carried) const {
    read = project([&](int j) { return mul_rn(decay.x[j], k.x[j]); });
    carried = project([&](int j) { return mul_rn(decay.x[j], q.x[j]); });
  }
  // Each column of S by its factor.
  FLASHPORT_DEVICE void scale_columns(Columns own) {
    float factors[kLaneColumns];
    gather_columns(own, factors);
    replace_each([&](int i, int, float x) FLASHPORT_INLINE { return mul_rn(factors[i], x); });
  }
  // S = decay S + k u^T
  FLASHPORT_DEVICE void update(float decay, const Keys& k, Columns u) {
    update([&](int) { return decay; }, k, u);
  }
  FLASHPORT_DEVICE void update(const Keys& decay, const Keys& k, Columns u) {
    update([&](int j) { return decay.x[j]; }, k, u);
  }

 private:
  // A lane's number among those of a column, and among those of a key. Worked out in each verb anew: what follows from
  // it would take registers all along.
  struct Place {
    int lane, key_lane, column_lane;
  };
  FLASHPORT_DEVICE Place place() const {
    const int lane = recompute(block_.lane());
    const int number = number_among_neighbours<kNeighbours>(lane), other = lane / kNeighbours;
    return {lane, kKeyMajor ? other : number, kKeyMajor ? number : other};
  }

  // Of a lane's keys and columns, the place in the tile.
  FLASHPORT_DEVICE static int key_of(Place at, int j) {
    return kKeyMajor ? at.key_lane * kLaneKeys + j : j / kUnit * kUnit * kKeyLanes + at.key_lane * kUnit + j % kUnit;
  }
  FLASHPORT_DEVICE static int column_of(Place at, int i) {
    return kKeyMajor ? at.column_lane * kUnit + i : i * kColumnLanes + at.column_lane;
  }

  FLASHPORT_DEVICE static int own_key(Place at, int i) {
    return key_of(at, OfKey::template index<kColumnLanes>(at.lane) * kOwnKeys + i);
  }

  // A lane's part of a row of keys; of those that do not exist the row's first are read in their place.
  template <class T>
  struct RawKeys {
    static constexpr int kRuns = kLaneKeys / kUnit;
    Run<T, kUnit> runs[kRuns];

    FLASHPORT_DEVICE void load(const T* from, int keys, Place at) {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        const int key = key_of(at, i * kUnit);
        runs[i].load(from, key < keys ? key : 0);
      }
    }
    FLASHPORT_DEVICE void widen(Keys& to, int keys, Place at) const {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        const bool live = key_of(at, i * kUnit) < keys;
        runs[i].widen([&](int j, float x) { to.x[i * kUnit + j] = live ? x : 0.0f; });
      }
    }
  };

  // f(the head's states)
  template <class Data, class F>
  FLASHPORT_DEVICE void with_states(Data* data, DType dtype, std::int64_t at, const F& f) const {
    const auto first = block_.uniform(at);
    if (dtype == DType::kFloat32) {
      f(static_cast<std::conditional_t<std::is_const_v<Data>, const float, float>*>(data) + first);
    } else {
      f(static_cast<std::conditional_t<std::is_const_v<Data>, const Narrow, Narrow>*>(data) + first);
    }
  }
  // Whether nothing of the slice is missing.
  FLASHPORT_DEVICE bool is_whole() const { return keys_ == kAllKeys && column_ + kColumns <= columns_; }
  // f(number of the unit; where it lies in the head's states, in common and this lane's part of that; if it exists)
  template <class F>
  FLASHPORT_DEVICE void for_each_unit(const F& f) const {
    const Place at = place();
    // Of a whole slice no lane is masked. Else eight neighbouring keys have one mask: K is a multiple of 8.
    if (is_whole()) {
      for_each_unit(at, [](int, int) { return true; }, f);
    } else {
      const auto live = [&](int i, int j) {
        return column_ + column_of(at, i) < columns_ && key_of(at, kKeyMajor ? j / 8 * 8 : j) < keys_;
      };
      for_each_unit(at, live, f);
    }
  }
  template <class Live, class F>
  FLASHPORT_DEVICE void for_each_unit(Place at, const Live& live, const F& f) const {
    if constexpr (kKeyMajor) {
      const int row = recompute_scalar(columns_);  // or the places of all rows would be kept from token to token
      const int offset = at.key_lane * kLaneKeys * row + at.column_lane * kUnit;
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) f(unit_of(0, j), column_ + j * row, offset, live(0, j));
    } else {
      const int row = recompute_scalar(keys_);
      const int offset = at.column_lane * row + at.key_lane * kUnit;
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
#pragma unroll
        for (int j = 0; j < kLaneKeys; j += kUnit) {
          f(unit_of(i, j), (column_ + i * kColumnLanes) * row + j * kKeyLanes, offset, live(i, j));
        }
      }
    }
  }
  // Where a lane has its column i at its key j.
  FLASHPORT_DEVICE static constexpr int unit_of(int i, int j) {
    return kKeyMajor ? j : i * (kLaneKeys / kUnit) + j / kUnit;
  }
  FLASHPORT_DEVICE static constexpr int place_in_unit(int i, int j) { return kKeyMajor ? i : j % kUnit; }

  // The numbers of all of a lane's columns, of which it owns one.
  FLASHPORT_DEVICE void gather_columns(Columns own, float (&all)[kLaneColumns]) const {
    if constexpr (!kKeyMajor && kKeyLanes >= 16) {
      OfColumn::gather_in_16(own, all);
    } else {
      OfColumn::gather({own}, all, place().lane);
    }
  }
  // x = f(column, key, x) for a lane's elements.
  template <class F>
  FLASHPORT_DEVICE void replace_each(const F& f) {
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        Unit& unit = state_[unit_of(i, j)];
        const int place = place_in_unit(i, j);
        unit.set(place, f(i, j, unit.at(place)));
      }
    }
  }
  template <class K>
  FLASHPORT_DEVICE Columns project(const K& k) const {
    float sums[kLaneColumns] = {};
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j) {
      const float at_k = k(j);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        sums[i] = fma_rn(state_[unit_of(i, j)].at(place_in_unit(i, j)), at_k, sums[i]);
      }
    }
    return OfColumn::sum_each(sums, place().lane);
  }
  template <class Decay>
  FLASHPORT_DEVICE void update(const Decay& decay, const Keys& k, Columns own) {
    float u[kLaneColumns];
    gather_columns(own, u);
    replace_each([&](int i, int j, float x) FLASHPORT_INLINE { return fma_rn(k.x[j], u[i], mul_rn(decay(j), x)); });
  }

  Unit state_[kUnits];  // between fetch() and settle() the bits of a packed unit in its first half
  int keys_, columns_, column_;
  const Block& block_;
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
