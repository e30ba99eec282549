"""Rows of numbers as rows of ggml's blocks, and back: arrays in the formats that :func:`flashport.append_kv` writes."""

from __future__ import annotations

from typing import Any

from flashport import _core
from flashport.torch import tracing
from flashport.typing import Array, BlockFormat, DTypeLike, StreamLike


def _torch_operators() -> Any:
    from flashport.torch import quantize

    return quantize


@_core.direct
def quantize_kv(x: Array, format: BlockFormat, *, out: Array | None = None, stream: StreamLike | None = None) -> Array:
    """Quantises rows to ggml's blocks, with the bits of its reference quantisers.

    A block that a NaN or an infinity goes into is NaN throughout.

    Args:
        x: (..., D) fp16, bf16 or fp32, any strides; D is a multiple of 32.
        format: "q8_0", "q4_0", "q4_1", "q5_0", "q5_1" or "iq4_nl".
        out: uint8, as ``x`` with D / 32 * 34, 18, 20, 22, 24 or 18 bytes in place of D, in the order of formats above;
            rows may have gaps, and begin at even addresses; written. Default: a new array like ``x``.
        stream: As in :func:`flashport.flash_decode`.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flashport.flash_decode`; nothing has been
            written.

    Source:
        common/host/kv/quantize_kv.cpp and common/device/kv/blocks.h.
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    quantised: Array = operations.quantize_kv(x, format, out, stream)
    return quantised


@_core.direct
def dequantize_kv(
    x: Array,
    format: BlockFormat,
    *,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    stream: StreamLike | None = None,
) -> Array:
    """The values of rows of ggml's blocks: in fp32 exactly what kernels read, in 16 bits that rounded once more.

    Args:
        x: (..., bytes of a row) uint8, whole blocks; rows may have gaps, and begin at even addresses.
        format: What ``x`` stores, as in :func:`quantize_kv`.
        dtype: Element type of a new result: "float32", "float16" or "bfloat16". Default: float32.
        out: fp16, bf16 or fp32, as ``x`` with the values of a row in place of its bytes, any strides; written. Default:
            a new array like ``x``.
        stream: As in :func:`flashport.flash_decode`.

    Returns:
        ``out``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flashport.flash_decode`; nothing has been
            written.

    Source:
        common/host/kv/quantize_kv.cpp and common/device/kv/blocks.h.
    """
    operations = _torch_operators() if tracing.is_compiling() else _core
    numbers: Array = operations.dequantize_kv(x, format, dtype, out, stream)
    return numbers
