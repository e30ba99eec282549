"""Gates and rates of gated_delta_update in every form, and final states beside the pool."""

from __future__ import annotations

import re

import numpy as np
import pytest

import flashport
from delta_call import check, make_delta, pairs_of
from flashport.testing import gated_delta_oracle as oracle
from helpers import BF16

OPTIONS = {
    "gate": ("made", "without bias", "log", None),
    "rate": ("logit", "logits", "rate", "rates", None),
    "key_gates": (False, True),
    "column_gates": (False, True),
    "final_dtype": (None, np.float32, BF16, np.float16),
    "is_kda": (False, True),
    "lower_bound": (None, -5.0),
    "allow_neg_eigval": (False, True),
    "keys": (16, 64, 136, 256),
    "values": (16, 40, 128),
    "tokens": (1, 2, 33),
    "packed": (False, True),
    "dtype": (np.float32, np.float16, BF16),
    "gate_dtype": (None, np.float32, np.float16),
    "state_dtype": (np.float32, BF16, np.float16),
    "layout": ("vk", "kv"),
    "slots": ("permuted", "padded", None),
    "update_state": (True, False),
    "use_qk_l2norm": (True, False),
    "gap": (0, 24),
}
PAIRS = pairs_of(OPTIONS)


def call_of(row, seed):
    """A row of OPTIONS as a call; what is an option of another form is left out."""
    row = dict(row)
    if row["gate"] not in ("made", "without bias"):
        row |= {"is_kda": False, "lower_bound": None}
    if row["rate"] not in ("logit", "logits"):
        row["allow_neg_eigval"] = False
    if row["final_dtype"] not in (None, np.float32) and row["state_dtype"] is not np.float32:
        row["final_dtype"] = row["state_dtype"]  # a call has one type of 16 bits
    if row.pop("packed"):
        row["lens"] = (0, row["tokens"], 1, 0)
    return make_delta(seed=seed, a_form="rows", **row)


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_options_in_pairs(number):
    check(call_of(PAIRS[number], number))


@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_what_is_made_may_be_given(layout):
    """The same gates and rates as logarithms, and as numbers of each key and column, give the same within tolerance."""
    made = make_delta(tokens=5, dtype=np.float32, layout=layout, use_qk_l2norm=True, a_form="rows", slots=None)
    x = made.arguments
    rule = oracle.Rule()
    g = oracle.gate(x["a"], x["A_log"], x["dt_bias"], rule, np.float64).astype(np.float32)
    beta = oracle.sigmoid(x["b"], np.float64).astype(np.float32)
    wanted = made.run().copy()
    common = {name: x[name] for name in ("q", "k", "v", "use_qk_l2norm", "state_layout")}
    per_key = np.broadcast_to(g[..., None], (*g.shape, 64))
    for given in (
        {"g": g, "beta": beta},
        {"gk": per_key, "beta": beta},
        {"gv": per_key, "beta": np.broadcast_to(beta[..., None], (*beta.shape, 64))},
        {"g": 0.5 * g, "gk": 0.25 * per_key, "gv": 0.25 * per_key, "beta": beta},
    ):
        got = flashport.gated_delta_update(**common, **given)
        np.testing.assert_allclose(got, wanted, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("column_gates", [False, True])
def test_extreme_logarithms(column_gates):
    call = make_delta(
        tokens=40, dtype=np.float32, gate="log", rate="rate", key_gates=True, column_gates=column_gates,
        final_dtype=np.float32, use_qk_l2norm=True,
    )  # fmt: skip
    rng = np.random.default_rng(5)
    for name in ("g", "gk", "gv")[: 2 + column_gates]:
        gates = call[name]
        gates[...] = rng.choice([-np.inf, -1e6, -90.0, -1e-3, 0.0], gates.shape, p=[0.05, 0.05, 0.1, 0.5, 0.3])
    check(call)


def test_opposite_logarithms_cancel():
    """exp(g) and exp(gk) by themselves would be 0 and infinite."""
    call = make_delta(tokens=4, dtype=np.float32, gate="log", rate="rate", key_gates=True, slots="permuted")
    call["g"][...] = -200.0
    call["gk"][...] = 200.0
    got = call.run().copy()
    still = make_delta(tokens=4, dtype=np.float32, gate="log", rate="rate", key_gates=True, slots="permuted")
    still["g"][...] = 0.0
    still["gk"][...] = 0.0
    np.testing.assert_array_equal(got, still.run())


def test_nothing_decays_and_everything_is_learned_without_gates():
    """Orthonormal keys, each read right behind its value."""
    keys = np.eye(16, dtype=np.float32)[None, :, None]
    values = np.random.default_rng(1).standard_normal((1, 16, 1, 24), np.float32)
    out = flashport.gated_delta_update(keys, keys, values, scale=1.0)
    np.testing.assert_array_equal(out, values)


def test_final_states_beside_the_pool():
    call = make_delta(tokens=3, dtype=np.float32, final_dtype=np.float32, slots="permuted")
    check(call)
    for n, slot in enumerate(call["state_indices"]):
        np.testing.assert_array_equal(call["final_states"][n], call["state"][slot])


@pytest.mark.parametrize("tokens", [0, 2])
@pytest.mark.parametrize("slots", ["permuted", None])
def test_a_sequence_without_tokens_ends_as_it_starts(tokens, slots):
    call = make_delta(
        lens=(0, tokens, 0), dtype=np.float32, gate="log", rate="rate", final_dtype=np.float32, slots=slots
    )
    check(call)
    for n in (0, 2):
        start = call["state"][call["state_indices"][n]] if slots else 0
        np.testing.assert_array_equal(call["final_states"][n], np.broadcast_to(start, call["final_states"][n].shape))


def test_bits_alone_and_in_a_batch():
    options = {"gate": "log", "rate": "rates", "key_gates": True, "column_gates": True, "final_dtype": np.float32}
    together = make_delta(batch=3, tokens=3, dtype=np.float32, **options)
    alone = make_delta(batch=3, tokens=3, dtype=np.float32, **options)
    together.run()
    for n in (2, 0, 1):
        one = slice(n, n + 1)
        names = ("q", "k", "v", "g", "gk", "gv", "beta", "final_states", "state_indices", "out")
        part = alone.arguments | {name: alone[name][one] for name in names}
        flashport.gated_delta_update(**part)
    for name in ("out", "final_states", "state"):
        assert alone[name].tobytes() == together[name].tobytes(), name


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"g": "g"}, "a and g must not both be given; a is what g is made of with A_log"),
        ({"A_log": None}, "a and A_log must be given together; pass both, or g, which is a logarithm already"),
        ({"beta": "g"}, "b and beta must not both be given; beta is the sigmoid of b"),
        ({"b": None, "allow_neg_eigval": True}, "allow_neg_eigval needs b, whose sigmoid it doubles"),
        ({"a": None, "A_log": None}, "dt_bias needs a, of which a gate is made; g, gk and gv are taken as they are"),
        ({"gk": "g"}, "gk must have 4 dimensions (batch, tokens, num_v_heads, head_dim_k), got 3: (2, 1, 4)"),
    ],
)
def test_refusals_leave_everything_alone(changes, text):
    call = make_delta(dtype=np.float32, final_dtype=np.float32)
    given = {"g": np.zeros((2, 1, 4), np.float32)}
    before = {name: array.tobytes() for name, array in call.memory.items()}
    with pytest.raises(ValueError, match=f"^{re.escape(f'gated_delta_update: {text}')}$"):
        flashport.gated_delta_update(**call.arguments | {name: given.get(x, x) for name, x in changes.items()})
    assert np.isnan(call["out"]).all()
    assert before == {name: array.tobytes() for name, array in call.memory.items()}
