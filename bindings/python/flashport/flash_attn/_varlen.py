"""Attention of packed sequences, or over paged keys, as flash-attn's ``varlen_fwd`` has it."""

from __future__ import annotations

from typing import Any

import torch

from flashport.flash_attn import _checks as checks
from flashport.flash_attn import _kernels as kernels
from flashport.flash_attn import _probabilities as probabilities

_Q = "total_q, num_heads, head_size"
_K = "total_k, num_heads_k, head_size"
_PAGES = "num_blocks, page_block_size, num_heads_k, head_size"


def forward(
    function: str,
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
    dropout_p: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    return_softmax: bool,
    num_splits: int,
    return_lse: bool,
) -> tuple[Any, Any, Any, Any]:
    """(out, lse, S_dmask, rng_state), with None and views as in the dense form."""
    max_seqlen_q = checks.to_int(function, "max_seqlen_q", max_seqlen_q)
    max_seqlen_k = checks.to_int(function, "max_seqlen_k", max_seqlen_k)
    dropout_p = checks.to_float(function, "dropout_p", dropout_p)
    softcap = checks.to_float(function, "softcap", softcap)
    if softmax_scale is not None:
        softmax_scale = checks.to_float(function, "softmax_scale", softmax_scale)
    zero_tensors = checks.to_bool(function, "zero_tensors", zero_tensors)
    causal = checks.to_bool(function, "causal", causal)
    return_softmax = checks.to_bool(function, "return_softmax", return_softmax)
    num_splits = checks.to_int(function, "num_splits", num_splits)
    tensors = (q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes)
    numbers = (max_seqlen_q, dropout_p, softcap, return_softmax, num_splits, *window)
    form = checks.form_of(function, tensors, numbers)
    checks.check_once(form, _check, function, tensors, *numbers)
    paged = block_table is not None
    total_q, heads, head_dim = q.shape
    kv_heads = k.shape[-2]
    lengths = None
    if paged:
        lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        if checks.reads_contents(q):
            checks.check_paged_lengths(function, lengths, block_table, k.shape[0], k.shape[1], "max(seqlens_k)")

    causal = causal and (max_seqlen_q > 1 or alibi_slopes is not None)
    window = kernels.window_of(*window, max_seqlen_k, causal)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    dim = kernels.padded_head_dim(head_dim)
    given = out
    if dim != head_dim:
        q, k, v, out = kernels.padded(q, dim), kernels.padded(k, dim), kernels.padded(v, dim), None
    rng_state = kernels.draw_rng_state(q) if dropout_p != 0 else None
    empty = max_seqlen_k == 0
    if empty or zero_tensors:  # rows of no sequence, too
        out = torch.zeros_like(q, memory_format=torch.contiguous_format) if out is None else out.zero_()
        lse = q.new_full((heads, total_q), torch.inf if empty else -torch.inf, dtype=torch.float32)
    else:
        lse = None
    if not empty:
        options: dict[str, Any] = {
            "cu_seqlens_q": cu_seqlens_q, "softmax_scale": scale, "softcap": max(softcap, 0.0),
            "alibi_slopes": alibi_slopes, "out": out, "return_lse": return_lse,
        }  # fmt: skip
        if paged and dropout_p == 0 and kernels.decodes(max_seqlen_q, heads, kv_heads):
            options.update({"block_table": block_table, "max_q_len": max_seqlen_q})
            if lse is not None:
                options["lse"] = lse.transpose(0, 1)
            out, lse = kernels.decode(function, q, k, v, lengths, window, max_seqlen_q, **options)
        else:
            if dropout_p != 0:
                options.update({"dropout_p": dropout_p, "rng_state": rng_state})
            options.update({"max_seqlen_q": max_seqlen_q, "lse": lse})
            if paged:
                options.update({"block_table": block_table, "seqused_k": lengths})
            else:
                options.update({"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k})
                options.update({"seqused_k": seqused_k, "leftpad_k": leftpad_k})
            out, lse = kernels.attend(function, q, k, v, window, **options)
        if return_lse:
            lse = _with_infinity(lse, cu_seqlens_q) if zero_tensors else kernels.with_infinity(lse)
    s_dmask = None
    if return_softmax:
        s_dmask = probabilities.packed(
            q, k, rng_state, dropout_p, scale, window, alibi_slopes, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k, seqused_k, leftpad_k,
        )  # fmt: skip
    if dim != head_dim:
        out = out[..., :head_dim]
        out = out if given is None else given.copy_(out)
    return out, lse, s_dmask, rng_state


def _check(
    function: str, tensors: tuple[Any, ...], max_seqlen_q: int, dropout_p: float, softcap: float, return_softmax: bool,
    num_splits: int, left: int, right: int,
) -> None:  # fmt: skip
    """What the form of a call says."""
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes = tensors
    paged = block_table is not None
    checks.check_rank(function, "q", q, _Q)
    checks.check_rank(function, "k", k, _PAGES if paged else _K)
    checks.check_rank(function, "v", v, _PAGES if paged else _K)
    checks.check_tensors(
        function,
        q,
        ("k", k, "query and key must have the same dtype"),
        ("v", v, "query and value must have the same dtype"),
    )
    _, heads, head_dim = q.shape
    checks.check_rank(function, "cu_seqlens_q", cu_seqlens_q, "batch_size + 1")
    kv_heads, batch = k.shape[-2], cu_seqlens_q.shape[0] - 1
    checks.check_integers(function, q, "cu_seqlens_q", cu_seqlens_q, (batch + 1,), "batch_size + 1")
    checks.check_integers(function, q, "cu_seqlens_k", cu_seqlens_k, (batch + 1,), "batch_size + 1")
    checks.check_dropout(function, dropout_p, softcap, return_softmax)
    checks.check_batch(function, batch)
    checks.check_heads(function, heads, kv_heads, head_dim)
    kv_shape = (*k.shape[:-1], head_dim)
    checks.check_shape(function, "k", k, kv_shape, _PAGES if paged else _K)
    checks.check_shape(function, "v", v, kv_shape, _PAGES if paged else _K)
    if paged:
        checks.check_block_table(function, q, block_table, batch)
        if return_softmax:
            raise checks.FlashAttnError(
                f"{function}: S_dmask is made of packed keys alone; pass no block_table, or do not ask for it"
            )
    if seqused_k is not None:
        checks.check_integers(function, q, "seqused_k", seqused_k, (batch,), "batch_size")
    if out is not None:
        checks.check_out(function, q, out, q.shape, "sizes[0], sizes[1], head_size")
    plain = left < 0 and right < 0 and dropout_p == 0 and alibi_slopes is None
    if max_seqlen_q == 1 and heads > kv_heads and plain and head_dim % 8 == 0:
        checks.check_splits(function, num_splits)
    elif paged and num_splits > 1:
        raise checks.FlashAttnError(
            f"{function}: num_splits > 1 is not supported for varlen paged KV, got {num_splits}; pass 0"
        )
    checks.check_leftpad(function, q, leftpad_k, paged, "leftpad_k", batch)
    if alibi_slopes is not None:
        checks.check_alibi(function, q, alibi_slopes, batch, heads)


def _with_infinity(lse: Any, cu_seqlens_q: Any) -> Any:
    """As the other one, but in rows of no sequence, which keep the -inf of ``zero_tensors``."""
    owned = torch.arange(lse.shape[1], device=lse.device) < cu_seqlens_q[-1]
    return torch.where(owned & (lse == -torch.inf), torch.inf, lse)
