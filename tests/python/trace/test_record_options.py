"""Recording calls with dropout, a rotary embedding, new keys and scales: steps have what the call computed with."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

import flashport
from flashport import trace
from flashport.cli import main
from flashport.testing import numerics
from flashport.trace import _operators, _reference
from trace_call import check, ints, paged, random, recorded

DROPOUT = {
    "plain": {},
    "causal": {"causal": True, "alibi_slopes": random(4), "softcap": 2.0},
    "bias": {"bias": random(2, 1, 9, 12)},
    "used": {"seqused_q": ints(9, 2), "seqused_k": ints(5, 12)},
    "padded": {"leftpad_k": ints(3, 0), "causal": True, "sinks": random(4)},
}
STATE = np.array([7, 5])


@pytest.mark.parametrize("options", DROPOUT.values(), ids=DROPOUT)
def test_dropout(tmp_path, options):
    """Steps have the weights that were kept: the reference drops the others, and without that it is far off."""
    q, k, v = random(2, 9, 4, 32), random(2, 12, 2, 32), random(2, 12, 2, 48)
    loaded, _ = recorded(
        tmp_path / "t.gguf", lambda: flashport.attention(q, k, v, dropout_p=0.25, rng_state=STATE, **options)
    )
    check(loaded)
    assert len(loaded) == 2
    kept = flashport.dropout_mask((2, 4, 9, 12), STATE, 0.25)
    for b, step in enumerate(loaded):
        assert step.dropout_p == 0.25
        assert np.array_equal(step.kept[0], kept[b, :, : step.q.shape[1], : step.k.shape[1]])
        step.dropout_p, step.tensors = 0.0, [tensor for tensor in step.tensors if tensor.role != "kept"]
        assert not _reference.differences(step.out, _reference.reference(step)).within(1e-2)


def test_dropout_of_packed_sequences(tmp_path):
    q, k, offsets = random(20, 4, 32), random(20, 2, 32), ints(0, 13, 13, 20)
    given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 13, "max_seqlen_k": 13, "causal": True}
    path = tmp_path / "t.gguf"
    loaded, _ = recorded(path, lambda: flashport.attention(q, k, k, dropout_p=0.5, rng_state=STATE, **given))
    check(loaded)
    kept = flashport.dropout_mask((3, 4, 13, 13), STATE, 0.5)
    assert np.array_equal(loaded[1].kept[0], kept[2, :, :7, :7])
    # Operators draw weights of their own.
    for step in loaded:
        (result,) = _operators.run_all(step, device="cpu")
        assert (result.operator, result.out) == ("attention", None)
        assert result.way == "refused: attention draws which weights it keeps, and takes none of a trace"
    for options in ((), ("--sample", "3")):
        compared = CliRunner().invoke(main, ["trace", "compare", str(path), *options])
        assert compared.exit_code == 0, compared.output
        assert "every error is within the tolerance" in compared.output
    assert "attn_dropout-0" in CliRunner().invoke(main, ["trace", "show", str(path)]).output


def test_kept_weights_that_fit_nothing(tmp_path):
    operands, kept = [random(1, 2, 4, 32) for _ in range(4)], np.ones((1, 4, 2, 2), np.int8)
    with trace.Writer(tmp_path / "t.gguf") as writer:
        for options in ({"kept": kept}, {"dropout_p": 0.5}):
            with pytest.raises(ValueError, match=r"^trace\.Writer\.add: kept and dropout_p must come together$"):
                writer.add(*operands, **options)
        with pytest.raises(ValueError, match=r"kept must be .* = \(1, 4, 2, 2\), got \(1, 4, 2, 1\)"):
            writer.add(*operands, kept=kept[..., 1:], dropout_p=0.5)
        writer.add(*operands, kept=kept, dropout_p=0.5)
        writer._steps["dropout_p"][0] = 0.0
    with pytest.raises(trace.TraceError, match=r"step 1 has the dropout_p 0\.0 and a kept"):
        trace.load(tmp_path / "t.gguf")
    with trace.Writer(tmp_path / "t.gguf") as writer:
        writer.add(*operands)
        del writer._steps["dropout_p"]  # a file from before there was one
    assert trace.load(tmp_path / "t.gguf")[0].dropout_p == 0
    with trace.Writer(tmp_path / "t.gguf") as writer:
        writer.add(*operands, kept=kept.astype(np.float32), dropout_p=0.5)
    with pytest.raises(trace.TraceError, match="kept 'attn_dropout-0_step_1' must have int8 values"):
        _reference.reference(trace.load(tmp_path / "t.gguf")[0])


def complex_turned(x, angles, position, interleaved):
    """(tokens, heads, dim) turned to positions, as complex numbers; what is past the table stays as it is."""
    x, half = x.astype(np.float64), angles.shape[1]
    pairs = [slice(0, 2 * half, 2), slice(1, 2 * half, 2)] if interleaved else [slice(half), slice(half, 2 * half)]
    for t, place in enumerate(position):
        if place < len(angles):
            numbers = (x[t][:, pairs[0]] + 1j * x[t][:, pairs[1]]) * np.exp(1j * angles[place])
            x[t][:, pairs[0]], x[t][:, pairs[1]] = numbers.real, numbers.imag
    return x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("way", ["causal", "window", "all", "pages", "packed", "past the table"])
def test_rotary(tmp_path, way, interleaved):
    """Queries are turned as in the call, keys are those that it left in the cache: the reference needs no rotary."""
    q, k, v = random(2, 3, 4, 32), random(2, 16, 2, 32), random(2, 16, 2, 32)
    new, before = [random(2, 3, 2, 32) for _ in "kv"], (5, 12)
    angles = random(6 if way == "past the table" else 16, 8) * 3
    (k_cache, table), (v_cache, _) = ((paged(x, 4) if way == "pages" else (x.copy(), None)) for x in (k, v))
    given = {
        "k_new": new[0], "v_new": new[1], "seqused_k": ints(*before), "rotary_cos": np.cos(angles),
        "rotary_sin": np.sin(angles), "rotary_interleaved": interleaved,
    }  # fmt: skip
    given |= {"window": {"window": (4, -1)}, "all": {}}.get(way, {"causal": True})
    given |= {"block_table": table} if way == "pages" else {}
    queries = [q[0], q[1]]
    if way == "packed":
        queries = [q[0], q[1, :1]]
        given |= {"cu_seqlens_q": ints(0, 3, 4), "max_seqlen_q": 3}
        q = np.concatenate(queries)
    loaded, _ = recorded(tmp_path / "t.gguf", lambda: flashport.attention(q, k_cache, v_cache, **given))
    check(loaded)
    assert len(loaded) == 2
    for b, step in enumerate(loaded):
        own = np.arange(3) + before[b]
        at = np.full(3, before[b]) if way == "all" else own
        wanted = complex_turned(queries[b], angles, at[: len(queries[b])], interleaved)
        np.testing.assert_allclose(step.q[0], wanted, rtol=1e-6, atol=1e-6)
        keys = np.concatenate([k[b, : before[b]], complex_turned(new[0][b], angles, own, interleaved)])
        np.testing.assert_allclose(step.k[0], keys, rtol=1e-6, atol=1e-6)
        assert np.array_equal(step.v[0], np.concatenate([v[b, : before[b]], new[1][b]]))
        for result in _operators.run_all(step, device="cpu"):
            assert _reference.differences(result.out, step.out).within(1e-5), result.operator


def test_rotary_of_tensors_of_torch(tmp_path):
    """By flash_attn_with_kvcache, in bf16, to which the turned queries are rounded."""
    torch = pytest.importorskip("torch")
    from flashport.flash_attn import flash_attn_interface

    def tensor(*shape):
        return torch.from_numpy(random(*shape)).bfloat16()

    q, k, cache, angles = tensor(2, 1, 4, 32), tensor(2, 1, 2, 32), tensor(2, 16, 2, 32), tensor(16, 8)
    given = {
        "k": k, "v": k, "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True,
        "rotary_interleaved": False, "cache_seqlens": torch.tensor([4, 9], dtype=torch.int32),
    }  # fmt: skip
    loaded, _ = recorded(
        tmp_path / "t.gguf",
        lambda: flash_attn_interface.flash_attn_with_kvcache(q, cache, cache.clone(), **given),
    )
    check(loaded, 1e-2)
    assert [step.find("q").type for step in loaded] == ["BF16", "BF16"]
    plain = [x.float().numpy() for x in (q, angles.cos(), angles.sin())]
    for b, position in enumerate((4, 9)):
        x, y = plain[0][b, 0, :, :8], plain[0][b, 0, :, 8:16]
        c, s = plain[1][position], plain[2][position]
        wanted = np.concatenate([x * c - y * s, y * c + x * s, plain[0][b, 0, :, 16:]], -1)
        assert np.abs(loaded[b].q[0, 0] - wanted).max() <= np.abs(wanted).max() * 2**-8
    # the formats of q, k and v are those of the operators, too
    assert all(
        _reference.differences(one.out, step.out).within(1e-2)
        for step in loaded for one in _operators.run_all(step, device="cpu")
    )  # fmt: skip


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "q8_0"])
def test_new_keys_of_a_quantised_cache(tmp_path, fmt):
    """With a factor for each head, which divides new keys; steps have the values that the cache stands for."""
    torch = pytest.importorskip("torch")
    q, new, lens = torch.from_numpy(random(2, 3, 4, 32)), torch.from_numpy(random(2, 3, 2, 32)), ints(5, 12)
    bits = [numerics.encode(random(2, 16, 2, 32), fmt) for _ in "kv"]
    k, v = (torch.from_numpy(x) for x in bits)
    given = {"k_format": fmt, "v_format": fmt, "causal": True, "seqused_k": torch.from_numpy(lens)}
    factors = np.ones((2, 1), np.float32)
    if fmt == "fp8_e4m3":
        k, v = (x.view(torch.float8_e4m3fn) for x in (k, v))
        factors = np.array([[0.5], [2]], np.float32)
        given |= {"k_scale": torch.from_numpy(factors[:, 0]), "v_scale": torch.from_numpy(factors[:, 0])}
    loaded, _ = recorded(tmp_path / "t.gguf", lambda: flashport.attention(q, k, v, k_new=new, v_new=new, **given))
    check(loaded)
    for b, step in enumerate(loaded):
        old = numerics.decode(bits[0], fmt)[b, : lens[b]] * factors
        assert np.array_equal(step.k[0, : lens[b]], old)
        error = np.abs(step.k[0, lens[b] :] - new[b].numpy())
        assert 0 < error.max() < 0.15
        for result in _operators.run_all(step, device="cpu"):
            assert _reference.differences(result.out, step.out).within(1e-5), result


MIXED = {"int8": (8, "F32"), "int4": (8, "F32"), "fp8_e5m2": (None, "F32"), "q4_0": (None, "Q4_0")}


@pytest.mark.parametrize("fmt", MIXED)
def test_mixed_caches(tmp_path, fmt):
    """A MixedKVCache's steps: what ggml has no format for is there as fp32, times its factors."""
    torch = pytest.importorskip("torch")
    (groups, kind), q = MIXED[fmt], torch.from_numpy(random(2, 4, 64))
    cache = flashport.MixedKVCache(
        q, 2, 2, 64, max_tokens=64, hot_tokens=8, spill_tokens=4, sink_tokens=2, k_format=fmt, v_format=fmt
    )
    cache.append(*(torch.from_numpy(random(2, 50, 2, 64)) for _ in "kv"))
    loaded, out = recorded(tmp_path / "t.gguf", lambda: cache.attend(q))
    check(loaded)
    assert [step.kind for step in loaded] == ["mixed", "mixed"]
    older = cache.segments()[1]
    count = int(older.seqlens[0])
    scale = None if groups is None else older.k_scale[0, :count]
    own = older.k[0, :count]
    held = own.float() if fmt.startswith("fp8") else flashport.dequantize_kv(own, fmt, scale=scale)
    assert np.array_equal(loaded[0].k_quant[0], held.numpy())
    assert (loaded[0].find("k_quant").type, loaded[0].find("k_first").ne[1]) == (kind, 2)
    for b, step in enumerate(loaded):
        again = {each.operator: each for each in _operators.run_all(step, device="cpu")}
        for result in again.values():
            assert _reference.differences(result.out[0, 0], out[b].numpy()).within(1e-5), result


@pytest.mark.parametrize("shape", [(2, 24, 2), (2, 24, 2, 8), (2,), (1,)], ids=["rows", "groups", "heads", "one"])
def test_scales_of_the_quantised_part(tmp_path, shape):
    """flash_decode_mixed with k_quant_scale and v_quant_scale."""
    q, hot = random(2, 4, 64), random(2, 8, 2, 64)
    k, v = (np.random.default_rng(i).integers(-127, 128, (2, 24, 2, 64)).astype(np.int8) for i in range(2))
    scales = [random(*shape) ** 2 / 64 for _ in "kv"]
    options = {"k_quant_format": "int8", "v_quant_format": "int8", "quant_seqlens": ints(24, 11)}
    loaded, _ = recorded(
        tmp_path / "t.gguf",
        lambda: flashport.flash_decode_mixed(
            q, hot, hot, None, k, v, **options, k_quant_scale=scales[0], v_quant_scale=scales[1]
        ),
    )
    check(loaded)
    for b, length in enumerate((24, 11)):
        for role, x, scale in (("k_quant", k, scales[0]), ("v_quant", v, scales[1])):
            own = scale[b, :length] if len(shape) > 2 else scale[:, None] if shape == (2,) else scale
            own = np.repeat(own, 8, axis=-1) if len(shape) == 4 else own[..., None] if len(shape) == 3 else own
            assert np.array_equal(getattr(loaded[b], role)[0], x[b, :length].astype(np.float32) * own)


def test_scales_of_queries(tmp_path):
    """fp8 queries, keys and values with factors for each sequence and head: steps have them multiplied in."""
    torch = pytest.importorskip("torch")
    bits = [numerics.encode(random(2, n, heads, 32), "fp8_e4m3") for n, heads in ((5, 4), (12, 2), (12, 2))]
    arrays = [torch.from_numpy(x).view(torch.float8_e4m3fn) for x in bits]
    scales = [random(2, 2) ** 2 + 0.5 for _ in "qkv"]
    named = {f"{name}_scale": torch.from_numpy(x) for name, x in zip("qkv", scales, strict=True)}
    loaded, _ = recorded(tmp_path / "t.gguf", lambda: flashport.attention(*arrays, **named, causal=True))
    check(loaded, 3e-2)
    for b, step in enumerate(loaded):
        for role, x, scale in zip("qkv", bits, scales, strict=True):
            own = np.repeat(scale[b], 2) if role == "q" else scale[b]
            assert np.array_equal(getattr(step, role)[0], numerics.decode(x[b], "fp8_e4m3") * own[:, None])


@pytest.mark.parametrize("operation", ["flash_decode_segments", "flash_decode"])
@pytest.mark.parametrize("way", ["heads", "rows", "groups", "rows of pages", "rows of a pool"])
def test_scales_of_caches(tmp_path, way, operation):
    """A factor of a head, of a row and of a group of values: what is stored times its own factor, as fp32."""
    q, k, v = (random(*shape).astype(np.float16) for shape in ((2, 4, 64), (2, 24, 2, 64), (2, 24, 2, 64)))
    shape = {"heads": (2,), "groups": (2, 24, 2, 8)}.get(way, (2, 24, 2))
    scales = [random(*shape) ** 2 + 0.5 for _ in range(2)]
    options, (k_given, v_given) = dict(zip(("k_scale", "v_scale"), scales, strict=True)), (k, v)
    if way == "rows of pages":
        (k_given, table), (v_given, _) = paged(k, 8), paged(v, 8)
        k_pages, v_pages = (paged(x[..., None], 8)[0][..., 0] for x in scales)
        options = {"k_scale": k_pages, "v_scale": v_pages, "block_table": table}
    elif way == "rows of a pool":
        k_given, v_given = (x.reshape(48, 2, 64) for x in (k, v))
        table = np.arange(48, dtype=np.int32).reshape(2, 24)
        options = {"k_scale": scales[0].reshape(48, 2), "v_scale": scales[1].reshape(48, 2), "token_table": table}
    given, out = (k_given, v_given, ints(24, 11)), np.empty(q.shape, np.float32)
    segments = [flashport.KvSegment(*given, **options)]
    calls = {
        "flash_decode_segments": lambda: flashport.flash_decode_segments(q, segments, out=out),
        "flash_decode": lambda: flashport.flash_decode(q, *given, **options, out=out),
    }
    loaded, _ = recorded(tmp_path / "t.gguf", calls[operation])
    check(loaded)
    for b, length in enumerate((24, 11)):
        for role, x, scale in (("k", k, scales[0]), ("v", v, scales[1])):
            own = scale[:, None] if way == "heads" else scale[b, :length]
            own = np.repeat(own, 8, axis=-1) if way == "groups" else own if way == "heads" else own[..., None]
            assert np.array_equal(getattr(loaded[b], role)[0], x[b, :length].astype(np.float32) * own)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_scales_beside_keys_of_attention(tmp_path, fmt):
    """Also after a left padding, whose rows a step does not have."""
    q, x, scale = random(2, 3, 4, 64), random(2, 24, 2, 64), np.empty((2, 24, 2, 8), np.float16)
    k = flashport.quantize_kv(x, fmt, scale=scale)
    held = flashport.dequantize_kv(k, fmt, scale=scale)
    options = {
        "k_format": fmt,
        "v_format": fmt,
        "k_scale": scale,
        "v_scale": scale,
        "seqused_k": ints(24, 11),
        "leftpad_k": ints(3, 0),
    }
    loaded, _ = recorded(tmp_path / "t.gguf", lambda: flashport.attention(q, k, k, **options))
    check(loaded)
    for b, rows in enumerate((slice(3, 24), slice(0, 11))):
        assert np.array_equal(loaded[b].k[0], held[b, rows])
        assert np.array_equal(loaded[b].v[0], held[b, rows])
