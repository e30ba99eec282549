// Products of attention in fp32, whatever type the tensors have, from register tiles of kProductRows x kProductVecs
// vectors of sums. Each sum runs over the depth in index order, whatever register tile it is in.
//
// The right side is packed in panels of kPanel columns: panel [depth, kPanel], one after the other.
#pragma once

#include "common/device/attention/config.h"
#include "cpu/arch/transpose.h"
#include "cpu/attention/key_rows.h"
#include "cpu/kv/values.h"

namespace flashport::FLASHPORT_TARGET::attention {

inline constexpr int kPanel = 64;

// sums [kRows, kVecs * kVecWidth] = left [kRows, depth] right [depth, kVecs * kVecWidth], or are added to what they
// were
template <int kRows, int kVecs, bool kAdds>
FLASHPORT_DEVICE void multiply_block(float* sums, int sum_pitch, const float* left, int left_pitch, const float* right,
                                     int depth) {
  Vec acc[kRows][kVecs] = {};
  if constexpr (kAdds) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) acc[r][c] = load_vec(sums + r * sum_pitch + c * kVecWidth);
    }
  }
  for (int k = 0; k < depth; ++k) {
    Vec x[kVecs];
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) x[c] = keep_loaded(load_vec(right + k * kPanel + c * kVecWidth));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = keep_loaded(broadcast(left[r * left_pitch + k]));
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) acc[r][c] = fma_rn(factor, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) store_vec(sums + r * sum_pitch + c * kVecWidth, acc[r][c]);
  }
}

// sums [rows, vecs * kVecWidth] = left [rows, depth] right [depth, vecs * kVecWidth], or are added to what they were.
// All columns are of one panel.
template <bool kAdds>
[[gnu::noinline]] inline void multiply_panel(float* sums, int sum_pitch, const float* left, int left_pitch, int rows,
                                             const float* right, int vecs, int depth) {
  const auto strip = [&]<int kRows>(int row) {
    float* at = sums + row * sum_pitch;
    const float* from = left + row * left_pitch;
    int vec = 0;
    for (; vec + kProductVecs <= vecs; vec += kProductVecs) {
      multiply_block<kRows, kProductVecs, kAdds>(at + vec * kVecWidth, sum_pitch, from, left_pitch,
                                                 right + vec * kVecWidth, depth);
    }
    for (; vec < vecs; ++vec) {
      multiply_block<kRows, 1, kAdds>(at + vec * kVecWidth, sum_pitch, from, left_pitch, right + vec * kVecWidth,
                                      depth);
    }
  };
  int row = 0;
  for (; row + kProductRows <= rows; row += kProductRows) strip.template operator()<kProductRows>(row);
  for (; row < rows; ++row) strip.template operator()<1>(row);
}

template <AttentionConfig kCfg>
class Products {
  static constexpr int kRows = kCfg.tuning.rows, kKeys = kCfg.tuning.keys;

 public:
  static constexpr int kGroupRows = 8 * kProductRows;
  static constexpr int kKeyStep = 32;
  static_assert(kKeys % kPanel == 0);

  struct Memory {
    alignas(64) float queries[kRows * (kCfg.shape.head_dim_qk + kVecWidth)];
    alignas(64) float keys[kKeys * kCfg.shape.head_dim_qk];
    alignas(64) float values[kKeys * ((kCfg.shape.head_dim_v + kPanel - 1) / kPanel * kPanel)];
  };

  static int padded(int dims) { return (dims + kVecWidth - 1) / kVecWidth * kVecWidth; }

  Products(const AttentionParams& p, Memory& memory)
      : p_(p), memory_(memory), query_pitch_(padded(p.head_dim_qk) + kVecWidth) {}

  void load_queries(const WorkTile& work, int rows) const {
    kv::with_loader(p_.q.dtype, [&](auto row, int bytes) {
      const char* from = query_rows(p_, work, bytes);
      for (int slot = 0; slot < rows; ++slot) {
        for (int dim = 0; dim < p_.head_dim_qk; dim += kVecWidth) {
          store_vec(memory_.queries + slot * query_pitch_ + dim,
                    kv::load_values(row, from + slot * p_.q.stride_token * bytes, bytes, dim, p_.head_dim_qk - dim));
        }
      }
    });
  }

  // K^T: panels [D, kPanel]. Keys that there are not are zeros.
  void pack_keys(const WorkTile& work, int tile) const {
    const KeyRows keys = key_rows(p_, p_.cache.k, work, tile, kKeys);
    kv::with_format(p_.k_format, [&](auto row, int bytes) {
      for (int first = 0; first < kKeys; first += kVecWidth) {
        float* panel = memory_.keys + first / kPanel * kPanel * p_.head_dim_qk + first % kPanel;
        for (int dim = 0; dim < p_.head_dim_qk; dim += kVecWidth) {
          Vec x[kVecWidth] = {};
          for (int i = 0; i < minimum(keys.count - first, kVecWidth); ++i) {
            x[i] = load(row, bytes, keys, p_.k_row_scales, first + i, dim, p_.head_dim_qk - dim);
          }
          transpose(x);
          for (int i = 0; i < minimum(p_.head_dim_qk - dim, kVecWidth); ++i)
            store_vec(panel + (dim + i) * kPanel, x[i]);
        }
      }
    });
  }

  // S = Q K^T: queries from `slot` on, `keys` of the tile
  void multiply_keys(float* scores, int pitch, int slot, int rows, const KeySpan& keys) const {
    for (int panel = keys.low / kPanel * kPanel; panel < keys.high; panel += kPanel) {
      const int low = maximum(keys.low, panel), high = minimum(keys.high, panel + kPanel);
      multiply_panel<false>(scores + low, pitch, memory_.queries + slot * query_pitch_, query_pitch_, rows,
                            memory_.keys + panel * p_.head_dim_qk + low - panel, (high - low) / kVecWidth,
                            p_.head_dim_qk);
    }
  }

  static void store_weights(float* row, int key, Vec a, Vec b) {
    store_vec(row + key, a);
    store_vec(row + key + kVecWidth, b);
  }

  // Panels [keys, kPanel] of V, with zeros at keys that there are not: their weights are 0, and only a number times 0
  // is 0.
  void pack_values(const WorkTile& work, int tile) const {
    const KeyRows keys = key_rows(p_, p_.cache.v, work, tile, kKeys);
    kv::with_format(p_.v_format, [&](auto row, int bytes) {
      for (int key = 0; key < kKeys; ++key) {
        for (int column = 0; column < p_.head_dim_v; column += kVecWidth) {
          const Vec x =
              key < keys.count ? load(row, bytes, keys, p_.v_row_scales, key, column, p_.head_dim_v - column) : Vec{};
          store_vec(memory_.values + column / kPanel * kPanel * kKeys + key * kPanel + column % kPanel, x);
        }
      }
    });
  }

  // O += P V, `keys` of the tile
  void add_values(float* out, int out_pitch, const float* weights, int pitch, int rows, const KeySpan& keys) const {
    for (int column = 0; column < p_.head_dim_v; column += kPanel) {
      multiply_panel<true>(out + column, out_pitch, weights + keys.low, pitch, rows,
                           memory_.values + column * kKeys + keys.low * kPanel,
                           minimum(padded(p_.head_dim_v) - column, kPanel) / kVecWidth, keys.high - keys.low);
    }
  }

 private:
  // Values of a row of keys or values, of which `count` exist from `dim` on, times the scales that lie beside them.
  template <class Row>
  FLASHPORT_DEVICE static Vec load(Row row, int bytes, const KeyRows& keys, const KeyScales& scales, int key, int dim,
                                   int count) {
    const Vec x = kv::load_values(row, keys.row(key), bytes, dim, count);
    return scales.data == nullptr ? x : x * kv::load_factors(scales, keys.scale(scales, key), dim, count);
  }

  const AttentionParams& p_;
  Memory& memory_;
  int query_pitch_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
