"""Wrong arguments of flashport.flash_attn_3 raise FlashAttention-3's errors, in its words, and write nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flash_attn_call import int32, offsets  # noqa: E402
from flash_attn_errors import (  # noqa: E402
    DIM,
    DIVIDE,
    KEY,
    KIND,
    VALUE,
    apart,
    cases,
    expect_refusal,
    expect_refusal_elsewhere,
    tensor,
)
from flashport import flash_attn_3  # noqa: E402

FP8 = torch.float8_e4m3fn
TYPE = "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type"
BATCH = "batch_size must be equal to batch_size_k"
OPTIONS = [
    ({"qv": torch.zeros(1)}, "qv must be None", NotImplementedError),
    ({"attention_chunk": 4}, "attention_chunk must be 0", NotImplementedError),
    ({"num_splits": 257}, "num_splits > 256 not supported"),
    ({"num_splits": None}, f"{KIND}: num_splits must be an integer, got NoneType", TypeError),
    ({"num_splits": 1.0}, f"{KIND}: num_splits must be an integer, got float", TypeError),
    ({"causal": "no"}, f"{KIND}: causal must be a bool, got str", TypeError),
    ({"softmax_scale": float("inf")}, "softmax_scale"),
    ({"softmax_scale": "a"}, f"{KIND}: softmax_scale must be a number, got str", TypeError),
    ({"softcap": "a"}, f"{KIND}: softcap must be a number, got str", TypeError),
    ({"window_size": None}, f"{KIND}: window_size must be two integers, got None", TypeError),
    ({"sinks": torch.zeros(3)}, "sinks must have shape"),
    ({"sinks": [0.0] * 4}, f"{KIND}: sinks must be a torch.Tensor, got list", TypeError),
]
Q, K, V = (
    f"{name} must have shape (batch_size{k}, seqlen_{x}, num_heads{h}, head_size{v})"
    for name, k, x, h, v in (("q", "", "q", "", ""), ("k", "_k", "k", "_k", ""), ("v", "_k", "k", "_k", "_v"))
)
DENSE = [
    *OPTIONS,
    ({"q": tensor(2, 5, 4, 32).to(torch.int8)}, TYPE),
    ({"q": tensor(2, 5, 4, 32).to(torch.float8_e5m2)}, TYPE),
    ({"q": tensor(2, 5, 4, 32, dtype=torch.bfloat16)}, KEY),
    ({"v": tensor(2, 9, 2, 32, dtype=torch.bfloat16)}, VALUE),
    ({"q": tensor(5, 4, 32)}, Q, IndexError),
    ({"k": tensor(9, 2, 32)}, K, IndexError),
    ({"v": tensor(9, 2, 32)}, V, IndexError),
    ({"q": tensor(3, 5, 4, 32)}, BATCH),
    ({"k": tensor(2, 9, 2, 40)}, K),
    ({"v": tensor(2, 8, 2, 32)}, V),
    ({"v": tensor(2, 9, 1, 32)}, V),
    ({"q": tensor(2, 5, 3, 32)}, DIVIDE),
    ({"k": tensor(2, 9, 0, 32), "v": tensor(2, 9, 0, 32)}, DIVIDE),
    ({"q": tensor(2, 5, 4, 520), "k": tensor(2, 9, 2, 520)}, DIM),
    ({"v": tensor(2, 9, 2, 520)}, DIM),
    ({"q": tensor(2, 5, 4, 36), "k": tensor(2, 9, 2, 36)}, "head_size should be a multiple of 8, got 36"),
    ({"v": tensor(2, 9, 2, 36)}, "head_size_v should be a multiple of 8, got 36"),
    ({"q": None}, f"{KIND}: q must be a torch.Tensor, got NoneType", TypeError),
    ({"k": None}, f"{KIND}: k must be a torch.Tensor, got NoneType", TypeError),
    ({"v": 3}, f"{KIND}: v must be a torch.Tensor, got int", TypeError),
]
SCALES = [
    ({f"{side}_descale": torch.ones(*shape)}, f"{side}_descale must have shape (batch_size, num_heads_k)")
    for side in "qkv"
    for shape in ((1, 2), (2, 4), (2,))
]
OWN = {"qv", "attention_chunk", "num_splits", "softmax_scale", "softcap", "window_size", "sinks"}


def dense(changed):
    """Wrong arguments of flash_attn_func."""
    return {"q": tensor(2, 5, 4, 32), "k": tensor(2, 9, 2, 32), "v": tensor(2, 9, 2, 32)} | changed


def dense_fp8(changed):
    """The same in fp8."""
    return {name: x.to(FP8) if name in "qkv" else x for name, x in dense(changed).items()}


VARLEN = [
    *OPTIONS,
    ({"q": tensor(8, 4, 32).to(torch.int8)}, TYPE),
    ({"k": tensor(14, 2, 32, dtype=torch.bfloat16)}, KEY),
    ({"v": tensor(14, 2, 32, dtype=torch.bfloat16)}, VALUE),
    ({"q": tensor(1, 8, 4, 32)}, "q must have shape (total_q, num_heads, head_size)", IndexError),
    ({"k": tensor(1, 14, 2, 32)}, "k must have shape (total_k, num_heads_k, head_size)", IndexError),
    ({"k": tensor(14, 2, 40)}, "k must have shape (total_k, num_heads_k, head_size)"),
    ({"v": tensor(13, 2, 32)}, "v must have shape (total_k, num_heads_k, head_size_v)"),
    ({"v": tensor(14, 64)}, "v must have shape (total_k, num_heads_k, head_size_v)", IndexError),
    ({"q": tensor(8, 3, 32)}, DIVIDE),
    ({"v": tensor(14, 2, 520)}, DIM),
    ({"cu_seqlens_q": offsets([5, 3]).long()}, "cu_seqlens_q must have dtype torch.int32"),
    ({"cu_seqlens_k": offsets([9, 5]).long()}, "cu_seqlens_k must have dtype torch.int32"),
    ({"cu_seqlens_q": int32(0, 9, 5, 9, 8, 9)[::2]}, "cu_seqlens_q must be contiguous"),
    ({"cu_seqlens_k": int32(0, 9, 9, 9, 14, 9)[::2]}, "cu_seqlens_k must be contiguous"),
    ({"cu_seqlens_q": offsets([5, 3])[None]}, "cu_seqlens_q must have shape (batch_size + 1)"),
    ({"cu_seqlens_k": offsets([9, 5])[None]}, "cu_seqlens_k must have shape (batch_size + 1)"),
    ({"cu_seqlens_k": offsets([9, 5, 0])}, BATCH),
    ({"cu_seqlens_k": None}, f"{KIND}: cu_seqlens_k must be a torch.Tensor, got NoneType", TypeError),
    ({"cu_seqlens_k": int32(0, 9, 15)}, "cu_seqlens_k"),
    ({"max_seqlen_q": None}, "max_seqlen_q must be provided if cu_seqlens_q is provided"),
    ({"max_seqlen_k": None}, "max_seqlen_k must be provided if cu_seqlens_k is provided"),
    ({"max_seqlen_k": "a"}, f"{KIND}: max_seqlen_k must be an integer, got str", TypeError),
    ({"max_seqlen_q": 5.0}, f"{KIND}: max_seqlen_q must be an integer, got float", TypeError),
    *(
        row
        for name in ("seqused_q", "seqused_k")
        for row in (
            ({name: int32(3, 2).long()}, f"{name} must have dtype int32"),
            ({name: int32(3, 2, 1)}, f"{name} must have shape (batch_size)"),
            ({name: int32(3, 2, 1, 0)[::2]}, f"{name} must be contiguous"),
            ({name: [3, 2]}, f"{KIND}: {name} must be a torch.Tensor, got list", TypeError),
        )
    ),
]


def varlen(changed):
    """Wrong arguments of flash_attn_varlen_func."""
    base = {
        "q": tensor(8, 4, 32), "k": tensor(14, 2, 32), "v": tensor(14, 2, 32), "cu_seqlens_q": offsets([5, 3]),
        "cu_seqlens_k": offsets([9, 5]), "max_seqlen_q": 5, "max_seqlen_k": 9,
    }  # fmt: skip
    return base | changed


ROTARY = {"rotary_cos": tensor(16, 8), "rotary_sin": tensor(16, 8)}
NEEDS_NEW = "If rotary cos/sin are provided, new key / value to be appended to KV cache"
PACKED = {"q": tensor(6, 4, 32), "cu_seqlens_q": offsets([3, 3]), "max_seqlen_q": 3}
TOKENS = {"k": tensor(6, 2, 32), "v": tensor(6, 2, 32), "cu_seqlens_k_new": offsets([3, 3])}
ROTARY_SHAPE = "must have shape (seqlen_ro, params.rotary_dim / 2)"
NEW = "must have shape (batch_size, seqlen_k_new, num_heads_k, head_size"
CACHE = [
    *OPTIONS,
    ({"q": None}, f"{KIND}: q must be a torch.Tensor, got NoneType", TypeError),
    ({"q": None, "cache_seqlens": 4}, f"{KIND}: q must be a torch.Tensor, got NoneType", TypeError),
    ({"q": tensor(1)[0], "cache_seqlens": 4}, "q must have shape (batch_size, seqlen_q", IndexError),
    ({"cu_seqlens_q": int32(6)[0]}, "cu_seqlens_q must have shape (batch_size + 1)", IndexError),
    ({"cache_seqlens": 1 << 40}, f"{KIND}: cache_seqlens must be an integer of 32 bits", TypeError),
    ({"cu_seqlens_q": [0, 3, 6]}, f"{KIND}: cu_seqlens_q must be a torch.Tensor, got list", TypeError),
    ({"q": tensor(2, 3, 4, 32).to(torch.int8)}, TYPE),
    ({"q": tensor(2, 3, 4, 32, dtype=torch.bfloat16)}, KEY),
    ({"v_cache": tensor(2, 16, 2, 32, dtype=torch.bfloat16)}, VALUE),
    ({"q": tensor(2, 3, 3, 32)}, DIVIDE),
    ({"v": None}, "If k_new is supplied, v_new must also be passed in"),
    ({"cache_seqlens": None}, "If k_new is supplied, seqlens_k must also be passed in"),
    ({"q": tensor(2, 17, 4, 32)}, "it must have seqlen <= the seqlen of the KV cache"),
    ({"k": tensor(2, 3, 1, 32)}, f"k_new {NEW})"),
    ({"k": tensor(1, 3, 2, 32)}, f"k_new {NEW})"),
    ({"k": tensor(3, 2, 32)}, f"k_new {NEW})", IndexError),
    ({"v": tensor(2, 3, 2, 40)}, f"v_new {NEW}_v)"),
    ({"v": tensor(3, 2, 32)}, f"v_new {NEW}_v)", IndexError),
    ({"k": tensor(2, 3, 2, 32, dtype=torch.float32)}, "k_new must have the same dtype as query"),
    ({"v": tensor(2, 3, 2, 32, dtype=torch.float32)}, "v_new must have the same dtype as query"),
    ({**TOKENS, "cu_seqlens_k_new": offsets([3, 3]).long()}, "cu_seqlens_k_new must have dtype torch.int32"),
    ({**TOKENS, "cu_seqlens_k_new": offsets([6])}, "cu_seqlens_k_new must have shape (batch_size + 1)"),
    ({**TOKENS, "v": tensor(5, 2, 32)}, "v_new must have shape (total_k_new, num_heads_k, head_size_v)"),
    ({"cu_seqlens_k_new": offsets([3, 3])}, "k_new must have shape (total_k_new, num_heads_k, head_size)", IndexError),
    ({"cache_seqlens": int32(4, 9).long()}, "seqused_k must have dtype int32"),
    ({"cache_seqlens": int32(4, 9, 1)}, "seqused_k must have shape (batch_size)"),
    ({"cache_seqlens": int32(4, 0, 9, 0)[::2]}, "seqused_k must be contiguous"),
    ({"cache_seqlens": int32(4, -1)}, "seqlens_k must be at least 0, got -1"),
    ({**PACKED, "max_seqlen_q": None}, "max_seqlen_q must be provided if cu_seqlens_q is provided"),
    ({**PACKED, "max_seqlen_q": 3.0}, f"{KIND}: max_seqlen_q must be an integer, got float", TypeError),
    ({"rotary_interleaved": "no"}, f"{KIND}: rotary_interleaved must be a bool, got str", TypeError),
    ({**PACKED, "q": tensor(2, 3, 4, 32)}, "q must have shape (total_q, num_heads, head_size)", IndexError),
    ({**PACKED, "cu_seqlens_q": offsets([3, 3]).long()}, "cu_seqlens_q must have dtype torch.int32"),
    ({**PACKED, "cu_seqlens_q": int32(0, 9, 3, 9, 6, 9)[::2]}, "cu_seqlens_q must be contiguous"),
    ({**ROTARY, "k": None, "v": None}, f"{NEEDS_NEW} must also be provided"),
    ({**ROTARY, "rotary_sin": None}, "If rotary cos is provided, rotary sin must also be provided"),
    ({**ROTARY, "rotary_cos": tensor(16, 24)}, "rotary_dim must be <= headdim"),
    ({**ROTARY, "rotary_cos": tensor(16, 4)}, "Only rotary dimensions divisible by 16 are currently supported"),
    ({**ROTARY, "rotary_cos": tensor(16, 8, dtype=torch.float32)}, "rotary_cos must have the same dtype as query"),
    ({**ROTARY, "rotary_sin": tensor(16, 8, dtype=torch.float32)}, "rotary_cos must have the same dtype as query"),
    ({**ROTARY, "rotary_cos": tensor(32, 8)[::2]}, "rotary_cos must be contiguous"),
    ({**ROTARY, "rotary_sin": tensor(32, 8)[::2]}, "rotary_sin must be contiguous"),
    ({**ROTARY, "rotary_cos": tensor(128)}, f"rotary_cos {ROTARY_SHAPE}", IndexError),
    ({**ROTARY, "rotary_sin": tensor(17, 8)}, f"rotary_sin {ROTARY_SHAPE}"),
    ({**ROTARY, "rotary_seqlens": int32(1, 2).long()}, "seqlens_rotary must have dtype torch.int32"),
    ({**ROTARY, "rotary_seqlens": int32(1, 2, 3)}, "seqlens_rotary must have shape (batch_size)"),
    ({**ROTARY, "rotary_seqlens": int32(1, 2, 3, 4)[::2]}, "seqlens_rotary must be contiguous"),
    ({"k_cache": apart(2, 16, 2, 32)}, "k_cache must have contiguous last dimension", AssertionError),
    ({"v_cache": apart(2, 16, 2, 32)}, "v_cache must have contiguous last dimension", AssertionError),
    ({"k_cache": None}, f"{KIND}: k_cache must be a torch.Tensor, got NoneType", TypeError),
]  # fmt: skip
PLAIN = [
    ({"q": tensor(3, 3, 4, 32), "k": tensor(3, 3, 2, 32), "v": tensor(3, 3, 2, 32)}, BATCH),
    ({"k_cache": tensor(2, 16, 2, 40)}, K),
    ({"k_cache": tensor(32, 2, 32)}, K, IndexError),
    ({"v_cache": tensor(2, 15, 2, 32)}, V),
    ({"cache_seqlens": int32(4, 14)}, "must be at most the seqlen of the KV cache, 16, got 17"),
    ({"cache_seqlens": 14}, "must be at most the seqlen of the KV cache, 16, got 17"),
    ({"cache_leftpad": int32(0, 1).long()}, "leftpad_k must have dtype int32"),
    ({"cache_leftpad": int32(0, 1, 1)}, "leftpad_k must have shape (batch_size)"),
    ({"cache_leftpad": int32(0, 1, 0, 1)[::2]}, "leftpad_k must be contiguous"),
    ({"cache_leftpad": int32(0, 13)}, "leftpad_k must be from 0 to the keys of each sequence"),
    ({"cache_batch_idx": int32(0, 1).long()}, "kv_batch_idx must have dtype int32"),
    ({"cache_batch_idx": int32(0, 1, 1)}, "kv_batch_idx must have shape (batch_size)"),
    ({"cache_batch_idx": int32(0, 2)}, "cache_batch_idx must be from 0 to 1"),
]
PAGES = "must have shape (num_pages, page_size, num_heads_k, head_size"
TABLE = "page_table must have shape (batch_size_k, max_num_pages_per_seq)"
PAGED = [
    ({"k_cache": tensor(2, 16, 2, 40)}, f"k {PAGES})"),
    ({"v_cache": tensor(3, 16, 2, 32)}, f"v {PAGES}_v)"),
    ({"page_table": int32(1, 0).reshape(2, 1).long()}, "page_table must have dtype torch.int32"),
    ({"page_table": int32(1, 0)}, TABLE, IndexError),
    ({"page_table": int32(1, 0, 0).reshape(3, 1)}, TABLE),
    ({"page_table": [[1], [0]]}, f"{KIND}: page_table must be a torch.Tensor, got list", TypeError),
    ({"page_table": int32(0, 2).reshape(2, 1)}, "page_table must have page numbers from 0 to 1, got 0 to 2"),
    ({"cache_leftpad": int32(0, 0)}, "cache_leftpad must be None with a page_table"),
    ({"cache_batch_idx": int32(0, 0)}, "cache_batch_idx must be None with a page_table"),
    ({"cache_seqlens": 14}, "exceeds the capacity addressable by page_table"),
    ({"rotary_cos": tensor(15, 8), "rotary_sin": tensor(15, 8)}, "cos/sin seqlen must be at least the seqlen of KV"),
]  # fmt: skip


def cache(changed):
    """Wrong arguments of flash_attn_with_kvcache."""
    base = {
        "q": tensor(2, 3, 4, 32), "k_cache": tensor(2, 16, 2, 32), "v_cache": tensor(2, 16, 2, 32),
        "k": tensor(2, 3, 2, 32), "v": tensor(2, 3, 2, 32), "cache_seqlens": int32(4, 9),
    }  # fmt: skip
    return base | changed


def cache_with_pages(changed):
    """The same over a page of 16 for each sequence."""
    return cache({"page_table": int32(1, 0).reshape(2, 1)} | changed)


DENSE_CALL = [(flash_attn_3.flash_attn_func, dense)]
VARLEN_CALL = [(flash_attn_3.flash_attn_varlen_func, varlen)]
CACHE_CALL = [(flash_attn_3.flash_attn_with_kvcache, cache)]
PAGED_CALL = [(flash_attn_3.flash_attn_with_kvcache, cache_with_pages)]
ALL = [
    *cases(DENSE_CALL, DENSE),
    *cases([(flash_attn_3.flash_attn_func, dense_fp8)], SCALES),
    *cases(VARLEN_CALL, VARLEN),
    *cases(CACHE_CALL, [*CACHE, *PLAIN]),
]


@pytest.mark.parametrize(("function", "make"), [*DENSE_CALL, *VARLEN_CALL, *CACHE_CALL, *PAGED_CALL])
def test_right_arguments_are_right(function, make):
    assert function(**make({})).isfinite().all()


@pytest.mark.parametrize(("function", "arguments", "words", "kind"), ALL)
def test_wrong_arguments(function, arguments, words, kind):
    expect_refusal(function, dict(arguments), words, kind)


@pytest.mark.parametrize(("function", "arguments", "words", "kind"), cases(PAGED_CALL, [*CACHE, *PAGED]))
def test_wrong_arguments_with_pages(function, arguments, words, kind):
    expect_refusal(function, dict(arguments), words, kind)


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "k", "v", "cache_seqlens", "rotary_cos", "page_table"])
def test_tensors_elsewhere(name):
    arguments = cache_with_pages(ROTARY)
    words = {"k_cache": "k", "v_cache": "v", "k": "k_new", "v": "v_new", "cache_seqlens": "seqused_k"}
    moved = arguments | {name: torch.empty_like(arguments[name], device="meta")}
    expect_refusal(flash_attn_3.flash_attn_with_kvcache, moved, f"{words.get(name, name)} must be on CUDA")


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q"])
def test_packed_tensors_elsewhere(name):
    expect_refusal_elsewhere(flash_attn_3.flash_attn_varlen_func, varlen({"seqused_q": int32(5, 3)}), name)


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_factors_elsewhere(name):
    expect_refusal_elsewhere(flash_attn_3.flash_attn_func, dense_fp8({name: torch.ones(2, 2)}), name)


def test_rows_that_lie_apart_are_copied():
    """As there: its functions in Python do so before its checks."""
    arguments = dense({"q": apart(2, 5, 4, 32)})
    wanted = flash_attn_3.flash_attn_func(**arguments | {"q": arguments["q"].contiguous()})
    assert torch.equal(flash_attn_3.flash_attn_func(**arguments), wanted)


def test_a_gradient_is_refused():
    with pytest.raises(NotImplementedError, match="flash_attn_func: k requires a gradient"):
        flash_attn_3.flash_attn_func(*(torch.randn(1, 3, 2, 32, requires_grad=name == "k") for name in "qkv"))
