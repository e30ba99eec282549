"""Calls of flash-attn's functions on tensors that are not packed, which all forms of a function come down to."""

from __future__ import annotations

from typing import Any

import torch

from flashport.flash_attn import _checks as checks
from flashport.flash_attn import _dense, _operators, _varlen
from flashport.flash_attn import _kernels as kernels
from flashport.torch import tracing

# Letters of the shapes of packed tensors.
DENSE_KV = "batch_size, seqlen_k, 2, num_heads_k, head_size"
DENSE_QKV = "batch_size, seqlen, 3, num_heads, head_size"
VARLEN_KV = "total_k, 2, num_heads_k, head_size"
VARLEN_QKV = "total, 3, num_heads, head_size"


def unpacked(function: str, name: str, packed: Any, count: int, words: str) -> Any:
    """The tensors of a packed one, as views."""
    checks.check_rank(function, name, packed, words)
    if packed.shape[-3] != count:
        raise checks.FlashAttnIndexError(f"{function}: {name} must have shape ({words}), got {tuple(packed.shape)}")
    return packed.unbind(-3)


def dense(
    function: str, q: Any, k: Any, v: Any, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: Any, softcap: float, alibi_slopes: Any, return_softmax: Any,
) -> Any:  # fmt: skip
    """out, or (out, lse, S_dmask) with ``return_softmax``."""
    q, k, v = kernels.unit_rows(q), kernels.unit_rows(k), kernels.unit_rows(v)
    window, dropout_p = checks.window_of(function, window_size), checks.to_float(function, "dropout_p", dropout_p)
    return_all = _returns_all(function, return_softmax)
    return_softmax = return_all and dropout_p > 0
    if tracing.is_compiling() and _operators.REGISTERED:
        head_dim = q.shape[-1]
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        q, k, v = (kernels.padded(x, -(-head_dim // 8) * 8) for x in (q, k, v))
        out, lse, s_dmask, _ = _operators.forward(
            q, k, v, dropout_p, scale, causal, *window, softcap, alibi_slopes, return_softmax
        )
        out = out[..., :head_dim]
    else:
        out, lse, s_dmask, _ = _dense.forward(
            function, q, k, v, None, alibi_slopes, dropout_p, softmax_scale, causal, window, softcap, return_softmax,
            return_all,
        )  # fmt: skip
    return _results(out, lse, s_dmask, return_all)


def varlen(
    function: str, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Any, softcap: float, alibi_slopes: Any,
    return_softmax: Any, block_table: Any,
) -> Any:  # fmt: skip
    """The same of packed sequences."""
    q, k, v = kernels.unit_rows(q), kernels.unit_rows(k), kernels.unit_rows(v)
    window, dropout_p = checks.window_of(function, window_size), checks.to_float(function, "dropout_p", dropout_p)
    return_all = _returns_all(function, return_softmax)
    return_softmax = return_all and dropout_p > 0
    if tracing.is_compiling() and _operators.REGISTERED:
        max_q, max_k = (int(x) if isinstance(x, torch.Tensor) else x for x in (max_seqlen_q, max_seqlen_k))
        head_dim = q.shape[-1]
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        q, k, v = (kernels.padded(x, -(-head_dim // 8) * 8) for x in (q, k, v))
        out, lse, s_dmask, _ = _operators.varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, dropout_p, scale, causal, *window, softcap, alibi_slopes,
            return_softmax, block_table, None, None, False, 0,
        )  # fmt: skip
        out = out[..., :head_dim]
    else:
        out, lse, s_dmask, _ = _varlen.forward(
            function, q, k, v, None, cu_seqlens_q, cu_seqlens_k, None, None, block_table, alibi_slopes, max_seqlen_q,
            max_seqlen_k, dropout_p, softmax_scale, False, causal, window, softcap, return_softmax, 0, return_all,
        )  # fmt: skip
    return _results(out, lse, s_dmask, return_all)


def _returns_all(function: str, return_softmax: Any) -> bool:
    """Whether more than the output is asked for: by all that is true, while what is not has to be a bool."""
    return bool(return_softmax) or checks.to_bool(function, "return_softmax", return_softmax)


def _results(out: Any, lse: Any, s_dmask: Any, return_all: bool) -> Any:
    if not return_all:
        return out
    return out, lse, out.new_empty(0) if s_dmask is None else s_dmask
