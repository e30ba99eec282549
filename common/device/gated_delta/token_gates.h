// The decay of a state and its learning rate, for one token and value head.
#pragma once

#include <type_traits>

#include "common/device/core/scalar_access.h"
#include "common/device/gated_delta/config.h"
#include "common/device/gated_delta/gate.h"
#include FLASHPORT_STATE_TILE_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

// Gates computed from A_log, a and dt_bias, and rates from b. The constructor loads them with the other inputs; apply()
// computes.
template <GatedDeltaConfig kCfg>
class MadeGates {
  using Tile = StateTile<kCfg>;
  static constexpr bool kPerKey = kCfg.shape.gate == GateForm::kKey;

 public:
  // row(rows, head): the offset of the token's row.
  template <class Row>
  FLASHPORT_DEVICE MadeGates(const GatedDeltaUpdateParams& p, const Tile& tile, int v_head, const Row& row) : p_(p) {
    const std::int64_t at_a = row(p.a, v_head);
    a_log_ = load_global(static_cast<const float*>(p.a_log) + v_head);
    b_ = load_element(p.b.data, p.b.dtype, row(p.b, v_head));
    if constexpr (kPerKey) {
      const std::int64_t at_bias = static_cast<std::int64_t>(v_head) * p.head_dim_k;
      tile.load_key_part(key_gates_, [&](int key) { return load(at_a + key * p.a.stride_dim, at_bias + key); });
    } else {
      head_gate_ = load(at_a, v_head);
    }
  }

  // step(decay of the head or of its keys, beta)
  template <class Step>
  FLASHPORT_DEVICE void apply(Tile& tile, const Step& step) const {
    const float rate = exp_full(a_log_);
    const float beta = sigmoid_full(to_float(b_, p_.b.dtype));
    if constexpr (kPerKey) {
      typename Tile::Keys decays;
      tile.set_keys(decays, key_gates_, [&](const Gate& gate) { return decay(gate, rate); });
      step(decays, beta);
    } else {
      step(decay(head_gate_, rate), beta);
    }
  }

 private:
  struct Gate {
    Element a, bias;
  };
  FLASHPORT_DEVICE Gate load(std::int64_t at_a, std::int64_t at_bias) const {
    return {load_element(p_.a.data, p_.a.dtype, at_a), load_element(p_.dt_bias, p_.dt_bias_dtype, at_bias)};
  }
  FLASHPORT_DEVICE float decay(const Gate& gate, float rate) const {
    return exp_full(log_decay(p_, to_float(gate.a, p_.a.dtype) + to_float(gate.bias, p_.dt_bias_dtype), rate));
  }

  const GatedDeltaUpdateParams& p_;
  float a_log_;
  Element b_;
  Gate head_gate_;
  typename Tile::template KeyPart<Gate> key_gates_;
};

// Whatever gates and rates a call has. The constructor computes them, while the state is in flight. Logarithms are
// added up, and columns decay before anything else is done with the state.
template <GatedDeltaConfig kCfg>
class AnyGates {
  using Tile = StateTile<kCfg>;

 public:
  // row(rows, head): the offset of the token's row.
  template <class Row>
  FLASHPORT_DEVICE AnyGates(const GatedDeltaUpdateParams& p, const Tile& tile, int v_head, const Row& row) : p_(p) {
    const float rate =
        p.a_log == nullptr ? 0.0f : exp_full(to_float(load_element(p.a_log, p.a_log_dtype, v_head), p.a_log_dtype));
    const std::int64_t at_bias = p.a_per_key ? static_cast<std::int64_t>(v_head) * p.head_dim_k : v_head;
    const Offsets at{row(p.a, v_head), row(p.gk, v_head), at_bias};
    const float head_decay = p.decay_per_key ? 0.0f : decay_at(at, rate, 0);
    // A decay of the head is also handled as one for each key: two paths for the state would take registers for both.
    tile.load_key_part(decays_, [&](int key) { return p.decay_per_key ? decay_at(at, rate, key) : head_decay; });

    const std::int64_t at_b = row(p.b, v_head);
    const float head_beta = p.beta_per_column ? 0.0f : beta_at(at_b);
    beta_ = tile.make_columns(
        [&](int column) { return p.beta_per_column ? beta_at(at_b + column * p.b.stride_dim) : head_beta; });
    if (p.gv.data != nullptr) {
      const std::int64_t at_gv = row(p.gv, v_head);
      column_decays_ =
          tile.make_columns([&](int column) { return exp_full(load(p.gv, at_gv + column * p.gv.stride_dim)); });
    }
  }

  // step(decays of the keys, beta of the columns)
  template <class Step>
  FLASHPORT_DEVICE void apply(Tile& tile, const Step& step) const {
    if (p_.gv.data != nullptr) tile.scale_columns(column_decays_);
    typename Tile::Keys decays;
    tile.set_keys(decays, decays_, [](float decay) { return decay; });
    step(decays, beta_);
  }

 private:
  // Offsets of a token's gates, in elements.
  struct Offsets {
    std::int64_t a, gk, bias;
  };
  FLASHPORT_DEVICE static float load(const StridedRows& rows, std::int64_t at) {
    return to_float(load_element(rows.data, rows.dtype, at), rows.dtype);
  }
  FLASHPORT_DEVICE float decay_at(const Offsets& at, float rate, int key) const {
    float sum = 0.0f;
    if (p_.a.data != nullptr) {
      sum = load(p_.a, at.a + key * p_.a.stride_dim);
      if (p_.dt_bias != nullptr) {
        sum +=
            to_float(load_element(p_.dt_bias, p_.dt_bias_dtype, at.bias + (p_.a_per_key ? key : 0)), p_.dt_bias_dtype);
      }
      if (p_.a_log != nullptr) sum = log_decay(p_, sum, rate);
    }
    if (p_.gk.data != nullptr) sum += load(p_.gk, at.gk + key * p_.gk.stride_dim);
    return exp_full(sum);
  }
  FLASHPORT_DEVICE float beta_at(std::int64_t at) const {
    if (p_.b.data == nullptr) return 1.0f;
    const float b = load(p_.b, at);
    return p_.beta_sigmoid ? p_.beta_factor * sigmoid_full(b) : b;
  }

  const GatedDeltaUpdateParams& p_;
  typename Tile::template KeyPart<float> decays_;
  typename Tile::Columns beta_, column_decays_;
};

template <GatedDeltaConfig kCfg>
using TokenGates = std::conditional_t<kCfg.shape.gate == GateForm::kAny, AnyGates<kCfg>, MadeGates<kCfg>>;

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
