"""FlashInfer's merges, under the original signatures and layouts, against plain NumPy."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest

import flashport
from flashport import flashinfer
from flashport.testing import oracle
from helpers import BF16, assert_close, expect_refusal, expect_words, from_torch, same, to_torch

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


STATE, IN_PLACE, MANY = "merge_state", "merge_state_in_place", "merge_states"
EMPTY = "empty_like(): argument 'input' (position 1) must be Tensor, not "
PASSED = ", ".join(f"{i}: DLTensor*" for i in range(4))
CALL = f"`merge_state_in_place({PASSED}, 4: Optional<DLTensor*>) -> void`"
NO_TO, NO_DEVICE = "'list' object has no attribute 'to'; ", "'list' object has no attribute 'device'; "
CHECK, SIZES = "Check failed:", "Check failed: a.size(i) == b.size(i)"
MISMATCH = "Mismatched type on argument #{} when calling:"
DISPATCH = "failed to dispatch data type; "

# function, argument, what becomes of it, FlashInfer's words, its class where that is not RuntimeError
THEIRS = [
    (STATE, "v_a", zeros(ROWS, DIM), f"{CHECK} v_a.ndim() == 3 (2 vs. 3) : v_a must be a 3D tensor; v_a"),
    (STATE, "v_a", list, f"{EMPTY}list; v_a must be an array", TypeError),
    (STATE, "v_a", lambda _: None, f"{EMPTY}NoneType; ", TypeError),
    (STATE, "v_a", zeros(ROWS, HEADS, DIM, dtype=np.int32), f"{DISPATCH}v_a must be float16, bfloat16 or float32"),
    (STATE, "v_a", zeros(ROWS, HEADS, DIM, dtype=np.float64), f"{DISPATCH}v_a must be"),
    (STATE, "s_a", zeros(ROWS, HEADS + 1), f"{SIZES} (5 vs. 4) : s_a.size(1) and s_b.size(1) "),
    (STATE, "s_a", zeros(ROWS, HEADS, 1), f"{CHECK} s_a.ndim() == 2 (3 vs. 2) : s_a must be a 2D tensor; "),
    (STATE, "s_a", list, f"{NO_TO}s_a must be an array, got list", AttributeError),
    (STATE, "v_b", zeros(ROWS, HEADS, 8), f"{SIZES} (64 vs. 8) : v_a.size(2) and v_b.size(2) "),
    (STATE, "v_b", zeros(ROWS), f"{CHECK} v_b.ndim() == 3 (1 vs. 3) : v_b must be a 3D tensor; "),
    (STATE, "v_b", lambda _: None, f"{MISMATCH.format(2)} `merge_state({PASSED}, 4: DL", TypeError),
    (STATE, "s_b", zeros(ROWS), f"{CHECK} s_b.ndim() == 2 (1 vs. 2) : s_b must be a 2D tensor; s_b must have 2"),
    (STATE, "s_b", lambda _: 1.0, "'float' object has no attribute 'to'; s_b must be an", AttributeError),
    (MANY, "v", zeros(ROWS, HEADS, DIM), "not enough values to unpack (expected 4, got 3); v must", ValueError),
    (MANY, "v", zeros(ROWS, 1, 1, 1, 1), "too many values to unpack (expected 4); v must have 4", ValueError),
    (MANY, "v", list, f"{NO_DEVICE}v must be an array, got list", AttributeError),
    (MANY, "v", zeros(ROWS, STATES, HEADS, DIM, dtype=np.int64), f"{DISPATCH}v must be float16"),
    (MANY, "v", zeros(ROWS, STATES, HEADS, 0), "Unsupported head_dim: 0; v must have a head_dim of 1 or more"),
    (MANY, "s", zeros(ROWS, HEADS, STATES), f"{CHECK} v.size(1) == s.size(1) (3 vs. 4) : s must have shape (7, "),
    (MANY, "s", zeros(ROWS, STATES), f"{CHECK} s.ndim() == 3 (2 vs. 3) : s must be a 3D tensor; "),
    (MANY, "s", list, f"{NO_TO}s must be an array, got list", AttributeError),
    (IN_PLACE, "v", broadcast, "v must be contiguous, or at least not repeat elements, as it is written"),
    (IN_PLACE, "s", broadcast, "s must be contiguous, or at least not repeat elements, as it is written"),
    (IN_PLACE, "v", zeros(ROWS, DIM), f"{CHECK} v.ndim() == 3 (2 vs. 3) : v must be a 3D tensor; "),
    (IN_PLACE, "v", list, f"{MISMATCH.format(0)} {CALL}. Expected `DLTensor*` but got ", TypeError),
    (IN_PLACE, "v", zeros(ROWS, HEADS, DIM, dtype=np.int32), f"{DISPATCH}v must be float16"),
    (IN_PLACE, "s", list, f"{NO_TO}s must be an array, got list", AttributeError),
    (IN_PLACE, "v_other", zeros(ROWS, HEADS, 8), f"{SIZES} (64 vs. 8) : v.size(2) and v_other."),
    (IN_PLACE, "v_other", list, f"{MISMATCH.format(2)} {CALL}. Expected `DLTensor*` but ", TypeError),
    (IN_PLACE, "s_other", zeros(ROWS), f"{CHECK} s_other.ndim() == 2 (1 vs. 2) : s_other must be a 2D tensor; "),
    (IN_PLACE, "s_other", list, f"{NO_TO}s_other must be an array, got list", AttributeError),
    (IN_PLACE, "mask", zeros(ROWS + 1, dtype=bool), f"{CHECK} v.size(0) == mask.value().size(0) (7 vs. 8) : mask"),
    (IN_PLACE, "mask", zeros(ROWS, 1, dtype=bool), f"{CHECK} mask.value().ndim() == 1 (2 vs. 1) : mask.value() must "),
    (IN_PLACE, "mask", list, f"{MISMATCH.format(4)} {CALL}. Expected `Optional<", TypeError),
]  # fmt: skip

# What FlashInfer takes, or does wrongly without a word: function, argument, what becomes of it, our class, our words
OURS = [
    (STATE, "s_a", zeros(ROWS, HEADS, dtype=np.int32), TypeError, "s_a must be float32, got int32"),
    (STATE, "v_b", zeros(ROWS, HEADS, DIM, dtype=np.float16), TypeError, "v_b must be float32, got float16"),
    (IN_PLACE, "v", read_only, ValueError, "v is written and must not be read-only"),
    (IN_PLACE, "s", read_only, ValueError, "s is written and must not be read-only"),
    (IN_PLACE, "s", lambda s: s.astype(np.float16), TypeError, "s must be float32, got float16"),
]


def call_with(function, name, change):
    """A function, and right arguments but one."""
    v, s = (np.nan_to_num(x, neginf=-1) for x in make())
    values = [v, s] if function == MANY else [v[:, 0], s[:, 0], v[:, 1], s[:, 1]]
    if function == IN_PLACE:
        values.append(np.ones(ROWS, bool))
    function = getattr(flashinfer, function)
    arguments = dict(zip(inspect.signature(function).parameters, map(np.array, values), strict=True))
    arguments[name] = change(arguments[name])
    return function, arguments


@pytest.mark.parametrize(("function", "name", "change", "words", "kind"), [(*row, RuntimeError)[:5] for row in THEIRS])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_flashinfers_words_and_class(library, function, name, change, words, kind):
    expect_words(*call_with(function, name, change), library, words, kind)


@pytest.mark.parametrize(("function", "name", "change", "error", "text"), OURS)
def test_a_wrong_argument_is_named_and_nothing_is_written(function, name, change, error, text):
    function, arguments = call_with(function, name, change)
    expect_refusal(function, arguments, ["v", "s"], error, text)


@pytest.mark.parametrize("function", [STATE, IN_PLACE, MANY])
def test_tensors_lie_on_one_device(function):
    torch = pytest.importorskip("torch")
    place = "cuda" if torch.cuda.is_available() else "meta"
    for name in inspect.signature(getattr(flashinfer, function)).parameters:
        call, arguments = call_with(function, name, np.array)
        moved = {key: to_torch(x) for key, x in arguments.items()}
        moved[name] = moved[name].to(place)
        words = r"\w+ must be a CUDA tensor, or all of a call on one other device; got v"
        if name == "mask":
            words = r"Check failed: mask.value\(\).device\(\).device_type == v.device\(\).device_type; mask must"
        expect_refusal(call, moved, ["v", "s"], RuntimeError, words)


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


class OnlyDlpack:
    """An array that says nothing of its axes."""

    def __dlpack__(self, **_: object) -> object:
        raise AssertionError("nothing is read")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_many_states_have_axes() -> None:
    v = np.zeros((2, 3, 4, 8), np.float32)
    with pytest.raises(TypeError, match="merge_states: s must be an array with axes, got OnlyDlpack"):
        flashinfer.merge_states(v, OnlyDlpack())
