"""fp8 e5m2, int8 and int4: quantised with scales beside them, appended, and read by decode."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import flashport

LARGEST = {"fp8_e4m3": 448, "fp8_e4m3fnuz": 240, "fp8_e5m2": 57344, "int8": 127, "int4": 7}
CARRIER = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
    "int4": np.int8,
}
FORMATS = list(LARGEST)


def rounded(x):
    """To the nearest integer, halves away from zero."""
    return np.trunc(x + np.copysign(np.float32(0.5), x))


def scaled(x, fmt, groups, scale_type):
    """(stored, scales of every group) of fp32 (..., D)."""
    split = x.reshape(*x.shape[:-1], groups, -1)
    scale = (np.abs(split).max(-1) / np.float32(LARGEST[fmt])).astype(scale_type)
    wide = scale.astype(np.float32)[..., None]
    codes = np.divide(split, wide, out=np.zeros_like(split), where=wide != 0).reshape(x.shape)
    if fmt.startswith("fp8"):
        return np.clip(codes, -LARGEST[fmt], LARGEST[fmt]).astype(CARRIER[fmt]), scale
    codes = np.clip(rounded(codes), -LARGEST[fmt], LARGEST[fmt]).astype(np.int8)
    if fmt == "int4":  # LightLLM's: the even values in the low bits
        codes = (codes[..., ::2] & 15 | codes[..., 1::2] << 4).astype(np.int8)
    return codes, scale


def values_of(stored, scale, fmt):
    if fmt == "int4":
        codes = np.stack([stored << 4 >> 4, stored >> 4], -1).reshape(*stored.shape[:-1], -1).astype(np.float64)
    else:
        codes = stored.astype(np.float64)
    split = codes.reshape(*codes.shape[:-1], scale.shape[-1], -1)
    return (split * scale.astype(np.float64)[..., None]).reshape(codes.shape)


def bits(x):
    return np.ascontiguousarray(x).view(np.uint8)


@pytest.mark.parametrize("scale_type", [np.float32, np.float16])
@pytest.mark.parametrize("groups", [16, 4, 1])
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_with_scales(fmt, groups, scale_type):
    x = np.random.default_rng(1).standard_normal((5, 3, 128)).astype(np.float32)
    x[0, 0] = 0
    stored, scale = scaled(x, fmt, groups, scale_type)
    got_scale = np.full((5, 3, groups), 7, scale_type)
    got = flashport.quantize_kv(x, fmt, scale=got_scale)
    assert got.dtype == CARRIER[fmt]
    np.testing.assert_array_equal(got_scale, scale)
    np.testing.assert_array_equal(bits(got), bits(stored))
    wanted = values_of(stored, scale, fmt)
    np.testing.assert_array_equal(flashport.dequantize_kv(got, fmt, scale=scale), wanted.astype(np.float32))
    step = np.abs(x).reshape(5, 3, groups, -1).max(-1, keepdims=True)
    error = np.abs(wanted - x).reshape(5, 3, groups, -1)
    assert (error <= step * {"int8": 0.504 / 127, "int4": 0.504 / 7, "fp8_e5m2": 0.126}.get(fmt, 0.063)).all()
    if groups == 1:  # a row has one scale
        row_scale = np.full((5, 3), 7, scale_type)
        got = flashport.quantize_kv(x.transpose(1, 0, 2), fmt, scale=row_scale.T)
        np.testing.assert_array_equal(bits(got), bits(stored.transpose(1, 0, 2)))
        np.testing.assert_array_equal(row_scale, scale[..., 0])


# From docs/numerics.md: (format, groups of a row; None: no scales beside it) -> relative error.
ERRORS = {
    ("q8_0", None): 0.0054,
    ("q5_1", None): 0.038,
    ("q5_0", None): 0.043,
    ("q4_1", None): 0.078,
    ("iq4_nl", None): 0.079,
    ("q4_0", None): 0.086,
    ("int8", 16): 0.0040,
    ("int8", 1): 0.0065,
    ("fp8_e4m3", 1): 0.026,
    ("int4", 16): 0.072,
    ("int4", 1): 0.118,
}


@pytest.mark.parametrize(("fmt", "groups"), ERRORS)
def test_error_of_normal_values(fmt, groups):
    x = np.random.default_rng(4).standard_normal((4096, 128)).astype(np.float32)
    scale = None if groups is None else np.zeros((4096, groups), np.float16)
    back = flashport.dequantize_kv(flashport.quantize_kv(x, fmt, scale=scale), fmt, scale=scale)
    error = np.sqrt(((back - x) ** 2).mean() / (x**2).mean())
    assert error == pytest.approx(ERRORS[fmt, groups], rel=0.03)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_group_with_what_is_no_number_is_nan(fmt):
    x = np.random.default_rng(2).standard_normal((2, 64)).astype(np.float32)
    x[0, 21], x[1, 60] = np.nan, -np.inf
    scale = np.zeros((2, 8), np.float16)
    back = flashport.dequantize_kv(flashport.quantize_kv(x, fmt, scale=scale), fmt, scale=scale)
    wanted = np.zeros((2, 8), bool)
    wanted[0, 2] = wanted[1, 7] = True
    np.testing.assert_array_equal(np.isnan(scale), wanted)
    np.testing.assert_array_equal(np.isnan(back), wanted.repeat(8, axis=1))


def test_e5m2_without_scales():
    x = np.array([0.0, -0.0, 1.0, 1.125, 1.375, 2.0**-16, 2.0**-17, 3e-5, 57344, 61439, 1e9, np.inf, -np.inf, np.nan],
                 np.float32)  # fmt: skip
    rows = np.repeat(x[:, None, None], 2, axis=2)
    cache = np.zeros(rows.shape, ml_dtypes.float8_e5m2)
    flashport.append_kv(rows, rows, cache, cache.copy(), np.arange(len(x)))
    with np.errstate(over="ignore"):
        wanted = np.where(np.isfinite(x), np.clip(x, -57344, 57344), x).astype(ml_dtypes.float8_e5m2)
    np.testing.assert_array_equal(bits(cache[:13, 0, 0]), bits(wanted[:13]))
    assert bits(cache[13, 0, 0])[0] == 0x7F


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("groups", [None, 16, 1])
@pytest.mark.parametrize("layout", ["NHD", "HND", "pool"])
def test_caches_are_written_and_read(fmt, groups, layout):
    """append_kv, then decode over the cache as a segment, against fp64 of the values stored."""
    rng = np.random.default_rng(3)
    length, heads, dim, pages = 37, 2, 128, 6
    k, v = (rng.standard_normal((length, heads, dim)).astype(np.float32) for _ in "kv")
    table = rng.permutation(pages).astype(np.int32)[None, :5]
    slots = (table[0][np.arange(length) // 8].astype(np.int64)) * 8 + np.arange(length) % 8
    width = dim // 2 if fmt == "int4" else dim

    def shaped(last, dtype):
        axes = {"NHD": (pages, 8, heads), "HND": (pages, heads, 8), "pool": (pages * 8, heads)}[layout]
        return np.zeros((*axes, *last), dtype)

    caches = [shaped((width,), CARRIER[fmt]) for _ in "kv"]
    scales = [shaped(() if groups is None else (groups,), kind) for kind in (np.float32, np.float16)]
    named = {"k_format": fmt, "v_format": fmt, "k_scale": scales[0], "v_scale": scales[1]}
    if layout != "pool":
        named["kv_layout"] = layout
    flashport.append_kv(k, v, *caches, slots, **named)
    stored = []
    for x, kind, cache in zip((k, v), (np.float32, np.float16), caches, strict=True):
        codes, scale = scaled(x, fmt, groups or 1, kind)
        stored.append(values_of(codes, scale, fmt))
        rows = cache.swapaxes(1, 2) if layout == "HND" else cache
        np.testing.assert_array_equal(bits(rows.reshape(pages * 8, heads, width)[slots]), bits(codes))
    where = {"token_table": slots.astype(np.int32)[None]} if layout == "pool" else {"block_table": table}
    segment = flashport.KvSegment(*caches, np.array([length], np.int32), **named, **where)
    q = rng.standard_normal((1, 4, dim)).astype(np.float32)
    out = flashport.flash_decode_segments(q, [segment])
    plain = flashport.flash_decode(q, *caches, np.array([length], np.int32), **named, **where)
    np.testing.assert_array_equal(plain, out)
    for h in range(4):
        weights = np.exp(q[0, h].astype(np.float64) @ stored[0][:, h // 2].T / dim**0.5)
        np.testing.assert_allclose(out[0, h], weights / weights.sum() @ stored[1][:, h // 2], rtol=2e-5, atol=2e-6)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    x = torch.randn(7, 2, 64, dtype=torch.bfloat16)
    scale = torch.zeros(7, 2, 8, dtype=torch.float16)
    version = scale._version
    got = flashport.quantize_kv(x, "fp8_e5m2", scale=scale)
    assert got.dtype == torch.float8_e5m2
    assert scale._version > version
    wanted, wanted_scale = scaled(x.float().numpy(), "fp8_e5m2", 8, np.float16)
    np.testing.assert_array_equal(scale.numpy(), wanted_scale)
    np.testing.assert_array_equal(got.view(torch.uint8).numpy(), bits(wanted))

    cache, scales = torch.zeros(9, 2, 32, dtype=torch.int8), torch.zeros(9, 2, 8, dtype=torch.float16)
    v_cache = torch.zeros(9, 2, 64, dtype=torch.bfloat16)

    def append(k, cache, v_cache, scales):
        flashport.append_kv(k, k, cache, v_cache, torch.arange(7), k_format="int4", k_scale=scales)
        return flashport.quantize_kv(k, "int4", scale=scales[:7] * 0)

    version = scales._version
    codes = append(x, cache, v_cache, scales)
    assert scales._version > version
    wanted, wanted_scale = scaled(x.float().numpy(), "int4", 8, np.float16)
    np.testing.assert_array_equal(cache[:7].numpy(), wanted)
    np.testing.assert_array_equal(scales[:7].numpy(), wanted_scale)
    np.testing.assert_array_equal(codes.numpy(), wanted)
    compiled = [torch.zeros_like(t) for t in (cache, v_cache, scales)]
    again = torch.compile(append, backend="aot_eager", fullgraph=True)(x, *compiled)
    for one, other in zip((cache, v_cache, scales, codes), (*compiled, again), strict=True):
        assert torch.equal(one, other)


def decode_call():
    """A cache of int8 with scales beside it, whose rows past the length have NaN for theirs."""
    rng = np.random.default_rng(5)
    k, k_scale = scaled(rng.standard_normal((2, 9, 2, 64), np.float32), "int8", 8, np.float16)
    v, v_scale = scaled(rng.standard_normal((2, 9, 2, 64), np.float32), "int8", 1, np.float32)
    k_scale[1, 5:] = v_scale[1, 5:] = np.nan
    q = rng.standard_normal((2, 4, 64), np.float32)
    named = {"k_scale": k_scale, "v_scale": v_scale[..., 0]}
    return (q, k, v, np.array([9, 5], np.int32)), named, (values_of(k, k_scale, "int8"), values_of(v, v_scale, "int8"))


def test_flash_decode_takes_scales_of_two_kinds():
    arguments, scales, (k, v) = decode_call()
    q, *_, lens = arguments
    for splits in (None, 2):
        out = flashport.flash_decode(*arguments, **scales, num_splits=splits)
        for b, h in np.ndindex(2, 4):
            weights = np.exp(q[b, h].astype(np.float64) @ k[b, : lens[b], h // 2].T / 8)
            wanted = weights / weights.sum() @ v[b, : lens[b], h // 2]
            np.testing.assert_allclose(out[b, h], wanted, rtol=2e-5, atol=2e-6)
    one = flashport.flash_decode(*arguments, k_scale=scales["k_scale"], v_scale=np.array([0.5], np.float32))
    assert np.isfinite(one).all()
    assert flashport.decode_workspace_size(*arguments, **scales) >= 0


def test_flash_decode_says_who_reads_scales_beside_a_cache():
    query = {"k_format": "int8", "v_format": "int8", "head_dim": 64, "target": "cpu", "scales_beside": True}
    assert "/kv=any/" in flashport.which_kernel("decode", **query)
    assert flashport.supports("decode", **query)
    assert "/kv=any/" in str(flashport.explain("decode", **query, max_kv_len=100))
    for group in (8, 64):
        assert "/kv=any/" in flashport.which_kernel("decode", **query, scale_group=group)
        assert "/kv=any/" in str(flashport.explain("decode", **query, scale_group=group, max_kv_len=100))
    assert "kv=bf16" in flashport.which_kernel("decode", target="cpu")
    assert "/kv=any/" in flashport.which_kernel("decode", target="cpu", scales_beside=True)


def test_flash_decode_refuses_other_scales():
    arguments, _, _ = decode_call()

    def refused(error, **scales):
        with pytest.raises(error) as caught:
            flashport.flash_decode(*arguments, **scales)
        return str(caught.value)

    beside = (
        "must have shape (1,), (num_kv_heads,) = (2,), that of k_cache without its last axis, or that of k_cache with "
        "a group of 8 values or a multiple of it in place of each value"
    )
    for shape in [(2, 9, 3), (2, 9, 2, 16), (2, 9, 2, 3), (5,)]:
        text = f"flash_decode: k_scale {beside}, got {shape} for k_cache (2, 9, 2, 64)"
        assert refused(ValueError, k_scale=np.ones(shape, np.float32)) == text
    text = refused(TypeError, k_scale=np.ones((2, 9, 2)))
    assert text == "flash_decode: k_scale must be float32 or float16, got float64"
    assert refused(TypeError, k_scale=np.ones(2, np.float16)) == "flash_decode: k_scale must be float32, got float16"


def test_flash_decode_compiles_with_scales_of_torch():
    torch = pytest.importorskip("torch")
    arguments, scales, _ = decode_call()
    tensors = [torch.from_numpy(x) for x in arguments]
    named = {name: torch.from_numpy(x) for name, x in scales.items()}

    def call(q, k, v, lens, k_scale, v_scale):
        return flashport.flash_decode(q, k, v, lens, k_scale=k_scale, v_scale=v_scale)

    eager = call(*tensors, **named)
    np.testing.assert_array_equal(eager.numpy(), flashport.flash_decode(*arguments, **scales))
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors, **named), eager)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: flashport.quantize_kv(x, "int8"), ValueError,
         "quantize_kv: scale must be given for int8 and have the shape (3, 64) of the numbers without its last axis, "
         "or with a group of 8 values or a multiple of it in place of each value, got none"),
        (lambda x: flashport.quantize_kv(x, "int4", scale=np.zeros((3, 16), np.float32)), ValueError,
         "quantize_kv: scale must be given for int4 and have the shape (3, 64) of the numbers without its last axis, "
         "or with a group of 8 values or a multiple of it in place of each value, got (3, 16)"),
        (lambda x: flashport.quantize_kv(x, "int8", scale=np.zeros(3, np.float64)), TypeError,
         "quantize_kv: scale must be float32 or float16, got float64"),
        (lambda x: flashport.quantize_kv(x[:, :48], "int4", scale=np.zeros(3, np.float32)), NotImplementedError,
         "quantize_kv: int4 needs a head_dim that is a multiple of 32, got 48"),
        (lambda x: flashport.dequantize_kv(x, "int8", scale=np.zeros(3, np.float32)), TypeError,
         "dequantize_kv: x must be int8, got float32"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error) as caught:
        call(np.ones((3, 64), np.float32))
    assert str(caught.value) == text


WITHOUT = """
import sys
import numpy as np
import flashport
if sys.argv[1] == "missing":
    sys.modules["ml_dtypes"] = None  # as one that is not installed
x, scale = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), np.empty(2, np.float32)
def caches():
    cache = flashport.MixedKVCache(x, 2, 1, 64, max_tokens=64, hot_tokens=16, spill_tokens=16, k_format="fp8_e5m2")
    cache.append(*(np.ones((2, 40, 1, 64), np.float32) for _ in "kv"))
    return cache.segments()[0].k
for made in (
    lambda: flashport.quantize_kv(x, "fp8_e4m3", scale=scale),
    lambda: flashport.quantize_kv(*(x, "fp8_e4m3fnuz"), **{"scale": scale}),
    lambda: flashport.dequantize_kv(flashport.quantize_kv(x, "q8_0"), "q8_0", dtype="bfloat16"),
    caches,
):
    try:
        print(made().dtype)
    except TypeError as error:
        print(error)
"""


@pytest.mark.parametrize("ml_dtypes_is", ["installed", "missing"])
def test_types_that_numpy_gets_from_ml_dtypes(ml_dtypes_is):
    """In a process that has not imported it."""
    command = [sys.executable, "-c", WITHOUT, ml_dtypes_is]
    lines = subprocess.run(command, check=True, text=True, capture_output=True).stdout.splitlines()
    types = ["float8_e4m3fn", "float8_e4m3fnuz", "bfloat16", "float8_e5m2"]
    if ml_dtypes_is == "installed":
        assert lines == types
        return
    out = "pass an out of that type"
    ends = {"quantize_kv": out, "dequantize_kv": out, "MixedKVCache: k_format fp8_e5m2": "use a cache of torch"}
    names = ["quantize_kv", *ends]
    assert lines == [
        f"{name}: NumPy has no type {kind} without the package ml_dtypes: pip install ml_dtypes, or {ends[name]}"
        for name, kind in zip(names, types, strict=True)
    ]
