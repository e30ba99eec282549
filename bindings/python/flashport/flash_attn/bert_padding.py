"""Batches with padding as packed sequences and back, under flash-attn's names, in operations of torch.

All have gradients. Only those that return a maximum wait for a GPU, so on a GPU no index is looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from flashport.flash_attn._checks import FlashAttnAssertionError, FlashAttnError, FlashAttnIndexError, check_rank

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Any, indices: Any) -> Any:
    """Rows of ``input``.

    Args:
        input: (rows, ...).
        indices: (n) int64.

    Returns:
        (n, ...).

    Raises:
        AssertionError: ``input`` has one axis; also ValueError and RuntimeError.
        IndexError: An index outside of ``input``; also ValueError and RuntimeError.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    return _rows("index_first_axis", input, indices)


def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """A tensor of zeros with ``values`` as some of its rows.

    Args:
        values: (n, ...).
        indices: (n) int64, each row once.
        first_axis_dim: Rows of the result.

    Returns:
        (first_axis_dim, ...).

    Raises:
        AssertionError: ``values`` have one axis, or ``indices`` not one; also ValueError and RuntimeError.
        IndexError: An index outside of the result; also ValueError and RuntimeError.
        RuntimeError: Not as many values as indices; also ValueError.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    return _put("index_put_first_axis", values, indices, first_axis_dim)


def index_first_axis_residual(input: Any, indices: Any) -> tuple[Any, Any]:
    """Rows of ``input``, and ``input`` itself.

    Args:
        input: (rows, ...).
        indices: (n) int64.

    Returns:
        ((n, ...), input).

    Raises:
        AssertionError: ``input`` has one axis; also ValueError and RuntimeError.
        IndexError: An index outside of ``input``; also ValueError and RuntimeError.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    _check_rows("index_first_axis_residual", input)
    try:
        return input[indices], input
    except IndexError as error:
        raise _outside("index_first_axis_residual", indices, len(input), -len(input)) from error


class IndexFirstAxis:
    """What :func:`index_first_axis` calls in flash-attn, where it is an autograd function."""

    apply = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    """The same for :func:`index_put_first_axis`."""

    apply = staticmethod(index_put_first_axis)


class IndexFirstAxisResidual:
    """The same for :func:`index_first_axis_residual`."""

    apply = staticmethod(index_first_axis_residual)


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> tuple[Any, Any, Any, int, Any]:
    """Packs the tokens that a mask has.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or integers, 1 where a token exists.
        unused_mask: (batch, seqlen), 1 where a token is kept without being in use.

    Returns:
        (hidden_states (total, ...), indices (total) of the rows that were kept, cu_seqlens (batch + 1) int32,
        max_seqlen, seqused (batch) int32 without unused tokens). ``max_seqlen`` makes the call wait for the device.

    Raises:
        AssertionError: ``hidden_states`` have two axes; also ValueError and RuntimeError.
        RuntimeError: Shapes that do not fit.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    seqlens = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return *_pack("unpad_input", hidden_states, kept, seqlens), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Any, attention_mask_in_length: Any
) -> tuple[Any, Any, Any, int]:
    """Packs batches in whose rows several short sequences stand one after the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen) integers: the lengths of the sequences of a row, then zeros.

    Returns:
        (hidden_states (total, ...), indices (total), cu_seqlens (sequences + 1) int32, max_seqlen).

    Raises:
        AssertionError: ``hidden_states`` have two axes; also ValueError and RuntimeError.
        RuntimeError: Shapes that do not fit.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    lengths = attention_mask_in_length
    columns = torch.arange(lengths.shape[-1], device=lengths.device)
    kept = columns < lengths.sum(-1, keepdim=True)
    return _pack("unpad_input_for_concatenated_sequences", hidden_states, kept, lengths[lengths != 0])


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """The opposite of :func:`unpad_input`: padding is 0.

    Args:
        hidden_states: (total, ...).
        indices: (total), what unpad_input gave.
        batch: Sequences.
        seqlen: Tokens of a sequence, with padding.

    Returns:
        (batch, seqlen, ...).

    Raises:
        AssertionError, IndexError, RuntimeError: As :func:`index_put_first_axis`.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    return _put("pad_input", hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _pack(function: str, hidden_states: Any, kept: Any, seqlens: Any) -> tuple[Any, Any, Any, int]:
    if hidden_states.ndim < 2:
        raise FlashAttnError(
            f'{function}: Error while processing rearrange-reduction pattern "b s ... -> (b s) ...": hidden_states '
            f"must have shape (batch, seqlen, ...), got {tuple(hidden_states.shape)}"
        )
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return _rows(function, hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(seqlens.max())


def _rows(function: str, rows: Any, indices: Any) -> Any:
    _check_rows(function, rows)
    check_rank(function, "indices", indices, "n")
    try:
        return rows.index_select(0, indices)
    except IndexError as error:
        raise _outside(function, indices, len(rows)) from error


def _check_rows(function: str, rows: Any) -> None:
    if rows.ndim < 2:
        raise FlashAttnAssertionError(f"{function}: rows must have two axes or more, got shape {tuple(rows.shape)}")


def _put(function: str, values: Any, indices: Any, count: int) -> Any:
    if indices.ndim != 1 or values.ndim < 2:
        raise FlashAttnAssertionError(
            f"{function}: indices must have one axis and values two or more, got shapes {tuple(indices.shape)} and "
            f"{tuple(values.shape)}"
        )
    if len(values) not in (1, len(indices)):
        raise FlashAttnError(
            f"{function}: shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing "
            f"result of shape {[len(indices), *values.shape[1:]]}"
        )
    try:
        return values.new_zeros(count, *values.shape[1:]).index_put((indices,), values)
    except IndexError as error:
        raise _outside(function, indices, count, -count) from error


def _outside(function: str, indices: Any, count: int, first: int = 0) -> FlashAttnIndexError:
    """For an index that is not from ``first`` to ``count`` - 1."""
    outside = indices[(indices < first) | (indices >= count)]
    if outside.numel() == 0 or indices.dtype == torch.bool or indices.is_floating_point():
        return FlashAttnIndexError(f"{function}: indices must be whole numbers, got {indices.dtype}")
    wrong = int(outside[0])
    return FlashAttnIndexError(f"{function}: index {wrong} is out of bounds for dimension 0 with size {count}")
