"""Calls over caches with wrong arguments raise flash-attn's errors, in its words, and write nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flashport.flash_attn as flash_attn  # noqa: E402
from flash_attn_call import int32  # noqa: E402
from flash_attn_errors import (  # noqa: E402
    DIM,
    DIVIDE,
    HALF,
    KEY,
    KIND,
    LAST,
    NO_SCALE,
    OPTIONS,
    SIDES,
    TYPE,
    VALUE,
    WINDOWS,
    apart,
    cases,
    expect_refusal,
    expect_refusal_elsewhere,
    tensor,
)
from flashport.flash_attn import flash_attn_2_cuda as compiled  # noqa: E402

Q = "q must have shape (batch_size, seqlen_q, num_heads, head_size_og)"
CACHE = "cache must have shape (batch_size_c, seqlen_k, num_heads_k, head_size_og)"
NEW = "must have shape (batch_size, seqlen_knew, num_heads_k, head_size_og)"
ROTARY = "must have shape (seqlen_ro, params.rotary_dim / 2)"
NEEDS_NEW = "If rotary cos/sin are provided, new key / value to be appended to KV cache must also be provided"
CAPACITY = (
    "exceeds the capacity addressable by block_table (max_num_blocks_per_seq * page_block_size = 16). Allocate more "
    "columns in block_table"
)
NOTHING_NEW = {"k": None, "v": None, "rotary_cos": None, "rotary_sin": None}
# Calls with new keys and rotary in a cache of 16 rows, or in one page of 16 a sequence.
SHARED = [
    *(row for row in OPTIONS if "dropout_p" not in row[0]),
    ({"q": tensor(2, 3, 4, 32, dtype=torch.float64)}, TYPE),
    ({"k_cache": tensor(2, 16, 2, 32, dtype=torch.bfloat16)}, KEY),
    ({"v_cache": tensor(2, 16, 2, 32, dtype=torch.bfloat16)}, VALUE),
    ({"k_cache": tensor(2, 16, 2, 32).to(torch.float8_e4m3fn)}, KEY),
    ({"q": tensor(6, 4, 32)}, Q, IndexError),
    ({"q": tensor(0, 3, 4, 32), "block_table": int32().reshape(0, 1)}, "batch size must be positive"),
    ({"q": tensor(2, 3, 3, 32)}, DIVIDE),
    ({"q": tensor(2, 3, 1, 32)}, DIVIDE),
    ({"q": tensor(2, 3, 4, 520), "k_cache": tensor(2, 16, 2, 520), "v_cache": tensor(2, 16, 2, 520)}, DIM),
    ({"v": None}, "If key is supplied, value must also be passed in"),
    ({"cache_seqlens": None}, "If key is supplied, seqlens_k must also be passed in"),
    ({"q": tensor(2, 17, 4, 32)}, "If key is supplied, it must have seqlen <= the seqlen of the KV cache"),
    ({"k": tensor(2, 3, 2, 32, dtype=torch.bfloat16)}, "Key must have the same dtype as query"),
    ({"v": tensor(2, 3, 2, 32, dtype=torch.bfloat16)}, "Value must have the same dtype as query"),
    ({"k": tensor(2, 3, 1, 32)}, f"k {NEW}"),
    ({"k": tensor(1, 3, 2, 32)}, f"k {NEW}"),
    ({"k": tensor(2, 3, 2, 40)}, f"k {NEW}"),
    ({"k": tensor(3, 2, 32)}, f"k {NEW}", IndexError),
    ({"v": tensor(2, 2, 2, 32)}, f"v {NEW}"),
    ({"v": tensor(3, 2, 32)}, f"v {NEW}", IndexError),
    ({"k": 1}, f"{KIND}: k must be a torch.Tensor, got int", TypeError),
    ({"v": [1]}, f"{KIND}: v must be a torch.Tensor, got list", TypeError),
    ({"cache_seqlens": int32(4, 9).long()}, "seqlens_k must have dtype int32"),
    ({"cache_seqlens": int32(4, 9, 1)}, "seqlens_k must have shape (batch_size)"),
    ({"cache_seqlens": int32(4, 0, 9, 0)[::2]}, "seqlens_k must be contiguous"),
    ({"cache_seqlens": [4, 9]}, f"{KIND}: seqlens_k must be a torch.Tensor, got list", TypeError),
    ({"cache_seqlens": int32(4, -1)}, "seqlens_k must be at least 0, got -1"),
    ({"k": None, "v": None}, NEEDS_NEW),
    ({"rotary_sin": None}, "If rotary cos is provided, rotary sin must also be provided"),
    ({"rotary_cos": tensor(16, 24)}, "rotary_dim must be <= headdim"),
    ({"rotary_cos": tensor(16, 4)}, "Only rotary dimensions divisible by 16 are currently supported"),
    ({"rotary_cos": tensor(15, 8)}, "cos/sin seqlen must be at least the seqlen of KV cache"),
    ({"rotary_cos": tensor(16, 8, dtype=torch.float32)}, "rotary_cos must have the same dtype as query"),
    ({"rotary_sin": tensor(16, 8, dtype=torch.float32)}, "rotary_cos must have the same dtype as query"),
    ({"rotary_cos": tensor(32, 8)[::2]}, "rotary_cos must be contiguous"),
    ({"rotary_sin": tensor(32, 8)[::2]}, "rotary_sin must be contiguous"),
    ({"rotary_cos": tensor(128)}, f"rotary_cos {ROTARY}", IndexError),
    ({"rotary_sin": tensor(17, 8)}, f"rotary_sin {ROTARY}"),
    ({"rotary_sin": tensor(16, 16)}, f"rotary_sin {ROTARY}"),
    ({"rotary_sin": tensor(128)}, f"rotary_sin {ROTARY}", IndexError),
    ({"rotary_cos": 1.0}, f"{KIND}: rotary_cos must be a torch.Tensor, got float", TypeError),
    ({"rotary_sin": 1.0}, f"{KIND}: rotary_sin must be a torch.Tensor, got float", TypeError),
    ({"num_splits": 129}, "num_splits > 128 not supported"),
    ({"num_splits": None}, f"{KIND}: num_splits must be an integer, got NoneType", TypeError),
    ({"num_splits": 1.5}, f"{KIND}: num_splits must be an integer, got float", TypeError),
    ({"num_splits": "2"}, f"{KIND}: num_splits must be an integer, got str", TypeError),
    ({"rotary_interleaved": "no"}, f"{KIND}: rotary_interleaved must be a bool, got str", TypeError),
]  # fmt: skip
PLAIN = [
    ({"k_cache": tensor(1, 16, 2, 32), "v_cache": tensor(1, 16, 2, 32)}, f"k{CACHE}"),
    ({"k_cache": tensor(2, 16, 2, 40)}, f"k{CACHE}"),
    ({"k_cache": tensor(32, 2, 32)}, f"k{CACHE}", IndexError),
    ({"v_cache": tensor(2, 15, 2, 32)}, f"v{CACHE}"),
    ({"v_cache": tensor(3, 16, 2, 32)}, f"v{CACHE}"),
    ({"v_cache": tensor(32, 2, 32)}, f"v{CACHE}", IndexError),
    ({"cache_seqlens": int32(4, 14)}, "must be at most the seqlen of the KV cache, 16, got 17"),
    ({"cache_seqlens": int32(4, 17), **NOTHING_NEW}, "at most the seqlen of the KV cache, 16, got 17"),
    ({"cache_leftpad": int32(1, 1).long()}, "leftpad_k must have dtype int32"),
    ({"cache_leftpad": int32(1, 1, 1)}, "leftpad_k must have shape (batch_size)"),
    ({"cache_leftpad": int32(1, 1, 1, 1)[::2]}, "leftpad_k must be contiguous"),
    ({"cache_leftpad": 1}, f"{KIND}: leftpad_k must be a torch.Tensor, got int", TypeError),
    ({"cache_leftpad": int32(1, 13)}, "leftpad_k must be from 0 to the keys of each sequence"),
    ({"cache_batch_idx": int32(0, 1).long()}, "cache_batch_idx must have dtype int32"),
    ({"cache_batch_idx": int32(0)}, "cache_batch_idx must have shape (batch_size)"),
    ({"cache_batch_idx": 1}, f"{KIND}: cache_batch_idx must be a torch.Tensor, got int", TypeError),
    ({"cache_batch_idx": int32(0, 2)}, "cache_batch_idx must be from 0 to 1"),
    ({"cache_batch_idx": int32(0, -1)}, "cache_batch_idx must be from 0 to 1"),
]  # fmt: skip
PAGES = "cache must have shape (num_blocks, page_block_size, num_heads_k, head_size_og)"
TABLE = "block_table must have shape (batch_size, max_num_blocks_per_seq)"
PAGED = [
    ({"k_cache": tensor(2, 16, 2, 40)}, f"k{PAGES}"),
    ({"k_cache": tensor(32, 2, 32)}, f"k{PAGES}", IndexError),
    ({"v_cache": tensor(2, 15, 2, 32)}, f"v{PAGES}"),
    ({"v_cache": tensor(3, 16, 2, 32)}, f"v{PAGES}"),
    ({"cache_batch_idx": int32(0, 1)}, "Paged KVcache does not support cache_batch_idx"),
    ({"cache_leftpad": int32(0, 1)}, "We don't support Paged KV and leftpad_k running at the same time yet"),
    ({"block_table": int32(0, 1).reshape(2, 1).long()}, "block_table must have dtype torch.int32"),
    ({"block_table": int32(0, 1)}, TABLE, IndexError),
    ({"block_table": int32(0, 1, 1).reshape(3, 1)}, TABLE),
    ({"block_table": [[0], [1]]}, f"{KIND}: block_table must be a torch.Tensor, got list", TypeError),
    ({"cache_seqlens": int32(4, 14)}, f"max(seqlens_k) + seqlen_knew (= 17) {CAPACITY}"),
    ({"cache_seqlens": int32(4, 17), **NOTHING_NEW}, f"max(seqlens_k) (= 17) {CAPACITY}"),
    ({"block_table": int32(0, 2).reshape(2, 1)}, "block_table must have page numbers from 0 to 1, got 0 to 2"),
    ({"block_table": int32(-1, 1).reshape(2, 1)}, "block_table must have page numbers from 0 to 1, got -1 to 1"),
]  # fmt: skip
INTERFACE = [
    *WINDOWS,
    ({"k_cache": apart(2, 16, 2, 32)}, "k_cache must have contiguous last dimension", AssertionError),
    ({"v_cache": apart(2, 16, 2, 32)}, "v_cache must have contiguous last dimension", AssertionError),
    ({"q": None, "cache_seqlens": 4}, f"{KIND}: q must be a torch.Tensor, got NoneType", TypeError),
    ({"q": tensor(1)[0], "cache_seqlens": 4}, Q, IndexError),
    ({"cache_seqlens": 1 << 40}, f"{KIND}: cache_seqlens must be an integer of 32 bits", TypeError),
    ({"cache_seqlens": -1}, "seqlens_k must be at least 0, got -1"),
    ({"cache_seqlens": 14}, "must be at most the seqlen of the KV cache, 16, got 17"),
    ({"k_cache": None}, f"{KIND}: k_cache must be a torch.Tensor, got NoneType", TypeError),
    ({"v_cache": 1}, f"{KIND}: v_cache must be a torch.Tensor, got int", TypeError),
]
COMPILED = [
    *SIDES,
    *NO_SCALE,
    ({"q": apart(2, 3, 4, 32)}, LAST),
    ({"k_cache": apart(2, 16, 2, 32)}, LAST),
    ({"v_cache": apart(2, 16, 2, 32)}, LAST),
    ({"k": apart(2, 3, 2, 32)}, "Key tensor must have contiguous last dimension"),
    ({"v": apart(2, 3, 2, 32)}, "Value tensor must have contiguous last dimension"),
    ({"cache_batch_idx": int32(0, 0, 1, 0)[::2]}, "cache_batch_idx must be contiguous"),
    ({"q": None}, f"{KIND}: q must be a torch.Tensor, got NoneType", TypeError),
    ({"k_cache": None}, f"{KIND}: kcache must be a torch.Tensor, got NoneType", TypeError),
    ({"out": tensor(2, 3, 4, 32, dtype=torch.float32)}, "Output must have the same dtype as inputs"),
    ({"out": tensor(2, 4, 4, 32)}, "out must have shape (batch_size, seqlen_q, num_heads, head_size_og)"),
    ({"out": tensor(2, 3, 4, 40)}, "out must have shape (batch_size, seqlen_q, num_heads, head_size_og)"),
    ({"out": apart(2, 3, 4, 32)}, "Output tensor must have contiguous last dimension"),
]
PAGED_COMPILED = [
    ({"block_table": int32(0, 0, 1, 0).reshape(2, 2)[:, ::2]}, "block_table must have contiguous last dimension"),
]


def right(changed):
    """Wrong arguments of flash_attn_with_kvcache."""
    base = {
        "q": tensor(2, 3, 4, 32), "k_cache": tensor(2, 16, 2, 32), "v_cache": tensor(2, 16, 2, 32),
        "k": tensor(2, 3, 2, 32), "v": tensor(2, 3, 2, 32), "rotary_cos": tensor(16, 8), "rotary_sin": tensor(16, 8),
        "cache_seqlens": int32(4, 9),
    }  # fmt: skip
    return base | changed


NAMES = {
    "k_cache": "kcache", "v_cache": "vcache", "cache_seqlens": "seqlens_k", "cache_leftpad": "leftpad_k",
    "causal": "is_causal", "rotary_interleaved": "is_rotary_interleaved",
}  # fmt: skip


def low(changed):
    """Wrong arguments of flash_attn_2_cuda.fwd_kvcache."""
    q = changed.get("q")
    base = {
        "cache_batch_idx": None, "cache_leftpad": None, "block_table": None, "alibi_slopes": None,
        "out": tensor(*(2, 3, 4, 32) if q is None else q.shape), "softmax_scale": 0.1, "is_causal": True,
        "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True,
        "num_splits": 0,
    }  # fmt: skip
    return {NAMES.get(name, name): x for name, x in (base | right(changed)).items()}


def with_pages(make):
    """The same over a page of 16 for each sequence."""
    return lambda changed: make({"block_table": int32(1, 0).reshape(2, 1)} | changed)


FUNCTIONS = [(flash_attn.flash_attn_with_kvcache, right), (compiled.fwd_kvcache, low)]
PAGING = [(function, with_pages(make)) for function, make in FUNCTIONS]
UNPAGED = [row for row in SHARED if "block_table" not in row[0]]
ALL = [
    *cases(FUNCTIONS, [*UNPAGED, *PLAIN]), *cases(FUNCTIONS[:1], INTERFACE), *cases(FUNCTIONS[1:], COMPILED),
]  # fmt: skip
ALL_PAGED = [*cases(PAGING, [*SHARED, *PAGED]), *cases(PAGING[1:], PAGED_COMPILED)]


@pytest.mark.parametrize("changed", [{}, {"cache_leftpad": int32(0, 2)}, {"cache_batch_idx": int32(1, 0)}])
def test_right_arguments_are_right(changed):
    for function, make in FUNCTIONS if changed else [*FUNCTIONS, *PAGING]:
        result = function(**make(changed))
        assert (result[0] if isinstance(result, list) else result).isfinite().all()


@pytest.mark.parametrize(("function", "arguments", "words", "kind"), ALL)
def test_wrong_arguments(function, arguments, words, kind):
    expect_refusal(function, dict(arguments), words, kind)


@pytest.mark.parametrize(("function", "arguments", "words", "kind"), ALL_PAGED)
def test_wrong_arguments_with_pages(function, arguments, words, kind):
    expect_refusal(function, dict(arguments), words, kind)


NEAR = ["kcache", "vcache", "k", "v", "seqlens_k", "rotary_cos", "rotary_sin", "alibi_slopes", "out", "leftpad_k"]


@pytest.mark.parametrize("name", [*NEAR, "cache_batch_idx"])
def test_tensors_elsewhere(name):
    changed = {"alibi_slopes": torch.rand(4), "cache_leftpad": int32(0, 1), "cache_batch_idx": int32(1, 0)}
    expect_refusal_elsewhere(compiled.fwd_kvcache, low(changed), name)


def test_tables_elsewhere():
    expect_refusal_elsewhere(compiled.fwd_kvcache, with_pages(low)({}), "block_table")


def test_an_output_over_the_cache():
    cache = tensor(2, 16, 2, 32)
    arguments = low({"q": tensor(2, 3, 2, 32), "k_cache": cache, "out": cache[:, :3]})
    before = cache.clone()
    with pytest.raises(RuntimeError, match=r"^fwd_kvcache: .*out"):
        compiled.fwd_kvcache(**arguments)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v"])
def test_gradients_are_refused(name):
    for function, make in FUNCTIONS:
        arguments = make({})
        own = NAMES.get(name, name) if make is low else name
        arguments[own] = arguments[own].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=f"^{function.__name__}: {own} requires a gradient"):
            function(**arguments)
        assert arguments[own].dtype == HALF
