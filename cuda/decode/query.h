// The rows of a query tile on their way to shared memory, as the type and in the order of the products; padding
// rows and dims are zero.
#pragma once

#include <limits>

#include "common/device/decode/query.h"
#include "cuda/arch/mma.h"
#include "cuda/decode/block_shape.h"
#include "cuda/decode/lane_maps.h"
#include "cuda/decode/row_layout.h"
#include "cuda/decode/side_format.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
struct QueryTile {
  static constexpr int kPitch = kCfg.shape.head_dim_qk + 8;
  alignas(16) std::uint16_t rows[kCfg.shape.rows][kPitch];
  FLASHPORT_DEVICE std::uint16_t* at(int row, int dim) { return &rows[row][dim]; }
};

// For wgmma: panels.
template <DecodeConfig kCfg>
  requires(uses_wgmma(kCfg.shape))
struct QueryTile<kCfg> {
  using Layout = PanelLayout<kCfg.shape.head_dim_qk, kCfg.shape.rows>;
  alignas(1024) std::uint16_t panels[Layout::kBytes / 128][Layout::kPanelBytes / 2];
  // `dim`: of a unit of eight
  FLASHPORT_DEVICE std::uint16_t* at(int row, int dim) { return &panels[0][0] + Layout::offset(row, 2 * dim) / 2; }
};

// Whether queries are always as the products want them.
template <class Params>
constexpr bool has_math_type() {
  return requires { Params::kType16; };
}

// Eight query values that are not as the products want them, each times `factor`.
template <MathType kMath>
FLASHPORT_DEVICE uint4 packed_query(const DecodeParams& p, std::int64_t offset, float factor = 1.0f) {
  unsigned words[4];
  convert_query(words, p, offset, [&](float x, float y) { return pack<kMath>(factor * x, factor * y); });
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The copies of `block`'s threads; they have landed where their cp.async have.
template <DecodeConfig kCfg, class Params>
FLASHPORT_DEVICE void copy_query(const Params& p, const Segment& s, const Block& block, QueryTile<kCfg>& tile) {
  constexpr MathType kMath = side_math(kCfg.shape, kCfg.shape.k_format);
  constexpr int kRows = kCfg.shape.rows;
  constexpr int kUnits = kCfg.shape.head_dim_qk / 8;  // of a row: eight values each
  constexpr std::int64_t kPadding = std::numeric_limits<std::int64_t>::min();
  const bool same = p.q.dtype == (kMath == MathType::kBf16 ? DType::kBFloat16 : DType::kFloat16);

  const auto place_of = [&](int row) -> std::int64_t {
    const QueryRow at = query_row(p, s, kRows, row);
    return at.token < s.q_len ? query_offset(p, s, p.q, at) : kPadding;
  };
  const auto copy_unit = [&](int row, int dim, std::int64_t place) {
    __builtin_assume(dim >= 0);
    const bool valid = place != kPadding && dim < p.head_dim_qk;
    const std::int64_t offset = valid ? place + dim * (Params::kPlain ? 1 : p.q.stride_dim) : 0;
    const char* from = static_cast<const char*>(p.q.data) + offset * 2;
    const bool ready =
        has_math_type<Params>() || (same && p.q.stride_dim == 1 && reinterpret_cast<std::uintptr_t>(from) % 16 == 0);
    if constexpr (is_narrow_cache(kCfg.shape.k_format)) {
      const int first =
          RowLayout<kCfg.shape.k_format, kCfg.shape.head_dim_qk, kCfg.tuning.teams>::first_block(s.kv_head);
      const KvFormat format = SideFormat<kCfg.shape.k_format>(p.k_format).value();
      const DimOrder order = dim_order(format);
      if constexpr (kCfg.shape.k_format == KvFormat::kInt4) {  // pairs are four dims apart
        const uint4 x = valid ? packed_query<kMath>(p, offset) : make_uint4(0, 0, 0, 0);
        const unsigned pairs[4] = {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                                   __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632)};
        for (int i = 0; i < 4; ++i) *reinterpret_cast<unsigned*>(tile.at(row, int4_query_column(dim + i))) = pairs[i];
        __threadfence_block();
        return;
      }
      const auto to = [&](int pair) { return tile.at(row, query_column(order, first, dim + 2 * pair)); };
      // Keys whose codes are in high bits are 16 times as large (block_widening.h).
      const bool has_factor = has_plain_nibbles(format);
      if (!has_factor && ready) {
        for (int pair = 0; pair < 4; ++pair) copy_async<4>(to(pair), from + 4 * pair, valid);
      } else {
        const float factor = has_factor && dim % 32 >= 16 ? 0x1p-4f : 1.0f;
        const uint4 x = valid ? packed_query<kMath>(p, offset, factor) : make_uint4(0, 0, 0, 0);
        const unsigned pairs[4] = {x.x, x.y, x.z, x.w};
        for (int pair = 0; pair < 4; ++pair) *reinterpret_cast<unsigned*>(to(pair)) = pairs[pair];
        __threadfence_block();
      }
    } else {
      std::uint16_t* to = tile.at(row, dim);
      if (ready) {
        copy_async<16>(to, from, valid);
      } else {
        *reinterpret_cast<uint4*>(to) = valid ? packed_query<kMath>(p, offset) : make_uint4(0, 0, 0, 0);
        __threadfence_block();
      }
    }
  };

  constexpr int kRowsOfWave = kRows / kCfg.tuning.producer_waves;
  if constexpr (kRowsOfWave * kUnits >= 4 * kWaveSize && !reads_segments(kCfg.shape)) {
    // Finding a row takes longer than copying a unit: each lane finds one of its wave's rows for all lanes.
    constexpr int kSideBySide = (kUnits & -kUnits) < kWaveSize ? kUnits & -kUnits : kWaveSize;  // on a row
    static_assert(kRowsOfWave <= kWaveSize && kRowsOfWave * kSideBySide % kWaveSize == 0);
    const int first = block.wave() * kRowsOfWave;
    const auto lane = static_cast<unsigned>(block.lane());
    const auto dim = static_cast<int>(lane % kSideBySide * 8);
    const long long own = place_of(first + static_cast<int>(lane) % kRowsOfWave);
#pragma unroll 1
    for (int row = static_cast<int>(lane / kSideBySide); row < kRowsOfWave; row += kWaveSize / kSideBySide) {
      const std::int64_t place = __shfl_sync(~0u, own, row);
#pragma unroll
      for (int more = 0; more < 8 * kUnits; more += 8 * kSideBySide) copy_unit(first + row, dim + more, place);
    }
  } else {
#pragma unroll 1
    for (int i = block.thread(); i < kRows * kUnits; i += block.threads()) {
      copy_unit(i / kUnits, i % kUnits * 8, place_of(i / kUnits));
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
