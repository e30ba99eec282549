"""flash_attn_varlen_func and its packed forms, on random calls against fp64."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

import flashport  # noqa: E402
import flashport.flash_attn as flash_attn  # noqa: E402
from flash_attn_call import expect_close, int32, offsets, random_tensors, reference  # noqa: E402
from flashport.flash_attn import flash_attn_2_cuda as compiled  # noqa: E402

Q_LENS, KV_LENS = [6, 3], [9, 5]


def sequences(q, k, v, q_lens, kv_lens, **options):
    """(out [Tq, ...], lse [H, Tq]) of packed tensors, one sequence after the other."""
    parts = zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), strict=True)
    slopes = options.pop("slopes", None)
    results = []
    for b, part in enumerate(parts):
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[b]
        results.append(reference(*part, slopes=own, **options))
    return torch.cat([x[0] for x in results]), torch.cat([x[1] for x in results], 1)


def paged(k, kv_lens, page_size, seed):
    """(pages, table) of packed keys; pages in random order, and NaN where no key is."""
    blocks = max(1, max(-(-n // page_size) for n in kv_lens))
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(2 * blocks * len(kv_lens), generator=generator)[: blocks * len(kv_lens)]
    table = table.reshape(len(kv_lens), blocks).int()
    pages = k.new_full((2 * blocks * len(kv_lens), page_size, *k.shape[1:]), torch.nan)
    for row, part in zip(table.tolist(), k.split(kv_lens), strict=True):
        for j, token in enumerate(part):
            pages[row[j // page_size], j % page_size] = token
    return pages, table


@pytest.mark.parametrize("seed", range(50))
def test_random(seed):
    rng = random.Random(seed)
    batch, dim = rng.randint(1, 4), rng.choice([8, 32, 40, 59, 64, 128])
    longest = rng.choice([1, 4, 16, 60])
    q_lens = [rng.choice([0, 1, longest, rng.randint(0, longest)]) for _ in range(batch)]
    kv_lens = [rng.choice([0, 1, 30, 70]) for _ in range(batch)]
    kv_heads, group = rng.randint(1, 2), rng.choice([1, 3])
    heads = kv_heads * group
    kv_shape = (sum(kv_lens), kv_heads, dim)
    dtype = rng.choice([torch.float32, torch.bfloat16])
    q, k, v = random_tensors(seed, (sum(q_lens), heads, dim), kv_shape, kv_shape, dtype=dtype)
    causal, window, softcap = rng.random() < 0.5, (-1, -1), 0.0
    if rng.random() < 0.4:
        window = (rng.randint(0, 20), rng.randint(0, 20))
    if rng.random() < 0.3:
        softcap = 2.0
    slopes = torch.rand((batch, heads)) if rng.random() < 0.4 else None
    max_k = max(1, *kv_lens)
    own_window = tuple(-1 if side >= max_k else side for side in window)
    out, lse = sequences(q, k, v, q_lens, kv_lens, causal=causal, window=own_window, softcap=softcap, slopes=slopes)
    options = {"causal": causal, "window_size": window, "softcap": softcap, "alibi_slopes": slopes}
    options |= {"return_attn_probs": True}
    lengths = (offsets(q_lens), offsets(kv_lens), max(1, *q_lens), max_k)
    got, got_lse, s_dmask = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, **options)
    expect_close(got, out, dtype)
    expect_close(got_lse, lse, torch.float32 if dtype == torch.float32 else torch.float16)
    assert s_dmask.shape == (0,)
    packed = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *lengths, **options)
    assert torch.equal(packed[0], got)
    page_size = rng.choice([1, 3, 16, 64, 256])
    pages, table = paged(torch.cat([k, v], -1), kv_lens, page_size, seed)
    got, got_lse, _ = flash_attn.flash_attn_varlen_func(
        q, pages[..., :dim], pages[..., dim:], *lengths, **options, block_table=table
    )
    expect_close(got, out, dtype)
    expect_close(got_lse, lse, torch.float32 if dtype == torch.float32 else torch.float16)


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_packed(causal):
    lens = [20, 1, 33]
    (qkv,) = random_tensors(1, (sum(lens), 3, 4, 59))
    out, lse = sequences(*qkv.unbind(1), lens, lens, causal=causal)
    got, got_lse, _ = flash_attn.flash_attn_varlen_qkvpacked_func(
        qkv, offsets(lens), torch.tensor(33), causal=causal, return_attn_probs=True
    )
    expect_close(got, out, torch.float32)
    expect_close(got_lse, lse, torch.float32)


def test_dropout():
    p, q_lens, kv_lens = 0.25, [30, 7], [12, 50]
    q, k, v = random_tensors(3, (37, 4, 32), (62, 2, 32), (62, 2, 32))
    torch.manual_seed(5)
    out, lse, s_dmask = flash_attn.flash_attn_varlen_func(
        q, k, v, offsets(q_lens), offsets(kv_lens), 30, 50, p, causal=True, return_attn_probs=True
    )
    torch.manual_seed(5)
    state = torch.randint(0, (1 << 63) - 1, (2,))
    kept = flashport.dropout_mask((2, 4, 30, 50), state, p).bool()
    assert s_dmask.shape == (2, 4, 128, 128)
    parts = zip(
        q.split(q_lens), k.split(kv_lens), v.split(kv_lens), out.split(q_lens), lse.split(q_lens, 1), strict=True
    )
    for b, (own_q, own_k, own_v, got, got_lse) in enumerate(parts):
        here = kept[b, :, : q_lens[b], : kv_lens[b]]
        wanted, wanted_lse, weights = reference(own_q, own_k, own_v, causal=True, kept=here, dropout_p=p)
        expect_close(got, wanted, torch.float32)
        expect_close(got_lse, wanted_lse, torch.float32)
        signed = s_dmask[b, :, : q_lens[b], : kv_lens[b]]
        expect_close(signed, torch.where(here, weights, -weights), torch.float32)
        assert (s_dmask[b, :, q_lens[b] :] == 0).all()
        assert (s_dmask[b, :, :, kv_lens[b] :] == 0).all()


# Keys of each sequence, those in use (None: all), and those of the left that do not exist.
PADDED = [
    ([9, 5], None, [2, 1]),
    ([9, 5], [8, 5], [2, 3]),
    ([40, 12], None, [0, 7]),
    ([40, 70], [33, 1], [32, 1]),
    ([1, 130], [1, 129], [0, 100]),
]


@pytest.mark.parametrize("window", [(-1, 0), (4, 2), (-1, -1)])
@pytest.mark.parametrize(("kv_lens", "used", "pads"), PADDED)
def test_dropout_with_left_padding(kv_lens, used, pads, window):
    """S_dmask counts keys as the output does, from the first one that exists."""
    p, q_lens, dim, longest = 0.3, [6, 19], 32, max(kv_lens)
    q, k, v = random_tensors(9, (25, 4, dim), (sum(kv_lens), 2, dim), (sum(kv_lens), 2, dim))
    slopes = torch.rand(4)
    given = None if used is None else int32(*used)
    out, _, s_dmask, state = compiled.varlen_fwd(
        q, k, v, None, offsets(q_lens), offsets(kv_lens), given, int32(*pads), None, slopes, 19, longest, p, dim**-0.5,
        False, False, *window, 0.0, True, None,
    )  # fmt: skip
    kept = flashport.dropout_mask((2, 4, 19, longest), state, p).bool()
    parts = zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), out.split(q_lens), strict=True)
    for b, (own_q, own_k, own_v, got) in enumerate(parts):
        exist = slice(pads[b], kv_lens[b] if used is None else used[b])
        own_k, own_v = own_k[exist], own_v[exist]
        signed = s_dmask[b, :, : q_lens[b], : len(own_k)]
        here = kept[b, :, : q_lens[b], : len(own_k)]
        own_window = tuple(-1 if side >= longest else side for side in window)
        wanted, _, weights = reference(own_q, own_k, own_v, window=own_window, slopes=slopes, kept=here, dropout_p=p)
        expect_close(got, wanted, torch.float32)
        expect_close(signed, torch.where(here, weights, -weights), torch.float32)
        assert (s_dmask[b, :, :, len(own_k) :] == 0).all()
        # The output follows from S_dmask alone: its kept weights over the sum of all.
        shares = signed.clamp(min=0) / (1 - p) / signed.abs().sum(-1, keepdim=True).clamp(min=1e-30)
        from_mask = torch.einsum("hij,jhd->ihd", shares.double(), own_v.double().repeat_interleave(2, 1))
        expect_close(got, from_mask, torch.float32)


class TestCompiledHalf:
    """flash_attn_2_cuda.varlen_fwd, whose arguments go by position."""

    def make(self, rows=2, dim=32):
        kv = (sum(KV_LENS), 2, dim)
        return random_tensors(8, (sum(Q_LENS) + rows, 4, dim), kv, kv)

    def call(
        self, q, k, v, out=None, used=None, pad=None, table=None, max_k=9, zero=False, causal=False, splits=0, max_q=6,
        q_lens=None,
    ):  # fmt: skip
        cu_q = offsets(Q_LENS if q_lens is None else q_lens)
        return compiled.varlen_fwd(
            q, k, v, out, cu_q, offsets(KV_LENS), used, pad, table, None, max_q, max_k, 0.0, 32**-0.5, zero,
            causal, -1, -1, 0.0, False, None, splits,
        )  # fmt: skip

    def test_rows_of_no_sequence_are_not_written(self):
        q, k, v = self.make()
        out = torch.full_like(q, 7)
        result, lse, _, _ = self.call(q, k, v, out, causal=True)
        wanted, wanted_lse = sequences(q[:9], k, v, Q_LENS, KV_LENS, causal=True)
        assert result is out
        expect_close(out[:9], wanted, torch.float32)
        expect_close(lse[:, :9], wanted_lse, torch.float32)
        assert (out[9:] == 7).all()

    @pytest.mark.parametrize("given", [False, True])
    def test_zero_tensors(self, given):
        q, k, v = self.make()
        out = torch.full_like(q, 7) if given else None
        result, lse, _, _ = self.call(q, k, v, out, used=int32(9, 0), zero=True)
        assert (result[6:] == 0).all()
        assert (lse[:, 6:9] == torch.inf).all()
        assert (lse[:, 9:] == -torch.inf).all()
        wanted, wanted_lse = sequences(q[:6], k[:9], v[:9], [6], [9])
        expect_close(result[:6], wanted, torch.float32)
        expect_close(lse[:, :6], wanted_lse, torch.float32)

    def test_no_keys_at_all(self):
        q, k, v = self.make()
        out, lse, _, _ = self.call(q, k, v, max_k=0)
        assert (out == 0).all()
        assert (lse == torch.inf).all()

    def test_lengths_in_use_and_left_padding(self):
        q, k, v = self.make(0)
        out, lse, _, _ = self.call(q, k, v, used=int32(7, 5), pad=int32(2, 1), causal=True)
        own = torch.cat([k[2:7], k[10:14]]), torch.cat([v[2:7], v[10:14]])
        wanted, wanted_lse = sequences(q, *own, Q_LENS, [5, 4], causal=True)
        expect_close(out, wanted, torch.float32)
        expect_close(lse, wanted_lse, torch.float32)

    @pytest.mark.parametrize(("max_q", "q_lens"), [(1, [1, 1]), (6, None)])
    def test_pages_with_lengths_in_use(self, max_q, q_lens):
        q, k, v = self.make(0)
        q = q[: sum(q_lens or Q_LENS)]
        pages, table = paged(torch.cat([k, v], -1), KV_LENS, 4, 1)
        out, lse, _, _ = self.call(
            q,
            pages[..., :32],
            pages[..., 32:],
            used=int32(8, 3),
            table=table,
            max_q=max_q,
            q_lens=q_lens,
            splits=max_q == 1,
        )
        wanted, wanted_lse = sequences(
            q, torch.cat([k[:8], k[9:12]]), torch.cat([v[:8], v[9:12]]), q_lens or Q_LENS, [8, 3]
        )
        expect_close(out, wanted, torch.float32)
        expect_close(lse, wanted_lse, torch.float32)

    def test_head_dim_8(self):
        q, k, v = self.make(0, 8)
        out, _, _, _ = self.call(q, k, v)
        expect_close(out, sequences(q, k, v, Q_LENS, KV_LENS, scale=32**-0.5)[0], torch.float32)
        assert out.is_contiguous()
