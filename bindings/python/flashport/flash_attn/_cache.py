"""Attention over a cache of keys and values, to which new ones may go first, as flash-attn's ``fwd_kvcache`` has it."""

from __future__ import annotations

from typing import Any

import torch

from flashport.flash_attn import _checks as checks
from flashport.flash_attn import _kernels as kernels
from flashport.torch import tracing

Q = "batch_size, seqlen_q, num_heads, head_size_og"
_NEW = "batch_size, seqlen_knew, num_heads_k, head_size_og"
_CACHE = "batch_size_c, seqlen_k, num_heads_k, head_size_og"
_PAGES = "num_blocks, page_block_size, num_heads_k, head_size_og"


def forward(
    function: str,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    seqlens_k: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    cache_batch_idx: Any,
    leftpad_k: Any,
    block_table: Any,
    alibi_slopes: Any,
    out: Any,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    interleaved: bool,
    num_splits: int,
    return_lse: bool,
) -> tuple[Any, Any]:
    """(out, lse or None); ``out`` may be a view as in the dense form. Nothing is written before all is checked."""
    if softmax_scale is not None:
        softmax_scale = checks.to_float(function, "softmax_scale", softmax_scale)
    causal = checks.to_bool(function, "causal", causal)
    softcap = checks.to_float(function, "softcap", softcap)
    interleaved = checks.to_bool(function, "rotary_interleaved", interleaved)
    num_splits = checks.to_int(function, "num_splits", num_splits)
    tensors = (
        q, k_cache, v_cache, k, v, seqlens_k, rotary_cos, rotary_sin, cache_batch_idx, leftpad_k, block_table,
        alibi_slopes, out,
    )  # fmt: skip
    form = checks.form_of(function, tensors, (softcap, num_splits))
    checks.check_once(form, _check, function, *tensors, softcap, num_splits)
    if out is not None:
        _check_apart(function, out, k_cache, v_cache)
    paged = block_table is not None
    batch, q_len, _, head_dim = q.shape
    kv_len = block_table.shape[1] * k_cache.shape[1] if paged else k_cache.shape[1]
    new_len = 0 if k is None else k.shape[1]
    if checks.reads_contents(q):
        check_contents(function, seqlens_k, new_len or None, kv_len, k_cache, cache_batch_idx, leftpad_k, block_table)

    causal = causal and (q_len > 1 or alibi_slopes is not None)
    window = kernels.window_of(*window, kv_len, causal)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    dim = kernels.padded_head_dim(head_dim)
    given, k_given, v_given = out, k_cache, v_cache
    if dim != head_dim:
        written = {"out": out} if k is None else {"out": out, "k_cache": k_cache, "v_cache": v_cache}
        checks.check_written(function, written, {"q": q, "k": k, "v": v})
        q, k_cache, v_cache = kernels.padded(q, dim), kernels.padded(k_cache, dim), kernels.padded(v_cache, dim)
        out = None
    if cache_batch_idx is not None:  # a sequence of the cache is a page
        block_table = cache_batch_idx[:, None]
    elif not paged and len(k_cache) > batch:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    new_k, new_v = (None, None) if k is None else (kernels.padded(k, dim), kernels.padded(v, dim))
    out, lse = kernels.attend(
        function, q, k_cache, v_cache, window, seqused_k=seqlens_k, leftpad_k=leftpad_k, block_table=block_table,
        k_new=new_k, v_new=new_v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=interleaved,
        softmax_scale=scale, softcap=max(softcap, 0.0), alibi_slopes=alibi_slopes, out=out, return_lse=return_lse,
        num_splits=num_splits if num_splits > 1 else None,
    )  # fmt: skip
    if new_len and dim != head_dim:
        k_given[: len(k_cache)].copy_(k_cache[..., :head_dim])
        v_given[: len(v_cache)].copy_(v_cache[..., :head_dim])
    if dim != head_dim:
        out = out[..., :head_dim]
        out = out if given is None else given.copy_(out)
    return out, kernels.with_infinity(lse) if return_lse else None


def _check(
    function: str,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    seqlens_k: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    cache_batch_idx: Any,
    leftpad_k: Any,
    block_table: Any,
    alibi_slopes: Any,
    out: Any,
    softcap: float,
    num_splits: int,
) -> None:
    """What the form of a call says."""
    paged = block_table is not None
    words = _PAGES if paged else _CACHE
    checks.check_rank(function, "q", q, Q)
    checks.check_rank(function, "kcache", k_cache, words)
    checks.check_rank(function, "vcache", v_cache, words)
    checks.check_tensors(
        function,
        q,
        ("kcache", k_cache, "query and key must have the same dtype"),
        ("vcache", v_cache, "query and value must have the same dtype"),
    )
    batch, _, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    if paged:
        if cache_batch_idx is not None:
            raise checks.FlashAttnError(
                f"{function}: Paged KVcache does not support cache_batch_idx; pass it or block_table"
            )
        checks.check_block_table(function, q, block_table, batch)
    kv_len = block_table.shape[1] * k_cache.shape[1] if paged else k_cache.shape[1]
    checks.check_batch(function, batch)
    checks.check_heads(function, heads, kv_heads, head_dim)
    kv_shape = (*k_cache.shape[:-1], head_dim)
    checks.check_shape(function, "kcache", k_cache, kv_shape, words)
    checks.check_shape(function, "vcache", v_cache, kv_shape, words)
    if not paged and cache_batch_idx is None and k_cache.shape[0] < batch:
        raise checks.FlashAttnError(
            f"{function}: kcache must have shape ({_CACHE}) with batch_size_c at least {batch}, as q has so many "
            f"sequences, got {tuple(k_cache.shape)}"
        )
    if out is not None:
        checks.check_out(function, q, out, q.shape, Q)
    _check_new(function, q, k, v, seqlens_k, kv_len, kv_heads)
    if seqlens_k is not None:
        checks.check_integers(function, q, "seqlens_k", seqlens_k, (batch,), "batch_size")
    checks.check_leftpad(function, q, leftpad_k, paged, "cache_leftpad", batch)
    if rotary_cos is not None:
        checks.check_rotary(function, q, k, rotary_cos, rotary_sin, kv_len)
    if cache_batch_idx is not None:
        checks.check_integers(function, q, "cache_batch_idx", cache_batch_idx, (batch,), "batch_size")
    checks.check_splits(function, num_splits)
    if alibi_slopes is not None:
        checks.check_alibi(function, q, alibi_slopes, batch, heads)


def _check_apart(function: str, out: Any, *caches: Any) -> None:
    """``out`` lies in memory of its own: new keys are in the cache before the kernels would refuse it."""
    if tracing.is_compiling():
        return
    for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        if out.numel() and out.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr():
            raise checks.FlashAttnError(f"{function}: out must not be a view of the memory that {name} is a view of")


def _check_new(function: str, q: Any, k: Any, v: Any, seqlens_k: Any, kv_len: int, kv_heads: int) -> None:
    """New keys and values, and what they need."""
    if k is None:
        return
    if v is None:
        raise checks.FlashAttnError(f"{function}: If key is supplied, value must also be passed in")
    if seqlens_k is None:
        raise checks.FlashAttnError(f"{function}: If key is supplied, seqlens_k must also be passed in")
    batch, q_len, _, head_dim = q.shape
    if q_len > kv_len:
        raise checks.FlashAttnError(
            f"{function}: If key is supplied, it must have seqlen <= the seqlen of the KV cache, got {q_len} and "
            f"{kv_len}"
        )
    for name, x, title in (("k", k, "Key"), ("v", v, "Value")):
        checks.check_rank(function, name, x, _NEW)
        if x.dtype != q.dtype:
            raise checks.FlashAttnError(
                f"{function}: {title} must have the same dtype as query, got {x.dtype} and {q.dtype}"
            )
        checks.check_device(function, q, name, x)
        if x.stride(-1) != 1:
            raise checks.FlashAttnError(
                f"{function}: {title} tensor must have contiguous last dimension, got strides {x.stride()}"
            )
        checks.check_shape(function, name, x, (batch, k.shape[1], kv_heads, head_dim), _NEW)


def check_contents(
    function: str,
    seqlens: Any,
    added: Any,
    kv_len: int,
    k_cache: Any,
    batch_idx: Any,
    leftpad: Any,
    block_table: Any,
    table_name: str = "block_table",
) -> None:
    """Lengths, to which ``added`` keys come, and indices that a call may look at lie in the cache."""
    if batch_idx is not None and not 0 <= int(batch_idx.min()) <= int(batch_idx.max()) < len(k_cache):
        raise checks.FlashAttnError(
            f"{function}: cache_batch_idx must be from 0 to {len(k_cache) - 1}, the sequences of the cache, got "
            f"{batch_idx.tolist()}"
        )
    if seqlens is None:
        seqlens = torch.full((1,), kv_len, device=k_cache.device)
    if int(seqlens.min()) < 0:
        raise checks.FlashAttnError(f"{function}: seqlens_k must be at least 0, got {int(seqlens.min())}")
    words = "max(seqlens_k)" if added is None else "max(seqlens_k) + seqlen_knew"
    lengths = seqlens if added is None else seqlens + added
    if block_table is not None:
        pages, page_size = k_cache.shape[:2]
        checks.check_paged_lengths(function, lengths, block_table, pages, page_size, words, table_name)
    elif int(lengths.max()) > kv_len:
        raise checks.FlashAttnError(
            f"{function}: {words} must be at most the seqlen of the KV cache, {kv_len}, got {int(lengths.max())}"
        )
    if leftpad is not None and not (int(leftpad.min()) >= 0 and bool((leftpad <= lengths).all())):
        raise checks.FlashAttnError(
            f"{function}: leftpad_k must be from 0 to the keys of each sequence, {lengths.tolist()}, got "
            f"{leftpad.tolist()}"
        )
