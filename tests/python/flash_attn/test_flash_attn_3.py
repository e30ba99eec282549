"""flashport.flash_attn_3: FlashAttention-3's signatures, on random calls against fp64."""

from __future__ import annotations

import inspect
import random

import pytest

torch = pytest.importorskip("torch")

from flash_attn_call import expect_close, int32, offsets, random_tensors, reference  # noqa: E402
from flashport import flash_attn_3  # noqa: E402

FP8 = torch.float8_e4m3fn


def native(lse):
    """The lse of a row that sees nothing is -inf there."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


@pytest.mark.parametrize("seed", range(30))
def test_dense(seed):
    rng = random.Random(seed)
    kv_heads, group, dim, dim_v = (
        rng.randint(1, 2),
        rng.choice([1, 4]),
        rng.choice([32, 64, 192]),
        rng.choice([32, 128]),
    )
    q_len, kv_len = rng.choice([1, 5, 16, 40]), rng.choice([1, 20, 60])
    q, k, v = random_tensors(
        seed, (2, q_len, kv_heads * group, dim), (2, kv_len, kv_heads, dim), (2, kv_len, kv_heads, dim_v)
    )
    options = {"causal": rng.random() < 0.5, "window_size": (rng.randint(-1, 20), rng.randint(-1, 20))}
    options |= {"softcap": rng.choice([0.0, 2.0])}
    sinks = torch.randn(kv_heads * group) if rng.random() < 0.4 else None
    out, lse = flash_attn_3.flash_attn_func(
        q, k, v, **options, sinks=sinks, num_splits=rng.choice([0, 1, 3]), return_attn_probs=True
    )
    assert torch.equal(flash_attn_3.flash_attn_func(q, k, v, **options, sinks=sinks, num_splits=0), out) or q_len <= 16
    for b in range(2):
        wanted, wanted_lse, _ = reference(
            q[b], k[b], v[b], options["causal"], options["window_size"], options["softcap"], sinks=sinks
        )
        expect_close(out[b], wanted, torch.float32)
        expect_close(lse[b], native(wanted_lse), torch.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal):
    q_lens, kv_lens = [20, 0, 3], [30, 4, 1]
    q, k, v = random_tensors(1, (23, 4, 32), (35, 2, 32), (35, 2, 64))
    cu = offsets(q_lens), offsets(kv_lens)
    arguments = (q, k, v, *cu, 20, 30)
    out, lse = flash_attn_3.flash_attn_varlen_func(*arguments, causal=causal, return_softmax_lse=True)
    assert torch.equal(flash_attn_3.flash_attn_varlen_func(*arguments, causal=causal), out)
    for b, (first, last) in enumerate(zip(cu[0][:-1], cu[0][1:], strict=True)):
        keys = slice(cu[1][b], cu[1][b + 1])
        wanted, wanted_lse, _ = reference(q[first:last], k[keys], v[keys], causal)
        expect_close(out[first:last], wanted, torch.float32)
        expect_close(lse[:, first:last], native(wanted_lse), torch.float32)


def test_packed_with_lengths_in_use():
    q, k, v = random_tensors(1, (23, 4, 32), (35, 2, 32), (35, 2, 32))
    used = {"seqused_q": int32(11, 3), "seqused_k": int32(9, 2)}
    out = flash_attn_3.flash_attn_varlen_func(q, k, v, offsets([20, 3]), offsets([30, 5]), 20, 30, **used, causal=True)
    expect_close(out[:11], reference(q[:11], k[:9], v[:9], True)[0], torch.float32)
    expect_close(out[20:], reference(q[20:], k[30:32], v[30:32], True)[0], torch.float32)


def turn(x, cos, sin, first):
    """Halves of x [S, H, D] by the angles of positions from ``first`` on."""
    half = cos.shape[1]
    rows = torch.arange(first, first + x.shape[0])
    c, s = cos[rows, None], sin[rows, None]
    one, two, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([one * c - two * s, one * s + two * c, rest], -1)


@pytest.mark.parametrize("seed", range(40))
def test_cache(seed):
    rng = random.Random(seed)
    form, packed, has_new = rng.choice(["plain", "indexed", "paged"]), rng.random() < 0.5, rng.random() < 0.6
    batch, kv_heads, heads, dim, dim_v = 3, 2, 6, 32, rng.choice([32, 64])
    page, blocks = (rng.choice([1, 7, 16]), 8) if form == "paged" else (56, 1)
    room, rows = page * blocks, batch * blocks * (1 if form == "plain" else 2)
    q_lens = [rng.randint(0, 20) for _ in range(batch)] if packed else [rng.choice([1, 4, 20])] * batch
    if room < max(q_lens):
        q_lens = [min(room, n) for n in q_lens]
    q, k_cache, v_cache = random_tensors(
        seed, (sum(q_lens), heads, dim), (rows, page, kv_heads, dim), (rows, page, kv_heads, dim_v)
    )
    places = (
        torch.arange(rows) if form == "plain" else torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    )
    places = places[: batch * blocks].reshape(batch, blocks)
    added = [rng.randint(0, max(1, room // 4)) for _ in range(batch)]
    if not (packed and has_new):
        added = [max(1, added[0])] * batch
    if not has_new:
        added = [0] * batch
    seqlens = [rng.randint(0, room - n) for n in added]
    options = {"causal": rng.random() < 0.6, "window_size": (rng.choice([-1, 9]), -1), "rotary_interleaved": False}
    options |= {"softcap": rng.choice([0.0, 2.0]), "sinks": torch.randn(heads) if rng.random() < 0.3 else None}
    call = dict(options)
    if form != "plain":
        call["page_table" if form == "paged" else "cache_batch_idx"] = (
            places.int() if form == "paged" else places[:, 0].int()
        )
    wanted = [[x[places[b]].flatten(0, 1) for x in (k_cache, v_cache)] for b in range(batch)]
    queries = list(q.split(q_lens))
    if has_new:
        k, v = random_tensors(seed + 1, (sum(added), kv_heads, dim), (sum(added), kv_heads, dim_v))
        new_k = list(k.split(added))
        if options["causal"] and rng.random() < 0.7:
            angles = torch.rand(room + 60, 8, generator=torch.Generator().manual_seed(1)) * 6
            call |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
            starts = seqlens
            if rng.random() < 0.5:
                starts = [rng.randint(0, 30) for _ in range(batch)]
                call["rotary_seqlens"] = int32(*starts)
            for b in range(batch):
                queries[b] = turn(queries[b], angles.cos(), angles.sin(), starts[b])
                new_k[b] = turn(new_k[b], angles.cos(), angles.sin(), starts[b])
        for b, new_v in enumerate(v.split(added)):
            for x, new in zip(wanted[b], (new_k[b], new_v), strict=True):
                x[seqlens[b] : seqlens[b] + added[b]] = new
        if packed:
            call |= {"k": k, "v": v, "cu_seqlens_k_new": offsets(added)}
        else:
            call |= {"k": k.unflatten(0, (batch, -1)), "v": v.unflatten(0, (batch, -1))}
    if packed:
        call |= {"cu_seqlens_q": offsets(q_lens), "max_seqlen_q": max(q_lens)}
    given = q if packed else q.unflatten(0, (batch, -1))
    out, lse, *rest = flash_attn_3.flash_attn_with_kvcache(
        given, k_cache, v_cache, **call, cache_seqlens=int32(*seqlens), return_softmax_lse=True
    )
    assert [x.numel() for x in rest] == [0, 0]
    if not packed:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    parts = zip(queries, out.split(q_lens), lse.split(q_lens, 1), strict=True)
    for b, (own, got, got_lse) in enumerate(parts):
        keys, values = (x[: seqlens[b] + added[b]] for x in wanted[b])
        truth, truth_lse, _ = reference(
            own, keys, values, options["causal"], options["window_size"], options["softcap"], sinks=options["sinks"]
        )
        expect_close(got, truth, torch.float32)
        expect_close(got_lse, native(truth_lse), torch.float32)
        for x, own_x in zip((k_cache, v_cache), wanted[b], strict=True):
            expect_close(x[places[b]].flatten(0, 1), own_x, torch.float32)


def test_left_padding_of_a_cache():
    q, k, v = random_tensors(1, (2, 3, 4, 32), (2, 20, 2, 32), (2, 20, 2, 32))
    out = flash_attn_3.flash_attn_with_kvcache(q, k, v, cache_seqlens=15, cache_leftpad=int32(4, 0), causal=True)
    for b, pad in enumerate((4, 0)):
        expect_close(out[b], reference(q[b], k[b, pad:15], v[b, pad:15], True)[0], torch.float32)


@pytest.mark.parametrize("q_len", [1, 30])
def test_fp8(q_len):
    tensors = random_tensors(2, (2, q_len, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64))
    q, k, v = (x.to(FP8) for x in tensors)
    q_scale, k_scale, v_scale = (0.5 + torch.rand(2, 2) for _ in range(3))
    scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
    new = random_tensors(3, *[(2, 3, 2, 64)] * 2)
    new_k, new_v = (x.to(FP8) for x in new)
    out = flash_attn_3.flash_attn_func(q, k, v, causal=True, **scales)
    assert out.dtype == torch.bfloat16
    packed = flash_attn_3.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), offsets([q_len] * 2), offsets([40] * 2), q_len, 40, causal=True, **scales
    )
    for b in range(2):
        own = q[b].double() * q_scale[b].repeat_interleave(2)[:, None], k[b].double() * k_scale[b][:, None]
        wanted = reference(*own, v[b].double() * v_scale[b][:, None], True)[0]
        expect_close(out[b], wanted, torch.bfloat16)
        expect_close(packed.unflatten(0, (2, -1))[b], wanted, torch.bfloat16)
    out = flash_attn_3.flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=int32(5, 37), causal=True, **scales)
    for b, count in enumerate((5, 37)):
        assert torch.equal(k[b, count : count + 3].float(), new_k[b].float())
        keys, values = (x[b, : count + 3].double() for x in (k, v))
        own = q[b].double() * q_scale[b].repeat_interleave(2)[:, None], keys * k_scale[b][:, None]
        wanted = reference(*own, values * v_scale[b][:, None], True)[0]
        expect_close(out[b], wanted, torch.bfloat16)


def test_a_tensor_that_stands_for_a_number_is_checked_each_time():
    q, k, v = random_tensors(1, (2, 20, 2, 32), (2, 20, 2, 32), (2, 20, 2, 32))
    splits = torch.tensor(1)
    flash_attn_3.flash_attn_func(q, k, v, num_splits=splits)
    splits.fill_(1000)
    with pytest.raises(ValueError, match="num_splits"):
        flash_attn_3.flash_attn_func(q, k, v, num_splits=splits)


def test_compiled():
    def step(q, k_cache, v_cache, k, table, seqlens):
        out = flash_attn_3.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, k, cache_seqlens=seqlens, page_table=table, causal=True
        )
        return out, flash_attn_3.flash_attn_func(q, q, q, causal=True, return_attn_probs=True)[1]

    q, k_cache, k = random_tensors(1, (2, 3, 2, 32), (4, 8, 2, 32), (2, 3, 2, 32))
    table, seqlens = int32(0, 3, 2, 1).reshape(2, 2), int32(9, 4)
    caches = [[k_cache.clone(), k_cache.clone()] for _ in range(2)]
    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = [f(q, *own, k, table, seqlens) for f, own in zip((run, step), caches, strict=True)]
    assert all(map(torch.equal, *results))
    assert all(map(torch.equal, *caches))


# As in hopper/flash_attn_interface.py of flash-attn 2.8.4, in its order: arguments without a default, and the others.
NONE = inspect.Parameter.empty
DESCALES = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
SCALE = {"softmax_scale": None, "causal": False}
OPTIONS = SCALE | {"qv": None} | DESCALES
OPTIONS |= {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "num_splits": 1, "pack_gqa": None}
OPTIONS |= {"deterministic": False, "sm_margin": 0, "return_attn_probs": False}
KVCACHE = dict.fromkeys(
    "k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new "
    "max_seqlen_q rotary_seqlens".split()
)
KVCACHE |= DESCALES | SCALE | {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}
KVCACHE |= {"rotary_interleaved": True, "scheduler_metadata": None, "num_splits": 0, "pack_gqa": None, "sm_margin": 0}
KVCACHE |= {"return_softmax_lse": False}
SIGNATURES = {
    "flash_attn_func": ("q k v", OPTIONS | {"sinks": None}),
    "flash_attn_varlen_func": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        {"seqused_q": None, "seqused_k": None} | OPTIONS | {"sinks": None, "return_softmax_lse": False},
    ),
    "flash_attn_with_kvcache": ("q k_cache v_cache", KVCACHE | {"sinks": None}),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    found = inspect.signature(getattr(flash_attn_3, name)).parameters
    required, others = SIGNATURES[name]
    wanted = dict.fromkeys(required.split(), NONE) | others
    assert [(x.name, x.default) for x in found.values()] == list(wanted.items())
