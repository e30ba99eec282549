// Keys and values of fewer bits that TMA can read as bytes: one warp brings tiles as they are stored; two warps widen
// those of keys to the math type, two those of values; and two bring queries meanwhile. The warps that compute see
// 16-bit keys.
//
// A warp that widens has slots of its own, which lie apart from the stages and come several ahead: it waits neither for
// page numbers nor for memory. For the layout of a slot see stored_rows.h.
//   slot:  full    the boxes' bytes, which the copying warp announces    empty   the warp has read it
//   stage: full    the two warps of a tile have written it               empty   the consumers have read it
// Where two blocks share tiles (shared_tiles.h) each brings and widens its part of them, and `full` has the other's,
// too. Factors beside the rows come to the slot by cp.async of the warp that brings boxes, a row's by a lane, and are
// multiplied in while the row is in registers. `full` then counts the lanes too.
// A key after the last one of the sequence is a row of zeros: what its box has in its place is not read.
#pragma once

#include "common/device/kv/widen.h"
#include "cuda/attention/row_producers.h"
#include "cuda/attention/shared_tiles.h"
#include "cuda/attention/stored_rows.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The warp that brings boxes, of tensors or of pages. Lane b brings that of box_keys keys from key b * box_keys of a
// tile on, and leaves out those after the sequence's last key. Keys and values of a tile lie at the same places, which
// are looked up once, a tile ahead. The lanes together wait for every phase of a slot.
template <AttentionConfig kCfg>
class StoredBoxProducer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys;
  static_assert(kKeys == cuda_attention::kStoredRows * cuda_attention::kSlotsOfTile * cuda_attention::kWarpsOfTile);

 public:
  FLASHPORT_DEVICE StoredBoxProducer(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p),
        lane_(block.lane()),
        row_(block.lane() * p.box_keys),
        part_(Cluster(shares_tiles<kCfg>(p))),
        warp_(row_ < part_.rows ? part_.warp_of(row_) : 0),
        leads_slot_(row_ < part_.rows && row_ % cuda_attention::kStoredRows == 0),
        memory_(memory) {
    const int boxes = cuda_attention::kStoredRows / p.box_keys;
    slot_lanes_ = ((1u << boxes) - 1) << block.lane() / boxes * boxes;
    k_turn_.slot = v_turn_.slot = part_.slot_of(row_);
  }

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
    if (copies.tiles == 0) return;
    const std::int32_t* pages = kv::page_list(p_.cache, work.seq);
    const int kv_head = work.head / p_.group_size;
    const BoxPlaces k_places = places_of(p_.k_box, kv_head), v_places = places_of(p_.v_box, kv_head);
    int key = copies.range.begin * kKeys + part_.first_row + row_;  // the lane's first of a tile
    Place place = look_up(work, pages, key), last = place;
#pragma unroll 1
    for (int i = 0; i <= copies.tiles; ++i) {  // keys of a tile, then values of the tile before it
      const Place next = look_up(work, pages, key + kKeys);
      const int keys = work.kv_len - (copies.range.begin + i) * kKeys - part_.first_row;  // from the part's first on
      if (i < copies.tiles) {
        bring_boxes(0, k_turn_, p_.k_map, p_.k_box, k_places, p_.k_row_scales, kv_head, place, keys);
      }
      if (i > 0) {
        bring_boxes(cuda_attention::kWarpsOfTile, v_turn_, p_.v_map, p_.v_box, v_places, p_.v_row_scales, kv_head, last,
                    keys + kKeys);
      }
      last = place;
      place = next;
      key += kKeys;
    }
  }

 private:
  // Where the lane's box of a tile lies: its page, its first row there, and whether it is brought.
  struct Place {
    int page, first;
    bool there;
  };
  FLASHPORT_DEVICE Place look_up(const WorkTile& work, const std::int32_t* pages, int key) const {
    Place place = {p_.cu_seqlens_k == nullptr ? work.seq : 0, work.k_begin + key,
                   row_ < part_.rows && key < work.kv_len};
    if (pages != nullptr && place.there) {
      const kv::PageCoord at = kv::page_coord(p_.cache, pages, key);
      place.page = load_global(pages + at.page);
      place.first = at.offset;
    }
    return place;
  }

  // What is the same in all tiles of a head: where boxes of even and of odd tokens begin, and the slot's row of the
  // lane's first and second.
  struct BoxPlaces {
    int even_x, odd_x, z, first_row, second_row;
  };
  FLASHPORT_DEVICE BoxPlaces places_of(const StoredBox& box, int kv_head) const {
    const int row = row_ % cuda_attention::kStoredRows;
    const auto even = cuda_attention::stored_box_place(box, kv_head, 0, row, 0);
    const auto odd = cuda_attention::stored_box_place(box, kv_head, 0, row, 1);
    return {even.x, odd.x, even.z, even.row, odd.row};
  }

  // The block's part of a tile, whose first half goes to warp number `first_warp` of those that widen.
  FLASHPORT_DEVICE void bring_boxes(int first_warp, cuda_attention::StoredTurn& turn, const TensorMap& map,
                                    const StoredBox& box, const BoxPlaces& places, const KeyScales& scales, int kv_head,
                                    const Place& place, int keys) {
    auto& stored = memory_.stored;
    const int warp = first_warp + warp_;
    Barriers& barriers = stored.boxes[warp][turn.slot];
    unsigned char* const to = stored.bytes + (warp * stored.slots + turn.slot) * stored.slot_bytes();
    const int boxes = __popc(__ballot_sync(~0u, place.there) & slot_lanes_);
    if (leads_slot_) {
      mbarrier_wait(&barriers.empty, turn.phase ^ 1);
      mbarrier_expect(&barriers.full, boxes * p_.box_keys * box.row_bytes);
    }
    __syncwarp();
    const int last = place.there ? cuda_attention::boxes_of_place(box) : 0;
#pragma unroll 1
    for (int i = 0; i < last; ++i) {
      const int token = place.first + i;
      copy_box(to + (i == 0 ? places.first_row : places.second_row) * box.row_bytes, &map,
               token % 2 == 0 ? places.even_x : places.odd_x, token / cuda_attention::boxes_of_place(box), places.z,
               place.page, &barriers.full);
    }
    __syncwarp();
    if constexpr (has(kCfg.shape.sources, KeySources::kScaled)) {
      if (scales.data != nullptr) {
        bring_factors(first_warp, __shfl_sync(~0u, turn.slot, 0), scales, kv_head, place, keys);
      }
    }
    turn.skip(part_.slots, stored.slots);
  }

  // The part's factors, of which the lane brings those of a row of each slot; the first slots of the tile's warps
  // are number `first_slot`. Zeros where there is no key: anything may be there before, and the row is zeros.
  FLASHPORT_DEVICE void bring_factors(int first_warp, int first_slot, const KeyScales& scales, int kv_head,
                                      const Place& place, int keys) const {
    constexpr int kRows = cuda_attention::kStoredRows;
    auto& stored = memory_.stored;
    const cuda_attention::Factors factors = cuda_attention::factors_of(scales);
    const int bytes = cuda_attention::factor_bytes(factors), box_keys = p_.box_keys;
#pragma unroll 1
    for (int row = lane_; row < part_.rows; row += kRows) {
      const int box = row / box_keys, page = __shfl_sync(~0u, place.page, box);
      const int token = __shfl_sync(~0u, place.first, box) + row % box_keys;
      const bool is_there = row < keys;
      const std::int64_t element = is_there ? kv::scale_element(scales, {page, token}, kv_head) : 0;
      const char* from = static_cast<const char*>(scales.data) + element * factor_bytes(scales);
      const int warp = first_warp + part_.warp_of(row);
      int slot = first_slot + part_.slot_of(row);
      if (slot >= stored.slots) slot -= stored.slots;
      unsigned char* to = stored.bytes + (warp * stored.slots + slot) * stored.slot_bytes() + stored.pitch * kRows +
                          lane_ * cuda_attention::factor_pitch(factors);
      if (factors == cuda_attention::Factors::kOfRow) {
        const int before = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 4);
        copy_async_first<4>(to, from - before, is_there ? before + factor_bytes(scales) : 0);
      } else {
#pragma unroll 1
        for (int byte = 0; byte < bytes; byte += 16) copy_async<16>(to + byte, from + byte, is_there);
      }
      mbarrier_arrive_on_copies(&stored.boxes[warp][slot].full);
    }
  }

  const AttentionParams& p_;
  const int lane_;
  const int row_;  // the lane's first of the part
  const TilePart part_;
  const int warp_;         // of those of a tile, that the lane's rows come to
  const bool leads_slot_;  // the lane has the first rows of a slot
  unsigned slot_lanes_;    // those whose boxes come to the lane's slot
  Memory& memory_;
  cuda_attention::StoredTurn k_turn_, v_turn_;  // of the lane's slot of a tile
};

// A warp that brings its share of the queries: boxes of the math type, boxes of bf16 that it converts where they lie,
// or rows.
template <AttentionConfig kCfg>
class QueryProducer {
  using Memory = AttentionMemory<kCfg>;

 public:
  // `first_wave`: of those that share them.
  FLASHPORT_DEVICE QueryProducer(const AttentionParams& p, const Block& block, Memory& memory, int first_wave)
      : p_(p),
        lane_(block.lane()),
        warp_(block.wave() - first_wave),
        converts_(converts_queries<kCfg>(p)),
        rows_(p, block, memory, first_wave),
        memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    if (copies_of<kCfg>(p_, work).tiles == 0) return;
    if (!converts_) return rows_.bring_queries(work, {warp_, cuda_attention::kStoredQueryWarps});
    if (warp_ == 0 && lane_ == 0) bring_box(work);
    __syncwarp();
    mbarrier_wait(&memory_.stored.queries_landed, static_cast<unsigned>(turns_) & 1);
    convert();
    fence_async_proxy();
    mbarrier_arrive_wave(&memory_.query_barriers[0].full);
    ++turns_;
  }

 private:
  using Queries = typename Memory::Queries;
  static constexpr int kPanels = Queries::kBytes / Queries::kPanelSize;

  FLASHPORT_DEVICE void bring_box(const WorkTile& work) {
    std::uint64_t* const landed = &memory_.stored.queries_landed;
    await_empty(memory_.query_barriers, turns_);
    mbarrier_expect(landed, Queries::kBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      copy_box(memory_.queries[0].x[panel], &p_.q_map, panel * kPanelColumns, work.q_begin + work.first_row, work.head,
               p_.cu_seqlens_q == nullptr ? work.seq : 0, landed);
    }
  }
  FLASHPORT_DEVICE void convert() const {
    constexpr int kThreads = cuda_attention::kStoredQueryWarps * kWaveSize;
    auto* const vectors = reinterpret_cast<uint4*>(memory_.queries[0].x[0]);
    constexpr int kVectors = Queries::kBytes / static_cast<int>(sizeof(uint4));
#pragma unroll 1  // code that is longer makes the loops that widen 4 to 8% slower
    for (int i = warp_ * kWaveSize + lane_; i < kVectors; i += kThreads) {
      const uint4 four = vectors[i];
      vectors[i] = {bf16_to_halves(four.x), bf16_to_halves(four.y), bf16_to_halves(four.z), bf16_to_halves(four.w)};
    }
  }

  const AttentionParams& p_;
  const int lane_, warp_;
  const bool converts_;
  RowProducer<kCfg> rows_;
  Memory& memory_;
  int turns_ = 0;
};

// A warp that widens half of the block's rows of every tile, of keys or of values: so it has one format, and asks which
// outside of the loop over tiles.
template <AttentionConfig kCfg>
class RowWidener {
  using Factors = cuda_attention::Factors;
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys, kStages = kCfg.tuning.stages, kPanelSize = Memory::Keys::kPanelSize;
  static_assert(kWaveSize == cuda_attention::kStoredRows);
  static_assert(value_stages(kCfg.tuning) == kStages && Memory::Values::kBytes == Memory::Keys::kBytes);
  static_assert(kCfg.shape.head_dim_qk == cuda_attention::kStoredDim &&
                kCfg.shape.head_dim_v == kCfg.shape.head_dim_qk);

 public:
  FLASHPORT_DEVICE RowWidener(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p),
        warp_(block.wave() % cuda_attention::kWideningWarps),
        of_values_(warp_ >= cuda_attention::kWarpsOfTile),
        is_paired_((of_values_ ? p.v_box : p.k_box).pair_bytes != 0),
        cluster_(shares_tiles<kCfg>(p)),
        first_row_(TilePart(cluster_).first_row +
                   warp_ % cuda_attention::kWarpsOfTile * TilePart(cluster_).slots * kWaveSize),
        row_(first_row_ + (is_paired_ ? cuda_attention::paired_row(block.lane()) : block.lane())),
        memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
    if (copies.tiles == 0) return;
    kv::with_format(of_values_ ? p_.v_format : p_.k_format, [&](auto constant) FLASHPORT_INLINE {
      constexpr KvFormat kFormat = constant;
      if constexpr (is_narrow(kFormat)) {
        const auto widen = [&](auto factors) FLASHPORT_INLINE {
          widen_tiles<kFormat, factors>(copies.tiles, work.kv_len - (copies.range.begin * kKeys + row_), shift_of(work),
                                        begin_of_factor(work));
        };
        if constexpr (has(kCfg.shape.sources, KeySources::kScaled) && cuda_attention::may_have_factors(kFormat)) {
          switch (cuda_attention::factors_of(scales())) {
            case Factors::kOfRow: return widen(Constant<Factors::kOfRow>());
            case Factors::kHalves: return widen(Constant<Factors::kHalves>());
            case Factors::kNone: break;
          }
        }
        widen(Constant<Factors::kNone>());
      }
    });
  }

 private:
  // Bytes before the lane's rows in their places. Pages and tiles begin with even tokens.
  FLASHPORT_DEVICE int shift_of(const WorkTile& work) const {
    const int first = p_.cache.table == nullptr ? work.k_begin : 0;
    return cuda_attention::stored_row_shift(of_values_ ? p_.v_box : p_.k_box, work.head / p_.group_size, first + row_);
  }
  FLASHPORT_DEVICE const KeyScales& scales() const { return of_values_ ? p_.v_row_scales : p_.k_row_scales; }
  FLASHPORT_DEVICE int begin_of_factor(const WorkTile& work) const {
    return cuda_attention::factor_begin(scales(), reinterpret_cast<std::uintptr_t>(scales().data),
                                        work.head / p_.group_size);
  }

  // The tiles of a work tile. `keys`: from the lane's first row of the first tile to the sequence's last key. `begin`:
  // of a row's factor in its word.
  template <KvFormat kFormat, Factors kFactors>
  FLASHPORT_DEVICE void widen_tiles(int tiles, int keys, int shift, int begin) {
    auto& stored = memory_.stored;
    Barriers* const boxes = stored.boxes[warp_];
    const int row_bytes = of_values_ ? p_.v_box.row_bytes : p_.k_box.row_bytes;
    const int slots = stored.slots, slot_bytes = stored.slot_bytes(), slots_of_tile = TilePart(cluster_).slots;
    const int place = is_paired_ ? cuda_attention::paired_place(row_ % kWaveSize) : row_ % kWaveSize;
    const unsigned char* const first = stored.bytes + warp_ * slots * slot_bytes + place * row_bytes;
    const unsigned char* const first_factor = stored.bytes + warp_ * slots * slot_bytes + stored.pitch * kWaveSize +
                                              row_ % kWaveSize * cuda_attention::factor_pitch(kFactors) + begin;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      unsigned char* to = stage();
#pragma unroll 1
      for (int n = 0; n < slots_of_tile; ++n) {
        Barriers& slot = boxes[turn_.slot];
        const unsigned char* const from = n * kWaveSize < keys ? first + turn_.slot * slot_bytes : stored.zeros;
        mbarrier_wait(&slot.full, turn_.phase);
        if constexpr (kFactors == Factors::kNone) {
          const auto row = load_row<kFormat>(from, shift != 0);
          mbarrier_arrive_wave(&slot.empty);
          if (n == 0) await_stage();
          widen_row<kFormat>(to, row);
        } else {
          if (n == 0) await_stage();
          multiply_row<kFormat, kFactors>(to, from, first_factor + turn_.slot * slot_bytes);
          mbarrier_arrive_wave(&slot.empty);
        }
        to += kWaveSize * 128;
        turn_.skip(1, slots);
      }
      fence_async_proxy();
      hand_over();
      keys -= kKeys;
      stage_.next();
    }
  }

  FLASHPORT_DEVICE unsigned char* stage() const {
    return (of_values_ ? memory_.values[0].x[0] : memory_.keys[0].x[0]) + stage_.stage * Memory::Keys::kBytes;
  }
  FLASHPORT_DEVICE Barriers& barriers() const {
    return (of_values_ ? memory_.value_barriers : memory_.key_barriers)[stage_.stage];
  }
  // Until the stage may be written, by this block and by the other one; which of the stage here is told by one warp.
  FLASHPORT_DEVICE void await_stage() const {
    mbarrier_wait(&barriers().empty, stage_.phase ^ 1);
    if (!cluster_.shares()) return;
    auto& of_cluster = memory_.cluster;
    std::uint64_t* const free = &(of_values_ ? of_cluster.free_values : of_cluster.free_keys)[stage_.stage];
    __syncwarp();
    if (warp_ % cuda_attention::kWarpsOfTile == 0 && threadIdx.x % kWaveSize == 0) {
      mbarrier_arrive_in_block(address_in_block(free, cluster_.other()));
    }
    mbarrier_wait(free, stage_.phase);
  }
  // The warp's rows of the stage, to this block's consumers and to those of the other.
  FLASHPORT_DEVICE void hand_over() const {
    Barriers& of_stage = barriers();
    if (!cluster_.shares()) return mbarrier_arrive_wave(&of_stage.full);
    __syncwarp();
    if (threadIdx.x % kWaveSize != 0) return;
    constexpr int kBytes = kWaveSize * 128, kPanels = Memory::Keys::kBytes / kPanelSize;  // of a panel
    mbarrier_expect(&of_stage.full, kPanels * kBytes);                                    // of the other block's rows
    const unsigned full = address_in_block(&of_stage.full, cluster_.other());
    for (int panel = 0; panel < kPanels; ++panel) {
      const unsigned char* rows = stage() + panel * kPanelSize + first_row_ * 128;
      copy_to_block(address_in_block(rows, cluster_.other()), rows, kBytes, full);
    }
  }

  template <KvFormat kFormat>
  using Row = cuda_attention::RegisterRow<(kv_row_bytes(kFormat, cuda_attention::kStoredDim) + 15) / 16>;
  // From whole vectors. `has_shift`: the row begins in the middle of the first one, and ends with the last.
  template <KvFormat kFormat>
  FLASHPORT_DEVICE static Row<kFormat> load_row(const unsigned char* from, bool has_shift) {
    constexpr int kVectors = sizeof(Row<kFormat>) / 16;
    Row<kFormat> row;
    const auto load = [&](int vector, int word) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[vector];
      row.words[word] = four.x, row.words[word + 1] = four.y;
      row.words[word + 2] = four.z, row.words[word + 3] = four.w;
    };
    if constexpr (kv_row_bytes(kFormat, cuda_attention::kStoredDim) % 16 == 8) {
      if (has_shift) {
        const uint2 two = reinterpret_cast<const uint2*>(from)[1];
        row.words[0] = two.x, row.words[1] = two.y;
#pragma unroll
        for (int i = 1; i < kVectors; ++i) load(i, 4 * i - 2);
        return row;
      }
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) load(i, 4 * i);
    return row;
  }

  // To the lane's place in 32 rows.
  template <KvFormat kFormat>
  FLASHPORT_DEVICE void widen_row(unsigned char* to, const Row<kFormat>& row) const {
#pragma unroll
    for (int unit = 0; unit < cuda_attention::kStoredDim / kv::kUnitValues; ++unit) {
      unsigned x[8];
      kv::widen_unit<kFormat>(x, row, unit);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<uint4*>(to + cuda_attention::widened_place(row_, 2 * unit + i, kPanelSize)) = {
            x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
      }
    }
  }
  // The same of a row and its factors in shared memory, half a row at a time: whole ones would take more registers than
  // a lane has.
  template <KvFormat kFormat, Factors kFactors>
  FLASHPORT_DEVICE void multiply_row(unsigned char* to, const unsigned char* from, const unsigned char* factors) const {
    constexpr int kDims = cuda_attention::kStoredDim / 2, kBytes = kv_row_bytes(kFormat, kDims);
    using HalfRow = cuda_attention::RegisterRow<kBytes / 16>;
    kv::Factor of_row = {};
    if constexpr (kFactors == Factors::kOfRow) of_row = load_factor(factors);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      HalfRow row;
      cuda_attention::RegisterRow<1> pairs;  // of factors
      load_vectors<kBytes / 16>(row.words, from);
      if constexpr (kFactors == Factors::kHalves) load_vectors<1>(pairs.words, factors);
#pragma unroll
      for (int vector = 0; vector < kDims / 8; ++vector) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const Words2 two = kv::widen_four<kFormat>(row, 8 * vector + 2 * i);
          x[i] = two.x, x[i + 1] = two.y;
        }
        if constexpr (kFactors == Factors::kHalves) {
          const unsigned both = kv::both_halves(pairs.half(2 * vector));
#pragma unroll
          for (unsigned& two : x) two = multiply_halves(two, both);
        } else {
#pragma unroll
          for (unsigned& two : x) two = kv::multiply_halves(two, of_row);
        }
        *reinterpret_cast<uint4*>(to + cuda_attention::widened_place(row_, vector, kPanelSize)) = {x[0], x[1], x[2],
                                                                                                   x[3]};
      }
      from += kBytes;
      factors += 16;
      to += kPanelSize;
    }
  }
  FLASHPORT_DEVICE kv::Factor load_factor(const unsigned char* from) const {
    if (scales().dtype == DType::kFloat32) return kv::factor_of(*reinterpret_cast<const float*>(from));
    return {kv::both_halves(*reinterpret_cast<const std::uint16_t*>(from)), 0, kv::half_twice(1.0f)};
  }
  template <int kVectors>
  FLASHPORT_DEVICE static void load_vectors(unsigned* words, const unsigned char* from) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i];
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
  }

  const AttentionParams& p_;
  const int warp_;  // of those that widen
  const bool of_values_, is_paired_;
  const Cluster cluster_;
  const int first_row_, row_;  // of every tile, the warp's first and the lane's
  Memory& memory_;
  cuda_attention::StoredTurn turn_;
  PipelineState<kStages> stage_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
