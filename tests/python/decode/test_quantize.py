"""quantize_kv and dequantize_kv against the gguf package, bit for bit; append_kv and attention on what they make."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import flashport
from flashport.testing import numerics

gguf = pytest.importorskip("gguf")
from gguf import quants  # noqa: E402

BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "iq4_nl": 18}
FORMATS = list(BYTES)
LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def kind(fmt):
    return getattr(gguf.GGMLQuantizationType, fmt.upper())


def iq4_nl_blocks(x):
    """As ggml's reference quantiser of iq4_nl, which the gguf package does not have: x (blocks, 32)."""
    largest = np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), 1)
    is_zero = np.abs(largest) < np.float32(1e-15)
    with np.errstate(all="ignore"):
        scaled = np.where(is_zero, np.float32(0), np.float32(1) / (largest / np.float32(-127))) * x
    below = np.clip(np.searchsorted(LEVELS, scaled, side="right") - 1, 0, 14)
    codes = below + (scaled - LEVELS[below] >= LEVELS[below + 1] - scaled)
    products = np.zeros(len(x), np.float32)
    squares = np.zeros(len(x), np.float32)
    for i in range(32):  # the order of the sums
        q = LEVELS[codes[:, i]]
        products += x[:, i] * x[:, i] * q * x[:, i]
        squares += x[:, i] * x[:, i] * q * q
    with np.errstate(all="ignore"):
        d = np.where(is_zero[:, 0], np.float32(0), products / squares).astype(np.float16)
    codes = np.where(is_zero, 8, codes).astype(np.uint8)
    return np.concatenate([d.view(np.uint8).reshape(-1, 2), codes[:, :16] | codes[:, 16:] << 4], 1)


def quantised(x, fmt):
    """(..., bytes of a row) of fp32 (..., D)."""
    if fmt == "iq4_nl":
        return iq4_nl_blocks(x.reshape(-1, 32)).reshape(*x.shape[:-1], x.shape[-1] // 32 * 18)
    with np.errstate(all="ignore"):
        return quants.quantize(x, kind(fmt))


def dequantised(x, fmt):
    with np.errstate(all="ignore"):
        return quants.dequantize(x, kind(fmt))


def values():
    """Rows of four blocks: of every magnitude that scales in fp16 have and beyond, ties, zeros, extremes."""
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal((200, 128)) * scale for scale in (1, 0.02, 300, 1e-5, 1e-7, 1e-9, 1e5, 1e-20, 1e-35)]
    rows += [rng.integers(-34, 35, (300, 128)) * step for step in (0.5, 0.1, 2.0**-9)]
    rows += [np.full((1, 128), x) for x in (0.0, -0.0, 1.0, -1.0, 65504.0, 3e4)]
    return np.concatenate(rows).astype(np.float32)


def expect_bits(got, wanted, fmt):
    """Equal bits.

    Those of q5_0 that gguf gives depend on NumPy, because it rounds twice: before version 2 codes of at most one block
    in a hundred differ, by one step.
    """
    if fmt != "q5_0" or np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        np.testing.assert_array_equal(got, wanted)
        return
    size = BYTES[fmt]
    ours, theirs = (x.reshape(-1, size) for x in (got, wanted))
    odd = (ours != theirs).any(axis=1)
    assert odd.mean() < 0.01
    np.testing.assert_array_equal(ours[odd, :2], theirs[odd, :2])
    step = np.abs(ours[odd, :2].copy().view(np.float16).astype(np.float32))
    difference = np.abs(dequantised(ours[odd], fmt) - dequantised(theirs[odd], fmt))
    assert (difference <= 1.001 * step).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_are_those_of_ggml(fmt):
    x = values()
    got = flashport.quantize_kv(x, fmt)
    assert got.dtype == np.uint8
    assert got.shape == (len(x), 4 * BYTES[fmt])
    expect_bits(got, quantised(x, fmt), fmt)
    back = flashport.dequantize_kv(got, fmt)
    assert back.dtype == np.float32
    wanted = dequantised(got, fmt)
    assert np.array_equal(back, wanted, equal_nan=True)
    finite = np.isfinite(wanted)
    assert np.array_equal(back.view(np.uint32)[finite], wanted.view(np.uint32)[finite])  # zeros' signs among them


@pytest.mark.parametrize("fmt", FORMATS)
def test_oracle_of_the_wheel(fmt):
    """flashport.testing.numerics, by which the selftest checks a device, makes and reads the same bits."""
    x = values()
    x = x[np.abs(x).max(axis=1) > 1e-30]  # whose scales have a reciprocal
    stored = quantised(x, fmt)
    expect_bits(numerics.encode(x, fmt), stored, fmt)
    assert np.array_equal(numerics.decode(stored, fmt), dequantised(stored, fmt), equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS)
def test_scales_without_a_reciprocal_are_zero(fmt):
    """Conversions of infinities to integers, with which ggml makes codes there, are not defined; what is read is."""
    x = np.random.default_rng(4).standard_normal((50, 64)).astype(np.float32) * np.float32(1e-39)
    back = flashport.dequantize_kv(flashport.quantize_kv(x, fmt), fmt)
    assert (back == 0).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_is_read(fmt):
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (5000, BYTES[fmt]), np.uint8)
    scales = (rng.standard_normal((5000, 2)) * 10.0 ** rng.integers(-7, 4, (5000, 2))).astype(np.float16)
    shared = 4 if fmt.endswith("_1") else 2
    blocks[:, :shared] = scales.view(np.uint8)[:, :shared]
    for dtype, rounded in (("float32", np.float32), (np.float16, np.float16)):
        got = flashport.dequantize_kv(blocks, fmt, dtype=dtype)
        assert got.dtype == rounded
        with np.errstate(all="ignore"):
            wanted = dequantised(blocks, fmt).astype(rounded)
        assert np.array_equal(got, wanted, equal_nan=True)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_block_with_what_is_no_number_is_nan(fmt, bad):
    x = np.random.default_rng(6).standard_normal((2, 96)).astype(np.float32)
    clean = flashport.quantize_kv(x, fmt)
    x[1, 45] = bad
    got = flashport.quantize_kv(x, fmt).reshape(2, 3, -1)
    assert got[1, 1, :2].view(np.uint16) == 0x7E00
    assert not got[1, 1, 2:].any()
    assert np.isnan(flashport.dequantize_kv(got[1, 1], fmt)).all()
    got[1, 1] = clean.reshape(2, 3, -1)[1, 1]
    np.testing.assert_array_equal(got.reshape(2, -1), clean)


@pytest.mark.parametrize("fmt", FORMATS)
def test_strides_and_outputs(fmt):
    x = np.random.default_rng(7).standard_normal((4, 3, 64, 5)).astype(np.float32)
    turned = x.transpose(3, 0, 1, 2)[::2]
    wanted = quantised(np.ascontiguousarray(turned), fmt)
    np.testing.assert_array_equal(flashport.quantize_kv(turned, fmt), wanted)
    pool = np.full((3, 4, 3, 200), 7, np.uint8)
    out = pool[..., 2 : 2 + wanted.shape[-1]]
    assert flashport.quantize_kv(turned, fmt, out=out) is out
    np.testing.assert_array_equal(out, wanted)
    assert (pool[..., :2] == 7).all()
    assert (pool[..., 2 + wanted.shape[-1] :] == 7).all()
    back = np.full((64, 3, 4, 3), np.nan, np.float16).transpose(3, 2, 1, 0)
    assert flashport.dequantize_kv(out, fmt, out=back) is back
    np.testing.assert_array_equal(back, dequantised(wanted, fmt).astype(np.float16))
    np.testing.assert_array_equal(flashport.quantize_kv(x[0, 0].T[0], fmt), quantised(x[0, 0].T[0].copy(), fmt))


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    x = torch.randn(5, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    got = flashport.quantize_kv(x, "q5_0")
    np.testing.assert_array_equal(got.numpy(), quantised(x.float().numpy(), "q5_0"))
    back = flashport.dequantize_kv(got, "q5_0", dtype=torch.bfloat16)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, torch.from_numpy(dequantised(got.numpy(), "q5_0")).bfloat16())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: flashport.quantize_kv(x[:, :48], "q4_0"), NotImplementedError,
         "quantize_kv: q4_0 needs a head_dim that is a multiple of 32, got 48"),
        (lambda x: flashport.quantize_kv(x, "bf16"), ValueError,
         "quantize_kv: format must be one of fp8_e4m3, fp8_e4m3fnuz, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, fp8_e5m2, "
         "int8, int4, got bf16; for an element type's own format convert the array"),
        (lambda x: flashport.quantize_kv(x, "q4_0", out=np.zeros((3, 34), np.uint8)), ValueError,
         "quantize_kv: out must have shape (3, 36) as x has (3, 64), got (3, 34)"),
        (lambda x: flashport.quantize_kv(x.astype(np.int32), "q4_0"), TypeError,
         "quantize_kv: x must be float16, bfloat16 or float32, got int32"),
        (lambda x: flashport.quantize_kv(x, "q4_0", out=np.zeros(120, np.uint8)[1:109].reshape(3, 36)), ValueError,
         "quantize_kv: out must have its data and all rows at even addresses, got strides (36, 1) of 1-byte elements"),
        (lambda x: flashport.dequantize_kv(x.view(np.uint8), "q4_0"), ValueError,
         "dequantize_kv: x must have rows of whole blocks, 18 bytes each in q4_0, got (3, 256)"),
        (lambda x: flashport.dequantize_kv(np.zeros((3, 18), np.uint8), "q4_0", dtype="int32"), ValueError,
         'dequantize_kv: dtype must be float32, float16 or bfloat16, got "int32"'),
        (lambda x: flashport.dequantize_kv(np.zeros((3, 18), np.uint8), "q4_0", dtype="fp16", out=x[:, :32]),
         ValueError, "dequantize_kv: dtype must be None where out is given, which has its own"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error) as caught:
        call(np.ones((3, 64), np.float32))
    assert str(caught.value) == text


PAIRS = [*((fmt, fmt) for fmt in FORMATS), *itertools.pairwise([*FORMATS, "fp16", "q4_0"])]


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_caches_are_written_and_read(k_format, v_format):
    """append_kv into pages, then attention of many queries and of one on them, against fp64 of the values stored."""
    rng = np.random.default_rng(8)
    length, heads, dim, pages = 37, 2, 64, 6
    k, v = (rng.standard_normal((length, heads, dim)).astype(np.float32) for _ in "kv")
    table = rng.permutation(pages).astype(np.int32)[None, :5]
    slots = (table[0][np.arange(length) // 8].astype(np.int64)) * 8 + np.arange(length) % 8
    caches, stored = [], []
    for rows, fmt in ((k, k_format), (v, v_format)):
        width, dtype = (dim, np.float16) if fmt == "fp16" else (dim // 32 * BYTES[fmt], np.uint8)
        caches.append(np.full((pages, 8, heads, width), 255, np.uint8).astype(dtype))
        stored.append(rows.astype(np.float16).astype(np.float64) if fmt == "fp16" else
                      dequantised(quantised(rows, fmt), fmt).astype(np.float64))  # fmt: skip
    named = {"k_format": k_format, "v_format": v_format}
    flashport.append_kv(k, v, *caches, slots, **named)
    if k_format != "fp16":
        got = caches[0].reshape(pages * 8, heads, -1)[slots]
        np.testing.assert_array_equal(got, quantised(k, k_format))
    for q_len in (20, 1):
        q = rng.standard_normal((1, q_len, 4, dim)).astype(np.float32)
        if k_format == "fp16" or v_format == "fp16":
            q = q.astype(np.float16)
        seqused = np.array([length], np.int32)
        out = flashport.attention(q, *caches, block_table=table, seqused_k=seqused, causal=True, **named)
        wanted = np.zeros(q.shape)
        for h in range(4):
            scores = q[0, :, h].astype(np.float64) @ stored[0][:, h // 2].T / dim**0.5
            hidden = np.arange(length)[None] > np.arange(q_len)[:, None] + length - q_len
            weights = np.exp(np.where(hidden, -np.inf, scores))
            wanted[0, :, h] = weights / weights.sum(1, keepdims=True) @ stored[1][:, h // 2]
        tolerance = 2e-3 if q.dtype == np.float16 else 1e-5
        assert np.abs(out - wanted).max() < tolerance


def test_decode_says_what_it_reads():
    asked = {"target": "cpu", "k_format": "q4_0", "v_format": "iq4_nl"}
    assert flashport.supports("decode", **asked)
    assert flashport.which_kernel("decode", **asked).startswith("decode/fp32/kv=any/hd128/r16/cpu")
    asked = {"target": "cpu", "dtype": "fp32", "k_format": "q4_0", "v_format": "iq4_nl", "paged": True, "q_len": 1}
    assert flashport.supports("attention", **asked)
    assert flashport.which_kernel("attention", **asked).startswith("decode/fp32/kv=any/")  # few queries
