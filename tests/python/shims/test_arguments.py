"""Arguments of the shims that are no arrays, or not of the shape that the shims look at: errors that name them."""

from __future__ import annotations

import numpy as np
import pytest

from flashport import fla, sglang

SHIMS = {
    "fla chunk": fla.chunk_gated_delta_rule,
    "fla recurrent": fla.fused_recurrent_gated_delta_rule,
    "sglang chunk": sglang.chunk_gated_delta_rule,
}


def arguments(**changes):
    random = np.random.default_rng(7)
    shapes = {"q": (1, 3, 2, 16), "k": (1, 3, 2, 16), "v": (1, 3, 4, 16), "g": (1, 3, 4), "beta": (1, 3, 4)}
    made = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    made["g"] = -np.abs(made["g"])
    return made | changes


@pytest.mark.parametrize("shim", SHIMS)
@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("q", [1.0], TypeError, "q must be an array of torch, NumPy or CuPy"),
        ("q", np.zeros(16, np.float32), ValueError, "q must have 4 dimensions"),
        ("v", [1.0], TypeError, "v must be an array"),
        ("cu_seqlens", [0, 3], TypeError, "cu_seqlens must be an array"),
        ("cu_seqlens", np.array(3), ValueError, r"cu_seqlens must have 1 dimension \(sequences \+ 1\), got 0"),
        ("cu_seqlens", np.array([[0, 3]]), ValueError, r"cu_seqlens must have 1 dimension \(sequences \+ 1\), got 2"),
        ("cu_seqlens", np.array([0.0, 3.0]), TypeError, "cu_seqlens must be int32 or int64, got float64"),
        ("cu_seqlens", np.array([0, np.nan]), TypeError, "cu_seqlens must be int32 or int64, got float64"),
        ("cu_seqlens", np.array([0, 10**12]), ValueError, "cu_seqlens must rise within the 3 tokens of q"),
        ("cu_seqlens", np.array([0, -(10**12)]), ValueError, "cu_seqlens must rise within the 3 tokens of q"),
        ("initial_state", [1.0], TypeError, "state must be an array"),
        ("initial_state", np.zeros((), np.float32), ValueError, "state must have 4 dimensions"),
    ],
)
def test_what_is_no_array_is_named(shim, name, value, error, text):
    with pytest.raises(error, match=f"^[a-z_]*: {text}"):
        SHIMS[shim](**arguments(**{name: value}))


@pytest.mark.parametrize("shim", SHIMS)
def test_an_array_whose_kind_cannot_be_made_is_refused(shim):
    """JAX's, which speak DLPack, cannot be written to."""
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r": q must be an array of torch, NumPy or CuPy .*, got ArrayImpl; convert it"):
        SHIMS[shim](**{name: jax.numpy.asarray(x) for name, x in arguments().items()})


@pytest.mark.parametrize(
    ("buffer", "error", "text"),
    [
        ([1.0], TypeError, "intermediate_states must be an array"),
        (np.zeros(3, np.float32), ValueError, "intermediate_states must have 5 dimensions"),
    ],
)
def test_a_buffer_that_is_none_is_named_before_its_steps(buffer, error, text):
    x = arguments()
    pool, slots = np.ones((2, 4, 16, 16), np.float32), np.array([1], np.int32)
    with pytest.raises(error, match=f"^gated_delta_update: {text}"):
        sglang.fused_sigmoid_gating_delta_rule_update(
            np.zeros(4, np.float32), x["g"], np.zeros(4, np.float32), 1.0, 20.0, x["q"], x["k"], x["v"], x["beta"],
            pool, slots, cache_steps=3, intermediate_states_buffer=buffer, intermediate_state_indices=slots,
        )  # fmt: skip
    assert (pool == 1).all()
