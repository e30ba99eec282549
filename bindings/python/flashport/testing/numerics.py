"""Cache formats as NumPy bit patterns: encode and decode of bf16, fp8 and ggml's blocks, which NumPy lacks.

An encoded array has the type that carries the bits (uint16, uint8, or the plain type); :data:`CARRIER` and
:data:`DTYPE` name it and the element type that the library sees.
"""

from __future__ import annotations

import numpy as np

from flashport.testing import blocks

# Format -> NumPy type of the bits, and the library's element type.
CARRIER = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": np.uint16,
    "fp8_e4m3": np.uint8,
    "fp8_e4m3fnuz": np.uint8,
    "fp8_e5m2": np.uint8,
    **dict.fromkeys(blocks.BYTES, np.uint8),
}
DTYPE = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2": "float8_e5m2",
    **dict.fromkeys(blocks.BYTES, "uint8"),
}


BLOCK_VALUES = blocks.VALUES


def row_extent(head_dim: int, kv: str) -> int:
    """Elements of the carrier that one row of ``head_dim`` values takes."""
    return head_dim // blocks.VALUES * blocks.BYTES[kv] if kv in blocks.BYTES else head_dim


def row_bytes(head_dim: int, kv: str) -> int:
    """Bytes of one row of ``head_dim`` values."""
    return row_extent(head_dim, kv) * np.dtype(CARRIER[kv]).itemsize


def encode(values: np.ndarray, kv: str) -> np.ndarray:
    """fp32 values, rounded to nearest even, as bits; the last axis of blocks is their bytes."""
    values = np.ascontiguousarray(values, np.float32)
    if kv == "fp32":
        return values
    if kv == "fp16":
        return values.astype(np.float16)
    if kv == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if kv in blocks.BYTES:
        return blocks.encode(values, kv)
    middles = _FP8_MIDDLES[kv]
    magnitude = np.abs(values)
    code = np.searchsorted(middles, magnitude, side="left")
    tied = (code < len(middles)) & (middles[np.minimum(code, len(middles) - 1)] == magnitude)
    code = code + (tied & (code % 2 == 1))
    sign = np.signbit(values) & ((code > 0) | (kv != "fp8_e4m3fnuz"))  # which has one zero
    return (code | (sign.astype(np.int64) << 7)).astype(np.uint8)


def decode(bits: np.ndarray, kv: str) -> np.ndarray:
    """The fp32 values of encoded bits."""
    if kv in ("fp32", "fp16"):
        return bits.astype(np.float32)
    if kv == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if kv in blocks.BYTES:
        return blocks.decode(bits, kv)
    return _fp8_values(kv)[bits]


def rounded(values: np.ndarray, kv: str) -> np.ndarray:
    """fp32 values rounded to a format and back."""
    return decode(encode(values, kv), kv)


def nan_bits(shape: tuple[int, ...], kv: str) -> np.ndarray:
    """An encoded array that is NaN throughout."""
    if kv in ("fp32", "fp16"):
        return np.full(shape, np.nan, CARRIER[kv])
    # bf16 0xffff; e4m3 and e5m2 0xff and FNUZ 0x80 are NaN; 0xff bytes give blocks a NaN scale.
    fill = {"bf16": 0xFFFF, "fp8_e4m3fnuz": 0x80}.get(kv, 0xFF)
    return np.full(shape, fill, CARRIER[kv])


def _fp8_values(kv: str) -> np.ndarray:
    """The value of each of the 256 codes."""
    code = np.arange(256)
    bits, bias = {"fp8_e4m3": (3, 7), "fp8_e4m3fnuz": (3, 8), "fp8_e5m2": (2, 15)}[kv]  # of fractions, of exponents
    one = 1 << bits
    exponent, fraction = (code & 127) >> bits, code % one
    low = 2.0 ** (np.maximum(exponent, 1) - bias - bits)
    magnitude = (fraction + np.where(exponent == 0, 0, one)) * low
    values = np.where(code >= 128, -magnitude, magnitude)
    values[{"fp8_e4m3": [0x7F, 0xFF], "fp8_e4m3fnuz": [0x80]}.get(kv, [])] = np.nan
    if kv == "fp8_e5m2":  # as fp16, of which it is the first byte
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values.astype(np.float32)


def _fp8_middles(kv: str) -> np.ndarray:
    """Halfway points between neighbouring non-negative values."""
    positive = _fp8_values(kv)[:128]
    positive = positive[np.isfinite(positive)]
    return (positive[:-1] + positive[1:]) / 2


_FP8_MIDDLES = {kv: _fp8_middles(kv) for kv in ("fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2")}
