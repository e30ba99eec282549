"""ggml's attention on tensors of ne and nb: against loops over bytes, which know nothing of flashport's reader."""

from __future__ import annotations

import itertools

import gguf
import numpy as np
import pytest

import flashport
from flashport import ggml
from ggml_trace import T, decoded, encoded, slope

RNG = np.random.default_rng(11)
HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 64, 32
GGML = {"f32": T.F32, "f16": T.F16, "bf16": T.BF16} | {
    name: T[name.upper()] for name in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
}


def rows_of(values, kind):
    """Bytes of rows; those of iq4_nl, which gguf does not quantise, by the library, whose bits other tests check."""
    if kind == "iq4_nl":
        return flashport.quantize_kv(np.ascontiguousarray(values, np.float32), "iq4_nl")
    return encoded(values, GGML[kind])


def cache(keys, kind, dim, batch=1, slack=0):
    """(tensor, values) of a cache [D, heads, tokens, batch] in memory, permuted to [D, tokens, heads, batch]."""
    values = RNG.standard_normal((batch, keys + slack, KV_HEADS, dim)).astype(np.float32)
    memory = rows_of(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[GGML[kind]]
    row = dim // block * size
    nb = (size, row, row * KV_HEADS, row * KV_HEADS * (keys + slack))
    tensor = ggml.Tensor(memory, kind, (dim, KV_HEADS, keys, batch), nb).permute(0, 2, 1, 3)
    assert tensor.ne == (dim, keys, KV_HEADS, batch)
    assert tensor.nb == (nb[0], nb[2], nb[1], nb[3])
    return tensor, values_of(tensor)


def values_of(tensor):
    """fp32 values in (batch, heads, tokens, D), row by row from the bytes at ggml's addresses."""
    flat = np.frombuffer(tensor.data.tobytes(), np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[GGML[tensor.type]]
    row = tensor.ne[0] // block * size
    found = np.zeros(tensor.ne[::-1], np.float32)
    for i3, i2, i1 in itertools.product(*(range(extent) for extent in tensor.ne[:0:-1])):
        begin = tensor.offset + i1 * tensor.nb[1] + i2 * tensor.nb[2] + i3 * tensor.nb[3]
        found[i3, i2, i1] = decoded(flat[begin : begin + row], GGML[tensor.type])
    return found


def queries(tokens, batch=1, kind="f32"):
    """[D, heads, tokens, batch] in memory, permuted."""
    memory = encoded(RNG.standard_normal((batch, tokens, HEADS, DIM)), GGML[kind])
    tensor = ggml.Tensor(memory, kind, (DIM, HEADS, tokens, batch)).permute(0, 2, 1, 3)
    return tensor, values_of(tensor)


def masks(tokens, keys, batch=1, heads=1, kind="f16", padded=64):
    """A mask that no causal rule gives, with padded rows that hold NaN, and every query a key."""
    values = np.where(RNG.random((batch, heads, tokens, keys)) < 0.4, -np.inf, RNG.integers(-4, 1, (tokens, keys)) / 4)
    values[..., 0] = 0
    full = np.full((batch, heads, padded, keys), np.nan)
    full[:, :, :tokens] = values
    memory = full.astype(np.float16 if kind == "f16" else np.float32)
    return ggml.Tensor(memory, kind, (keys, padded, heads, batch)), values


def expected(q, k, v, mask, *, scale=None, max_bias=0.0, logit_softcap=0.0, sinks=None):
    """(batch, tokens, heads, DV): ggml's operation by loops in fp64."""
    batch, heads, tokens, dim = q.shape
    group = heads // k.shape[1]
    out = np.zeros((batch, tokens, heads, v.shape[3]))
    for b, h, t in itertools.product(range(batch), range(heads), range(tokens)):
        scores = k[b, h // group].astype(np.float64) @ q[b, h, t] * (dim**-0.5 if scale is None else scale)
        if logit_softcap:
            scores = logit_softcap * np.tanh(scores / logit_softcap)
        if mask is not None:
            scores = scores + slope(h, heads, max_bias) * mask[b % len(mask), h % mask.shape[1], t]
        least = scores.max() if sinks is None else max(scores.max(), sinks[h])
        weights = np.exp(scores - least)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - least))
        out[b, t, h] = weights / total @ v[b, h // group].astype(np.float64)
    return out


def check(result, truth, limit):
    assert result.type == "f32"
    batch, tokens, heads, dim = truth.shape
    assert result.ne == (dim, heads, tokens, batch)
    error = np.abs(np.asarray(result.array(), np.float64) - truth).max() / np.abs(truth).max()
    assert error <= limit, error


OPTIONS = {
    "plain": {},
    "scale and softcap": {"scale": 0.3, "logit_softcap": 2.0},
    "max_bias": {"max_bias": 8.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_standard(kind, tokens, options):
    (q, q_values), (k, k_values), (v, v_values) = queries(tokens), cache(50, kind, DIM), cache(50, kind, DIM_V)
    mask, mask_values = masks(tokens, 50)
    truth = expected(q_values, k_values, v_values, mask_values, **options)
    check(ggml.flash_attn_ext(q, k, v, mask, **options), truth, 2e-3 if kind == "f16" else 2e-6)


@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_no_mask_hides_nothing(tokens):
    (q, q_values), (k, k_values), (v, v_values) = queries(tokens), cache(33, "f32", DIM), cache(33, "f32", DIM_V)
    check(ggml.flash_attn_ext(q, k, v), expected(q_values, k_values, v_values, None), 2e-6)


@pytest.mark.parametrize("tokens", [2, 24])
def test_masks_of_heads_and_sequences(tokens):
    q, q_values = queries(tokens, batch=2)
    (k, k_values), (v, v_values) = cache(20, "f32", DIM, batch=2, slack=3), cache(20, "f32", DIM_V, batch=2)
    sinks = RNG.standard_normal(HEADS).astype(np.float32)
    for heads, batch in ((1, 2), (HEADS, 1), (HEADS, 2)):
        mask, mask_values = masks(tokens, 20, batch, heads, "f32")
        truth = expected(q_values, k_values, v_values, mask_values, sinks=sinks)
        check(ggml.flash_attn_ext(q, k, v, mask, sinks=ggml.Tensor.of(sinks)), truth, 2e-6)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"])
def test_quantised_keys(kind, tokens):
    """One operand, every type; K and V of different ones."""
    (q, q_values), (k, k_values), (v, v_values) = queries(tokens), cache(70, kind, DIM), cache(70, "q8_0", DIM_V)
    mask, mask_values = masks(tokens, 70)
    check(ggml.flash_attn_ext(q, k, v, mask), expected(q_values, k_values, v_values, mask_values), 2e-3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("tokens", "older"), [(1, 60), (7, 60), (1, 0), (20, 60)])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_mixed(kind, tokens, older, options):
    if tokens > 16 and kind == "q4_0":
        kind = "f16"  # attention reads it in its own type
    q, q_values = queries(tokens)
    (k, k_values), (v, v_values) = cache(24, "f16", DIM), cache(24, "f16", DIM_V)
    (k_quant, k_older), (v_quant, v_older) = cache(older, kind, DIM), cache(older, kind, DIM_V)
    mask, mask_values = masks(tokens, older + 24)
    all_k, all_v = np.concatenate([k_older, k_values], 2), np.concatenate([v_older, v_values], 2)
    truth = expected(q_values, all_k, all_v, mask_values, **options)
    check(ggml.mixed_attention(q, k, v, mask, k_quant, v_quant, **options), truth, 3e-3)


def test_views_are_not_copied():
    memory = np.zeros((6, 4, 64), np.float16)
    for data in (memory, torch_of(memory)):
        tensor = ggml.Tensor(data, "f16", (64, 4, 6), offset=0).permute(0, 2, 1, 3)
        view = tensor.array()
        assert tuple(view.shape) == (1, 4, 6, 64)
        view[0, 3, 5, 7] = 2
        assert data[5, 3, 7] == 2
        again = ggml.Tensor.of(view)
        assert (again.ne, again.nb) == (tensor.ne, tensor.nb)
        assert again.array()[0, 3, 5, 7] == 2
        data[5, 3, 7] = 0


def torch_of(array):
    return pytest.importorskip("torch").from_numpy(array)


def test_torch_gives_the_bits_of_numpy_and_bf16():
    torch = pytest.importorskip("torch")
    (q, _), (k, _), (v, _) = queries(1), cache(50, "q8_0", DIM), cache(50, "f16", DIM_V)
    mask, _ = masks(1, 50)
    ours = ggml.flash_attn_ext(q, k, v, mask)

    def moved(tensor):
        return ggml.Tensor(torch.from_numpy(np.array(tensor.data)), tensor.type, tensor.ne, tensor.nb)

    theirs = ggml.flash_attn_ext(*map(moved, (q, k, v, mask)))
    assert isinstance(theirs.array(), torch.Tensor)
    assert np.array_equal(theirs.array().numpy(), ours.array())
    (k, k_values), (v, v_values) = cache(50, "bf16", DIM), cache(50, "bf16", DIM_V)
    q, q_values = queries(3, kind="bf16")
    truth = expected(q_values, k_values, v_values, None)
    result = ggml.flash_attn_ext(moved(q), moved(k), moved(v))
    assert np.abs(result.array().numpy() - truth).max() < 2e-2
    with pytest.raises(TypeError, match="NumPy and CuPy have no bf16"):
        ggml.flash_attn_ext(q, k, v)


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 32])
@pytest.mark.parametrize("max_bias", [0.0, 4.0, 8.0])
def test_slopes(heads, max_bias):
    assert ggml.slopes(heads, max_bias) == pytest.approx([slope(h, heads, max_bias) for h in range(heads)], rel=1e-6)


def test_slopes_errors():
    with pytest.raises(ValueError, match=r"ggml\.slopes: num_heads must be at least 1, got 0"):
        ggml.slopes(0, 8.0)
    with pytest.raises(ValueError, match="max_bias must be 0 or more, and finite, got -1"):
        ggml.slopes(4, -1.0)


TENSOR_ERRORS = {
    "type": (lambda x: ggml.Tensor(x, "q3_k", (64,)), "type must be one of f32, f16, bf16, .*, got 'q3_k'"),
    "extents": (lambda x: ggml.Tensor(x, "f16", (1, 1, 1, 1, 1)), "ne must be one to four extents, fastest first"),
    "block": (lambda x: ggml.Tensor(x, "q8_0", (48,)), r"ne\[0\] must be a multiple of 32, the values of a block"),
    "strides": (lambda x: ggml.Tensor(x, "f16", (64, 2), (2,)), "nb must have as many byte strides as ne has extents"),
    "past": (lambda x: ggml.Tensor(x, "f16", (64, 5)), "must lead to whole elements of the 512 bytes of data"),
    "offset": (lambda x: ggml.Tensor(x, "f16", (64, 4), offset=2), "whole elements of the 510 bytes of data from"),
    "odd": (lambda x: ggml.Tensor(x, "f16", (64, 2), (2, 129)), "copy a tensor whose rows lie apart, as ggml_cont"),
    "gaps": (lambda x: ggml.Tensor(x[:, ::2], "f16", (64,)), "data must be contiguous: describe a view by nb"),
    "dtype": (lambda x: ggml.Tensor.of(x, "f32"), "array must have the elements of type .*, got float16"),
    "axes": (lambda x: ggml.Tensor.of(x).permute(0, 1, 1, 3), "axes of permute must be 0 to 3 in some order"),
    "blocks": (
        lambda x: ggml.Tensor(x, "q8_0", (64, 2)).permute(1, 0, 2, 3),
        "permute of q8_0 must leave axis 0, whose blocks are one piece, where it is",
    ),
}


@pytest.mark.parametrize(("make", "text"), TENSOR_ERRORS.values(), ids=TENSOR_ERRORS)
def test_wrong_descriptions(make, text):
    with pytest.raises(ValueError, match=r"ggml\.Tensor: .*" + text):
        make(np.zeros((4, 64), np.float16))


def test_wrong_arguments():
    (q, _), (k, _), (v, _) = queries(2), cache(10, "f16", DIM), cache(10, "f16", DIM_V)
    other, _ = cache(9, "f16", DIM_V)
    mask, _ = masks(2, 9)
    with pytest.raises(TypeError, match=r"ggml\.flash_attn_ext: k must have a ggml\.Tensor, got ndarray"):
        ggml.flash_attn_ext(q, np.zeros(3), v)
    with pytest.raises(ValueError, match=r"ggml\.flash_attn_ext: v must have ne\[1:\] \[10, 2, 1\], as the keys, got"):
        ggml.flash_attn_ext(q, k, other)
    with pytest.raises(ValueError, match=r"mask must have ne \[10, at least 2\], keys and padded tokens.* got ne \[9,"):
        ggml.flash_attn_ext(q, k, v, mask)
    with pytest.raises(ValueError, match=r"ggml\.mixed_attention: v_hot must have ne\[1:\]"):
        ggml.mixed_attention(q, k, other, None, k, v)
    with pytest.raises(ValueError, match=r"max_bias must be 0, or more where there is a mask for its slopes, got 8"):
        ggml.flash_attn_ext(q, k, v, max_bias=8.0)
    transposed = ggml.Tensor(np.zeros((KV_HEADS, DIM_V, 10), np.float16), "f16", (10, DIM_V, KV_HEADS)).permute(
        1, 0, 2, 3
    )
    assert transposed.ne == v.ne
    with pytest.raises(ValueError, match=r"v must have nb\[0\] 2, rows whose elements are neighbours.*ggml_cont"):
        ggml.flash_attn_ext(q, k, transposed)
    integers = ggml.Tensor(np.zeros((2, 10), np.uint8).repeat(34), "q8_0", (32, 20))
    with pytest.raises(TypeError, match="q must have the type f32 or f16 or bf16, got q8_0"):
        ggml.flash_attn_ext(integers, integers, integers)
