"""FlashInfer's merges, under the original signatures and layouts, against plain NumPy."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest

import flashport
from flashport import flashinfer
from flashport.testing import oracle
from helpers import BF16, assert_close, expect_refusal, from_torch, same, to_torch

ROWS, STATES, HEADS, DIM = 7, 3, 4, 64
LN2 = math.log(2)


def make(dtype=np.float32, seed=0):
    """v (rows, states, heads, dim) and s (rows, states, heads) to base 2, with rows that saw nothing."""
    rng = np.random.default_rng(seed)
    v = rng.standard_normal((ROWS, STATES, HEADS, DIM)).astype(dtype)
    s = (4 * rng.standard_normal((ROWS, STATES, HEADS))).astype(np.float32)
    s[2, 0] = s[3, 1] = s[4] = -np.inf
    v[s == -np.inf] = np.nan  # what saw nothing is not read
    return v, s


def truth(v, s):
    """The merge over the second axis in fp64."""
    o, lse = oracle.merge(v.swapaxes(0, 1).astype(np.float64), s.swapaxes(0, 1).astype(np.float64) * LN2)
    return o, lse / LN2


def libraries(*more):
    return pytest.mark.parametrize("library", ["numpy", "torch", "gpu", *more])


def on(library, *arrays):
    """The arrays, as the library has them."""
    if library == "numpy":
        return [np.array(x) for x in arrays]
    torch = pytest.importorskip("torch")
    if library == "gpu" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return [to_torch(x).to("cuda" if library == "gpu" else "cpu") for x in arrays]


def back(x):
    return x if isinstance(x, np.ndarray) else from_torch(x.cpu())


@libraries()
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_merge_states(library, dtype):
    v, s = make(dtype)
    got, got_s = map(back, flashinfer.merge_states(*on(library, v, s)))
    want, want_s = truth(v, s)
    assert got.shape == (ROWS, HEADS, DIM)
    assert got.dtype == dtype
    assert got_s.dtype == np.float32
    assert_close(got, want, 1e-5 if dtype is np.float32 else 0.01)
    assert_close(got_s, want_s, 1e-5)
    assert not got[4].astype(np.float32).any()
    assert (got_s[4] == -np.inf).all()


@libraries()
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_merge_state(library, dtype):
    v, s = make(dtype)
    pair = v[:, :2], s[:, :2]
    got, got_s = map(back, flashinfer.merge_state(*on(library, v[:, 0], s[:, 0], v[:, 1], s[:, 1])))
    want, want_s = truth(*pair)
    assert_close(got, want, 1e-5 if dtype is np.float32 else 0.01)
    assert_close(got_s, want_s, 1e-5)
    assert (got_s[4] == -np.inf).all()


@libraries()
@pytest.mark.parametrize("mask", [None, np.bool_, np.uint8, np.int32])
def test_merge_state_in_place(library, mask):
    v, s = make(BF16)
    rows = np.arange(ROWS) % 3 != 1
    arrays = on(library, v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    if mask is not None:
        arrays += on(library, rows.astype(mask) * (1 if mask is np.bool_ else 3))
    assert flashinfer.merge_state_in_place(*arrays) is None
    got, got_s = map(back, arrays[:2])
    states = on(library, v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    want, want_s = (np.array(back(x)) for x in flashport.merge_state(*states, lse_base=2))
    if mask is not None:
        want[~rows], want_s[~rows] = v[~rows, 0], s[~rows, 0]
    same(got, want)
    same(got_s, want_s)
    same(back(arrays[2]), v[:, 1])


def test_states_are_views(monkeypatch):
    """No copy of the states stands between FlashInfer's axes and ours."""
    seen = []
    original = flashinfer.decode.merge_states
    monkeypatch.setattr(
        flashinfer.decode, "merge_states", lambda o, lse, **k: seen.extend((o, lse)) or original(o, lse, **k)
    )
    v, s = make()
    flashinfer.merge_states(v, s)
    assert [np.shares_memory(*pair) for pair in zip(seen, (v, s), strict=True)] == [True, True]


def test_any_strides_and_types_of_s():
    v, s = make()
    want, want_s = truth(v, np.where(np.isfinite(s), s.astype(np.float16).astype(np.float32), s))
    got, got_s = flashinfer.merge_states(v, s.astype(np.float16))
    assert_close(got, want, 1e-5)
    assert_close(got_s, want_s, 1e-5)
    wide = np.full((ROWS, STATES, HEADS, 2 * DIM), np.nan, np.float32)
    wide[..., ::2] = v
    got, _ = flashinfer.merge_states(wide[..., ::2], s.astype(np.float64))
    assert_close(got, truth(v, s)[0], 1e-5)
    torch = pytest.importorskip("torch")
    s16 = to_torch(s).to(torch.bfloat16)
    got, got_s = flashinfer.merge_state(to_torch(v[:, 0]), s16[:, 0], to_torch(v[:, 1]), s16[:, 1])
    assert got_s.dtype is torch.float32


def test_signatures_are_flashinfers():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(flashinfer.merge_state) == ["v_a", "s_a", "v_b", "s_b"]
    assert names(flashinfer.merge_states) == ["v", "s"]
    assert names(flashinfer.merge_state_in_place) == ["v", "s", "v_other", "s_other", "mask"]
    assert inspect.signature(flashinfer.merge_state_in_place).parameters["mask"].default is None


def broadcast(x):
    return np.lib.stride_tricks.as_strided(x, x.shape, (0, *x.strides[1:]))


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def zeros(*shape, dtype=np.float32):
    return lambda _: np.zeros(shape, dtype)


# function, argument, what becomes of it, error, text
WRONG = [
    ("merge_state", "v_a", zeros(ROWS, DIM), ValueError, r"v_a must have 3 dimensions \(seq_len, num_heads, "),
    ("merge_state", "v_a", list, TypeError, "v_a must be an array, got list"),
    ("merge_state", "v_a", zeros(ROWS, HEADS, DIM, dtype=np.int32), TypeError, "v_a must"),
    ("merge_state", "s_a", zeros(ROWS, HEADS + 1), ValueError, "s_a must have shape .* as v_a has"),
    ("merge_state", "s_a", zeros(ROWS, HEADS, dtype=np.int32), TypeError, "s_a must be float32, got int32"),
    ("merge_state", "v_b", zeros(ROWS, HEADS, DIM, dtype=np.float16), TypeError, "v_b must be float32, got float16"),
    ("merge_state", "v_b", zeros(ROWS, HEADS, 8), ValueError, "v_b must have shape .* as v_a has"),
    ("merge_state", "s_b", zeros(ROWS), ValueError, "s_b must have 2 dimensions"),
    ("merge_states", "v", zeros(ROWS, HEADS, DIM), ValueError, "v must have 4 dimensions .seq_len, num_states"),
    ("merge_states", "v", zeros(ROWS, STATES, HEADS, DIM, dtype=np.int64), TypeError, "v must be float16"),
    ("merge_states", "s", zeros(ROWS, HEADS, STATES), ValueError, r"s must have shape \(7, 3, 4\) as v has"),
    ("merge_states", "s", list, TypeError, "s must be an array, got list"),
    ("merge_state_in_place", "v", read_only, ValueError, "v is written and must not be read-only"),
    ("merge_state_in_place", "s", read_only, ValueError, "s is written and must not be read-only"),
    ("merge_state_in_place", "v", broadcast, ValueError, "v is written and must not repeat elements"),
    ("merge_state_in_place", "s", broadcast, ValueError, "s is written and must not repeat elements"),
    ("merge_state_in_place", "v", zeros(ROWS, DIM), ValueError, "v must have 3 dimensions"),
    ("merge_state_in_place", "s", lambda s: s.astype(np.float16), TypeError, "s must be float32, got float16"),
    ("merge_state_in_place", "s", list, TypeError, "s must be an array of numpy, got list"),
    ("merge_state_in_place", "v_other", zeros(ROWS, HEADS, 8), ValueError, "v_other must have shape .* as v has"),
    ("merge_state_in_place", "s_other", zeros(ROWS), ValueError, "s_other must have 2 dimensions .* as v has"),
    ("merge_state_in_place", "mask", zeros(ROWS + 1, dtype=bool), ValueError, r"mask must have shape .* = \(7,\)"),
    ("merge_state_in_place", "mask", list, TypeError, "mask must be an array of numpy, got list"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "name", "change", "error", "text"), WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(function, name, change, error, text):
    v, s = (np.nan_to_num(x, neginf=-1) for x in make())
    values = [v, s] if function == "merge_states" else [v[:, 0], s[:, 0], v[:, 1], s[:, 1]]
    if function == "merge_state_in_place":
        values.append(np.ones(ROWS, bool))
    function = getattr(flashinfer, function)
    arguments = dict(zip(inspect.signature(function).parameters, map(np.array, values), strict=True))
    arguments[name] = change(arguments[name])
    expect_refusal(function, arguments, ["v", "s"], error, text)


def test_results_in_place_are_apart():
    both = np.zeros((ROWS, HEADS, DIM + 1), np.float32)
    v, s = (x[:, 0] for x in make())
    flashinfer.merge_state_in_place(both[..., :DIM], both[..., DIM], v, s)  # slices of one array are
    arguments = {"v": both[..., :DIM], "s": both[..., 5], "v_other": v, "s_other": s}
    text = "(s must not share memory with v|v must not share memory with s)"
    expect_refusal(flashinfer.merge_state_in_place, arguments, ["v", "s"], ValueError, text)


def test_gradients_are_refused():
    torch = pytest.importorskip("torch")
    v, s = map(to_torch, make())
    v.requires_grad_()
    for function, arguments in (
        (flashinfer.merge_states, (v, s)),
        (flashinfer.merge_state, (v[:, 0], s[:, 0], v[:, 1], s[:, 1])),
        (flashinfer.merge_state_in_place, (v[:, 0], s[:, 0], v[:, 1], s[:, 1])),
    ):
        with pytest.raises(NotImplementedError, match=f"^{function.__name__}: v(_a)? requires a gradient"):
            function(*arguments)
    with torch.no_grad():
        flashinfer.merge_states(v, s)
