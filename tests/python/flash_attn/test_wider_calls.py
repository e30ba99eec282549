"""Calls that flash-attn refuses, or answers wrong, and that are right here; docs/flash_attn.md lists them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flashport.flash_attn as flash_attn  # noqa: E402
from flash_attn_call import expect_close, int32, offsets, random_tensors, reference  # noqa: E402
from flashport import flash_attn_3  # noqa: E402
from flashport.flash_attn import flash_attn_2_cuda as compiled  # noqa: E402
from flashport.flash_attn import flash_attn_interface as interface  # noqa: E402

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dim", [264, 300, 512])
def test_head_dims_above_256(dim):
    q, k, v = random_tensors(1, (2, 20, 4, dim), (2, 30, 2, dim), (2, 30, 2, dim))
    wanted = torch.stack([reference(q[b], k[b], v[b], True)[0] for b in range(2)])
    expect_close(flash_attn.flash_attn_func(q, k, v, causal=True), wanted, torch.float32)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_attn.flash_attn_varlen_func(*packed, offsets([20, 20]), offsets([30, 30]), 20, 30, causal=True)
    expect_close(out, wanted.flatten(0, 1), torch.float32)
    expect_close(flash_attn.flash_attn_with_kvcache(q, k, v, causal=True), wanted, torch.float32)
    if dim % 8 == 0:
        expect_close(
            compiled.fwd(q, k, v, None, None, 0.0, dim**-0.5, True, -1, -1, 0.0, False, None)[0], wanted, torch.float32
        )


@pytest.mark.parametrize("page", [1, 7, 16, 100])
def test_page_sizes_that_are_no_multiple_of_256(page):
    blocks = -(-100 // page)
    q, k, v, new = random_tensors(1, (2, 3, 4, 32), *[(2 * blocks, page, 2, 32)] * 2, (2, 3, 2, 32))
    table = torch.randperm(2 * blocks).reshape(2, blocks)
    wanted = [[x[table[b]].flatten(0, 1)[:90].clone() for x in (k, v)] for b in range(2)]
    q_rows, packed = q.flatten(0, 1), (offsets([3, 3]), offsets([90, 40]), 3, 90)
    out = flash_attn.flash_attn_varlen_func(q_rows, k, v, *packed, causal=True, block_table=table.int())
    for b, length in enumerate((90, 40)):
        own = (x[:length] for x in wanted[b])
        expect_close(out[3 * b : 3 * b + 3], reference(q[b], *own, True)[0], torch.float32)
    seqlens = int32(87, 40)
    out = flash_attn.flash_attn_with_kvcache(
        q, k, v, new, new, cache_seqlens=seqlens, block_table=table.int(), causal=True
    )
    for b, length in enumerate(seqlens.tolist()):
        own = (torch.cat([x[:length], new[b]]) for x in wanted[b])
        expect_close(out[b], reference(q[b], *own, True)[0], torch.float32)


def test_private_functions_with_head_dims_that_are_no_multiple_of_8():
    q, k, v = random_tensors(1, (1, 5, 4, 30), (1, 9, 2, 30), (1, 9, 2, 30))
    options = (0.0, 30**-0.5, True)
    out = interface._flash_attn_forward(q, k, v, *options, -1, -1, 0.0, None, False)[0]
    expect_close(out[0], reference(q[0], k[0], v[0], True)[0], torch.float32)
    packed = interface._flash_attn_varlen_forward(q[0], k[0], v[0], offsets([5]), offsets([9]), 5, 9, *options)[0]
    expect_close(packed, reference(q[0], k[0], v[0], True)[0], torch.float32)


def test_dropout_over_pages():
    """flash-attn drops nothing there; here the masks are those of the same call without pages."""
    q, k, v = random_tensors(1, (8, 4, 32), (4, 8, 2, 32), (4, 8, 2, 32))
    table, packed = int32(3, 1, 2, 0).reshape(2, 2), (offsets([5, 3]), offsets([9, 5]), 5, 9)
    results = []
    for block_table in (table, None):
        torch.manual_seed(5)
        keys = (
            [k, v] if block_table is not None else [torch.cat([x[[3, 1]].flatten(0, 1)[:9], x[2, :5]]) for x in (k, v)]
        )
        options = {"dropout_p": 0.5, "causal": True, "block_table": block_table}
        results.append(flash_attn.flash_attn_varlen_func(q, *keys, *packed, **options))
    assert torch.equal(*results)
    whole = flash_attn.flash_attn_varlen_func(q, k, v, *packed, causal=True, block_table=table)
    assert not torch.equal(results[0], whole)


def test_fp8_of_head_dims_that_are_no_multiple_of_16():
    q, k, v = (x.to(FP8) for x in random_tensors(1, (1, 20, 4, 40), (1, 30, 2, 40), (1, 30, 2, 40)))
    wanted = reference(q[0].double(), k[0].double(), v[0].double(), True)[0]
    expect_close(flash_attn_3.flash_attn_func(q, k, v, causal=True)[0], wanted, torch.bfloat16)


@pytest.mark.parametrize("dims", [(96, 32), (32, 96), (256, 64)])
def test_values_of_any_head_dim(dims):
    q, k, v = random_tensors(1, (1, 20, 4, dims[0]), (1, 30, 2, dims[0]), (1, 30, 2, dims[1]))
    expect_close(flash_attn_3.flash_attn_func(q, k, v)[0], reference(q[0], k[0], v[0])[0], torch.float32)


class TestFlashAttention3TakesMoreThan2:
    """What FlashAttention-3 takes and flash-attn refuses."""

    def test_tables_of_rotary_that_are_shorter_than_the_cache(self):
        q, cache, new, angles = random_tensors(1, (2, 3, 4, 32), (2, 40, 2, 32), (2, 3, 2, 32), (20, 8))
        options = {
            "rotary_cos": angles.cos(),
            "rotary_sin": angles.sin(),
            "cache_seqlens": int32(9, 17),
            "causal": True,
        }
        caches = [cache.clone() for _ in range(4)]
        short = flash_attn_3.flash_attn_with_kvcache(q, *caches[:2], new, new, **options)
        for name in ("rotary_cos", "rotary_sin"):
            options[name] = torch.cat([options[name], torch.full((20, 8), torch.nan)])
        whole = flash_attn_3.flash_attn_with_kvcache(q, *caches[2:], new, new, **options)
        assert short.isfinite().all()
        assert torch.equal(short, whole)
        assert torch.equal(caches[0], caches[2])

    def test_no_sequences(self):
        q, cache, new = random_tensors(1, (0, 3, 4, 32), (4, 8, 2, 32), (0, 3, 2, 32))
        none = torch.zeros(0, dtype=torch.int32)
        assert flash_attn_3.flash_attn_func(q, new, new).shape == q.shape
        assert flash_attn_3.flash_attn_varlen_func(q[:, 0], new[:, 0], new[:, 0], int32(0), int32(0), 0, 0).shape == (
            0,
            4,
            32,
        )
        before = cache.clone()
        table = torch.zeros(0, 2, dtype=torch.int32)
        for seqlens in (3, none):
            out = flash_attn_3.flash_attn_with_kvcache(
                q, cache, cache.clone(), new, new, cache_seqlens=seqlens, page_table=table
            )
            assert out.shape == q.shape
        assert torch.equal(cache, before)
