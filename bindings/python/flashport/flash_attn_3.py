"""FlashAttention-3's functions on flashport's kernels, under its signatures, as SGLang and others call them.

Symbols of shapes are those of :mod:`flashport.flash_attn`; values may have another head dim. Wrong arguments raise
errors that are both ValueError and RuntimeError, with FlashAttention-3's words. The lse of a query that sees no key is
-inf, as there. Hints about how a GPU does the work (``scheduler_metadata``, ``pack_gqa``, ``sm_margin``) are not read.
Importing this module imports torch.
"""

from __future__ import annotations

from typing import Any

from flashport import _flash_attn_3 as internals
from flashport.flash_attn._checks import equal_lengths, to_bool
from flashport.flash_attn._kernels import unit_rows
from flashport.flash_attn.flash_attn_interface import check_caches
from flashport.torch.gradients import refuse_gradients

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    sinks: Any = None,
) -> Any:
    """softmax(scale * q k^T) v of a dense batch.

    Args:
        q: (batch, seqlen_q, nheads, headdim) fp16, bf16 or fp8 (e4m3); fp32 on the CPU. headdim is a multiple of 8.
        k: (batch, seqlen_k, nheads_k, headdim).
        v: (batch, seqlen_k, nheads_k, headdim_v).
        softmax_scale: Factor on the products of queries and keys; default headdim ** -0.5.
        causal: Whether a query sees no key after its own position; the last query stands at the last key.
        qv: None: there are no kernels for it.
        q_descale, k_descale, v_descale: (batch, nheads_k) fp32, what fp8 inputs are multiplied by; of other types not
            read.
        window_size: (left, right), keys on either side of a query's own position that it sees; below 0 is no limit.
        attention_chunk: 0: there are no kernels for it.
        softcap: Logits become cap * tanh(logit / cap); not above 0 is off.
        num_splits: At most 256; into how many parts keys are cut for up to 16 queries, if above 1.
        pack_gqa, deterministic, sm_margin: Not read.
        return_attn_probs: Also return the lse.
        sinks: (nheads), a logit that joins the softmax's denominator, as in SGLang's fork.

    Returns:
        out (batch, seqlen_q, nheads, headdim_v), of q's type, for fp8 bf16; or (out, softmax_lse), the lse (batch,
        nheads, seqlen_q) fp32.

    Raises:
        ValueError: A wrong argument, in FlashAttention-3's words; the error is a RuntimeError, too.
        NotImplementedError: No kernel serves the request, or a gradient is asked for.

    Source:
        bindings/python/flashport/_flash_attn_3.py; the signature is that of hopper/flash_attn_interface.py in
        flash-attn 2.8.4, but for ``sinks``.
    """
    name = "flash_attn_func"
    refuse_gradients(name, "q k v", q, k, v)
    internals.refuse_options(name, qv, attention_chunk)
    out, lse = internals.attend(
        name, q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        num_splits=num_splits, sinks=sinks, return_lse=return_attn_probs,
        descales=(q_descale, k_descale, v_descale),
    )  # fmt: skip
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    sinks: Any = None,
    return_softmax_lse: bool = False,
) -> Any:
    """:func:`flash_attn_func` of packed sequences.

    Args:
        q: (total_q, nheads, headdim).
        k: (total_k, nheads_k, headdim).
        v: (total_k, nheads_k, headdim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1) int32, first row of each sequence, and the end of the last one.
        max_seqlen_q, max_seqlen_k: No sequence has more queries, or keys.
        seqused_q, seqused_k: (batch) int32, queries or keys of each sequence in use.
        softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, num_splits,
        pack_gqa, deterministic, sm_margin, return_attn_probs, sinks: As in :func:`flash_attn_func`.
        return_softmax_lse: What SGLang's fork calls ``return_attn_probs``.

    Returns:
        out (total_q, nheads, headdim_v), or (out, softmax_lse (nheads, total_q) fp32).

    Raises:
        ValueError, NotImplementedError: As :func:`flash_attn_func`.

    Source:
        bindings/python/flashport/_flash_attn_3.py; the signature is that of hopper/flash_attn_interface.py in
        flash-attn 2.8.4, but for the last two arguments.
    """
    name = "flash_attn_varlen_func"
    refuse_gradients(name, "q k v", q, k, v)
    internals.refuse_options(name, qv, attention_chunk)
    return_lse = return_attn_probs or return_softmax_lse
    out, lse = internals.attend(
        name, q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        num_splits=num_splits, sinks=sinks, return_lse=return_lse,
        descales=(q_descale, k_descale, v_descale), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: None = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Any = None,
) -> Any:
    """Attention over a cache, to which new keys and values go first where they are given.

    Args:
        q: (batch, seqlen_q, nheads, headdim), or (total_q, nheads, headdim) with ``cu_seqlens_q``.
        k_cache: (batch_cache, seqlen_cache, nheads_k, headdim), or (pages, page_size, nheads_k, headdim) with
            ``page_table``; any page_size. Written where ``k`` is given.
        v_cache: As ``k_cache``, with headdim_v.
        k: (batch, seqlen_new, nheads_k, headdim), or (total_new, nheads_k, headdim) with ``cu_seqlens_k_new``; written
            to the cache after its ``cache_seqlens`` keys.
        v: As ``k``, with headdim_v.
        qv: None: there are no kernels for it.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2) of q's type, rotary_dim a multiple of 16; turn ``k`` and
            ``q`` as in :func:`flashport.flash_attn.flash_attn_with_kvcache`.
        cache_seqlens: A number, or (batch) int32: keys in the cache, without new ones. Default: all.
        cache_batch_idx: (batch) int32, the sequence of the cache that each of ``q`` has. Not with ``page_table``.
        cache_leftpad: (batch) int32, first keys that do not exist. Not with ``page_table``.
        page_table: (batch, max_pages) int32, page numbers of each sequence.
        cu_seqlens_q: (batch + 1) int32, first row of each sequence of packed queries; needs ``max_seqlen_q``.
        cu_seqlens_k_new: (batch + 1) int32, the same for packed new keys.
        max_seqlen_q: With ``cu_seqlens_q``: no sequence has more queries.
        rotary_seqlens: (batch) int32, positions of the first new token in place of ``cache_seqlens``.
        q_descale, k_descale, v_descale: As in :func:`flash_attn_func`.
        softmax_scale, causal, window_size, attention_chunk, softcap: As in :func:`flash_attn_func`.
        rotary_interleaved: Whether pairs of rotary are neighbours, or of the two halves of rotary_dim.
        scheduler_metadata: Not read.
        num_splits: As in :func:`flash_attn_func`; 0 leaves it to the library.
        pack_gqa, sm_margin: Not read.
        return_softmax_lse: Also return the lse.
        sinks: As in :func:`flash_attn_func`.

    Returns:
        out as ``q`` with headdim_v, or (out, softmax_lse, and two empty tensors for results of parts). The lse is
        (batch, nheads, seqlen_q) fp32, or (nheads, total_q).

    Raises:
        ValueError, NotImplementedError: As :func:`flash_attn_func`; caches are as they were. Lengths and tables that go
            beyond the cache raise on the CPU; on a GPU, where no call waits, only with FLASHPORT_CHECK=1.
        AssertionError: A cache whose last axis is not contiguous.

    Source:
        bindings/python/flashport/_flash_attn_3.py; the signature is that of hopper/flash_attn_interface.py in
        flash-attn 2.8.4, but for ``sinks``.
    """
    name = "flash_attn_with_kvcache"
    refuse_gradients(name, "q k_cache v_cache k v", q, k_cache, v_cache, k, v)
    internals.refuse_options(name, qv, attention_chunk)
    check_caches(name, k_cache, v_cache)
    batch = internals.batch_of(name, q, cu_seqlens_q)
    if isinstance(cache_seqlens, int):
        cache_seqlens = equal_lengths(name, batch, cache_seqlens, k_cache.device)
    k, v = unit_rows(k), unit_rows(v)
    interleaved = to_bool(name, "rotary_interleaved", rotary_interleaved)
    new = internals.NewKeys(k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens, interleaved)
    out, lse = internals.attend_cache(
        name, q, k_cache, v_cache, new, batch, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, cu_seqlens_q,
        max_seqlen_q, softmax_scale, causal, window_size, softcap, num_splits, sinks, return_softmax_lse,
        (q_descale, k_descale, v_descale),
    )  # fmt: skip
    if not return_softmax_lse:
        return out
    return out, lse, lse.new_empty(0), lse.new_empty(0)
