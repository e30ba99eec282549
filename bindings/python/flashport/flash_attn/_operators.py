"""torch operators ``flash_attn::_flash_attn_forward`` and ``_flash_attn_varlen_forward``, with fake kernels.

A flash_attn that is there already has them, and keeps them: then ``REGISTERED`` is False and nothing here runs.
"""

from __future__ import annotations

from typing import Any

import torch

from flashport.flash_attn import _checks as checks
from flashport.flash_attn import _dense, _probabilities, _varlen
from flashport.torch.library import register

REGISTERED = not hasattr(torch.ops.flash_attn, "_flash_attn_forward")

_DENSE = (
    "(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
_VARLEN = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False, "
    "SymInt num_splits=0) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)


def complete(out: Any, lse: Any, s_dmask: Any, rng_state: Any) -> tuple[Any, Any, Any, Any]:
    """The four results as new, contiguous tensors, also those that were not asked for."""
    if s_dmask is None:
        s_dmask = out.new_empty(0)
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=out.device)
    return out.contiguous(), lse, s_dmask, rng_state


def forward_kernel(
    q: Any, k: Any, v: Any, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Any, return_softmax: bool,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(out, softmax_lse, S_dmask, rng_state)."""
    name = "_flash_attn_forward"
    scale = checks.to_float(name, "softmax_scale", softmax_scale)
    window = checks.window_of_sides(name, window_size_left, window_size_right)
    return complete(
        *_dense.forward(
            name, q, k, v, None, alibi_slopes, dropout_p, scale, causal, window, softcap, return_softmax, True
        )
    )


def varlen_forward_kernel(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Any = None, return_softmax: bool = False, block_table: Any = None,
    leftpad_k: Any = None, seqused_k: Any = None, zero_tensors: bool = False, num_splits: int = 0,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """(out, softmax_lse, S_dmask, rng_state)."""
    name = "_flash_attn_varlen_forward"
    scale = checks.to_float(name, "softmax_scale", softmax_scale)
    window = checks.window_of_sides(name, window_size_left, window_size_right)
    return complete(
        *_varlen.forward(
            name, q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes,
            max_seqlen_q, max_seqlen_k, dropout_p, scale, zero_tensors, causal, window, softcap, return_softmax,
            num_splits, True,
        )
    )  # fmt: skip


def _fake(q: Any, lse_shape: Any, s_dmask_shape: Any) -> tuple[Any, Any, Any, Any]:
    return (
        q.new_empty(q.shape),
        q.new_empty(lse_shape, dtype=torch.float32),
        q.new_empty(s_dmask_shape),
        q.new_empty((2,), dtype=torch.int64),
    )


def forward_fake(
    q: Any, k: Any, v: Any, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Any, return_softmax: bool,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """The shapes and types of what :func:`forward_kernel` returns."""
    batch, q_len, heads, _ = q.shape
    shape = _probabilities.shape_of(batch, heads, q_len, k.shape[1]) if return_softmax else (0,)
    return _fake(q, (batch, heads, q_len), shape)


def varlen_forward_fake(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Any = None, return_softmax: bool = False, block_table: Any = None,
    leftpad_k: Any = None, seqused_k: Any = None, zero_tensors: bool = False, num_splits: int = 0,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """The same of :func:`varlen_forward_kernel`."""
    total_q, heads, _ = q.shape
    batch = cu_seqlens_q.shape[0] - 1
    shape = _probabilities.shape_of(batch, heads, max_seqlen_q, max_seqlen_k) if return_softmax else (0,)
    return _fake(q, (heads, total_q), shape)


if REGISTERED:
    # Each call with dropout draws a random state, so none stands for another one.
    _tags = (torch.Tag.nondeterministic_seeded,)
    register("_flash_attn_forward", _DENSE, forward_fake, forward_kernel, namespace="flash_attn", tags=_tags)
    register(
        "_flash_attn_varlen_forward", _VARLEN, varlen_forward_fake, varlen_forward_kernel, namespace="flash_attn",
        tags=_tags,
    )  # fmt: skip


def forward(*arguments: Any) -> Any:
    """The operator, with its arguments by position, which torch converts as flash-attn's callers expect."""
    return torch.ops.flash_attn._flash_attn_forward.default(*arguments)


def varlen_forward(*arguments: Any) -> Any:
    """The same of packed sequences."""
    return torch.ops.flash_attn._flash_attn_varlen_forward.default(*arguments)
