// The producer warps that bring biases to the stages that BiasReader reads (bias_reader.h): for each part of a key
// tile, those of each warpgroup's queries.
#pragma once

#include "cuda/attention/copies.h"
#include "cuda/attention/row_producers.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The lane that brings boxes, of biases that TMA can read.
template <AttentionConfig kCfg>
class BiasBoxProducer {
  using Memory = AttentionMemory<kCfg>;

 public:
  FLASHPORT_DEVICE BiasBoxProducer(const AttentionParams& p, Memory& memory) : p_(p), memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    constexpr int kKeys = kCfg.tuning.keys;
    const Copies copies = copies_of<kCfg>(p_, work);
    const int head = p_.bias.stride_head == 0 ? 0 : work.head, seq = p_.bias.stride_seq == 0 ? 0 : work.seq;
#pragma unroll 1
    for (int key = copies.range.begin * kKeys; key < copies.range.end * kKeys; key += kPanelColumns) {
#pragma unroll
      for (int group = 0; group < consumer_groups(kCfg.tuning); ++group) {
        Barriers& barriers = memory_.bias.barriers[group][pipe_.stage];
        mbarrier_wait(&barriers.empty, pipe_.phase ^ 1);
        mbarrier_expect(&barriers.full, 64 * kBiasPartBytes);
        copy_box(memory_.bias.x[group].stages[pipe_.stage].rows, &p_.bias_map, key, work.first_row + 64 * group, head,
                 seq, &barriers.full);
      }
      pipe_.next();
    }
  }

 private:
  const AttentionParams& p_;
  Memory& memory_;
  PipelineState<Memory::Biases::kStages> pipe_;
};

// A warp that brings rows, of one warpgroup's queries or of both, 16 bytes a lane. No read passes the end of a row; one
// may begin before its first bias, in the same 16 bytes.
template <AttentionConfig kCfg>
class BiasRowProducer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys;
  static constexpr int kGroups = consumer_groups(kCfg.tuning), kGroupRows = 64;
  static constexpr int kLanes = kBiasPartBytes / 16, kRowsAtOnce = kWaveSize / kLanes;  // lanes of a row
  static_assert(kGroups == 2);

 public:
  FLASHPORT_DEVICE BiasRowProducer(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), lane_(block.lane()), first_group_(3 - block.wave()), step_(bias_row_warps(p)), memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
    const int size = p_.bias.dtype == DType::kFloat32 ? 4 : 2, part_keys = kBiasPartBytes / size;
    const std::int64_t stride = p_.bias.stride_row * size;
    const char* first = static_cast<const char*>(p_.bias.data) +
                        (work.seq * p_.bias.stride_seq + work.head * p_.bias.stride_head) * size +
                        work.first_row * stride;
    // Parts that begin before this key lie inside every row, with 16 bytes to spare.
    const int whole_end = work.first_row + kCfg.tuning.rows > work.q_len ? 0 : work.kv_len - part_keys - 16 / size + 1;
#pragma unroll 1
    for (int key = copies.range.begin * kKeys; key < copies.range.end * kKeys; key += part_keys) {
#pragma unroll 1
      for (int group = first_group_; group < kGroups; group += step_) {
        Barriers& barriers = memory_.bias.barriers[group][pipe_.stage];
        mbarrier_wait(&barriers.empty, pipe_.phase ^ 1);
        const Rows rows = {first + group * kGroupRows * stride + std::int64_t{key} * size, stride,
                           memory_.bias.x[group].stages[pipe_.stage].rows};
        if (key < whole_end) {
          copy<false>(rows, {});
        } else {
          const int keys_left = minimum(work.kv_len - key, part_keys);
          copy<true>(rows, {work.q_len - work.first_row - group * kGroupRows, keys_left * size});
        }
        mbarrier_arrive_on_copies(&barriers.full);
      }
      pipe_.next();
    }
  }

 private:
  // A part of a warpgroup's rows: where the first one's begins, bytes from row to row, and where they go.
  struct Rows {
    const char* from;
    std::int64_t stride;
    unsigned char* to;
  };
  // How many of the rows are queries, and how many bytes each has in the part.
  struct Ends {
    int rows, bytes;
  };

  // kEnds: rows may end here, or be none.
  template <bool kEnds>
  FLASHPORT_DEVICE void copy(const Rows& rows, const Ends& ends) const {
    const int first_row = lane_ / kLanes, vector = lane_ % kLanes;
    const char* from = rows.from + first_row * rows.stride;
    [[maybe_unused]] constexpr int kTogether = kEnds ? 1 : kGroupRows / kRowsAtOnce;
#pragma unroll kTogether
    for (int i = 0; i < kGroupRows / kRowsAtOnce; ++i) {
      copy_vector<kEnds>(rows, ends, first_row + i * kRowsAtOnce, vector, from);
      from += kRowsAtOnce * rows.stride;
    }
    // A ninth vector, of rows that begin between multiples of 16 bytes; here a lane has whole rows.
    from = rows.from + lane_ * rows.stride;
#pragma unroll
    for (int row = 0; row < kGroupRows; row += kWaveSize) {
      if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
        copy_vector<kEnds>(rows, ends, row + lane_, kLanes, from);
      }
      from += kWaveSize * rows.stride;
    }
  }
  // One of the vectors of 16 bytes that have a row's part, which begins at `first`.
  template <bool kEnds>
  FLASHPORT_DEVICE static void copy_vector(const Rows& rows, const Ends& ends, int row, int vector, const char* first) {
    const auto address = reinterpret_cast<std::uintptr_t>(first + 16 * vector);
    const auto* from = reinterpret_cast<const char*>(address / 16 * 16);
    unsigned char* to = rows.to + row * kBiasPitch + 16 * vector;
    if constexpr (kEnds) {
      const int left = ends.bytes + static_cast<int>(address % 16) - 16 * vector;
      copy_async_first<16>(to, from, row < ends.rows ? minimum(maximum(left, 0), 16) : 0);
    } else {
      copy_async_unit(shared_address(to), from);
    }
  }

  const AttentionParams& p_;
  const int lane_, first_group_, step_;
  Memory& memory_;
  PipelineState<Memory::Biases::kStages> pipe_;
};

// A warp that brings its share of the biases, its share of other rows (RowProducer), or both, biases first.
template <AttentionConfig kCfg>
class BiasAndRowProducer {
 public:
  FLASHPORT_DEVICE BiasAndRowProducer(const AttentionParams& p, const Block& block, AttentionMemory<kCfg>& memory)
      : brings_biases_(p.bias.has_map == 0 && block.wave() > 3 - bias_row_warps(p)),
        brings_rows_(block.wave() != 3),
        biases_(p, block, memory),
        rows_(p, block, memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    if (brings_biases_) biases_.bring(work);
    if (brings_rows_) rows_.bring(work);
  }

 private:
  const bool brings_biases_, brings_rows_;
  BiasRowProducer<kCfg> biases_;
  RowProducer<kCfg> rows_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
