// A slice of a gated delta rule's state on a CPU: strips of kVecWidth columns of V and all of K, each strip a plain
// array in the order of memory. Keys are padded to whole vectors with zeros, and columns that do not exist are zeros;
// both stay zeros. A slice that the pool has in the same layout, and that is stored there again, is updated in the
// pool.
#pragma once

#include "common/device/gated_delta/config.h"
#include "common/device/gated_delta/params.h"
#include "cpu/arch/lane_sums.h"
#include "cpu/kv/values.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

// x[i] = the index at entry(i), 0 where there is none.
template <int kCount, class F>
FLASHPORT_DEVICE void load_indices(const Block&, int (&x)[kCount], const F& entry) {
  for (int i = 0; i < kCount; ++i) {
    const ShortIndex at = entry(i);
    x[i] = at.low == nullptr ? 0 : with_sign(*at.low, at.low[at.is_int64]);
  }
}

template <GatedDeltaConfig kCfg>
struct StateTileMemory {
  alignas(64) float x[kCfg.shape.head_dim_k * kCfg.tuning.columns];
};

// A number for each column of a slice.
template <int kStrips>
struct StateColumns {
  Vec x[kStrips];

  template <class F>
  FLASHPORT_DEVICE static StateColumns make(const F& f) {
    StateColumns made;
    for (int g = 0; g < kStrips; ++g) made.x[g] = f(g);
    return made;
  }
  friend FLASHPORT_DEVICE StateColumns operator-(const StateColumns& a, const StateColumns& b) {
    return make([&](int g) { return a.x[g] - b.x[g]; });
  }
  friend FLASHPORT_DEVICE StateColumns operator*(float factor, const StateColumns& a) {
    return make([&](int g) { return factor * a.x[g]; });
  }
  friend FLASHPORT_DEVICE StateColumns operator*(const StateColumns& a, const StateColumns& b) {
    return make([&](int g) { return a.x[g] * b.x[g]; });
  }
};

// A strip is [K][kVecWidth] where states are [K, V] in memory, else [kVecWidth][K].
template <GatedDeltaConfig kCfg>
class StateTile {
  static constexpr bool kKeyMajor = kCfg.shape.key_major != 0;
  static constexpr int kMostKeys = kCfg.shape.head_dim_k;
  static constexpr int kStrips = kCfg.tuning.columns / kVecWidth;
  static constexpr bool kInPlace = !kKeyMajor && !is_packed(kCfg.shape);  // the slice may stay in the pool
  static constexpr int kAtOnce = 4;  // columns; so many sums hide the latency of a fused multiply-add

 public:
  // Whether the last token's states are stored before its outputs.
  static constexpr bool kPoolFirst = false;

  struct Keys {
    alignas(64) float x[kMostKeys];
  };
  using Columns = StateColumns<kStrips>;
  // A value for each key.
  template <class T>
  struct KeyPart {
    T x[kMostKeys];
  };

  StateTile(const GatedDeltaUpdateParams& p, const Block&, StateTileMemory<kCfg>& memory, int column)
      : state_(memory.x),
        keys_(p.head_dim_k),
        padded_((p.head_dim_k + kVecWidth - 1) / kVecWidth * kVecWidth),
        columns_(p.head_dim_v),
        column_(column),
        pool_(kInPlace && p.update_state && p.state.dtype == DType::kFloat32 && keys_ == padded_ &&
                      columns_ % kVecWidth == 0 && p.state.data != p.steps.data
                  ? static_cast<float*>(p.state.data)
                  : nullptr) {}

  void clear() const {
    for (int i = 0; i < strips() * padded_ * kVecWidth; i += kVecWidth) store_vec(state_ + i, Vec{});
  }

  // `at`: the offset of the head's state, in elements.
  void load(const void* data, DType dtype, std::int64_t at) {
    if (kInPlace && pool_ != nullptr && data == pool_) {
      state_ = pool_ + at + column_ * keys_;
      return;
    }
    kv::with_loader(dtype, [&](auto row, int bytes) {
      const char* from = static_cast<const char*>(data) + at * bytes;
      for (int g = 0; g < strips(); ++g) {
        float* state = strip(g);
        const int first = column_ + g * kVecWidth;
        if constexpr (kKeyMajor) {
          for (int key = 0; key < keys_; ++key) {
            const Vec x = kv::load_values(row, from + (key * columns_ + first) * bytes, bytes, 0, live(g));
            store_vec(state + key * kVecWidth, x);
          }
          for (int key = keys_; key < padded_; ++key) store_vec(state + key * kVecWidth, Vec{});
        } else {
          for (int column = 0; column < kVecWidth; ++column) {
            for (int key = 0; key < padded_; key += kVecWidth) {
              const char* source = from + (first + column) * keys_ * bytes;
              const Vec x = column < live(g) ? kv::load_values(row, source, bytes, key, keys_ - key) : Vec{};
              store_vec(state + column * padded_ + key, x);
            }
          }
        }
      }
    });
  }

  // The same from the pool; on GPUs settle() waits for it.
  void fetch(const void* data, std::int64_t at) { load(data, kCfg.shape.state, at); }
  void settle() const {}

  void store(void* data, DType dtype, std::int64_t at) const {
    const int bytes = dtype == DType::kFloat32 ? 4 : 2;
    char* to = static_cast<char*>(data) + at * bytes;
    if (kInPlace && to + column_ * keys_ * bytes == reinterpret_cast<const char*>(state_)) return;
    for (int g = 0; g < strips(); ++g) {
      const float* state = strip(g);
      const int first = column_ + g * kVecWidth;
      if constexpr (kKeyMajor) {
        for (int key = 0; key < keys_; ++key) {
          kv::store_values(to + (key * columns_ + first) * bytes, dtype, load_vec(state + key * kVecWidth), live(g));
        }
      } else {
        for (int column = 0; column < minimum(live(g), kVecWidth); ++column) {
          for (int key = 0; key < keys_; key += kVecWidth) {
            const Vec x = load_vec(state + column * padded_ + key);
            kv::store_values(to + ((first + column) * keys_ + key) * bytes, dtype, x, keys_ - key);
          }
        }
      }
    }
  }

  // k, q and v, all of one type, from their offsets; at_v is that of the slice's first column.
  void load_inputs(const GatedDeltaUpdateParams& p, std::int64_t at_k, std::int64_t at_q, std::int64_t at_v, Keys& k,
                   Keys& q, Columns& v) const {
    kv::with_loader(p.q.dtype, [&](auto row, int bytes) {
      const char* from_k = static_cast<const char*>(p.k.data) + at_k * bytes;
      const char* from_q = static_cast<const char*>(p.q.data) + at_q * bytes;
      const char* from_v = static_cast<const char*>(p.v.data) + at_v * bytes;
      for (int key = 0; key < padded_; key += kVecWidth) {
        store_vec(k.x + key, kv::load_values(row, from_k, bytes, key, keys_ - key));
        store_vec(q.x + key, kv::load_values(row, from_q, bytes, key, keys_ - key));
      }
      v = Columns::make([&](int g) { return kv::load_values(row, from_v, bytes, g * kVecWidth, maximum(live(g), 0)); });
    });
  }
  template <class T, class F>
  void load_key_part(KeyPart<T>& part, const F& f) const {
    for (int key = 0; key < keys_; ++key) part.x[key] = f(key);
  }
  template <class T, class F>
  void set_keys(Keys& keys, const KeyPart<T>& part, const F& f) const {
    for (int key = 0; key < padded_; ++key) keys.x[key] = key < keys_ ? f(part.x[key]) : 0.0f;
  }
  // f(column of the head); 0 for a column that does not exist.
  template <class F>
  Columns make_columns(const F& f) const {
    return Columns::make([&](int g) {
      Vec x = {};
      for (int i = 0; i < minimum(live(g), kVecWidth); ++i) x[i] = f(column_ + g * kVecWidth + i);
      return x;
    });
  }
  void scale_keys(Keys& keys, float factor) const {
    for (int key = 0; key < padded_; key += kVecWidth) store_vec(keys.x + key, load_vec(keys.x + key) * factor);
  }
  float dot(const Keys& a, const Keys& b) const {
    Vec sum = {};
    for (int key = 0; key < padded_; key += kVecWidth) sum = fma_rn(load_vec(a.x + key), load_vec(b.x + key), sum);
    return fold_vec(sum, [](Vec x, Vec y) { return x + y; });
  }
  void store_columns(void* data, DType dtype, std::int64_t at, const Columns& columns) const {
    const int bytes = dtype == DType::kFloat32 ? 4 : 2;
    for (int g = 0; g < strips(); ++g) {
      kv::store_values(static_cast<char*>(data) + (at + g * kVecWidth) * bytes, dtype, columns.x[g], live(g));
    }
  }
  static Columns multiply_add(float factor, const Columns& x, const Columns& sum) {
    return Columns::make([&](int g) { return fma_rn(broadcast(factor), x.x[g], sum.x[g]); });
  }

  // read = S^T (decay k), carried = S^T (decay q)
  void project(float decay, const Keys& k, const Keys& q, Columns& read, Columns& carried) const {
    project(k, q, read, carried);
    read = decay * read;
    carried = decay * carried;
  }
  void project(const Keys& decay, const Keys& k, const Keys& q, Columns& read, Columns& carried) const {
    Keys decayed_k, decayed_q;
    for (int key = 0; key < padded_; key += kVecWidth) {
      const Vec d = load_vec(decay.x + key);
      store_vec(decayed_k.x + key, d * load_vec(k.x + key));
      store_vec(decayed_q.x + key, d * load_vec(q.x + key));
    }
    project(decayed_k, decayed_q, read, carried);
  }

  // Multiplies each column of S by its factor.
  void scale_columns(const Columns& factors) const {
    for (int g = 0; g < strips(); ++g) {
      float* state = strip(g);
      for (int row = 0; row < kVecWidth; ++row) {  // a column, or as many elements of all of them
        const Vec factor = kKeyMajor ? factors.x[g] : broadcast(factors.x[g][row]);
        for (int i = row * padded_; i < (row + 1) * padded_; i += kVecWidth) {
          store_vec(state + i, load_vec(state + i) * factor);
        }
      }
    }
  }
  // S = decay S + k u^T
  void update(float decay, const Keys& k, const Columns& u) const {
    update([&](int) { return decay; }, [&](int) { return broadcast(decay); }, k, u);
  }
  void update(const Keys& decay, const Keys& k, const Columns& u) const {
    update([&](int key) { return decay.x[key]; }, [&](int key) { return load_vec(decay.x + key); }, k, u);
  }

 private:
  int strips() const { return minimum(kStrips, (columns_ - column_ + kVecWidth - 1) / kVecWidth); }
  int live(int g) const { return columns_ - column_ - g * kVecWidth; }  // columns from this strip on
  float* strip(int g) const { return state_ + g * padded_ * kVecWidth; }

  void project(const Keys& k, const Keys& q, Columns& read, Columns& carried) const {
    for (int g = 0; g < kStrips; ++g) read.x[g] = carried.x[g] = Vec{};
    for (int g = 0; g < strips(); ++g) {
      if constexpr (kKeyMajor) {
        project_rows(strip(g), k, q, read.x[g], carried.x[g]);
      } else {
        project_columns(strip(g), k, q, read.x[g], carried.x[g]);
      }
    }
  }
  void project_rows(const float* state, const Keys& k, const Keys& q, Vec& read, Vec& carried) const {
    constexpr int kChains = 4;  // independent sums hide the latency of a fused multiply-add
    Vec k_sum[kChains] = {}, q_sum[kChains] = {};
    for (int key = 0; key < padded_; key += kChains) {
#pragma GCC unroll 4
      for (int i = 0; i < kChains; ++i) {
        const Vec x = load_vec(state + (key + i) * kVecWidth);
        k_sum[i] = fma_rn(x, broadcast(k.x[key + i]), k_sum[i]);
        q_sum[i] = fma_rn(x, broadcast(q.x[key + i]), q_sum[i]);
      }
    }
    read = (k_sum[0] + k_sum[1]) + (k_sum[2] + k_sum[3]);
    carried = (q_sum[0] + q_sum[1]) + (q_sum[2] + q_sum[3]);
  }
  void project_columns(const float* state, const Keys& k, const Keys& q, Vec& read, Vec& carried) const {
    Vec k_sum[kVecWidth], q_sum[kVecWidth];
    for (int column = 0; column < kVecWidth; column += kAtOnce) {
      Vec k_part[kAtOnce] = {}, q_part[kAtOnce] = {};
      for (int key = 0; key < padded_; key += kVecWidth) {
        const Vec at_k = load_vec(k.x + key), at_q = load_vec(q.x + key);
#pragma GCC unroll 4
        for (int i = 0; i < kAtOnce; ++i) {
          const Vec x = keep_loaded(load_vec(state + (column + i) * padded_ + key));
          k_part[i] = fma_rn(x, at_k, k_part[i]);
          q_part[i] = fma_rn(x, at_q, q_part[i]);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < kAtOnce; ++i) k_sum[column + i] = k_part[i], q_sum[column + i] = q_part[i];
    }
    read = sum_each(k_sum);
    carried = sum_each(q_sum);
  }

  // decay(key) is the decay of a key, decays(key) the vector of decays from that key on.
  template <class Decay, class Decays>
  void update(const Decay& decay, const Decays& decays, const Keys& k, const Columns& u) const {
    const int keys = padded_, count = strips();  // members would be read again after each store
    for (int g = 0; g < count; ++g) {
      float* state = state_ + g * keys * kVecWidth;
      if constexpr (kKeyMajor) {
        for (int key = 0; key < keys; ++key) {
          const Vec kept = load_vec(state + key * kVecWidth) * decay(key);
          store_vec(state + key * kVecWidth, fma_rn(broadcast(k.x[key]), u.x[g], kept));
        }
      } else {
        for (int column = 0; column < kVecWidth; column += kAtOnce) {
          Vec factors[kAtOnce];
#pragma GCC unroll 4
          for (int i = 0; i < kAtOnce; ++i) factors[i] = broadcast(u.x[g][column + i]);
          for (int key = 0; key < keys; key += kVecWidth) {
            const Vec at_k = load_vec(k.x + key), kept = decays(key);
#pragma GCC unroll 4
            for (int i = 0; i < kAtOnce; ++i) {
              float* at = state + (column + i) * keys + key;
              // The next slice in the pool is most likely this thread's next.
              if constexpr (kInPlace) __builtin_prefetch(at + kStrips * kVecWidth * keys, 1, 2);
              store_vec(at, fma_rn(at_k, factors[i], load_vec(at) * kept));
            }
          }
        }
      }
    }
  }

  float* state_;
  int keys_, padded_, columns_, column_;
  float* pool_;  // null: slices are copied
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
