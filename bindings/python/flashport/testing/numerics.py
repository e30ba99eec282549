"""Element formats as NumPy bit patterns: encode and decode of bf16, fp8 e4m3 and q8_0, which NumPy does not have.

An encoded array has the type that carries the bits (uint16, uint8, or the plain type); :data:`CARRIER` and
:data:`DTYPE` name it and the element type that the library sees.
"""

from __future__ import annotations

import numpy as np

# Format -> NumPy type of the bits, and the library's element type.
CARRIER = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": np.uint16,
    "fp8_e4m3": np.uint8,
    "fp8_e4m3fnuz": np.uint8,
    "q8_0": np.uint8,
}
DTYPE = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "q8_0": "uint8",
}
BLOCK_VALUES = 32  # of q8_0: one fp16 scale, then so many signed bytes
BLOCK_BYTES = 34


def row_extent(head_dim: int, kv: str) -> int:
    """Elements of the carrier that one row of ``head_dim`` values takes."""
    return head_dim // BLOCK_VALUES * BLOCK_BYTES if kv == "q8_0" else head_dim


def row_bytes(head_dim: int, kv: str) -> int:
    """Bytes of one row of ``head_dim`` values."""
    return row_extent(head_dim, kv) * np.dtype(CARRIER[kv]).itemsize


def encode(values: np.ndarray, kv: str) -> np.ndarray:
    """fp32 values, rounded to nearest even, as bits; q8_0 widens the last axis by two bytes a block."""
    values = np.ascontiguousarray(values, np.float32)
    if kv == "fp32":
        return values
    if kv == "fp16":
        return values.astype(np.float16)
    if kv == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if kv == "q8_0":
        return _encode_q8_0(values)
    middles = _FP8_MIDDLES[kv]
    magnitude = np.abs(values)
    code = np.searchsorted(middles, magnitude, side="left")
    tied = (code < len(middles)) & (middles[np.minimum(code, len(middles) - 1)] == magnitude)
    code = code + (tied & (code % 2 == 1))
    sign = np.signbit(values) & ((code > 0) | (kv == "fp8_e4m3"))  # FNUZ has one zero
    return (code | (sign.astype(np.int64) << 7)).astype(np.uint8)


def decode(bits: np.ndarray, kv: str) -> np.ndarray:
    """The fp32 values of encoded bits."""
    if kv in ("fp32", "fp16"):
        return bits.astype(np.float32)
    if kv == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if kv == "q8_0":
        return _decode_q8_0(bits)
    return _fp8_values(kv)[bits]


def rounded(values: np.ndarray, kv: str) -> np.ndarray:
    """fp32 values rounded to a format and back."""
    return decode(encode(values, kv), kv)


def nan_bits(shape: tuple[int, ...], kv: str) -> np.ndarray:
    """An encoded array that is NaN throughout."""
    if kv in ("fp32", "fp16"):
        return np.full(shape, np.nan, CARRIER[kv])
    # bf16 0xffff; e4m3 0xff and FNUZ 0x80 are NaN; 0xff bytes give q8_0 a NaN scale.
    fill = {"bf16": 0xFFFF, "fp8_e4m3": 0xFF, "fp8_e4m3fnuz": 0x80, "q8_0": 0xFF}[kv]
    return np.full(shape, fill, CARRIER[kv])


def _encode_q8_0(values: np.ndarray) -> np.ndarray:
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_VALUES, BLOCK_VALUES)
    scale = (np.abs(blocks).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    inverse = np.divide(1, scale.astype(np.float32), out=np.zeros(scale.shape, np.float32), where=scale != 0)
    quants = np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int8)
    rows = np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], axis=-1)
    return rows.reshape(*values.shape[:-1], row_extent(values.shape[-1], "q8_0"))


def _decode_q8_0(bits: np.ndarray) -> np.ndarray:
    count = bits.shape[-1] // BLOCK_BYTES
    blocks = np.ascontiguousarray(bits).reshape(*bits.shape[:-1], count, BLOCK_BYTES)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    quants = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return (quants * scale).reshape(*bits.shape[:-1], count * BLOCK_VALUES).astype(np.float32)


def _fp8_values(kv: str) -> np.ndarray:
    """The value of each of the 256 codes."""
    code = np.arange(256)
    bias = 7 if kv == "fp8_e4m3" else 8
    exponent, fraction = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, fraction * 2.0 ** (1 - bias - 3), (8 + fraction) * 2.0 ** (exponent - bias - 3))
    values = np.where(code >= 128, -magnitude, magnitude)
    values[[0x7F, 0xFF] if kv == "fp8_e4m3" else [0x80]] = np.nan
    return values.astype(np.float32)


def _fp8_middles(kv: str) -> np.ndarray:
    """Halfway points between neighbouring non-negative values."""
    positive = _fp8_values(kv)[:128]
    positive = positive[np.isfinite(positive)]
    return (positive[:-1] + positive[1:]) / 2


_FP8_MIDDLES = {kv: _fp8_middles(kv) for kv in ("fp8_e4m3", "fp8_e4m3fnuz")}
