// A slice of a gated delta rule's state on a CPU: 16 columns of V and all of K, as a plain array in the order of
// memory. Keys are padded to whole vectors and missing columns filled with zeros, which stay zeros.
#pragma once

#include "common/device/gated_delta_params.h"
#include "cpu/target/kv_operand.h"
#include "cpu/target/lane_sums.h"

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kStateColumns = kLanes;
inline constexpr int kMaxStateKeys = 256;

struct StateTileMemory {
  alignas(64) float x[kMaxStateKeys * kStateColumns];
};

// f(KvRow of the element type)
template <class F>
FLASHPORT_DEVICE void with_loader(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat16: f(KvRow<KvFormat::kFp16>(), 2); break;
    case DType::kBFloat16: f(KvRow<KvFormat::kBf16>(), 2); break;
    default: f(KvRow<KvFormat::kFp32>(), 4); break;
  }
}

// `count` values from `first` on, of which no more are read; the others are 0.
template <class Row>
FLASHPORT_DEVICE Vec load_values(Row, const char* row, int bytes, int first, int count) {
  if (count >= kLanes) return Row::load(row, first);
  alignas(64) char copy[4 * kLanes] = {};
  __builtin_memcpy(copy, row + first * bytes, static_cast<std::size_t>(count * bytes));
  return Row::load(copy, 0);
}

// The first `count` lanes, rounded to `dtype`.
FLASHPORT_DEVICE void store_values(char* to, DType dtype, Vec x, int count) {
  const auto* from = reinterpret_cast<const float*>(&x);
  if (dtype == DType::kFloat32) {
    if (count >= kLanes) return store_vec(reinterpret_cast<float*>(to), x);
    __builtin_memcpy(to, from, sizeof(float) * static_cast<std::size_t>(count));
    return;
  }
  alignas(64) std::uint16_t rounded[kLanes];
  if (dtype == DType::kFloat16) {
    for (int i = 0; i < kLanes; ++i) rounded[i] = to_half(from[i]).bits;
  } else {
    for (int i = 0; i < kLanes; ++i) rounded[i] = to_bfloat16(from[i]).bits;
  }
  const int live = count >= kLanes ? kLanes : count;
  __builtin_memcpy(to, rounded, sizeof rounded[0] * static_cast<std::size_t>(live));
}

// kKeyMajor: the state lies as [K, V] in memory and here as [K][16]; else as [V, K] and [16][K].
template <bool kKeyMajor>
class StateTile {
 public:
  struct Keys {
    alignas(64) float x[kMaxStateKeys];
  };
  using Columns = Vec;

  StateTile(const GatedDeltaUpdateParams& p, const Block&, StateTileMemory& memory, int column)
      : state_(memory.x),
        keys_(p.head_dim_k),
        padded_((p.head_dim_k + kLanes - 1) / kLanes * kLanes),
        columns_(p.head_dim_v),
        column_(column),
        live_(minimum(kStateColumns, p.head_dim_v - column)) {}

  void clear() const {
    for (int i = 0; i < padded_ * kStateColumns; i += kLanes) store_vec(state_ + i, Vec{});
  }

  // `at`: the element that the head's state begins with.
  void load(const void* data, DType dtype, std::int64_t at) const {
    with_loader(dtype, [&](auto row, int bytes) {
      const char* from = static_cast<const char*>(data) + at * bytes;
      if constexpr (kKeyMajor) {
        for (int key = 0; key < keys_; ++key) {
          const Vec x = load_values(row, from + (key * columns_ + column_) * bytes, bytes, 0, live_);
          store_vec(state_ + key * kLanes, x);
        }
        for (int key = keys_; key < padded_; ++key) store_vec(state_ + key * kLanes, Vec{});
      } else {
        for (int column = 0; column < kStateColumns; ++column) {
          for (int key = 0; key < padded_; key += kLanes) {
            const char* source = from + (column_ + column) * keys_ * bytes;
            const Vec x = column < live_ ? load_values(row, source, bytes, key, keys_ - key) : Vec{};
            store_vec(state_ + column * padded_ + key, x);
          }
        }
      }
    });
  }

  void store(void* data, DType dtype, std::int64_t at) const {
    const int bytes = dtype == DType::kFloat32 ? 4 : 2;
    char* to = static_cast<char*>(data) + at * bytes;
    if constexpr (kKeyMajor) {
      for (int key = 0; key < keys_; ++key) {
        store_values(to + (key * columns_ + column_) * bytes, dtype, load_vec(state_ + key * kLanes), live_);
      }
    } else {
      for (int column = 0; column < live_; ++column) {
        for (int key = 0; key < keys_; key += kLanes) {
          const Vec x = load_vec(state_ + column * padded_ + key);
          store_values(to + ((column_ + column) * keys_ + key) * bytes, dtype, x, keys_ - key);
        }
      }
    }
  }

  void load_keys(Keys& keys, const void* data, DType dtype, std::int64_t at) const {
    with_loader(dtype, [&](auto row, int bytes) {
      const char* from = static_cast<const char*>(data) + at * bytes;
      for (int key = 0; key < padded_; key += kLanes) {
        store_vec(keys.x + key, load_values(row, from, bytes, key, keys_ - key));
      }
    });
  }
  void fill_keys(Keys& keys, float x) const {
    for (int key = 0; key < padded_; key += kLanes) store_vec(keys.x + key, broadcast(x));
  }
  template <class F>
  void set_keys(Keys& keys, const F& f) const {
    for (int key = 0; key < padded_; ++key) keys.x[key] = key < keys_ ? f(key) : 0.0f;
  }
  void scale_keys(Keys& keys, float factor) const {
    for (int key = 0; key < padded_; key += kLanes) store_vec(keys.x + key, load_vec(keys.x + key) * factor);
  }
  float dot(const Keys& a, const Keys& b) const {
    Vec sum = {};
    for (int key = 0; key < padded_; key += kLanes) sum = fma_rn(load_vec(a.x + key), load_vec(b.x + key), sum);
    return fold_vec(sum, [](Vec x, Vec y) { return x + y; });
  }

  void load_columns(Columns& columns, const void* data, DType dtype, std::int64_t at) const {
    with_loader(dtype, [&](auto row, int bytes) {
      columns = load_values(row, static_cast<const char*>(data) + at * bytes, bytes, 0, live_);
    });
  }
  void store_columns(void* data, DType dtype, std::int64_t at, const Columns& columns) const {
    store_values(static_cast<char*>(data) + at * (dtype == DType::kFloat32 ? 4 : 2), dtype, columns, live_);
  }
  static Columns multiply_add(float factor, const Columns& x, const Columns& sum) {
    return fma_rn(broadcast(factor), x, sum);
  }

  // read = S^T (decay k), carried = S^T (decay q)
  void project(const Keys& decay, const Keys& k, const Keys& q, Columns& read, Columns& carried) const {
    Keys decayed_k, decayed_q;
    for (int key = 0; key < padded_; key += kLanes) {
      const Vec d = load_vec(decay.x + key);
      store_vec(decayed_k.x + key, d * load_vec(k.x + key));
      store_vec(decayed_q.x + key, d * load_vec(q.x + key));
    }
    if constexpr (kKeyMajor) {
      constexpr int kChains = 4;  // independent sums hide the latency of a fused multiply-add
      Vec k_sum[kChains] = {}, q_sum[kChains] = {};
      for (int key = 0; key < padded_; key += kChains) {
#pragma GCC unroll 4
        for (int i = 0; i < kChains; ++i) {
          const Vec x = load_vec(state_ + (key + i) * kLanes);
          k_sum[i] = fma_rn(x, broadcast(decayed_k.x[key + i]), k_sum[i]);
          q_sum[i] = fma_rn(x, broadcast(decayed_q.x[key + i]), q_sum[i]);
        }
      }
      read = (k_sum[0] + k_sum[1]) + (k_sum[2] + k_sum[3]);
      carried = (q_sum[0] + q_sum[1]) + (q_sum[2] + q_sum[3]);
    } else {
      constexpr int kAtOnce = 4;
      Vec k_sum[kStateColumns], q_sum[kStateColumns];
      for (int column = 0; column < kStateColumns; column += kAtOnce) {
        Vec k_part[kAtOnce] = {}, q_part[kAtOnce] = {};
        for (int key = 0; key < padded_; key += kLanes) {
          const Vec at_k = load_vec(decayed_k.x + key), at_q = load_vec(decayed_q.x + key);
#pragma GCC unroll 4
          for (int i = 0; i < kAtOnce; ++i) {
            const Vec x = load_vec(state_ + (column + i) * padded_ + key);
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
  }

  // S = decay S + k u^T
  void update(const Keys& decay, const Keys& k, const Columns& u) const {
    if constexpr (kKeyMajor) {
      for (int key = 0; key < padded_; ++key) {
        const Vec kept = load_vec(state_ + key * kLanes) * decay.x[key];
        store_vec(state_ + key * kLanes, fma_rn(broadcast(k.x[key]), u, kept));
      }
    } else {
      for (int column = 0; column < kStateColumns; ++column) {
        const Vec factor = broadcast(u[column]);
        for (int key = 0; key < padded_; key += kLanes) {
          float* at = state_ + column * padded_ + key;
          store_vec(at, fma_rn(load_vec(k.x + key), factor, load_vec(at) * load_vec(decay.x + key)));
        }
      }
    }
  }

 private:
  float* state_;
  int keys_, padded_, columns_, column_, live_;
};

}  // namespace flashport::FLASHPORT_TARGET
