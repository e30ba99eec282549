"""Outputs that share memory with other arguments are refused, and rows that no sequence has are not written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashport
from attention_call import ARRAYS, HEADS, KV_HEADS, MAKERS, check, expect_right, make_attention
from helpers import BF16, expect_refusal, same, share_memory


def expect(arguments, text):
    expect_refusal(flashport.attention, arguments, (), ValueError, text)


@pytest.mark.parametrize(("form", "name"), ARRAYS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_outputs_that_share_memory_with_another_argument(form, name, data):
    arguments = MAKERS[form]()
    output = data.draw(st.sampled_from([output for output in ("out", "lse") if output != name]))
    share_memory(arguments, output, name, data.draw(st.integers(0, (arguments[output].nbytes - 1) // 16)))
    text = rf"({output} must not share memory with {name}|{name} must not share memory with {output}); pass another"
    expect(arguments, f"{text} tensor$")


def test_inputs_may_be_one_array():
    q = make_attention((40, 40), (40, 40), packed=False, heads=(2, 2))["q"]
    check({"q": q, "k": q, "v": q, "causal": True})


def projection(tokens, seed=0):
    """A packed projection [tokens, heads of q, k and v, 32], and q, k and v as views of it."""
    whole = np.random.default_rng(seed).standard_normal((*tokens, HEADS + 2 * KV_HEADS, 32), np.float32).astype(BF16)
    return whole, dict(zip("qkv", np.split(whole, [HEADS, HEADS + KV_HEADS], axis=-2), strict=True))


@pytest.mark.parametrize("packed", [True, False])
def test_views_of_a_packed_projection(packed):
    whole, views = projection((21,) if packed else (3, 7))
    assert all(np.shares_memory(view, whole) for view in views.values())
    if packed:
        offsets = {f"cu_seqlens_{side}": np.array([0, 15, 21], np.int32) for side in "qk"}
        views |= offsets | {"max_seqlen_q": 15, "max_seqlen_k": 15}
    out, lse = check(views | {"causal": True})
    copies = {name: x.copy() if name in "qkv" else x for name, x in views.items()}
    for got, wanted in zip((out, lse), flashport.attention(**copies, causal=True, return_lse=True), strict=True):
        same(got, wanted)


def test_an_output_between_the_inputs():
    """Memory that only interleaves is taken; one shared element is refused."""
    whole, views = projection((3, 7))
    room = np.full((3, 7, whole.shape[2] + HEADS, 32), np.nan, BF16)
    room[:, :, : whole.shape[2]] = whole
    parts = np.split(room, [HEADS, HEADS + KV_HEADS, HEADS + 2 * KV_HEADS], axis=2)
    views = dict(zip(("q", "k", "v", "out"), parts, strict=True))
    wanted = flashport.attention(views["q"], views["k"], views["v"])
    flashport.attention(**views)
    same(views["out"], wanted)
    same(room[:, :, : whole.shape[2]], whole)
    expect(
        views | {"out": room[:, :, whole.shape[2] - 1 : -1]}, "out must not share memory with v; pass another tensor$"
    )
    expect(views | {"out": views["q"]}, "out must not share memory with q; pass another tensor$")


def test_an_output_whose_rows_lie_on_each_other():
    q = np.zeros((2, 3, HEADS, 32), BF16)
    out = np.lib.stride_tricks.as_strided(np.zeros((2, 3, HEADS, 32), BF16), strides=(0, 256, 64, 2))
    expect({"q": q, "k": q, "v": q, "out": out}, "out is written and must not be broadcast, got stride 0 along axis 0")


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_outputs_of_any_strides(fmt):
    arguments = make_attention((30, 20), (40, 40), (32, 48), fmt)
    dtype, tokens = arguments["q"].dtype, len(arguments["q"])
    rows = np.full((HEADS, 2 * tokens, 64), np.nan, dtype)
    columns = np.full((HEADS, 48, 2 * tokens), np.nan, dtype)
    for out in (rows[:, ::2, 5:53].swapaxes(0, 1), columns[..., ::2].transpose(2, 0, 1)):
        lse = np.full((tokens, HEADS), np.nan, np.float32).T
        flashport.attention(**arguments, out=out, lse=lse)
        expect_right(arguments, out, lse)
    for room in (rows[:, 1::2], columns[..., 1::2]):
        assert np.isnan(room.astype(np.float32)).all()


def test_rows_that_no_sequence_has_are_not_written():
    arguments = make_attention((5, 0, 3), (9, 2, 4))
    for options in ({}, {"seqused_q": np.array([2, 0, 3], np.int32)}):
        out, lse = np.full((10, HEADS, 32), 7, BF16), np.full((HEADS, 10), 7, np.float32)
        flashport.attention(**arguments, **options, out=out, lse=lse)
        owned = np.isin(np.arange(10), (0, 1, 5, 6, 7) if options else range(8))
        assert (out[~owned] == 7).all()
        assert (lse[:, ~owned] == 7).all()
        assert not (lse[:, owned] == 7).any()


def test_read_only_inputs_are_read_and_outputs_refused():
    arguments = make_attention()
    out = np.zeros_like(arguments["q"])
    for array in (*arguments.values(), out):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    flashport.attention(**arguments)
    expect(arguments | {"out": out}, "out is written and must not be read-only")
    assert not out.astype(np.float32).any()
