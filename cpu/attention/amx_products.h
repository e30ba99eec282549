// Products of attention on AMX, for tensors of bf16: sums in fp32, weights rounded to bf16. A product takes 32 rows x
// 32 columns of sums in four tile registers, from two tiles of each side. Heads are padded with zeros to 32 dims.
//
// K and V are packed as the tile registers want the right side: pairs of rows (dims of K^T, keys of V), an element of
// each in turn. A tile [32, 16] is 1 KB, and the two tiles of 32 columns are neighbours: [columns / 32][depth / 32][2].
#pragma once

#include "common/device/attention/config.h"
#include "cpu/arch/transpose.h"
#include "cpu/attention/key_rows.h"

namespace flashport::FLASHPORT_TARGET::attention {

template <AttentionConfig kCfg>
class Products {
  static constexpr int kRows = kCfg.tuning.rows, kKeys = kCfg.tuning.keys;
  static constexpr int kSide = 32;              // of a product's block of sums, and the depth of a tile
  static constexpr int kBlock = kSide * kSide;  // elements of the right side in a step of the depth

 public:
  static constexpr int kGroupRows = kSide;
  static constexpr int kKeyStep = kSide;
  static_assert(kRows % kSide == 0 && kKeys % kSide == 0 && kCfg.shape.head_dim_qk % kSide == 0 &&
                kCfg.shape.head_dim_v % kSide == 0);
  static_assert(kCfg.shape.math == MathType::kBf16);

  struct Memory {
    alignas(64) BFloat16 queries[kRows * (kCfg.shape.head_dim_qk + kSide)];
    alignas(64) BFloat16 keys[kKeys * kCfg.shape.head_dim_qk];
    alignas(64) BFloat16 values[kKeys * kCfg.shape.head_dim_v];
  };

  static int padded(int dims) { return (dims + kSide - 1) / kSide * kSide; }

  Products(const AttentionParams& p, Memory& memory)
      : p_(p), memory_(memory), dims_(padded(p.head_dim_qk)), query_pitch_(dims_ + kSide) {}

  void load_queries(const WorkTile& work, int rows) const {
    const char* from = query_rows(p_, work, 2);
    for (int slot = 0; slot < rows; ++slot) {
      for (int dim = 0; dim < dims_; dim += kSide) {
        store(memory_.queries + slot * query_pitch_ + dim,
              load(from + slot * p_.q.stride_token * 2, dim, p_.head_dim_qk - dim));
      }
    }
  }

  // K^T. Keys that there are not are zeros.
  void pack_keys(const WorkTile& work, int tile) const {
    const KeyRows keys = key_rows(p_, p_.cache.k, work, tile, kKeys);
    for (int first = 0; first < kKeys; first += kTileRows) {
      BFloat16* to = memory_.keys + first / kSide * kSide * dims_ + first % kSide * kSide;
      for (int dim = 0; dim < dims_; dim += kSide, to += kBlock) {
        Vec pairs[kTileRows] = {};
        for (int i = 0; i < minimum(keys.count - first, kTileRows); ++i) {
          pairs[i] = reinterpret_cast<Vec>(load(keys.row(first + i), dim, p_.head_dim_qk - dim));
        }
        transpose(pairs);
        for (int i = 0; i < kTileRows; ++i) store(to + i * kSide, reinterpret_cast<__m512i>(pairs[i]));
      }
    }
  }

  // S = Q K^T: queries from `slot` on, `keys` of the tile
  void multiply_keys(float* scores, int pitch, int slot, int rows, const KeySpan& keys) const {
    for (int key = keys.low; key < keys.high; key += kSide) {
      multiply<false>(rows, scores + key, pitch, memory_.queries + slot * query_pitch_, query_pitch_,
                      memory_.keys + key * dims_, dims_);
    }
  }

  // Rounds 32 weights, in the first half of their place.
  static void store_weights(float* row, int key, Vec a, Vec b) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(a));
    store(reinterpret_cast<BFloat16*>(row) + key, reinterpret_cast<__m512i>(rounded));
  }

  // V, with zeros at keys that there are not: their weights are 0, and only a number times 0 is 0.
  void pack_values(const WorkTile& work, int tile) const {
    const KeyRows keys = key_rows(p_, p_.cache.v, work, tile, kKeys);
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                  high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const auto row = [&](int key, int column) {
      return key < keys.count ? load(keys.row(key), column, p_.head_dim_v - column) : _mm512_setzero_si512();
    };
    for (int key = 0; key < kKeys; key += 2) {
      for (int column = 0; column < padded(p_.head_dim_v); column += kSide) {
        const __m512i even = row(key, column), odd = row(key + 1, column);
        const __m512i a = _mm512_unpacklo_epi16(even, odd), b = _mm512_unpackhi_epi16(even, odd);
        BFloat16* to = memory_.values + column * kKeys + key / kSide * kBlock + key % kSide / 2 * kSide;
        store(to, _mm512_permutex2var_epi64(a, low, b));
        store(to + kBlock / 2, _mm512_permutex2var_epi64(a, high, b));
      }
    }
  }

  // O += P V, `keys` of the tile
  void add_values(float* out, int out_pitch, const float* weights, int pitch, int rows, const KeySpan& keys) const {
    const auto* from = reinterpret_cast<const BFloat16*>(weights) + keys.low;
    for (int column = 0; column < p_.head_dim_v; column += kSide) {
      multiply<true>(rows, out + column, out_pitch, from, 2 * pitch, memory_.values + column * kKeys + keys.low * kSide,
                     keys.high - keys.low);
    }
  }

 private:
  // 32 elements of a row from `first` on, of which `count` exist; the others are 0.
  static __m512i load(const char* row, int first, int count) {
    const __mmask32 mask = count >= kSide ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
    return _mm512_maskz_loadu_epi16(mask, row + first * 2);
  }
  static void store(BFloat16* to, __m512i x) { _mm512_store_si512(to, x); }

  // sums [32, 32] = left [32, depth] right [depth, 32], or are added to what they were. With 16 rows or fewer the
  // second 16 are left alone.
  template <bool kAdds>
  FLASHPORT_DEVICE static void multiply(int rows, float* sums, int sum_pitch, const BFloat16* left, int left_pitch,
                                        const BFloat16* right, int depth) {
    if (rows > kTileRows) {
      multiply_block<kAdds, true>(sums, sum_pitch, left, left_pitch, right, depth);
    } else {
      multiply_block<kAdds, false>(sums, sum_pitch, left, left_pitch, right, depth);
    }
  }
  template <bool kAdds, bool kBoth>
  FLASHPORT_DEVICE static void multiply_block(float* sums, int sum_pitch, const BFloat16* left, int left_pitch,
                                              const BFloat16* right, int depth) {
    const std::int64_t sum_bytes = std::int64_t{4} * sum_pitch, left_bytes = std::int64_t{2} * left_pitch;
    float* lower_sums = sums + kTileRows * sum_pitch;
    if constexpr (kAdds) {
      load_tile<0>(sums, sum_bytes);
      load_tile<1>(sums + kTileRows, sum_bytes);
      if constexpr (kBoth) {
        load_tile<2>(lower_sums, sum_bytes);
        load_tile<3>(lower_sums + kTileRows, sum_bytes);
      }
    } else {
      zero_tile<0>();
      zero_tile<1>();
      if constexpr (kBoth) {
        zero_tile<2>();
        zero_tile<3>();
      }
    }
    for (int k = 0; k < depth; k += kSide, left += kSide, right += kBlock) {
      load_tile<6>(right, kTileBytes);
      load_tile<7>(right + kBlock / 2, kTileBytes);
      load_tile<4>(left, left_bytes);
      multiply_tile<0, 4, 6>();
      multiply_tile<1, 4, 7>();
      if constexpr (kBoth) {
        load_tile<5>(left + kTileRows * left_pitch, left_bytes);
        multiply_tile<2, 5, 6>();
        multiply_tile<3, 5, 7>();
      }
    }
    store_tile<0>(sums, sum_bytes);
    store_tile<1>(sums + kTileRows, sum_bytes);
    if constexpr (kBoth) {
      store_tile<2>(lower_sums, sum_bytes);
      store_tile<3>(lower_sums + kTileRows, sum_bytes);
    }
  }

  const AttentionParams& p_;
  Memory& memory_;
  const TileRegisters registers_;
  int dims_, query_pitch_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
