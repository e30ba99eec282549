"""Names of flash-attn's interface that begin with an underscore, which its tests and users import all the same."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from flashport.flash_attn import _checks as checks
from flashport.flash_attn import _kernels as kernels
from flashport.flash_attn import _operators, _probabilities
from flashport.torch import tracing
from flashport.torch.gradients import refuse_gradients


def maybe_contiguous(x: Any) -> Any:
    """``x``, or a copy where its last axis is not contiguous."""
    return kernels.unit_rows(x)


def round_multiple(x: int, m: int) -> int:
    """The least multiple of ``m`` that is not below ``x``."""
    return -(-x // m) * m


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys of a block of S_dmask: all keys are one block."""
    if head_dim > checks.MAX_HEAD_DIM:
        raise checks.FlashAttnAssertionError(
            f"_get_block_size_n: head_dim must be at most {checks.MAX_HEAD_DIM}, got {head_dim}"
        )
    return _probabilities.ONE_BLOCK


def _flash_attn_forward(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    return_softmax: bool,
) -> tuple[Any, Any, Any, Any]:
    """(out, softmax_lse, S_dmask, rng_state); torch.ops.flash_attn._flash_attn_forward while torch compiles."""
    refuse_gradients("_flash_attn_forward", "q k v", q, k, v)
    q, k, v = kernels.unit_rows(q), kernels.unit_rows(k), kernels.unit_rows(v)
    traced = tracing.is_compiling() and _operators.REGISTERED
    run = _operators.forward if traced else _operators.forward_kernel
    return run(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    )  # fmt: skip


def _flash_attn_varlen_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    return_softmax: bool = False,
    block_table: Any = None,
    leftpad_k: Any = None,
    seqused_k: Any = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Any, Any, Any, Any]:
    """The same of packed sequences; torch.ops.flash_attn._flash_attn_varlen_forward while torch compiles."""
    refuse_gradients("_flash_attn_varlen_forward", "q k v", q, k, v)
    q, k, v = kernels.unit_rows(q), kernels.unit_rows(k), kernels.unit_rows(v)
    traced = tracing.is_compiling() and _operators.REGISTERED
    run = _operators.varlen_forward if traced else _operators.varlen_forward_kernel
    return run(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k,
        zero_tensors, num_splits,
    )  # fmt: skip


def _flash_attn_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    rng_state: Any = None,
) -> NoReturn:
    """The backward of a dense batch, which is not here yet."""
    raise NotImplementedError(f"_flash_attn_backward: {checks.NO_BACKWARD}")


def _flash_attn_varlen_backward(
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
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    rng_state: Any = None,
    zero_tensors: bool = False,
) -> NoReturn:
    """The backward of packed sequences, which is not here yet."""
    raise NotImplementedError(f"_flash_attn_varlen_backward: {checks.NO_BACKWARD}")


_flash_attn_forward_fake = _operators.forward_fake
_flash_attn_varlen_forward_fake = _operators.varlen_forward_fake
_flash_attn_backward_fake = _flash_attn_backward
_flash_attn_varlen_backward_fake = _flash_attn_varlen_backward
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
_torch_custom_op_wrapper = torch.library.custom_op
_torch_register_fake_wrapper = torch.library.register_fake
