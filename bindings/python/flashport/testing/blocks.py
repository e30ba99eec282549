"""ggml's blocks of 32 values in NumPy, as its reference quantisers make them.

A block begins with a scale d in fp16, after which those with the smallest value of the block (q4_1, q5_1) have it in
fp16. q8_0 goes on with 32 signed bytes; the others with the codes' fifth bits (q5_0, q5_1) in a word of 32 bits and
with 16 bytes, of which byte i has the low bits of codes i and i + 16.
"""

from __future__ import annotations

import numpy as np

VALUES = 32
BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "iq4_nl": 18}
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def encode(values: np.ndarray, fmt: str) -> np.ndarray:
    """Rows (..., D) of fp32 as uint8 (..., D // 32 * BYTES[fmt])."""
    x = np.ascontiguousarray(values, np.float32).reshape(-1, VALUES)
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    with np.errstate(all="ignore"):  # scales overflow fp16
        if fmt == "q8_0":
            scale = np.abs(extreme) / np.float32(127)
            scaled = x * _inverse(scale)
            codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
            parts = [scale.astype(np.float16), codes]
        elif fmt == "iq4_nl":
            parts = _encode_iq4_nl(x, extreme)
        else:
            levels = 32 if fmt.startswith("q5") else 16
            if fmt.endswith("_1"):
                least = x.min(axis=1, keepdims=True)
                scale = (x.max(axis=1, keepdims=True) - least) / np.float32(levels - 1)
                codes = (x - least) * _inverse(scale) + np.float32(0.5)
                parts = [scale.astype(np.float16), least.astype(np.float16)]
            else:
                scale = extreme / np.float32(-levels // 2)
                codes = x * _inverse(scale) + np.float32(levels // 2 + 0.5)
                parts = [scale.astype(np.float16)]
            parts += _packed(np.minimum(codes, levels - 1).astype(np.uint8), levels)
    rows = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)
    return rows.reshape(*values.shape[:-1], values.shape[-1] // VALUES * BYTES[fmt])


def decode(bits: np.ndarray, fmt: str) -> np.ndarray:
    """The fp32 values of encoded rows."""
    count = bits.shape[-1] // BYTES[fmt]
    blocks = np.ascontiguousarray(bits).reshape(-1, BYTES[fmt])
    shared = 2 if fmt.endswith("_1") else 1
    scales = np.ascontiguousarray(blocks[:, : 2 * shared]).view(np.float16).astype(np.float32)
    rest = np.ascontiguousarray(blocks[:, 2 * shared :])
    with np.errstate(all="ignore"):  # scales may be NaN
        if fmt == "q8_0":
            values = scales * rest.view(np.int8)
        else:
            low = rest[:, -16:]
            codes = np.concatenate([low & 15, low >> 4], axis=1).astype(np.int32)
            if fmt.startswith("q5"):
                codes |= (rest[:, :4].view("<u4") >> np.arange(VALUES, dtype=np.uint32) & 1).astype(np.int32) << 4
            if fmt == "iq4_nl":
                values = scales * _IQ4_NL[codes]
            elif shared == 2:
                values = scales[:, :1] * codes.astype(np.float32) + scales[:, 1:]
            else:
                values = scales * (codes - (16 if fmt == "q5_0" else 8)).astype(np.float32)
    return values.reshape(*bits.shape[:-1], count * VALUES).astype(np.float32)


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _packed(codes: np.ndarray, levels: int) -> list[np.ndarray]:
    low = codes & 15
    parts = [low[:, :16] | low[:, 16:] << 4]
    if levels == 32:
        parts.insert(0, np.packbits(codes >> 4, axis=1, bitorder="little"))
    return parts


def _encode_iq4_nl(x: np.ndarray, extreme: np.ndarray) -> list[np.ndarray]:
    """The scale is the one of the least error for its codes, weighted by squares."""
    zero = np.abs(extreme) < np.float32(1e-15)
    scaled = np.where(zero, np.float32(0), np.float32(1) / (extreme / _IQ4_NL[0])) * x
    below = np.clip(np.searchsorted(_IQ4_NL, scaled, side="right") - 1, 0, 14)
    codes = np.where(zero, 8, below + (scaled - _IQ4_NL[below] >= _IQ4_NL[below + 1] - scaled)).astype(np.uint8)
    products, squares = np.zeros_like(extreme), np.zeros_like(extreme)
    for i in range(VALUES):  # the order of the sums
        q = _IQ4_NL[codes[:, i : i + 1]]
        weighted = x[:, i : i + 1] * x[:, i : i + 1] * q
        products += weighted * x[:, i : i + 1]
        squares += weighted * q
    scale = np.where(zero, np.float32(0), np.divide(products, squares, out=np.zeros_like(extreme), where=~zero))
    return [scale.astype(np.float16), *_packed(codes, 16)]
