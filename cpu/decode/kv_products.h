// The products of a leaf with K and V in floats. Only the format of the cache is fixed when they are compiled: all
// shapes of a format share them, and they are most of what there is to compile. Blocks of kVecWidth accumulators: rows
// x keys for Q K^T (summed across lanes in one transposing tree), rows x columns for P V.
#pragma once

#include <cstring>

#include "cpu/arch/lane_sums.h"
#include "cpu/decode/leaf.h"
#include "cpu/kv/row.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <int kRows, int kDims>
struct FloatQuery {
  alignas(64) float rows[kRows][kDims];
};

template <KvFormat kFormat>
class KvProducts {
  using Row = kv::KvRow<kFormat>;
  // Values of a row that are multiplied together: those of a block share what its scale costs.
  static constexpr bool kBlocks = kv_format_trait(kFormat).block_values == 32;
  static constexpr int kStep = kBlocks ? 32 : kVecWidth;

 public:
  template <int kRows, int kDims>
  using Query = FloatQuery<kRows, kDims>;

  // Keys have `dims` elements, values `columns`.
  KvProducts(int dims, int columns) : dims_(dims), columns_(columns) {}

  // Once query.rows are there.
  template <int kRows, int kDims>
  void prepare(const FloatQuery<kRows, kDims>&, int) const {}

  // scores [rows, leaf keys] = query [rows, dims] K^T, of the keys that exist.
  template <int kRows, int kDims>
  void multiply_keys(const FloatQuery<kRows, kDims>& query, const Leaf& leaf, int rows,
                     float (*scores)[kLeafKeys]) const {
    dot_all({query.rows[0], kDims}, leaf, rows, scores);
  }

  // out [rows, stride] = weights [rows, leaf keys] V over the keys that exist; columns that V does not have are 0.
  [[gnu::noinline]] void multiply_values(const float (*weights)[kLeafKeys], const Leaf& leaf, int rows,
                                         FloatRows<float> out) const {
    for_row_groups(rows, [&]<int kCount>(int row) { weigh_rows<kCount>(weights, leaf, row, out); });
  }

 private:
  [[gnu::noinline]] void dot_all(FloatRows<const float> query, const Leaf& leaf, int rows,
                                 float (*scores)[kLeafKeys]) const {
    for_row_groups(rows, [&]<int kCount>(int row) { dot_rows<kCount>(query, leaf, row, scores); });
  }

  // Into the second level of the cache, which holds a leaf beside the one in use.
  FLASHPORT_DEVICE static void prefetch(const char* row, int bytes) {
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(row + line, 0, 2);
  }

  // Scores of kCount rows from `row` on with all keys, kVecWidth / kCount keys at a time.
  template <int kCount>
  void dot_rows(FloatRows<const float> query, const Leaf& leaf, int row, float (*scores)[kLeafKeys]) const {
    constexpr int kKeys = kVecWidth / kCount;
    const int key_bytes = kv_row_bytes(kFormat, dims_);
    for (int key = leaf.low; key < leaf.high; key += kKeys) {
      const char* keys[kKeys];
      for (int k = 0; k < kKeys; ++k) keys[k] = leaf.keys[minimum(key + k, leaf.high - 1)];
      if (row == 0 && leaf.next != nullptr) {
        const int until = minimum(key + kKeys, leaf.next->high);
        for (int k = maximum(key, leaf.next->low); k < until; ++k) prefetch(leaf.next->keys[k], key_bytes);
      }
      Vec acc[kVecWidth] = {};
      int dim = 0;
      for (; dim + kStep <= dims_; dim += kStep) {
        Vec q[kStep / kVecWidth][kCount];
#pragma GCC unroll 4
        for (int v = 0; v < kStep / kVecWidth; ++v) {
#pragma GCC unroll 16
          for (int r = 0; r < kCount; ++r) q[v][r] = load_vec(query[row + r] + dim + v * kVecWidth);
        }
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; ++k) {
          const char* from = keys[k] + kv_row_bytes(kFormat, dim);
#pragma GCC unroll 4
          for (int v = 0; v < kStep / kVecWidth; ++v) {
            const Vec x = Row::load(from, v * kVecWidth);
#pragma GCC unroll 16
            for (int r = 0; r < kCount; ++r) acc[r * kKeys + k] = fma_rn(q[v][r], x, acc[r * kKeys + k]);
          }
        }
      }
      if (dim < dims_) {  // the last 8 dims of a row: nothing after it may be read
#pragma GCC unroll 16
        for (int k = 0; k < kKeys; ++k) {
          const Vec x = load_tail(keys[k], dim, dims_);
#pragma GCC unroll 16
          for (int r = 0; r < kCount; ++r) {
            acc[r * kKeys + k] = fma_rn(load_vec(query[row + r] + dim), x, acc[r * kKeys + k]);
          }
        }
      }
      const Vec sums = sum_each(acc);
      if (key + kKeys <= leaf.high) {
#pragma GCC unroll 16
        for (int r = 0; r < kCount; ++r) {
          std::memcpy(scores[row + r] + key, reinterpret_cast<const float*>(&sums) + r * kKeys, sizeof(float) * kKeys);
        }
        continue;
      }
      for (int r = 0; r < kCount; ++r) {
        for (int k = 0; k < leaf.high - key; ++k) scores[row + r][key + k] = sums[r * kKeys + k];
      }
    }
  }

  // Output rows from `row` on: kValueKeys keys at a time, so that the first cache still has their rows when the next
  // columns are read, and kVectors vectors of columns at a time.
  template <int kCount>
  void weigh_rows(const float (*weights)[kLeafKeys], const Leaf& leaf, int row, FloatRows<float> out) const {
    constexpr int kVectors = kVecWidth / 4;  // four rows have kVecWidth accumulators
    constexpr int kColumns = kVectors * kVecWidth;
    constexpr int kPrefetched = 64;  // columns, asked for at a time
    const int next_low = leaf.next == nullptr ? kLeafKeys : leaf.next->low;
    const int next_high = leaf.next == nullptr ? 0 : leaf.next->high;
    int first = leaf.low;
    do {
      const int last = minimum(first + kValueKeys, leaf.high);
      for (int col = 0; col < out.stride; col += kColumns) {
        const int part = kColumns % 32 == 0 ? 0 : col % 32;  // of a block
        Vec acc[kCount][kVectors] = {};
        if (first > leaf.low) {
#pragma GCC unroll 16
          for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) acc[r][v] = load_vec(out[row + r] + col + v * kVecWidth);
          }
        }
        if (col + kColumns <= columns_) {
          for (int key = first; key < last; ++key) {
            if (row == 0 && col % kPrefetched == 0 && key >= next_low && key < next_high) {
              prefetch(leaf.next->values[key] + kv_row_bytes(kFormat, col),
                       kv_row_bytes(kFormat, minimum(kPrefetched, columns_ - col)));
            }
            const char* from = leaf.values[key] + kv_row_bytes(kFormat, col - part);
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
              const Vec x = Row::load(from, part + v * kVecWidth);
#pragma GCC unroll 16
              for (int r = 0; r < kCount; ++r) {
                acc[r][v] = fma_rn(broadcast(weights[row + r][key]), x, acc[r][v]);
              }
            }
          }
        } else {
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) {
            if (col + v * kVecWidth >= columns_) continue;
            for (int key = first; key < last; ++key) {
              const Vec x = load_tail(leaf.values[key], col + v * kVecWidth, columns_);
#pragma GCC unroll 16
              for (int r = 0; r < kCount; ++r) {
                acc[r][v] = fma_rn(broadcast(weights[row + r][key]), x, acc[r][v]);
              }
            }
          }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) store_vec(out[row + r] + col + v * kVecWidth, acc[r][v]);
        }
      }
      first = last;
    } while (first < leaf.high);
  }

  // Like Row::load where fewer than kVecWidth of the row's `dims` values may be left.
  FLASHPORT_DEVICE Vec load_tail(const char* row, int dim, int dims) const {
    if (dim + kVecWidth <= dims) return Row::load(row, dim);
    alignas(64) char copy[kv_row_bytes(kFormat, 32)] = {};
    const int first = kBlocks ? dim / 32 * 32 : dim;
    const int bytes = kv_row_bytes(kFormat, dims) - kv_row_bytes(kFormat, first);
    __builtin_memcpy(copy, row + kv_row_bytes(kFormat, first), static_cast<std::size_t>(bytes));
    return Row::load(copy, dim - first);
  }

  int dims_, columns_;
};

template <KvFormat kFormat>
using ProductsOf = KvProducts<kFormat>;

}  // namespace flashport::FLASHPORT_TARGET::decode
