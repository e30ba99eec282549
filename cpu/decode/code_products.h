// The products of a leaf with blocks of codes (q8_0, q4_0) in whole numbers, for processors that multiply and add bytes
// (VNNI). Queries and weights become numbers of 16 bits, in units of the largest of their row: of the query for each
// block of dims, of the weights times the values' scales for each block of columns. Sums are exact, so only that
// rounding is an error, of about 2^-16 of the largest.
//
//   Q K^T   16 keys x 4 dims of unsigned codes by the 4 bytes of a query, its high and its low bytes apart
//   P V     16 columns x 2 keys of signed codes by the 2 weights of a row
//
// What is not finite is multiplied in floats: a row of queries, a key, a block of columns.
#pragma once

#include "common/device/decode/chunks.h"
#include "cpu/arch/lane_sums.h"
#include "cpu/decode/leaf.h"
#include "cpu/kv/row.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <int kRows, int kDims>
struct CodeQuery {
  static constexpr int kBlocks = (kDims + 31) / 32;
  alignas(64) float rows[kRows][kDims];
  alignas(64) std::int8_t high[kRows][kDims], low[kRows][kDims];  // 256 high + low, in units of `units`
  float units[kRows][kBlocks];
  int offsets[kRows][kBlocks];  // the sum of a block if all codes were the unsigned zero, taken off
  bool is_finite[kRows];
};

template <KvFormat kFormat>
class CodeProducts {
  static_assert(kFormat == KvFormat::kQ8_0 || kFormat == KvFormat::kQ4_0);
  using Row = kv::KvRow<kFormat>;
  static constexpr int kBlockBytes = kv_format_trait(kFormat).block_bytes;
  static constexpr int kScaleBytes = 2;
  static constexpr int kZero = kFormat == KvFormat::kQ8_0 ? 128 : 8;  // of unsigned codes
  static constexpr int kMost = 127 * 256 + 127;                       // in two signed bytes
  static constexpr int kMostBlocks = 512 / 32;
  static constexpr int kKeysAtOnce = 8;  // of values

  // Keys or values of a leaf.
  struct Rows {
    const char* const* at;
    __mmask16 exist[kLeafKeys / 16];
    alignas(64) std::uint16_t scales[kMostBlocks][kLeafKeys];

    FLASHPORT_DEVICE Rows(const char* const (&rows)[kLeafKeys], const Leaf& leaf, int dims) : at(rows) {
      for (int i = 0; i < kLeafKeys / 16; ++i) {
        const int low = maximum(leaf.low - 16 * i, 0), high = minimum(maximum(leaf.high - 16 * i, 0), 16);
        exist[i] = static_cast<__mmask16>(high > low ? (1u << high) - (1u << low) : 0);
      }
      for (int key = 0; key < kLeafKeys; key += 8) {
        const char* const* eight = at + key;
        for (int block = 0; block * 32 < dims; ++block) {
          const int offset = block * kBlockBytes;
          _mm_store_si128(
              reinterpret_cast<__m128i*>(scales[block] + key),
              _mm_set_epi16(scale_at(eight[7] + offset), scale_at(eight[6] + offset), scale_at(eight[5] + offset),
                            scale_at(eight[4] + offset), scale_at(eight[3] + offset), scale_at(eight[2] + offset),
                            scale_at(eight[1] + offset), scale_at(eight[0] + offset)));
        }
      }
    }
    FLASHPORT_DEVICE static std::int16_t scale_at(const char* block) {
      std::int16_t bits;
      __builtin_memcpy(&bits, block, sizeof bits);
      return bits;
    }
    // The scales of 16 keys.
    FLASHPORT_DEVICE Vec scale(int block, int key) const { return widen_fp16(scales[block] + key); }
  };
  // A query's rows, of `stride` dims and `stride` / 32 blocks.
  struct QueryRows {
    FloatRows<const float> rows;
    const std::int8_t *high, *low;
    const float* units;
    const int* offsets;
    const bool* is_finite;
  };

 public:
  template <int kRows, int kDims>
  using Query = CodeQuery<kRows, kDims>;

  // Keys have `dims` elements, values `columns`.
  CodeProducts(int dims, int columns) : dims_(dims), columns_(columns) {}

  // Once query.rows are there.
  template <int kRows, int kDims>
  void prepare(CodeQuery<kRows, kDims>& query, int rows) const {
    for (int row = 0; row < rows; ++row) {
      query.is_finite[row] = true;
      for (int block = 0; block * 32 < dims_; ++block) {
        const float* from = query.rows[row] + block * 32;
        const Vec x[2] = {load_vec(from), load_vec(from + kVecWidth)};
        const Unit unit(largest(x[0], x[1]));
        query.is_finite[row] &= unit.is_finite();
        query.units[row][block] = unit.value;
        int sum = 0;
        for (int i = 0; i < 32; ++i) {
          const int whole = unit.is_finite() ? static_cast<int>(__builtin_rintf(from[i] * unit.inverse)) : 0;
          const auto low = static_cast<std::int8_t>(whole & 255);
          query.low[row][block * 32 + i] = low;
          query.high[row][block * 32 + i] = static_cast<std::int8_t>((whole - low) / 256);
          sum += whole;
        }
        query.offsets[row][block] = -kZero * sum;
      }
    }
  }

  // scores [rows, leaf keys] = query [rows, dims] K^T, of the keys that exist.
  template <int kRows, int kDims>
  void multiply_keys(const CodeQuery<kRows, kDims>& query, const Leaf& leaf, int rows,
                     float (*scores)[kLeafKeys]) const {
    dot_all({{query.rows[0], kDims}, query.high[0], query.low[0], query.units[0], query.offsets[0], query.is_finite},
            leaf, rows, scores);
  }

  // out [rows, stride] = weights [rows, leaf keys] V over the keys that exist; columns that V does not have are 0.
  [[gnu::noinline]] void multiply_values(const float (*weights)[kLeafKeys], const Leaf& leaf, int rows,
                                         FloatRows<float> out) const {
    if (leaf.low >= leaf.high) {
      for (int row = 0; row < rows; ++row)
        std::memset(out[row], 0, sizeof(float) * static_cast<std::size_t>(out.stride));
      return;
    }
    const Rows values(leaf.values, leaf, columns_);
    for_row_groups(rows, [&]<int kCount>(int first) { weigh_rows<kCount>(weights, values, leaf, first, out); });
    for (int row = 0; row < rows && columns_ < out.stride; ++row) {
      std::memset(out[row] + columns_, 0, sizeof(float) * static_cast<std::size_t>(out.stride - columns_));
    }
  }

 private:
  static constexpr float kLeastUnit = 1e-30f;  // keeps `inverse` finite
  // Numbers whose magnitude is at most `most`, as whole ones of at most kMost.
  struct Unit {
    float value, inverse;
    FLASHPORT_DEVICE explicit Unit(float most) {
      if (most < kLeastUnit) most = kLeastUnit;
      value = most * (1.0f / kMost);
      inverse = kMost / most;
    }
    FLASHPORT_DEVICE bool is_finite() const { return value < kInfinity; }
  };

  FLASHPORT_DEVICE static IntVec magnitude(Vec x) { return reinterpret_cast<IntVec>(x) & 0x7fffffff; }
  FLASHPORT_DEVICE static IntVec larger(IntVec a, IntVec b) { return a > b ? a : b; }
  // Magnitudes as floats; NaN is larger than infinity.
  FLASHPORT_DEVICE static Vec magnitude_vec(Vec x) { return reinterpret_cast<Vec>(magnitude(x)); }
  FLASHPORT_DEVICE static Vec larger_vec(Vec x, Vec y) {
    return reinterpret_cast<Vec>(larger(reinterpret_cast<IntVec>(x), reinterpret_cast<IntVec>(y)));
  }
  FLASHPORT_DEVICE static float largest(Vec a, Vec b) {
    return fold_vec(larger_vec(magnitude_vec(a), magnitude_vec(b)), larger_vec);
  }

  using FourBytes = const std::int8_t[4];
  // As an operand in memory.
  FLASHPORT_DEVICE static FourBytes& four_at(const std::int8_t* from) { return *reinterpret_cast<FourBytes*>(from); }
  // Two numbers for all lanes.
  FLASHPORT_DEVICE static __m512i broadcast_pair(const std::int16_t* two) {
    int both;
    __builtin_memcpy(&both, two, sizeof both);
    return _mm512_set1_epi32(both);
  }
  FLASHPORT_DEVICE static Vec to_floats(__m512i x) { return reinterpret_cast<Vec>(_mm512_cvtepi32_ps(x)); }

  // The next leaf, or null where it has no rows.
  FLASHPORT_DEVICE static const Leaf* rows_after(const Leaf& leaf) {
    return leaf.next != nullptr && leaf.next->low < leaf.next->high ? leaf.next : nullptr;
  }
  // Asks for rows [first, until) of a leaf's, into the second level of the cache.
  FLASHPORT_DEVICE static void prefetch(const char* const* rows, int bytes, int first, int until) {
    for (int key = first; key < until; ++key) {
      for (int line = 0; line < bytes; line += 64) __builtin_prefetch(rows[key] + line, 0, 2);
    }
  }

  // Element i of codes[j] is bytes 4 j to 4 j + 3 of the 16 at rows[i] + offset.
  FLASHPORT_DEVICE static void load_transposed(__m512i* codes, const char* const* rows, int offset) {
    __m512i quarter[4];  // of every fourth row
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto load = [&](int row) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row + i] + offset));
      };
      quarter[i] = _mm512_castsi128_si512(load(0));
      quarter[i] = _mm512_inserti32x4(quarter[i], load(4), 1);
      quarter[i] = _mm512_inserti32x4(quarter[i], load(8), 2);
      quarter[i] = _mm512_inserti32x4(quarter[i], load(12), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(quarter[0], quarter[1]), b = _mm512_unpackhi_epi32(quarter[0], quarter[1]);
    const __m512i c = _mm512_unpacklo_epi32(quarter[2], quarter[3]), d = _mm512_unpackhi_epi32(quarter[2], quarter[3]);
    codes[0] = _mm512_unpacklo_epi64(a, c);
    codes[1] = _mm512_unpackhi_epi64(a, c);
    codes[2] = _mm512_unpacklo_epi64(b, d);
    codes[3] = _mm512_unpackhi_epi64(b, d);
  }
  // Element i of codes[j] is the unsigned codes of dims 4 j to 4 j + 3 of the block `offset` bytes behind rows[i].
  FLASHPORT_DEVICE static void load_key_codes(__m512i (&codes)[8], const char* const* rows, int offset) {
    load_transposed(codes, rows, offset + kScaleBytes);
    if constexpr (kFormat == KvFormat::kQ8_0) {
      load_transposed(codes + 4, rows, offset + kScaleBytes + 16);
#pragma GCC unroll 8
      for (__m512i& x : codes) x = _mm512_xor_si512(x, _mm512_set1_epi8(-128));
    } else {
      const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        codes[4 + j] = _mm512_and_si512(_mm512_srli_epi16(codes[j], 4), nibble);
        codes[j] = _mm512_and_si512(codes[j], nibble);
      }
    }
  }

  [[gnu::noinline]] void dot_all(QueryRows query, const Leaf& leaf, int rows, float (*scores)[kLeafKeys]) const {
    if (leaf.low >= leaf.high) return;
    const Rows keys(leaf.keys, leaf, dims_);
    for_row_groups(rows, [&]<int kCount>(int first) { dot_rows<kCount>(query, keys, leaf, first, scores); });
    for (int row = 0; row < rows; ++row) {
      for (int key = leaf.low; key < leaf.high && !query.is_finite[row]; ++key) {
        scores[row][key] = dot_floats(query.rows[row], leaf.keys[key]);
      }
    }
  }

  // Scores of kCount rows from `row` on with all keys, 16 at a time.
  template <int kCount>
  FLASHPORT_DEVICE void dot_rows(const QueryRows& query, const Rows& keys, const Leaf& leaf, int row,
                                 float (*scores)[kLeafKeys]) const {
    const int stride = query.rows.stride, blocks = (stride + 31) / 32;
    const int key_bytes = kv_row_bytes(kFormat, dims_), share = (16 * 32 + dims_ - 1) / dims_;  // of 16 rows
    const Leaf* next = row == 0 ? rows_after(leaf) : nullptr;
    for (int first = leaf.low / 16 * 16; first < leaf.high; first += 16) {
      Vec sums[kCount] = {};
      IntVec widest{};  // of the keys' scales
      for (int block = 0; block * 32 < dims_; ++block) {
        if (next != nullptr) {
          const int from = minimum(block * share, 16);
          prefetch(next->keys + first, key_bytes, from, minimum(from + share, 16));
        }
        __m512i codes[8];
        const char* const* rows = keys.at + first;
        asm("" : "+r"(rows));  // else their addresses are kept, most of them in vector registers
        load_key_codes(codes, rows, block * kBlockBytes);
        const Vec scale = keys.scale(block, first);
        widest = larger(widest, magnitude(scale));
        // All sums advance together: in a sum by itself each product would wait for the one before it.
        const std::int8_t* high = query.high + row * stride + block * 32;
        const std::int8_t* low = query.low + row * stride + block * 32;
        __m512i highs[kCount], lows[kCount];
#pragma GCC unroll 4
        for (int r = 0; r < kCount; ++r) {
          highs[r] = _mm512_setzero_si512();
          lows[r] = _mm512_set1_epi32(query.offsets[(row + r) * blocks + block]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
#pragma GCC unroll 4
          for (int r = 0; r < kCount; ++r) {
            highs[r] = add_byte_products(highs[r], codes[j], four_at(high + r * stride + 4 * j));
            lows[r] = add_byte_products(lows[r], codes[j], four_at(low + r * stride + 4 * j));
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kCount; ++r) {
          const Vec whole = to_floats(_mm512_add_epi32(_mm512_slli_epi32(highs[r], 8), lows[r]));
          sums[r] = fma_rn(whole * scale, broadcast(query.units[(row + r) * blocks + block]), sums[r]);
        }
      }
      const __mmask16 exist = keys.exist[first / 16];
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        _mm512_mask_storeu_ps(scores[row + r] + first, exist, reinterpret_cast<__m512>(sums[r]));
      }
      const IntVec wild = widest >= 0x7f800000;
      if (_mm512_movepi32_mask(reinterpret_cast<__m512i>(wild)) == 0) continue;
      for (int i = 0; i < 16; ++i) {
        if (wild[i] == 0 || (exist >> i & 1) == 0) continue;
        for (int r = 0; r < kCount; ++r) {
          scores[row + r][first + i] = dot_floats(query.rows[row + r], keys.at[first + i]);
        }
      }
    }
  }

  float dot_floats(const float* query, const char* key) const {
    Vec sum{};
    for (int dim = 0; dim < dims_; dim += kVecWidth) {
      sum = fma_rn(load_vec(query + dim), Row::load(key, dim), sum);
    }
    return fold_vec(sum, [](Vec a, Vec b) { return a + b; });
  }

  // The signed codes of a block's 32 columns, each of key a and then of key b.
  FLASHPORT_DEVICE static void load_value_codes(__m512i (&codes)[2], const char* a, const char* b) {
    if constexpr (kFormat == KvFormat::kQ8_0) {
      const auto load = [](const char* from) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kScaleBytes)));
      };
      const __m512i x = load(a), y = load(b);
      codes[0] = _mm512_unpacklo_epi16(x, y);
      codes[1] = _mm512_unpackhi_epi16(x, y);
    } else {
      const auto load = [](const char* from) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + kScaleBytes)));
      };
      const __m512i both = _mm512_or_si512(load(a), _mm512_slli_epi32(load(b), 16));
      const __m512i nibble = _mm512_set1_epi16(15), zero = _mm512_set1_epi16(kZero);
      codes[0] = _mm512_sub_epi16(_mm512_and_si512(both, nibble), zero);
      codes[1] = _mm512_sub_epi16(_mm512_and_si512(_mm512_srli_epi32(both, 4), nibble), zero);
    }
  }
  // A block's columns in their order, from two vectors in that of load_value_codes().
  FLASHPORT_DEVICE static void store_columns(float* to, Vec a, Vec b) {
    if constexpr (kFormat == KvFormat::kQ8_0) {
      store_vec(to, __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
      store_vec(to + 16, __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
    } else {
      store_vec(to, a);
      store_vec(to + 16, b);
    }
  }

  // Output rows from `row` on, a block of columns at a time.
  template <int kCount>
  FLASHPORT_DEVICE void weigh_rows(const float (*weights)[kLeafKeys], const Rows& values, const Leaf& leaf, int row,
                                   FloatRows<float> out) const {
    const int blocks = columns_ / 32;
    const int value_bytes = kv_row_bytes(kFormat, columns_), share = (kKeysAtOnce + blocks - 1) / blocks;
    const int first = leaf.low / kKeysAtOnce * kKeysAtOnce;
    const Leaf* next = row == 0 ? rows_after(leaf) : nullptr;
    for (int block = 0; block < blocks; ++block) {
      const int from = minimum(block * share, kKeysAtOnce), until = minimum(from + share, kKeysAtOnce);
      alignas(64) std::int16_t whole[kCount][kLeafKeys];
      float units[kCount];
      if (!round_weights<kCount>(whole, units, weights + row, values, block)) {
        for (int r = 0; r < kCount; ++r) weigh_floats(weights[row + r], leaf, block * 32, out[row + r]);
        continue;
      }
      __m512i sums[kCount][2] = {};
      for (int key = first; key < leaf.high; key += kKeysAtOnce) {
        if (next != nullptr) prefetch(next->values + key, value_bytes, from, until);
#pragma GCC unroll 4
        for (int k = key; k < key + kKeysAtOnce; k += 2) {
          __m512i codes[2];
          load_value_codes(codes, values.at[k] + block * kBlockBytes, values.at[k + 1] + block * kBlockBytes);
#pragma GCC unroll 4
          for (int r = 0; r < kCount; ++r) {
            const __m512i two = broadcast_pair(whole[r] + k);
            sums[r][0] = _mm512_dpwssd_epi32(sums[r][0], codes[0], two);
            sums[r][1] = _mm512_dpwssd_epi32(sums[r][1], codes[1], two);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        store_columns(out[row + r] + block * 32, to_floats(sums[r][0]) * units[r], to_floats(sums[r][1]) * units[r]);
      }
    }
  }

  // Weights times the scales of a block of columns, in units of each row's largest. False where a scale is not finite.
  template <int kCount>
  FLASHPORT_DEVICE static bool round_weights(std::int16_t (&whole)[kCount][kLeafKeys], float (&units)[kCount],
                                             const float (*weights)[kLeafKeys], const Rows& values, int block) {
    constexpr int kVecs = kLeafKeys / kVecWidth;
    static_assert(kVecs == 4);
    Vec scale[kVecs];
    IntVec widest{};
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      scale[i] = values.scale(block, i * kVecWidth);
      widest = larger(widest, magnitude(scale[i]));
    }
    if (_mm512_movepi32_mask(reinterpret_cast<__m512i>(widest >= 0x7f800000)) != 0) return false;
    Vec x[kCount][kVecs], most[4];
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i) {
        x[r][i] = reinterpret_cast<Vec>(_mm512_maskz_loadu_ps(values.exist[i], weights[r] + i * kVecWidth)) * scale[i];
      }
      most[r] = larger_vec(larger_vec(magnitude_vec(x[r][0]), magnitude_vec(x[r][1])),
                           larger_vec(magnitude_vec(x[r][2]), magnitude_vec(x[r][3])));
    }
#pragma GCC unroll 4
    for (int r = kCount; r < 4; ++r) most[r] = most[0];
    const Vec four = larger_vec(fold_four(most, larger_vec), broadcast(kLeastUnit));  // four lanes for each row
    const Vec value = four * (1.0f / kMost), inverse = kMost / four;
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      units[r] = value[4 * r];
      const Vec factor = broadcast(inverse[4 * r]);
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i) {
        const __m512i rounded = _mm512_cvtps_epi32(reinterpret_cast<__m512>(x[r][i] * factor));
        _mm256_store_si256(reinterpret_cast<__m256i*>(whole[r] + i * kVecWidth), _mm512_cvtsepi32_epi16(rounded));
      }
    }
    return true;
  }

  void weigh_floats(const float* weights, const Leaf& leaf, int column, float* out) const {
    for (int end = column + 32; column < end; column += kVecWidth) {
      Vec sum{};
      for (int key = leaf.low; key < leaf.high; ++key) {
        sum = fma_rn(broadcast(weights[key]), Row::load(leaf.values[key], column), sum);
      }
      store_vec(out + column, sum);
    }
  }

  int dims_, columns_;
};

template <KvFormat kFormat>
using ProductsOf = CodeProducts<kFormat>;

}  // namespace flashport::FLASHPORT_TARGET::decode
