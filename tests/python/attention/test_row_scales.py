"""attention on keys and values with scales beside them: of rows, or of groups of their values."""

from __future__ import annotations

import numpy as np
import pytest

import flashport

HEADS, KV_HEADS, DIM = 4, 2, 64
FORMATS = ["int8", "int4", "fp8_e4m3", "fp8_e5m2"]


def quantised(rng, shape, fmt, kind):
    """(stored, scales beside it, the values that both make)."""
    x = rng.standard_normal(shape, np.float32)
    scale = (
        np.empty((*shape[:-1], shape[-1] // 8), np.float16) if kind == "groups" else np.empty(shape[:-1], np.float32)
    )
    stored = flashport.quantize_kv(x, fmt, scale=scale)
    return stored, scale, flashport.dequantize_kv(stored, fmt, scale=scale).astype(np.float64)


def expected(q, k, v, causal):
    """fp64, of one sequence: q [Sq, Hq, D], k and v [Sk, Hkv, D]."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q.astype(np.float64), k) / q.shape[-1] ** 0.5
    if causal:
        hidden = np.arange(len(k)) > np.arange(len(q))[:, None] + len(k) - len(q)
        scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kinds", [("rows", "rows"), ("groups", "groups"), ("groups", "rows")])
@pytest.mark.parametrize("layout", ["dense", "packed", "pages", "pool"])
def test_layouts(fmt, kinds, layout):
    """Scales of rows past a length are NaN, and so are those of pages that no table names."""
    rng = np.random.default_rng(11)
    batch, longest, lens = 2, 40, [40, 21]
    q = rng.standard_normal((batch, 20, HEADS, DIM), np.float32)
    sides = [quantised(rng, (batch, longest, KV_HEADS, DIM), fmt, kind) for kind in kinds]
    arrays, scales = [stored for stored, _, _ in sides], [scale.copy() for _, scale, _ in sides]
    options = {"causal": True, "k_format": fmt, "v_format": fmt}
    for scale in scales:
        scale[1, lens[1] :] = np.nan
    if layout == "packed":
        arrays, scales = ([np.concatenate([x[0], x[1, : lens[1]]]) for x in xs] for xs in (arrays, scales))
        options |= {"cu_seqlens_k": np.array([0, 40, 61], np.int32), "max_seqlen_k": 40}
        options |= {"cu_seqlens_q": np.array([0, 20, 40], np.int32), "max_seqlen_q": 20}
    else:
        options["seqused_k"] = np.array(lens, np.int32)
    if layout in ("pages", "pool"):
        size = 8 if layout == "pages" else 1
        order = rng.permutation(2 * longest // size)

        def spread(x):
            pages = x.reshape(-1, *((size,) if size > 1 else ()), *x.shape[2:])
            return np.concatenate(
                [pages[np.argsort(order)], pages[:1] * np.array(np.nan if x.dtype.kind == "f" else 1, x.dtype)]
            )

        arrays = [spread(x.view(np.int8)).view(x.dtype) for x in arrays]
        scales = [spread(x) for x in scales]
        table = order.astype(np.int32).reshape(batch, -1)
        options["block_table" if size > 1 else "token_table"] = table
    given = q.reshape(-1, HEADS, DIM) if layout == "packed" else q
    out = flashport.attention(given, *arrays, k_scale=scales[0], v_scale=scales[1], **options).reshape(q.shape)
    for b, length in enumerate(lens):
        k, v = (values[b, :length] for _, _, values in sides)
        np.testing.assert_allclose(out[b], expected(q[b], k, v, True), rtol=2e-5, atol=2e-5)


def call(kv_len=30, q_len=20):
    rng = np.random.default_rng(12)
    q = rng.standard_normal((1, q_len, HEADS, DIM), np.float32)
    k, k_scale, k_values = quantised(rng, (1, kv_len, KV_HEADS, DIM), "int8", "groups")
    v, v_scale, v_values = quantised(rng, (1, kv_len, KV_HEADS, DIM), "int8", "rows")
    return (q, k, v), {"k_scale": k_scale, "v_scale": v_scale}, expected(q[0], k_values[0], v_values[0], False)


def test_one_side_alone():
    arrays, scales, _ = call()
    for name, scale in scales.items():
        other = {"k_scale": "v_scale", "v_scale": "k_scale"}[name]
        out = flashport.attention(*arrays, **{name: scale, other: np.full((1, KV_HEADS), 0.01, np.float32)})
        assert np.isfinite(out).all()


def test_few_queries_are_decoded():
    arrays, scales, wanted = call(q_len=1)
    out = flashport.attention(*arrays, **scales, seqused_k=np.array([30], np.int32))
    np.testing.assert_allclose(out[0], wanted, rtol=2e-5, atol=2e-5)
    decoded = flashport.flash_decode(*arrays, np.array([30], np.int32), **scales)
    np.testing.assert_array_equal(out, decoded)


def test_what_serves_them():
    query = {"k_format": "int8", "v_format": "int8", "head_dim": DIM, "target": "cpu", "scales_beside": True}
    assert flashport.which_kernel("attention", **query).startswith("attention/fp32/")
    assert flashport.supports("attention", **query)
    few = flashport.which_kernel("attention", **query, seqused_k=True, q_len=1)
    assert few.startswith("decode/")
    assert "/kv=any/" in few
    plan = flashport.explain("attention", **query, q_len=100, kv_len=100, num_q_heads=4, num_kv_heads=2)
    assert plan.kernel == flashport.which_kernel("attention", **query)
    said = flashport.supports("attention", **query, appends=True)
    assert said.reason.startswith("k_new does not come with scales of rows or groups of values, which append_kv writes")


def test_what_is_refused():
    arrays, scales, _ = call()
    with pytest.raises(ValueError, match=r"^attention: k_scale must have .*got \(1, 30, 3\) for k \(1, 30, 2, 64\)"):
        flashport.attention(*arrays, k_scale=np.ones((1, 30, 3), np.float32))
    with pytest.raises(TypeError, match=r"^attention: k_scale must be float32 or float16, got float64"):
        flashport.attention(*arrays, k_scale=np.ones((1, 30, 2)))
    new = np.ones((1, 1, KV_HEADS, DIM), np.float32)
    with pytest.raises(NotImplementedError, match=r"^attention: k_new does not come with scales of rows or groups"):
        flashport.attention(*arrays, **scales, seqused_k=np.array([29], np.int32), k_new=new, v_new=new)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    arrays, scales, wanted = call()
    tensors, named = [torch.from_numpy(x) for x in arrays], {name: torch.from_numpy(x) for name, x in scales.items()}

    def attend(q, k, v, k_scale, v_scale):
        return flashport.attention(q, k, v, k_scale=k_scale, v_scale=v_scale)

    eager = attend(*tensors, **named)
    np.testing.assert_allclose(eager[0].numpy(), wanted, rtol=2e-5, atol=2e-5)
    assert torch.equal(torch.compile(attend, backend="aot_eager", fullgraph=True)(*tensors, **named), eager)
