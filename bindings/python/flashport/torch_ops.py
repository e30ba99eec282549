"""torch.library operators of the decode family, with fake kernels, so that torch.compile(fullgraph=True) passes.

Importing this module imports torch and registers ``torch.ops.flashport.*``. The package does so by itself the first
time that torch.compile traces one of its functions. Operators that write in place declare what they write; the others
return new tensors. The functions below take the arguments of :mod:`flashport.decode` by position and pick one.
"""

from __future__ import annotations

from typing import Any

import torch

from flashport import _core

_KEPT = []  # an operator lives as long as its library object

_DECODE_INPUTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? seqlens, Tensor? block_table, Tensor? token_table, "
    "Tensor? request_index, Tensor? kv_indptr, Tensor? kv_indices, Tensor? kv_last_page_len, str kv_layout, "
    "Tensor? cu_seqlens_q, SymInt? max_q_len, float? softmax_scale, SymInt window_left, SymInt window_right, "
    "float softcap, Tensor? alibi_slopes, Tensor? sinks, Tensor? tree_mask, Tensor? k_scale, Tensor? v_scale, "
    "SymInt? num_splits"
)


def register(name: str, schema: str, kernel: Any, fake: Any) -> None:
    """Makes torch.ops.flashport.<name>, on every device."""
    library = torch.library.Library("flashport", "FRAGMENT")
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashport::{name}", fake, lib=library)
    _KEPT.append(library)


def writes_nothing_else(*_: Any, **__: Any) -> None:
    """Fake kernel of the operators that write in place and return nothing."""


def _decode_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """From the operator's order to the module's: the window is a pair there."""
    return (*inputs[:14], (inputs[14], inputs[15]), *inputs[16:])


def _decode_kernel(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, return_lse = arguments
    result = _core.flash_decode(*_decode_inputs(tuple(inputs)), None, None, return_lse, None, None)
    return result if return_lse else (result, inputs[0].new_empty(0, dtype=torch.float32))


def _decode_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, v_cache, return_lse = arguments[0], arguments[2], arguments[-1]
    head_dim_v = v_cache.shape[-1]
    if v_cache.dtype == torch.uint8:
        head_dim_v = head_dim_v // 34 * 32
    lse_shape = q.shape[:-1] if return_lse else (0,)
    return q.new_empty((*q.shape[:-1], head_dim_v)), q.new_empty(lse_shape, dtype=torch.float32)


def _decode_out_kernel(*arguments: Any) -> None:
    *inputs, out, lse, workspace = arguments
    _core.flash_decode(*_decode_inputs(tuple(inputs)), out, lse, lse is not None, workspace, None)


def _merge_state_kernel(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, lse_base: float | None) -> Any:
    return _core.merge_state(o_a, lse_a, o_b, lse_b, lse_base, None, None, None)


def _merge_state_fake(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, lse_base: float | None) -> Any:
    return o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)


def _merge_state_out_kernel(*arguments: Any) -> None:
    _core.merge_state(*arguments, None)


def _merge_states_kernel(o: Any, lse: Any, lse_base: float | None) -> Any:
    return _core.merge_states(o, lse, lse_base, None, None, None)


def _merge_states_fake(o: Any, lse: Any, lse_base: float | None) -> Any:
    return o.new_empty(o.shape[1:]), lse.new_empty(lse.shape[1:])


def _merge_states_out_kernel(*arguments: Any) -> None:
    _core.merge_states(*arguments, None)


register("flash_decode", f"({_DECODE_INPUTS}, bool return_lse) -> (Tensor, Tensor)", _decode_kernel, _decode_fake)
register(
    "flash_decode_out",
    f"({_DECODE_INPUTS}, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace) -> ()",
    _decode_out_kernel,
    writes_nothing_else,
)
register(
    "flash_decode_stage1",
    "(Tensor q, Tensor k, Tensor v, Tensor Req_to_tokens, Tensor B_req_idx, Tensor B_Seqlen, SymInt max_len_in_batch, "
    "Tensor(a!) mid_out, Tensor(b!) mid_out_logsumexp, SymInt block_seq, float? sm_scale) -> ()",
    lambda *arguments: _core.flash_decode_stage1(*arguments, None),
    writes_nothing_else,
)
register(
    "flash_decode_stage2",
    "(Tensor mid_out, Tensor mid_out_logexpsum, Tensor B_Seqlen, Tensor(a!) Out, SymInt block_seq, "
    "Tensor(b!)? lse) -> ()",
    lambda *arguments: _core.flash_decode_stage2(*arguments, None),
    writes_nothing_else,
)
register(
    "append_kv",
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor positions, str kv_layout, Tensor? k_scale, "
    "Tensor? v_scale) -> ()",
    lambda *arguments: _core.append_kv(*arguments, None),
    writes_nothing_else,
)
register(
    "merge_state",
    "(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, float? lse_base) -> (Tensor, Tensor)",
    _merge_state_kernel,
    _merge_state_fake,
)
register(
    "merge_state_out",
    "(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, float? lse_base, Tensor(a!) out, Tensor(b!) out_lse) -> ()",
    _merge_state_out_kernel,
    writes_nothing_else,
)
register(
    "merge_states",
    "(Tensor o, Tensor lse, float? lse_base) -> (Tensor, Tensor)",
    _merge_states_kernel,
    _merge_states_fake,
)
register(
    "merge_states_out",
    "(Tensor o, Tensor lse, float? lse_base, Tensor(a!) out, Tensor(b!) out_lse) -> ()",
    _merge_states_out_kernel,
    writes_nothing_else,
)

_ops = torch.ops.flashport


def flash_decode(*arguments: Any) -> Any:
    """As :func:`flashport.flash_decode`, with its arguments but ``stream`` by position."""
    *inputs, out, lse, return_lse, workspace = arguments
    inputs = (*inputs[:14], *inputs[14], *inputs[15:])
    if out is None and lse is None and workspace is None:
        result = _ops.flash_decode(*inputs, return_lse)
        return result if return_lse else result[0]
    q, v_cache = inputs[0], inputs[2]
    new_out, new_lse = _decode_fake(q, None, v_cache, return_lse)
    out = new_out if out is None else out
    lse = new_lse if lse is None and return_lse else lse
    _ops.flash_decode_out(*inputs, out, lse, workspace)
    return out if lse is None else (out, lse)


def flash_decode_stage1(*arguments: Any) -> None:
    """As :func:`flashport.flash_decode_stage1`."""
    _ops.flash_decode_stage1(*arguments)


def flash_decode_stage2(*arguments: Any) -> None:
    """As :func:`flashport.flash_decode_stage2`."""
    _ops.flash_decode_stage2(*arguments)


def append_kv(*arguments: Any) -> None:
    """As :func:`flashport.append_kv`."""
    _ops.append_kv(*arguments)


def merge_state(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, lse_base: Any, out: Any, out_lse: Any) -> Any:
    """As :func:`flashport.merge_state`."""
    if out is None and out_lse is None:
        return _ops.merge_state(o_a, lse_a, o_b, lse_b, lse_base)
    out = torch.empty_like(o_a) if out is None else out
    out_lse = torch.empty_like(lse_a) if out_lse is None else out_lse
    _ops.merge_state_out(o_a, lse_a, o_b, lse_b, lse_base, out, out_lse)
    return out, out_lse


def merge_states(o: Any, lse: Any, lse_base: Any, out: Any, out_lse: Any) -> Any:
    """As :func:`flashport.merge_states`."""
    if out is None and out_lse is None:
        return _ops.merge_states(o, lse, lse_base)
    out = o.new_empty(o.shape[1:]) if out is None else out
    out_lse = lse.new_empty(lse.shape[1:]) if out_lse is None else out_lse
    _ops.merge_states_out(o, lse, lse_base, out, out_lse)
    return out, out_lse
