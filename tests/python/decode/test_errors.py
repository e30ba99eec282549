"""A wrong array is an exception whose text names function and argument, and outputs stay untouched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashport
from decode_arguments import (
    ARRAYS,
    BATCH,
    FUNCTIONS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    call,
    decode_arguments,
    expect,
    stage1_arguments,
    stage2_arguments,
)
from decode_call import make_decode
from helpers import BF16, to_torch


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_arguments_are_right_unchanged(function):
    arguments = FUNCTIONS[function][0]()
    call(function, arguments)
    out = arguments[FUNCTIONS[function][1][0]]
    if function != "flash_decode_stage1":  # rows past a length stay as they are there
        assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize(("function", "name"), ARRAYS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_wrong_rank(function, name, data):
    arguments = FUNCTIONS[function][0]()
    array = arguments[name]
    if data.draw(st.booleans(), label="one more"):
        wrong = np.expand_dims(array, data.draw(st.integers(0, array.ndim), label="axis"))
    else:
        wrong = array[(0,) * data.draw(st.integers(1, array.ndim), label="fewer")]
        wrong = np.asarray(wrong, array.dtype)
    if function == "flash_decode" and wrong.ndim in {"q": (4,), "k_cache": (3,)}.get(name, ()):
        return  # that rank has a meaning of its own
    arguments[name] = wrong
    # A cache's rank decides what is expected of its fellow.
    told = {"q": "(q|out)", "k_cache": "(k_cache|v_cache)"}.get(name, name)
    expect(function, arguments, ValueError, rf"^{function}: {told} must have .*dimensions? \(.*got {'[0-9]+'}: \(")


@pytest.mark.parametrize(("function", "name"), ARRAYS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_wrong_shape(function, name, data):
    arguments = FUNCTIONS[function][0]()
    array = arguments[name]
    axis = data.draw(st.integers(0, array.ndim - 1), label="axis")
    free = {"k": (0,), "v": (), "Req_to_tokens": (0, 1), "k_cache": (1,)}.get(name, ())
    if axis in free:
        return
    change = data.draw(st.sampled_from([-1, 1]), label="change")
    shape = list(array.shape)
    shape[axis] += change
    arguments[name] = np.zeros(shape, array.dtype)
    expect(function, arguments, ValueError, rf"^{function}: \w+ must .*got ")


@pytest.mark.parametrize(("function", "name"), ARRAYS)
@pytest.mark.parametrize("dtype", [np.float64, np.bool_, np.complex64, np.int16])
def test_an_element_type_that_nobody_has(function, name, dtype):
    arguments = FUNCTIONS[function][0]()
    arguments[name] = np.zeros(arguments[name].shape, dtype)
    text = rf"{name} must be [a-z0-9_, ]+, got {np.dtype(dtype).name}$"
    if dtype is np.complex64:
        text = f"{name} has element type complex64, which no argument may have$"
    expect(function, arguments, TypeError, rf"^{function}: {text}")


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("q", "float16, bfloat16 or float32"),
        ("k_cache", "bfloat16, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, int8 or uint8"),
        ("v_cache", "bfloat16, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, int8 or uint8"),
        ("seqlens", "int32 or int64"),
        ("sinks", "float32"),
        ("out", "float16, bfloat16 or float32"),
    ],
)
def test_a_refused_element_type_is_told_what_its_argument_may_be(name, types):
    arguments = decode_arguments()
    arguments[name] = np.zeros(arguments[name].shape, np.float64)
    expect("flash_decode", arguments, TypeError, rf"^flash_decode: {name} must be {types}, got float64$")


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int16, np.bool_])
def test_such_a_query_is_refused_before_its_output_is_made(dtype):
    torch = pytest.importorskip("torch")
    arguments = decode_arguments()
    q = np.zeros(arguments["q"].shape, dtype)
    arrays = [arguments[name] for name in ("k_cache", "v_cache", "seqlens")]
    text = rf"^flash_decode: q must be float16, bfloat16 or float32, got {np.dtype(dtype).name}$"
    with pytest.raises(TypeError, match=text):
        flashport.flash_decode(q, *arrays)
    with pytest.raises(TypeError, match=text):
        flashport.flash_decode(torch.from_numpy(q), *map(to_torch, arrays))


def test_out_of_another_head_dim():
    arguments = decode_arguments()
    arguments["out"] = np.full((BATCH, HEADS, HEAD_DIM // 2), np.nan, BF16)
    text = r"out must have shape \(batch, num_q_heads, head_dim_v of v_cache\) = \(3, 8, 128\), got \(3, 8, 64\)$"
    expect("flash_decode", arguments, ValueError, rf"^flash_decode: {text}")


def test_pages_without_a_table():
    arguments = decode_arguments()
    for name in ("k_cache", "v_cache"):
        arguments[name] = np.zeros((64, 16, KV_HEADS, HEAD_DIM), BF16)
    text = r"k_cache must have a row for each request: batch is 3, got \(64, 16, 2, 128\); a cache in pages needs "
    expect("flash_decode", arguments, ValueError, rf"^flash_decode: {text}block_table, or kv_indptr and kv_indices$")


@pytest.mark.parametrize(("function", "name"), ARRAYS)
def test_an_element_type_of_another_argument(function, name):
    arguments = FUNCTIONS[function][0]()
    array = arguments[name]
    floats = array.dtype == BF16 or array.dtype == np.float32
    arguments[name] = np.zeros(array.shape, np.int32 if floats else np.float32)
    expect(function, arguments, TypeError, rf"^{function}: \w+ must .*got ")


@pytest.mark.parametrize(("function", "name"), ARRAYS)
@pytest.mark.parametrize("value", [[1, 2], 3, "q", object()])
def test_no_array(function, name, value):
    arguments = FUNCTIONS[function][0]()
    arguments[name] = value
    text = rf"^{function}: {name} must be an array that speaks DLPack .*got {type(value).__name__}"
    with pytest.raises(TypeError, match=text):
        call(function, arguments)


def test_lengths_in_host_memory_are_checked():
    arguments = decode_arguments()
    arguments["seqlens"] = np.array([41, 7, 1], np.int32)
    expect("flash_decode", arguments, ValueError, r"^flash_decode: seqlens")
    arguments = stage2_arguments()
    arguments["B_Seqlen"] = np.array([65, 1, 1], np.int32)
    expect("flash_decode_stage2", arguments, ValueError, r"^flash_decode_stage2: B_Seqlen")


def test_the_ranks_that_a_port_once_got_wrong():
    arguments = stage2_arguments()
    arguments["mid_out"] = np.zeros((2, 3, 4, 5, 6), np.float32)
    expect(
        "flash_decode_stage2",
        arguments,
        ValueError,
        r"^flash_decode_stage2: mid_out must have 4 dimensions \(batch, num_q_heads, blocks, head_dim\), got 5: "
        r"\(2, 3, 4, 5, 6\)$",
    )


def test_too_many_dimensions():
    arguments = decode_arguments()
    arguments["q"] = np.zeros((1,) * 9, np.float32)
    expect("flash_decode", arguments, ValueError, r"^flash_decode: q must have at most 8 dimensions, got 9")


def test_stage1_without_keys_checks_lengths_and_rows():
    arguments = stage1_arguments() | {"max_len_in_batch": 0, "B_Seqlen": np.zeros(BATCH, np.int32)}
    flashport.flash_decode_stage1(**arguments)
    assert np.isnan(arguments["mid_out"]).all()
    late = arguments | {"B_Seqlen": np.array([0, 0, 5], np.int32)}
    expect("flash_decode_stage1", late, ValueError, r"^flash_decode_stage1: B_Seqlen\[2\] = 5 must lie in \[0, 0\]")
    far = arguments | {"B_req_idx": np.array([0, 9, 1], np.int32)}
    expect("flash_decode_stage1", far, ValueError, r"^flash_decode_stage1: B_req_idx\[1\] = 9 must lie in \[0, 3\]")


def test_what_no_kernel_serves_says_why():
    x = make_decode(head_dim=24)
    support = flashport.supports("decode", head_dim=1024, target="cpu")
    assert not support
    assert support.reason
    q = np.zeros((1, 1, 1024), BF16)
    cache = np.zeros((1, 4, 1, 1024), BF16)
    with pytest.raises(NotImplementedError, match=r"^flash_decode: "):
        flashport.flash_decode(q, cache, cache, np.array([1], np.int32))
    with pytest.raises(NotImplementedError):
        flashport.which_kernel("decode", head_dim=1024, target="cpu")
    assert x.q.shape[-1] == 24


def test_append_and_merge_refusals():
    rng = np.random.default_rng(0)
    k = rng.standard_normal((3, 2, 64), np.float32)
    cache = np.zeros((4, 2, 2, 64), np.float32)
    with pytest.raises(ValueError, match=r"^append_kv: v_cache must"):
        flashport.append_kv(k, k, cache, np.zeros((4, 2, 3, 64), np.float32), np.arange(3))
    with pytest.raises(TypeError, match=r"^append_kv: positions must"):
        flashport.append_kv(k, k, cache, cache.copy(), np.zeros(3, np.float32))
    assert not cache.any()
    o, lse = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"^merge_states: lse_base must be None .* or 2, got 10"):
        flashport.merge_states(o, lse, lse_base=10)
    with pytest.raises(ValueError, match=r"^merge_states: lse must"):
        flashport.merge_states(o, lse[:1])
    with pytest.raises(ValueError, match=r"^merge_state: "):
        flashport.merge_state(o, lse, o[:1], lse)
