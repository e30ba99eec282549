"""flash-attn's functions in Python, and the names of this module that its tests and users import."""

from __future__ import annotations

from typing import Any

import torch

from flashport.flash_attn import _cache, flash_attn_2_cuda
from flashport.flash_attn import _calls as calls
from flashport.flash_attn import _kernels as kernels
from flashport.flash_attn._checks import FlashAttnAssertionError, check_rank, equal_lengths, not_a_tensor, window_of
from flashport.flash_attn._functions import (  # noqa: F401 - names that others import from here
    FlashAttnFunc,
    FlashAttnKVPackedFunc,
    FlashAttnQKVPackedFunc,
    FlashAttnVarlenFunc,
    FlashAttnVarlenKVPackedFunc,
    FlashAttnVarlenQKVPackedFunc,
)
from flashport.flash_attn._private import (  # noqa: F401 - the same
    _flash_attn_backward,
    _flash_attn_backward_fake,
    _flash_attn_forward,
    _flash_attn_forward_fake,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_backward_fake,
    _flash_attn_varlen_forward,
    _flash_attn_varlen_forward_fake,
    _get_block_size_n,
    _torch_custom_op_wrapper,
    _torch_register_fake_wrapper,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
    maybe_contiguous,
    round_multiple,
)
from flashport.torch.gradients import refuse_gradients

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

USE_TRITON_ROCM = False
flash_attn_gpu = flash_attn_2_cuda


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """softmax(scale * q k^T) v of a dense batch.

    Query head h reads key-value head h // (nheads / nheads_k). Query i stands at position i + seqlen_k - seqlen_q, so
    that the last query stands at the last key: causal, window and ALiBi go by that. A query that sees no key gets
    output 0.

    Args:
        q: (batch, seqlen_q, nheads, headdim) fp16 or bf16; fp32 on the CPU. headdim is at most 512.
        k: (batch, seqlen_k, nheads_k, headdim).
        v: As ``k``.
        dropout_p: Probability, below 1, that a weight is dropped; kept ones grow by 1 / (1 - dropout_p).
        softmax_scale: Factor on the products of queries and keys; default headdim ** -0.5.
        causal: Whether a query sees no key after its own position.
        window_size: (left, right), keys on either side of a query's own position that it sees; below 0 is no limit.
        softcap: Logits become cap * tanh(logit / cap); not above 0 is off. Not with dropout.
        alibi_slopes: (nheads) or (batch, nheads) fp32; adds -slope * |query position - key position|.
        deterministic: Not read: it is the backward's.
        return_attn_probs: Also return lse and S_dmask, for tests.

    Returns:
        out as ``q``, or (out, softmax_lse, S_dmask). The lse is (batch, nheads, seqlen_q) fp32, natural, and +inf where
        a query sees no key. S_dmask is empty without dropout; else it is (batch, nheads, seqlen_q, seqlen_k), both
        lengths rounded up to 128 unless torch is for AMD: +-exp(logit - row maximum), negative where a weight is
        dropped, 0 where a key is masked.

    Raises:
        ValueError: A wrong argument, in flash-attn's words; the error is a RuntimeError, too.
        NotImplementedError: No kernel serves the request, or a gradient is asked for.

    Source:
        bindings/python/flashport/flash_attn/_dense.py; the signature is flash-attn 2.8.4's, from
        flash_attn/flash_attn_interface.py.
    """
    name = "flash_attn_func"
    refuse_gradients(name, "q k v", q, k, v)
    return calls.dense(
        name, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of keys and values in one tensor, which is read in place.

    Args:
        q: As in :func:`flash_attn_func`.
        kv: (batch, seqlen_k, 2, nheads_k, headdim).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: As in
            :func:`flash_attn_func`.

    Returns:
        As :func:`flash_attn_func`.

    Raises:
        ValueError, NotImplementedError: As :func:`flash_attn_func`.

    Source:
        bindings/python/flashport/flash_attn/_dense.py; the signature is flash-attn 2.8.4's, from
        flash_attn/flash_attn_interface.py.
    """
    name = "flash_attn_kvpacked_func"
    refuse_gradients(name, "q kv", q, kv)
    k, v = calls.unpacked(name, "kv", kv, 2, calls.DENSE_KV)
    return calls.dense(
        name, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of queries, keys and values in one tensor, which is read in place.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: As in
            :func:`flash_attn_func`.

    Returns:
        As :func:`flash_attn_func`.

    Raises:
        ValueError, NotImplementedError: As :func:`flash_attn_func`.

    Source:
        bindings/python/flashport/flash_attn/_dense.py; the signature is flash-attn 2.8.4's, from
        flash_attn/flash_attn_interface.py.
    """
    name = "flash_attn_qkvpacked_func"
    refuse_gradients(name, "qkv", qkv)
    q, k, v = calls.unpacked(name, "qkv", qkv, 3, calls.DENSE_QKV)
    return calls.dense(
        name, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """:func:`flash_attn_func` of packed sequences, or of packed queries over paged keys.

    Args:
        q: (total_q, nheads, headdim).
        k: (total_k, nheads_k, headdim), or (pages, page_size, nheads_k, headdim) with ``block_table``; any page_size.
        v: As ``k``.
        cu_seqlens_q: (batch + 1) int32, first row of each sequence in ``q``, and the end of the last one.
        cu_seqlens_k: The same for ``k``; with ``block_table`` the differences are the lengths of the sequences.
        max_seqlen_q, max_seqlen_k: No sequence has more queries, or keys.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: As in
            :func:`flash_attn_func`.
        block_table: (batch, max_pages) int32, page numbers of each sequence. No S_dmask of dropout is made with it.

    Returns:
        As :func:`flash_attn_func`, with out as ``q``, the lse (nheads, total_q), and in S_dmask the maxima as lengths.

    Raises:
        ValueError, NotImplementedError: As :func:`flash_attn_func`.

    Source:
        bindings/python/flashport/flash_attn/_varlen.py; the signature is flash-attn 2.8.4's, from
        flash_attn/flash_attn_interface.py.
    """
    name = "flash_attn_varlen_func"
    refuse_gradients(name, "q k v", q, k, v)
    return calls.varlen(
        name, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, return_attn_probs, block_table,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of keys and values in one tensor, which is read in place.

    Args:
        q: As in :func:`flash_attn_varlen_func`.
        kv: (total_k, 2, nheads_k, headdim).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs: As in :func:`flash_attn_varlen_func`.

    Returns:
        As :func:`flash_attn_varlen_func`.

    Raises:
        ValueError, NotImplementedError: As :func:`flash_attn_func`.

    Source:
        bindings/python/flashport/flash_attn/_varlen.py; the signature is flash-attn 2.8.4's, from
        flash_attn/flash_attn_interface.py.
    """
    name = "flash_attn_varlen_kvpacked_func"
    refuse_gradients(name, "q kv", q, kv)
    k, v = calls.unpacked(name, "kv", kv, 2, calls.VARLEN_KV)
    return calls.varlen(
        name, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, return_attn_probs, None,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of queries, keys and values in one tensor, which is read in place.

    Args:
        qkv: (total, 3, nheads, headdim).
        cu_seqlens: (batch + 1) int32, first row of each sequence, and the end of the last one.
        max_seqlen: No sequence has more tokens.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: As in
            :func:`flash_attn_func`.

    Returns:
        As :func:`flash_attn_varlen_func`.

    Raises:
        ValueError, NotImplementedError: As :func:`flash_attn_func`.

    Source:
        bindings/python/flashport/flash_attn/_varlen.py; the signature is flash-attn 2.8.4's, from
        flash_attn/flash_attn_interface.py.
    """
    name = "flash_attn_varlen_qkvpacked_func"
    refuse_gradients(name, "qkv", qkv)
    q, k, v = calls.unpacked(name, "qkv", qkv, 3, calls.VARLEN_QKV)
    return calls.varlen(
        name, q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, return_attn_probs, None,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, to which new keys and values go first where they are given.

    With rotary, new key t of a sequence has the position cache_seqlens + t. Query t has the same if there is causality
    or a window, and else all queries have the position cache_seqlens.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k_cache: (batch_cache, seqlen_cache, nheads_k, headdim), or (pages, page_size, nheads_k, headdim) with
            ``block_table``; any page_size. Written where ``k`` is given.
        v_cache: As ``k_cache``.
        k: (batch, seqlen_new, nheads_k, headdim), written to the cache after its ``cache_seqlens`` keys.
        v: As ``k``.
        rotary_cos: (seqlen_ro, rotary_dim / 2) of q's type, with seqlen_ro at least that of the cache and rotary_dim a
            multiple of 16; turns ``k`` and ``q``.
        rotary_sin: As ``rotary_cos``.
        cache_seqlens: A number, or (batch) int32: keys in the cache. Default: all.
        cache_batch_idx: (batch) int32, the sequence of the cache that each of ``q`` has; default 0, 1, ....
        cache_leftpad: (batch) int32, first keys that do not exist. Not with ``block_table``.
        block_table: (batch, max_pages) int32, page numbers of each sequence.
        softmax_scale, causal, window_size, softcap: As in :func:`flash_attn_func`.
        rotary_interleaved: Whether pairs of rotary are neighbours, or of the two halves of rotary_dim.
        alibi_slopes: As in :func:`flash_attn_func`.
        num_splits: Into how many parts keys are cut for up to 16 queries, at most 128. 0 leaves it to the library:
            then the bits of a sequence do not depend on the batch.
        return_softmax_lse: Also return the lse (batch, nheads, seqlen_q).

    Returns:
        out as ``q``, or (out, softmax_lse).

    Raises:
        ValueError, NotImplementedError: As :func:`flash_attn_func`; caches are as they were. Lengths and tables that go
            beyond the cache raise on the CPU; on a GPU, where no call waits, only with FLASHPORT_CHECK=1.
        AssertionError: A cache whose last axis is not contiguous.

    Source:
        bindings/python/flashport/flash_attn/_cache.py; the signature is flash-attn 2.8.4's, from
        flash_attn/flash_attn_interface.py.
    """
    name = "flash_attn_with_kvcache"
    refuse_gradients(name, "q k_cache v_cache k v", q, k_cache, v_cache, k, v)
    check_caches(name, k_cache, v_cache)
    if isinstance(cache_seqlens, int):
        check_rank(name, "q", q, _cache.Q)
        cache_seqlens = equal_lengths(name, q.shape[0], cache_seqlens, k_cache.device)
    out, lse = _cache.forward(
        name, kernels.unit_rows(q), k_cache, v_cache, kernels.unit_rows(k), kernels.unit_rows(v), cache_seqlens,
        rotary_cos, rotary_sin, kernels.unit_rows(cache_batch_idx), cache_leftpad, kernels.unit_rows(block_table),
        alibi_slopes, None, softmax_scale, causal, window_of(name, window_size), softcap, rotary_interleaved,
        num_splits, bool(return_softmax_lse),
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def check_caches(function: str, k_cache: Any, v_cache: Any) -> None:
    """Caches are not copied, so their last axis is contiguous."""
    for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(cache, torch.Tensor):
            raise not_a_tensor(function, argument, cache)
        if cache.ndim and cache.stride(-1) != 1:
            raise FlashAttnAssertionError(
                f"{function}: {argument} must have contiguous last dimension, got strides {cache.stride()}"
            )
