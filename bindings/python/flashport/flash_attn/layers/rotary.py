"""Rotary position embedding in operations of torch, with gradients and without Triton."""

from __future__ import annotations

from typing import Any

import torch

from flashport.flash_attn._checks import FlashAttnAssertionError, check_rank

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func"]


def apply_rotary_emb(
    x: Any,
    cos: Any,
    sin: Any,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
) -> Any:
    """Turns pairs of elements of each head by the angles of the token's position.

    Sums are in fp32. A position past the end of ``cos`` is not turned.

    Args:
        x: (batch, seqlen, nheads, headdim), or (total, nheads, headdim) with ``cu_seqlens``.
        cos: (seqlen_ro, rotary_dim / 2), for the first rotary_dim elements of a head.
        sin: As ``cos``.
        interleaved: Pairs are neighbours; else elements of the two halves of rotary_dim.
        inplace: Write to ``x``.
        seqlen_offsets: Position of the first token of each sequence: a number, or (batch) int32 or int64.
        cu_seqlens: (batch + 1), first row of each sequence of packed ones.
        max_seqlen: With ``cu_seqlens``: no sequence has more tokens.

    Returns:
        ``x`` if it was written, else a new tensor like it.

    Raises:
        AssertionError: Shapes that do not fit, with flash-attn's words; also ValueError and RuntimeError.
        ValueError: Tensors with too few or too many axes; also RuntimeError.

    Source:
        bindings/python/flashport/flash_attn/layers/rotary.py; the signature is flash-attn 2.8.4's, from
        flash_attn/layers/rotary.py.
    """
    if cu_seqlens is not None and max_seqlen is None:
        raise FlashAttnAssertionError("apply_rotary_emb: If cu_seqlens is passed in, then max_seqlen must be passed")
    check_rank("apply_rotary_emb", "x", x, f"{'batch, seqlen' if cu_seqlens is None else 'total'}, nheads, headdim")
    check_rank("apply_rotary_emb", "cos", cos, "seqlen_ro, rotary_dim / 2")
    check_rank("apply_rotary_emb", "sin", sin, "seqlen_ro, rotary_dim / 2")
    seqlen = x.shape[-3] if cu_seqlens is None else max_seqlen
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rotary_dim = 2 * cos.shape[-1]
    if sin.shape != cos.shape:
        raise FlashAttnAssertionError(
            f"apply_rotary_emb: sin must have the shape of cos, got {tuple(sin.shape)} and {tuple(cos.shape)}"
        )
    if rotary_dim > x.shape[-1]:
        raise FlashAttnAssertionError(
            f"apply_rotary_emb: rotary_dim must be <= headdim, got {rotary_dim} and {x.shape[-1]}"
        )
    if cos.shape[0] < seqlen:
        raise FlashAttnAssertionError(f"apply_rotary_emb: seqlen_ro must be >= seqlen, got {cos.shape[0]} and {seqlen}")
    if not isinstance(seqlen_offsets, torch.Tensor):
        if seqlen_offsets + seqlen > cos.shape[0]:
            raise FlashAttnAssertionError(
                f"apply_rotary_emb: seqlen_offsets + seqlen must be at most seqlen_ro, {cos.shape[0]}, got "
                f"{seqlen_offsets} and {seqlen}"
            )
    elif seqlen_offsets.shape != (batch,) or seqlen_offsets.dtype not in (torch.int32, torch.int64):
        raise FlashAttnAssertionError(
            f"apply_rotary_emb: seqlen_offsets must have shape ({batch},) and be int32 or int64, got "
            f"{tuple(seqlen_offsets.shape)} and {seqlen_offsets.dtype}"
        )
    return rotated(x, cos, sin, interleaved, positions(x, seqlen_offsets, cu_seqlens), inplace)


apply_rotary_emb_func = apply_rotary_emb


def rotated(x: Any, cos: Any, sin: Any, interleaved: bool, rows: Any, inplace: bool = False) -> Any:
    """``x`` [..., H, D] turned by the angles of its ``rows`` of the tables."""
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = _at_positions(cos, sin, rows)
    turned = x[..., :rotary_dim].float()
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = first * cos - second * sin, first * sin + second * cos
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    if inplace:
        x[..., :rotary_dim] = turned.to(x.dtype)
        return x
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], -1)


def positions(x: Any, offsets: Any, cu_seqlens: Any) -> Any:
    """The position of each row of x, [S], [B, S] or [T]; -1 where a row is no sequence's."""
    rows = torch.arange(x.shape[-3], device=x.device)
    if cu_seqlens is None:
        return rows + (offsets[:, None] if isinstance(offsets, torch.Tensor) else offsets)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
    inside = sequence.clamp(max=len(cu_seqlens) - 2)
    first = offsets[inside] if isinstance(offsets, torch.Tensor) else offsets
    return torch.where(sequence == inside, rows - cu_seqlens[inside] + first, -1)


def _at_positions(cos: Any, sin: Any, rows: Any) -> tuple[Any, Any]:
    """Rows of the tables with an axis for heads, in fp32; those of no turn outside of the tables."""
    inside = ((rows >= 0) & (rows < cos.shape[0]))[..., None]
    rows = rows.clamp(0, max(0, cos.shape[0] - 1)).long()
    cos = torch.where(inside, cos[rows].float(), 1.0)
    sin = torch.where(inside, sin[rows].float(), 0.0)
    return cos.unsqueeze(-2), sin.unsqueeze(-2)
