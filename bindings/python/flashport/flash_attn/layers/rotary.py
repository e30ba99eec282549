"""Rotary position embedding in operations of torch, without Triton.

:func:`apply_rotary_emb`, :func:`apply_rotary_emb_torch` and :func:`rotate_half` have gradients. Functions of packed
projections, keys and values have none, nor has :class:`RotaryEmbedding`.
"""

from __future__ import annotations

from typing import Any

import torch

from flashport.flash_attn._checks import FlashAttnAssertionError, FlashAttnError, check_rank, not_a_tensor
from flashport.torch import tracing
from flashport.torch.gradients import refuse_gradients

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


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
    _check("apply_rotary_emb", "x", x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    return rotated(x, cos, sin, interleaved, positions(x, seqlen_offsets, cu_seqlens), inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Any,
    cos: Any,
    sin: Any,
    cos_k: Any = None,
    sin_k: Any = None,
    interleaved: bool = False,
    seqlen_offsets: Any = 0,
    num_heads_q: int | None = None,
) -> Any:
    """:func:`apply_rotary_emb` of the queries and keys of a packed projection, in place.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, num_heads_q + 2 * num_heads_k, headdim); written.
        cos: (seqlen_ro, rotary_dim / 2).
        sin: As ``cos``.
        cos_k: The same for keys, where they have tables of their own.
        sin_k: As ``cos_k``.
        interleaved, seqlen_offsets: As in :func:`apply_rotary_emb`.
        num_heads_q: Heads of queries, which ``qkv`` of four axes needs.

    Returns:
        ``qkv``.

    Raises:
        AssertionError: Shapes that do not fit; also ValueError and RuntimeError. Nothing is written.
        ValueError: Tables with too few or too many axes; also RuntimeError.
        NotImplementedError: ``qkv`` requires a gradient.

    Source:
        bindings/python/flashport/flash_attn/layers/rotary.py; the signature is flash-attn 2.8.4's, from
        flash_attn/layers/rotary.py.
    """
    name = "apply_rotary_emb_qkv_"
    refuse_gradients(name, "qkv", qkv)
    return _turn_packed(name, qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)


def apply_rotary_emb_kv_(kv: Any, cos: Any, sin: Any, interleaved: bool = False, seqlen_offsets: Any = 0) -> Any:
    """:func:`apply_rotary_emb` of the keys of packed keys and values, in place.

    Args:
        kv: (batch, seqlen, 2, nheads, headdim); written.
        cos, sin, interleaved, seqlen_offsets: As in :func:`apply_rotary_emb`.

    Returns:
        ``kv``.

    Raises:
        AssertionError: Shapes that do not fit; also ValueError and RuntimeError. Nothing is written.
        ValueError: Tensors with too few or too many axes; also RuntimeError.
        NotImplementedError: ``kv`` requires a gradient.

    Source:
        bindings/python/flashport/flash_attn/layers/rotary.py; the signature is flash-attn 2.8.4's, from
        flash_attn/layers/rotary.py.
    """
    name = "apply_rotary_emb_kv_"
    refuse_gradients(name, "kv", kv)
    _turn(name, [("k", _keys(name, kv), cos, sin)], interleaved, seqlen_offsets)
    return kv


def apply_rotary_emb_torch(x: Any, cos: Any, sin: Any, interleaved: bool = False) -> Any:
    """Turns pairs of elements of each head by tables that have one row for each token, in the types of all three.

    Args:
        x: (batch, seqlen, nheads, headdim).
        cos: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2).
        sin: As ``cos``.
        interleaved: As in :func:`apply_rotary_emb`.

    Returns:
        A new tensor as ``x``, of the type that torch promotes the three to.

    Raises:
        AssertionError: rotary_dim is above headdim; also ValueError and RuntimeError.
        ValueError: Tables that do not fit to ``x``; also RuntimeError.

    Source:
        bindings/python/flashport/flash_attn/layers/rotary.py; the signature is flash-attn 2.8.4's, from
        flash_attn/layers/rotary.py.
    """
    name = "apply_rotary_emb_torch"
    for argument, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor(name, argument, tensor)
    rotary_dim = 2 * cos.shape[-1]
    _check_rotary_dim(name, rotary_dim, x)
    part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    try:
        cos, sin = (_joined(table, table, interleaved).unsqueeze(-2) for table in (cos, sin))
        turned = part * cos + rotate_half(part, interleaved) * sin
        return torch.cat([turned, rest], -1)
    except RuntimeError as error:
        raise FlashAttnError(f"{name}: cos and sin must have a row for each token of x; {error}") from error


def rotate_half(x: Any, interleaved: bool = False) -> Any:
    """Turns pairs (a, b) of elements by a quarter, to (-b, a).

    Args:
        x: (..., dim) with dim even.
        interleaved: Pairs are neighbours; else elements of the two halves of the last axis.

    Returns:
        A new tensor as ``x``.

    Raises:
        ValueError: ``x`` is no tensor, or its last axis is odd; also RuntimeError.

    Source:
        bindings/python/flashport/flash_attn/layers/rotary.py; the signature is flash-attn 2.8.4's, from
        flash_attn/layers/rotary.py.
    """
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor("rotate_half", "x", x)
    if x.ndim == 0 or x.shape[-1] % 2 != 0:
        raise FlashAttnError(f"rotate_half: x must have an even last axis, got shape {tuple(x.shape)}")
    first, second = _halves(x, interleaved)
    return _joined(-second, first, interleaved)


def _apply_rotary_emb_qkv(
    qkv: Any,
    cos: Any,
    sin: Any,
    cos_k: Any = None,
    sin_k: Any = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
    seqlen_offsets: Any = 0,
    num_heads_q: int | None = None,
) -> Any:
    """:func:`apply_rotary_emb_qkv_` of ``qkv`` or of a copy of it; ``conjugate`` turns the other way."""
    name = "_apply_rotary_emb_qkv"
    refuse_gradients(name, "qkv", qkv)
    if not inplace and isinstance(qkv, torch.Tensor):
        qkv = qkv.clone()
    if conjugate:
        sin, sin_k = (-x if isinstance(x, torch.Tensor) else x for x in (sin, sin_k))
    return _turn_packed(name, qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)


class ApplyRotaryEmb:
    """:func:`apply_rotary_emb` by the name of flash-attn's autograd function, with ``apply`` alone."""

    apply = staticmethod(apply_rotary_emb)


class ApplyRotaryEmbQKV_:  # noqa: N801 - flash-attn's name
    """The same for :func:`apply_rotary_emb_qkv_`."""

    apply = staticmethod(apply_rotary_emb_qkv_)


class ApplyRotaryEmbKV_:  # noqa: N801
    """The same for :func:`apply_rotary_emb_kv_`."""

    apply = staticmethod(apply_rotary_emb_kv_)


class RotaryEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Rotary position embedding with tables that it makes itself, longer ones when a call asks for them.

    Pair i of a head turns by position * base ** (-2 i / dim). With ``scale_base`` (xPos) queries are multiplied, and
    keys divided, by scale_i ** ((position - seqlen // 2) / scale_base), where scale_i = (2 i + 0.4 dim) / (1.4 dim) and
    seqlen is the length of the tables. Tables are computed in fp32, then rounded to the type of the input.

    Args:
        dim: rotary_dim, even.
        base: Of the angles.
        interleaved: Pairs are neighbours; else elements of the two halves of dim.
        scale_base: For xPos; None is without.
        device: Of the buffers.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._compute_scale(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Any = None
        self._sin_cached: Any = None
        self._cos_k_cached: Any = None
        self._sin_k_cached: Any = None

    def forward(
        self,
        qkv: Any,
        kv: Any = None,
        seqlen_offset: Any = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Turns queries and keys in place.

        Args:
            qkv: As in :func:`apply_rotary_emb_qkv_`; with ``kv`` queries alone, (batch, seqlen, nheads, headdim).
            kv: As in :func:`apply_rotary_emb_kv_`.
            seqlen_offset: Position of the first token of each sequence: a number, or (batch) int32 or int64.
            max_seqlen: Rows that tables have at least; a tensor ``seqlen_offset`` needs it once.
            num_heads_q: As in :func:`apply_rotary_emb_qkv_`.

        Returns:
            ``qkv``, or (``qkv``, ``kv``).

        Raises:
            AssertionError: Shapes that do not fit; also ValueError and RuntimeError. Nothing is written.
            ValueError: There are no tables yet, and ``seqlen_offset`` is a tensor; also RuntimeError.
            NotImplementedError: ``qkv`` or ``kv`` requires a gradient.
        """
        name = "RotaryEmbedding"
        refuse_gradients(name, "qkv kv", qkv, kv)
        if kv is None:
            q, k = _queries_and_keys(name, qkv, num_heads_q)
        else:
            check_rank(name, "qkv", qkv, "batch, seqlen, nheads, headdim")
            q, k = qkv, _keys(name, kv)
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=q.device, dtype=q.dtype)
        elif not isinstance(seqlen_offset, torch.Tensor):
            self._update_cos_sin_cache(q.shape[1] + seqlen_offset, device=q.device, dtype=q.dtype)
        elif self._cos_cached is None:
            raise FlashAttnError(
                f"{name}: max_seqlen must be passed, got None: seqlen_offset is a tensor, and no call before has made "
                "tables"
            )
        tables = self._cos_cached, self._sin_cached
        tables_k = tables if self.scale is None else (self._cos_k_cached, self._sin_k_cached)
        _turn(name, [("q", q, *tables), ("k", k, *tables_k)], self.interleaved, seqlen_offset)
        return qkv if kv is None else (qkv, kv)

    def _even_numbers(self, device: Any) -> Any:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device: Any = None) -> Any:
        """Angles of the pairs at position 1, [dim / 2] fp32."""
        return 1.0 / self.base ** (self._even_numbers(device) / self.dim)

    def _compute_scale(self, device: Any = None) -> Any:
        """Bases of xPos, [dim / 2] fp32."""
        return (self._even_numbers(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        """Makes tables of at least so many rows, unless there are such ones of the device and type."""
        made = self._cos_cached
        stale = made is None or made.device != device or made.dtype != dtype
        if not stale and self.training and not tracing.is_compiling():  # torch.compile knows no is_inference
            stale = made.is_inference()
        if not stale and seqlen <= self._seq_len_cached:
            return
        self._seq_len_cached = seqlen
        # A model in 16 bits has rounded its buffers, which is too coarse for late positions.
        rounded = self.inv_freq.dtype != torch.float32
        frequencies = self._compute_inv_freq(device) if rounded else self.inv_freq.to(device)
        rows = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(rows, frequencies)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        scale = self._compute_scale(device) if rounded else self.scale.to(device)
        scale = scale ** ((rows - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)


def _queries_and_keys(function: str, qkv: Any, num_heads_q: int | None) -> tuple[Any, Any]:
    """Views [B, S, H, D] of a packed projection."""
    words = "(batch, seqlen, 3, nheads, headdim) or (batch, seqlen, num_heads_q + 2 * num_heads_k, headdim)"
    if not isinstance(qkv, torch.Tensor):
        raise not_a_tensor(function, "qkv", qkv)
    if qkv.ndim not in (4, 5) or (qkv.ndim == 5 and qkv.shape[2] != 3):
        raise FlashAttnAssertionError(f"{function}: qkv must have shape {words}, got {tuple(qkv.shape)}")
    if qkv.ndim == 5:
        return qkv[:, :, 0], qkv[:, :, 1]
    if num_heads_q is None:
        raise FlashAttnAssertionError(f"{function}: num_heads_q must be passed with qkv of four axes, got None")
    num_heads_k = (qkv.shape[2] - num_heads_q) // 2
    if min(num_heads_q, num_heads_k) < 0 or num_heads_q + 2 * num_heads_k != qkv.shape[2]:
        raise FlashAttnAssertionError(
            f"{function}: qkv must have shape {words}, got num_heads_q {num_heads_q} and {tuple(qkv.shape)}"
        )
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_heads_k]


def _keys(function: str, kv: Any) -> Any:
    """A view [B, S, H, D] of packed keys and values."""
    words = "batch, seqlen, 2, nheads, headdim"
    check_rank(function, "kv", kv, words)
    if kv.shape[2] != 2:
        raise FlashAttnAssertionError(f"{function}: kv must have shape ({words}), got {tuple(kv.shape)}")
    return kv[:, :, 0]


def _turn_packed(
    function: str,
    qkv: Any,
    cos: Any,
    sin: Any,
    cos_k: Any,
    sin_k: Any,
    interleaved: bool,
    offsets: Any,
    num_heads_q: int | None,
) -> Any:
    """``qkv``, whose queries and keys are turned in place."""
    q, k = _queries_and_keys(function, qkv, num_heads_q)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    _turn(function, [("q", q, cos, sin), ("k", k, cos_k, sin_k)], interleaved, offsets)
    return qkv


def _turn(function: str, parts: list[tuple[str, Any, Any, Any]], interleaved: bool, offsets: Any) -> None:
    """Turns each (name, x [B, S, H, D], cos, sin) in place, once all are checked."""
    for part in parts:
        _check(function, *part, offsets)
    for _, x, cos, sin in parts:
        rotated(x, cos, sin, interleaved, positions(x, offsets, None), inplace=True)


def _check(
    function: str,
    name: str,
    x: Any,
    cos: Any,
    sin: Any,
    offsets: Any,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
) -> None:
    """Shapes of what is turned and of the tables."""
    if cu_seqlens is not None and max_seqlen is None:
        raise FlashAttnAssertionError(f"{function}: If cu_seqlens is passed in, then max_seqlen must be passed")
    check_rank(function, name, x, f"{'batch, seqlen' if cu_seqlens is None else 'total'}, nheads, headdim")
    check_rank(function, "cos", cos, "seqlen_ro, rotary_dim / 2")
    check_rank(function, "sin", sin, "seqlen_ro, rotary_dim / 2")
    seqlen = x.shape[-3] if cu_seqlens is None else max_seqlen
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if sin.shape != cos.shape:
        raise FlashAttnAssertionError(
            f"{function}: sin must have the shape of cos, got {tuple(sin.shape)} and {tuple(cos.shape)}"
        )
    _check_rotary_dim(function, 2 * cos.shape[-1], x)
    if cos.shape[0] < seqlen:
        raise FlashAttnAssertionError(f"{function}: seqlen_ro must be >= seqlen, got {cos.shape[0]} and {seqlen}")
    if not isinstance(offsets, torch.Tensor):
        if offsets + seqlen > cos.shape[0]:
            raise FlashAttnAssertionError(
                f"{function}: seqlen_offsets + seqlen must be at most seqlen_ro, {cos.shape[0]}, got {offsets} and "
                f"{seqlen}"
            )
    elif offsets.shape != (batch,) or offsets.dtype not in (torch.int32, torch.int64):
        raise FlashAttnAssertionError(
            f"{function}: seqlen_offsets must have shape ({batch},) and be int32 or int64, got "
            f"{tuple(offsets.shape)} and {offsets.dtype}"
        )


def _check_rotary_dim(function: str, rotary_dim: int, x: Any) -> None:
    if rotary_dim > x.shape[-1]:
        raise FlashAttnAssertionError(f"{function}: rotary_dim must be <= headdim, got {rotary_dim} and {x.shape[-1]}")


def rotated(x: Any, cos: Any, sin: Any, interleaved: bool, rows: Any, inplace: bool = False) -> Any:
    """``x`` [..., H, D] turned by the angles of its ``rows`` of the tables."""
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = _at_positions(cos, sin, rows)
    first, second = _halves(x[..., :rotary_dim].float(), interleaved)
    turned = _joined(first * cos - second * sin, first * sin + second * cos, interleaved)
    if inplace:
        x[..., :rotary_dim] = turned.to(x.dtype)
        return x
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], -1)


def _halves(x: Any, interleaved: bool) -> tuple[Any, Any]:
    """Both elements of all pairs of the last axis."""
    half = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def _joined(first: Any, second: Any, interleaved: bool) -> Any:
    """The opposite."""
    return torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)


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
