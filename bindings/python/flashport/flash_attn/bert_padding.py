"""Batches with padding as packed sequences and back, under flash-attn's names, in operations of torch.

All have gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

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
        RuntimeError, IndexError: As torch's index_select.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """A tensor of zeros with ``values`` as some of its rows.

    Args:
        values: (n, ...).
        indices: (n) int64, each row once.
        first_axis_dim: Rows of the result.

    Returns:
        (first_axis_dim, ...).

    Raises:
        RuntimeError, IndexError: As torch's index_copy.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Any, indices: Any) -> tuple[Any, Any]:
    """Rows of ``input``, and ``input`` itself.

    Args:
        input: (rows, ...).
        indices: (n) int64.

    Returns:
        ((n, ...), input).

    Raises:
        RuntimeError, IndexError: As torch's index_select.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    return input.index_select(0, indices), input


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
        RuntimeError: As torch, where shapes do not fit.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    seqlens = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return *_pack(hidden_states, kept, seqlens), used


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
        RuntimeError: As torch, where shapes do not fit.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    lengths = attention_mask_in_length
    columns = torch.arange(lengths.shape[-1], device=lengths.device)
    return _pack(hidden_states, columns < lengths.sum(-1, keepdim=True), lengths[lengths != 0])


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
        RuntimeError, IndexError: As torch's index_copy.

    Source:
        bindings/python/flashport/flash_attn/bert_padding.py; as flash-attn 2.8.4's flash_attn/bert_padding.py.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _pack(hidden_states: Any, kept: Any, seqlens: Any) -> tuple[Any, Any, Any, int]:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(seqlens.max())
