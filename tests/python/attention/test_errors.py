"""A wrong argument is an exception whose text names function and argument, and outputs stay untouched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashport
from attention_call import (
    ARRAYS,
    FORMATS,
    HEADS,
    KV_HEADS,
    MAKERS,
    STATE,
    dense_arguments,
    make_attention,
    packed_arguments,
    poisoned_outputs,
)
from helpers import BF16, expect_refusal

EACH_ARRAY = pytest.mark.parametrize(("form", "name"), ARRAYS)


def expect(arguments, error, text):
    expect_refusal(flashport.attention, arguments, ("out", "lse"), error, text)


@pytest.mark.parametrize("form", MAKERS)
def test_the_arguments_are_right_unchanged(form):
    arguments = MAKERS[form]()
    flashport.attention(**arguments)
    assert np.isfinite(arguments["out"][:1].astype(np.float32)).all()


@EACH_ARRAY
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_wrong_rank(form, name, data):
    arguments = MAKERS[form]()
    array = arguments[name]
    if data.draw(st.booleans(), label="one more"):
        wrong = np.expand_dims(array, data.draw(st.integers(0, array.ndim), label="axis"))
    else:
        wrong = np.asarray(array[(0,) * data.draw(st.integers(1, array.ndim), label="fewer")], array.dtype)
    if name == "alibi_slopes" and wrong.ndim in (1, 2):
        return  # either rank will do
    arguments[name] = wrong
    expect(arguments, ValueError, rf"{name} must have .*dimensions? \(.*got [0-9]+: \(")


@EACH_ARRAY
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_wrong_shape(form, name, data):
    arguments = MAKERS[form]()
    array = arguments[name]
    axis = data.draw(st.integers(0, array.ndim - 1), label="axis")
    change = data.draw(st.sampled_from([-1, 1]), label="change")
    shape = list(array.shape)
    shape[axis] += change
    if name == "bias" and axis < 2 and shape[axis] == 1:
        return  # a broadcast axis
    wrong = np.zeros(shape, array.dtype)
    if name.startswith("cu_seqlens"):
        wrong[...] = arguments[name][: len(wrong)] if change < 0 else np.append(arguments[name], arguments[name][-1])
    arguments[name] = wrong
    expect(arguments, ValueError, r"\w+ must .*got ")


@EACH_ARRAY
@pytest.mark.parametrize("dtype", [np.float64, np.bool_, np.complex64, np.int16])
def test_an_element_type_that_nobody_has(form, name, dtype):
    arguments = MAKERS[form]()
    arguments[name] = np.zeros(arguments[name].shape, dtype)
    text = rf"{name} must be [a-z0-9_, ]+, got {np.dtype(dtype).name}$"
    if dtype is np.complex64:
        text = f"{name} has element type complex64, which no argument may have$"
    expect(arguments, TypeError, text)


@EACH_ARRAY
@pytest.mark.parametrize("value", [[1, 2], 3, "q", object()])
def test_no_array(form, name, value):
    arguments = MAKERS[form]() | {name: value}
    expect(arguments, TypeError, rf"{name} must be an array that speaks DLPack .*got {type(value).__name__}")


@pytest.mark.parametrize("name", ["k", "v", "out"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_type_for_queries_keys_values_and_output(name, fmt):
    arguments = make_attention((5, 3), (9, 4), fmt=fmt)
    arguments |= poisoned_outputs(arguments)
    other = np.float32 if fmt != "fp32" else np.float16
    arguments[name] = np.zeros(arguments[name].shape, other)
    expect(
        arguments,
        TypeError,
        rf"{name} must be {arguments['q'].dtype}(, float8[a-z0-9_, ]+ or uint8)?, got {np.dtype(other).name}",
    )


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"softmax_scale": []}, TypeError, "softmax_scale must be a number, got list"),
        ({"softmax_scale": True}, TypeError, "softmax_scale must be a number, got bool"),
        ({"softmax_scale": 1e39}, ValueError, "softmax_scale must be finite in fp32, .*got 1e"),
        ({"softmax_scale": np.nan}, ValueError, "softmax_scale must be finite in fp32, .*got nan"),
        ({"causal": 1}, TypeError, "causal must be True or False, got int"),
        ({"causal": None}, TypeError, "causal must be True or False, got NoneType"),
        ({"return_lse": 0}, TypeError, "return_lse must be True or False, got int"),
        ({"window": 5}, TypeError, r"window must be a tuple \(left, right\), got 5"),
        ({"window": (1, 2, 3)}, TypeError, r"window must be a tuple \(left, right\), got \(1, 2, 3\)"),
        ({"window": (1.5, 0)}, TypeError, r"window\[0\] must be an integer, got float"),
        ({"window": (0, True)}, TypeError, r"window\[1\] must be an integer, got bool"),
        ({"window": (-2, 0)}, ValueError, r"window must be two numbers from -1 \(infinite\) on, got \(-2, 0\)"),
        ({"softcap": "x"}, TypeError, "softcap must be a number, got str"),
        ({"softcap": -1.0}, ValueError, "softcap must "),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and below 1, got 1"),
        ({"dropout_p": -0.1}, ValueError, r"dropout_p must be at least 0 and below 1, got -0\.1"),
        ({"dropout_p": np.nan}, ValueError, "dropout_p must be at least 0 and below 1, got nan"),
        ({"dropout_p": None}, TypeError, "dropout_p must be a number, got NoneType"),
        ({"num_splits": -1}, ValueError, "num_splits must be None "),
        ({"num_splits": 1.0}, TypeError, "num_splits must be an integer, got float"),
        ({"num_splits": 129}, ValueError, r"num_splits must be None .* or a count of at most 128, got 129"),
        ({"max_seqlen_q": 1 << 70}, ValueError, "max_seqlen_q must fit in 64 bits"),
        ({"max_seqlen_k": "9"}, TypeError, "max_seqlen_k must be an integer, got str"),
        ({"stream": "0"}, TypeError, "stream must be a stream or its integer handle, got str"),
    ],
)
def test_options_that_are_no_arrays(change, error, text):
    expect(packed_arguments() | change, error, text)


@pytest.mark.parametrize(
    ("form", "change", "text"),
    [
        ("packed", {"cu_seqlens_k": None}, "cu_seqlens_q and cu_seqlens_k must be given together, got cu_seqlens_q"),
        ("packed", {"cu_seqlens_q": None}, "cu_seqlens_q and cu_seqlens_k must be given together, got cu_seqlens_k"),
        ("packed", {"max_seqlen_q": None}, "max_seqlen_q must be 1 or more with cu_seqlens_q"),
        ("packed", {"max_seqlen_k": 0}, "max_seqlen_k must be 1 or more with cu_seqlens_k"),
        ("dense", {"max_seqlen_q": 5}, "max_seqlen_q must come with cu_seqlens_q"),
        ("dense", {"max_seqlen_k": 9}, "max_seqlen_k must come with cu_seqlens_k"),
        ("packed", {"bias": np.zeros((2, HEADS, 5, 9), np.float32)}, "bias .* must not come with cu_seqlens_q"),
        ("dense", {"leftpad_k": np.array([0, 1], np.int32)}, "bias .* must not come with leftpad_k"),
        ("dense", {"dropout_p": 0.1, "rng_state": None}, r"rng_state .* must come with dropout_p, got dropout_p 0\.1"),
    ],
)
def test_what_cannot_be_combined(form, change, text):
    expect(MAKERS[form]() | change, ValueError, text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cu_seqlens_q": [1, 5, 8]}, "cu_seqlens_q must begin with 0, got 1"),
        ({"cu_seqlens_q": [0, 6, 8]}, "cu_seqlens_q must rise by 0 to max_seqlen_q = 5 a sequence, got 6"),
        ({"cu_seqlens_k": [0, 9, 7]}, "cu_seqlens_k must rise by 0 to max_seqlen_k = 9 a sequence, got -2"),
        ({"cu_seqlens_k": [0, 9, 17]}, "cu_seqlens_k must end within the 15 rows of k, got 17"),
        ({"seqused_q": [6, 3]}, r"seqused_q\[0\] = 6 must lie in \[0, 5\]"),
        ({"seqused_k": [9, 5]}, r"seqused_k\[1\] = 5 must lie in \[0, 4\]"),
        ({"seqused_k": [-1, 2]}, r"seqused_k\[0\] = -1 must lie in \[0, 9\]"),
        ({"leftpad_k": [0, 3]}, r"leftpad_k\[1\] = 3 must lie in \[0, 2\]"),
    ],
)
def test_offsets_and_lengths_in_host_memory_are_checked(change, text):
    ((name, values),) = change.items()
    expect(packed_arguments() | {name: np.array(values, np.int32)}, ValueError, text)


def test_heads_that_do_not_divide():
    arguments = dense_arguments()
    for name in ("k", "v"):
        arguments[name] = np.zeros((2, 9, 3, arguments[name].shape[-1]), BF16)
    text = r"num_q_heads must be a multiple of num_kv_heads, got q \(2, 5, 4, 32\) and k \(2, 9, 3, 32\)$"
    expect(arguments, ValueError, text)


def test_a_last_axis_with_gaps():
    for name in ("q", "k", "v"):
        arguments = dense_arguments()
        arguments[name] = np.zeros((*arguments[name].shape[:-1], 2 * arguments[name].shape[-1]), BF16)[..., ::2]
        expect(arguments, ValueError, rf"{name} must have stride 1 along its last axis, got strides")


@pytest.mark.parametrize(
    ("dim", "dim_v", "text"),
    [
        (8, 32, "head_dim must be a multiple of 8 from 16 to 512, got 8"),
        (20, 32, "head_dim must be a multiple of 8 from 16 to 512, got 20"),
        (32, 520, "head_dim_v must be a multiple of 8 from 16 to 512, got 520"),
        (8192, 8192, "head_dim must be a multiple of 8 from 16 to 512, got 8192"),
    ],
)
def test_head_dims_that_no_kernel_has(dim, dim_v, text):
    q, v = np.zeros((1, 2, 1, dim), BF16), np.zeros((1, 2, 1, dim_v), BF16)
    with pytest.raises(NotImplementedError, match=rf"^attention: {text}$"):
        flashport.attention(q, q, v)
    refused = flashport.supports("attention", head_dim=dim, head_dim_v=dim_v, target="cpu")
    assert (refused.supported, refused.reason) == (False, text)


def test_an_output_that_nobody_could_allocate():
    q = np.broadcast_to(np.zeros((), BF16), (1 << 20, 1 << 20, 1, 1 << 20))
    with pytest.raises(ValueError, match=r"^attention: q must have "):
        flashport.attention(q, q, q)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"shape": (1, 2, 3)}, ValueError, r"shape must have 4 extents \(batch, num_q_heads, q_len, kv_len\), got "),
        ({"shape": (1, 2, 3, -1)}, ValueError, r"shape\[3\] must be non-negative, got -1"),
        ({"shape": 5}, TypeError, "shape must be a tuple of integers, got int"),
        ({"rng_state": np.zeros(2, np.int32)}, TypeError, "rng_state must be int64, got int32"),
        ({"rng_state": np.zeros(3, np.int64)}, ValueError, r"rng_state must have shape \(2\) = \(2,\), got \(3,\)"),
        ({"rng_state": None}, TypeError, "rng_state must be an array that speaks DLPack"),
        ({"dropout_p": 1}, ValueError, "dropout_p must be at least 0 and below 1, got 1"),
        ({"dropout_p": True}, TypeError, "dropout_p must be a number, got bool"),
        ({"mask": np.zeros((1, 2, 3, 5), np.uint8)}, ValueError, r"mask must have the shape \(1, 2, 3, 4\) .*got \(1"),
        ({"mask": np.zeros((1, 2, 3, 4), np.bool_)}, TypeError, "mask must be uint8, got bool"),
    ],
)
def test_dropout_mask(change, error, text):
    arguments = {"shape": (1, 2, 3, 4), "rng_state": STATE, "dropout_p": 0.5, **change}
    expect_refusal(flashport.dropout_mask, arguments, ("mask",), error, text)


def test_sizes_of_workspaces():
    for make in MAKERS.values():
        arguments = make()
        size = flashport.attention_workspace_size(**arguments)
        assert size == flashport.attention_workspace_size(**arguments | {"out": None, "lse": None})
        wanted = flashport.attention(**arguments)[0].copy()
        workspace = np.zeros(size + 16, np.uint8)
        workspace = workspace[-workspace.ctypes.data % 16 :][:size]
        for _ in range(2):
            out, _ = flashport.attention(**arguments, workspace=workspace)
            assert out.tobytes() == wanted.tobytes()
        expect(arguments | {"workspace": workspace[: size - 1]}, ValueError, f"workspace must .*{size}")
    with pytest.raises(ValueError, match="k must have 4 dimensions"):
        flashport.attention_workspace_size(**arguments | {"k": arguments["k"][0]})
    empty = np.zeros((0, 3, KV_HEADS, 32), BF16)
    assert flashport.attention_workspace_size(empty, empty, empty) == 0
