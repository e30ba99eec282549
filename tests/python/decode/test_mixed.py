"""Decode over segments of several formats: values against fp64 on what the formats hold, texts of errors."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashport
from helpers import BF16, same, to_torch

HEADS, KV_HEADS, DIM = 8, 2, 64
BLOCKS = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
TYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": BF16, "fp8_e4m3": ml_dtypes.float8_e4m3fn}
TYPES["fp8_e4m3fnuz"] = ml_dtypes.float8_e4m3fnuz
FORMATS = [*TYPES, *BLOCKS]


def stored(x, fmt):
    """Rows of the format, and the numbers that they hold, in fp64."""
    if fmt in BLOCKS:
        rows = flashport.quantize_kv(x, fmt)
        return rows, flashport.dequantize_kv(rows, fmt).astype(np.float64)
    rows = x.astype(TYPES[fmt])
    return rows, rows.astype(np.float64)


def poison(rows, lens):
    """NaN in the rows past each length."""
    rows = rows.copy()
    for row, length in zip(rows, lens, strict=True):
        row[length:] = 255 if rows.dtype == np.uint8 else np.nan
    return rows


def make(formats, lens, seed=0, slack=3):
    """Queries, segments and the numbers of each sequence's keys and values."""
    rng = np.random.default_rng(seed)
    batch = len(lens[0])
    q = rng.standard_normal((batch, HEADS, DIM)).astype(np.float32)
    segments, keys, values = [], [[] for _ in range(batch)], [[] for _ in range(batch)]
    for (k_format, v_format), of in zip(formats, lens, strict=True):
        shape = (batch, max(of) + slack, KV_HEADS, DIM)
        k, k_numbers = stored(rng.standard_normal(shape).astype(np.float32), k_format)
        v, v_numbers = stored(rng.standard_normal(shape).astype(np.float32), v_format)
        for b, length in enumerate(of):
            keys[b].append(k_numbers[b, :length])
            values[b].append(v_numbers[b, :length])
        segment = flashport.KvSegment(
            poison(k, of), poison(v, of), np.array(of, np.int32), k_format=k_format, v_format=v_format
        )
        segments.append(segment)
    return q, segments, [np.concatenate(x) for x in keys], [np.concatenate(x) for x in values]


def attend(q, keys, values, masks=None, slopes=None, softcap=0.0):
    out = np.zeros(q.shape, np.float64)
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        for h in range(HEADS):
            s = k[:, h // (HEADS // KV_HEADS)] @ q[b, h].astype(np.float64) / np.sqrt(DIM)
            s = softcap * np.tanh(s / softcap) if softcap else s
            if masks is not None:
                m = masks[b, h, 0, : len(s)].astype(np.float64)
                s = np.where(np.isinf(m), -np.inf, s + m * (1 if slopes is None else slopes[h]))
            if len(s) == 0 or np.isinf(s).all():
                continue
            p = np.exp(s - s.max())
            out[b, h] = p @ v[:, h // (HEADS // KV_HEADS)] / p.sum()
    return out


@pytest.mark.parametrize("k_format", FORMATS)
def test_every_pair_of_formats(k_format):
    for seed, v_format in enumerate(FORMATS):
        q, segments, k, v = make([(k_format, v_format), ("fp16", "fp16")], [(70, 0, 64), (5, 3, 65)], seed)
        got = flashport.flash_decode_segments(q, segments)
        np.testing.assert_allclose(got, attend(q, k, v), rtol=2e-5, atol=2e-5)
        query = {"q_dtype": "fp32", "head_dim": DIM, "target": "cpu"}
        formats = [k_format, v_format, "fp16"]
        assert flashport.supports("decode", **query, segment_formats=formats)
        assert "/kv=any/" in flashport.which_kernel("decode", **query, segment_formats=formats)


@pytest.mark.parametrize("k_format", ["bf16", *FORMATS[3:]])
def test_flash_decode_takes_every_pair_with_its_queries_type(k_format):
    for v_format in ["bf16", *FORMATS[3:]]:
        q, (one,), k, v = make([(k_format, v_format)], [(70, 65, 1)])
        got = flashport.flash_decode(
            q.astype(BF16), one.k, one.v, one.seqlens, k_format=k_format, v_format=v_format, num_splits=None
        )
        want = attend(q.astype(BF16).astype(np.float32), k, v)
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=0.01, atol=0.01)
        alone = flashport.flash_decode_segments(q.astype(BF16), [one])
        same(got, alone)
        key = flashport.which_kernel("decode", k_format=k_format, v_format=v_format, head_dim=DIM, target="cpu")
        native = k_format == v_format and k_format in ("bf16", "fp8_e4m3", "q8_0", "q4_0")
        assert ("/kv=any/" in key) != native


def test_explain_names_the_widening_kernel():
    text = str(flashport.explain("decode", k_format="q4_0", v_format="q8_0", max_kv_len=8192, target="cpu"))
    assert text.startswith("decode/fp32/kv=any/hd128/r16/cpu")
    text = str(flashport.explain("decode", segment_formats=["q8_0", "bf16"], max_kv_len=8192, target="cpu"))
    assert text.startswith("decode/fp32/kv=any/hd128/r16/cpu")


def test_a_quantised_and_a_hot_part():
    q, (old, hot), k, v = make([("q8_0", "q4_0"), ("fp16", "fp16")], [(200, 65, 0), (30, 64, 7)])
    both = flashport.flash_decode_segments(q, [old, hot], return_lse=True)
    lens = {"hot_seqlens": hot.seqlens, "quant_seqlens": old.seqlens, "v_quant_format": "q4_0"}
    got = flashport.flash_decode_mixed(q, hot.k, hot.v, None, old.k, old.v, **lens, return_lse=True)
    for one, other in zip(both, got, strict=True):
        same(one, other)
    np.testing.assert_allclose(got[0], attend(q, k, v), rtol=2e-5, atol=2e-5)
    standard = flashport.flash_decode_mixed(q, hot.k, hot.v, hot_seqlens=hot.seqlens)  # four inputs
    same(standard, flashport.flash_decode_segments(q, [hot]))


def test_each_segment_by_its_own_kernel():
    formats, lens = [("q8_0", "q8_0"), ("fp32", "fp32")], [(200, 65, 0), (30, 64, 7)]
    q, segments, k, v = make(formats, lens)
    sinks = np.random.default_rng(3).standard_normal(HEADS).astype(np.float32)
    want, want_lse = flashport.flash_decode_segments(q, segments, sinks=sinks, return_lse=True)
    size = flashport.mixed_workspace_size(q, segments, by_segment=True)
    assert size != flashport.mixed_workspace_size(q, segments)
    workspace = np.zeros(size, np.uint8)
    got, lse = flashport.flash_decode_segments(
        q, segments, sinks=sinks, by_segment=True, workspace=workspace, return_lse=True
    )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-5)
    old, hot = segments
    parts = {"hot_seqlens": hot.seqlens, "quant_seqlens": old.seqlens}
    same(flashport.flash_decode_mixed(q, hot.k, hot.v, None, old.k, old.v, **parts, sinks=sinks, by_segment=True), got)
    without = flashport.flash_decode_segments(q, segments, by_segment=True)
    np.testing.assert_allclose(without, attend(q, k, v), rtol=2e-5, atol=2e-5)
    for b in range(3):  # alone
        one = [
            flashport.KvSegment(*(x[b : b + 1] for x in s[:3]), k_format=s.k_format, v_format=s.v_format)
            for s in segments
        ]
        same(flashport.flash_decode_segments(q[b : b + 1], one, by_segment=True), without[b : b + 1])
    masked = {"mask": np.zeros((1, 1, 1, 300), np.float32)}
    same(flashport.flash_decode_segments(q, segments, **masked, by_segment=True),
         flashport.flash_decode_segments(q, segments, **masked))  # fmt: skip
    with pytest.raises(TypeError, match="flash_decode_segments: by_segment must be"):
        flashport.flash_decode_segments(q, segments, by_segment="yes")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_mask_is_ggmls(dtype):
    q, segments, k, v = make([("q8_0", "q8_0"), ("fp16", "fp16")], [(70, 3, 64), (30, 64, 1)])
    rng = np.random.default_rng(4)
    mask = rng.standard_normal((3, HEADS, 64, 128)).astype(dtype)  # padded to 64 rows
    mask[rng.random(mask.shape) < 0.3] = -np.inf
    mask[1, 2] = -np.inf
    mask[:, :, 1:] = np.nan
    slopes = rng.standard_normal(HEADS).astype(np.float32)
    got, lse = flashport.flash_decode_segments(q, segments, mask=mask, mask_slopes=slopes, softcap=4.0, return_lse=True)
    np.testing.assert_allclose(got, attend(q, k, v, mask, slopes, 4.0), rtol=3e-5, atol=3e-5)
    assert (got[1, 2] == 0).all()
    assert lse[1, 2] == -np.inf


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_mask_may_have_negative_strides(axis):
    q, segments, *_ = make([("fp16", "fp16")], [(70, 7, 33)])
    mask = np.random.default_rng(6).standard_normal((3, HEADS, 2, 80)).astype(np.float32)
    want = flashport.flash_decode_segments(q, segments, mask=np.ascontiguousarray(np.flip(mask, axis)))
    same(flashport.flash_decode_segments(q, segments, mask=np.flip(mask, axis)), want)


def test_a_border_changes_no_bit():
    q, (one,), _, _ = make([("bf16", "bf16")], [(200, 129, 7)], slack=0)
    q = q.astype(BF16)
    wanted = flashport.flash_decode(q, one.k, one.v, one.seqlens)
    for first, second in itertools.combinations([0, 1, 63, 64, 65, 128, 200], 2):
        cuts = [np.minimum(one.seqlens, at).astype(np.int32) for at in (first, second)]
        lens = [cuts[0], cuts[1] - cuts[0], one.seqlens - cuts[1]]
        parts = [
            flashport.KvSegment(one.k[:, at:], one.v[:, at:], length)
            for at, length in zip((0, first, second), lens, strict=True)
        ]
        same(flashport.flash_decode_segments(q, parts), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("fmt", BLOCKS)
def test_a_border_in_blocks_changes_bits_only_where_the_docs_say_so(fmt, dtype):
    """One segment of q8_0 or q4_0 has a kernel of whole numbers with 16-bit queries on CPUs with VNNI."""
    q, (one,), _, _ = make([(fmt, fmt)], [(200, 129, 7)], slack=0)
    q = q.astype(dtype)
    cut = np.minimum(one.seqlens, 65).astype(np.int32)
    parts = [
        flashport.KvSegment(one.k[:, at:], one.v[:, at:], lens, k_format=fmt, v_format=fmt)
        for at, lens in ((0, cut), (65, one.seqlens - cut))
    ]
    got = [flashport.flash_decode_segments(q, segments) for segments in ([one], parts)]
    kernel = flashport.which_kernel(
        "decode", target="cpu", q_dtype=q.dtype.name, k_format=fmt, v_format=fmt, head_dim=DIM,
        group_size=HEADS // KV_HEADS,
    )  # fmt: skip
    by_whole_numbers = kernel.endswith(("/cpu_vnni", "/cpu_amx"))
    assert not by_whole_numbers or (fmt in ("q8_0", "q4_0") and dtype is not np.float32)
    assert np.array_equal(*got) is not by_whole_numbers


def test_int8_rows_of_torch_and_a_workspace_of_the_callers():
    torch = pytest.importorskip("torch")
    q, segments, _, _ = make([("q5_0", "q8_0"), ("fp16", "fp16")], [(2000, 3), (64, 1)])
    wanted = flashport.flash_decode_segments(q, segments)
    tensors = [
        flashport.KvSegment(*(to_torch(x) for x in s[:3]), k_format=s.k_format, v_format=s.v_format) for s in segments
    ]
    size = flashport.mixed_workspace_size(to_torch(q), tensors)
    assert size > 0
    workspace = torch.zeros(size, dtype=torch.uint8)
    for _ in range(2):
        same(flashport.flash_decode_segments(to_torch(q), tensors, workspace=workspace).numpy(), wanted)


def arguments():
    q, (old, hot), _, _ = make([("q8_0", "q8_0"), ("fp16", "fp16")], [(40, 3, 0), (30, 64, 7)])
    return {
        "q": q,
        "k_hot": hot.k,
        "v_hot": hot.v,
        "mask": np.zeros((3, 1, 1, 200), np.float16),
        "k_quant": old.k,
        "v_quant": old.v,
        "hot_seqlens": hot.seqlens,
        "quant_seqlens": old.seqlens,
        "mask_slopes": np.ones(HEADS, np.float32),
        "sinks": np.zeros(HEADS, np.float32),
        "out": np.full(q.shape, np.nan, np.float32),
        "lse": np.full(q.shape[:2], np.nan, np.float32),
    }


def expect(given, error, text):
    with pytest.raises(error, match=text):
        flashport.flash_decode_mixed(**given)
    assert np.isnan(given["out"]).all() or given["out"].ndim != 3
    assert np.isnan(given["lse"]).all()


ARRAYS = list(arguments())


@pytest.mark.parametrize("name", ARRAYS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_wrong_rank(name, data):
    given = arguments()
    if data.draw(st.booleans(), label="one more"):
        given[name] = np.expand_dims(given[name], data.draw(st.integers(0, given[name].ndim), label="axis"))
        if name == "q":
            return  # a rank with a meaning of its own
    else:
        given[name] = np.asarray(given[name][0])
    told = {"q": "(q|out)", "k_hot": "(k_hot|v_hot)", "k_quant": "(k_quant|v_quant)"}.get(name, name)
    expect(given, ValueError, rf"^flash_decode_mixed: {told} must have .*got {'[0-9]+'}: \(")


@pytest.mark.parametrize("name", ARRAYS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_wrong_shape(name, data):
    given = arguments()
    axis = data.draw(st.integers(0, given[name].ndim - 1), label="axis")
    if name == "mask" and axis >= 2:
        return  # more rows and keys than there are do no harm
    if name in ("k_hot", "k_quant") and axis == 1:
        return  # a longer cache, of which values then differ
    given[name] = np.concatenate([given[name], given[name][(slice(None),) * axis + (slice(0, 1),)]], axis)
    with pytest.raises(
        (ValueError, NotImplementedError),
        match=r"^flash_decode_mixed: ([a-z_]+ must|q8_0 needs a head_dim that is a multiple of 32,) .*got ",
    ):
        flashport.flash_decode_mixed(**given)


@pytest.mark.parametrize("name", ARRAYS)
def test_a_wrong_type(name):
    given = arguments()
    given[name] = given[name].astype(np.float64)
    expect(given, (TypeError, ValueError), rf"^flash_decode_mixed: {name} must be .*got float64")


def test_texts_of_what_does_not_fit():
    given = arguments()
    expect(
        {**given, "hot_seqlens": given["hot_seqlens"] + 9},
        ValueError,
        r"^flash_decode_mixed: hot_seqlens\[1\] = 73 must lie in \[0, 67\]",
    )
    expect({**given, "mask": given["mask"][..., :69]}, ValueError,
           r"^flash_decode_mixed: mask must have an entry for each key: request 0 has 70 keys, got 69")  # fmt: skip
    expect({**given, "mask": None}, ValueError, r"^flash_decode_mixed: mask_slopes must come with mask")
    expect({**given, "v_quant": None}, TypeError, r"^flash_decode_mixed: v_quant must be given with the other one")
    expect({**given, "k_quant_format": None}, ValueError,
           r"^flash_decode_mixed: k_quant_format must say what .* stores, got none")  # fmt: skip
    expect({**given, "k_quant_scale": np.ones(5, np.float32)}, ValueError,
           r"^flash_decode_mixed: k_quant_scale must have shape \(1,\), \(num_kv_heads,\) = .*got \(5,\)")  # fmt: skip


@pytest.mark.parametrize(
    ("segments", "error", "text"),
    [
        ([], ValueError, "segments must be 1 to 4, got 0"),
        (5, TypeError, "segments must be a list of KvSegment, got int"),
        ([1], TypeError, "segments must be a list of KvSegment, got int at 0"),
    ],
)
def test_texts_of_segments(segments, error, text):
    with pytest.raises(error, match=rf"^flash_decode_segments: {text}"):
        flashport.flash_decode_segments(np.zeros((1, HEADS, DIM), np.float32), segments)


def test_segments_must_agree():
    q, (one, two), _, _ = make([("q8_0", "q8_0"), ("fp16", "fp16")], [(40, 3), (30, 64)])
    fewer = flashport.KvSegment(two.k[:, :, :1], two.v[:, :, :1], two.seqlens)
    with pytest.raises(ValueError, match=r"^flash_decode_segments: segments\[1\]: k must have shape .*got \("):
        flashport.flash_decode_segments(q, [one, fewer])
    table = np.zeros((2, 4), np.int32)
    paged = flashport.KvSegment(two.k, two.v, block_table=table)
    with pytest.raises(ValueError, match=r"^flash_decode_segments: segments\[1\]: seqlens must be given with a table"):
        flashport.flash_decode_segments(q, [one, paged])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_spilled_tokens_are_quantised_where_they_are_told(layout):
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((2, 3, 5, KV_HEADS, DIM)).astype(np.float16)
    old = [np.full((3, 8, KV_HEADS, size), 255, np.uint8) for size in (68, 36)]
    positions = np.full((3, 5), -1, np.int32)
    positions[0, :2] = [3, 4]
    positions[2, 4] = 2 * 8 + 7
    turned = [x.swapaxes(1, 2) if layout == "HND" else x for x in (k, v)]
    given = [np.ascontiguousarray(x.swapaxes(1, 2)) if layout == "HND" else x for x in old]
    flashport.spill_kv(
        *(np.ascontiguousarray(x) for x in turned), *given, positions.reshape(-1), kv_layout=layout,
        v_quant_format="q4_0",
    )  # fmt: skip
    got = [x.swapaxes(1, 2) if layout == "HND" else x for x in given]
    for cache, rows, fmt, empty in zip(got, (k, v), ("q8_0", "q4_0"), old, strict=True):
        wanted = np.full_like(empty, 255)
        for b, t, at in ((0, 0, 3), (0, 1, 4), (2, 4, 7)):
            wanted[b, at] = flashport.quantize_kv(rows[b, t].astype(np.float32), fmt)
        np.testing.assert_array_equal(cache, wanted)


def test_a_spilled_cache_attends_as_before_but_for_rounding():
    """What a decode loop does: the oldest hot tokens go, and the lengths with them."""
    q, (old, hot), _, _ = make([("q8_0", "q8_0"), ("fp16", "fp16")], [(40, 3), (30, 64)], slack=70)
    before = flashport.flash_decode_segments(q, [old, hot])
    spilled, left = [], []
    count = 16
    batch, slots = hot.k.shape[:2]
    positions = np.full((batch, slots), -1, np.int32)
    for b in range(batch):
        first = b * old.k.shape[1] + old.seqlens[b]
        positions[b, :count] = first + np.arange(count)
    flashport.spill_kv(hot.k, hot.v, old.k, old.v, positions.reshape(-1))
    spilled = flashport.KvSegment(old.k, old.v, old.seqlens + count, k_format="q8_0", v_format="q8_0")
    left = flashport.KvSegment(hot.k[:, count:], hot.v[:, count:], hot.seqlens - count)
    after = flashport.flash_decode_segments(q, [spilled, left])
    assert 0 < np.abs(after - before).max() < 0.02


def test_errors_of_spill_kv_are_its_own():
    k = np.zeros((2, 4, KV_HEADS, DIM), np.float16)
    old = np.zeros((2, 8, KV_HEADS, 68), np.uint8)
    positions = np.full(8, -1, np.int32)
    with pytest.raises(ValueError, match=r"^spill_kv: positions must have shape \(tokens\) = \(8,\), got \(7,\)"):
        flashport.spill_kv(k, k, old, old, positions[:7])
    with pytest.raises(TypeError, match=r"^spill_kv: k_quant must be uint8 for k_quant_format=\"q8_0\", got float16"):
        flashport.spill_kv(k, k, k, old, positions)
    with pytest.raises(ValueError, match=r"^spill_kv: v_hot must have 3 dimensions"):
        flashport.spill_kv(k, k[0, 0], old, old, positions)
