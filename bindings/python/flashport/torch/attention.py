"""torch.library operators of attention, with fake kernels; :mod:`flashport.torch.decode` has decode's.

While torch compiles, traces or transforms a program, the functions below stand in for those of the same names in the
compiled half and take the same arguments by position. Operators that write in place declare what they write; the others
return new tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from flashport import _core
from flashport.torch.library import check_boolean, check_number, check_window, register, writes_nothing_else

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, "
    "Tensor? token_table, Tensor? request_index, Tensor? kv_indptr, Tensor? kv_indices, Tensor? kv_last_page_len, "
    "str kv_layout, Tensor? k_new, Tensor? v_new, Tensor? cu_seqlens_k_new, Tensor? rotary_cos, Tensor? rotary_sin, "
    "bool rotary_interleaved, float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, "
    "float softcap, Tensor? alibi_slopes, Tensor? sinks, Tensor? bias, float dropout_p, Tensor? rng_state, "
    "Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, str? k_format, str? v_format, SymInt? num_splits"
)
_NAMES = [one.split()[-1] for one in _INPUTS.split(", ")]
_WINDOW, _V_FORMAT, _K_NEW = _NAMES.index("window_left"), _NAMES.index("v_format"), _NAMES.index("k_new")
# Where there are new keys, the call writes to its cache.
_APPENDING_INPUTS = _INPUTS.replace("Tensor k,", "Tensor(d!) k,").replace("Tensor v,", "Tensor(e!) v,")
_BLOCKS = _core.kv_format_blocks()


def _inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """From the operator's order to the module's: the window is a pair there."""
    return (*inputs[:_WINDOW], (inputs[_WINDOW], inputs[_WINDOW + 1]), *inputs[_WINDOW + 2 :])


def _kernel(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, return_lse = arguments
    result = _core.run_kernel("attention", *_inputs(tuple(inputs)), None, None, return_lse, None, None)
    return result if return_lse else (result, inputs[0].new_empty(0, dtype=torch.float32))


def _fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, v, packed, return_lse = arguments[0], arguments[2], arguments[3] is not None, arguments[-1]
    *batch, tokens, heads, _ = q.shape
    lse_shape = (0,) if not return_lse else (heads, tokens) if packed else (*batch, heads, tokens)
    values, elements = _BLOCKS.get(arguments[_V_FORMAT], (1, 1))  # of another name the kernel says so
    dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
    out = q.new_empty((*q.shape[:-1], v.shape[-1] // elements * values), dtype=dtype)
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _out_kernel(*arguments: Any) -> None:
    *inputs, out, lse, workspace = arguments
    _core.run_kernel("attention", *_inputs(tuple(inputs)), out, lse, lse is not None, workspace, None)


def _mask_kernel(shape: Any, rng_state: Any, dropout_p: float) -> torch.Tensor:
    return _core.run_kernel("dropout_mask", shape, rng_state, dropout_p, None, None)


def _mask_fake(shape: Any, rng_state: Any, dropout_p: float) -> torch.Tensor:
    return rng_state.new_empty(shape, dtype=torch.uint8)


def _mask_out_kernel(shape: Any, rng_state: Any, dropout_p: float, mask: Any) -> None:
    _core.run_kernel("dropout_mask", shape, rng_state, dropout_p, mask, None)


_attention = register("attention", f"({_INPUTS}, bool return_lse) -> (Tensor, Tensor)", _fake, _kernel)
_attention_out = register(
    "attention_out",
    f"({_INPUTS}, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace) -> ()",
    writes_nothing_else,
    _out_kernel,
)
_attention_append = register(
    "attention_append_out",
    f"({_APPENDING_INPUTS}, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace) -> ()",
    writes_nothing_else,
    _out_kernel,
    function="attention",
)
_dropout_mask = register(
    "dropout_mask", "(SymInt[] shape, Tensor rng_state, float dropout_p) -> Tensor", _mask_fake, _mask_kernel
)
_dropout_mask_out = register(
    "dropout_mask_out",
    "(SymInt[] shape, Tensor rng_state, float dropout_p, Tensor(a!) mask) -> ()",
    writes_nothing_else,
    _mask_out_kernel,
)


def attention(*arguments: Any) -> Any:
    """As :func:`flashport.attention`, with its arguments by position."""
    *inputs, out, lse, return_lse, workspace, stream = arguments
    check_window("attention", inputs[_WINDOW])
    inputs = [*inputs[:_WINDOW], *inputs[_WINDOW], *inputs[_WINDOW + 1 :]]
    appends = inputs[_K_NEW] is not None
    if out is None and lse is None and workspace is None and not appends:
        result = _attention(stream, *inputs, return_lse)
        return result if return_lse else result[0]
    check_boolean("attention", "return_lse", return_lse)
    new_out, new_lse = _fake(*inputs, return_lse)
    out = new_out if out is None else out
    lse = new_lse if lse is None and return_lse else lse
    (_attention_append if appends else _attention_out)(stream, *inputs, out, lse, workspace)
    return out if lse is None else (out, lse)


def dropout_mask(shape: Any, rng_state: Any, dropout_p: Any, mask: Any, stream: Any) -> Any:
    """As :func:`flashport.dropout_mask`."""
    check_number("dropout_mask", "dropout_p", dropout_p, "a number")
    if mask is None:
        return _dropout_mask(stream, shape, rng_state, dropout_p)
    _dropout_mask_out(stream, shape, rng_state, dropout_p, mask)
    return mask
