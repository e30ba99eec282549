"""Formats of K and V by name: what a name has to fit, and that every way to a call takes it."""

from __future__ import annotations

import inspect
import re
import tracemalloc
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import flashport
from decode_arguments import decode_arguments, expect, stage1_arguments
from flashport import lightllm
from flashport.testing import numerics, oracle
from helpers import BF16
from lightllm_call import make_state

FORMATS = (
    '"fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e4m3fnuz", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", '
    '"fp8_e5m2", "int8" or "int4"'
)
BLOCKS = '"q8_0", "q4_0", "q4_1", "q5_0", "q5_1" or "iq4_nl"'
FP8 = ml_dtypes.float8_e4m3fn
SIDES = {"flash_decode": ("k_cache", "v_cache"), "flash_decode_stage1": ("k", "v"), "append_kv": ("k_cache", "v_cache")}


def append_arguments():
    rng = np.random.default_rng(3)
    k, v = rng.standard_normal((2, 3, 2, 128), np.float32).astype(BF16)
    k_cache, v_cache = np.zeros((2, 4, 4, 2, 128), BF16)
    return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "positions": np.array([5, 0, 3])}


MAKE = {"flash_decode": decode_arguments, "flash_decode_stage1": stage1_arguments, "append_kv": append_arguments}


def quantised(values):
    """bf16 values as q8_0 bytes, and the values that these stand for; NaN stays NaN."""
    rows = numerics.encode(np.nan_to_num(values.astype(np.float32)), "q8_0")
    rows[np.isnan(values.astype(np.float32)).any(axis=-1)] = 255
    return rows, numerics.decode(rows, "q8_0")


def refuse(function, changes, error, text):
    arguments = MAKE[function]() | changes
    if function == "append_kv":
        before = arguments["k_cache"].tobytes(), arguments["v_cache"].tobytes()
        with pytest.raises(error, match=text):
            flashport.append_kv(**arguments)
        assert before == (arguments["k_cache"].tobytes(), arguments["v_cache"].tobytes())
    elif function == "flash_decode_stage1":
        with pytest.raises(error, match=text):
            flashport.flash_decode_stage1(**arguments)
        assert np.isnan(arguments["mid_out"]).all()
    else:
        expect(function, arguments, error, text)


@pytest.mark.parametrize("function", MAKE)
@pytest.mark.parametrize("side", [0, 1])
def test_uint8_has_no_format_of_its_own(function, side):
    name, letter = SIDES[function][side], "kv"[side]
    cache = np.zeros((*MAKE[function]()[name].shape[:-1], 136), np.uint8)
    wanted = f"{letter}_format must say what {name} of uint8 stores, got none; pass {letter}_format={BLOCKS}"
    refuse(function, {name: cache}, ValueError, f"^{function}: {re.escape(wanted)}$")


@pytest.mark.parametrize("function", MAKE)
@pytest.mark.parametrize("side", [0, 1])
def test_a_format_fits_its_element_type(function, side):
    name, letter = SIDES[function][side], "kv"[side]
    for fmt, carrier in (("q8_0", "uint8"), ("fp16", "float16"), ("fp8_e4m3", "float8_e4m3fn")):
        text = (
            f'{name} must be {carrier} for {letter}_format="{fmt}", got bfloat16; pass the format that it has, or none'
        )
        refuse(
            function,
            {f"{letter}_format": fmt},
            TypeError,
            f"^{function}: {re.escape(text)} for its element type's own$",
        )
    cache = np.zeros(MAKE[function]()[name].shape, np.uint8)
    text = f'{name} must be float8_e4m3fn for {letter}_format="fp8_e4m3", got uint8; '
    refuse(function, {name: cache, f"{letter}_format": "fp8_e4m3"}, TypeError, f"^{function}: {re.escape(text)}")


@pytest.mark.parametrize("function", MAKE)
@pytest.mark.parametrize("name", ["k_format", "v_format"])
@pytest.mark.parametrize(
    ("value", "error", "got"),
    [
        ("q4_2", ValueError, '"q4_2"'),
        ("float16", ValueError, '"float16"'),
        (8, TypeError, "int"),
        (BF16, TypeError, "type"),
    ],
)
def test_names_of_formats(function, name, value, error, got):
    refuse(function, {name: value}, error, f"^{function}: {name} must be {FORMATS}, got {got}$")


@pytest.mark.parametrize("function", [name for name in MAKE if name != "append_kv"])
def test_pairs_without_a_kernel_of_their_own_are_read_by_one_of_any_formats(function):
    """Zeros of every pair are as good as zeros of the query's type."""
    k_name, v_name = SIDES[function]
    shape = MAKE[function]()[k_name].shape
    blocks = {k_name: np.zeros((*shape[:-1], 136), np.uint8), "k_format": "q8_0"}
    fp8 = {v_name: np.zeros(shape, FP8)}
    four_bits = {k_name: np.zeros((*shape[:-1], 72), np.uint8), "k_format": "q4_0"}
    four_bits |= {v_name: np.zeros((*shape[:-1], 72), np.uint8), "v_format": "q4_0"}
    for changes in (blocks | fp8, four_bits, fp8, blocks | {"v_format": "bf16"}):
        arguments = MAKE[function]() | changes
        if v_name not in changes:
            arguments[v_name] = np.zeros_like(arguments[v_name])
        getattr(flashport, function)(**arguments)
        out = arguments["out" if function == "flash_decode" else "mid_out"]
        assert (out[np.isfinite(out)] == 0).all()
        assert np.isfinite(out.astype(np.float32)).any()


def test_a_format_is_looked_at_after_ranks_and_before_shapes():
    arguments = decode_arguments()
    uint8 = np.zeros((*arguments["k_cache"].shape[:-1], 7), np.uint8)
    expect("flash_decode", arguments | {"k_cache": uint8}, ValueError, "k_format must say what k_cache")
    wrong = {"k_cache": uint8, "seqlens": np.zeros((3, 1), np.int32)}
    expect("flash_decode", arguments | wrong, ValueError, "seqlens must have 1 dimension")


def test_a_format_is_asked_for_also_where_the_output_is_made():
    c = q8_0_cache()
    for named, side in (({}, "k"), ({"k_format": "q8_0"}, "v")):
        with pytest.raises(
            ValueError, match=rf"^flash_decode: {side}_format must say what {side}_cache of uint8 stores"
        ):
            flashport.flash_decode(c.q, c.k, c.v, c.seqlens, **named)


def test_the_own_format_may_be_named():
    arguments = decode_arguments()
    out = arguments.pop("out")
    flashport.flash_decode(**arguments, out=out, k_format="bf16")
    again = np.full(out.shape, np.nan, BF16)
    flashport.flash_decode(**arguments, out=again)
    assert again.tobytes() == out.tobytes()


def q8_0_cache():
    """A decode call over a cache that append_kv fills, and what the oracle makes of the stored values."""
    x = decode_arguments()
    (k, k_values), (v, v_values) = quantised(x["k_cache"]), quantised(x["v_cache"])
    parts = [
        oracle.attend(oracle.Request(x["q"][b : b + 1].astype(np.float32), k_values[b, :n], v_values[b, :n]))[0]
        for b, n in enumerate(x["seqlens"])
    ]
    named = {"k_format": "q8_0", "v_format": "q8_0"}
    return SimpleNamespace(q=x["q"], k=k, v=v, seqlens=x["seqlens"], named=named, truth=np.concatenate(parts), x=x)


def test_blocks_by_name():
    c = q8_0_cache()
    got = flashport.flash_decode(c.q, c.k, c.v, c.seqlens, **c.named)
    np.testing.assert_allclose(got.astype(np.float32), c.truth, atol=0.02, rtol=0.02)
    starred = {"q": c.q, "k_cache": c.k, "v_cache": c.v, "seqlens": c.seqlens}
    assert flashport.flash_decode(**starred, **c.named).tobytes() == got.tobytes()
    size = flashport.decode_workspace_size(c.q, c.k, c.v, c.seqlens, **c.named)
    assert size == flashport.decode_workspace_size(c.q, c.x["k_cache"], c.x["v_cache"], c.seqlens)
    with pytest.raises(
        ValueError, match=r"^flash_decode: v_format must say what v_cache of uint8 stores, got none; pass"
    ):
        flashport.decode_workspace_size(c.q, c.k, c.v, c.seqlens, k_format="q8_0")


def test_blocks_that_append_kv_writes():
    c = q8_0_cache()
    batch, length = c.k.shape[:2]
    caches = [np.zeros(c.k.shape, np.uint8) for _ in range(2)]
    rows = [
        np.nan_to_num(c.x[name].astype(np.float32)).reshape(batch * length, 2, 128) for name in ("k_cache", "v_cache")
    ]
    flashport.append_kv(*rows, *caches, np.arange(batch * length), **c.named)
    got = flashport.flash_decode(c.q, *caches, c.seqlens, **c.named)
    np.testing.assert_allclose(got.astype(np.float32), c.truth, atol=0.02, rtol=0.02)


def test_blocks_in_the_drop_ins_of_lightllm():
    x = make_state()
    (k, k_values), (v, v_values) = quantised(x.k), quantised(x.v)
    named = {"k_format": "q8_0", "v_format": "q8_0"}
    for wrapper in (
        lightllm.token_decode_attention_flash_decoding,
        lightllm.gqa_token_decode_attention_flash_decoding,
    ):
        wanted = wrapper(x.q, x.state, 8, 128, k_values.astype(BF16), v_values.astype(BF16))
        got = wrapper(x.q, x.state, 8, 128, k, v, **named)
        np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), atol=0.02, rtol=0.02)
        with pytest.raises(ValueError, match=r"^flash_decode_stage1: k_format must say what k of uint8 stores"):
            wrapper(x.q, x.state, 8, 128, k, v)


@pytest.mark.parametrize("function", ["flash_decode", "gated_delta_chunk"])
def test_a_size_takes_the_arguments_of_the_call(function):
    size = {"flash_decode": flashport.decode_workspace_size}.get(function, flashport.gated_delta_chunk_workspace_size)
    own, calls = (inspect.signature(each).parameters for each in (size, getattr(flashport, function)))
    described = [[(x.name, x.kind, x.default) for x in each.values()] for each in (own, calls)]
    assert described[0] == described[1]


def peak_of(call):
    """What a call gives, and the most bytes that NumPy held meanwhile."""
    call()
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_sizes_allocate_nothing():
    """Their outputs would have half a gigabyte."""
    q = np.broadcast_to(np.ones(512, BF16), (4096, 128, 512))
    cache = np.broadcast_to(np.ones(512, BF16), (4096, 8, 1, 512))
    size, bytes_held = peak_of(lambda: flashport.decode_workspace_size(q, cache, cache, np.ones(4096, np.int32)))
    assert size > 0
    assert bytes_held < 1 << 20
    q = np.broadcast_to(np.ones(128, BF16), (1, 1 << 16, 16, 128))
    v = np.broadcast_to(np.ones(128, BF16), (1, 1 << 16, 32, 128))
    gates = np.broadcast_to(np.float32(0), (1, 1 << 16, 32))
    size, bytes_held = peak_of(lambda: flashport.gated_delta_chunk_workspace_size(q, q, v, gates, gates))
    assert size > 0
    assert bytes_held < 1 << 20


def test_sizes_look_at_what_is_given():
    x = decode_arguments()
    size = flashport.decode_workspace_size(**x, softcap=20.0, window=(3, -1), return_lse=True)
    assert size == flashport.decode_workspace_size(*(x[name] for name in ("q", "k_cache", "v_cache", "seqlens")))
    with pytest.raises(ValueError, match=r"^flash_decode: out must have shape"):
        flashport.decode_workspace_size(**x | {"out": x["out"][:, :4]})
    with pytest.raises(TypeError, match=r"^decode_workspace_size: return_lse must be True or False, got int"):
        flashport.decode_workspace_size(**x, return_lse=1)
