// A slice of a gated delta rule's state in the registers of a wave, of 32 lanes or 64: some columns of V and all of K.
// A lane holds kLaneKeys keys of kLaneColumns columns, in vectors of 16 bytes as the pool has them:
//   states [V, K]: a row of K is spread over as many lanes as it has vectors, so that a lane has few keys
//   states [K, V]: neighbouring lanes have a key's row of the slice, 64 bytes or more; a lane's keys are neighbours
// Sums over K are made in the lane and then across the lanes of a column, in a fixed order. Where these lanes have
// several columns each, they divide the columns among them, so that a lane has one number of `Columns`. Keys and
// columns that do not exist are zeros, and stay zeros.
//
// One instruction loads or stores a vector whatever its alignment, and no path by elements is needed: amdhsa sets
// vector memory to its unaligned access mode.
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

// x[i] = the index at entry(i), 0 where there is none. The loads are scalar, and all are in flight before the wait for
// the first.
template <int kCount, class F>
FLASHPORT_DEVICE void load_indices(const Block&, int (&x)[kCount], const F& entry) {
  const auto* none = (InConstant<const int>*)__builtin_amdgcn_kernarg_segment_ptr();
  bool live[kCount];
  int high[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const ShortIndex at = entry(i);
    live[i] = at.low != nullptr;
    const auto* from = live[i] ? (InConstant<const int>*)at.low : none;
    x[i] = *from;
    high[i] = from[at.is_int64];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = live[i] ? with_sign(x[i], high[i]) : 0;
}

// f(a value of the element type). The compiler cannot make one switch of these tests: each path of a switch would have
// registers of its own for what f writes, and two paths would lead to the last case.
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

// A run of contiguous elements as in memory, `offset` elements after an address that all lanes have in common.
template <class T, int kCount>
struct Run {
  static constexpr int kVectorBytes = kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16;
  static constexpr int kVectors = kCount * sizeof(T) / kVectorBytes;
  using Words = unsigned __attribute__((ext_vector_type(kVectorBytes / 4)));
  using WordsAnywhere = Words __attribute__((aligned(alignof(T))));

  Words words[kVectors];

  FLASHPORT_DEVICE void load(const T* from, int offset) {
    const auto* at = (InGlobal<const char>*)from + static_cast<unsigned>(offset) * unsigned{sizeof(T)};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) words[i] = *(InGlobal<const WordsAnywhere>*)(at + i * kVectorBytes);
  }
  FLASHPORT_DEVICE void store(T* to, int offset) const {
    auto* at = (InGlobal<char>*)to + static_cast<unsigned>(offset) * unsigned{sizeof(T)};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) *(InGlobal<WordsAnywhere>*)(at + i * kVectorBytes) = words[i];
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
  static constexpr int kVector = kPacked ? 8 : 4;
  static constexpr int kColumns = kCfg.tuning.columns;
  static constexpr int kRowLanes = (kKeyMajor ? kColumns : kAllKeys) / kVector;
  static constexpr int kNeighbours = kRowLanes < kWaveSize ? kRowLanes : kWaveSize;
  static constexpr int kOthers = kWaveSize / kNeighbours;
  static constexpr int kKeyLanes = kKeyMajor ? kOthers : kNeighbours;
  static constexpr int kColumnLanes = kKeyMajor ? kNeighbours : kOthers;
  static constexpr int kLaneKeys = kAllKeys / kKeyLanes;
  static constexpr int kLaneColumns = kColumns / kColumnLanes;
  static constexpr int kOwnKeys = kLaneKeys / kColumnLanes;
  static constexpr int kVectors = kLaneColumns * kLaneKeys / kVector;
  static_assert(kLaneKeys % kVector == 0 && kLaneColumns <= kKeyLanes && kColumnLanes <= kLaneKeys);
  static_assert(kKeyMajor ? kLaneColumns == kVector : kKeyLanes >= 8);

  static constexpr LaneSteps kNeighbourSteps = steps_of_neighbours(kNeighbours);
  static constexpr LaneSteps kOtherSteps = steps_of_others(kNeighbours);
  using ColumnLanes = SubWave<(kKeyMajor ? kOtherSteps : kNeighbourSteps)>;  // lanes that share a column
  using KeyLanes = SubWave<(kKeyMajor ? kNeighbourSteps : kOtherSteps)>;

  using Narrow = std::conditional_t<kCfg.shape.state == DType::kFloat16, Half, BFloat16>;  // states of 16 bits
  using State = std::conditional_t<kPacked, Narrow, float>;

  // These registers are what a load fills together: separate numbers would be copied wherever paths join.
  using Quad = float __attribute__((ext_vector_type(4)));
  static constexpr int kQuads = kVector / 4;
  struct Vector {
    Quad quads[kQuads];

    FLASHPORT_DEVICE float at(int i) const { return quads[i / 4][i % 4]; }
    FLASHPORT_DEVICE void set(int i, float x) { quads[i / 4][i % 4] = x; }
    template <class T>
    FLASHPORT_DEVICE void set(const Run<T, kVector>& run) {
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
  struct KeyPart {
    T x[kOwnKeys];
  };

  FLASHPORT_DEVICE StateTile(const GatedDeltaUpdateParams& p, const Block& block, StateTileMemory<kCfg>&, int column)
      : keys_(p.head_dim_k), columns_(p.head_dim_v), column_(column), block_(block) {}

  FLASHPORT_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kQuads; ++j) state_[i].quads[j] = Quad{};
    }
  }
  // `at`: the offset of the head's state, in elements.
  FLASHPORT_DEVICE void load(const void* data, DType dtype, std::int64_t at) {
    with_states(data, dtype, at, [&](auto* from) FLASHPORT_INLINE {
      for_each_vector([&](int index, int first, int offset, bool live) FLASHPORT_INLINE {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
        Run<T, kVector> run = {};
        if (live) run.load(scalar_address(from + first), offset);
        state_[index].set(run);
      });
    });
  }
  // The same from the pool, but only settle() waits for the loads and widens. After clear(), settle() does nothing.
  FLASHPORT_DEVICE void fetch(const void* data, std::int64_t at) {
    const State* from = static_cast<const State*>(data) + block_.uniform(at);
    for_each_vector([&](int index, int first, int offset, bool live) FLASHPORT_INLINE {
      Run<State, kVector> run = {};
      if (live) run.load(scalar_address(from + first), offset);
      __builtin_memcpy(&state_[index], &run, sizeof run);
    });
  }
  FLASHPORT_DEVICE void settle() {
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        Run<State, kVector> run;
        __builtin_memcpy(&run, &state_[i], sizeof run);
        state_[i].set(run);
      }
    }
  }
  FLASHPORT_DEVICE void store(void* data, DType dtype, std::int64_t at) const {
    with_states(data, dtype, at, [&](auto* to) FLASHPORT_INLINE {
      for_each_vector([&](int index, int first, int offset, bool live) FLASHPORT_INLINE {
        Run<std::remove_pointer_t<decltype(to)>, kVector> run;
        run.round([&](int i) { return state_[index].at(i); });
        if (live) run.store(scalar_address(to + first), offset);
      });
    });
  }

  // k, q and v, all of one type, from their offsets; at_v is that of the slice's first column.
  FLASHPORT_DEVICE void load_inputs(const GatedDeltaUpdateParams& p, std::int64_t at_k, std::int64_t at_q,
                                    std::int64_t at_v, Keys& k, Keys& q, Columns& v) const {
    with_element_type(p.q.dtype, [&](auto type) FLASHPORT_INLINE {
      using T = decltype(type);
      const LaneCoord at = lane_coord();
      const int own = column_of(at, ColumnLanes::template index<kLaneColumns>(at.lane));
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
  // part = f(key) for some of a lane's keys; the lanes that share keys have different parts of them.
  template <class T, class F>
  FLASHPORT_DEVICE void load_key_part(KeyPart<T>& part, const F& f) const {
    const LaneCoord at = lane_coord();
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) part.x[i] = f(minimum(own_key(at, i), keys_ - 1));
  }
  // keys = f(the key's value in the part of the lane that has it)
  template <class T, class F>
  FLASHPORT_DEVICE void set_keys(Keys& keys, const KeyPart<T>& part, const F& f) const {
    const LaneCoord at = lane_coord();
    float own[kOwnKeys];
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) own[i] = own_key(at, i) < keys_ ? f(part.x[i]) : 0.0f;
    KeyLanes::gather(own, keys.x, at.lane);
  }
  // f(column of the head); for a column that does not exist f(the last one).
  template <class F>
  FLASHPORT_DEVICE Columns make_columns(const F& f) const {
    const LaneCoord at = lane_coord();
    return f(minimum(column_ + column_of(at, ColumnLanes::template index<kLaneColumns>(at.lane)), columns_ - 1));
  }
  FLASHPORT_DEVICE void scale_keys(Keys& keys, float factor) const {
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) keys.x[i] = mul_rn(keys.x[i], factor);
  }
  FLASHPORT_DEVICE float dot(const Keys& a, const Keys& b) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) sum = fma_rn(a.x[i], b.x[i], sum);
    return ColumnLanes::sum(sum);
  }
  FLASHPORT_DEVICE void store_columns(void* data, DType dtype, std::int64_t first, Columns own) const {
    const LaneCoord at = lane_coord();
    const int column = column_of(at, ColumnLanes::template index<kLaneColumns>(at.lane));
    const bool stores = ColumnLanes::template is_first<kLaneColumns>(at.lane) && column_ + column < columns_;
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
  // Multiplies each column of S by its factor.
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
  // A lane's number among the lanes of a column, and among the lanes of a key. Each verb computes it anew: what is
  // derived from it would otherwise stay in registers.
  struct LaneCoord {
    int lane, key_lane, column_lane;
  };
  FLASHPORT_DEVICE LaneCoord lane_coord() const {
    const int lane = recompute(block_.lane());
    const int number = number_among_neighbours<kNeighbours>(lane), other = lane / kNeighbours;
    return {lane, kKeyMajor ? other : number, kKeyMajor ? number : other};
  }

  // The tile's key and column that are a lane's key j and column i.
  FLASHPORT_DEVICE static int key_of(LaneCoord at, int j) {
    return kKeyMajor ? at.key_lane * kLaneKeys + j
                     : j / kVector * kVector * kKeyLanes + at.key_lane * kVector + j % kVector;
  }
  FLASHPORT_DEVICE static int column_of(LaneCoord at, int i) {
    return kKeyMajor ? at.column_lane * kVector + i : i * kColumnLanes + at.column_lane;
  }

  FLASHPORT_DEVICE static int own_key(LaneCoord at, int i) {
    return key_of(at, KeyLanes::template index<kColumnLanes>(at.lane) * kOwnKeys + i);
  }

  // A lane's part of a row of keys. Instead of keys that do not exist it loads the row's first ones.
  template <class T>
  struct RawKeys {
    static constexpr int kRuns = kLaneKeys / kVector;
    Run<T, kVector> runs[kRuns];

    FLASHPORT_DEVICE void load(const T* from, int keys, LaneCoord at) {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        const int key = key_of(at, i * kVector);
        runs[i].load(from, key < keys ? key : 0);
      }
    }
    FLASHPORT_DEVICE void widen(Keys& to, int keys, LaneCoord at) const {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) {
        const bool live = key_of(at, i * kVector) < keys;
        runs[i].widen([&](int j, float x) { to.x[i * kVector + j] = live ? x : 0.0f; });
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
  // Whether all keys and columns of the slice exist.
  FLASHPORT_DEVICE bool is_whole() const { return keys_ == kAllKeys && column_ + kColumns <= columns_; }
  // f(number of the vector; its offset in the head's states as a sum of a part that all lanes have in common and this
  // lane's part; whether it exists)
  template <class F>
  FLASHPORT_DEVICE void for_each_vector(const F& f) const {
    const LaneCoord at = lane_coord();
    // In a whole slice no lane is masked. Else eight neighbouring keys have one mask: K is a multiple of 8.
    if (is_whole()) {
      for_each_vector(at, [](int, int) { return true; }, f);
    } else {
      const auto live = [&](int i, int j) {
        return column_ + column_of(at, i) < columns_ && key_of(at, kKeyMajor ? j / 8 * 8 : j) < keys_;
      };
      for_each_vector(at, live, f);
    }
  }
  template <class Live, class F>
  FLASHPORT_DEVICE void for_each_vector(LaneCoord at, const Live& live, const F& f) const {
    if constexpr (kKeyMajor) {
      const int row = recompute_scalar(columns_);  // else the offsets of all rows would be kept from token to token
      const int offset = at.key_lane * kLaneKeys * row + at.column_lane * kVector;
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) f(vector_of(0, j), column_ + j * row, offset, live(0, j));
    } else {
      const int row = recompute_scalar(keys_);
      const int offset = at.column_lane * row + at.key_lane * kVector;
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
#pragma unroll
        for (int j = 0; j < kLaneKeys; j += kVector) {
          f(vector_of(i, j), (column_ + i * kColumnLanes) * row + j * kKeyLanes, offset, live(i, j));
        }
      }
    }
  }
  // The vector that has a lane's column i at its key j, and the index in it.
  FLASHPORT_DEVICE static constexpr int vector_of(int i, int j) {
    return kKeyMajor ? j : i * (kLaneKeys / kVector) + j / kVector;
  }
  FLASHPORT_DEVICE static constexpr int index_in_vector(int i, int j) { return kKeyMajor ? i : j % kVector; }

  // The values for all of a lane's columns, of which it owns one.
  FLASHPORT_DEVICE void gather_columns(Columns own, float (&all)[kLaneColumns]) const {
    if constexpr (!kKeyMajor && kKeyLanes >= 16) {
      ColumnLanes::gather_in_16(own, all);
    } else {
      ColumnLanes::gather({own}, all, lane_coord().lane);
    }
  }
  // x = f(column, key, x) for a lane's elements.
  template <class F>
  FLASHPORT_DEVICE void replace_each(const F& f) {
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        Vector& vector = state_[vector_of(i, j)];
        const int index = index_in_vector(i, j);
        vector.set(index, f(i, j, vector.at(index)));
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
        sums[i] = fma_rn(state_[vector_of(i, j)].at(index_in_vector(i, j)), at_k, sums[i]);
      }
    }
    return ColumnLanes::sum_each(sums, lane_coord().lane);
  }
  template <class Decay>
  FLASHPORT_DEVICE void update(const Decay& decay, const Keys& k, Columns own) {
    float u[kLaneColumns];
    gather_columns(own, u);
    replace_each([&](int i, int j, float x) FLASHPORT_INLINE { return fma_rn(k.x[j], u[i], mul_rn(decay(j), x)); });
  }

  Vector state_[kVectors];  // between fetch() and settle(): the bits of a packed vector in its first half
  int keys_, columns_, column_;
  const Block& block_;
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
