"""torch.library operators of decode over segments, with fake kernels; :mod:`.decode` has those of one cache.

The functions below take the arguments of :mod:`flashport` by position and pick an operator. An operator has the fields
of all segments as lists, one for each field; "" stands for a format that is not given.
"""

from __future__ import annotations

from typing import Any

import torch

from flashport import _core
from flashport.torch.library import check_boolean, check_window, register, writes_nothing_else

_COMMON = (
    "Tensor? mask_slopes, Tensor? cu_seqlens_q, SymInt? max_q_len, float? softmax_scale, SymInt window_left, "
    "SymInt window_right, float softcap, Tensor? alibi_slopes, Tensor? sinks, bool by_segment"
)
_WINDOW = 4  # its place among them
_SEGMENTS = (
    "Tensor q, Tensor[] k, Tensor[] v, Tensor?[] seqlens, str[] k_format, str[] v_format, Tensor?[] block_table, "
    "Tensor?[] token_table, Tensor?[] request_index, Tensor?[] kv_indptr, Tensor?[] kv_indices, str[] kv_layout, "
    "Tensor?[] k_scale, Tensor?[] v_scale, Tensor? mask"
)
_FIELDS = _SEGMENTS.count("[]")
_FORMATS = (3, 4)  # places of the formats among a segment's fields
_MIXED = (
    "Tensor q, Tensor k_hot, Tensor v_hot, Tensor? mask, Tensor? k_quant, Tensor? v_quant, Tensor? hot_seqlens, "
    "Tensor? quant_seqlens, str? k_quant_format, str? v_quant_format, Tensor? k_quant_scale, Tensor? v_quant_scale, "
    "str kv_layout"
)
_RESULTS = "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace"
_OF_SEGMENTS, _OF_MIXED = _SEGMENTS.count(",") + 1, _MIXED.count(",") + 1  # arguments before the common ones
_BLOCKS = _core.kv_format_blocks()


def _with_pair(inputs: Any, before: int) -> tuple[Any, ...]:
    """From the operator's order to the module's: the window is a pair there."""
    at = before + _WINDOW
    return (*inputs[:at], (inputs[at], inputs[at + 1]), *inputs[at + 2 :])


def _segments_inputs(inputs: Any) -> tuple[Any, ...]:
    """From the operator's arguments to the module's, where segments are tuples."""
    inputs = _with_pair(inputs, _OF_SEGMENTS)
    fields = [list(x) for x in inputs[1 : 1 + _FIELDS]]
    for place in _FORMATS:
        fields[place] = [x or None for x in fields[place]]
    return (inputs[0], list(zip(*fields, strict=True)), *inputs[1 + _FIELDS :])


def _new_results(q: Any, v: Any, v_format: str | None, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values, elements = _BLOCKS.get(v_format, (1, 1))  # of another name the kernel says so
    head_dim_v = v.shape[-1] // elements * values
    lse_shape = q.shape[:-1] if return_lse else (0,)
    return q.new_empty((*q.shape[:-1], head_dim_v)), q.new_empty(lse_shape, dtype=torch.float32)


def _segments_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_results(arguments[0], arguments[2][0], arguments[5][0], arguments[-1])


def _mixed_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _new_results(arguments[0], arguments[2], None, arguments[-1])


def _run(name: str, inputs: tuple[Any, ...], return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    result = _core.run_kernel(name, *inputs, None, None, return_lse, None, None)
    return result if return_lse else (result, inputs[0].new_empty(0, dtype=torch.float32))


def _segments_kernel(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, return_lse = arguments
    return _run("flash_decode_segments", _segments_inputs(inputs), return_lse)


def _segments_out_kernel(*arguments: Any) -> None:
    *inputs, out, lse, workspace = arguments
    inputs = _segments_inputs(inputs)
    _core.run_kernel("flash_decode_segments", *inputs, out, lse, lse is not None, workspace, None)


def _mixed_kernel(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, return_lse = arguments
    return _run("flash_decode_mixed", _with_pair(inputs, _OF_MIXED), return_lse)


def _mixed_out_kernel(*arguments: Any) -> None:
    *inputs, out, lse, workspace = arguments
    inputs = _with_pair(inputs, _OF_MIXED)
    _core.run_kernel("flash_decode_mixed", *inputs, out, lse, lse is not None, workspace, None)


_flash_decode_segments = register(
    "flash_decode_segments",
    f"({_SEGMENTS}, {_COMMON}, bool return_lse) -> (Tensor, Tensor)",
    _segments_fake,
    _segments_kernel,
)
_flash_decode_segments_out = register(
    "flash_decode_segments_out", f"({_SEGMENTS}, {_COMMON}, {_RESULTS}) -> ()", writes_nothing_else,
    _segments_out_kernel,
)  # fmt: skip
_flash_decode_mixed = register(
    "flash_decode_mixed",
    f"({_MIXED}, {_COMMON}, bool return_lse) -> (Tensor, Tensor)",
    _mixed_fake,
    _mixed_kernel,
)
_flash_decode_mixed_out = register(
    "flash_decode_mixed_out", f"({_MIXED}, {_COMMON}, {_RESULTS}) -> ()", writes_nothing_else, _mixed_out_kernel
)


def _attend(name: str, new: Any, into: Any, fake: Any, before: int, arguments: Any) -> Any:
    *inputs, out, lse, return_lse, workspace, stream = arguments
    at = before + _WINDOW
    check_window(name, inputs[at])
    inputs = (*inputs[:at], *inputs[at], *inputs[at + 1 :])
    if out is None and lse is None and workspace is None:
        result = new(stream, *inputs, return_lse)
        return result if return_lse else result[0]
    check_boolean(name, "return_lse", return_lse)
    new_out, new_lse = fake(*inputs, return_lse)
    out = new_out if out is None else out
    lse = new_lse if lse is None and return_lse else lse
    into(stream, *inputs, out, lse, workspace)
    return out if lse is None else (out, lse)


def flash_decode_segments(q: Any, segments: Any, *arguments: Any) -> Any:
    """As :func:`flashport.flash_decode_segments`, with its arguments by position."""
    name = "flash_decode_segments"
    if not isinstance(segments, (list, tuple)):  # torch 2.6 traces no union of types
        raise TypeError(f"{name}: segments must be a list of KvSegment, got {type(segments).__name__}")
    for place, segment in enumerate(segments):
        if not isinstance(segment, tuple) or len(segment) != _FIELDS:
            raise TypeError(f"{name}: segments must be a list of KvSegment, got {type(segment).__name__} at {place}")
    if not segments:
        raise ValueError(f"{name}: segments must be 1 to 4, got 0")
    fields = [list(x) for x in zip(*segments, strict=True)]
    for place in _FORMATS:
        fields[place] = [x or "" for x in fields[place]]
    new, into = _flash_decode_segments, _flash_decode_segments_out
    return _attend(name, new, into, _segments_fake, _OF_SEGMENTS, (q, *fields, *arguments))


def flash_decode_mixed(*arguments: Any) -> Any:
    """As :func:`flashport.flash_decode_mixed`."""
    new, into = _flash_decode_mixed, _flash_decode_mixed_out
    return _attend("flash_decode_mixed", new, into, _mixed_fake, _OF_MIXED, arguments)
