"""The compiled half of flash-attn, flash_attn_2_cuda, with its arguments by position: the forward half on our kernels.

Results are lists. ``out`` is written and returned where it is given. ``gen`` must be None. There is no backward yet.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from flashport.flash_attn import _cache, _dense, _varlen
from flashport.flash_attn import _checks as checks
from flashport.flash_attn._operators import complete
from flashport.torch.gradients import refuse_gradients

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


def fwd(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    alibi_slopes: Any,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: None,
) -> list[Any]:
    """Attention of a dense batch.

    Args:
        q: (batch_size, seqlen_q, num_heads, head_size), fp16 or bf16; fp32 on the CPU. head_size is a multiple of 8.
        k, v: (batch_size, seqlen_k, num_heads_k, head_size).
        out: As ``q``, or None; written.
        alibi_slopes: (num_heads) or (batch_size, num_heads) fp32, or None.
        p_dropout: Probability, below 1, that a weight is dropped.
        softmax_scale: Factor on the products of queries and keys.
        is_causal: Whether a query sees no key after its own position; the last query stands at the last key.
        window_size_left, window_size_right: Keys on either side of a query's position that it sees; below 0 is no
            limit.
        softcap: Logits become cap * tanh(logit / cap); not above 0 is off. Not with dropout.
        return_softmax: Also give S_dmask; needs dropout.
        gen: None.

    Returns:
        [out, softmax_lse (batch_size, num_heads, seqlen_q) fp32, S_dmask, rng_state (2) int64]. The lse of a row that
        sees nothing is +inf. S_dmask is empty if it was not asked for.

    Raises:
        ValueError: A wrong argument, in flash-attn's words; the error is a RuntimeError, too.
        NotImplementedError: No kernel serves the request, or a gradient is asked for.

    Source:
        bindings/python/flashport/flash_attn/_dense.py; the signature is flash-attn 2.8.4's, from
        csrc/flash_attn/flash_api.cpp.
    """
    _check_generator("fwd", gen)
    refuse_gradients("fwd", "q k v", q, k, v)
    checks.check_multiple_of_8("fwd", q)
    result = _dense.forward(
        "fwd", q, k, v, out, alibi_slopes, p_dropout, checks.to_float("fwd", "softmax_scale", softmax_scale), is_causal,
        checks.window_of_sides("fwd", window_size_left, window_size_right), softcap, return_softmax, True,
    )  # fmt: skip
    return _results(out, result)


def varlen_fwd(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqused_k: Any,
    leftpad_k: Any,
    block_table: Any,
    alibi_slopes: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: None,
    num_splits: int = 0,
) -> list[Any]:
    """Attention of packed sequences, or of packed queries over paged keys.

    Args:
        q: (total_q, num_heads, head_size).
        k, v: (total_k, num_heads_k, head_size), or (num_blocks, page_block_size, num_heads_k, head_size) with
            ``block_table``, of any page size.
        out: As ``q``, or None; written.
        cu_seqlens_q, cu_seqlens_k: (batch_size + 1) int32, first row of each sequence; with ``block_table`` the
            differences of the second are lengths.
        seqused_k: (batch_size) int32, keys of each sequence in use, or None.
        leftpad_k: (batch_size) int32, first keys of each sequence that do not exist, or None.
        block_table: (batch_size, max_num_blocks_per_seq) int32, or None.
        alibi_slopes: As in :func:`fwd`.
        max_seqlen_q, max_seqlen_k: No sequence has more queries, or keys.
        p_dropout, softmax_scale: As in :func:`fwd`.
        zero_tensors: Give rows of no sequence output 0 and lse -inf.
        is_causal, window_size_left, window_size_right, softcap, return_softmax, gen: As in :func:`fwd`.
        num_splits: 0 or 1 with ``block_table``, at most 128 else; it changes no result.

    Returns:
        [out, softmax_lse (num_heads, total_q) fp32, S_dmask, rng_state], as :func:`fwd`.

    Raises:
        ValueError, NotImplementedError: As :func:`fwd`.

    Source:
        bindings/python/flashport/flash_attn/_varlen.py; the signature is flash-attn 2.8.4's, from
        csrc/flash_attn/flash_api.cpp.
    """
    _check_generator("varlen_fwd", gen)
    refuse_gradients("varlen_fwd", "q k v", q, k, v)
    checks.check_multiple_of_8("varlen_fwd", q)
    softmax_scale = checks.to_float("varlen_fwd", "softmax_scale", softmax_scale)
    window = checks.window_of_sides("varlen_fwd", window_size_left, window_size_right)
    result = _varlen.forward(
        "varlen_fwd", q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes,
        max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window, softcap, return_softmax,
        num_splits, True,
    )  # fmt: skip
    return _results(out, result)


def fwd_kvcache(
    q: Any,
    kcache: Any,
    vcache: Any,
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
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Any]:
    """Attention over a cache, to which new keys and values may go first.

    Args:
        q: (batch_size, seqlen_q, num_heads, head_size), any head_size up to 512.
        kcache, vcache: (batch_size_c, seqlen_k, num_heads_k, head_size), or (num_blocks, page_block_size, num_heads_k,
            head_size) with ``block_table``, of any page size. Written where ``k`` is given.
        k, v: (batch_size, seqlen_knew, num_heads_k, head_size), which go to the cache after its ``seqlens_k`` keys, or
            None.
        seqlens_k: (batch_size) int32, keys of each sequence in the cache; None where all are in use.
        rotary_cos, rotary_sin: (seqlen_ro, rotary_dim / 2) of q's type, which turn ``k`` and ``q``, or None.
        cache_batch_idx: (batch_size) int32, sequence of the cache that each query has, or None.
        leftpad_k: (batch_size) int32, first keys that do not exist, or None. Not with ``block_table``.
        block_table: (batch_size, max_num_blocks_per_seq) int32, or None.
        alibi_slopes, out, softmax_scale, is_causal, window_size_left, window_size_right, softcap: As in :func:`fwd`.
        is_rotary_interleaved: Whether pairs of rotary are neighbours.
        num_splits: Into how many parts keys are cut, at most 128; 0 leaves it to the library.

    Returns:
        [out, softmax_lse (batch_size, num_heads, seqlen_q) fp32].

    Raises:
        ValueError, NotImplementedError: As :func:`fwd`; caches are as they were.

    Source:
        bindings/python/flashport/flash_attn/_cache.py; the signature is flash-attn 2.8.4's, from
        csrc/flash_attn/flash_api.cpp.
    """
    refuse_gradients("fwd_kvcache", "q kcache vcache k v", q, kcache, vcache, k, v)
    softmax_scale = checks.to_float("fwd_kvcache", "softmax_scale", softmax_scale)
    window = checks.window_of_sides("fwd_kvcache", window_size_left, window_size_right)
    return list(
        _cache.forward(
            "fwd_kvcache", q, kcache, vcache, k, v, seqlens_k, rotary_cos, rotary_sin, cache_batch_idx, leftpad_k,
            block_table, alibi_slopes, out, softmax_scale, is_causal, window, softcap, is_rotary_interleaved,
            num_splits, True,
        )
    )  # fmt: skip


def bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    alibi_slopes: Any,
    p_dropout: float,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: None,
    rng_state: Any,
) -> NoReturn:
    """The backward of :func:`fwd`, which is not here yet.

    Args:
        dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale, is_causal,
        window_size_left, window_size_right, softcap, deterministic: Not read.
        gen: None.
        rng_state: Not read.

    Raises:
        ValueError: ``gen`` is not None; the error is a RuntimeError, too.
        NotImplementedError: Always.

    Source:
        bindings/python/flashport/flash_attn/flash_attn_2_cuda.py; the signature is flash-attn 2.8.4's, from
        csrc/flash_attn/flash_api.cpp.
    """
    _check_generator("bwd", gen)
    raise NotImplementedError(f"bwd: {checks.NO_BACKWARD}")


def varlen_bwd(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    alibi_slopes: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p_dropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: None,
    rng_state: Any,
) -> NoReturn:
    """The backward of :func:`varlen_fwd`, which is not here yet.

    Args:
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
        max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_size_left, window_size_right, softcap,
        deterministic: Not read.
        gen: None.
        rng_state: Not read.

    Raises:
        ValueError, NotImplementedError: As :func:`bwd`.

    Source:
        bindings/python/flashport/flash_attn/flash_attn_2_cuda.py; the signature is flash-attn 2.8.4's, from
        csrc/flash_attn/flash_api.cpp.
    """
    _check_generator("varlen_bwd", gen)
    raise NotImplementedError(f"varlen_bwd: {checks.NO_BACKWARD}")


def _check_generator(function: str, generator: Any) -> None:
    if generator is not None:
        kind = checks.FlashAttnError if isinstance(generator, torch.Tensor) else checks.FlashAttnTypeError
        raise kind(f"{function}: {checks.GENERATOR} Got {type(generator).__name__}")


def _results(out: Any, result: tuple[Any, Any, Any, Any]) -> list[Any]:
    """All four, with the caller's own output where it gave one."""
    new, *others = complete(*result)
    return [new if out is None else out, *others]
