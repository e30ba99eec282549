"""Numbers that calls take: those that pybind11 converts for flash-attn's compiled half, and torch for its operators."""

from __future__ import annotations

import decimal

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashport.flash_attn as flash_attn  # noqa: E402
from flash_attn_call import int32, offsets, random_tensors  # noqa: E402
from flashport.flash_attn import _checks as checks  # noqa: E402
from flashport.flash_attn import flash_attn_2_cuda as compiled  # noqa: E402


def having(name, value):
    """An object of a class with this method alone."""
    return type(name, (), {name: lambda self: value})()


def failing(self):
    raise KeyError(self)


VALUES = [
    None, True, False, 0, 1, -7, 1 << 31, 1.5, float("nan"), 10**400, "3", "", b"3", bytearray(b"3"), 1j, 0j, [], [1],
    {}, (3,), object(), int, np.int8(3), np.uint64(5), np.float32(2.7), np.float64(2.7), np.bool_(True), np.array(4),
    np.array(2.5), np.array([1, 2]), decimal.Decimal("2.7"), torch.tensor(3), torch.tensor(3.7), torch.tensor(True),
    torch.tensor([1, 2]), torch.tensor([4.0]), having("__index__", 5), having("__int__", 6), having("__float__", 1.5),
    having("__bool__", True), having("__bool__", False), having("__len__", 3),
    *(type("Fails", (), {name: failing})() for name in ("__bool__", "__index__", "__int__", "__float__")),
]  # fmt: skip
KINDS = {"float": checks.to_float, "int": checks.to_int, "bool": checks.to_bool}


@pytest.fixture(scope="module")
def operators():
    """An operator of torch for each kind, which gives the number that it got."""
    library = torch.library.Library("flash_attn_numbers", "DEF")
    for kind in KINDS:
        library.define(f"take_{kind}({kind} x) -> {kind}")
        library.impl(f"take_{kind}", lambda x: x, "CompositeExplicitAutograd")
    yield {kind: getattr(torch.ops.flash_attn_numbers, f"take_{kind}") for kind in KINDS}
    library._destroy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", VALUES, ids=lambda x: type(x).__name__)
def test_conversions_are_pybind11s(operators, kind, value):
    try:
        wanted = operators[kind](value)
    except RuntimeError:
        wanted = None
    if kind == "int" and wanted is not None and wanted >= 1 << 31:  # where an operator has 64 bits
        wanted = None
    if wanted is None:
        with pytest.raises(TypeError, match=r"^f: incompatible function arguments: x must be an? "):
            KINDS[kind]("f", "x", value)
        return
    got = KINDS[kind]("f", "x", value)
    assert type(got) is type(wanted)
    assert got == wanted or (got != got and wanted != wanted)


WINDOWS = [
    [3, 4], torch.tensor([3, 4]), np.array([3, 4]), (np.int64(3), torch.tensor(4)), (3, np.float32(4.5)),
]  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS, ids=lambda x: type(x).__name__)
def test_windows(window):
    q, k, v = random_tensors(1, (2, 20, 4, 32), (2, 33, 2, 32), (2, 33, 2, 32))
    wanted = flash_attn.flash_attn_func(q, k, v, window_size=(3, 4))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=window), wanted)


@pytest.mark.parametrize("q_len", [1, 20])
def test_dense(q_len):
    q, k, v = random_tensors(1, (2, q_len, 4, 32), (2, 33, 2, 32), (2, 33, 2, 32))
    wanted = flash_attn.flash_attn_func(q, k, v, 0.0, 0.5, True, (9, -1), 2.0, return_attn_probs=True)
    numbers = (np.int64(0), decimal.Decimal("0.5"), 1, (9, -1), torch.tensor(2))
    got = flash_attn.flash_attn_func(q, k, v, *numbers, return_attn_probs="yes")  # all that is true will do
    assert all(map(torch.equal, got, wanted))
    got = compiled.fwd(q, k, v, None, None, False, np.float32(0.5), np.bool_(True), 9, -1, 2, None, None)
    assert torch.equal(got[0], wanted[0])
    got = flash_attn.flash_attn_func(q, k, v, False, 0.5, None, return_attn_probs=0)
    assert torch.equal(got, flash_attn.flash_attn_func(q, k, v, softmax_scale=0.5))


def test_packed():
    q, k, v = random_tensors(1, (25, 4, 32), (33, 2, 32), (33, 2, 32))
    lengths = offsets([20, 5]), offsets([30, 3])
    wanted = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, 20, 30, causal=True)
    most = torch.tensor(20), np.int32(30)
    assert torch.equal(flash_attn.flash_attn_varlen_func(q, k, v, *lengths, *most, causal=2.5), wanted)
    got = compiled.varlen_fwd(
        q, k, v, None, *lengths, None, None, None, None, *most, 0, 32**-0.5, None, torch.tensor(True), -1, -1, 0, 0,
        None, having("__index__", 1),
    )  # fmt: skip
    assert torch.equal(got[0], wanted)


def test_cache():
    q, k, v = random_tensors(1, (2, 3, 4, 32), (2, 40, 2, 32), (2, 40, 2, 32))
    wanted = flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=int32(9, 40), causal=True, num_splits=2, return_softmax_lse=True
    )
    got = flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=int32(9, 40), causal=np.bool_(True), softcap=0, rotary_interleaved=None,
        num_splits=torch.tensor(2), return_softmax_lse="yes",
    )  # fmt: skip
    assert all(map(torch.equal, got, wanted))


def test_probabilities_that_are_no_numbers_with_all_results_asked_for():
    q, k, v = random_tensors(1, (2, 20, 4, 32), (2, 33, 2, 32), (2, 33, 2, 32))
    with pytest.raises(TypeError, match=r"^flash_attn_func: incompatible function arguments: dropout_p must be"):
        flash_attn.flash_attn_func(q, k, v, "0.5", return_attn_probs=True)
