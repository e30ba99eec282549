"""torch.library operators of quantize_kv and dequantize_kv, with fake kernels; :mod:`.decode` has decode's.

The functions below take the arguments of :mod:`flashport` by position and pick an operator.
"""

from __future__ import annotations

from typing import Any

import torch

from flashport import _core
from flashport.torch.library import register, writes_nothing_else

_BLOCKS = _core.kv_format_blocks()


def _quantize_kernel(x: Any, format: str) -> torch.Tensor:
    return _core.run_kernel("quantize_kv", x, format, None, None)


def _quantize_fake(x: Any, format: str) -> torch.Tensor:
    values, elements = _BLOCKS.get(format, (1, 1))  # of another name the kernel says so
    return x.new_empty((*x.shape[:-1], x.shape[-1] // values * elements), dtype=torch.uint8)


def _dequantize_kernel(x: Any, format: str, dtype: str | None) -> torch.Tensor:
    return _core.run_kernel("dequantize_kv", x, format, dtype, None, None)


def _dequantize_fake(x: Any, format: str, dtype: str | None) -> torch.Tensor:
    values, elements = _BLOCKS.get(format, (1, 1))
    kinds = {"float16": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
    return x.new_empty((*x.shape[:-1], x.shape[-1] // elements * values), dtype=kinds.get(dtype, torch.float32))


def _quantize_out_kernel(x: Any, format: str, out: Any) -> None:
    _core.run_kernel("quantize_kv", x, format, out, None)


def _dequantize_out_kernel(x: Any, format: str, out: Any) -> None:
    _core.run_kernel("dequantize_kv", x, format, None, out, None)


_quantize_kv = register("quantize_kv", "(Tensor x, str format) -> Tensor", _quantize_fake, _quantize_kernel)
_quantize_kv_out = register(
    "quantize_kv_out", "(Tensor x, str format, Tensor(a!) out) -> ()", writes_nothing_else, _quantize_out_kernel
)
_dequantize_kv = register(
    "dequantize_kv", "(Tensor x, str format, str? dtype) -> Tensor", _dequantize_fake, _dequantize_kernel
)
_dequantize_kv_out = register(
    "dequantize_kv_out", "(Tensor x, str format, Tensor(a!) out) -> ()", writes_nothing_else, _dequantize_out_kernel
)


def quantize_kv(x: Any, format: Any, out: Any, stream: Any) -> Any:
    """As :func:`flashport.quantize_kv`, with its arguments by position."""
    if out is None:
        return _quantize_kv(stream, x, format)
    _quantize_kv_out(stream, x, format, out)
    return out


def dequantize_kv(x: Any, format: Any, dtype: Any, out: Any, stream: Any) -> Any:
    """As :func:`flashport.dequantize_kv`."""
    if out is None:
        name = dtype if dtype is None or isinstance(dtype, str) else str(dtype).removeprefix("torch.")
        return _dequantize_kv(stream, x, format, name)
    if dtype is not None:
        raise ValueError("dequantize_kv: dtype must be None where out is given, which has its own")
    _dequantize_kv_out(stream, x, format, out)
    return out
