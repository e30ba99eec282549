"""flash_attn_func and its packed forms, on random calls against fp64."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

import flashport  # noqa: E402
import flashport.flash_attn as flash_attn  # noqa: E402
from flash_attn_call import expect_close, random_tensors, reference  # noqa: E402
from flashport.flash_attn import flash_attn_2_cuda as compiled  # noqa: E402
from flashport.flash_attn.flash_attn_interface import _get_block_size_n  # noqa: E402

DIMS = [8, 16, 32, 40, 59, 64, 80, 111, 128, 256]
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(seed):
    """Sizes and options of a call."""
    rng = random.Random(seed)
    sizes = {
        "batch": rng.randint(1, 3),
        "q_len": rng.choice([1, 2, 7, 16, 17, 40, 70]),
        "kv_len": rng.choice([1, 5, 33, 64, 90]),
        "kv_heads": rng.randint(1, 3),
        "group": rng.choice([1, 1, 2, 4]),
        "dim": rng.choice(DIMS),
        "dtype": rng.choice(TYPES),
    }
    options = {}
    if rng.random() < 0.5:
        options["causal"] = True
    if rng.random() < 0.4:
        options["window_size"] = (rng.randint(-1, 50), rng.randint(-1, 50))
    if rng.random() < 0.3:
        options["softcap"] = rng.choice([1.5, 20.0])
    if rng.random() < 0.3:
        options["softmax_scale"] = 0.3
    if rng.random() < 0.4:
        heads = sizes["kv_heads"] * sizes["group"]
        shape = (heads,) if rng.random() < 0.5 else (sizes["batch"], heads)
        options["alibi_slopes"] = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return sizes, options


def expected(q, k, v, options):
    """(out, lse) of all sequences; a window that reaches over all keys is none."""
    left, right = options.get("window_size", (-1, -1))
    kv_len = k.shape[1]
    window = (left if left < kv_len else -1, right if right < kv_len else -1)
    slopes = options.get("alibi_slopes")
    results = [
        reference(
            q[b], k[b], v[b], options.get("causal", False), window, options.get("softcap", 0.0),
            slopes if slopes is None or slopes.ndim == 1 else slopes[b], options.get("softmax_scale"),
        )
        for b in range(len(q))
    ]  # fmt: skip
    return torch.stack([x[0] for x in results]), torch.stack([x[1] for x in results])


@pytest.mark.parametrize("seed", range(60))
def test_random(seed):
    sizes, options = draw(seed)
    batch, kv_heads, dim, dtype = sizes["batch"], sizes["kv_heads"], sizes["dim"], sizes["dtype"]
    heads = kv_heads * sizes["group"]
    q_shape, kv_shape = (batch, sizes["q_len"], heads, dim), (batch, sizes["kv_len"], kv_heads, dim)
    q, k, v = random_tensors(seed, q_shape, kv_shape, kv_shape, dtype=dtype)
    out, lse = expected(q, k, v, options)
    got, got_lse, s_dmask = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert (got.dtype, got_lse.dtype, s_dmask.shape) == (dtype, torch.float32, (0,))
    expect_close(got, out, dtype)
    expect_close(got_lse, lse, torch.float32 if dtype == torch.float32 else torch.float16)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **options, deterministic=True), got)
    packed = flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options, return_attn_probs=True)
    assert torch.equal(packed[0], got)
    assert torch.equal(packed[1], got_lse)
    if q.shape == k.shape:
        assert torch.equal(flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options), got)


def test_self_attention_packed():
    (qkv,) = random_tensors(1, (2, 40, 3, 4, 48))
    out, lse = expected(*qkv.unbind(2), {"causal": True})
    got, got_lse, _ = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    expect_close(got, out, torch.float32)
    expect_close(got_lse, lse, torch.float32)


def test_rows_that_see_nothing():
    """More queries than keys: the first ones stand before all keys."""
    q, k, v = random_tensors(2, (1, 30, 2, 32), (1, 20, 2, 32), (1, 20, 2, 32))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :10] == 0).all()
    assert (lse[..., :10] == torch.inf).all()
    assert lse[..., 10:].isfinite().all()


@pytest.mark.parametrize("q_len", [1, 9, 30])
def test_no_keys(q_len):
    q, k = random_tensors(2, (2, q_len, 2, 32), (2, 0, 2, 32))
    out, lse, _ = flash_attn.flash_attn_func(q, k, k, return_attn_probs=True)
    assert (out == 0).all()
    assert (lse == torch.inf).all()


@pytest.mark.parametrize(("window", "seen"), [((-1, 4), 4), ((-1, 5), 5), ((-7, 5), 5), ((3, -4), 5)])
def test_a_window_as_long_as_the_keys_is_none(window, seen):
    """With 5 keys and 30 queries a right side of 4 hides keys from the first queries, and one of 5 none."""
    q, k, v = random_tensors(3, (1, 30, 2, 32), (1, 5, 2, 32), (1, 5, 2, 32))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, window_size=window, return_attn_probs=True)
    assert bool((lse[..., 0] == torch.inf).all()) == (seen == 4)
    if window[0] < 0 and seen == 5:
        assert torch.equal(out, flash_attn.flash_attn_func(q, k, v))


def test_a_window_may_be_a_tensor_and_tensors_may_lie_apart():
    q, k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in random_tensors(4, *[(2, 33, 3, 40)] * 3))
    assert q.stride(-1) != 1
    wanted, _ = expected(q, k, v, {"window_size": (4, 6)})
    expect_close(flash_attn.flash_attn_func(q, k, v, window_size=torch.tensor([4, 6])), wanted, torch.float32)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (20, 9)}, {"alibi_slopes": torch.rand(4)}])
@pytest.mark.parametrize("dim", [40, 59])
def test_dropout(options, dim):
    p = 0.3
    q, k, v = random_tensors(5, (2, 40, 4, dim), (2, 70, 2, dim), (2, 70, 2, dim))
    torch.manual_seed(11)
    out, lse, s_dmask = flash_attn.flash_attn_func(q, k, v, p, **options, return_attn_probs=True)
    torch.manual_seed(11)
    state = torch.randint(0, (1 << 63) - 1, (2,))
    kept = flashport.dropout_mask((2, 4, 40, 70), state, p).bool()
    assert s_dmask.shape == (2, 4, 128, 128)
    assert (s_dmask[:, :, 40:] == 0).all()
    assert (s_dmask[:, :, :, 70:] == 0).all()
    names = {"causal": "causal", "window_size": "window", "alibi_slopes": "slopes"}
    named = {names[name]: value for name, value in options.items()}
    for b in range(2):
        wanted, wanted_lse, weights = reference(q[b], k[b], v[b], **named, kept=kept[b], dropout_p=p)
        expect_close(out[b], wanted, torch.float32)
        expect_close(lse[b], wanted_lse, torch.float32)
        expect_close(s_dmask[b, :, :40, :70], torch.where(kept[b], weights, -weights), torch.float32)
    torch.manual_seed(11)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, p, **options), out)
    assert not torch.equal(flash_attn.flash_attn_func(q, k, v, p, **options), out)


def test_all_keys_are_one_block_of_s_dmask():
    assert _get_block_size_n("cuda", 128, True, False) > 1 << 20


class TestCompiledHalf:
    """flash_attn_2_cuda.fwd, whose arguments go by position."""

    def call(self, q, k, v, out=None, p=0.0, causal=False, return_softmax=False):
        scale = q.shape[-1] ** -0.5
        return compiled.fwd(q, k, v, out, None, p, scale, causal, -1, -1, 0.0, return_softmax, None)

    @pytest.mark.parametrize("dim", [8, 16, 64])
    @pytest.mark.parametrize("q_len", [1, 5, 30])
    def test_results(self, q_len, dim):
        q, k, v = random_tensors(6, (2, q_len, 4, dim), (2, 33, 2, dim), (2, 33, 2, dim))
        out, lse, s_dmask, state = self.call(q, k, v, causal=True)
        wanted, wanted_lse = expected(q, k, v, {"causal": True})
        expect_close(out, wanted, torch.float32)
        expect_close(lse, wanted_lse, torch.float32)
        assert out.is_contiguous()
        assert (s_dmask.shape, state.shape, state.dtype) == ((0,), (2,), torch.int64)

    @pytest.mark.parametrize("dim", [8, 64])
    def test_a_given_output_is_written(self, dim):
        q, k, v = random_tensors(6, (2, 20, 4, dim), (2, 33, 2, dim), (2, 33, 2, dim))
        room = torch.full((2, 20, 4, 2 * dim), torch.nan)
        out = room[..., :dim]
        result = self.call(q, k, v, out)
        assert result[0] is out
        expect_close(out, expected(q, k, v, {})[0], torch.float32)
        assert room[..., dim:].isnan().all()

    def test_dropout_gives_its_random_state(self):
        q, k, v = random_tensors(6, *[(1, 20, 2, 16)] * 3)
        out, _, s_dmask, state = self.call(q, k, v, p=0.5, return_softmax=True)
        kept = flashport.dropout_mask((1, 2, 20, 20), state, 0.5).bool()
        assert torch.equal(kept, s_dmask[:, :, :20, :20] > 0)
        expect_close(out[0], reference(q[0], k[0], v[0], kept=kept[0], dropout_p=0.5)[0], torch.float32)
