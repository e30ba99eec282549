"""torch.library operators of quantize_kv and dequantize_kv, with fake kernels; :mod:`.decode` has decode's.

The functions below take the arguments of :mod:`flashport` by position and pick an operator.
"""

from __future__ import annotations

from typing import Any

import torch

from flashport import _core
from flashport.torch.library import register, writes_nothing_else

_BLOCKS = _core.kv_format_blocks()
_CARRIERS = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.int8,
}


def _quantize_kernel(x: Any, format: str) -> torch.Tensor:
    return _core.run_kernel("quantize_kv", x, format, None, None, None)


def _quantize_fake(x: Any, format: str) -> torch.Tensor:
    values, elements = _BLOCKS.get(format, (1, 1))  # of another name the kernel says so
    return x.new_empty((*x.shape[:-1], x.shape[-1] // values * elements), dtype=_CARRIERS.get(format, torch.uint8))


def _dequantize_kernel(x: Any, format: str, dtype: str | None, scale: Any) -> torch.Tensor:
    return _core.run_kernel("dequantize_kv", x, format, dtype, None, scale, None)


def _dequantize_fake(x: Any, format: str, dtype: str | None, scale: Any) -> torch.Tensor:
    values, elements = _BLOCKS.get(format, (1, 1))
    kinds = {"float16": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
    return x.new_empty((*x.shape[:-1], x.shape[-1] // elements * values), dtype=kinds.get(dtype, torch.float32))


def _quantize_out_kernel(x: Any, format: str, out: Any, scale: Any) -> None:
    _core.run_kernel("quantize_kv", x, format, out, scale, None)


def _dequantize_out_kernel(x: Any, format: str, out: Any, scale: Any) -> None:
    _core.run_kernel("dequantize_kv", x, format, None, out, scale, None)


_quantize_kv = register("quantize_kv", "(Tensor x, str format) -> Tensor", _quantize_fake, _quantize_kernel)
_quantize_kv_out = register(
    "quantize_kv_out",
    "(Tensor x, str format, Tensor(a!) out, Tensor(b!)? scale) -> ()",
    writes_nothing_else,
    _quantize_out_kernel,
)
_dequantize_kv = register(
    "dequantize_kv", "(Tensor x, str format, str? dtype, Tensor? scale) -> Tensor", _dequantize_fake, _dequantize_kernel
)
_dequantize_kv_out = register(
    "dequantize_kv_out",
    "(Tensor x, str format, Tensor(a!) out, Tensor? scale) -> ()",
    writes_nothing_else,
    _dequantize_out_kernel,
)


def quantize_kv(x: Any, format: Any, out: Any, scale: Any, stream: Any) -> Any:
    """As :func:`flashport.quantize_kv`, with its arguments by position."""
    if out is None and scale is None:
        return _quantize_kv(stream, x, format)
    out = _quantize_fake(x, format) if out is None else out
    _quantize_kv_out(stream, x, format, out, scale)
    return out


def dequantize_kv(x: Any, format: Any, dtype: Any, out: Any, scale: Any, stream: Any) -> Any:
    """As :func:`flashport.dequantize_kv`."""
    if out is None:
        name = dtype if dtype is None or isinstance(dtype, str) else str(dtype).removeprefix("torch.")
        return _dequantize_kv(stream, x, format, name, scale)
    if dtype is not None:
        raise ValueError("dequantize_kv: dtype must be None where out is given, which has its own")
    _dequantize_kv_out(stream, x, format, out, scale)
    return out
