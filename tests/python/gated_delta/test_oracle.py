"""The oracle of the gated delta rule: by hand, against the WY form, and what its comparison lets pass."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flashport.testing import gated_delta_oracle as oracle
from flashport.testing import numerics


def make(tokens=70, heads=2, group=2, keys=16, values=24, is_kda=False, seed=0):
    """Arguments of oracle.update for one sequence, fp64, with a random state in layout kv."""
    rng = np.random.default_rng(seed)
    value_heads = heads * group
    channels = keys if is_kda else 1
    return {
        "q": rng.standard_normal((1, tokens, heads, keys)),
        "k": rng.standard_normal((1, tokens, heads, keys)),
        "v": rng.standard_normal((1, tokens, value_heads, values)),
        "a": rng.standard_normal((tokens, value_heads * channels)),
        "b": rng.standard_normal((tokens, value_heads)),
        "A_log": np.log(rng.uniform(0.05, 2, value_heads)),
        "dt_bias": rng.standard_normal(value_heads * channels) - 2,
        "state": rng.standard_normal((1, value_heads, keys, values)),
        "state_layout": "kv",
    }


def wy_form(q, k, v, g, beta, S, chunk):  # noqa: N803
    """Gated delta rule of one head by chunks: q, k [T, K], v [T, V], g [T, K] log decay, beta [T], S [K, V].

    Within a chunk v_new = (I + A)^-1 (beta v - beta (k e^G) S), A strictly lower, A_ij = beta_i k_i e^(G_i-G_j) k_j.
    """
    out = np.empty_like(v)
    for first in range(0, len(q), chunk):
        own = slice(first, first + chunk)
        Q, Kc, G, rate = q[own], k[own], np.cumsum(g[own], axis=0), beta[own, None]  # noqa: N806
        earlier = np.tri(len(Q), dtype=bool)
        decay = np.exp(np.where(earlier[..., None], G[:, None] - G[None], -np.inf))  # [i, j, K]
        A = np.tril(np.einsum("ik,ijk,jk->ij", Kc, decay, Kc) * rate, -1)  # noqa: N806
        P = np.einsum("ik,ijk,jk->ij", Q, decay, Kc)  # noqa: N806
        v_new = np.linalg.solve(np.eye(len(Q)) + A, rate * (v[own] - (Kc * np.exp(G)) @ S))
        out[own] = (Q * np.exp(G)) @ S + P @ v_new
        S = np.exp(G[-1])[:, None] * S + (Kc * np.exp(G[-1] - G)).T @ v_new  # noqa: N806
    return out, S


@pytest.mark.parametrize("is_kda", [False, True])
@pytest.mark.parametrize("head_map", ["consecutive", "modulo"])
@pytest.mark.parametrize("gate", [{}, {"lower_bound": -5.0}, {"softplus_beta": 2.0, "softplus_threshold": 0.5}])
def test_recurrence_is_the_wy_form(is_kda, head_map, gate):
    x = make(is_kda=is_kda)
    rule = oracle.Rule(use_qk_l2norm=True, is_kda=is_kda, head_map=head_map, **gate)
    got = oracle.update(**x, rule=rule)
    tokens, heads, keys = x["q"].shape[1:]
    value_heads = len(x["A_log"])
    for hv in range(value_heads):
        h = hv % heads if head_map == "modulo" else hv * heads // value_heads
        q, k = (part[0, :, h] for part in (x["q"], x["k"]))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        shift = (x["a"] + x["dt_bias"]).reshape(tokens, value_heads, -1)[:, hv]
        speed = np.exp(x["A_log"][hv])
        if "lower_bound" in gate:
            g = gate["lower_bound"] / (1 + np.exp(-speed * shift))
        else:
            factor, threshold = gate.get("softplus_beta", 1), gate.get("softplus_threshold", 20)
            soft = np.log(1 + np.exp(factor * shift)) / factor
            g = -speed * np.where(factor * shift > threshold, shift, soft)
        g = np.broadcast_to(g, (tokens, keys))
        beta = 1 / (1 + np.exp(-x["b"][:, hv]))
        out, state = wy_form(q / np.sqrt(keys), k, x["v"][0, :, hv], g, beta, x["state"][0, hv], 32)
        np.testing.assert_allclose(got.out[0, :, hv], out, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(got.state[0, hv], state, rtol=1e-12, atol=1e-12)


def by_hand(**changes):
    """Two tokens, one head, K = V = 2. exp(g) is 1/2 (softplus of ln(e^ln2 - 1) is ln 2), beta is 1/2, scale is 1.

    S0 = [[4, 0], [0, 8]]; token 0 has k = (1, 0), v = (6, 2), q = (1, 1); token 1 k = (0, 1), v = (3, 8), q = (2, 1).
    Token 0: S = [[2, 0], [0, 4]], S^T k = (2, 0), u = (2, 1), S = [[4, 1], [0, 4]], o = (4, 5).
    Token 1: S = [[2, .5], [0, 2]], S^T k = (0, 2), u = (1.5, 3), S = [[2, .5], [1.5, 5]], o = (5.5, 6).
    """
    x = {
        "q": np.array([[1, 1], [2, 1]], np.float64).reshape(1, 2, 1, 2),
        "k": np.eye(2).reshape(1, 2, 1, 2),
        "v": np.array([[6, 2], [3, 8]], np.float64).reshape(1, 2, 1, 2),
        "a": np.full((2, 1), np.log(np.expm1(np.log(2)))),
        "b": np.zeros((2, 1)),
        "A_log": np.zeros(1),
        "dt_bias": np.zeros(1),
        "state": np.array([[4, 0], [0, 8]], np.float64).reshape(1, 1, 2, 2),
        "rule": oracle.Rule(scale=1.0),
    }
    return x | changes


STATES = np.array([[[4, 1], [0, 4]], [[2, 0.5], [1.5, 5]]])  # [token, K, V]


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_two_tokens_by_hand(layout):
    buffer = np.zeros((1, 2, 1, 2, 2))
    got = oracle.update(**by_hand(state_layout=layout, intermediate_states=buffer))
    states = STATES if layout == "kv" else STATES.swapaxes(1, 2)
    np.testing.assert_allclose(got.out.reshape(2, 2), [[4, 5], [5.5, 6]], rtol=1e-14)
    np.testing.assert_allclose(got.state.reshape(2, 2), states[1], rtol=1e-14)
    np.testing.assert_allclose(got.intermediate.reshape(2, 2, 2), states, rtol=1e-14)
    assert not buffer.any()


def test_a_gate_a_channel_by_hand():
    """Channel 0 of K keeps 1/2 a token, channel 1 nearly everything (a = -50)."""
    a = np.tile([np.log(np.expm1(np.log(2))), -50.0], (2, 1))
    got = oracle.update(
        **by_hand(a=a, dt_bias=np.zeros(2), rule=oracle.Rule(scale=1.0, is_kda=True), state_layout="kv")
    )
    # Token 0: S = [[2, 0], [0, 8]] -> [[4, 1], [0, 8]]; token 1: [[2, .5], [0, 8]] -> u = (1.5, 0).
    np.testing.assert_allclose(got.out.reshape(2, 2), [[4, 9], [5.5, 9]], rtol=1e-14)
    np.testing.assert_allclose(got.state.reshape(2, 2), [[2, 0.5], [1.5, 8]], rtol=1e-14)


def test_options_of_the_pool():
    x = by_hand(state_layout="kv")
    kept = oracle.update(**x, update_state=False)
    np.testing.assert_array_equal(kept.state, x["state"])
    np.testing.assert_allclose(kept.out.reshape(2, 2)[1], [5.5, 6])
    fresh = oracle.update(**x, state_indices=np.array([-1]))
    np.testing.assert_array_equal(fresh.state, x["state"])
    np.testing.assert_allclose(fresh.out.reshape(2, 2)[0], [3, 1])
    np.testing.assert_array_equal(fresh.out, oracle.update(**x | {"state": None}).out)
    packed = oracle.update(**x | {"state": np.repeat(x["state"], 3, 0)}, cu_seqlens=np.array([0, 0, 1, 1]))
    assert np.isnan(packed.out[0, 1]).all()  # nobody's token
    np.testing.assert_allclose(packed.state[1, 0], STATES[0])
    np.testing.assert_array_equal(packed.state[[0, 2]], np.repeat(x["state"], 2, 0))


def test_parents_choose_the_state():
    """Three tokens; the third starts from the first one's state: as if the second had not been."""
    x = make(tokens=3)
    rule = oracle.Rule(use_qk_l2norm=True)
    buffer = np.full((1, 3, *x["state"].shape[1:]), np.nan)
    tree = oracle.update(**x, rule=rule, intermediate_states=buffer, parent_tokens=np.array([[9, 0, 0]]))
    path = {name: x[name][:, [0, 2]] if x[name].ndim == 4 else x[name][[0, 2]] for name in "qkvab"}
    alone = oracle.update(**x | path, rule=rule)
    np.testing.assert_array_equal(tree.out[0, 2], alone.out[0, 1])
    np.testing.assert_array_equal(tree.state, alone.state)
    chain = oracle.update(**x, rule=rule, intermediate_states=buffer, parent_tokens=np.array([[9, 0, 1]]))
    np.testing.assert_array_equal(chain.out, oracle.update(**x, rule=rule).out)
    unkept = oracle.update(**x, rule=rule, intermediate_states=buffer, intermediate_indices=np.array([-1]),
                           parent_tokens=np.array([[9, 0, 0]]))  # fmt: skip
    np.testing.assert_array_equal(unkept.out, chain.out)
    assert np.isnan(unkept.intermediate).all()


def test_the_fp32_recurrence_rounds_as_it_says():
    x = make(tokens=40)
    rule = oracle.Rule(use_qk_l2norm=True)
    stored = {name: value.astype(np.float32) if name != "state_layout" else value for name, value in x.items()}
    truth = oracle.update(**stored, rule=rule)
    assert truth.out.dtype == np.float64
    for fmt, unit in (("fp32", 2.0**-24), ("bf16", 2.0**-8)):
        plain = oracle.update(**stored, rule=rule, dtype=np.float32, out_type=fmt, state_type=fmt)
        for got, wanted in ((plain.out, truth.out), (plain.state, truth.state)):
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, numerics.rounded(got, fmt))
            assert 0 < np.abs(got - wanted).max() < 40 * unit * np.abs(wanted).max()
        assert not oracle.compare(plain.out, truth.out, plain.out, fmt).problem


def test_given_gates_and_rates_by_hand():
    """K 2, V 2: rows, columns and the whole of S halve, or not; each column learns at its own rate."""
    half = math.log(0.5)
    got = oracle.update(
        np.array([[[[1.0, 0.0]]]]), np.array([[[[0.0, 1.0]]]]), np.array([[[[3.0, 5.0]]]]),
        state=np.array([[[[8.0, 16.0], [24.0, 32.0]]]]), state_layout="kv", rule=oracle.Rule(scale=2.0),
        g=np.array([[[half]]]), gk=np.array([[[[half, 0.0]]]]), gv=np.array([[[[0.0, half]]]]),
        beta=np.array([[[[1.0, 0.5]]]]),
    )  # fmt: skip
    # S decays to [[2, 2], [12, 8]]; the second key reads (12, 8) where (3, 5) should be.
    np.testing.assert_allclose(got.final_states[0, 0], [[2.0, 2.0], [3.0, 6.5]], rtol=1e-15)
    np.testing.assert_allclose(got.out[0, 0, 0], [4.0, 4.0], rtol=1e-15)
    np.testing.assert_array_equal(got.state, got.final_states)


@pytest.mark.parametrize("transposed", [False, True])
def test_sums_of_the_fp32_recurrence_run_in_index_order(transposed):
    rng = np.random.default_rng(3)
    S = rng.standard_normal((2, 200, 24), np.float32)  # noqa: N806
    if transposed:  # as a pool of layout vk holds it
        S = np.ascontiguousarray(S.swapaxes(1, 2)).swapaxes(1, 2)  # noqa: N806
    q, k = rng.standard_normal((2, 2, 200), np.float32)
    got, _ = oracle.step(S, q, k, np.zeros((2, 24), np.float32), [], np.zeros((2, 1), np.float32))
    wanted = np.zeros_like(got)
    for i in range(200):
        wanted += S[:, i] * q[:, i, None]
    np.testing.assert_array_equal(got, wanted)


def test_extreme_gates_of_the_oracle():
    for a in (-80.0, -17.0, 0.0, 80.0):
        g = oracle.gate(np.full(1, a), np.full(1, 10.0), np.zeros(1), oracle.Rule(), np.float64)
        single = oracle.gate(np.full(1, a), np.full(1, 10.0), np.zeros(1), oracle.Rule(), np.float32)
        np.testing.assert_allclose(g, -np.exp(10) * np.logaddexp(0, a), rtol=1e-12)
        np.testing.assert_allclose(single, g, rtol=1e-6)
    for dtype in (np.float32, np.float64):
        np.testing.assert_allclose(oracle.sigmoid(np.array([-100.0, 0.0, 100.0]), dtype), [0, 0.5, 1], atol=1e-40)


def test_a_wrong_result_is_called_wrong():
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((50, 20))
    noise = rng.standard_normal((50, 20)) * 1e-3
    assert not oracle.compare(truth + 1.4 * noise, truth, truth + noise, "fp32").problem
    assert "rms" in oracle.compare(truth + 1.6 * noise, truth, truth + noise, "bf16").problem
    assert oracle.compare(truth + 1.6 * noise, truth, truth + noise, "fp32").problem
    spoiled = truth.copy()
    spoiled[3, 3] = np.nan
    assert oracle.compare(spoiled, truth, truth + noise, "fp32").problem == "out: not finite"
    assert "shape" in oracle.compare(truth[1:], truth, truth, "fp32").problem


def make_chunked(lens=(70, 0, 130), heads=2, group=2, keys=16, values=24, seed=0):
    """Arguments of oracle.chunk for packed sequences, in fp32."""
    rng = np.random.default_rng(seed)
    tokens, value_heads = sum(lens), heads * group
    return {
        "q": rng.standard_normal((1, tokens, heads, keys), np.float32),
        "k": rng.standard_normal((1, tokens, heads, keys), np.float32),
        "v": rng.standard_normal((1, tokens, value_heads, values), np.float32),
        "g": -rng.uniform(0, 1, (1, tokens, value_heads)).astype(np.float32),
        "beta": rng.uniform(0, 1, (1, tokens, value_heads)).astype(np.float32),
        "state": rng.standard_normal((len(lens), value_heads, keys, values), np.float32),
        "state_layout": "kv",
        "cu_seqlens": np.concatenate([[0], np.cumsum(lens)]),
        "rule": oracle.Rule(use_qk_l2norm=True),
    }


def test_chunks_of_the_recurrence_are_the_wy_form():
    x = make_chunked()
    got = oracle.chunk(**x)
    q, k = (oracle.l2norm(x[name].astype(np.float64))[0] for name in "qk")
    for n, (first, end) in enumerate(zip(x["cu_seqlens"][:-1], x["cu_seqlens"][1:], strict=True)):
        own = slice(first, end)
        for hv in range(4):
            v, g, beta = (x[name][0, own, hv].astype(np.float64) for name in ("v", "g", "beta"))
            S = x["state"][n, hv].astype(np.float64)  # noqa: N806
            wide = np.broadcast_to(g[:, None], (len(g), 16))
            out, state = wy_form(q[own, hv // 2] / 4, k[own, hv // 2], v, wide, beta, S, 64)
            np.testing.assert_allclose(got.out[0, own, hv], out, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(got.final_states[n, hv], state, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(got.state, got.final_states)
    # Sequences of 2, 0 and 3 chunks; the first enters with the state that was given.
    assert got.chunk_states.shape == (1, 5, 4, 16, 24)
    np.testing.assert_array_equal(got.chunk_states[0, [0, 2]], x["state"][[0, 2]])
    head = oracle.chunk(**make_chunked() | {"cu_seqlens": np.array([0, 64, 64, 64])})
    np.testing.assert_array_equal(got.chunk_states[0, 1], head.state[0])


@pytest.mark.parametrize(("fmt", "least", "most"), [("fp32", 1e-9, 1e-6), ("bf16", 1e-4, 2e-2)])
def test_the_plain_wy_form_is_as_far_off_as_its_type(fmt, least, most):
    x = make_chunked()
    for name in "qkv":
        x[name] = numerics.rounded(x[name], fmt)
    truth, plain = oracle.chunk(**x), oracle.chunk(**x, plain=fmt)
    for name in ("out", "state", "final_states", "chunk_states"):
        wanted, got = getattr(truth, name), getattr(plain, name)
        assert got.dtype == np.float32
        error = np.abs(got - wanted).max() / np.abs(wanted).max()
        assert least < error < most, name
    np.testing.assert_array_equal(plain.out, numerics.rounded(plain.out, fmt))


def test_the_gate_of_a_chunked_call_is_that_of_the_update():
    x = make_chunked(lens=(40,))
    a_log, bias = np.log(np.linspace(0.1, 1, 4)).astype(np.float32), np.linspace(-1, 1, 4).astype(np.float32)
    chunked = oracle.chunk(**x, A_log=a_log, dt_bias=bias, beta_sigmoid=True)
    common = {name: x[name] for name in ("q", "k", "v", "state", "state_layout", "rule")}
    stepped = oracle.update(**common, a=x["g"], b=x["beta"], A_log=a_log, dt_bias=bias)
    np.testing.assert_allclose(chunked.out, stepped.out, rtol=1e-13)
    np.testing.assert_allclose(chunked.state, stepped.state, rtol=1e-13)
