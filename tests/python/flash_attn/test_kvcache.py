"""flash_attn_with_kvcache: caches that are read, and written in place, on random calls against fp64."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

import flashport.flash_attn as flash_attn  # noqa: E402
from flash_attn_call import expect_close, int32, random_tensors, reference  # noqa: E402
from flashport.flash_attn import flash_attn_2_cuda as compiled  # noqa: E402


def rotate(x, cos, sin, first, interleaved):
    """Turns x [S, H, D], whose first token has the position ``first``, pair by pair."""
    out = x.clone()
    half = cos.shape[1]
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        rows = torch.as_tensor(first) + (torch.arange(x.shape[0]) if isinstance(first, int) else 0)
        c, s = cos[rows, pair, None].double(), sin[rows, pair, None].double()
        one, two = x[..., a].double(), x[..., b].double()
        out[..., a], out[..., b] = (one * c - two * s).to(x.dtype), (one * s + two * c).to(x.dtype)
    return out


class Cache:
    """Keys and values of sequences, laid out as a call has it, and what each sequence's keys are."""

    def __init__(self, rng, batch, room, kv_heads, dim, dtype, form):
        self.form, self.room = form, room
        self.seqlens = [rng.randint(0, room) for _ in range(batch)]
        rows = batch if form == "plain" else 2 * batch
        generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
        if form == "paged":
            self.page = rng.choice([1, 3, 16, 32])
            blocks = -(-room // self.page)
            self.room = blocks * self.page
            self.rows = torch.randperm(2 * batch * blocks, generator=generator)[: batch * blocks].reshape(batch, blocks)
            shape = (2 * batch * blocks, self.page, kv_heads, dim)
        else:
            self.rows = torch.randperm(rows, generator=generator)[:batch] if form == "indexed" else torch.arange(batch)
            shape = (rows, room, kv_heads, dim)
        self.k, self.v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))

    def options(self):
        """What says where sequences are."""
        if self.form == "plain":
            return {}
        return {"block_table" if self.form == "paged" else "cache_batch_idx": self.rows.int()}

    def of(self, x, b):
        """[room, Hkv, D] of a sequence, a copy."""
        return x[self.rows[b]].reshape(-1, *x.shape[2:])


def draw(seed):
    """(rng, cache, q, options, whether there are new keys)."""
    rng = random.Random(seed)
    batch, kv_heads, dim = rng.randint(1, 3), rng.randint(1, 2), rng.choice([16, 32, 59, 64, 128])
    dtype = rng.choice([torch.float32, torch.float16])
    form = rng.choice(["plain", "indexed", "paged"])
    cache = Cache(rng, batch, rng.choice([33, 70, 100]), kv_heads, dim, dtype, form)
    heads = kv_heads * rng.choice([1, 2, 4])
    q = random_tensors(seed, (batch, rng.choice([1, 2, 7, 16, 17, 30]), heads, dim), dtype=dtype)[0]
    options = {"num_splits": rng.choice([0, 0, 1, 3])}
    if rng.random() < 0.5:
        options["causal"] = True
    if rng.random() < 0.3:
        options["window_size"] = (rng.randint(0, 30), rng.randint(0, 30))
    if rng.random() < 0.3:
        options["softcap"] = 3.0
    if rng.random() < 0.3:
        options["alibi_slopes"] = torch.rand((batch, heads), generator=torch.Generator().manual_seed(seed))
    return rng, cache, q, options, rng.random() < 0.6


@pytest.mark.parametrize("seed", range(80))
def test_random(seed):
    rng, cache, q, options, has_new = draw(seed)
    batch, q_len, _, dim = q.shape
    kv_heads, dtype, added = cache.k.shape[2], q.dtype, 0
    call = dict(options)
    causal, window = options.get("causal", False), options.get("window_size", (-1, -1))
    wanted_k, wanted_v = cache.k.clone(), cache.v.clone()
    q_rotated, pads = q, [0] * batch
    if cache.form != "paged" and rng.random() < 0.3:
        pads = [rng.randint(0, n) for n in cache.seqlens]
        call["cache_leftpad"] = int32(*pads)
    if has_new:
        added = rng.randint(1, q_len)
        cache.seqlens = [min(n, cache.room - added) for n in cache.seqlens]
        pads = [min(pad, n) for pad, n in zip(pads, cache.seqlens, strict=True)]
        if "cache_leftpad" in call:
            call["cache_leftpad"] = int32(*pads)
        k, v = random_tensors(seed + 1000, *[(batch, added, kv_heads, dim)] * 2, dtype=dtype)
        call |= {"k": k, "v": v}
        if rng.random() < 0.6:
            angles = torch.rand(
                (cache.room + q_len, 8 * rng.randint(1, dim // 16)), generator=torch.Generator().manual_seed(1)
            )
            cos, sin = (6 * angles).cos().to(dtype), (6 * angles).sin().to(dtype)
            interleaved = rng.random() < 0.5
            call |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
            turn = causal or window != (-1, -1)
            q_rotated, k = q.clone(), k.clone()
            for b, n in enumerate(cache.seqlens):
                first = n if turn else torch.full((q_len,), n)
                q_rotated[b] = rotate(q[b], cos, sin, first, interleaved)
                k[b] = rotate(k[b], cos, sin, n, interleaved)
        for b, n in enumerate(cache.seqlens):
            for x, new in ((wanted_k, k), (wanted_v, v)):
                own = cache.of(x, b)
                own[n : n + added] = new[b]
                x[cache.rows[b]] = own.reshape(x[cache.rows[b]].shape)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, cache.k, cache.v, **call, **cache.options(), cache_seqlens=int32(*cache.seqlens), return_softmax_lse=True
    )
    own_window = tuple(-1 if side >= cache.room else side for side in window)
    for b, n in enumerate(cache.seqlens):
        keys, values = (cache.of(x, b)[pads[b] : n + added] for x in (wanted_k, wanted_v))
        slopes = options["alibi_slopes"][b] if "alibi_slopes" in options else None
        wanted, wanted_lse, _ = reference(
            q_rotated[b], keys, values, causal, own_window, options.get("softcap", 0.0), slopes
        )
        expect_close(out[b], wanted, dtype)
        expect_close(lse[b], wanted_lse, dtype)
    expect_close(cache.k, wanted_k, dtype)
    assert torch.equal(cache.v, wanted_v)


def test_lengths_as_a_number_and_none():
    q, k, v = random_tensors(2, (2, 3, 4, 32), (2, 20, 2, 32), (2, 20, 2, 32))
    for seqlens, count in ((13, 13), (None, 20)):
        out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, causal=True)
        for b in range(2):
            expect_close(out[b], reference(q[b], k[b, :count], v[b, :count], True)[0], torch.float32)


def test_what_lies_past_the_lengths_is_not_read():
    q, k, v = random_tensors(2, (2, 3, 4, 32), (2, 20, 2, 32), (2, 20, 2, 32))
    k[:, 9:] = v[:, 9:] = torch.nan
    assert flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=9).isfinite().all()


def test_a_cache_of_more_sequences():
    q, k, v = random_tensors(2, (2, 30, 4, 59), (4, 40, 2, 59), (4, 40, 2, 59))
    new_k, new_v = random_tensors(3, *[(2, 5, 2, 59)] * 2)
    before = k.clone()
    out = flash_attn.flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=int32(3, 9))
    expect_close(out[1], reference(q[1], torch.cat([before[1, :9], new_k[1]]), v[1, :14])[0], torch.float32)
    assert torch.equal(k[0, 3:8], new_k[0])
    assert torch.equal(k[2:], before[2:])


@pytest.mark.parametrize("dim", [32, 59])
@pytest.mark.parametrize("q_len", [2, 30])
def test_the_compiled_half_writes_a_given_output(q_len, dim):
    q, k, v = random_tensors(2, (2, q_len, 4, dim), (2, 20, 2, dim), (2, 20, 2, dim))
    out = torch.full_like(q, torch.nan)
    none = [None] * 4
    result, lse = compiled.fwd_kvcache(
        q, k, v, None, None, int32(9, 0), *none[:3], None, None, None, out, 0.2, True, -1, -1, 0.0, True, 0
    )
    assert result is out
    for b, count in enumerate((9, 0)):
        wanted, wanted_lse, _ = reference(q[b], k[b, :count], v[b, :count], True, scale=0.2)
        expect_close(out[b], wanted, torch.float32)
        expect_close(lse[b], wanted_lse, torch.float32)


def test_splits_change_no_more_than_rounding():
    q, k, v = random_tensors(2, (1, 1, 8, 64), (1, 3000, 2, 64), (1, 3000, 2, 64))
    outs = [flash_attn.flash_attn_with_kvcache(q, k, v, num_splits=splits) for splits in (0, 1, 2, 128)]
    for out in outs[1:]:
        expect_close(out, outs[0], torch.float32)
