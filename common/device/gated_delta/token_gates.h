// The decay of a state and the rate at which it learns, of one token and value head.
#pragma once

#include <type_traits>

#include "common/device/core/scalar_access.h"
#include "common/device/gated_delta/config.h"
#include "common/device/gated_delta/gate.h"
#include FLASHPORT_STATE_TILE_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

// Made of A_log, a and dt_bias, and of b, which are loaded with the other inputs; worked out when these are there.
template <GatedDeltaConfig kCfg>
class MadeGates {
  using Tile = StateTile<kCfg>;
  static constexpr bool kPerKey = kCfg.shape.gate == GateForm::kKey;

 public:
  template <class At>
  FLASHPORT_DEVICE MadeGates(const GatedDeltaUpdateParams& p, const Tile& tile, int v_head, const At& at_token)
      : p_(p) {
    const std::int64_t at_a = at_token(p.a, v_head);
    a_log_ = load_global(static_cast<const float*>(p.a_log) + v_head);
    b_ = load_element(p.b.data, p.b.dtype, at_token(p.b, v_head));
    if constexpr (kPerKey) {
      const std::int64_t at_bias = static_cast<std::int64_t>(v_head) * p.head_dim_k;
      tile.load_shares(of_keys_, [&](int key) { return load(at_a + key * p.a.stride_dim, at_bias + key); });
    } else {
      of_head_ = load(at_a, v_head);
    }
  }

  // step(decay of the head or of its keys, beta)
  template <class Step>
  FLASHPORT_DEVICE void apply(Tile& tile, const Step& step) const {
    const float rate = exp_full(a_log_);
    const float beta = sigmoid_full(to_float(b_, p_.b.dtype));
    if constexpr (kPerKey) {
      typename Tile::Keys decays;
      tile.set_keys(decays, of_keys_, [&](const Gate& gate) { return decay(gate, rate); });
      step(decays, beta);
    } else {
      step(decay(of_head_, rate), beta);
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
  Gate of_head_;
  typename Tile::template Shares<Gate> of_keys_;
};

// Whatever of them a call has, worked out at once: the state is under way meanwhile. Logarithms are added up, and
// columns decay before anything else is done with the state.
template <GatedDeltaConfig kCfg>
class AnyGates {
  using Tile = StateTile<kCfg>;

 public:
  template <class At>
  FLASHPORT_DEVICE AnyGates(const GatedDeltaUpdateParams& p, const Tile& tile, int v_head, const At& at_token) : p_(p) {
    const float rate =
        p.a_log == nullptr ? 0.0f : exp_full(to_float(load_element(p.a_log, p.a_log_dtype, v_head), p.a_log_dtype));
    const std::int64_t at_bias = p.a_per_key ? static_cast<std::int64_t>(v_head) * p.head_dim_k : v_head;
    const Places at{at_token(p.a, v_head), at_token(p.gk, v_head), at_bias};
    const float decay_of_head = p.decay_per_key ? 0.0f : decay_of(at, rate, 0);
    // Of the head too as one of each key: two ways for the state to go would take registers for both.
    tile.load_shares(decays_, [&](int key) { return p.decay_per_key ? decay_of(at, rate, key) : decay_of_head; });

    const std::int64_t at_b = at_token(p.b, v_head);
    const float beta_of_head = p.beta_per_column ? 0.0f : beta_of(at_b);
    beta_ = tile.make_columns(
        [&](int column) { return p.beta_per_column ? beta_of(at_b + column * p.b.stride_dim) : beta_of_head; });
    if (p.gv.data != nullptr) {
      const std::int64_t at_gv = at_token(p.gv, v_head);
      of_columns_ =
          tile.make_columns([&](int column) { return exp_full(load(p.gv, at_gv + column * p.gv.stride_dim)); });
    }
  }

  // step(decays of the keys, beta of the columns)
  template <class Step>
  FLASHPORT_DEVICE void apply(Tile& tile, const Step& step) const {
    if (p_.gv.data != nullptr) tile.scale_columns(of_columns_);
    typename Tile::Keys decays;
    tile.set_keys(decays, decays_, [](float decay) { return decay; });
    step(decays, beta_);
  }

 private:
  // Elements that a token's gates begin with.
  struct Places {
    std::int64_t a, gk, bias;
  };
  FLASHPORT_DEVICE static float load(const StridedRows& rows, std::int64_t at) {
    return to_float(load_element(rows.data, rows.dtype, at), rows.dtype);
  }
  FLASHPORT_DEVICE float decay_of(const Places& at, float rate, int key) const {
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
  FLASHPORT_DEVICE float beta_of(std::int64_t at) const {
    if (p_.b.data == nullptr) return 1.0f;
    const float given = load(p_.b, at);
    return p_.beta_sigmoid ? p_.beta_factor * sigmoid_full(given) : given;
  }

  const GatedDeltaUpdateParams& p_;
  typename Tile::template Shares<float> decays_;
  typename Tile::Columns beta_, of_columns_;
};

template <GatedDeltaConfig kCfg>
using TokenGates = std::conditional_t<kCfg.shape.gate == GateForm::kAny, AnyGates<kCfg>, MadeGates<kCfg>>;

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
