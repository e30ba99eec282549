"""MixedKVCache: where tokens go, what is attended to, and that the split into calls does not matter."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import pytest

import flashport
from flashport import MixedKVCache
from flashport.testing import oracle

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 64, 32
LIBRARIES = ["numpy", *(["torch"] if importlib.util.find_spec("torch") else [])]


def made(library, values, dtype="float16"):
    values = np.ascontiguousarray(values, np.float32)
    if library == "numpy":
        return values.astype(dtype)
    torch = pytest.importorskip("torch")
    return torch.from_numpy(values).to(getattr(torch, dtype))


def host(x):
    return x if isinstance(x, np.ndarray) else x.float().numpy() if x.is_floating_point() else x.numpy()


def tokens(count, batch=2, seed=5):
    """(k, v) of a batch, in fp32."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((batch, count, KV_HEADS, dim)).astype(np.float32) for dim in (DIM, DIM_V)]


def cache_of(library="numpy", dtype="float16", batch=2, **options):
    given = {"max_tokens": 300, "head_dim_v": DIM_V, "hot_tokens": 32, "spill_tokens": 16, "sink_tokens": 4} | options
    return MixedKVCache(made(library, [0], dtype), batch, KV_HEADS, DIM, **given)


def filled(pieces, library="numpy", total=None, dtype="float16", **options):
    """A cache that got its tokens in pieces of these sizes."""
    cache, (k, v) = cache_of(library, dtype, **options), tokens(sum(pieces) if total is None else total)
    begin = 0
    for piece in pieces:
        cache.append(*(made(library, x[:, begin : begin + piece], dtype) for x in (k, v)))
        begin += piece
    return cache


def stored(cache, b=0):
    """[(format, keys, values)] of a sequence in fp32, from the segments."""
    found = []
    for segment in cache.segments():
        count = int(host(segment.seqlens)[b])
        rows = []
        sides = ((segment.k, segment.k_format, segment.k_scale), (segment.v, segment.v_format, segment.v_scale))
        for x, fmt, scale in sides:
            own, scale = x[b, :count], None if scale is None else scale[b, :count]
            is_widened = count and ("uint8" in str(own.dtype) or scale is not None)
            own = flashport.dequantize_kv(own, fmt, scale=scale) if is_widened else own
            rows.append(host(own).astype(np.float32))
        found.append((segment.k_format, *rows))
    return found


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("count", [0, 3, 4, 35, 36, 51, 52, 53, 150])
def test_where_tokens_are(library, count):
    """4 sinks, a hot window of 32 to 47, and multiples of 16 between them, in the order of the sequence."""
    cache, (k, v) = filled([count], library), tokens(count)
    quantised = max(count - 4 - 32, 0) // 16 * 16
    sinks, older, hot = stored(cache)
    assert [len(part[1]) for part in (sinks, older, hot)] == [min(count, 4), quantised, max(count - 4, 0) - quantised]
    assert host(cache.lengths).tolist() == [count, count]
    assert host(cache.quantised_lengths).tolist() == [quantised, quantised]
    for keys, given in ((1, k), (2, v)):
        exact = given[0].astype(np.float16).astype(np.float32)
        assert np.array_equal(sinks[keys], exact[:4])
        assert np.array_equal(hot[keys], exact[4 + quantised :])
        if quantised:
            blocks = flashport.quantize_kv(exact[4 : 4 + quantised], "q8_0")
            assert np.array_equal(older[keys], flashport.dequantize_kv(blocks, "q8_0"))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "formats",
    [("q8_0", "q8_0"), ("q4_0", "q5_1"), ("fp8_e4m3", "fp16"), ("int8", "int4"), ("fp8_e5m2", "int8")],
    ids="-".join,
)
def test_calls_do_not_matter(library, formats):
    """Tokens one by one, in a prompt and then one by one, in pieces: the same cache, and the same bits of attention."""
    if library == "numpy" and formats[0].startswith("fp8"):
        formats = ("iq4_nl", "fp16")
    options = dict(zip(("k_format", "v_format"), formats, strict=True))
    q = made(library, np.random.default_rng(1).standard_normal((2, HEADS, DIM)))
    caches = [filled(pieces, library, **options) for pieces in ([130], [1] * 130, [90] + [1] * 40, [7, 60, 50, 13])]
    outputs = [host(cache.attend(q)) for cache in caches]
    for cache, out in zip(caches[1:], outputs[1:], strict=True):
        assert np.array_equal(out, outputs[0])
        for ours, first in zip(cache.segments(), caches[0].segments(), strict=True):
            counts = host(ours.seqlens)
            assert np.array_equal(counts, host(first.seqlens))
            for name, (b, count) in itertools.product(("k", "v", "k_scale", "v_scale"), enumerate(counts)):
                one, other = getattr(ours, name), getattr(first, name)
                assert (one is None) == (other is None)
                assert one is None or bits(library, one[b, :count]) == bits(library, other[b, :count])


def bits(library, x):
    return bytes(x.reshape(-1).view(np.uint8 if library == "numpy" else pytest.importorskip("torch").uint8))


# Formats with factors: (format, values that share one; None is the default) -> (their axes beside tokens and heads,
# type). DIM_V is 32.
FACTORS = {
    "LightLLM's int8": ("int8", None, (4,), "float16"),
    "LightLLM's int4": ("int4", None, (4,), "float16"),
    "int8 by token and head": ("int8", 32, (), "float16"),
    "int4 in groups of 16": ("int4", 16, (2,), "float16"),
    "fp8_e5m2 by token and head": ("fp8_e5m2", 32, (), "float32"),
    "fp8_e4m3 in groups of 8": ("fp8_e4m3", 8, (4,), "float32"),
}


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_factors_beside_the_quantised_part(library, name):
    """Spills and long prompts write what quantize_kv gives; attention is that of the reference on it."""
    fmt, shared, groups, dtype = FACTORS[name]
    cache = filled([20, 70, *[1] * 60], library, v_format=fmt, v_scale_dims=shared)
    segment = cache.segments()[1]
    assert segment.k_scale is None
    assert tuple(segment.v_scale.shape) == (2, 296, KV_HEADS, *groups)
    assert str(segment.v_scale.dtype).endswith(dtype)
    count = int(host(segment.seqlens)[0])
    assert count == 112
    exact = made(library, tokens(150)[1][:, 4 : 4 + count])
    scale = made(library, np.zeros((2, count, KV_HEADS, *groups)), dtype)
    rows = flashport.quantize_kv(exact, fmt, scale=scale)
    assert bits(library, segment.v[:, :count]) == bits(library, rows)
    assert bits(library, segment.v_scale[:, :count]) == bits(library, scale)
    q = made(library, np.random.default_rng(2).standard_normal((2, HEADS, DIM)))
    out = host(cache.attend(q))
    for b in range(2):
        k, v = (np.concatenate([part[i] for part in stored(cache, b)]) for i in (1, 2))
        truth = oracle.attend(oracle.Request(host(q)[b][None].astype(np.float32), k, v))[0]
        assert np.abs(out[b] - truth[0]).max() < 2e-3


def test_size_with_factors():
    """Two of fp16 for a row of keys, and LightLLM's for a row of values, beside int8 and int4."""
    cache = cache_of(sink_tokens=0, k_format="int8", k_scale_dims=32, v_format="int4")
    hot, quantised = 48 * (DIM + DIM_V) * 2, 300 * (DIM + 2 * 2 + DIM_V // 2 + 4 * 2)
    assert cache.nbytes == 2 * KV_HEADS * (hot + quantised)


@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8_e5m2"])
def test_formats_that_every_call_of_a_cache_knows(fmt):
    """Where supports() says that decode reads a format as a segment, appends write it."""
    assert flashport.supports("decode", segment_formats=[fmt, "fp16"], target="cpu")
    assert flashport.supports("append", k_format=fmt, v_format=fmt, scales_beside=True, target="cpu")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("tokens_of_query", [None, 3])
def test_attention_over_what_is_stored(library, tokens_of_query):
    """The reference on the values that the segments hold: causal, and with a mask."""
    cache = filled([150], library)
    shape = (2, HEADS, DIM) if tokens_of_query is None else (2, tokens_of_query, HEADS, DIM)
    q = made(library, np.random.default_rng(2).standard_normal(shape))
    new = tokens_of_query or 1
    out = host(cache.attend(q)).reshape(2, new, HEADS, DIM_V)
    by_segment = host(cache.attend(q, by_segment=True)).reshape(2, new, HEADS, DIM_V)
    mask = np.where(np.random.default_rng(3).random((1, 1, new, 150)) < 0.5, -np.inf, 0)
    masked = host(cache.attend(q, made(library, mask))).reshape(2, new, HEADS, DIM_V)
    for b in range(2):
        parts = stored(cache, b)
        k, v = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
        own = host(q).astype(np.float32)[b].reshape(new, HEADS, DIM)
        truth = oracle.attend(oracle.Request(own, k, v))[0]
        assert np.abs(out[b] - truth).max() < 2e-3
        assert np.abs(by_segment[b] - truth).max() < 2e-3
        for t in range(new):
            seen = np.isfinite(mask[0, 0, t])
            truth = oracle.attend(oracle.Request(own[t : t + 1], k[seen], v[seen]))[0]
            assert np.abs(masked[b, t] - truth[0]).max() < 2e-3


@pytest.mark.parametrize("library", LIBRARIES)
def test_sequences_of_other_lengths(library):
    """A sequence of a batch has the cache and the bits that it has alone."""
    cache = cache_of(library)
    alone = [cache_of(library, batch=1) for _ in range(2)]
    rng = np.random.default_rng(4)
    for step, lengths in enumerate([(90, 20), (1, 1), (0, 40), (5, 3), *[(1, 1)] * 20]):
        k, v = tokens(max(lengths), seed=step)
        cache.append(made(library, k), made(library, v), lengths=lengths)
        for b, one in enumerate(alone):
            one.append(made(library, k[b : b + 1, : lengths[b]]), made(library, v[b : b + 1, : lengths[b]]))
    q = rng.standard_normal((2, HEADS, DIM))
    out = host(cache.attend(made(library, q)))
    assert host(cache.lengths).tolist() == [116, 84]
    for b, one in enumerate(alone):
        assert host(one.quantised_lengths).tolist() == [host(cache.quantised_lengths)[b]]
        assert np.array_equal(host(one.attend(made(library, q[b : b + 1])))[0], out[b])


@pytest.mark.parametrize("library", LIBRARIES)
def test_explicit_spill(library):
    """Without auto_spill the hot window fills up; spill() makes what appends would have made."""
    cache = cache_of(library, auto_spill=False)
    k, v = tokens(130)
    for begin in range(0, 130, 5):
        cache.append(*(made(library, x[:, begin : begin + 5]) for x in (k, v)))
        if begin % 15 == 0:
            cache.spill()
    cache.spill()
    automatic = filled([130], library)
    q = made(library, np.random.default_rng(1).standard_normal((2, HEADS, DIM)))
    assert host(cache.quantised_lengths).tolist() == host(automatic.quantised_lengths).tolist() == [80, 80]
    assert np.array_equal(host(cache.attend(q)), host(automatic.attend(q)))
    cache.spill(5)
    assert host(cache.quantised_lengths).tolist() == [121, 121]
    cache.append(*(made(library, x[:, :1]) for x in (k, v)))
    assert host(cache.lengths).tolist() == [131, 131]
    assert [len(part[1]) for part in stored(cache)] == [4, 121, 6]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_replay_that_finds_no_room_drops_tokens(library):
    """As a graph does that nobody spilled for: the host's count, which a replay does not see, stays where it was."""
    cache = cache_of(library, auto_spill=False)
    k, v = (made(library, x) for x in tokens(70))
    for begin, end in ((0, 40), (40, 66), (66, 69), (69, 70)):  # room for 4 sinks and 64 tokens
        cache._free = 64 if begin else 0
        cache.append(k[:, begin:end], v[:, begin:end])
    assert host(cache.lengths).tolist() == [68, 68]
    for b in range(2):
        assert np.array_equal(stored(cache, b)[2][1], host(k)[b, 4:68].astype(np.float32))


def test_reset_and_size():
    cache = filled([100])
    cache.reset()
    assert host(cache.lengths).tolist() == [0, 0]
    again = cache_of()
    for each in (cache, again):
        each.append(*(made("numpy", x) for x in tokens(70, seed=9)))
    q = made("numpy", np.random.default_rng(1).standard_normal((2, HEADS, DIM)))
    assert np.array_equal(cache.attend(q), again.attend(q))
    rows = 2 * KV_HEADS  # sequences and heads
    assert cache.nbytes == rows * ((4 + 48) * (DIM + DIM_V) * 2 + 296 * (DIM + DIM_V) // 32 * 34)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_types(dtype):
    library = "numpy" if dtype == "float32" else "torch"
    cache = filled([70], library, dtype=dtype)
    q = made(library, np.random.default_rng(1).standard_normal((2, HEADS, DIM)), dtype)
    out = host(cache.attend(q))
    for b in range(2):
        k, v = (np.concatenate([part[i] for part in stored(cache, b)]) for i in (1, 2))
        truth = oracle.attend(oracle.Request(host(q)[b][None], k, v))[0]
        assert np.abs(out[b] - truth[0]).max() < (1e-5 if dtype == "float32" else 2e-2)


MADE = {
    "hot_tokens": ({"hot_tokens": 0}, "hot_tokens must be at least 1, got 0"),
    "sink_tokens": ({"sink_tokens": -1}, "sink_tokens must be at least 0, got -1"),
    "format": ({"k_format": "q3_k"}, "k_format must be one of q8_0, .*, got 'q3_k'"),
    "factors": ({"k_scale_dims": 8}, "k_scale_dims is of int8, int4, .*, and must not come with q8_0"),
    "group": ({"v_format": "int8", "v_scale_dims": 12}, "v_scale_dims must be a multiple of 8 that .* dim 32, .* 12"),
    "int4": ({"v_format": "int4", "head_dim_v": 40}, "v_format int4 needs head dims .* multiples of 32, got 40"),
    "block": ({"head_dim_v": 40}, "v_format q8_0 needs head dims that are multiples of 32, got 40"),
}


@pytest.mark.parametrize(("options", "text"), MADE.values(), ids=MADE)
def test_what_cannot_be_made(options, text):
    with pytest.raises(ValueError, match="MixedKVCache: " + text):
        cache_of(**options)


def test_errors():
    with pytest.raises(TypeError, match="like must be an array of NumPy or torch, got list"):
        MixedKVCache([0], 1, 1, 64, max_tokens=8)
    with pytest.raises(TypeError, match="like must have one of the types float16, bfloat16, float32, got int64"):
        MixedKVCache(np.zeros(1, np.int64), 1, 1, 64, max_tokens=8)
    numbers = ("max_tokens", "hot_tokens", "spill_tokens", "sink_tokens", "head_dim_v", "k_scale_dims", "v_scale_dims")
    for name in numbers:
        for wrong in ("a", 8.0):
            with pytest.raises(TypeError, match=f"^MixedKVCache: {name} must be an int, got {wrong!r}$"):
                cache_of(**{name: wrong})
    cache, (k, v) = cache_of(), (made("numpy", x) for x in tokens(20))
    with pytest.raises(ValueError, match=r"k must have the shape \(2, tokens, 2, 64\), got \(2, 20, 2, 32\)"):
        cache.append(v, v)
    with pytest.raises(ValueError, match="v must have the 20 tokens of k, got 19"):
        cache.append(k, v[:, :19])
    with pytest.raises(TypeError, match="k must be an array of numpy of float16, got float32"):
        cache.append(k.astype(np.float32), v)
    with pytest.raises(ValueError, match=r"lengths must be 2 numbers from 0 to 20, got \[1, 21\]"):
        cache.append(k, v, lengths=[1, 21])
    with pytest.raises(ValueError, match="hot_tokens must be at least 0, got -1"):
        cache.spill(-1)
    with pytest.raises(ValueError, match="max_tokens is 12, and a sequence would have 20"):
        cache_of(max_tokens=12).append(k, v)
    by_hand = cache_of(auto_spill=False)
    for _ in range(3):
        by_hand.append(k, v)
    with pytest.raises(
        ValueError, match="the hot window has room for 64 tokens and would have 76: call spill\\(\\) before"
    ):
        by_hand.append(k, v)
    assert host(by_hand.lengths).tolist() == [60, 60]
    assert host(cache.lengths).tolist() == [0, 0]


@pytest.mark.parametrize("count", [1, 40])  # into the hot window; past it
def test_a_refused_append_does_not_count(count):
    torch = pytest.importorskip("torch")
    cache, (k, v) = filled([20, 1], "torch", total=100), (made("torch", x) for x in tokens(100))
    whole = filled([21, 1, 30], "torch", total=100)
    for _ in range(12):
        with pytest.raises(NotImplementedError, match=r"^MixedKVCache\.append: k requires a gradient"):
            cache.append(k[:, :count].requires_grad_(), v[:, :count])
        k = k.detach()
    for begin, end in ((21, 22), (22, 52)):
        cache.append(k[:, begin:end], v[:, begin:end])
    q = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(1)).half()
    assert torch.equal(cache.attend(q), whole.attend(q))
