"""Attention of dense batches as flash-attn's ``fwd`` has it."""

from __future__ import annotations

from typing import Any

import torch

from flashport.flash_attn import _checks as checks
from flashport.flash_attn import _kernels as kernels
from flashport.flash_attn import _probabilities as probabilities

_Q = "batch_size, seqlen_q, num_heads, head_size"
_K = "batch_size, seqlen_k, num_heads_k, head_size"


def forward(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    alibi_slopes: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    return_softmax: bool,
    return_lse: bool,
) -> tuple[Any, Any, Any, Any]:
    """(out, lse, S_dmask, rng_state) for any head dim: a new ``out`` may be a view of one with a padded head dim.

    What was not asked for is None: the lse without ``return_lse``, S_dmask without ``return_softmax``, the random state
    without dropout.
    """
    dropout_p = checks.to_float(function, "dropout_p", dropout_p)
    softcap = checks.to_float(function, "softcap", softcap)
    causal = checks.to_bool(function, "causal", causal)
    return_softmax = checks.to_bool(function, "return_softmax", return_softmax)
    if softmax_scale is not None:
        softmax_scale = checks.to_float(function, "softmax_scale", softmax_scale)
    form = checks.form_of(function, (q, k, v, out, alibi_slopes), (dropout_p, softcap, return_softmax))
    checks.check_once(form, _check, function, q, k, v, out, alibi_slopes, dropout_p, softcap, return_softmax)
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    causal = causal and (q_len > 1 or alibi_slopes is not None)  # the only query stands at the last key
    window = kernels.window_of(*window, kv_len, causal)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    dim = kernels.padded_head_dim(head_dim)
    given = out
    if dim != head_dim:
        q, k, v, out = kernels.padded(q, dim), kernels.padded(k, dim), kernels.padded(v, dim), None
    options: dict[str, Any] = {
        "softmax_scale": scale, "softcap": max(softcap, 0.0), "alibi_slopes": alibi_slopes, "out": out,
        "return_lse": return_lse,
    }  # fmt: skip
    rng_state = None
    if dropout_p == 0 and kv_len > 0 and kernels.decodes(q_len, heads, kv_heads):
        seqlens = torch.full((batch,), kv_len, dtype=torch.int32, device=q.device)
        out, lse = kernels.decode(function, q, k, v, seqlens, window, q_len, **options)
    else:
        if dropout_p != 0:
            rng_state = kernels.draw_rng_state(q)
            options.update({"dropout_p": dropout_p, "rng_state": rng_state})
        out, lse = kernels.attend(function, q, k, v, window, **options)
    if return_lse and (kv_len == 0 or window != (-1, -1)):  # else no row attends to nothing
        kernels.with_infinity(lse)
    s_dmask = None
    if return_softmax:
        s_dmask = probabilities.dense(q, k, rng_state, dropout_p, scale, window, alibi_slopes)
    if dim != head_dim:
        out = out[..., :head_dim]
        out = out if given is None else given.copy_(out)
    return out, lse, s_dmask, rng_state


def _check(
    function: str,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    alibi_slopes: Any,
    dropout_p: float,
    softcap: float,
    return_softmax: bool,
) -> None:
    """What the form of a call says."""
    checks.check_rank(function, "q", q, _Q)
    checks.check_rank(function, "k", k, _K)
    checks.check_rank(function, "v", v, _K)
    checks.check_tensors(
        function,
        q,
        ("k", k, "query and key must have the same dtype"),
        ("v", v, "query and value must have the same dtype"),
    )
    batch, _, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    checks.check_batch(function, batch)
    checks.check_heads(function, heads, kv_heads, head_dim)
    checks.check_dropout(function, dropout_p, softcap, return_softmax)
    kv_shape = (batch, kv_len, kv_heads, head_dim)
    checks.check_shape(function, "k", k, kv_shape, _K)
    checks.check_shape(function, "v", v, kv_shape, _K)
    if out is not None:
        checks.check_out(function, q, out, q.shape, "batch_size, sizes[1], sizes[2], head_size")
    if alibi_slopes is not None:
        checks.check_alibi(function, q, alibi_slopes, batch, heads)
