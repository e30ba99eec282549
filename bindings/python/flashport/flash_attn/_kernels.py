"""flashport's own operations as flash-attn's functions need them.

flash-attn gives +inf as the lse of a row that attends to nothing, flashport -inf. Its windows count any negative number
as no limit, and one that reaches over all keys. Up to 16 query tokens a sequence go to :func:`flashport.flash_decode`,
which cuts keys into parts and reads them once for all heads of a group, more to :func:`flashport.attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from flashport._attention import attention, attention_workspace_size
from flashport.decode import decode_workspace_size, flash_decode
from flashport.flash_attn._checks import FlashAttnError, FlashAttnTypeError

MAX_DECODE_TOKENS = 16  # of flash_decode
MAX_DECODE_GROUP = 128
_MIN_HEAD_DIM = 16  # of all kernels


def padded_head_dim(head_dim: int) -> int:
    """The head dim of kernels: a multiple of 8."""
    return max(_MIN_HEAD_DIM, -(-head_dim // 8) * 8)


def padded(x: Any, head_dim: int) -> Any:
    """``x`` with zeros after its last axis, which change no product; ``x`` itself where it is as long."""
    missing = head_dim - x.shape[-1]
    return pad(x, (0, missing)) if missing else x


def unit_rows(x: Any) -> Any:
    """``x``, or a copy where neighbours along its last axis are none in memory."""
    return x.contiguous() if isinstance(x, torch.Tensor) and (x.stride() or (1,))[-1] != 1 else x


def window_of(left: int, right: int, kv_len: int, causal: bool) -> tuple[int, int]:
    """The window with -1 as no limit; causality is a right side of 0."""
    left = -1 if left < 0 or left >= kv_len else left
    right = 0 if causal else -1 if right < 0 or right >= kv_len else right
    return left, right


def with_infinity(lse: Any) -> Any:
    """+inf in place of -inf; other values as they are."""
    return lse.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)


def draw_rng_state(like: Any) -> Any:
    """Seed and offset under torch's default generator of the device, which CUDA graphs replay with new ones."""
    return torch.randint(0, (1 << 63) - 1, (2,), dtype=torch.int64, device=like.device)


def decodes(q_len: int, heads: int, kv_heads: int) -> bool:
    """Whether :func:`decode` takes so many query tokens of a sequence."""
    return 0 < q_len <= MAX_DECODE_TOKENS and heads <= MAX_DECODE_GROUP * kv_heads


def attend(
    function: str, q: Any, k: Any, v: Any, window: tuple[int, int], *, only_check: bool = False, **options: Any
) -> tuple[Any, Any]:
    """(out, lse or None) of :func:`flashport.attention`; ``only_check`` raises its errors, and runs nothing."""
    left, right = window
    operation = attention_workspace_size if only_check else attention
    try:
        result = operation(q, k, v, causal=right == 0, window=(left, -1 if right == 0 else right), **options)
    except ValueError as error:
        raise FlashAttnError(f"{function}: {error}") from error
    except TypeError as error:
        raise FlashAttnTypeError(f"{function}: {error}") from error
    return result if isinstance(result, tuple) else (result, None)


def decode(
    function: str,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqlens: Any,
    window: tuple[int, int],
    q_len: int,
    *,
    only_check: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """The same of :func:`flashport.flash_decode`, with ``q_len`` the most query tokens of a sequence."""
    left, right = window
    if right == 0:
        right = -1  # new tokens are causal by default
    elif q_len > 1:
        options["tree_mask"] = torch.full(q.shape[:-2], -1, dtype=torch.int32, device=q.device).view(torch.uint32)
    operation = decode_workspace_size if only_check else flash_decode
    try:
        result = operation(q, k_cache, v_cache, seqlens, window=(left, right), **options)
    except ValueError as error:
        raise FlashAttnError(f"{function}: {error}") from error
    except TypeError as error:
        raise FlashAttnTypeError(f"{function}: {error}") from error
    if not isinstance(result, tuple):
        return result, None
    out, lse = result
    return out, lse.transpose(-1, -2).contiguous()
