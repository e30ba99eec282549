// The tile verbs of kernels of blocks that also read segments of 16 bits ("wide" ones): each turn is of one segment,
// and multiplies its keys and values as they are stored.
//
// A turn of 16 bits has 64 keys, of two parts that a wave takes each, in the type of the queries. Its values become
// operands in the order that the columns of blocks have, so that both add to one state.
#pragma once

#include "cuda/decode/tiles.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
  requires(kCfg.shape.has_wide_segments)
class DecodeTiles<kCfg> : public MmaTiles<kCfg> {
  using Base = MmaTiles<kCfg>;
  using Base::kColGroups, Base::kColTiles, Base::kPartTiles, Base::kStepPairs, Base::kShape;
  static constexpr int kWideParts = 2, kPartKeys = 16 * kPartTiles;
  static_assert(kShape.rows == 8 && kCfg.tuning.leaves == 2 && kWideParts * kPartKeys == 2 * kWideLeafKeys);
  static_assert(Base::kColWaves >= kWideParts && kShape.head_dim_qk == kShape.head_dim_v);
  static_assert(kShape.k_format == kShape.v_format && !chooses_formats(kShape));
  using Layout = WideRows<kCfg, kShape.head_dim_qk>;

 public:
  using typename Base::Operand, typename Base::Out, typename Base::Query, typename Base::Rows, typename Base::Scores;
  static constexpr float kScoreUnit = 1.0f;  // of both (turn_score_unit())

  FLASHPORT_DEVICE DecodeTiles(const SegmentsDecodeParams& p, const Block& block, DecodeShared<kCfg>& shared)
      : Base(p, block, shared), is_bf16_(p.q.dtype == DType::kBFloat16) {}

  FLASHPORT_DEVICE void begin_turn(const SegmentsDecodeParams& p, const Segment& s, const TurnKeys& turn) {
    turn_ = turn;
    query_row_ = nullptr;
    if (!turn_.is_wide && !has_bias(p)) return;
    // A lane's row of the query. Those that the tile does not have are not stored: any will do.
    const QueryRow row = query_row(p, s, kShape.rows, this->g_ < this->live_rows() ? this->g_ : 0);
    if (has_bias(p)) {  // four lines of each row's: of this turn, and in fp16 of the next one
      constexpr int kLine = 128;
      const LogitBias& bias = p.bias;
      const int size = bias.dtype == DType::kFloat16 ? 2 : 4;
      const int key = minimum(turn_.position + this->c_ * (kLine / size), p.cache.max_len - 1);
      const std::int64_t at = s.seq * bias.stride_seq + row.head * bias.stride_head + key * bias.stride_key;
      prefetch_l1(static_cast<const char*>(bias.data) + at * size);
    }
    if (!turn_.is_wide) return;
    query_row_ = static_cast<const std::uint16_t*>(p.q.data) + query_offset(p, s, p.q, row) + 2 * this->c_;
  }
  FLASHPORT_DEVICE const TurnKeys& turn() const { return turn_; }
  // What scores of the turn are to be multiplied by, beside their scale.
  FLASHPORT_DEVICE float turn_score_unit() const { return turn_.is_wide ? 1.0f : Base::kScoreUnit; }

  template <class KeyTiles>
  FLASHPORT_DEVICE Scores mma_abt(const Query& query, const KeyTiles& keys) const {
    if (!turn_.is_wide) return Base::mma_abt(query, keys);
    return is_bf16_ ? wide_scores<MathType::kBf16>(keys) : wide_scores<MathType::kFp16>(keys);
  }

  // f(value, slot, key of the turn)
  template <class F>
  FLASHPORT_DEVICE void for_each(Scores& scores, F&& f) const {
    if (!turn_.is_wide) return Base::for_each(scores, f);
    for_each_wide(scores, [&](float& x, int key_tile, int i) { f(x, i % 2, wide_key(key_tile, i / 2)); });
  }

  template <class State>
  FLASHPORT_DEVICE Operand exponentiate(const State& state, Scores& scores) {
    if (!turn_.is_wide) return Base::exponentiate(state, scores);
    this->buffer_ ^= 1;
    if (!has_part()) return {};
    Rows m, l;
    reduce_wide_rows(scores, m, [](float a, float b) { return maximum(a, b); });
    for_each_wide(scores, [&](float& x, int, int i) { x = exp2_approx(x - Base::finite(m[i % 2])); });
#pragma unroll
    for (int key_tile = 0; key_tile < kPartTiles; ++key_tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto& c = scores.c[key_tile][0];
        *reinterpret_cast<unsigned*>(
            this->shared_.probabilities_of(this->buffer_, wide_key(key_tile, half), 2 * this->c_)) =
            is_bf16_ ? pack<MathType::kBf16>(c[2 * half], c[2 * half + 1])
                     : pack<MathType::kFp16>(c[2 * half], c[2 * half + 1]);
      }
    }
    reduce_wide_rows(scores, l, [](float a, float b) { return a + b; });
    if (this->g_ == 0) this->row_stats(recompute(this->col_wave_), 0) = {m[0], m[1], l[0], l[1]};
    return {};
  }

  template <class State, class ValueTiles>
  FLASHPORT_DEVICE void accumulate(State& state, const Operand& operand, const ValueTiles& values) const {
    if (!turn_.is_wide) return Base::accumulate(state, operand, values);
    Rows weights[kWideParts];
    this->weigh_parts(state, weights);
    if (is_bf16_) {
      add_wide_values<MathType::kBf16>(state.o, weights, values);
    } else {
      add_wide_values<MathType::kFp16>(state.o, weights, values);
    }
  }

 private:
  // Whether the wave has a part of a wide turn.
  FLASHPORT_DEVICE bool has_part() const { return Base::kColWaves == kWideParts || this->col_wave_ < kWideParts; }
  // The first key of a part in its tile.
  static constexpr int row_of_part(int part) { return turn_tiles(kCfg) == 1 ? part * kPartKeys : 0; }
  FLASHPORT_DEVICE int wide_key(int key_tile, int half) const {
    return this->col_wave_ * kPartKeys + 16 * key_tile + 8 * half + this->g_;
  }
  // Where the head that the team works on begins in a row.
  FLASHPORT_DEVICE int first_byte() const { return Layout::head_offset(this->block_.team(), 0, true); }

  // f(score, tile of 16 keys, its register), of the wave's part.
  template <class F>
  FLASHPORT_DEVICE void for_each_wide(Scores& scores, F&& f) const {
#pragma unroll
    for (int key_tile = 0; key_tile < kPartTiles; ++key_tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(scores.c[key_tile][0][i], key_tile, i);
    }
  }
  template <class Join>
  FLASHPORT_DEVICE void reduce_wide_rows(Scores& scores, Rows& rows, const Join& join) const {
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      float& all = rows[slot];
#pragma unroll
      for (int key_tile = 0; key_tile < kPartTiles; ++key_tile) {
        const auto& c = scores.c[key_tile][0];
        const float x = join(c[slot], c[slot + 2]);
        all = key_tile == 0 ? x : join(all, x);
      }
#pragma unroll
      for (int distance = 4; distance < kWaveSize; distance *= 2) {
        all = join(all, __shfl_xor_sync(~0u, all, distance));
      }
    }
  }

  // S^T = K Q^T of the wave's part. Tiles that have none of it are given back at once.
  template <MathType kMath, class KeyTiles>
  FLASHPORT_DEVICE Scores wide_scores(const KeyTiles& keys) const {
    Scores sums[2] = {};
    if (turn_tiles(kCfg) > 1 && this->col_wave_ > 0) go_to_next_tile(keys);
    if (has_part()) {
      const int lane = this->block_.lane(), part = recompute(this->col_wave_);
      const LanePlaces<Layout, Layout::kHeadBytes> places(row_of_part(1) * part + lane % 16, lane / 16 * 16,
                                                          first_byte());
      const char* tile = current_tile(keys);
      unsigned words[kStepPairs][4];  // of the query, which is in L1
#pragma unroll
      for (int pair = 0; pair < kStepPairs; ++pair) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[pair][i] = *reinterpret_cast<const unsigned*>(query_row_ + 32 * pair + 8 * i);
      }
#pragma unroll
      for (int pair = 0; pair < kStepPairs; ++pair) {
#pragma unroll
        for (int key_tile = 0; key_tile < kPartTiles; ++key_tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            unsigned a[4];
            ldmatrix_x4(a, places.at(tile, 16 * key_tile, 64 * pair + 32 * half));
            mma<kMath>(sums[half].c[key_tile][0], a, words[pair][2 * half], words[pair][2 * half + 1]);
          }
        }
      }
      for_each_wide(sums[0], [&](float& x, int key_tile, int i) { x += sums[1].c[key_tile][0][i]; });
    }
    if (turn_tiles(kCfg) > 1 && this->col_wave_ == 0) go_to_next_tile(keys);
    return sums[0];
  }

  // O^T += V^T P^T. Columns of blocks lie in pairs in rows g and g + 8 of an operand: two words of two keys each have
  // what ldmatrix would bring in the order of the columns.
  template <MathType kMath, class ValueTiles>
  FLASHPORT_DEVICE void add_wide_values(Out& out, const Rows (&weights)[kWideParts], const ValueTiles& values) const {
    const int lane = this->block_.lane(), row = 2 * recompute(this->c_);
    const int first_tile = recompute(this->col_wave_ * kColTiles);
    const int first_block = this->v_format_.with([&](auto format) {
      return this->template as_operand<typename Base::template Values<format()>>(this->values_)
          .first_block(recompute(this->col_wave_ * kColGroups));
    });
    const DimOrder order = dim_order(kShape.v_format);
    unsigned columns[kColTiles];  // where the lane's columns lie in rows of even numbers, of the first such row
#pragma unroll
    for (int tile = 0; tile < kColTiles; ++tile) {
      const int byte = first_byte() + 2 * value_column(order, first_block, first_tile + tile, recompute(this->g_), 0);
      columns[tile] = Layout::row_offset(row) + (byte ^ Layout::swizzle(row));
    }
#pragma unroll
    for (int part = 0; part < kWideParts; ++part) {
      if (part > 0 && turn_tiles(kCfg) > 1) go_to_next_tile(values);
      const char* keys_of_part = current_tile(values) + Layout::row_offset(row_of_part(part));
      unsigned b[4];
      ldmatrix_x4_trans(b, this->shared_.probabilities_of(this->buffer_, kPartKeys * part + lane, 0));
#pragma unroll
      for (int tile = 0; tile < kColTiles; ++tile) {
        float sum[4] = {};
#pragma unroll
        for (int half = 0; half < kPartTiles; ++half) {
          unsigned a[4];
#pragma unroll
          for (int eight = 0; eight < 2; ++eight) {
            const char* at = keys_of_part + Layout::row_offset(16 * half + 8 * eight);
            const auto even = *reinterpret_cast<const unsigned*>(at + columns[tile]);
            const auto odd =
                *reinterpret_cast<const unsigned*>(at + Layout::kPitch + (columns[tile] ^ Layout::swizzle(1)));
            a[2 * eight] = __byte_perm(even, odd, 0x5410);
            a[2 * eight + 1] = __byte_perm(even, odd, 0x7632);
          }
          mma<kMath>(sum, a, b[2 * half], b[2 * half + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) out.c[tile][0][i] = fma_rn(sum[i], weights[part][i % 2], out.c[tile][0][i]);
      }
    }
  }

  const bool is_bf16_;  // the queries and segments of 16 bits
  TurnKeys turn_{};
  const std::uint16_t* query_row_ = nullptr;  // the lane's part of its row
};

}  // namespace flashport::FLASHPORT_TARGET::decode
