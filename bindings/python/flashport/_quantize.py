"""Rows of numbers as rows of a quantised format, and back: the formats that :func:`flashport.append_kv` writes."""

from __future__ import annotations

from typing import Any

from flashport import _core
from flashport.torch import tracing
from flashport.typing import Array, DTypeLike, QuantisedFormat, StreamLike, SupportsDLPack


def _torch_operators() -> Any:
    from flashport.torch import quantize

    return quantize


@_core.direct
def quantize_kv(
    x: Array,
    format: QuantisedFormat,
    *,
    out: Array | None = None,
    scale: SupportsDLPack | None = None,
    stream: StreamLike | None = None,
) -> Array:
    """Quantises rows: to ggml's blocks with the bits of its reference quantisers, else with scales beside them.

    A block, or a group of values with one scale, that a NaN or an infinity goes into is NaN throughout.

    Args:
        x: (..., D) fp16, bf16 or fp32, any strides; in blocks and "int4" D is a multiple of 32.
        format: ggml's "q8_0", "q4_0", "q4_1", "q5_0", "q5_1" or "iq4_nl"; or "fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2",
            "int8" or "int4", which need ``scale``.
        out: Written; rows may have gaps. Blocks: uint8, as ``x`` with D / 32 * 34, 18, 20, 22, 24 or 18 bytes in place
            of D, in the order of formats above, at even addresses. fp8: of that type, as ``x``. "int8": int8, as ``x``.
            "int4": int8 with D / 2 in place of D, two values in each, the first in the low bits. Default: a new array
            like ``x``.
        scale: fp32 or fp16, of the shape of ``x`` without its last axis, or with a number of groups in place of D, each
            of 8 values or a multiple of it; written: the group's largest magnitude / 448, 240, 57344, 127 or 7, by
            format. LightLLM has groups of 8.
        stream: As in :func:`flashport.flash_decode`.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flashport.flash_decode`; nothing has been
            written.

    Source:
        common/host/kv/quantize_kv.cpp, common/device/kv/blocks.h and common/device/kv/scaled_rows.h.
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    quantised: Array = operations.quantize_kv(x, format, out, scale, stream)
    return quantised


@_core.direct
def dequantize_kv(
    x: Array,
    format: QuantisedFormat,
    *,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    scale: SupportsDLPack | None = None,
    stream: StreamLike | None = None,
) -> Array:
    """The values of quantised rows: in fp32 exactly what kernels read, in 16 bits that rounded once more.

    Args:
        x: What :func:`quantize_kv` gives.
        format: What ``x`` stores, as in :func:`quantize_kv`.
        dtype: Element type of a new result: "float32", "float16" or "bfloat16". Default: float32.
        out: fp16, bf16 or fp32, as ``x`` with the values of a row in place of its elements, any strides; written.
            Default: a new array like ``x``.
        scale: As of :func:`quantize_kv`; read.
        stream: As in :func:`flashport.flash_decode`.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flashport.flash_decode`; nothing has been
            written.

    Source:
        common/host/kv/quantize_kv.cpp, common/device/kv/blocks.h and common/device/kv/scaled_rows.h.
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    numbers: Array = operations.dequantize_kv(x, format, dtype, out, scale, stream)
    return numbers
