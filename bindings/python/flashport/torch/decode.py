"""torch.library operators of the decode family, with fake kernels, so that torch.compile(fullgraph=True) passes.

Importing this module imports torch and registers ``torch.ops.flashport.*``. The package does so by itself the first
time that torch compiles, traces or transforms one of its functions. Operators that write in place declare what they
write; the others return new tensors. The functions below take the arguments of :mod:`flashport.decode` by position and
pick one.
"""

from __future__ import annotations

from typing import Any

import torch

from flashport import _core
from flashport.torch.library import check_boolean, check_window, register, writes_nothing_else

_DECODE_INPUTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? seqlens, Tensor? block_table, Tensor? token_table, "
    "Tensor? request_index, Tensor? kv_indptr, Tensor? kv_indices, Tensor? kv_last_page_len, str kv_layout, "
    "Tensor? cu_seqlens_q, SymInt? max_q_len, float? softmax_scale, SymInt window_left, SymInt window_right, "
    "float softcap, Tensor? alibi_slopes, Tensor? sinks, Tensor? tree_mask, Tensor? k_scale, Tensor? v_scale, "
    "str? k_format, str? v_format, SymInt? num_splits"
)

_V_FORMAT = [one.split()[-1] for one in _DECODE_INPUTS.split(", ")].index("v_format")
_BLOCKS = _core.kv_format_blocks()


def _decode_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """From the operator's order to the module's: the window is a pair there."""
    return (*inputs[:14], (inputs[14], inputs[15]), *inputs[16:])


def _decode_kernel(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, return_lse = arguments
    inputs = _decode_inputs(tuple(inputs))
    result = _core.run_kernel("flash_decode", *inputs, None, None, return_lse, None, None)
    return result if return_lse else (result, inputs[0].new_empty(0, dtype=torch.float32))


def _decode_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, v_cache, v_format, return_lse = arguments[0], arguments[2], arguments[_V_FORMAT], arguments[-1]
    head_dim_v = v_cache.shape[-1]
    values, elements = _BLOCKS.get(v_format, (1, 1))  # of another name the kernel says so
    head_dim_v = head_dim_v // elements * values
    lse_shape = q.shape[:-1] if return_lse else (0,)
    return q.new_empty((*q.shape[:-1], head_dim_v)), q.new_empty(lse_shape, dtype=torch.float32)


def _decode_out_kernel(*arguments: Any) -> None:
    *inputs, out, lse, workspace = arguments
    _core.run_kernel("flash_decode", *_decode_inputs(tuple(inputs)), out, lse, lse is not None, workspace, None)


def _append_scaled_kernel(*arguments: Any) -> None:
    _core.run_kernel("append_kv", *arguments, None)


def _merge_state_kernel(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _core.run_kernel("merge_state", *arguments, None, None, None)


def _merge_state_fake(o_a: Any, lse_a: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)


def _merge_state_out_kernel(*arguments: Any) -> None:
    _core.run_kernel("merge_state", *arguments, None)


def _merge_states_kernel(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _core.run_kernel("merge_states", *arguments, None, None, None)


def _merge_states_fake(o: Any, lse: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return o.new_empty(o.shape[1:]), lse.new_empty(lse.shape[1:])


def _merge_states_out_kernel(*arguments: Any) -> None:
    _core.run_kernel("merge_states", *arguments, None)


_flash_decode = register(
    "flash_decode", f"({_DECODE_INPUTS}, bool return_lse) -> (Tensor, Tensor)", _decode_fake, _decode_kernel
)
_flash_decode_out = register(
    "flash_decode_out",
    f"({_DECODE_INPUTS}, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace) -> ()",
    writes_nothing_else,
    _decode_out_kernel,
)
_flash_decode_stage1 = register(
    "flash_decode_stage1",
    "(Tensor q, Tensor k, Tensor v, Tensor Req_to_tokens, Tensor B_req_idx, Tensor B_Seqlen, SymInt max_len_in_batch, "
    "Tensor(a!) mid_out, Tensor(b!) mid_out_logsumexp, SymInt block_seq, float? sm_scale, Tensor? k_scale, "
    "Tensor? v_scale, str? k_format, str? v_format) -> ()",
    writes_nothing_else,
    no_grad=True,
)
_flash_decode_stage2 = register(
    "flash_decode_stage2",
    "(Tensor mid_out, Tensor mid_out_logexpsum, Tensor B_Seqlen, Tensor(a!) Out, SymInt block_seq, "
    "Tensor(b!)? lse) -> ()",
    writes_nothing_else,
    no_grad=True,
)
_append_kv = register(
    "append_kv",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor positions, str kv_layout, Tensor? k_scale, "
    "Tensor? v_scale, str? k_format, str? v_format) -> ()",
    writes_nothing_else,
)
_append_kv_scaled = register(  # where a scale has the axes of a cache
    "append_kv_scaled",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor positions, str kv_layout, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, str? k_format, str? v_format) -> ()",
    writes_nothing_else,
    _append_scaled_kernel,
)
_merge_state = register(
    "merge_state",
    "(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, float? lse_base) -> (Tensor, Tensor)",
    _merge_state_fake,
    _merge_state_kernel,
)
_merge_state_out = register(
    "merge_state_out",
    "(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, float? lse_base, Tensor(a!) out, Tensor(b!) out_lse) -> ()",
    writes_nothing_else,
    _merge_state_out_kernel,
)
_merge_states = register(
    "merge_states",
    "(Tensor o, Tensor lse, float? lse_base) -> (Tensor, Tensor)",
    _merge_states_fake,
    _merge_states_kernel,
)
_merge_states_out = register(
    "merge_states_out",
    "(Tensor o, Tensor lse, float? lse_base, Tensor(a!) out, Tensor(b!) out_lse) -> ()",
    writes_nothing_else,
    _merge_states_out_kernel,
)


def flash_decode(*arguments: Any) -> Any:
    """As :func:`flashport.flash_decode`, with its arguments by position."""
    *inputs, out, lse, return_lse, workspace, stream = arguments
    window = inputs[14]
    check_window("flash_decode", window)
    inputs = (*inputs[:14], *window, *inputs[15:])
    if out is None and lse is None and workspace is None:
        result = _flash_decode(stream, *inputs, return_lse)
        return result if return_lse else result[0]
    check_boolean("flash_decode", "return_lse", return_lse)
    new_out, new_lse = _decode_fake(*inputs, return_lse)
    out = new_out if out is None else out
    lse = new_lse if lse is None and return_lse else lse
    _flash_decode_out(stream, *inputs, out, lse, workspace)
    return out if lse is None else (out, lse)


def flash_decode_stage1(*arguments: Any) -> None:
    """As :func:`flashport.flash_decode_stage1`."""
    *inputs, stream = arguments
    _flash_decode_stage1(stream, *inputs)


def flash_decode_stage2(*arguments: Any) -> None:
    """As :func:`flashport.flash_decode_stage2`."""
    *inputs, stream = arguments
    _flash_decode_stage2(stream, *inputs)


def append_kv(*arguments: Any) -> None:
    """As :func:`flashport.append_kv`."""
    *inputs, stream = arguments
    is_scaled = any(scale is not None and scale.dim() >= 2 for scale in inputs[6:8])
    (_append_kv_scaled if is_scaled else _append_kv)(stream, *inputs)


def merge_state(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, lse_base: Any, out: Any, out_lse: Any, stream: Any) -> Any:
    """As :func:`flashport.merge_state`."""
    if out is None and out_lse is None:
        return _merge_state(stream, o_a, lse_a, o_b, lse_b, lse_base)
    out = torch.empty_like(o_a) if out is None else out
    out_lse = torch.empty_like(lse_a) if out_lse is None else out_lse
    _merge_state_out(stream, o_a, lse_a, o_b, lse_b, lse_base, out, out_lse)
    return out, out_lse


def merge_states(o: Any, lse: Any, lse_base: Any, out: Any, out_lse: Any, stream: Any) -> Any:
    """As :func:`flashport.merge_states`."""
    if out is None and out_lse is None:
        return _merge_states(stream, o, lse, lse_base)
    out = o.new_empty(o.shape[1:]) if out is None else out
    out_lse = lse.new_empty(lse.shape[1:]) if out_lse is None else out_lse
    _merge_states_out(stream, o, lse, lse_base, out, out_lse)
    return out, out_lse
