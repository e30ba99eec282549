// The decay of a state and the rate at which it learns, of one token and value head. They are loaded with the other
// inputs, and worked out when these are there.
#pragma once

#include <type_traits>

#include "common/device/gated_delta_config.h"
#include "common/device/gated_delta_gate.h"
#include "common/device/scalar_access.h"
#include FLASHPORT_STATE_TILE_HEADER

namespace flashport::FLASHPORT_TARGET {

// Made of A_log, a and dt_bias, and of b.
template <GatedDeltaConfig kCfg>
class MadeGates {
  using Tile = StateTile<kCfg>;
  static constexpr bool kPerKey = kCfg.shape.gate == GateForm::kKey;

 public:
  template <class At>
  FLASHPORT_DEVICE MadeGates(const GatedDeltaUpdateParams& p, const Tile& tile, int v_head, const At& at_token)
      : p_(p) {
    const std::int64_t at_a = at_token(p.a, v_head);
    a_log_ = load_global(p.a_log + v_head);
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

// Whatever of them a call has. Logarithms are added up, and columns decay before anything else is done with the state.
template <GatedDeltaConfig kCfg>
class AnyGates {
  using Tile = StateTile<kCfg>;

 public:
  template <class At>
  FLASHPORT_DEVICE AnyGates(const GatedDeltaUpdateParams& p, const Tile&, int v_head, const At& at_token)
      : p_(p),
        v_head_(v_head),
        at_a_(at_token(p.a, v_head)),
        at_b_(at_token(p.b, v_head)),
        at_gk_(at_token(p.gk, v_head)),
        at_gv_(at_token(p.gv, v_head)) {}

  template <class Step>
  FLASHPORT_DEVICE void apply(Tile& tile, const Step& step) const {
    const float rate = p_.a_log == nullptr ? 0.0f : exp_full(load_global(p_.a_log + v_head_));
    const float beta_of_head = p_.beta_per_column ? 0.0f : beta_of(0);
    const auto beta = tile.make_columns([&](int i) { return p_.beta_per_column ? beta_of(i) : beta_of_head; });
    if (p_.gv.data != nullptr) {
      tile.scale_columns(
          tile.make_columns([&](int column) { return exp_full(load(p_.gv, at_gv_ + column * p_.gv.stride_dim)); }));
    }
    // Of the head too as one of each key: two ways for the state to go would take registers for both.
    typename Tile::template Shares<float> shares;
    typename Tile::Keys decays;
    const float decay_of_head = p_.decay_per_key ? 0.0f : decay_of(0, rate);
    tile.load_shares(shares, [&](int key) { return p_.decay_per_key ? decay_of(key, rate) : decay_of_head; });
    tile.set_keys(decays, shares, [](float decay) { return decay; });
    step(decays, beta);
  }

 private:
  FLASHPORT_DEVICE static float load(const TokenRows& rows, std::int64_t at) {
    return to_float(load_element(rows.data, rows.dtype, at), rows.dtype);
  }
  FLASHPORT_DEVICE float decay_of(int key, float rate) const {
    float sum = 0.0f;
    if (p_.a.data != nullptr) {
      sum = load(p_.a, at_a_ + key * p_.a.stride_dim);
      if (p_.dt_bias != nullptr) {
        const std::int64_t at_bias = p_.a_per_key ? static_cast<std::int64_t>(v_head_) * p_.head_dim_k + key : v_head_;
        sum += to_float(load_element(p_.dt_bias, p_.dt_bias_dtype, at_bias), p_.dt_bias_dtype);
      }
      if (p_.a_log != nullptr) sum = log_decay(p_, sum, rate);
    }
    if (p_.gk.data != nullptr) sum += load(p_.gk, at_gk_ + key * p_.gk.stride_dim);
    return exp_full(sum);
  }
  FLASHPORT_DEVICE float beta_of(int column) const {
    if (p_.b.data == nullptr) return 1.0f;
    const float given = load(p_.b, at_b_ + column * p_.b.stride_dim);
    return p_.beta_sigmoid ? p_.beta_factor * sigmoid_full(given) : given;
  }

  const GatedDeltaUpdateParams& p_;
  int v_head_;
  std::int64_t at_a_, at_b_, at_gk_, at_gv_;
};

template <GatedDeltaConfig kCfg>
using TokenGates = std::conditional_t<kCfg.shape.gate == GateForm::kAny, AnyGates<kCfg>, MadeGates<kCfg>>;

}  // namespace flashport::FLASHPORT_TARGET
