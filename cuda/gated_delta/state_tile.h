// A slice of a gated delta rule's state in the registers of a block: some columns of V and all of K. A lane holds
// kLaneKeys keys of kLaneColumns columns, in vectors of 16 bytes as the pool has them, and a warp loads whole lines:
//   states [V, K]: one warp has the slice. The lanes that share a column have a vector of its keys each, so that a lane
//                  needs few elements of k and q; where 32 lanes are not enough, a lane has several vectors, 32 apart
//   states [K, V]: the slice is as wide as a line, and each warp has some of its keys; a lane's keys are neighbours
// Sums over K are made in the lane, then across the lanes of a column, then across warps, in a fixed order. The sum
// across lanes also transposes: in every step a lane keeps the columns of one half, and in the end it owns kOwned.
// Keys and columns that do not exist are zeros, and stay zeros.
#pragma once

#include <type_traits>

#include "common/device/core/scalar_access.h"
#include "common/device/gated_delta/config.h"
#include "common/device/gated_delta/params.h"
#include "cuda/gated_delta/runs.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

// x[i] = the index at entry(i), 0 where there is none. Each lane loads one, so that all are in flight together; the
// compiler would wait for each.
template <int kCount, class F>
FLASHPORT_DEVICE void load_indices(const Block& block, int (&x)[kCount], const F& entry) {
  std::uintptr_t mine = 0;
  unsigned wide = 0;  // a bit for each index of 64 bits
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const ShortIndex at = entry(i);
    const auto mask = -static_cast<std::uintptr_t>(block.lane() == i);  // no branch, in which lanes would diverge
    mine |= reinterpret_cast<std::uintptr_t>(at.low) & mask;
    wide |= static_cast<unsigned>(at.is_int64) << i;
  }
  const auto* low = reinterpret_cast<const std::int32_t*>(mine);
  const int first = mine == 0 ? 0 : __ldca(low);
  const int value = with_sign(first, (wide >> block.lane() & 1) != 0 ? __ldca(low + 1) : first);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = __shfl_sync(~0u, value, i);
}

// f(a value of the element type)
template <class F>
FLASHPORT_DEVICE void with_element_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat16: f(Half()); break;
    case DType::kBFloat16: f(BFloat16()); break;
    default: f(float()); break;
  }
}

// A number for each column that a lane owns.
template <int kCount>
struct StateColumns {
  float x[kCount];

  template <class F>
  FLASHPORT_DEVICE static StateColumns make(const F& f) {
    StateColumns made;
#pragma unroll
    for (int i = 0; i < kCount; ++i) made.x[i] = f(i);
    return made;
  }
  friend FLASHPORT_DEVICE StateColumns operator-(const StateColumns& a, const StateColumns& b) {
    return make([&](int i) { return a.x[i] - b.x[i]; });
  }
  friend FLASHPORT_DEVICE StateColumns operator*(float factor, const StateColumns& a) {
    return make([&](int i) { return mul_rn(factor, a.x[i]); });
  }
  friend FLASHPORT_DEVICE StateColumns operator*(const StateColumns& a, const StateColumns& b) {
    return make([&](int i) { return mul_rn(a.x[i], b.x[i]); });
  }
};

// Where the warps that share a slice add up their sums. Two buffers take turns, so that the warps wait for each other
// once a token.
template <GatedDeltaConfig kCfg>
struct StateTileMemory {
  float2 sums[2][kCfg.tuning.waves][kCfg.tuning.columns];
};

template <GatedDeltaConfig kCfg>
class StateTile {
  static constexpr bool kKeyMajor = kCfg.shape.key_major != 0;
  static constexpr int kVector = is_packed(kCfg.shape) ? 8 : 4;
  static constexpr int kMostKeys = kCfg.shape.head_dim_k;
  static constexpr int kColumns = kCfg.tuning.columns;
  static constexpr int kWaves = kCfg.tuning.waves;
  static constexpr int kKeyLanes = kKeyMajor                         ? kWaveSize * kVector / kColumns
                                   : kMostKeys / kVector < kWaveSize ? kMostKeys / kVector
                                                                     : kWaveSize;  // in a warp
  static constexpr int kColumnLanes = kWaveSize / kKeyLanes;
  static constexpr int kLaneKeys = kMostKeys / (kKeyLanes * kWaves);
  static constexpr int kLaneColumns = kColumns / kColumnLanes;
  static constexpr int kOwned = kLaneColumns > kKeyLanes ? kLaneColumns / kKeyLanes : 1;     // columns of a lane's own
  static constexpr int kOwners = kKeyLanes > kLaneColumns ? kKeyLanes / kLaneColumns : 1;    // lanes that own the same
  static constexpr int kPartKeys = kLaneKeys > kColumnLanes ? kLaneKeys / kColumnLanes : 1;  // keys in a lane's KeyPart
  static constexpr int kEven = kKeyMajor ? kMostKeys / kWaveSize : 1;
  static constexpr int kVectors = kLaneColumns * kLaneKeys / kVector;
  static constexpr bool kPacked = is_packed(kCfg.shape);
  using Narrow = std::conditional_t<kCfg.shape.state == DType::kFloat16, Half, BFloat16>;  // states of 16 bits
  static_assert(kKeyLanes * kColumnLanes == kWaveSize && kVectors * kVector == kLaneColumns * kLaneKeys);
  static_assert(kKeyMajor || (kWaves == 1 && kLaneKeys % kVector == 0));

 public:
  // Whether the last token's states are stored before its outputs: they are nearly all that is written, but take longer
  // to have their registers back.
  static constexpr bool kPoolFirst = true;

  struct Keys {
    float x[kLaneKeys];
    float even[kEven];  // for dot(): a warp's lanes have all keys
  };
  using Columns = StateColumns<kOwned>;
  // Values of some of a lane's keys, which it computes for the lanes that share its keys.
  template <class T>
  struct KeyPart {
    T x[kPartKeys];
  };

  FLASHPORT_DEVICE StateTile(const GatedDeltaUpdateParams& p, const Block& block, StateTileMemory<kCfg>& memory,
                             int column)
      : memory_(memory), keys_(p.head_dim_k), columns_(p.head_dim_v), column_(column), thread_(block.thread()) {}

  FLASHPORT_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) state_[i][j] = 0.0f;
    }
  }
  // `at`: the offset of the head's state, in elements.
  FLASHPORT_DEVICE void load(const void* data, DType dtype, std::int64_t at) {
    with_states(data, dtype, at, [&](auto* from, auto access) {
      for_each_vector(access, [&](int index, int offset, bool live) {
        load_run<kVector, access.kAligned>(state_[index], from + offset, live ? kVector : 0);
      });
    });
  }
  // The same from the pool, but only settle() waits for the loads and widens. After clear(), settle() does nothing.
  FLASHPORT_DEVICE void fetch(const void* data, std::int64_t at) {
    if constexpr (kPacked) {
      const auto* from = static_cast<const Narrow*>(data) + at;
      with_access(from, [&](auto access) {
        for_each_vector(access, [&](int index, int offset, bool live) {
          const auto vector = read_vector<kVector, access.kAligned>(from + offset, live);
          __builtin_memcpy(state_[index], &vector, sizeof vector);
        });
      });
    } else {
      load(data, kCfg.shape.state, at);
    }
  }
  FLASHPORT_DEVICE void settle() {
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        Vector<Narrow, kVector> vector;
        __builtin_memcpy(&vector, state_[i], sizeof vector);
#pragma unroll
        for (int j = 0; j < kVector; ++j) state_[i][j] = to_float(vector.x[j]);
      }
    }
  }
  FLASHPORT_DEVICE void store(void* data, DType dtype, std::int64_t at) const {
    with_states(data, dtype, at, [&](auto* to, auto access) {
      for_each_vector(access, [&](int index, int offset, bool live) {
        store_run<kVector, access.kAligned>(to + offset, state_[index], live ? kVector : 0);
      });
    });
  }

  // k, q and v, all of one type, from their offsets; at_v is that of the slice's first column.
  FLASHPORT_DEVICE void load_inputs(const GatedDeltaUpdateParams& p, std::int64_t at_k, std::int64_t at_q,
                                    std::int64_t at_v, Keys& k, Keys& q, Columns& v) const {
    with_element_type(p.q.dtype, [&](auto type) {
      using T = decltype(type);
      const T* from_k = static_cast<const T*>(p.k.data) + at_k;
      const T* from_q = static_cast<const T*>(p.q.data) + at_q;
      const auto load = [&](auto aligned) {  // all in one basic block: a branch would wait for loads in flight
        const LaneCoord at = lane_coord();
        const T* from_v = static_cast<const T*>(p.v.data) + at_v;
        v = Columns::make([&](int i) {
          const int column = column_of(at, first_owned(at) + i);
          return column_ + column < columns_ ? to_float(from_v[column]) : 0.0f;
        });
        load_keys<aligned.value>(k, from_k, at);
        load_keys<aligned.value>(q, from_q, at);
      };
      if (is_aligned(from_k) && is_aligned(from_q)) {
        load(Constant<true>());
      } else {
        load(Constant<false>());
      }
    });
  }
  // part = f(key); for a key that does not exist f(the last key), which saves a branch.
  template <class T, class F>
  FLASHPORT_DEVICE void load_key_part(KeyPart<T>& part, const F& f) const {
    static_assert(kPartKeys * kColumnLanes >= kLaneKeys);
    const LaneCoord at = lane_coord();
#pragma unroll
    for (int i = 0; i < kPartKeys; ++i) part.x[i] = f(minimum(key_of(at, at.column_lane * kPartKeys + i), keys_ - 1));
  }
  // keys = f(the key's value in the part of the lane that has it)
  template <class T, class F>
  FLASHPORT_DEVICE void set_keys(Keys& keys, const KeyPart<T>& part, const F& f) const {
    const LaneCoord at = lane_coord();
    float mine[kPartKeys];
#pragma unroll
    for (int i = 0; i < kPartKeys; ++i) mine[i] = f(part.x[i]);
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      keys.x[i] = __shfl_sync(~0u, mine[i % kPartKeys], lane_of({at.key_lane, i / kPartKeys}));
    }
  }
  // f(column of the head); for a column that does not exist f(the last one), which saves a branch.
  template <class F>
  FLASHPORT_DEVICE Columns make_columns(const F& f) const {
    const LaneCoord at = lane_coord();
    return Columns::make([&](int i) { return f(minimum(column_ + column_of(at, first_owned(at) + i), columns_ - 1)); });
  }
  FLASHPORT_DEVICE void scale_keys(Keys& keys, float factor) const {
#pragma unroll
    for (float& x : keys.x) x = mul_rn(x, factor);
    if constexpr (kKeyMajor) {
#pragma unroll
      for (float& x : keys.even) x = mul_rn(x, factor);
    }
  }
  FLASHPORT_DEVICE float dot(const Keys& a, const Keys& b) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < (kKeyMajor ? kEven : kLaneKeys); ++i) {
      sum = kKeyMajor ? fma_rn(a.even[i], b.even[i], sum) : fma_rn(a.x[i], b.x[i], sum);
    }
#pragma unroll
    for (int distance = (kKeyMajor ? kWaveSize : kKeyLanes) / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    return sum;
  }
  FLASHPORT_DEVICE void store_columns(void* data, DType dtype, std::int64_t first, const Columns& columns) const {
    const LaneCoord at = lane_coord();
    if (at.key_lane >= kKeyLanes || at.key_lane % kOwners != 0) return;
    with_element_type(dtype, [&](auto type) {
      auto* to = static_cast<decltype(type)*>(data) + first;
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        const int column = column_of(at, first_owned(at) + i);
        if (column_ + column < columns_) store_kept(to + column, columns.x[i]);
      }
    });
  }
  FLASHPORT_DEVICE static Columns multiply_add(float factor, const Columns& x, const Columns& sum) {
    return Columns::make([&](int i) { return fma_rn(factor, x.x[i], sum.x[i]); });
  }

  // read = S^T (decay k), carried = S^T (decay q)
  FLASHPORT_DEVICE void project(float decay, const Keys& k, const Keys& q, Columns& read, Columns& carried) {
    project([&](int j) { return k.x[j]; }, [&](int j) { return q.x[j]; }, read, carried);
    read = decay * read;
    carried = decay * carried;
  }
  FLASHPORT_DEVICE void project(const Keys& decay, const Keys& k, const Keys& q, Columns& read, Columns& carried) {
    project([&](int j) { return mul_rn(decay.x[j], k.x[j]); }, [&](int j) { return mul_rn(decay.x[j], q.x[j]); }, read,
            carried);
  }
  // Multiplies each column of S by its factor.
  FLASHPORT_DEVICE void scale_columns(const Columns& factors) {
    const LaneCoord at = lane_coord();
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      const float factor = column_value(factors, i, at);
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) state(i, j) = mul_rn(factor, state(i, j));
    }
  }
  // S = decay S + k u^T
  FLASHPORT_DEVICE void update(float decay, const Keys& k, const Columns& u) {
    update([&](int) { return decay; }, k, u);
  }
  FLASHPORT_DEVICE void update(const Keys& decay, const Keys& k, const Columns& u) {
    update([&](int j) { return decay.x[j]; }, k, u);
  }

 private:
  // A lane's number among the lanes of a column (in all warps) and among the lanes of a key. Each verb computes it
  // anew: what is derived from it would otherwise stay in registers.
  struct LaneCoord {
    int key_lane, column_lane;
  };
  FLASHPORT_DEVICE LaneCoord lane_coord() const {
    const int thread = recompute(thread_);
    return kKeyMajor ? LaneCoord{thread / kColumnLanes, thread % kColumnLanes}
                     : LaneCoord{thread % kKeyLanes, thread / kKeyLanes};
  }
  FLASHPORT_DEVICE static int lane_of(LaneCoord at) {
    return kKeyMajor ? at.key_lane % kKeyLanes * kColumnLanes + at.column_lane
                     : at.column_lane * kKeyLanes + at.key_lane;
  }
  // The number of the first of a lane's columns that it owns.
  FLASHPORT_DEVICE static int first_owned(LaneCoord at) { return at.key_lane % kKeyLanes / kOwners * kOwned; }
  // The value for a lane's column i, which another lane may own.
  FLASHPORT_DEVICE static float column_value(const Columns& columns, int i, LaneCoord at) {
    return __shfl_sync(~0u, columns.x[i % kOwned], lane_of({i / kOwned * kOwners, at.column_lane}));
  }

  template <bool kValue>
  struct Constant {
    static constexpr bool value = kValue;
  };

  template <class From, class T>
  using CopyConst = std::conditional_t<std::is_const_v<From>, const T, T>;

  FLASHPORT_DEVICE static bool is_aligned(const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
  }
  // Whether all vectors are aligned, and whether all of the tile exists.
  template <bool kIsAligned, bool kIsWhole>
  struct Access {
    static constexpr bool kAligned = kIsAligned, kWhole = kIsWhole;
  };
  // f(Access); K and V are multiples of 8, so all vectors are aligned as the first one is.
  template <class F>
  FLASHPORT_DEVICE void with_access(const void* first, const F& f) const {
    if (!is_aligned(first)) {
      f(Access<false, false>());
    } else if (keys_ == kMostKeys && column_ + kColumns <= columns_) {
      f(Access<true, true>());
    } else {
      f(Access<true, false>());
    }
  }
  // f(the head's states, Access)
  template <class Data, class F>
  FLASHPORT_DEVICE void with_states(Data* data, DType dtype, std::int64_t at, const F& f) const {
    const auto with = [&](auto* states) { with_access(states + at, [&](auto access) { f(states + at, access); }); };
    if (dtype == DType::kFloat32) {
      with(static_cast<CopyConst<Data, float>*>(data));
    } else {
      with(static_cast<CopyConst<Data, Narrow>*>(data));
    }
  }
  // f(number of the vector, its offset in the head's states, whether it exists)
  template <class ItsAccess, class F>
  FLASHPORT_DEVICE void for_each_vector(ItsAccess, const F& f) const {
    const LaneCoord at = lane_coord();
    const int keys = ItsAccess::kWhole ? kMostKeys : keys_;
    if constexpr (kKeyMajor) {
      const int first = at.key_lane * kLaneKeys * columns_ + column_ + at.column_lane * kVector;
      const bool live = column_ + at.column_lane * kVector < columns_;
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) {
        f(vector_of(0, j), first + j * columns_, ItsAccess::kWhole || (live && at.key_lane * kLaneKeys + j < keys));
      }
    } else {
      const int first = (column_ + at.column_lane) * keys + at.key_lane * kVector;
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        const bool live = column_ + column_of(at, i) < columns_;
#pragma unroll
        for (int j = 0; j < kLaneKeys; j += kVector) {
          f(vector_of(i, j), first + i * kColumnLanes * keys + j * kKeyLanes,
            ItsAccess::kWhole || (live && key_of(at, j) < keys));
        }
      }
    }
  }
  template <bool kAligned, class T>
  FLASHPORT_DEVICE void load_keys(Keys& keys, const T* from, LaneCoord at) const {
    constexpr int kRun = kKeyMajor ? kLaneKeys : kVector;
#pragma unroll
    for (int j = 0; j < kLaneKeys; j += kRun) {
      const int key = key_of(at, j);
      load_run<kRun, kAligned>(&keys.x[j], from + key, keys_ - key);
    }
    if constexpr (kKeyMajor) {
      const int key = lane_of(at) * kEven;
      load_run<kEven, kAligned>(keys.even, from + key, keys_ - key);
    }
  }

  // The tile's key and column that are a lane's key j and column i.
  FLASHPORT_DEVICE static int key_of(LaneCoord at, int j) {
    return kKeyMajor ? at.key_lane * kLaneKeys + j
                     : j / kVector * kVector * kKeyLanes + at.key_lane * kVector + j % kVector;
  }
  FLASHPORT_DEVICE static int column_of(LaneCoord at, int i) {
    return kKeyMajor ? at.column_lane * kVector + i : i * kColumnLanes + at.column_lane;
  }

  // The number of the vector that has a lane's column i at its key j.
  FLASHPORT_DEVICE static constexpr int vector_of(int i, int j) {
    return kKeyMajor ? j : i * (kLaneKeys / kVector) + j / kVector;
  }
  FLASHPORT_DEVICE float& state(int i, int j) { return state_[vector_of(i, j)][kKeyMajor ? i : j % kVector]; }
  FLASHPORT_DEVICE float state(int i, int j) const { return state_[vector_of(i, j)][kKeyMajor ? i : j % kVector]; }

  // The sums over a warp's keys, for the columns that the lane owns. Which lane owns a column changes no bits: either
  // of two lanes may add their two numbers.
  FLASHPORT_DEVICE static Columns sum_over_lanes(float (&x)[kLaneColumns], LaneCoord at) {
    constexpr int kNext = kKeyMajor ? kColumnLanes : 1;  // lane of the same columns
    int count = kLaneColumns;
#pragma unroll
    for (int distance = kKeyLanes / 2; distance > 0; distance /= 2) {
      if (count > 1) {
        count /= 2;
        const bool upper = (at.key_lane & distance) != 0;
#pragma unroll
        for (int i = 0; i < count; ++i) {
          const float kept = upper ? x[i + count] : x[i], sent = upper ? x[i] : x[i + count];
          x[i] = kept + __shfl_xor_sync(~0u, sent, distance * kNext);
        }
      } else {
        x[0] += __shfl_xor_sync(~0u, x[0], distance * kNext);
      }
    }
    return Columns::make([&](int i) { return x[i]; });
  }
  FLASHPORT_DEVICE void sum_over_waves(Columns& read, Columns& carried, LaneCoord at) {
    auto& sums = memory_.sums[turn_];
    turn_ ^= 1;
    if (at.key_lane % kOwners == 0) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        sums[at.key_lane / kKeyLanes][column_of(at, first_owned(at) + i)] = make_float2(read.x[i], carried.x[i]);
      }
    }
    __syncthreads();
    read = carried = Columns::make([](int) { return 0.0f; });
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        const float2 sum = sums[wave][column_of(at, first_owned(at) + i)];
        read.x[i] += sum.x;
        carried.x[i] += sum.y;
      }
    }
  }

  template <class K, class Q>
  FLASHPORT_DEVICE void project(const K& k, const Q& q, Columns& read, Columns& carried) {
    float k_sum[kLaneColumns] = {}, q_sum[kLaneColumns] = {};
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j) {
      const float at_k = k(j), at_q = q(j);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        k_sum[i] = fma_rn(state(i, j), at_k, k_sum[i]);
        q_sum[i] = fma_rn(state(i, j), at_q, q_sum[i]);
      }
    }
    const LaneCoord at = lane_coord();
    read = sum_over_lanes(k_sum, at);
    carried = sum_over_lanes(q_sum, at);
    if constexpr (kWaves > 1) sum_over_waves(read, carried, at);
  }
  template <class Decay>
  FLASHPORT_DEVICE void update(const Decay& decay, const Keys& k, const Columns& u) {
    const LaneCoord at = lane_coord();
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      const float at_u = column_value(u, i, at);
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) state(i, j) = fma_rn(k.x[j], at_u, mul_rn(decay(j), state(i, j)));
    }
  }

  float state_[kVectors][kVector];  // between fetch() and settle(): the bits of a packed vector in its first half
  StateTileMemory<kCfg>& memory_;
  int keys_, columns_, column_, thread_, turn_ = 0;
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
