// The tile verbs of decode for 64 or 128 query rows on wgmma: S = Q K^T [rows, keys] and O += P V [rows, DV], by a
// warpgroup for each 64 rows, each warp 16 of them. K and V are read where the producers have left them, P stays in
// registers: what the scores are summed in is what the second product reads. So warps exchange nothing, and a turn has
// no barrier.
//
// Where O is too wide for the registers of one warpgroup, two share its columns. Both make all scores, which are cheap,
// and have the same (m, l). Each warpgroup publishes its rows and columns by itself.
//
// Registers of a sum [64, columns], lane 4 g + c of warp w: register i of tile j is row 16 w + g + 8 (i / 2), column
// 8 j + 2 c + i % 2. Per-row values (Rows) have a slot for each of the two rows, and are the same in the four lanes
// that have them.
#pragma once

#include "cuda/arch/wgmma.h"
#include "cuda/decode/segment_tiles.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The state of a tile between two groups of its chunks, where warpgroups share the columns: registers are few, and what
// is read from the memory of a thread waits for all copies that were asked for before. The values of a register lie
// side by side.
template <DecodeConfig kCfg>
struct KeptOut : NoPartialList {};
template <DecodeConfig kCfg>
  requires(column_warpgroups(kCfg) == 2)
struct KeptOut<kCfg> : NoPartialList {
  float o[kCfg.shape.head_dim_v / 4][128];
};

template <DecodeConfig kCfg>
  requires(uses_wgmma(kCfg.shape))
struct DecodeShared<kCfg> {
  KvRing<kCfg> ring;
  KeptOut<kCfg> partials[warpgroups(kCfg)];
  unsigned arrive_flag;
  [[no_unique_address]] EarlyLengthsOf<kCfg> lengths;
  // Each wave has its own here, because registers are few. Wide tiles leave no room for where a producer scouts.
  Segment segments[kCfg.tuning.waves];
  Segment ahead[kCfg.tuning.producer_waves][column_warpgroups(kCfg) == 2 ? 1 : 2];
};

template <DecodeConfig kCfg>
  requires(uses_wgmma(kCfg.shape))
class DecodeTiles<kCfg> {
  static constexpr DecodeShape kShape = kCfg.shape;
  static constexpr MathType kMath = kShape.math;
  static_assert(kLeafKeys == kPanelColumns && kShape.k_format == kShape.v_format);
  static constexpr int kGroups = warpgroups(kCfg);
  static constexpr int kRowGroups = row_warpgroups(kCfg), kColumnGroups = column_warpgroups(kCfg);
  static constexpr int kGroupRows = kShape.rows / kRowGroups, kRowWaves = 4 * kRowGroups;
  static_assert(kGroupRows == 64 && kCfg.tuning.waves == 4 * kRowGroups * kColumnGroups && kGroups <= 2 &&
                    kCfg.tuning.producer_waves == 4 && kCfg.tuning.teams == 1,
                "one or two warpgroups compute, another one copies");
  static_assert(kGroups == 1 || kCfg.tuning.blocks_per_multiprocessor == 1);
  static constexpr int kColumnPanels = kShape.head_dim_v / kPanelColumns / kColumnGroups;  // of a warpgroup
  static constexpr int kKeys = turn_keys(kCfg);
  static constexpr int kSteps = kKeys / 16;

 public:
  static constexpr int kRows = kShape.rows;
  static constexpr int kRowSlots = 2;
  static constexpr int kColumns = kShape.head_dim_v;
  static constexpr int kTurnLeaves = kCfg.tuning.leaves;
  // A warpgroup publishes a state as one slice: few live rows are shared out among all its threads.
  static constexpr int kSliceColumns = kColumns / kColumnGroups;
  // The tile's is in the memory of each thread or in shared memory, because it is touched at the end of a group of
  // chunks alone, and registers are few.
  static constexpr int kKeptStates = 2;
  static constexpr int kStatesInMemory = 1;
  static constexpr bool kTileInShared = kColumnGroups == 2;
  static constexpr bool kClearsGroup = true;  // or it would take registers while a whole tile is written
  static constexpr bool kCombines = !decode_split(kCfg).large;

  struct Rows {
    float v[kRowSlots];
    FLASHPORT_DEVICE float& operator[](int slot) { return v[slot]; }
    FLASHPORT_DEVICE float operator[](int slot) const { return v[slot]; }
  };
  struct Query {};  // in shared memory
  struct Scores {
    float c[kKeys / 8][4];
  };
  struct alignas(16) Out {
    float c[kColumnPanels][kPanelColumns / 8][4];
  };
  // P as the left operand, and the sums of what it was rounded from, of this lane's keys.
  struct Operand {
    unsigned a[kSteps][4];
    Rows sum;
  };

  FLASHPORT_DEVICE DecodeTiles(const DecodeParams&, const Block& block, DecodeShared<kCfg>& shared)
      : block_(block),
        shared_(shared),
        slice_(kGroups == 1 ? 0 : block.wave() / 4),
        slice_threads_(nullptr, slice_ * 128, 128, kFirstTeamBarrier + kTeamBarriers + slice_) {}

  FLASHPORT_DEVICE static constexpr int row_slots() { return kRowSlots; }
  FLASHPORT_DEVICE int live_rows() const { return recompute(live_rows_); }
  FLASHPORT_DEVICE int row_of(int slot) const {
    return 16 * (block_.wave() % kRowWaves) + block_.lane() / 4 + 8 * slot;
  }
  // Whether this lane is the one to write per-row values of a slot.
  FLASHPORT_DEVICE bool owns_row(int) const { return column_group() == 0 && block_.lane() % 4 == 0; }
  FLASHPORT_DEVICE int slice() const { return slice_; }
  FLASHPORT_DEVICE const Block& slice_threads() const { return slice_threads_; }
  FLASHPORT_DEVICE int slice_rows() const {
    return kRowGroups == 1 ? live_rows() : maximum(minimum(live_rows() - first_row(), kGroupRows), 0);
  }
  FLASHPORT_DEVICE int first_row() const { return kRowGroups == 1 ? 0 : recompute(slice_) * kGroupRows; }
  FLASHPORT_DEVICE int first_column() const { return column_group() * kSliceColumns; }

  // The producers have brought the query with the tile's first keys; the one before is given back.
  FLASHPORT_DEVICE void stage_query(const DecodeParams& p, const Segment& s) {
    if (live_rows_ >= 0) {
      mbarrier_arrive_wave(&shared_.ring.query_free[query_.stage]);
      query_.next();
    }
    live_rows_ = maximum(minimum(kRows, p.group_size * s.q_len - s.row_tile * kRows), 0);
  }
  FLASHPORT_DEVICE void fetch_query(Query&) const {}

  // S = Q K^T
  FLASHPORT_DEVICE Scores mma_abt(const Query&, const char* keys) const {
    Scores scores;
    using QueryLayout = typename QueryTile<kCfg>::Layout;
    using KeyLayout = typename KvTiles<kCfg>::Keys;
    const char* query = reinterpret_cast<const char*>(shared_.ring.queries[query_.stage].panels) + first_row() * 128;
    fence_async_proxy();  // the copies have landed, and wgmma is to see them
    wgmma_begin();
    wgmma<kMath, false, false>(scores.c, panel_descriptor(query, 0), panel_descriptor(keys, 0));
#pragma unroll
    for (int step = 1; step < kShape.head_dim_qk / 16; ++step) {
      const auto at = [&](int panel_bytes) { return step / 4 * panel_bytes + step % 4 * 32; };
      wgmma<kMath, true, false>(scores.c, panel_descriptor(query, at(QueryLayout::kPanelBytes)),
                                panel_descriptor(keys, at(KeyLayout::kPanelBytes)));
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(scores.c);
    return scores;
  }

  // f(value, slot, key of the turn)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
    const int first = first_of_lane();
    for_each_register(scores.c, [&](float& x, int tile, int i) { f(x, i / 2, first + 8 * tile + i % 2); });
  }

  // P = exp2(S - m), where m is the largest score of a row so far; (l, O) come to that m.
  template <class State>
  FLASHPORT_DEVICE Operand exponentiate(State& state, Scores& scores) const {
    // Rows that nobody asks for leave the exponentials to other warps.
    if (16 * (block_.wave() % kRowWaves) >= live_rows_) return {};
    Rows most;
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      float x = maximum(scores.c[0][2 * slot], scores.c[0][2 * slot + 1]);
#pragma unroll
      for (int tile = 1; tile < kKeys / 8; ++tile) {
        x = maximum(x, maximum(scores.c[tile][2 * slot], scores.c[tile][2 * slot + 1]));
      }
      x = maximum(x, __shfl_xor_sync(~0u, x, 1));
      most[slot] = maximum(state.m[slot], maximum(x, __shfl_xor_sync(~0u, x, 2)));
    }
    Operand p;
    Rows reference, before;
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      reference[slot] = most[slot] == -kInfinity ? 0.0f : most[slot];
      before[slot] = exp2_approx(state.m[slot] - reference[slot]);
      state.m[slot] = most[slot];
      state.l[slot] = mul_rn(state.l[slot], before[slot]);
      p.sum[slot] = 0.0f;
    }
    for_each_register(scores.c, [&](float& x, int, int i) {
      x = exp2_approx(x - reference[i / 2]);
      p.sum[i / 2] += x;
    });
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = &scores.c[2 * step + i / 2][i % 2 * 2];
        p.a[step][i] = pack<kMath>(two[0], two[1]);
      }
    }
    for (auto& panel : state.o.c) {
      for_each_register(panel, [&](float& x, int, int i) { x = mul_rn(x, before[i / 2]); });
    }
    return p;
  }

  // (l, O) += (rowsum P, P V)
  template <class State>
  FLASHPORT_DEVICE void accumulate(State& state, const Operand& p, const char* values) const {
    fence_async_proxy();
#pragma unroll
    for (auto& panel : state.o.c) pin(panel);  // what exponentiate() wrote comes before
    constexpr int kValuePanelBytes = KvTiles<kCfg>::Values::kPanelBytes;
    const char* own = values + column_group() * (kColumnPanels * kValuePanelBytes);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int panel = 0; panel < kColumnPanels; ++panel) {
        wgmma<kMath, true, true>(state.o.c[panel], p.a[step],
                                 panel_descriptor(own, panel * kValuePanelBytes + step * 16 * 128));
      }
    }
    wgmma_commit();
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      float sum = p.sum[slot];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      state.l[slot] += sum;
    }
    wgmma_wait<0>();
#pragma unroll
    for (auto& panel : state.o.c) pin(panel);
  }

  FLASHPORT_DEVICE void clear(Out& out) const {
    for (auto& panel : out.c) {
      for_each_register(panel, [](float& x, int, int) { x = 0.0f; });
    }
  }

  // f(kept value, value, slot)
  template <class F>
  FLASHPORT_DEVICE void for_each_kept(Out& out, F&& f) const {
    float* kept = &shared_.partials[slice_].o[0][slice_threads_.thread()];
#pragma unroll
    for (int panel = 0; panel < kColumnPanels; ++panel) {
      for_each_register(out.c[panel], [&](float& x, int tile, int i) {
        f(kept[((panel * (kPanelColumns / 8) + tile) * 4 + i) * 128], x, i / 2);
      });
    }
  }

  // f(to, from, slot)
  template <class F>
  FLASHPORT_DEVICE void for_each_pair(Out& to, const Out& from, F&& f) const {
#pragma unroll
    for (int panel = 0; panel < kColumnPanels; ++panel) {
      for_each_register(to.c[panel], [&](float& x, int tile, int i) { f(x, from.c[panel][tile][i], i / 2); });
    }
  }

  // f(value, slot, column)
  template <class F>
  FLASHPORT_DEVICE void for_each_out(const Out& out, F&& f) const {
    const int first = first_column() + first_of_lane();
#pragma unroll
    for (int panel = 0; panel < kColumnPanels; ++panel) {
      for_each_register(out.c[panel], [&](const float& x, int tile, int i) {
        f(x, i / 2, first + panel * kPanelColumns + 8 * tile + i % 2);
      });
    }
  }

  // One row of the wave is each lane's to finish; lanes i and 16 + i have the same one.
  FLASHPORT_DEVICE int own_row() const { return 16 * (block_.wave() % kRowWaves) + block_.lane() % 16; }
  FLASHPORT_DEVICE bool writes_own_row() const { return column_group() == 0 && block_.lane() < 16; }
  FLASHPORT_DEVICE float of_own_row(const Rows& x) const {
    const int lane = block_.lane() % 8 * 4;
    const float low = __shfl_sync(~0u, x[0], lane), high = __shfl_sync(~0u, x[1], lane);
    return block_.lane() % 16 < 8 ? low : high;
  }

  // f(offset, factor, column, four values of the row to which offset and factor belong), row by row: so that code is
  // short and lines are written whole. They pass through the query's place, which has been read.
  template <class F>
  FLASHPORT_DEVICE void for_each_own_row(const Out& out, std::int64_t offset, float factor, F&& f) const {
    auto& query = shared_.ring.queries[query_.stage];
    constexpr int kPlaces = sizeof(query.panels) / sizeof(float) / kCfg.tuning.waves / 16;  // of a wave's row
    constexpr int kStaged = kPlaces < kPanelColumns ? kPlaces / 32 * 32 : kPanelColumns;    // columns
    constexpr int kTiles = kStaged / 8, kVectors = kStaged / 4, kRowsAtOnce = kWaveSize / kVectors;
    static_assert(kStaged > 0 && kPanelColumns % kStaged == 0);
    float* rows = reinterpret_cast<float*>(&query.panels) + block_.wave() * (16 * kStaged);
    // Rows whose number differs in the low bits lie in other banks.
    const auto place = [](int row, int column) { return row * kStaged + (column ^ row % kTiles * 8); };
    const int lane = block_.lane();
    block_.sync();  // all waves have read the query
#pragma unroll
    for (int first = 0; first < kColumnPanels * kPanelColumns; first += kStaged) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int slot = 0; slot < kRowSlots; ++slot) {
          const float* two = &out.c[first / kPanelColumns][first % kPanelColumns / 8 + tile][2 * slot];
          float* to = rows + place(lane / 4 + 8 * slot, 8 * tile + lane % 4 * 2);
          *reinterpret_cast<float2*>(to) = {two[0], two[1]};
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int row = lane / kVectors; row < 16; row += kRowsAtOnce) {
        const int column = lane % kVectors * 4;
        const auto x = *reinterpret_cast<const float4*>(rows + place(row, column));
        f(__shfl_sync(~0u, static_cast<long long>(offset), row), __shfl_sync(~0u, factor, row),
          first_column() + first + column, {x.x, x.y, x.z, x.w});
      }
      __syncwarp();
    }
  }

  // Live rows of the slice to memory: (m, l) [slice rows], tile [slice rows, slice columns].
  FLASHPORT_DEVICE void store_rows(const Rows& m, const Rows& l, float* to) const {
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      const int row = row_of(slot);
      if (block_.lane() % 4 != 0 || row >= live_rows_) continue;
      reinterpret_cast<float2*>(to)[row - first_row()] = {m[slot], l[slot]};
    }
  }
  FLASHPORT_DEVICE void store_tile(const Out& out, float* to) const {
#pragma unroll
    for (int slot = 0; slot < kRowSlots; ++slot) {
      if (row_of(slot) >= live_rows_) continue;
      float* row = to + static_cast<unsigned>((row_of(slot) - first_row()) * kSliceColumns + first_of_lane());
#pragma unroll
      for (int panel = 0; panel < kColumnPanels; ++panel) {
#pragma unroll
        for (int tile = 0; tile < kPanelColumns / 8; ++tile) {
          const float* two = &out.c[panel][tile][2 * slot];
          *reinterpret_cast<float2*>(row + panel * kPanelColumns + tile * 8) = {two[0], two[1]};
        }
      }
    }
  }

 private:
  // This warpgroup's number among those that share the columns.
  FLASHPORT_DEVICE int column_group() const { return kColumnGroups == 1 ? 0 : recompute(slice_); }
  // The lane's first column of a sum. Those of all its registers would stay in registers of their own from leaf to
  // leaf.
  FLASHPORT_DEVICE int first_of_lane() const { return recompute(2 * (block_.lane() % 4)); }

  // f(register, tile, i)
  template <class Tiles, class F>
  FLASHPORT_DEVICE static void for_each_register(Tiles& c, F&& f) {
    constexpr int kTiles = sizeof(c) / sizeof(c[0]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(c[tile][i], tile, i);
    }
  }

  const Block& block_;
  DecodeShared<kCfg>& shared_;
  int slice_;  // the warpgroup's number
  Block slice_threads_;
  int live_rows_ = -1;  // of the query tile; -1 before the first
  PipelineState<KvRing<kCfg>::kQueries> query_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
